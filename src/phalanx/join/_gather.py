"""`gather_uneven`: gather tensors of which ranks have different numbers of rows.

First ranks exchange a JSON description of their trees and arguments. From it every rank knows
how many bytes come from where, or raises the same error as the others. Then each rank's bytes
are broadcast, all broadcasts in flight at once, without padding.

A description lists containers and, for each tensor, dtype, row shape and number of rows.
`merge` combines those of all ranks into one tree of `Column` leaves; a rank with no data or no
rows adopts what the others have.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d

from ..errors import InvalidArgument, InvalidType, MisuseError, PeerLeft, RankMismatch
from ..groups import ProcessGroup
from ..groups._factory import default_group
from ..groups._formatting import dtype_name
from ..groups._reductions import as_bytes

FIRST_ROUND_BYTES = 256
"""Bytes of a card; what does not fit on it takes another round."""
LENGTH_BYTES = 4
"""Bytes of a card in which it says how long the text is."""


def exchange(text: str, group: dist.ProcessGroup) -> dict[int, str]:
    """Give every rank everybody's text; those who have left the group have none."""
    data = len(text.encode()).to_bytes(LENGTH_BYTES, "little") + text.encode()
    cards = _allgather_bytes(
        _bytes_tensor(data[:FIRST_ROUND_BYTES].ljust(FIRST_ROUND_BYTES, b"\0"), group), group
    )
    sent = {rank: bytes(card.tolist()) for rank, card in enumerate(cards)}
    # All zero is the card of nobody: a text has at least one byte.
    lengths = {
        rank: LENGTH_BYTES + int.from_bytes(card[:LENGTH_BYTES], "little")
        for rank, card in sent.items()
    }
    there = [rank for rank, length in lengths.items() if length > LENGTH_BYTES]
    rest = max(lengths[rank] for rank in there) - FIRST_ROUND_BYTES
    if rest > 0:
        more = _allgather_bytes(
            _bytes_tensor(data[FIRST_ROUND_BYTES:].ljust(rest, b"\0"), group), group
        )
        sent = {rank: sent[rank] + bytes(more[rank].tolist()) for rank in there}
    return {rank: sent[rank][LENGTH_BYTES : lengths[rank]].decode() for rank in there}


def _allgather_bytes(mine: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    """Collect equally many bytes of every rank; zeros of those who have left."""
    rows = list(mine.new_zeros(group.size(), mine.numel()))
    group.allgather([rows], [mine], c10d.AllgatherOptions()).wait()
    return rows


def device_of(group: dist.ProcessGroup) -> torch.device:
    """Tell where a group takes tensors from: the CPU, if it does."""
    if isinstance(group, ProcessGroup):
        types = set(group.devices)
    else:
        types = {device.type for device in group._device_types}
    return torch.device("cpu" if "cpu" in types or not types else min(types))


def _bytes_tensor(data: bytes, group: dist.ProcessGroup) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device_of(group))


class TreeMismatch(Exception):
    """Two ranks have something else in one place of their trees."""


class TensorSpec(NamedTuple):
    """A rank's tensor, as it tells the others of it."""

    dtype: str
    shape: list[int] | None
    """Of a row; None for a number, of which a rank has one."""
    rows: int

    def __str__(self) -> str:
        if self.shape is None:
            return f"a number ({self.dtype})"
        return f"rows of {self.dtype}{self.shape}"


class ContainerSpec(NamedTuple):
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
        return _format_location(self.key)

    def nbytes(self, rank: int) -> int:
        """Tell how many bytes a rank has of it."""
        return self.rows[rank] * math.prod(self.shape or ()) * self.dtype.itemsize


NUMBER_DTYPES = {
    bool: torch.bool,
    int: torch.int64,
    float: torch.float64,
    complex: torch.complex128,
}
"""How Python's are sent; a bool is an int, too, so the order matters."""
TreeSpec = Any
"""A `TensorSpec` or `Column`, a `ContainerSpec`, or None where nothing is known."""


# -- a rank's own --------------------------------------------------------------------------


def describe_tree(tree: Any, key: str = "") -> TreeSpec:
    """Tell what is in a tree."""
    if tree is None:
        return None
    if isinstance(tree, Mapping):
        keys = list(tree)
        strange = [k for k in keys if not isinstance(k, str | int) or isinstance(k, bool)]
        if strange:
            raise InvalidType(
                f"keys are text or integers, not {strange[0]!r}{_format_location(key)}"
            )
        return ContainerSpec("dict", keys, [describe_tree(tree[k], f"{key}[{k!r}]") for k in keys])
    if isinstance(tree, list | tuple):
        kind = "list" if isinstance(tree, list) else "tuple"
        parts = [describe_tree(part, f"{key}[{k}]") for k, part in enumerate(tree)]
        return ContainerSpec(kind, list(range(len(tree))), parts)
    return _describe_leaf(tree, key)


def _describe_leaf(value: Any, key: str) -> TensorSpec:
    if isinstance(value, Tensor):
        if value.layout is not torch.strided or value.is_quantized:
            raise InvalidType(
                f"only dense tensors can be gathered: pass tensor.to_dense(){_format_location(key)}"
            )
        name = dtype_name(value.dtype)
        return (
            TensorSpec(name, list(value.shape[1:]), len(value))
            if value.dim()
            else TensorSpec(name, None, 1)
        )
    if not isinstance(value, tuple(NUMBER_DTYPES)):
        raise InvalidType(
            f"only tensors and numbers can be gathered, not {type(value).__name__}{_format_location(key)}"
        )
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise InvalidArgument(f"{value} does not fit in an int64{_format_location(key)}")
    return TensorSpec(dtype_name(as_rows(value).dtype), None, 1)


def as_rows(value: Any) -> Tensor:
    """Show a leaf as rows in plain memory; a number is one row."""
    if isinstance(value, Tensor):
        plain = value.detach().resolve_conj().resolve_neg().contiguous()
        return plain if plain.dim() else plain.view(1)
    dtype = next(dtype for kind, dtype in NUMBER_DTYPES.items() if isinstance(value, kind))
    return torch.tensor([value], dtype=dtype)


def parse(data: Any) -> TreeSpec:
    """Read an outline that has come as JSON."""
    if data is None:
        return None
    first, second, third = data
    if isinstance(third, list):
        return ContainerSpec(first, second, [parse(part) for part in third])
    return TensorSpec(first, second, third)


# -- everybody's ---------------------------------------------------------------------------


def merge(nodes: Mapping[int, TreeSpec], key: str = "") -> TreeSpec:
    """Make one outline of the ranks', or raise `TreeMismatch`; who has no rows agrees with all."""
    known = {rank: node for rank, node in nodes.items() if node is not None}
    solid = {rank: node for rank, node in known.items() if not _is_empty(node)}
    if not solid:
        # Whoever has made an empty tensor of some shape knows more than who made just any.
        solid = {r: leaf for r, leaf in known.items() if leaf.shape} or known
        solid = dict(list(solid.items())[:1])
    if not solid:
        return None
    kind = _common_spec(solid, key)
    if isinstance(kind, TensorSpec):
        shape = None if kind.shape is None else tuple(kind.shape)
        rows = {rank: solid[rank].rows if rank in solid else 0 for rank in nodes}
        return Column(key, _dtype_of_name(kind.dtype), shape, rows)
    parts = []
    for part in kind.keys:
        below = {r: _child(n, part) if r in solid else None for r, n in nodes.items()}
        parts.append(merge(below, f"{key}[{part!r}]"))
    return ContainerSpec(kind.kind, kind.keys, parts)


def iter_columns(node: TreeSpec) -> Iterator[Column]:
    """List the leaves of an outline that ranks have agreed on."""
    if isinstance(node, Column):
        yield node
    elif node is not None:
        for part in node.parts:
            yield from iter_columns(part)


def take(node: TreeSpec, tree: Any) -> Iterator[Tensor | None]:
    """List what a rank has of every column."""
    if isinstance(node, Column):
        yield None if tree is None else as_rows(tree)
    elif node is not None:
        for key, part in zip(node.keys, node.parts, strict=True):
            yield from take(part, tree[key] if _is_container(tree) else None)


def rebuild_tree(node: TreeSpec, tree: Any, gathered: Iterator[Tensor]) -> Any:
    """Put gathered columns in the places of a rank's own, or where the others have them."""
    if node is None:
        return None
    if isinstance(node, Column):
        return next(gathered)
    own = tree if _is_container(tree) else None
    parts = {
        key: rebuild_tree(part, None if own is None else own[key], gathered)
        for key, part in zip(node.keys, node.parts, strict=True)
    }
    if node.kind == "dict":
        return {key: parts[key] for key in (parts if own is None else own)}
    if node.kind == "list":
        return list(parts.values())
    make: Any = getattr(type(own), "_make", tuple)  # a named tuple remains one
    return make(parts.values())


def _is_container(tree: Any) -> bool:
    return isinstance(tree, Mapping | list | tuple)


def _is_empty(node: TreeSpec) -> bool:
    return isinstance(node, TensorSpec) and not node.rows


def _child(branch: ContainerSpec, key: str | int) -> TreeSpec:
    return branch.parts[branch.keys.index(key)]


def _common_spec(nodes: Mapping[int, TreeSpec], key: str) -> TreeSpec:
    """Return what all ranks have in a place, or raise."""
    first, one = next(iter(nodes.items()))
    for rank, other in nodes.items():
        if not _is_compatible(one, other):
            raise TreeMismatch(
                f"rank {first} has {one}, and rank {rank} has {other}{_format_location(key)}"
            )
    return one


def _is_compatible(one: TreeSpec, other: TreeSpec) -> bool:
    if isinstance(one, TensorSpec) or isinstance(other, TensorSpec):
        return type(one) is type(other) and one[:2] == other[:2]
    return one.kind == other.kind and set(one.keys) == set(other.keys)


def _dtype_of_name(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise TreeMismatch(f"torch has no type {name!r} here")
    return found


def _format_location(key: str) -> str:
    return f", at {key}" if key else ""


SEND_TAG = 0x7EA
"""Of sends, so that they are not taken for the user's own."""
OPERATION = "gather_uneven"


@torch.no_grad()
def gather_uneven(
    tree: Any,
    group: dist.ProcessGroup | None = None,
    *,
    dst: int | None = None,
    order: str = "ranks",
    total: int | None = None,
) -> Any:
    """Collect tensors of which ranks have different numbers of rows, rank after rank.

    `tree` is a tensor, or a dict, list or tuple of such trees. Every rank gets the same tree with
    the rows of all; with `dst` only that rank of the group does, and the others None. A number, or
    a tensor without dims, becomes a tensor with one element per rank. A rank without data may pass
    None for all or a part of it, or an empty tensor of any type. Ranks that have left the group
    are not in the result.

    With ``order="interleaved"`` rows are put back in the order from which ``DistributedSampler``
    has dealt them out: the first of every rank, then the second. With `total`, the length of the
    dataset, what it has repeated at the end is dropped: the result is that of one process.

    All ranks call it. If their trees do not fit together, all raise `RankMismatch`, which names two
    ranks and the place. The group is by default the current one, or torch's.
    """
    group = default_group() if group is None else group
    if not isinstance(group, dist.ProcessGroup):
        raise InvalidArgument(
            "there is no group to gather in: pass one, or enter it with "
            "phalanx.groups.process_group(group)"
        )
    wish = GatherRequest(dst, order, total)
    node = _agree_on_tree(exchange(_describe_request(tree, wish, group), group), group)
    parts, own = list(iter_columns(node)), list(take(node, tree))
    if total is not None:
        _check_total(parts, total, group.size())
    received = _transfer(parts, _pack_bytes(own, group), group, dst)
    if received is None:
        return None
    gathered = [
        _assemble_rows(part, pieces, wish, group.size()).to(_device(mine, group))
        for part, mine, pieces in zip(parts, own, _unpack_columns(parts, received), strict=True)
    ]
    return rebuild_tree(node, tree, iter(gathered))


# -- what ranks show each other ------------------------------------------------------------


class GatherRequest(NamedTuple):
    """What a rank asks for, beside what it gives."""

    dst: int | None
    order: str
    total: int | None

    def check(self, size: int) -> None:
        """Refuse what cannot be had."""
        if self.order not in ("ranks", "interleaved"):
            raise InvalidArgument(f"order is 'ranks' or 'interleaved', not {self.order!r}")
        if self.dst is not None and not (isinstance(self.dst, int) and 0 <= self.dst < size):
            raise InvalidArgument(f"dst {self.dst!r} is not a rank of a group of {size}")
        if self.total is None:
            return
        if not isinstance(self.total, int) or self.total < 0:
            raise InvalidArgument(f"total is a number of rows, not {self.total!r}")
        if self.order == "ranks":
            raise InvalidArgument("total says what to drop where order='interleaved', only")

    def __str__(self) -> str:
        return f"dst={self.dst}, order={self.order!r}, total={self.total}"


ARGUMENT_ERRORS: dict[str, type[MisuseError]] = {
    kind.__name__: kind for kind in (InvalidArgument, InvalidType)
}


def _describe_request(tree: Any, wish: GatherRequest, group: dist.ProcessGroup) -> str:
    """Write down what this rank has, or what is wrong with it: nobody waits for who cannot come."""
    try:
        wish.check(group.size())
        card = {"wish": wish, "tree": describe_tree(tree)}
    except Exception as error:  # noqa: BLE001 - whatever it is, the others must hear of it
        kind = type(error).__name__
        known = kind in ARGUMENT_ERRORS
        told = str(error) if known else f"{kind}: {error}"
        card = {"mistake": [kind if known else InvalidType.__name__, told]}
    return json.dumps(card, separators=(",", ":"))


def _agree_on_tree(texts: Mapping[int, str], group: dist.ProcessGroup) -> Any:
    """Make one outline of what all ranks have, or raise what all raise."""
    cards = {rank: json.loads(text) for rank, text in texts.items()}
    for rank, card in cards.items():
        if "mistake" in card:
            kind, told = card["mistake"]
            raise ARGUMENT_ERRORS[kind](f"{OPERATION}: {told} (on rank {rank})")
    wishes = {rank: GatherRequest(*card["wish"]) for rank, card in cards.items()}
    (first, wish), *others = wishes.items()
    for rank, other in others:
        if other != wish:
            raise _mismatch(f"rank {first} asks for {wish}, and rank {rank} for {other}", group)
    if wish.dst is not None and wish.dst not in cards:
        raise PeerLeft(
            f"{OPERATION}: rank {wish.dst}, which was to get it all, has left the group",
            group=getattr(group, "label", ""),
            operation=OPERATION,
            ranks=(wish.dst,),
        )
    try:
        return merge({rank: parse(card["tree"]) for rank, card in cards.items()})
    except TreeMismatch as error:
        raise _mismatch(str(error), group) from None


def _mismatch(told: str, group: dist.ProcessGroup) -> RankMismatch:
    label = getattr(group, "label", "")
    return RankMismatch(f"{OPERATION}: {told}", group=label, operation=OPERATION)


def _check_total(parts: Sequence[Column], total: int, size: int) -> None:
    """Refuse a total of which a rank has not its share: something would be missing."""
    for part in parts:
        for rank, rows in part.rows.items():
            share = len(range(rank, total, size))
            if part.shape is not None and rows < share:
                raise InvalidArgument(
                    f"{OPERATION}: of total={total} rows in turn, rank {rank} of {size} has {share}"
                    f", not {rows}{part.place}"
                )


# -- bytes ---------------------------------------------------------------------------------


def _device(mine: Tensor | None, group: dist.ProcessGroup) -> torch.device:
    """Tell where a rank wants rows: where its own are."""
    return device_of(group) if mine is None else mine.device


def _pack_bytes(own: Sequence[Tensor | None], group: dist.ProcessGroup) -> Tensor:
    """Write what a rank has into one tensor of bytes."""
    pieces = [as_bytes(rows).view(-1).to(device_of(group)) for rows in own if rows is not None]
    return torch.cat([torch.empty(0, dtype=torch.uint8, device=device_of(group)), *pieces])


def _unpack_columns(parts: Sequence[Column], received: Mapping[int, Tensor]) -> list[list[Tensor]]:
    """Find the bytes of every column in those of each rank."""
    by_rank = [
        torch.split(data, [part.nbytes(rank) for part in parts]) for rank, data in received.items()
    ]
    return [[pieces[place] for pieces in by_rank] for place in range(len(parts))]


def _assemble_rows(part: Column, pieces: list[Tensor], wish: GatherRequest, size: int) -> Tensor:
    """Put the rows of a column one after the other."""
    count, shape = sum(part.rows.values()), part.shape or ()
    data = torch.cat(pieces)
    if wish.order == "interleaved" and part.shape is not None:
        order = _interleaved_order(part.rows, size, wish.total).to(data.device)
        data = data.view(count, math.prod(shape) * part.dtype.itemsize)[order].reshape(-1)
        count = len(order)
    return data.view(part.dtype).view(count, *shape)


def _interleaved_order(rows: Mapping[int, int], size: int, total: int | None) -> Tensor:
    """Tell which row of all, rank after rank, comes when if ranks have them in turn."""
    turns = torch.cat([torch.arange(count) * size + rank for rank, count in rows.items()])
    order = turns.argsort()
    return order if total is None else order[: int((turns < total).sum())]


def _transfer(
    parts: Sequence[Column], mine: Tensor, group: dist.ProcessGroup, dst: int | None
) -> dict[int, Tensor] | None:
    """Bring everybody's bytes to where they are wanted, by rank; None where they are not."""
    ranks = parts[0].rows if parts else ()
    sizes = {rank: sum(part.nbytes(rank) for part in parts) for rank in ranks}
    if dst is not None:
        return _send_to_dst(mine, sizes, group, dst)
    return _broadcast_all(mine, sizes, group)


def _broadcast_all(
    mine: Tensor, sizes: Mapping[int, int], group: dist.ProcessGroup
) -> dict[int, Tensor]:
    """Send each rank's bytes to all."""
    received = {
        rank: mine if rank == group.rank() else mine.new_empty(size) for rank, size in sizes.items()
    }
    works = []
    for rank, data in received.items():
        options = c10d.BroadcastOptions()
        options.rootRank = rank
        if len(data):
            works.append(group.broadcast([data], options))
    for work in works:
        work.wait()
    return received


def _send_to_dst(
    mine: Tensor, sizes: Mapping[int, int], group: dist.ProcessGroup, dst: int
) -> dict[int, Tensor] | None:
    """Send each rank's bytes to one."""
    if group.rank() != dst:
        if len(mine):
            group.send([mine], dst, SEND_TAG).wait()
        return None
    received = {rank: mine if rank == dst else mine.new_empty(size) for rank, size in sizes.items()}
    works = [
        group.recv([data], rank, SEND_TAG)
        for rank, data in received.items()
        if rank != dst and len(data)
    ]
    for work in works:
        work.wait()
    return received
