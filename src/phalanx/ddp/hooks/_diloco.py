"""DiLoCo: ranks train independently; an outer optimizer synchronizes them (arXiv:2311.08105).

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
from ._base import check_count, hook_group
from ._model_averaging import CoalescedAverage, WrappingOptimizer, trainable_parameters

MakeOuter = Callable[[list[Tensor]], Optimizer]


class Fragment:
    """Parameters that are synchronized together."""

    def __init__(self, parameters: Sequence[Tensor], make_outer: MakeOuter) -> None:
        self.parameters = list(parameters)
        self.anchors: list[Tensor] = [Parameter(each.detach().clone()) for each in parameters]
        """The values of the last synchronization, equal on all ranks; the outer optimizer's."""
        self.outer = make_outer(self.anchors)
        self.due: int | None = None
        """The step at which the average in flight takes effect."""
        self._in_flight: CoalescedAverage | None = None
        self._deltas: list[Tensor] = []

    @torch.no_grad()
    def start(self, group: dist.ProcessGroup, due: int) -> None:
        """Start to average how far the ranks have moved; the result is used at step `due`."""
        # Negated, as a gradient: the outer optimizer steps against it.
        pairs = zip(self.anchors, self.parameters, strict=True)
        deltas = [anchor - parameter for anchor, parameter in pairs]
        self._in_flight, self.due = CoalescedAverage(deltas, group), due

    @torch.no_grad()
    def finish(self, alpha: float) -> None:
        """Step the anchors with the mean of all ranks, and move the parameters towards them."""
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
        if self._in_flight is not None:
            self._deltas, self._in_flight = self._in_flight.finish(), None
        return self._deltas

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of the anchors, the outer optimizer's state, and the average in flight."""
        return {
            "anchors": [anchor.detach().clone() for anchor in self.anchors],
            "outer": copy.deepcopy(self.outer.state_dict()),  # torch returns references
            "due": self.due,
            "deltas": [delta.clone() for delta in self._arrived()],
        }

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        torch._foreach_copy_(self.anchors, state_dict["anchors"])
        self.outer.load_state_dict(state_dict["outer"])
        self.due, self._in_flight = state_dict["due"], None
        self._deltas = [delta.clone() for delta in state_dict["deltas"]]


class DiLoCo(WrappingOptimizer):
    """Steps locally, and synchronizes the model every `sync_every` steps.

    Ranks must start with the same parameters, as they do if DDP wraps the module. Register
    `noop_hook` there, or a hook that averages within a small group.
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
        """Wrap the optimizer of the local steps.

        `outer` makes the outer optimizer from a list of parameters. `fragments` is a number of
        fragments, or lists that together contain all parameters. An average takes effect `delay`
        steps after it started; a parameter then keeps the fraction `alpha` of its own value.
        """
        super().__init__(optim)
        self.process_group = hook_group(process_group)
        self.sync_every = check_count("sync_every", sync_every, least=1)
        self.delay = check_count("delay", delay)
        if delay >= sync_every:
            raise InvalidArgument(f"delay must be less than sync_every ({sync_every}), got {delay}")
        if not 0 <= alpha < 1:
            raise InvalidArgument(f"alpha must be in [0, 1), got {alpha!r}")
        self.alpha = alpha
        self.steps = 0
        """The number of steps so far."""
        parts = _split_into_fragments(
            trainable_parameters(self.param_groups), fragments, most=sync_every
        )
        self.fragments = [Fragment(part, outer or _nesterov) for part in parts]

    def after_step(self) -> None:
        """Start and finish averages of the fragments whose turn it is."""
        self.steps += 1
        count = len(self.fragments)
        for i, fragment in enumerate(self.fragments):
            if (self.steps - i * self.sync_every // count) % self.sync_every == 0:
                fragment.start(self.process_group, self.steps + self.delay)
            if fragment.due == self.steps:
                fragment.finish(self.alpha)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise: the fragments are fixed."""
        del param_group
        raise InvalidState("add parameters to the optimizer before DiLoCo wraps it")

    def state_dict(self) -> dict[str, Any]:
        """Return everything that the next steps depend on, averages in flight included."""
        return {
            "optim": self.optim.state_dict(),
            "steps": self.steps,
            "fragments": [fragment.state_dict() for fragment in self.fragments],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what `state_dict` returned; the parameters must be restored separately."""
        saved = state_dict["fragments"]
        if len(saved) != len(self.fragments):
            raise InvalidArgument(
                f"state_dict has {len(saved)} fragments, expected {len(self.fragments)}"
            )
        self.optim.load_state_dict(state_dict["optim"])
        self.steps = state_dict["steps"]
        for fragment, its_state in zip(self.fragments, saved, strict=True):
            fragment.load_state_dict(its_state)


def _nesterov(parameters: list[Tensor]) -> Optimizer:
    # The best one of the paper.
    return torch.optim.SGD(parameters, lr=0.7, momentum=0.9, nesterov=True)


def _split_into_fragments(
    parameters: list[Tensor], fragments: int | Sequence[Sequence[Tensor]], *, most: int
) -> list[Sequence[Tensor]]:
    if isinstance(fragments, int):
        count = check_count("fragments", fragments, least=1)
        # Each has layers from all over the model, which the paper found better than a range.
        parts: list[Sequence[Tensor]] = [parameters[i::count] for i in range(count)]
    else:
        parts = list(fragments)
    if not parts or not all(parts) or len(parts) > most:
        raise InvalidArgument(
            f"fragments must be 1 to {min(most, len(parameters))}, each with a parameter and its "
            f"own step of sync_every, got {len(parts)}"
        )
    given = sorted(id(parameter) for part in parts for parameter in part)
    if given != sorted(map(id, parameters)):
        raise InvalidArgument(
            "fragments must contain each trainable parameter of the optimizer once, and no other"
        )
    return parts
