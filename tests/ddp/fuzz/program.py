"""What a program is: plain data that can be printed, read back and made smaller.

What may differ between ranks is a tuple by rank. What is used or penalised is a mask over *units*:
bit 0 is the first layer, then the hidden layers, the head, and a parameter of its own.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import Any

import msgspec

OPAQUE = ("plain", "slots", "boxes", "distribution", "closure", "stash")
"""Outputs that hide their tensors from torch's class."""
HIDDEN = ("closure", "stash")
"""Those that hide them from everybody: a pass is seen when it comes to a parameter, not before."""
TRANSPARENT = ("tensor", "tuple", "list", "dict", "nested", "namedtuple", "dataclass")


@dataclass(frozen=True)
class Pass:
    """One backward pass, of one or several forward passes."""

    rows: tuple[int, ...]
    uses: tuple[int, ...]
    """The units that forward uses."""
    local: bool = False
    """Whether it is in `no_sync`."""
    inside: bool = True
    """Whether a local pass has its forward in `no_sync`, too."""
    weights: tuple[float, ...] | None = None
    given: bool = False
    """Whether weights are arguments of `DDP.backward`, and not set before it."""
    parts: tuple[int, ...] = ()
    """Which outputs the loss uses: 0 both, 1 the first, 2 the second."""
    penalty: tuple[int, ...] = ()
    """The units whose parameters have a penalty in the loss."""
    factors: tuple[float, ...] = ()
    """What the loss is multiplied with."""
    forwards: int = 1
    twice: bool = False
    """Whether a second backward pass goes through the same graph."""
    probe: bool = False
    """Whether `autograd.grad` is called before backward."""
    edit: float = 1.0
    """What the user multiplies gradients with after it."""
    drop: str = "keep"
    """How gradients are dropped after it: none, zero or keep."""


@dataclass(frozen=True)
class Turn:
    """A training step, or a turn of an uneven loop."""

    passes: tuple[Pass, ...]
    steps: bool = True
    """Whether the optimizer steps (not if the last pass is local)."""
    zero: str = "none"
    """How gradients are cleared at the end: none, zero, or keep."""
    frozen: int = 0
    """The units that need no gradients."""
    evaluates: bool = False
    """Whether it begins with a forward pass without gradients."""


@dataclass(frozen=True)
class Hook:
    """A hook of the user's on a parameter."""

    kind: str
    """tensor, prehook, post, replace or node."""
    parameter: int
    """Its number, modulo the number of parameters."""
    when: int = -1
    """The turn before which it is registered; -1 is before the module is wrapped."""


@dataclass(frozen=True)
class Uneven:
    """Ranks run out of data at different turns."""

    lengths: tuple[int, ...]
    block: bool = False
    """Whether it is a `Join` block, and not the loop."""
    divides_by_all: bool = True


@dataclass(frozen=True)
class Program:
    """A model, how it is wrapped, and how it is trained."""

    seed: int
    size: int = 2
    backend: str = "local"
    layers: int = 1
    tied: bool = False
    """Whether the hidden layers are one."""
    output: str = "tensor"
    checkpointing: str = "none"
    """none, plain or reentrant."""
    checkpointed: tuple[bool, ...] = ()
    """The ranks that do it."""
    precision: str | None = None
    """The type of gradients while they travel, if forward is in bfloat16."""
    buffers: bool = False
    broadcasts: bool = True
    inputs_need_gradients: bool = False
    bucket: str = "one"
    """one, some or many buckets."""
    views: bool = True
    reduce: str = "mean"
    static: bool = False
    find_unused: bool = False
    comm_hook: bool = False
    optimizer: str | None = None
    in_backward: bool = False
    clip: str | None = None
    zeroing: str = "wrapper"
    """Who clears gradients: wrapper, module, optimizer, or by hand, in place or with new zeros."""
    hooks: tuple[Hook, ...] = ()
    uneven: Uneven | None = None
    turns: tuple[Turn, ...] = field(default=())

    @property
    def units(self) -> int:
        return self.layers + 3

    @property
    def all_units(self) -> int:
        return (1 << self.units) - 1

    @property
    def passes(self) -> list[Pass]:
        return [each for turn in self.turns for each in turn.passes]

    @property
    def is_weighted(self) -> bool:
        return any(each.weights is not None for each in self.passes)

    @property
    def shadows(self) -> bool:
        """Whether ranks without data make the calls of the others instead of leaving."""
        return self.uneven is not None and self.comm_hook

    def reached(self, turn: Turn, each: Pass, rank: int) -> int:
        """The units that get gradients in a pass."""
        head = 1 << (self.layers + 1)
        uses = each.uses[rank]
        if self.output != "tensor" and each.parts and each.parts[rank] == 2:
            uses &= ~head
        penalty = each.penalty[rank] if each.penalty else 0
        frozen = turn.frozen
        layers = (1 << (self.layers + 1)) - 2  # their bits
        if self.tied and frozen & layers:
            frozen |= layers
        return (uses | penalty) & ~frozen

    def length(self, rank: int) -> int:
        """How many turns a rank has in its loop."""
        return len(self.turns) if self.uneven is None else self.uneven.lengths[rank]

    def active(self, turn: int) -> list[int]:
        """The ranks that take part in a turn."""
        if self.uneven is None or turn >= max(self.uneven.lengths):
            return list(range(self.size))
        return [rank for rank in range(self.size) if turn < self.uneven.lengths[rank]]


def to_json(program: Program) -> str:
    """Write a program as one line, without what is as by default."""
    return msgspec.json.encode(_brief(program)).decode()


def from_json(text: str) -> Program:
    """Read a program back."""
    return msgspec.json.decode(text, type=Program)


def _brief(item: Any) -> Any:
    if isinstance(item, tuple):
        return [_brief(each) for each in item]
    if not hasattr(item, "__dataclass_fields__"):
        return item
    named = {each.name: getattr(item, each.name) for each in fields(item)}
    defaults = {each.name: each.default for each in fields(item)}
    return {name: _brief(value) for name, value in named.items() if value != defaults[name]}


def describe(program: Program) -> str:
    """List what a program does, one line per pass, for people."""
    head = {k: v for k, v in _brief(program).items() if k != "turns"}
    lines = [str(head)]
    for number, turn in enumerate(program.turns):
        rest = {k: v for k, v in asdict(turn).items() if k != "passes"}
        lines.append(f"  turn {number}: {rest}")
        lines += [f"    {_brief(each)}" for each in turn.passes]
    return "\n".join(lines)
