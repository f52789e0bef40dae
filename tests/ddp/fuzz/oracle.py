"""What the mathematics says: one process, no hooks, no buckets, no communication.

Gradients are kept as what they are: `reduced`, which all ranks have; `local`, the sum of weight
times gradient of the passes that one rank has not reduced yet; and `weight`, what those count.
A pass that is reduced makes ``reduced += sum of all ranks' local / divisor`` of every parameter
that any rank has reached since the last one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call

from .net import by_rank, loss_of, make, rows_of, whole_loss
from .play import addend_of, clip, factor_of, optimizer_options
from .program import Hook, Pass, Program

Gradients = list[Tensor | None]


@dataclass
class Expected:
    """What every rank should have at some moment; None is whatever it has."""

    gradients: list[Gradients] | None
    """By rank."""
    parameters: list[Tensor]
    buffers: list[list[Tensor]]
    seen: list[dict[int, list[Tensor]]]
    """What hooks should see, by rank and their number."""
    reduced: bool
    """Whether all ranks should have the same bits."""
    reductions: int


@dataclass
class Rank:
    """What one rank has to itself."""

    local: Gradients
    weight: float = 0.0
    buffers: dict[str, Tensor] = field(default_factory=dict)
    syncs_buffers: bool = True


def add(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    """Add gradients of which either may be none."""
    if one is None or other is None:
        return other if one is None else one
    return one + other


class Oracle:
    """One process that has the data of all ranks."""

    def __init__(
        self, program: Program, continue_from: Mapping[str, Sequence[Tensor]] | None = None
    ) -> None:
        """`continue_from`: parameters to use from the end of a turn on, by its moment.

        Parameters that differ by the rounding of a reduction may become different numbers of a
        small type, and gradients that cancel are then far apart.
        """
        self.program = program
        self.continue_from = continue_from or {}
        self.net = make(program, 0)
        self.parameters = list(self.net.parameters())
        self.reduced: Gradients = self.nothing()
        self.ranks = [Rank(self.nothing()) for _ in range(program.size)]
        for rank in self.ranks:
            rank.buffers = self.copy_buffers()
        self.optimizer = None
        if program.optimizer is not None:
            kind, options = optimizer_options(program)
            self.optimizer = kind(self.parameters, **options)
        self.trace: dict[str, Expected] = {}
        self.active: list[int] = []
        self.joins = False
        self.number = 0

    def nothing(self) -> Gradients:
        return [None] * len(self.parameters)

    def copy_buffers(self) -> dict[str, Tensor]:
        return {name: buffer.clone() for name, buffer in self.net.named_buffers()}

    # -- turns -----------------------------------------------------------------------------

    def run(self) -> dict[str, Expected]:
        uneven = self.program.uneven
        for number in range(len(self.program.turns)):
            self.number = number
            if uneven is not None and number == max(uneven.lengths):
                self.end_of_join()
            self.joins = uneven is not None and number < max(uneven.lengths)
            before, self.active = self.active, self.program.active(number)
            for rank in set(before) - set(self.active):
                self.drop_local_grads(rank)
            self.turn(number)
        if uneven is not None and len(self.program.turns) == max(uneven.lengths):
            self.end_of_join()
        self.note("end", reduced=True)
        return self.trace

    def end_of_join(self) -> None:
        """Give all ranks what the last one to have data has."""
        assert self.program.uneven is not None
        lengths = self.program.uneven.lengths
        last = max(rank for rank, length in enumerate(lengths) if length == max(lengths))
        for rank in self.ranks:
            rank.buffers = {k: v.clone() for k, v in self.ranks[last].buffers.items()}
            rank.syncs_buffers = self.ranks[last].syncs_buffers
        self.active, self.joins = list(range(self.program.size)), False
        self.note("after", reduced=True)

    def turn(self, number: int) -> None:
        turn = self.program.turns[number]
        frozen = set(self.net.units(turn.frozen))
        for parameter in self.parameters:
            parameter.requires_grad_(parameter not in frozen)
        if turn.evaluates:
            self.evaluate()
        for place, each in enumerate(turn.passes):
            self.backward(each, (number, place))
            self.edit(each.edit)
            self.zero(each.drop)
        if not turn.passes[-1].local and not self.program.in_backward:
            self.on_gradients(lambda: clip(self.program, self.parameters))
            if turn.steps and self.optimizer is not None:
                self.on_gradients(self.optimizer.step)
        self.zero(turn.zero)
        self.note(f"{number}", reduced=not turn.passes[-1].local)
        with torch.no_grad():
            for mine, theirs in zip(
                self.parameters, self.continue_from.get(f"{number}", ()), strict=False
            ):
                mine.copy_(theirs)

    def evaluate(self) -> None:
        if self.joins:
            return  # it is no step; no other rank learns of it
        self.sync_buffers()
        for rank in self.active:
            self.ranks[rank].syncs_buffers = False

    def on_gradients(self, action: Any) -> None:
        """Have an optimizer or a clipping function find the reduced gradients."""
        for parameter, gradient in zip(self.parameters, self.reduced, strict=True):
            parameter.grad = gradient
        action()
        self.reduced = [p.grad for p in self.parameters]
        for parameter in self.parameters:
            parameter.grad = None

    def edit(self, factor: float) -> None:
        """Multiply all gradients."""
        self.reduced = [None if g is None else g * factor for g in self.reduced]
        for rank in self.ranks:
            rank.local = [None if g is None else g * factor for g in rank.local]

    def zero(self, how: str) -> None:
        if how == "keep":
            return
        held = self.held(self.active[0])
        for rank in range(self.program.size):
            self.drop_local_grads(rank)
        for i, gradient in enumerate(held):
            is_zero = how == "zero" and gradient is not None
            self.reduced[i] = torch.zeros_like(self.parameters[i]) if is_zero else None

    def held(self, rank: int) -> Gradients:
        """What a rank without weights has in ``.grad``."""
        return [add(a, b) for a, b in zip(self.reduced, self.ranks[rank].local, strict=True)]

    def drop_local_grads(self, rank: int) -> None:
        self.ranks[rank].local, self.ranks[rank].weight = self.nothing(), 0.0

    # -- passes ----------------------------------------------------------------------------

    def sync_buffers(self) -> None:
        """Give the active ranks the buffers of one of them, if it is time."""
        ranks = [self.ranks[rank] for rank in self.active]
        if self.program.broadcasts and all(rank.syncs_buffers for rank in ranks):
            root = ranks[-1 if self.joins else 0]
            for rank in ranks:
                rank.buffers = {k: v.clone() for k, v in root.buffers.items()}

    def backward(self, each: Pass, where: tuple[int, int]) -> None:
        losses: dict[int, list[Tensor]] = {rank: [] for rank in self.active}
        for forward in range(each.forwards):
            self.sync_buffers()
            for rank in self.active:
                losses[rank].append(self.forward(each, where, forward, rank))
                self.ranks[rank].syncs_buffers = not (each.local and each.inside)
        news = {rank: self.gradients(losses[rank], each, rank) for rank in self.active}
        for again in range(1 + each.twice):
            self.add_pass(each, news, f"{where[0]}.{where[1]}" + "'" * again)

    def add_pass(self, each: Pass, news: dict[int, Gradients], moment: str) -> None:
        """Add a pass to what ranks have, and reduce it unless it is local."""
        seen = self.what_hooks_see(each, news)
        for rank, gradients in news.items():
            weight = 1.0 if each.weights is None else each.weights[rank]
            mine = self.ranks[rank]
            mine.weight += weight
            scaled = [None if g is None else weight * g for g in self.hooked(gradients, each, rank)]
            mine.local = [add(a, b) for a, b in zip(mine.local, scaled, strict=True)]
        if not each.local:
            self.reduce(each)
            if self.program.in_backward:
                self.step_in_backward()
        self.note(moment, reduced=not each.local, seen=seen, weighted=each.weights is not None)

    def reduce(self, each: Pass) -> None:
        divisor = self.divisor(each)
        for i in range(len(self.parameters)):
            parts = [g for rank in self.active if (g := self.ranks[rank].local[i]) is not None]
            if parts:
                total = sum(parts[1:], parts[0]) * (1 / divisor if divisor else 0.0)
                self.reduced[i] = add(self.reduced[i], total)
        for rank in self.active:
            self.drop_local_grads(rank)

    def divisor(self, each: Pass) -> float:
        if each.weights is not None:
            return sum(self.ranks[rank].weight for rank in self.active)
        if self.program.reduce == "sum":
            return 1.0
        uneven = self.program.uneven
        if self.joins and uneven is not None and not uneven.divides_by_all:
            return len(self.active)
        return self.program.size

    def step_in_backward(self) -> None:
        assert self.optimizer is not None
        self.on_gradients(lambda: clip(self.program, self.parameters))
        self.on_gradients(self.optimizer.step)
        self.reduced = self.nothing()

    def forward(self, each: Pass, where: tuple[int, int], forward: int, rank: int) -> Tensor:
        """Make the loss of one forward pass of one rank."""
        rows = rows_of(self.program, where, forward, rank).requires_grad_()
        buffers = {name: b.clone() for name, b in self.ranks[rank].buffers.items()}
        values: dict[str, Any] = dict(self.net.named_parameters())
        if self.program.precision is not None:
            values = {name: p.to(torch.bfloat16) for name, p in values.items()}
            rows = rows.to(torch.bfloat16)
        arguments = (rows, each.uses[rank], "none")
        output = functional_call(self.net, {**values, **buffers}, arguments, tie_weights=True)
        self.ranks[rank].buffers = {name: b.detach() for name, b in buffers.items()}
        return loss_of(self.net, output, each, rank)

    def gradients(self, losses: list[Tensor], each: Pass, rank: int) -> Gradients:
        loss = whole_loss(self.net, losses, each, rank)
        trained = [p for p in self.parameters if p.requires_grad]
        found = dict(zip(trained, self.grad(loss, trained), strict=True))
        return [found.get(p) for p in self.parameters]

    def grad(self, loss: Tensor, trained: list[Any]) -> Gradients:
        return list(torch.autograd.grad(loss, trained, allow_unused=True)) if trained else []

    # -- hooks -----------------------------------------------------------------------------

    def hooks(self, parameter: int, kinds: tuple[str, ...]) -> list[Hook]:
        """The hooks that are on a parameter in this turn."""
        count = len(self.parameters)
        return [
            hook
            for hook in self.program.hooks
            if hook.parameter % count == parameter
            and hook.kind in kinds
            and hook.when <= self.number
        ]

    def hooked(self, gradients: Gradients, each: Pass, rank: int) -> Gradients:
        """What hooks make of a rank's new gradients, before they are reduced."""
        result: Gradients = []
        for i, gradient in enumerate(gradients):
            if gradient is None:
                result.append(None)
                continue
            factor = factor_of(rank) ** len(self.hooks(i, ("tensor", "prehook")))
            added = len(self.hooks(i, ("post", "replace", "node"))) * addend_of(rank)
            result.append(gradient * factor + added * self.arrivals(i, each, rank))
        return result

    def arrivals(self, parameter: int, each: Pass, rank: int) -> int:
        """How often autograd adds to a parameter's gradient in one backward pass.

        Once, but for reentrant checkpointing, which has a pass of its own for every layer.
        """
        checkpoints = by_rank(self.program.checkpointed, rank, True)
        this = self.parameters[parameter]
        if self.program.checkpointing != "reentrant" or not checkpoints:
            return 1
        uses = each.uses[rank]
        runs = sum(
            any(p is this for p in layer.parameters()) and bool(uses >> i & 1)
            for i, layer in enumerate(self.net.layers, start=1)
        )
        layers = (1 << (len(self.net.layers) + 1)) - 2  # their bits
        others = self.net.units(uses & ~layers | by_rank(each.penalty, rank, 0))
        return runs * each.forwards + any(p is this for p in others)

    def what_hooks_see(
        self, each: Pass, news: dict[int, Gradients]
    ) -> list[dict[int, list[Tensor]]]:
        """What hooks see in ``.grad``, where that is one new gradient and nothing else.

        The first hook on a parameter sees it; what the others see depends on their order.
        """
        seen: list[dict[int, list[Tensor]]] = [{} for _ in self.ranks]
        for rank, gradients in news.items():
            for i, gradient in enumerate(gradients):
                adding = self.hooks(i, ("post", "replace", "node"))
                clear = self.reduced[i] is None and self.ranks[rank].local[i] is None
                once = self.arrivals(i, each, rank) == 1
                if gradient is not None and clear and once and len(adding) == 1:
                    number = self.program.hooks.index(adding[0])
                    factor = factor_of(rank) ** len(self.hooks(i, ("tensor", "prehook")))
                    seen[rank][number] = [gradient * factor]
        return seen

    # -- notes -----------------------------------------------------------------------------

    def note(
        self,
        moment: str,
        *,
        reduced: bool,
        seen: list[dict[int, list[Tensor]]] | None = None,
        weighted: bool = False,
    ) -> None:
        is_known = reduced or not (
            weighted or self.program.is_weighted or self.program.reduce == "sum" or self.joins
        )
        gradients = [[_copy(g) for g in self.held(rank)] for rank in range(self.program.size)]
        self.trace[moment] = Expected(
            gradients if is_known else None,
            [p.detach().clone() for p in self.parameters],
            [[b.clone() for b in rank.buffers.values()] for rank in self.ranks],
            seen or [{} for _ in self.ranks],
            reduced,
            reductions=int(reduced and any(p.requires_grad for p in self.parameters)),
        )


def _copy(gradient: Tensor | None) -> Tensor | None:
    return None if gradient is None else gradient.detach().clone()
