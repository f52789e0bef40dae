"""One rank of a run, as its body sees it, in a process or in a thread.

Groups of `RankContext.group` time out before the run does, so that their more specific error comes
first. They are shut down when the body returns and aborted when it raises.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from typing import TYPE_CHECKING, Any

from torch._C._distributed_c10d import Store

from ..errors import InvalidArgument
from ._results import RankOutcome, RankResult, Returned, error_outcome
from .faults import Fault, arm_faults

if TYPE_CHECKING:
    from ..groups import ProcessGroup

_GROUP_TIMEOUT_SHARE = 0.8  # of the timeout of the run


class RankRunner:
    """What the ranks of processes and of threads have in common."""

    def __init__(self, size: int, backend: str) -> None:
        if size < 1:
            raise InvalidArgument(f"the number of ranks must be at least 1, got {size}")
        self.size = size
        """The maximum number of ranks of a run."""
        self.backend = backend
        """The default backend of `RankContext.group`."""

    def _world_size(self, ranks: int | None) -> int:
        if ranks is not None and not 1 <= ranks <= self.size:
            raise InvalidArgument(f"the number of ranks must be 1 to {self.size}, got {ranks}")
        return self.size if ranks is None else ranks


@dataclass(repr=False, eq=False)
class RankContext:
    """One rank of a run."""

    rank: int
    size: int
    """The world size of the run."""
    backend: str
    """The default backend of `group`."""
    run_timeout: float
    connect: Callable[[], Store]
    generation: int | None = None
    """Changes whenever a rank process is replaced; None where ranks are threads."""
    _groups: list[ProcessGroup] = field(default_factory=list, init=False)
    _kept: list[object] = field(default_factory=list, init=False)

    @property
    def timeout(self) -> timedelta:
        """The default timeout of `group`."""
        return timedelta(seconds=self.run_timeout * _GROUP_TIMEOUT_SHARE)

    def __repr__(self) -> str:
        return "<RankContext>"  # equal on all ranks, so that equal failures are grouped

    @cached_property
    def store(self) -> Store:
        """A store that the ranks of this run share, initially empty."""
        return self.connect()

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

    def keep(self, group: object) -> None:
        """Keep a group of torch's until all else that the body leaves behind is freed.

        Call it before ``dist.destroy_process_group()`` if a `DistributedDataParallel` of torch's
        may outlive the group. Its reducer does not release the GIL when it drops the last
        reference. Gloo's destructor then joins threads that may need the GIL to free the tensors of
        their last call, and the rank hangs.
        """
        self._kept.append(group)

    def abort(self) -> None:
        """Abort the groups, which unblocks threads that wait in them."""
        try:
            while self._groups:
                self._groups.pop().abort()
        finally:
            if self._groups:  # one raised; an ExitStack would hide the error before it
                self.abort()

    def leave_open(self) -> None:
        """Do not close the groups formed so far."""
        self._groups.clear()


def run_body(
    call: Callable[[RankContext], Any], context: RankContext, *, faults: Sequence[Fault]
) -> RankResult:
    ended_at = 0.0
    with arm_faults([fault for fault in faults if fault.applies_to(context.rank)]) as armed:
        try:
            try:
                value = call(context)
                ended_at = time.monotonic()
                while context._groups:  # the newest first: they may be splits of older ones
                    context._groups.pop().shutdown()
                outcome: RankOutcome = Returned(value)
            finally:
                ended_at = ended_at or time.monotonic()
                context.abort()  # without waiting for peers
                context._kept.clear()
        # Even sys.exit in a body ends only its run, not the process of the pool.
        except BaseException as error:  # noqa: BLE001
            outcome = error_outcome(error)
    missed = [str(each.fault) for each in armed if not (each.fired or each.fault.optional)]
    return RankResult(outcome, ", ".join(missed), when=ended_at)
