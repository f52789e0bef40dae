"""Trees of tensors whose number of rows differs between ranks: what each has, and what all have.

A rank tells what it has in an *outline*: the containers, and of each tensor the type, the shape of
a row and how many rows there are. Outlines are JSON. `merge` makes one of those of all ranks, in
which every leaf is a `Column`. A rank that has nothing, or no rows, goes by what the others say.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import InvalidArgument, InvalidType
from ..groups._formatting import dtype_name

__all__ = [
    "Column",
    "Disagreement",
    "build",
    "columns",
    "merge",
    "outline",
    "parse",
    "take",
]


class Disagreement(Exception):
    """Two ranks have something else in one place of their trees."""


class Leaf(NamedTuple):
    """A rank's tensor, as it tells the others of it."""

    dtype: str
    shape: list[int] | None
    """Of a row; None for a number, of which a rank has one."""
    rows: int

    def __str__(self) -> str:
        if self.shape is None:
            return f"a number ({self.dtype})"
        return f"rows of {self.dtype}{self.shape}"


class Branch(NamedTuple):
    """A dict, list or tuple."""

    kind: str
    keys: list[str | int]
    parts: list[Any]

    def __str__(self) -> str:
        if self.kind == "dict":
            return f"a dict with the keys {', '.join(map(repr, self.keys)) or '(none)'}"
        return f"a {self.kind} of {len(self.keys)}"


class Column(NamedTuple):
    """A leaf as all ranks have it together."""

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...] | None
    rows: dict[int, int]
    """How many each rank has."""

    @property
    def place(self) -> str:
        """Tell where it is, at the end of a sentence."""
        return _at(self.key)

    def nbytes(self, rank: int) -> int:
        """Tell how many bytes a rank has of it."""
        return self.rows[rank] * math.prod(self.shape or ()) * self.dtype.itemsize


NUMBERS = {bool: torch.bool, int: torch.int64, float: torch.float64, complex: torch.complex128}
"""How Python's are sent; a bool is an int, too, so the order matters."""
Node = Any
"""A `Leaf` or `Column`, a `Branch`, or None where nothing is known."""


# -- a rank's own --------------------------------------------------------------------------


def outline(tree: Any, key: str = "") -> Node:
    """Tell what is in a tree."""
    if tree is None:
        return None
    if isinstance(tree, Mapping):
        keys = list(tree)
        strange = [k for k in keys if not isinstance(k, str | int) or isinstance(k, bool)]
        if strange:
            raise InvalidType(f"keys are text or integers, not {strange[0]!r}{_at(key)}")
        return Branch("dict", keys, [outline(tree[k], f"{key}[{k!r}]") for k in keys])
    if isinstance(tree, list | tuple):
        kind = "list" if isinstance(tree, list) else "tuple"
        parts = [outline(part, f"{key}[{k}]") for k, part in enumerate(tree)]
        return Branch(kind, list(range(len(tree))), parts)
    return _leaf(tree, key)


def _leaf(value: Any, key: str) -> Leaf:
    if isinstance(value, Tensor):
        if value.layout is not torch.strided or value.is_quantized:
            raise InvalidType(
                f"only dense tensors can be gathered: pass tensor.to_dense(){_at(key)}"
            )
        name = dtype_name(value.dtype)
        return Leaf(name, list(value.shape[1:]), len(value)) if value.dim() else Leaf(name, None, 1)
    if not isinstance(value, tuple(NUMBERS)):
        raise InvalidType(
            f"only tensors and numbers can be gathered, not {type(value).__name__}{_at(key)}"
        )
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise InvalidArgument(f"{value} does not fit in an int64{_at(key)}")
    return Leaf(dtype_name(as_rows(value).dtype), None, 1)


def as_rows(value: Any) -> Tensor:
    """Show a leaf as rows in plain memory; a number is one row."""
    if isinstance(value, Tensor):
        plain = value.detach().resolve_conj().resolve_neg().contiguous()
        return plain if plain.dim() else plain.view(1)
    dtype = next(dtype for kind, dtype in NUMBERS.items() if isinstance(value, kind))
    return torch.tensor([value], dtype=dtype)


def parse(data: Any) -> Node:
    """Read an outline that has come as JSON."""
    if data is None:
        return None
    first, second, third = data
    if isinstance(third, list):
        return Branch(first, second, [parse(part) for part in third])
    return Leaf(first, second, third)


# -- everybody's ---------------------------------------------------------------------------


def merge(nodes: Mapping[int, Node], key: str = "") -> Node:
    """Make one outline of the ranks', or raise `Disagreement`; who has no rows agrees with all."""
    known = {rank: node for rank, node in nodes.items() if node is not None}
    solid = {rank: node for rank, node in known.items() if not _is_empty(node)}
    if not solid:
        # Whoever has made an empty tensor of some shape knows more than who made just any.
        solid = {r: leaf for r, leaf in known.items() if leaf.shape} or known
        solid = dict(list(solid.items())[:1])
    if not solid:
        return None
    kind = _only_kind(solid, key)
    if isinstance(kind, Leaf):
        shape = None if kind.shape is None else tuple(kind.shape)
        rows = {rank: solid[rank].rows if rank in solid else 0 for rank in nodes}
        return Column(key, _dtype(kind.dtype), shape, rows)
    parts = []
    for part in kind.keys:
        below = {r: _part(n, part) if r in solid else None for r, n in nodes.items()}
        parts.append(merge(below, f"{key}[{part!r}]"))
    return Branch(kind.kind, kind.keys, parts)


def columns(node: Node) -> Iterator[Column]:
    """List the leaves of an outline that ranks have agreed on."""
    if isinstance(node, Column):
        yield node
    elif node is not None:
        for part in node.parts:
            yield from columns(part)


def take(node: Node, tree: Any) -> Iterator[Tensor | None]:
    """List what a rank has of every column."""
    if isinstance(node, Column):
        yield None if tree is None else as_rows(tree)
    elif node is not None:
        for key, part in zip(node.keys, node.parts, strict=True):
            yield from take(part, tree[key] if _is_branch(tree) else None)


def build(node: Node, tree: Any, gathered: Iterator[Tensor]) -> Any:
    """Put gathered columns in the places of a rank's own, or where the others have them."""
    if node is None:
        return None
    if isinstance(node, Column):
        return next(gathered)
    own = tree if _is_branch(tree) else None
    parts = {
        key: build(part, None if own is None else own[key], gathered)
        for key, part in zip(node.keys, node.parts, strict=True)
    }
    if node.kind == "dict":
        return {key: parts[key] for key in (parts if own is None else own)}
    if node.kind == "list":
        return list(parts.values())
    make: Any = getattr(type(own), "_make", tuple)  # a named tuple remains one
    return make(parts.values())


def _is_branch(tree: Any) -> bool:
    return isinstance(tree, Mapping | list | tuple)


def _is_empty(node: Node) -> bool:
    return isinstance(node, Leaf) and not node.rows


def _part(branch: Branch, key: str | int) -> Node:
    return branch.parts[branch.keys.index(key)]


def _only_kind(nodes: Mapping[int, Node], key: str) -> Node:
    """Return what all ranks have in a place, or raise."""
    first, one = next(iter(nodes.items()))
    for rank, other in nodes.items():
        if not _are_alike(one, other):
            raise Disagreement(f"rank {first} has {one}, and rank {rank} has {other}{_at(key)}")
    return one


def _are_alike(one: Node, other: Node) -> bool:
    if isinstance(one, Leaf) or isinstance(other, Leaf):
        return type(one) is type(other) and one[:2] == other[:2]
    return one.kind == other.kind and set(one.keys) == set(other.keys)


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise Disagreement(f"torch has no type {name!r} here")
    return found


def _at(key: str) -> str:
    return f", at {key}" if key else ""
