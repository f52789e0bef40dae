"""The protocol of torch's `Join`: who has run out of data makes the collectives of who has not.

At the start of a step all ranks add up one number: 1 of a rank that has data, 0 of one that has
not. A rank without data so learns whether it must make another step's collectives. If uneven data
is to be an error, a second number tells those with data, for the first one they do not look at.

The tensors are those of torch's own, to the type: if the first joinable is one of torch's, it is
torch's code that makes the calls on ranks that have data.
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

__all__ = ["Meeting", "Shadowing", "begin_step", "warn_of_skew"]

SKEW = 1000
"""How many inputs fewer than others a rank may have before it says that it has been waiting."""


@dataclass(frozen=True)
class Meeting:
    """Where ranks tell each other who has data."""

    group: dist.ProcessGroup
    device: torch.device

    def say_active(self) -> dist.Work:
        """Tell that this rank has data; who waits for it learns how many have."""
        return self._add_up(torch.ones(1, device=self.device))

    def count_active(self) -> int:
        """Tell that this rank has no data, and learn how many ranks have."""
        count = torch.zeros(1, device=self.device)
        self._add_up(count).wait()
        return int(count.item())

    def ask_whether_all_go_on(self) -> None:
        """Raise if a rank says that it has run out of data."""
        alarms = torch.zeros(1, device=self.device)
        self._add_up(alarms).wait()
        if alarms.item():
            raise UnevenInputs(
                f"{int(alarms.item())} of {self.group.size()} ranks exhausted their inputs, and "
                "uneven inputs are an error here (throw_on_early_termination=True)"
            )

    def raise_everywhere(self) -> None:
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


class Shadowing:
    """How a rank without data follows the steps of the others."""

    def __init__(self, meeting: Meeting, hooks: Sequence[JoinHook], *, throws: bool) -> None:
        self._meeting = meeting
        self._hooks = hooks
        self._throws = throws

    def begin_step(self) -> dist.Work:
        """Say that this rank has data; a second time, if it is an error that others have none."""
        return begin_step(self._meeting, throws=self._throws)

    def see_others_off(self) -> int:
        """Make up for steps until nobody has data; tell how many there were."""
        steps = 0
        while self._meeting.count_active():
            if self._throws:
                self._meeting.raise_everywhere()
            for hook in self._hooks:
                hook.main_hook()
            steps += 1
            if steps == SKEW + 1:
                warn_of_skew(steps, self._meeting.group.rank())
        return steps


def warn_of_skew(behind: int, rank: int) -> None:
    """Say that data are divided badly, if a rank is too many inputs behind."""
    if behind > SKEW:
        warnings.warn(
            f"rank {rank} has over {SKEW} inputs fewer than others, and has been waiting for them: "
            "divide the data more evenly",
            stacklevel=5,
        )


def begin_step(meeting: Meeting, *, throws: bool) -> dist.Work:
    """Say that this rank has data, in the way of torch's protocol."""
    work = meeting.say_active()
    if throws:
        meeting.ask_whether_all_go_on()
    return work
