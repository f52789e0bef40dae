"""The model of a program, and everything that it can return."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Normal
from torch.utils.checkpoint import checkpoint

from .program import Pass, Program

WIDTH = 4


@dataclass
class Data:
    first: Tensor
    second: Tensor


Pair = namedtuple("Pair", "first second")


class Plain:
    """An object with tensors in its attributes."""

    def __init__(self, first: Any, second: Any) -> None:
        self.first, self.second = first, second


class Slots:
    """One that has no dictionary."""

    __slots__ = ("first", "second")

    def __init__(self, first: Any, second: Any) -> None:
        self.first, self.second = first, second


OUTPUTS = {
    "tensor": lambda _, a, b: torch.stack([a, b]),
    "tuple": lambda _, a, b: (a, b),
    "list": lambda _, a, b: [a, b],
    "dict": lambda _, a, b: {"first": a, "second": b},
    "nested": lambda _, a, b: {"x": [(a,), {"y": {"z": b}}], "n": 3},
    "namedtuple": lambda _, a, b: Pair(a, b),
    "dataclass": lambda _, a, b: Data(a, b),
    "plain": lambda _, a, b: Plain(a, b),
    "slots": lambda _, a, b: Slots(a, b),
    "boxes": lambda _, a, b: Plain([Plain({"a": a}, 1)], (Slots(b, None),)),
    "distribution": lambda _, a, b: Normal(a, b.square() + 0.5),
    "closure": lambda _, a, b: lambda: (a, b),
    "stash": lambda net, a, b: net.put_away(a, b),
}
INPUTS = {
    "tensor": lambda _, out: (out[0], out[1]),
    "tuple": lambda _, out: out,
    "list": lambda _, out: out,
    "dict": lambda _, out: (out["first"], out["second"]),
    "nested": lambda _, out: (out["x"][0][0], out["x"][1]["y"]["z"]),
    "namedtuple": lambda _, out: out,
    "dataclass": lambda _, out: (out.first, out.second),
    "plain": lambda _, out: (out.first, out.second),
    "slots": lambda _, out: (out.first, out.second),
    "boxes": lambda _, out: (out.first[0].first["a"], out.second[0].first),
    "distribution": lambda _, out: (out.loc, out.scale),
    "closure": lambda _, out: out(),
    "stash": lambda net, _: net.stashed,
}


class Net(nn.Module):
    """Layers of which any may be left out, and a parameter of its own."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.output = program.output
        self.first = nn.Linear(5, WIDTH)
        layers = [nn.Linear(WIDTH, WIDTH) for _ in range(program.layers)]
        self.layers = nn.ModuleList(layers[:1] * len(layers) if program.tied else layers)
        self.head = nn.Linear(WIDTH, WIDTH)
        self.extra = nn.Parameter(torch.zeros(WIDTH))
        self.has_buffers = program.buffers
        if program.buffers:
            self.register_buffer("seen", torch.zeros(()))
        self.stashed: tuple[Tensor, Tensor] | None = None

    def units(self, mask: int) -> list[nn.Parameter]:
        """The parameters of some units, each once."""
        units = [self.first, *self.layers, self.head]
        found = [p for i, unit in enumerate(units) if mask >> i & 1 for p in unit.parameters()]
        found += [self.extra] if mask >> len(units) & 1 else []
        return list(dict.fromkeys(found))

    def put_away(self, a: Tensor, b: Tensor) -> None:
        """Return nothing: the loss finds the outputs in the module."""
        self.stashed = (a, b)

    def forward(self, rows: Tensor, uses: int, checkpointing: str) -> Any:
        if self.has_buffers and self.training:
            self.seen.add_(rows.detach().mean().to(self.seen.dtype))
        hidden = self.first(rows) if uses & 1 else rows[:, :WIDTH] * 1
        if self.has_buffers:
            hidden = hidden * (1 + 0.1 * self.seen.clone().tanh()).to(hidden.dtype)
        for i, layer in enumerate(self.layers, start=1):
            if uses >> i & 1:
                hidden = run(layer, hidden.tanh(), checkpointing)
        if uses >> (len(self.layers) + 2) & 1:
            hidden = hidden + self.extra
        has_head = uses >> (len(self.layers) + 1) & 1
        return OUTPUTS[self.output](self, self.head(hidden) if has_head else hidden * 2, hidden)


def run(layer: nn.Module, hidden: Tensor, checkpointing: str) -> Tensor:
    """Run a layer, and again in backward if it is checkpointed."""
    if checkpointing == "none":
        return layer(hidden)
    return checkpoint(layer, hidden, use_reentrant=checkpointing == "reentrant")


def make(program: Program, rank: int) -> Net:
    """Make the model; ranks other than 0 begin with other weights, which are replaced."""
    dtype = torch.float64 if program.precision is None else torch.float32
    net = Net(program).to(dtype)
    generator = torch.Generator().manual_seed(1000 * program.seed + rank)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 2)
    return net


def rows_of(program: Program, where: tuple[int, int], forward: int, rank: int) -> Tensor:
    """Make the rows of one rank for one forward pass."""
    turn, number = where
    count = program.turns[turn].passes[number].rows[rank] if number >= 0 else 2
    seed = (((program.seed * 16 + turn) * 16 + number + 1) * 8 + forward) * 8 + rank
    generator = torch.Generator().manual_seed(seed)
    dtype = torch.float64 if program.precision is None else torch.float32
    return torch.randn(count, 5, generator=generator).to(dtype)


def by_rank(values: tuple[Any, ...], rank: int, default: Any) -> Any:
    """What a tuple says of a rank; an empty one says the same of all."""
    return values[rank] if values else default


def loss_of(net: Net, output: Any, each: Pass, rank: int) -> Tensor:
    """Make the loss of one forward pass."""
    dtype = next(net.parameters()).dtype
    first, second = (part.to(dtype) for part in INPUTS[net.output](net, output))
    part = by_rank(each.parts, rank, 0)
    terms = [first.square().mean()] if part != 2 else []
    terms += [second.sin().mean()] if part != 1 else []
    return sum(terms[1:], terms[0])


def whole_loss(net: Net, losses: list[Tensor], each: Pass, rank: int) -> Tensor:
    """Make the loss that backward is called on, of the losses of all its forward passes."""
    loss = sum(losses[1:], losses[0])
    mask = by_rank(each.penalty, rank, 0)
    penalised = net.units(mask)
    if penalised:
        loss = loss + 0.3 * sum(p.square().sum() for p in penalised)
    return loss * by_rank(each.factors, rank, 1.0)
