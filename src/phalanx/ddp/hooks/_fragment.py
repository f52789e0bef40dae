"""A part of a model that DiLoCo synchronises at once."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from ._averaging import Averaging

__all__ = ["Fragment", "MakeOuter"]

MakeOuter = Callable[[list[Tensor]], Optimizer]


class Fragment:
    """Parameters, and what they were when all ranks last agreed on them."""

    def __init__(self, parameters: Sequence[Tensor], make_outer: MakeOuter) -> None:
        self.parameters = list(parameters)
        self.anchors: list[Tensor] = [Parameter(each.detach().clone()) for each in parameters]
        """What all ranks have; the outer optimizer moves it."""
        self.outer = make_outer(self.anchors)
        self.due: int | None = None
        """The step at which what is under way takes effect."""
        self._under_way: Averaging | None = None
        self._deltas: list[Tensor] = []

    @torch.no_grad()
    def start(self, group: dist.ProcessGroup, due: int) -> None:
        """Send how far this rank has come; what it does until `due` is not in it."""
        # The other way round, as a gradient is: the outer optimizer goes against it.
        pairs = zip(self.anchors, self.parameters, strict=True)
        deltas = [anchor - parameter for anchor, parameter in pairs]
        self._under_way, self.due = Averaging(deltas, group), due

    @torch.no_grad()
    def finish(self, alpha: float) -> None:
        """Move the anchors by the mean of the ranks, and the parameters towards them."""
        for anchor, delta in zip(self.anchors, self._arrived(), strict=True):
            anchor.grad = delta
        self.outer.step()
        self.outer.zero_grad()
        self._deltas, self.due = [], None
        if alpha:
            torch._foreach_lerp_(self.parameters, self.anchors, 1 - alpha)
        else:
            torch._foreach_copy_(self.parameters, self.anchors)

    def _arrived(self) -> list[Tensor]:
        """Wait for the means that are under way."""
        if self._under_way is not None:
            self._deltas, self._under_way = self._under_way.finish(), None
        return self._deltas

    def state_dict(self) -> dict[str, Any]:
        """Copy the anchors, the outer optimizer's state, and what is under way."""
        return {
            "anchors": [anchor.detach().clone() for anchor in self.anchors],
            "outer": copy.deepcopy(self.outer.state_dict()),  # torch's refers to what changes
            "due": self.due,
            "deltas": [delta.clone() for delta in self._arrived()],
        }

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from what was saved."""
        torch._foreach_copy_(self.anchors, state_dict["anchors"])
        self.outer.load_state_dict(state_dict["outer"])
        self.due, self._under_way = state_dict["due"], None
        self._deltas = [delta.clone() for delta in state_dict["deltas"]]
