"""Fixtures with ranks for a whole session; import them in a ``conftest.py``."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from . import RankPool, ThreadRanks

__all__ = ["ranks", "threads"]


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Four processes as ranks."""
    with RankPool(4) as pool:
        yield pool


@pytest.fixture(scope="session")
def threads() -> ThreadRanks:
    """Four threads as ranks."""
    return ThreadRanks(4)
