"""What a rank does between the end of its data and the end of the others' data.

`LeaveStrategy`: the rank leaves the process group. Every later collective runs among the remaining
ranks, so nothing has to be shadowed. Where ranks see each other's membership
(`ProcessGroup.can_leave`) a step costs nothing extra; elsewhere each step begins with a membership
update, one small message.

`ShadowStrategy`: torch's protocol. At the start of each step all ranks sum one number, 1 for a
rank with data and 0 for one without, so a rank without data learns whether it must shadow another
step. If uneven inputs are an error, a second number tells the ranks with data, which do not wait
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

MAX_SKEW = 1000
"""How many inputs fewer than others a rank may have before it says that it has been waiting."""


@dataclass(frozen=True)
class JoinCollectives:
    """Where ranks tell each other who has data."""

    group: dist.ProcessGroup
    device: torch.device

    def announce_active(self) -> dist.Work:
        """Tell that this rank has data; who waits for it learns how many have."""
        return self._add_up(torch.ones(1, device=self.device))

    def count_active(self) -> int:
        """Tell that this rank has no data, and learn how many ranks have."""
        count = torch.zeros(1, device=self.device)
        self._add_up(count).wait()
        return int(count.item())

    def raise_if_any_exhausted(self) -> None:
        """Raise if a rank says that it has run out of data."""
        alarms = torch.zeros(1, device=self.device)
        self._add_up(alarms).wait()
        if alarms.item():
            raise UnevenInputs(
                f"{int(alarms.item())} of {self.group.size()} ranks exhausted their inputs, and "
                "uneven inputs are an error here (throw_on_early_termination=True)"
            )

    def raise_on_all_ranks(self) -> None:
        """Say to those with data that this rank has none, and raise."""
        self._add_up(torch.ones(1, device=self.device)).wait()
        raise UnevenInputs(
            f"rank {self.group.rank()} exhausted its inputs before others did, and uneven inputs "
            "are an error here (throw_on_early_termination=True)"
        )

    def gather(self, numbers: Sequence[float]) -> list[list[float]]:
        """Learn every rank's numbers."""
        mine = torch.tensor(numbers, dtype=torch.float64, device=self.device)
        heard = [torch.empty_like(mine) for _ in range(self.group.size())]
        self.group.allgather([heard], [mine], c10d.AllgatherOptions()).wait()
        return [each.tolist() for each in heard]

    def broadcast(self, tensor: Tensor, root: int) -> None:
        """Give every rank one rank's tensor."""
        options = c10d.BroadcastOptions()
        options.rootRank = root
        self.group.broadcast([tensor], options).wait()

    def _add_up(self, tensor: Tensor) -> dist.Work:
        # In torch's call form, for torch's reducer may be given what comes back.
        return self.group.allreduce([tensor], c10d.AllreduceOptions())


class ShadowStrategy:
    """How a rank without data follows the steps of the others."""

    def __init__(
        self, meeting: JoinCollectives, hooks: Sequence[JoinHook], *, throws: bool
    ) -> None:
        self._meeting = meeting
        self._hooks = hooks
        self._throws = throws

    def begin_step(self) -> dist.Work:
        """Say that this rank has data; a second time, if it is an error that others have none."""
        return begin_step(self._meeting, throws=self._throws)

    def wait_for_others(self) -> int:
        """Make up for steps until nobody has data; tell how many there were."""
        steps = 0
        while self._meeting.count_active():
            if self._throws:
                self._meeting.raise_on_all_ranks()
            for hook in self._hooks:
                hook.main_hook()
            steps += 1
            if steps == MAX_SKEW + 1:
                warn_about_skew(steps, self._meeting.group.rank())
        return steps


def warn_about_skew(behind: int, rank: int) -> None:
    """Say that data are divided badly, if a rank is too many inputs behind."""
    if behind > MAX_SKEW:
        warnings.warn(
            f"rank {rank} has over {MAX_SKEW} inputs fewer than others, and has been waiting for them: "
            "divide the data more evenly",
            stacklevel=5,
        )


def begin_step(meeting: JoinCollectives, *, throws: bool) -> dist.Work:
    """Say that this rank has data, in the way of torch's protocol."""
    work = meeting.announce_active()
    if throws:
        meeting.raise_if_any_exhausted()
    return work


class LeaveStrategy:
    """How ranks of a group part, and meet again."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group

    def begin_step(self) -> None:
        """Go on among those who have data."""
        if not self._group.can_leave:
            self._group.update_membership()

    def wait_for_others(self) -> int:
        """Leave, sleep until nobody has data, and be a member again; nothing is made up for."""
        if not self._group.can_leave:
            self._group.update_membership(stays=False)
        self._group.rejoin()
        return 0
