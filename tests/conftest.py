"""Ranks for every test."""

import os

import pytest
import torch

from phalanx.testing import RankPool
from phalanx.testing.pytest_plugin import threads, uneven_batches

__all__ = ["ranks", "threads", "uneven_batches"]

# For every connection to a TCPStore, torch asks a name server about the loopback address. Tests
# need none, and must not wait for a slow one.
os.environ.setdefault("RES_OPTIONS", "attempts:0")

torch.set_num_threads(1)  # as in rank processes: where ranks are threads, they share the machine

PRELOADED = ("phalanx.ddp", "torch._dynamo")
"""What the first optimizer or checkpoint of a process imports: 1,200 modules. In the template they
are imported once and not by every rank, and the ranks' garbage collector does not walk through
their objects after every test."""


@pytest.fixture(scope="session")
def ranks():
    """Four processes as ranks."""
    with RankPool(4, preload=PRELOADED) as pool:
        pool.start()  # while tests with threads run
        yield pool
