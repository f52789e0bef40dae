"""Stores for barriers, ranks that come to them, and processes that write."""

from .places import port, server, soon_woken, together
from .writers import writers

__all__ = ["port", "server", "soon_woken", "together", "writers"]
