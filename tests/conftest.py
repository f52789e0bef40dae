"""Ranks for every test."""

import os

from phalanx.testing.pytest_plugin import ranks, threads

__all__ = ["ranks", "threads"]

# For every connection to a TCPStore, torch asks a name server about the loopback address. Tests
# need none, and must not wait for a slow one.
os.environ.setdefault("RES_OPTIONS", "attempts:0")
