"""DiLoCo: ranks train apart, and an outer optimizer synchronizes them (arXiv:2311.08105).

Every H steps each rank sends how far it has moved. The mean of that is a gradient for the outer
optimizer, SGD with Nesterov momentum. *Streaming* (arXiv:2501.18512) splits the model into
fragments that take turns, lets the mean arrive some steps later while training continues, and
mixes it with what the rank has learned meanwhile.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from ...errors import InvalidArgument, InvalidState
from ._base import check_count, group_of
from ._model_averaging import CoalescedAverage, WrappingOptimizer, trainable_parameters

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
        self._in_flight: CoalescedAverage | None = None
        self._deltas: list[Tensor] = []

    @torch.no_grad()
    def start(self, group: dist.ProcessGroup, due: int) -> None:
        """Send how far this rank has come; what it does until `due` is not in it."""
        # The other way round, as a gradient is: the outer optimizer goes against it.
        pairs = zip(self.anchors, self.parameters, strict=True)
        deltas = [anchor - parameter for anchor, parameter in pairs]
        self._in_flight, self.due = CoalescedAverage(deltas, group), due

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
        if self._in_flight is not None:
            self._deltas, self._in_flight = self._in_flight.finish(), None
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
        self.due, self._in_flight = state_dict["due"], None
        self._deltas = [delta.clone() for delta in state_dict["deltas"]]


class DiLoCo(WrappingOptimizer):
    """Takes steps of this rank's own, and synchronises the model every `sync_every` of them.

    Ranks begin with the same parameters, which wrapping a module in DDP sees to; register
    `noop_hook` there, or a hook that averages within a small group only.
    """

    def __init__(
        self,
        optim: Optimizer,
        *,
        sync_every: int,
        process_group: dist.ProcessGroup | None = None,
        outer: MakeOuter | None = None,
        fragments: int | Sequence[Sequence[Tensor]] = 1,
        delay: int = 0,
        alpha: float = 0.0,
    ) -> None:
        """Wrap the optimizer that takes a rank's own steps.

        `outer` makes the outer optimizer of a list of parameters. `fragments` are lists of
        parameters that together are all, or a number of them. `delay` is after how many steps what
        was sent takes effect, and `alpha` how much of its own value a parameter keeps then.
        """
        super().__init__(optim)
        self.process_group = group_of(process_group)
        self.sync_every = check_count("sync_every", sync_every, least=1)
        self.delay = check_count("delay", delay)
        if delay >= sync_every:
            raise InvalidArgument(
                f"what is sent takes effect before the next is: delay is less than sync_every, "
                f"and {delay} is not less than {sync_every}"
            )
        if not 0 <= alpha < 1:
            raise InvalidArgument(f"alpha is 0 or more and less than 1, not {alpha!r}")
        self.alpha = alpha
        self.steps = 0
        """How many steps there have been."""
        parts = _split_into_fragments(
            trainable_parameters(self.param_groups), fragments, most=sync_every
        )
        self.fragments = [Fragment(part, outer or _nesterov) for part in parts]

    def after_step(self) -> None:
        """Send the fragment whose turn it is, and use what has arrived."""
        self.steps += 1
        count = len(self.fragments)
        for i, fragment in enumerate(self.fragments):
            if (self.steps - i * self.sync_every // count) % self.sync_every == 0:
                fragment.start(self.process_group, self.steps + self.delay)
            if fragment.due == self.steps:
                fragment.finish(self.alpha)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse: the fragments have been made."""
        del param_group
        raise InvalidState("add parameters to the optimizer before DiLoCo wraps it")

    def state_dict(self) -> dict[str, Any]:
        """Return everything that the next steps depend on, what is under way included."""
        return {
            "optim": self.optim.state_dict(),
            "steps": self.steps,
            "fragments": [fragment.state_dict() for fragment in self.fragments],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from what was saved, with the parameters that were saved with it."""
        saved = state_dict["fragments"]
        if len(saved) != len(self.fragments):
            raise InvalidArgument(
                f"what is loaded has {len(saved)} fragments, and here are {len(self.fragments)}"
            )
        self.optim.load_state_dict(state_dict["optim"])
        self.steps = state_dict["steps"]
        for fragment, its_state in zip(self.fragments, saved, strict=True):
            fragment.load_state_dict(its_state)


def _nesterov(parameters: list[Tensor]) -> Optimizer:
    """Make the outer optimizer that the paper found best."""
    return torch.optim.SGD(parameters, lr=0.7, momentum=0.9, nesterov=True)


def _split_into_fragments(
    parameters: list[Tensor], fragments: int | Sequence[Sequence[Tensor]], *, most: int
) -> list[Sequence[Tensor]]:
    if isinstance(fragments, int):
        count = check_count("fragments", fragments, least=1)
        # Each has layers from all over the model, which the paper found better than a stretch.
        parts: list[Sequence[Tensor]] = [parameters[i::count] for i in range(count)]
    else:
        parts = list(fragments)
    if not parts or not all(parts) or len(parts) > most:
        raise InvalidArgument(
            f"there are 1 to {min(most, len(parameters))} fragments, as each has a parameter and "
            f"a step of sync_every to itself; not {len(parts)}"
        )
    given = sorted(id(parameter) for part in parts for parameter in part)
    if given != sorted(map(id, parameters)):
        raise InvalidArgument(
            "every parameter that the optimizer trains is in one fragment, and no other is"
        )
    return parts
