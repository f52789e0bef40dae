"""Stores for barriers, threads as ranks, and writer processes."""

from .barrier_tools import port, server, together
from .writers import writers

__all__ = ["port", "server", "together", "writers"]
