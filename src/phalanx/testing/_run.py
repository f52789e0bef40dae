"""One run of a body on one rank: its context, faults and deadline.

Groups of `RankContext.group` time out before the run does, so that their more specific error comes
first. They are shut down when the body returns and aborted when it raises.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from datetime import timedelta
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ..errors import InvalidArgument
from ._results import RankOutcome, RankResult, Returned, raised
from .faults import Fault, arm_faults

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from ..groups import ProcessGroup


_GROUP_TIMEOUT_SHARE = 0.8  # of the timeout of the run


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
        """The rank."""
        self.size = size
        """The world size of the run."""
        self.backend = backend
        """The default backend of `group`."""
        self.timeout = timedelta(seconds=timeout * _GROUP_TIMEOUT_SHARE)
        """The default timeout of `group`."""
        self.generation = generation
        """Changes whenever a rank process is replaced; None where ranks are threads."""
        self._connect = connect
        self._groups: list[ProcessGroup] = []

    def __repr__(self) -> str:
        return "<RankContext>"  # equal on all ranks, so that equal failures are grouped

    @cached_property
    def store(self) -> Store:
        """A store that the ranks of this run share, initially empty."""
        return self._connect()

    def group(self, backend: str | None = None, **options: Any) -> ProcessGroup:
        """Form a group of all ranks of the run, and close it when the body ends."""
        from .. import groups

        known = {"store": self.store, "rank": self.rank, "world_size": self.size}
        defaults = {"timeout": self.timeout, "device": "cpu", **known}
        return self.closing(groups.new_group(backend or self.backend, **{**defaults, **options}))

    def closing(self, group: ProcessGroup) -> ProcessGroup:
        """Close `group` when the body ends."""
        self._groups.append(group)
        return group

    def shutdown(self) -> None:
        """Shut the groups down, the newest first: they may be splits of older ones."""
        while self._groups:
            self._groups.pop().shutdown()

    def abort(self) -> None:
        """Abort the groups, which unblocks threads that wait in them."""
        while self._groups:
            self._groups.pop().abort()

    def leave_open(self) -> None:
        """Do not close the groups formed so far."""
        self._groups.clear()


def run_body(
    call: Callable[[RankContext], Any], context: RankContext, *, faults: Sequence[Fault]
) -> RankResult:
    """Run a body as the rank of `context`."""
    ended_at = 0.0
    with arm_faults([fault for fault in faults if fault.applies_to(context.rank)]) as armed:
        try:
            value = call(context)
            ended_at = time.monotonic()
            context.shutdown()
            outcome: RankOutcome = Returned(value)
        # Even sys.exit in a body ends only its run, not the process of the pool.
        except BaseException as error:  # noqa: BLE001
            ended_at = ended_at or time.monotonic()
            outcome = raised(error)
            context.abort()  # without waiting for peers
    missed = [str(each.fault) for each in armed if not (each.fired or each.fault.optional)]
    return RankResult(outcome, ", ".join(missed), when=ended_at)


class RunDeadline:
    """The deadline of a run, which moves closer once a rank has failed."""

    def __init__(self, timeout: float, linger: float) -> None:
        self._start = time.monotonic()
        self._deadline = self._start + timeout
        self._linger = linger

    def shorten(self) -> None:
        """Leave the other ranks only `linger` seconds."""
        self._deadline = min(self._deadline, time.monotonic() + self._linger)

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self._start

    @property
    def remaining(self) -> float:
        """Seconds until the deadline, at least 0."""
        return max(0.0, self._deadline - time.monotonic())


def check_size(size: int, *, maximum: int | None = None) -> int:
    """Return `size` if it is a valid number of ranks."""
    if size < 1 or (maximum is not None and size > maximum):
        bounds = "at least 1" if maximum is None else f"1 to {maximum}"
        raise InvalidArgument(f"the number of ranks must be {bounds}, got {size}")
    return size


def ranks_that_may_die(
    faults: Collection[Fault], must_die: Collection[int], *, size: int
) -> set[int]:
    """Return the ranks that a fault may kill, and those that must die."""
    for fault in faults:
        if fault.rank not in (None, *range(size)):
            raise InvalidArgument(f"fault for rank {fault.rank}: ranks are 0 to {size - 1}")
    if not set(must_die) <= set(range(size)):
        raise InvalidArgument(f"expect_dead={sorted(must_die)}: ranks are 0 to {size - 1}")
    fatal = [fault for fault in faults if fault.action.is_fatal]
    targets = {rank for rank in range(size) if any(fault.applies_to(rank) for fault in fatal)}
    return targets.union(must_die)
