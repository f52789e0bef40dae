"""A region that rank 0 makes before the others come: they have only to map it.

For ranks that know each other to be on one machine. Each sees in the region itself who has mapped
it, so nobody needs to be told. Whoever cannot says so, and `_region` is asked, which tries more.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from ... import _faultpoints as faultpoints
from ... import native
from ...env import usable_cores
from ...errors import InvalidState
from .._engine import Engine
from .._roster import Member
from ._driver import OPTION, choose_driver
from ._region import make_region, watch_peers
from .shm import ShmEngine

if TYPE_CHECKING:
    from ...native import _engine

__all__ = ["RegionOffer"]


class RegionOffer:
    """One rank's part in a region that is offered."""

    def __init__(
        self, rank: int, members: Sequence[Member], crowd: int, options: dict[str, object]
    ) -> None:
        self._rank = rank
        self._members = members
        self._size = len(members)
        self._crowd = crowd
        self._driver = options.get(OPTION)
        self._native: _engine.Engine | None = None
        self._engine: ShmEngine | None = None

    def make(self) -> dict[str, Any] | None:
        """Make the region, in memory that has no name."""
        made = native.engine
        if made is None or self._size > made.MAX_RANKS:
            return None
        region = make_region("memfd", self._size)
        told = {"path": region.path, "token": str(region.token)}
        self._enter(region)
        return told

    def take(self, told: dict[str, Any]) -> None:
        """Map the region."""
        made = native.engine
        if made is None:
            raise InvalidState(native.why_missing)
        self._enter(made.Region.open(told["path"], int(told["token"]), self._size, made.Sizes()))

    def absent(self) -> list[int]:
        """List the ranks that have not mapped it yet."""
        assert self._native is not None, "it was made or taken"
        region = self._native.region
        return [rank for rank in range(self._size) if not region.present(rank)]

    def engine(self) -> Engine:
        """Return the engine; all ranks have theirs."""
        assert self._native is not None, "it was made or taken"
        assert self._engine is not None, "it was made or taken"
        self._native.region.unlink()
        return self._engine

    def _enter(self, region: _engine.Region) -> None:
        """Make the engine, and then leave a mark in the region, which the others wait for.

        The mark comes last: whoever sees it goes ahead, so nothing may fail here afterwards.
        """
        if faultpoints.armed:
            faultpoints.reach("form:mapped")
        assert native.engine is not None, "it has made the region"
        engine = native.engine.Engine(region, self._rank, usable_cores())
        watch_peers(engine, self._rank, self._members)
        cores = _cores_of([member.pid for member in self._members])
        # Others want the same cores: those of the larger group that these ranks come from.
        engine.share_cores(max(1, cores * self._size // self._crowd))
        driver = self._driver
        if driver is None and choose_driver(self._crowd, cores) == "caller":
            driver = "caller"
        self._native, self._engine = engine, ShmEngine(engine, self._rank, self._size, driver)
        engine.mark_present()


def _cores_of(pids: Sequence[int]) -> int:
    """Tell how many cores processes have between them; each alone may be kept to one of its own."""
    cores: set[int] = set()
    for pid in set(pids):
        with suppress(ProcessLookupError):  # whose end others will tell
            cores |= os.sched_getaffinity(pid)
    return min(len(cores), usable_cores(os.cpu_count()))
