"""`gather_uneven`: gather tensors of which ranks have different numbers of rows.

First ranks exchange a JSON description of their trees and arguments. From it every rank knows
how many bytes come from where, or raises the same error as the others. Then each rank's bytes
are broadcast, all broadcasts in flight at once, without padding.

A description lists containers and, for each tensor, dtype, row shape and number of rows.
`merge_trees` combines those of all ranks into one tree of `Column` leaves; a rank with no data or
no rows adopts what the others have.
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
from ..groups._factory import default_group
from ..groups._formatting import dtype_name
from ..groups._reductions import as_bytes
from ..groups._text_exchange import device_of, exchange_texts


class TreeMismatch(Exception):
    """The trees of two ranks differ."""


class TensorSpec(NamedTuple):
    """The description of a rank's tensor."""

    dtype: str
    shape: list[int] | None
    """Of a row; None for a number."""
    rows: int

    def __str__(self) -> str:
        if self.shape is None:
            return f"a number ({self.dtype})"
        return f"rows of {self.dtype}{self.shape}"


class ContainerSpec(NamedTuple):
    kind: str
    keys: list[str | int]
    parts: list[Any]

    def __str__(self) -> str:
        if self.kind == "dict":
            return f"a dict with the keys {', '.join(map(repr, self.keys)) or '(none)'}"
        return f"a {self.kind} of {len(self.keys)}"


class Column(NamedTuple):
    """A leaf with the rows of all ranks."""

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...] | None
    rows: dict[int, int]
    """By rank."""

    def nbytes(self, rank: int) -> int:
        return self.rows[rank] * math.prod(self.shape or ()) * self.dtype.itemsize


NUMBER_DTYPES = {
    bool: torch.bool,
    int: torch.int64,
    float: torch.float64,
    complex: torch.complex128,
}
"""Dtypes of Python numbers. A bool is an int too, so the order matters."""
TreeSpec = Any
"""A `TensorSpec` or `Column`, a `ContainerSpec`, or None for no data."""


def describe_tree(tree: Any, key: str = "") -> TreeSpec:
    if tree is None:
        return None
    if isinstance(tree, Mapping):
        keys = list(tree)
        invalid = [k for k in keys if not isinstance(k, str | int) or isinstance(k, bool)]
        if invalid:
            raise InvalidType(
                f"keys must be strings or integers, got {invalid[0]!r}{_format_location(key)}"
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
                f"only dense tensors can be gathered: use tensor.to_dense(){_format_location(key)}"
            )
        name = dtype_name(value.dtype)
        return (
            TensorSpec(name, list(value.shape[1:]), len(value))
            if value.dim()
            else TensorSpec(name, None, 1)
        )
    if not isinstance(value, tuple(NUMBER_DTYPES)):
        raise InvalidType(
            f"only tensors and numbers can be gathered, got {type(value).__name__}"
            f"{_format_location(key)}"
        )
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise InvalidArgument(f"{value} does not fit in an int64{_format_location(key)}")
    return TensorSpec(dtype_name(as_rows(value).dtype), None, 1)


def as_rows(value: Any) -> Tensor:
    """Return a leaf as contiguous rows; a number is one row."""
    if isinstance(value, Tensor):
        plain = value.detach().resolve_conj().resolve_neg().contiguous()
        return plain if plain.dim() else plain.view(1)
    dtype = next(dtype for kind, dtype in NUMBER_DTYPES.items() if isinstance(value, kind))
    return torch.tensor([value], dtype=dtype)


def parse_description(data: Any) -> TreeSpec:
    if data is None:
        return None
    first, second, third = data
    if isinstance(third, list):
        return ContainerSpec(first, second, [parse_description(part) for part in third])
    return TensorSpec(first, second, third)


def merge_trees(nodes: Mapping[int, TreeSpec], key: str = "") -> TreeSpec:
    """Combine the ranks' trees, or raise `TreeMismatch`; a rank without rows matches any."""
    known = {rank: node for rank, node in nodes.items() if node is not None}
    filled = {rank: node for rank, node in known.items() if not _is_empty(node)}
    if not filled:
        # Prefer an empty tensor with a row shape to one without.
        filled = {r: leaf for r, leaf in known.items() if leaf.shape} or known
        filled = dict(list(filled.items())[:1])
    if not filled:
        return None
    kind = _common_spec(filled, key)
    if isinstance(kind, TensorSpec):
        shape = None if kind.shape is None else tuple(kind.shape)
        rows = {rank: filled[rank].rows if rank in filled else 0 for rank in nodes}
        return Column(key, _dtype_of_name(kind.dtype), shape, rows)
    parts = []
    for part in kind.keys:
        below = {r: _child(n, part) if r in filled else None for r, n in nodes.items()}
        parts.append(merge_trees(below, f"{key}[{part!r}]"))
    return ContainerSpec(kind.kind, kind.keys, parts)


def iter_columns(node: TreeSpec) -> Iterator[Column]:
    if isinstance(node, Column):
        yield node
    elif node is not None:
        for part in node.parts:
            yield from iter_columns(part)


def local_rows(node: TreeSpec, tree: Any) -> Iterator[Tensor | None]:
    """Yield this rank's rows of every column, or None."""
    if isinstance(node, Column):
        yield None if tree is None else as_rows(tree)
    elif node is not None:
        for key, part in zip(node.keys, node.parts, strict=True):
            yield from local_rows(part, tree[key] if _is_container(tree) else None)


def rebuild_tree(node: TreeSpec, tree: Any, gathered: Iterator[Tensor]) -> Any:
    """Return a tree like this rank's own, or like the others', with the gathered columns."""
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
    make: Any = getattr(type(own), "_make", tuple)  # keeps named tuples
    return make(parts.values())


def _is_container(tree: Any) -> bool:
    return isinstance(tree, Mapping | list | tuple)


def _is_empty(node: TreeSpec) -> bool:
    return isinstance(node, TensorSpec) and not node.rows


def _child(branch: ContainerSpec, key: str | int) -> TreeSpec:
    return branch.parts[branch.keys.index(key)]


def _common_spec(nodes: Mapping[int, TreeSpec], key: str) -> TreeSpec:
    first, one = next(iter(nodes.items()))
    for rank, other in nodes.items():
        if not _is_compatible(one, other):
            raise TreeMismatch(
                f"rank {first} has {one}, rank {rank} has {other}{_format_location(key)}"
            )
    return one


def _is_compatible(one: TreeSpec, other: TreeSpec) -> bool:
    if isinstance(one, TensorSpec) or isinstance(other, TensorSpec):
        return type(one) is type(other) and one[:2] == other[:2]
    return one.kind == other.kind and set(one.keys) == set(other.keys)


def _dtype_of_name(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise TreeMismatch(f"this version of torch has no dtype {name!r}")
    return found


def _format_location(key: str) -> str:
    return f", at {key}" if key else ""


SEND_TAG = 0x7EA  # distinguishes sends from the user's own
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
    """Gather tensors of which ranks have different numbers of rows.

    `tree` is a tensor, or a dict, list or tuple of trees. Every rank gets the same tree with the
    rows of all, in rank order; with `dst` only that rank does, and the others get None. A number
    or a tensor without dims becomes a tensor with one element per rank. A rank without data may
    pass None for any part, or an empty tensor of any dtype. Ranks that have left the group are not
    in the result.

    ``order="interleaved"`` restores the order in which ``DistributedSampler`` distributes rows: the
    first of every rank, then the second. `total`, the length of the dataset, drops the rows that
    the sampler repeats at the end.

    All ranks call it. If their trees differ, all raise `RankMismatch`, which names two ranks and
    the position. `group` defaults to the current group, else torch's default group.
    """
    group = default_group() if group is None else group
    if not isinstance(group, dist.ProcessGroup):
        raise InvalidArgument(
            "gather_uneven has no group: pass one, or enter it with "
            "phalanx.groups.process_group(group)"
        )
    request = GatherRequest(dst, order, total)
    texts = exchange_texts(_describe_request(tree, request, group), group)
    node = _agree_on_tree(texts, group)
    parts, own = list(iter_columns(node)), list(local_rows(node, tree))
    if total is not None:
        _check_total(parts, total, group.size())
    received = _transfer(parts, _pack_bytes(own, group), group, dst)
    if received is None:
        return None
    gathered = [
        _assemble_rows(part, pieces, request, group.size()).to(_device(mine, group))
        for part, mine, pieces in zip(parts, own, _unpack_columns(parts, received), strict=True)
    ]
    return rebuild_tree(node, tree, iter(gathered))


class GatherRequest(NamedTuple):
    """The arguments of a call, which must be equal on all ranks."""

    dst: int | None
    order: str
    total: int | None

    def check(self, size: int) -> None:
        if self.order not in ("ranks", "interleaved"):
            raise InvalidArgument(f"order must be 'ranks' or 'interleaved', got {self.order!r}")
        if self.dst is not None and not (isinstance(self.dst, int) and 0 <= self.dst < size):
            raise InvalidArgument(f"dst must be a rank of a group of {size}, got {self.dst!r}")
        if self.total is None:
            return
        if not isinstance(self.total, int) or self.total < 0:
            raise InvalidArgument(f"total must be a number of rows, got {self.total!r}")
        if self.order == "ranks":
            raise InvalidArgument("total needs order='interleaved'")

    def __str__(self) -> str:
        return f"dst={self.dst}, order={self.order!r}, total={self.total}"


ARGUMENT_ERRORS: dict[str, type[MisuseError]] = {
    kind.__name__: kind for kind in (InvalidArgument, InvalidType)
}


def _describe_request(tree: Any, request: GatherRequest, group: dist.ProcessGroup) -> str:
    """Describe this rank's tree, or the error with it, so that every rank raises it."""
    try:
        request.check(group.size())
        description = {"request": request, "tree": describe_tree(tree)}
    except Exception as error:  # noqa: BLE001 - any error must reach the other ranks
        kind = type(error).__name__
        is_known = kind in ARGUMENT_ERRORS
        text = str(error) if is_known else f"{kind}: {error}"
        description = {"error": [kind if is_known else InvalidType.__name__, text]}
    return json.dumps(description, separators=(",", ":"))


def _agree_on_tree(texts: Mapping[int, str], group: dist.ProcessGroup) -> Any:
    """Combine the descriptions of all ranks, or raise the same error on all."""
    descriptions = {rank: json.loads(text) for rank, text in texts.items()}
    for rank, description in descriptions.items():
        if "error" in description:
            kind, text = description["error"]
            raise ARGUMENT_ERRORS[kind](f"{OPERATION}: {text} (on rank {rank})")
    requests = {rank: GatherRequest(*each["request"]) for rank, each in descriptions.items()}
    (first, request), *others = requests.items()
    for rank, other in others:
        if other != request:
            raise _mismatch(f"rank {first} passed {request}, rank {rank} passed {other}", group)
    if request.dst is not None and request.dst not in descriptions:
        raise PeerLeft(
            f"{OPERATION}: rank {request.dst} (dst) has left the group",
            group=getattr(group, "label", ""),
            operation=OPERATION,
            ranks=(request.dst,),
        )
    try:
        return merge_trees(
            {rank: parse_description(each["tree"]) for rank, each in descriptions.items()}
        )
    except TreeMismatch as error:
        raise _mismatch(str(error), group) from None


def _mismatch(text: str, group: dist.ProcessGroup) -> RankMismatch:
    label = getattr(group, "label", "")
    return RankMismatch(f"{OPERATION}: {text}", group=label, operation=OPERATION)


def _check_total(parts: Sequence[Column], total: int, size: int) -> None:
    for part in parts:
        for rank, rows in part.rows.items():
            share = len(range(rank, total, size))
            if part.shape is not None and rows < share:
                raise InvalidArgument(
                    f"{OPERATION}: with total={total}, rank {rank} of {size} must have {share} "
                    f"rows, got {rows}{_format_location(part.key)}"
                )


def _device(mine: Tensor | None, group: dist.ProcessGroup) -> torch.device:
    return device_of(group) if mine is None else mine.device


def _pack_bytes(own: Sequence[Tensor | None], group: dist.ProcessGroup) -> Tensor:
    pieces = [as_bytes(rows).view(-1).to(device_of(group)) for rows in own if rows is not None]
    return torch.cat([torch.empty(0, dtype=torch.uint8, device=device_of(group)), *pieces])


def _unpack_columns(parts: Sequence[Column], received: Mapping[int, Tensor]) -> list[list[Tensor]]:
    """Split the bytes of each rank by column."""
    by_rank = [
        torch.split(data, [part.nbytes(rank) for part in parts]) for rank, data in received.items()
    ]
    return [[pieces[place] for pieces in by_rank] for place in range(len(parts))]


def _assemble_rows(part: Column, pieces: list[Tensor], request: GatherRequest, size: int) -> Tensor:
    count, shape = sum(part.rows.values()), part.shape or ()
    data = torch.cat(pieces)
    if request.order == "interleaved" and part.shape is not None:
        order = _interleaved_order(part.rows, size, request.total).to(data.device)
        data = data.view(count, math.prod(shape) * part.dtype.itemsize)[order].reshape(-1)
        count = len(order)
    return data.view(part.dtype).view(count, *shape)


def _interleaved_order(rows: Mapping[int, int], size: int, total: int | None) -> Tensor:
    """Return the indices, in rank order, of rows in the order of `DistributedSampler`."""
    positions = torch.cat([torch.arange(count) * size + rank for rank, count in rows.items()])
    order = positions.argsort()
    return order if total is None else order[: int((positions < total).sum())]


def _transfer(
    parts: Sequence[Column], mine: Tensor, group: dist.ProcessGroup, dst: int | None
) -> dict[int, Tensor] | None:
    """Send all bytes to `dst` or to all; return them by rank, or None if not received."""
    ranks = parts[0].rows if parts else ()
    sizes = {rank: sum(part.nbytes(rank) for part in parts) for rank in ranks}
    if dst is not None:
        return _send_to_dst(mine, sizes, group, dst)
    return _broadcast_all(mine, sizes, group)


def _broadcast_all(
    mine: Tensor, sizes: Mapping[int, int], group: dist.ProcessGroup
) -> dict[int, Tensor]:
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
