"""Stores for barriers, and ranks that come to them."""

from .places import port, server, soon_woken, together

__all__ = ["port", "server", "soon_woken", "together"]
