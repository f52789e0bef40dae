"""Pytest fixtures: rank pools and uneven batches. Import them in a ``conftest.py``."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from . import RankPool, ThreadRanks, UnevenBatches
from . import uneven_batches as make_batches
from ._uneven_batches import PATTERNS

__all__ = ["ranks", "threads", "uneven_batches"]


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Four processes as ranks."""
    with RankPool(4) as pool:
        yield pool


@pytest.fixture(scope="session")
def threads() -> ThreadRanks:
    """Four threads as ranks."""
    return ThreadRanks(4)


@pytest.fixture(params=PATTERNS.values(), ids=list(PATTERNS))
def uneven_batches(request: pytest.FixtureRequest) -> UnevenBatches:
    """Batches for four ranks, parametrized over `PATTERNS`."""
    return make_batches(request.param)
