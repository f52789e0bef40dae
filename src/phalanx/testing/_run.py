"""The run of a body on one rank, and the patience with which its end is awaited."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

from ..errors import InvalidArgument
from ._context import RankContext
from ._injection import arm
from ._outcome import Outcome, Raised, Report, Returned, describe
from .faults import Fault

__all__ = ["Patience", "check_faults", "check_size", "mortal_ranks", "perform"]


def perform(
    call: Callable[[RankContext], Any],
    context: RankContext,
    *,
    faults: Sequence[Fault],
) -> Report:
    """Run a body as the rank that `context` describes."""
    mine = [fault for fault in faults if fault.strikes(context.rank)]
    with arm(mine) as injections:
        try:
            with context:
                outcome: Outcome = Returned(call(context))
        # Whatever ends a body, even sys.exit, is the end of its run and not of the pool's process.
        except BaseException as error:  # noqa: BLE001
            outcome = Raised(describe(error))
    missed = [str(each.fault) for each in injections if not (each.struck or each.fault.optional)]
    return Report(outcome, ", ".join(missed) or None, when=context.ended_at)


class Patience:
    """How long the ranks of a run are waited for: less once one of them has failed."""

    def __init__(self, timeout: float, linger: float) -> None:
        self._start = time.monotonic()
        self._deadline = self._start + timeout
        self._linger = linger

    def shorten(self) -> None:
        """Give the other ranks only a moment more."""
        self._deadline = min(self._deadline, time.monotonic() + self._linger)

    @property
    def spent(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._start

    @property
    def left(self) -> float:
        """Seconds that are left."""
        return max(0.0, self._deadline - time.monotonic())


def check_size(size: int, *, most: int | None = None) -> int:
    """Refuse a number of ranks that there cannot be."""
    if size < 1 or (most is not None and size > most):
        bound = "at least 1 rank" if most is None else f"1 to {most} ranks"
        raise InvalidArgument(f"there can be {bound}, not {size}")
    return size


def check_faults(faults: Collection[Fault], *, size: int) -> None:
    """Refuse faults that could never strike."""
    for fault in faults:
        if not any(fault.strikes(rank) for rank in range(size)):
            raise InvalidArgument(f"ranks are 0 to {size - 1}, but a fault is for {fault.rank}")


def mortal_ranks(faults: Collection[Fault], doomed: Collection[int], *, size: int) -> set[int]:
    """Find the ranks that may die: by a fault, or because they have to."""
    check_faults(faults, size=size)
    if not set(doomed) <= set(range(size)):
        raise InvalidArgument(f"ranks are 0 to {size - 1}, but expect_dead is {sorted(doomed)}")
    final = [fault for fault in faults if fault.final]
    struck = {rank for rank in range(size) if any(fault.strikes(rank) for fault in final)}
    return struck.union(doomed)
