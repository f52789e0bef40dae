"""What a rank does between the end of its data and the end of the others' data.

`LeaveStrategy`: the rank leaves the process group. Every later collective runs among the remaining
ranks, so nothing has to be shadowed. Where ranks see each other's membership
(`ProcessGroup.can_leave`) a step costs nothing extra; elsewhere each step begins with a membership
update, one small message.

`ShadowStrategy`: torch's protocol. At the start of each step all ranks sum one number, 1 for a
rank with data and 0 for one without, so a rank without data learns whether it must shadow another
step. If uneven inputs are an error, a second sum informs the ranks with data, which do not wait
for the first. Tensor dtypes and shapes must stay those of torch's implementation: if the first
joinable is torch's own, torch's code makes the calls on the ranks with data.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d
from torch.distributed.algorithms.join import JoinHook

from ..errors import UnevenInputs
from ..groups import ProcessGroup

MAX_SKEW = 1000  # missing inputs after which a waiting rank warns


@dataclass(frozen=True)
class JoinCollectives:
    """The collectives by which ranks learn which of them have data."""

    group: dist.ProcessGroup
    device: torch.device

    def begin_step(self, *, throws: bool) -> dist.Work:
        """Announce that this rank has data; raise if another has none and `throws` is set."""
        work = self._sum(torch.ones(1, device=self.device))
        if throws:
            exhausted = torch.zeros(1, device=self.device)
            self._sum(exhausted).wait()
            if exhausted.item():
                raise UnevenInputs(
                    f"{int(exhausted.item())} of {self.group.size()} ranks exhausted their inputs, "
                    "which is an error with throw_on_early_termination=True"
                )
        return work

    def count_active(self) -> int:
        """Announce that this rank has no data; return the number of ranks that have."""
        count = torch.zeros(1, device=self.device)
        self._sum(count).wait()
        return int(count.item())

    def raise_on_all_ranks(self) -> None:
        """Raise on this rank, which has no data, and in `begin_step` on those that have."""
        self._sum(torch.ones(1, device=self.device)).wait()
        raise UnevenInputs(
            f"rank {self.group.rank()} exhausted its inputs before other ranks, which is an error "
            "with throw_on_early_termination=True"
        )

    def gather(self, numbers: Sequence[float]) -> list[list[float]]:
        own = torch.tensor(numbers, dtype=torch.float64, device=self.device)
        rows = [torch.empty_like(own) for _ in range(self.group.size())]
        self.group.allgather([rows], [own], c10d.AllgatherOptions()).wait()
        return [row.tolist() for row in rows]

    def _sum(self, tensor: Tensor) -> dist.Work:
        # In torch's call form, since torch's reducer may be given the result.
        return self.group.allreduce([tensor], c10d.AllreduceOptions())


class ShadowStrategy:
    """A rank without data shadows the collectives of the others, step by step."""

    def __init__(
        self, collectives: JoinCollectives, hooks: Sequence[JoinHook], *, throws: bool
    ) -> None:
        self._collectives = collectives
        self._hooks = hooks
        self._throws = throws

    def begin_step(self) -> dist.Work:
        return self._collectives.begin_step(throws=self._throws)

    def wait_for_others(self) -> int:
        """Shadow steps until no rank has data; return their number."""
        steps = 0
        while self._collectives.count_active():
            if self._throws:
                self._collectives.raise_on_all_ranks()
            for hook in self._hooks:
                hook.main_hook()
            steps += 1
            if steps == MAX_SKEW + 1:
                warn_about_skew(steps, self._collectives.group.rank())
        return steps


def warn_about_skew(missing: int, rank: int) -> None:
    if missing > MAX_SKEW:
        warnings.warn(
            f"rank {rank} has over {MAX_SKEW} fewer inputs than other ranks and waits for them: "
            "divide the data more evenly",
            stacklevel=5,
        )


class LeaveStrategy:
    """A rank without data leaves the group until no rank has data."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group

    def begin_step(self) -> None:
        if not self._group.can_leave:
            self._group.update_membership()

    def wait_for_others(self) -> int:
        """Leave, wait until all ranks have left, rejoin; return 0, since no step is shadowed."""
        if not self._group.can_leave:
            self._group.update_membership(stays=False)
        self._group.rejoin()
        return 0
