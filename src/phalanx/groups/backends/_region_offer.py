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

    def __init__(self, rank: int, size: int, crowd: int) -> None:
        self._rank = rank
        self._size = size
        self._crowd = crowd
        self._engine: _engine.Engine | None = None

    def make(self) -> dict[str, Any] | None:
        """Make the region, in memory that has no name."""
        made = native.engine
        if made is None or self._size > made.MAX_RANKS:
            return None
        try:
            region = make_region("memfd", self._size)
        except (RuntimeError, OSError):
            return None
        told = {"path": region.path, "token": str(region.token)}
        self._enter(region)
        return told

    def take(self, told: dict[str, Any]) -> str:
        """Map the region."""
        made = native.engine
        if made is None:
            return native.why_missing
        try:
            region = made.Region.open(told["path"], int(told["token"]), self._size, made.Sizes())
        except RuntimeError as error:
            return str(error)
        self._enter(region)
        return ""

    def absent(self) -> list[int]:
        """List the ranks that have not mapped it yet."""
        assert self._engine is not None, "it was made or taken"
        region = self._engine.region
        return [rank for rank in range(self._size) if not region.present(rank)]

    def engine(self, members: Sequence[Member], options: dict[str, object]) -> Engine:
        """Make the engine."""
        assert self._engine is not None, "it was made or taken"
        pids = [member.pid for member in members]
        watch_peers(self._engine, self._rank, pids)
        self._engine.region.unlink()
        cores = _cores_of(pids)
        # Others want the same cores: those of the larger group that these ranks come from.
        self._engine.share_cores(max(1, cores * self._size // self._crowd))
        driver = options.get(OPTION)
        if driver is None and choose_driver(self._crowd, cores) == "caller":
            driver = "caller"
        return ShmEngine(self._engine, self._rank, self._size, driver)

    def _enter(self, region: _engine.Region) -> None:
        """Leave a mark in the region; the others wait for it."""
        if faultpoints.armed:
            faultpoints.reach("form:mapped")
        assert native.engine is not None, "it has made the region"
        self._engine = native.engine.Engine(region, self._rank, usable_cores())


def _cores_of(pids: Sequence[int]) -> int:
    """Tell how many cores processes have between them; each alone may be kept to one of its own."""
    cores: set[int] = set()
    for pid in set(pids):
        with suppress(ProcessLookupError):  # whose end others will tell
            cores |= os.sched_getaffinity(pid)
    return min(len(cores), usable_cores(os.cpu_count()))
