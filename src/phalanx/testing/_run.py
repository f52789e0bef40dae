"""One run of a body on one rank: its context, its faults, and the deadline of the run.

Groups made by `RankContext.group` time out before the run does, so that their error, which says
more, comes first. They are shut down when the body returns and aborted when it raises.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from datetime import timedelta
from functools import cached_property
from types import TracebackType
from typing import TYPE_CHECKING, Any

from ..errors import InvalidArgument
from ._results import Outcome, Raised, RankResult, Returned, format_traceback
from .faults import Fault, arm_faults

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from ..groups import ProcessGroup


# A group gives up before its run does, so that its own error, which knows more, comes first.
_GROUP_TIMEOUT_SHARE = 0.8


class RankContext:
    """One rank of a run."""

    def __init__(
        self,
        rank: int,
        size: int,
        *,
        backend: str,
        timeout: float,
        connect: Callable[[], Store],
        generation: int | None = None,
    ) -> None:
        self.rank = rank
        """This rank's number in the run."""
        self.size = size
        """How many ranks take part."""
        self.backend = backend
        """The backend of `group` unless it is told another."""
        self.timeout = timedelta(seconds=timeout * _GROUP_TIMEOUT_SHARE)
        """The timeout of `group` unless it is told another."""
        self.generation = generation
        """Changes whenever a rank process is replaced; None where ranks are threads."""
        self.ended_at = 0.0
        """When the body ended."""
        self._connect = connect
        self._groups: list[ProcessGroup] = []

    def __repr__(self) -> str:
        return "<RankContext>"  # the same on every rank, so that equal failures look equal

    @cached_property
    def store(self) -> Store:
        """A store that the ranks of this run share, empty at its start."""
        return self._connect()

    def group(self, backend: str | None = None, **options: Any) -> ProcessGroup:
        """Form a group of all ranks of the run; it is closed when the body ends."""
        from .. import groups

        known = {"store": self.store, "rank": self.rank, "world_size": self.size}
        defaults = {"timeout": self.timeout, "device": "cpu", **known}
        return self.closing(groups.new_group(backend or self.backend, **{**defaults, **options}))

    def closing(self, group: ProcessGroup) -> ProcessGroup:
        """Close a group that was made in another way when the body ends."""
        self._groups.append(group)
        return group

    def abort(self) -> None:
        """Abort the groups, which ends whoever waits in one of them."""
        while self._groups:
            self._groups.pop().abort()

    def leave_open(self) -> None:
        """Do not close the groups made so far when the body ends."""
        self._groups.clear()

    def __enter__(self) -> RankContext:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.ended_at = time.monotonic()
        # Newest first, as they may be splits of older ones. After a failure nobody is waited for.
        try:
            while self._groups and error is None:
                self._groups.pop().shutdown()
        finally:
            self.abort()


def run_body(
    call: Callable[[RankContext], Any],
    context: RankContext,
    *,
    faults: Sequence[Fault],
) -> RankResult:
    """Run a body as the rank that `context` describes."""
    mine = [fault for fault in faults if fault.strikes(context.rank)]
    with arm_faults(mine) as injections:
        try:
            with context:
                outcome: Outcome = Returned(call(context))
        # Whatever ends a body, even sys.exit, is the end of its run and not of the pool's process.
        except BaseException as error:  # noqa: BLE001
            outcome = Raised(format_traceback(error))
    missed = [str(each.fault) for each in injections if not (each.struck or each.fault.optional)]
    return RankResult(outcome, ", ".join(missed) or None, when=context.ended_at)


class RunDeadline:
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


def ranks_that_may_die(
    faults: Collection[Fault], doomed: Collection[int], *, size: int
) -> set[int]:
    """Find the ranks that may die: by a fault, or because they have to."""
    check_faults(faults, size=size)
    if not set(doomed) <= set(range(size)):
        raise InvalidArgument(f"ranks are 0 to {size - 1}, but expect_dead is {sorted(doomed)}")
    final = [fault for fault in faults if fault.final]
    struck = {rank for rank in range(size) if any(fault.strikes(rank) for fault in final)}
    return struck.union(doomed)
