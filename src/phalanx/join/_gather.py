"""`gather_uneven`: gather tensors whose number of rows differs between ranks.

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

from .._formatting import dtype_name
from ..env import refuse_in_elastic_run
from ..errors import InvalidArgument, InvalidType, MisuseError, PeerLeft, RankMismatch
from ..groups._current_group import default_group
from ..groups._reductions import as_bytes
from ..groups._text_exchange import device_of, exchange_texts

SEND_TAG = 0x7EA  # distinguishes sends from the user's own
OPERATION = "gather_uneven"
ARGUMENT_ERRORS: dict[str, type[MisuseError]] = {
    kind.__name__: kind for kind in (InvalidArgument, InvalidType)
}
NUMBER_DTYPES = {
    bool: torch.bool,  # before int: a bool is one, too
    int: torch.int64,
    float: torch.float64,
    complex: torch.complex128,
}


class DescriptionMismatch(Exception):
    """The trees or arguments of two ranks differ."""


class RowsSpec(NamedTuple):
    """The rows of a rank's tensor."""

    dtype: str
    shape: list[int] | None  # of a row; None for a number
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
    shape: list[int] | None
    rows: dict[int, int]  # by rank

    def nbytes(self, rank: int) -> int:
        return self.rows[rank] * math.prod(self.shape or ()) * self.dtype.itemsize


TreeSpec = Any  # a `RowsSpec` or `Column`, a `ContainerSpec`, or None for no data


def describe_tree(tree: Any, key: str = "") -> TreeSpec:
    if tree is None:
        return None
    if isinstance(tree, Mapping):
        keys = list(tree)
        for each in keys:
            if not isinstance(each, str | int) or isinstance(each, bool):
                raise InvalidType(f"keys must be strings or integers, got {each!r}{_at(key)}")
        return ContainerSpec("dict", keys, [describe_tree(tree[k], f"{key}[{k!r}]") for k in keys])
    if isinstance(tree, list | tuple):
        kind = "list" if isinstance(tree, list) else "tuple"
        parts = [describe_tree(part, f"{key}[{k}]") for k, part in enumerate(tree)]
        return ContainerSpec(kind, list(range(len(tree))), parts)
    if isinstance(tree, Tensor):
        if tree.layout is not torch.strided or tree.is_quantized:
            raise InvalidType(
                f"only dense tensors can be gathered: use tensor.to_dense(){_at(key)}"
            )
        shape, rows = (list(tree.shape[1:]), len(tree)) if tree.dim() else (None, 1)
        return RowsSpec(dtype_name(tree.dtype), shape, rows)
    if not isinstance(tree, tuple(NUMBER_DTYPES)):
        kind = type(tree).__name__
        raise InvalidType(f"only tensors and numbers can be gathered, got {kind}{_at(key)}")
    if isinstance(tree, int) and not -(2**63) <= tree < 2**63:
        raise InvalidArgument(f"{tree} does not fit in an int64{_at(key)}")
    return RowsSpec(dtype_name(as_rows(tree).dtype), None, 1)


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
    return RowsSpec(first, second, third)


def merge_trees(nodes: Mapping[int, TreeSpec], key: str = "") -> TreeSpec:
    """Combine the ranks' trees, or raise `DescriptionMismatch`; a rank without rows matches any."""
    known = {rank: node for rank, node in nodes.items() if node is not None}
    filled = {r: n for r, n in known.items() if isinstance(n, ContainerSpec) or n.rows}
    if not filled:
        # Prefer an empty tensor with a row shape to one without.
        filled = dict(sorted(known.items(), key=lambda item: not item[1].shape)[:1])
    if not filled:
        return None
    first, spec = next(iter(filled.items()))
    for rank, other in filled.items():
        if _common(other) != _common(spec):
            raise DescriptionMismatch(f"rank {first} has {spec}, rank {rank} has {other}{_at(key)}")
    if isinstance(spec, RowsSpec):
        rows = {rank: filled[rank].rows if rank in filled else 0 for rank in nodes}
        return Column(key, getattr(torch, spec.dtype), spec.shape, rows)
    parts = []
    for part in spec.keys:
        below = {r: n.parts[n.keys.index(part)] if r in filled else None for r, n in nodes.items()}
        parts.append(merge_trees(below, f"{key}[{part!r}]"))
    return ContainerSpec(spec.kind, spec.keys, parts)


def _common(spec: RowsSpec | ContainerSpec) -> object:
    """Return what must be equal on all ranks."""
    return spec[:2] if isinstance(spec, RowsSpec) else (spec.kind, set(spec.keys))


def iter_columns(node: TreeSpec, tree: Any) -> Iterator[tuple[Column, Tensor | None]]:
    if isinstance(node, Column):
        yield node, None if tree is None else as_rows(tree)
    elif node is not None:
        for key, part in zip(node.keys, node.parts, strict=True):
            yield from iter_columns(part, tree[key] if _is_container(tree) else None)


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


def _at(key: str) -> str:
    return f", at {key}" if key else ""


@torch.no_grad()
def gather_uneven(
    tree: Any,
    group: dist.ProcessGroup | None = None,
    *,
    dst: int | None = None,
    order: str = "ranks",
    total: int | None = None,
) -> Any:
    """Gather tensors whose number of rows differs between ranks.

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
        refuse_in_elastic_run("gather_uneven()")
        raise InvalidArgument(
            "gather_uneven has no group: pass one, or enter it with "
            "phalanx.groups.process_group(group)"
        )
    rank, size, device = group.rank(), group.size(), device_of(group)
    request = {"dst": dst, "order": order, "total": total}
    try:
        _check_request(dst, order, total, size)
        description = {"request": request, "tree": describe_tree(tree)}
    except Exception as error:  # noqa: BLE001 - every rank must raise it
        kind = type(error).__name__
        is_known = kind in ARGUMENT_ERRORS
        text = str(error) if is_known else f"{kind}: {error}"
        description = {"error": [kind if is_known else InvalidType.__name__, text]}
    texts = exchange_texts(json.dumps(description, separators=(",", ":")), group)
    node = _agree_on_tree({rank: json.loads(text) for rank, text in texts.items()}, group)
    columns = list(iter_columns(node, tree))
    if total is not None:
        _check_total([column for column, _ in columns], total, size)
    own = [as_bytes(rows).view(-1).to(device) for _, rows in columns if rows is not None]
    mine = torch.cat([torch.empty(0, dtype=torch.uint8, device=device), *own])
    received, works = {}, []
    for root in texts:
        if dst in (None, rank) or root == rank:
            nbytes = sum(column.nbytes(root) for column, _ in columns)
            data = received[root] = mine if root == rank else mine.new_empty(nbytes)
            if nbytes and root != dst:
                works.append(start_transfer(data, root, group, dst))
    for work in works:
        work.wait()
    if dst not in (None, rank):
        return None
    split = [
        torch.split(data, [column.nbytes(root) for column, _ in columns])
        for root, data in received.items()
    ]
    gathered = [
        _assemble_rows(column, pieces, size, order, total).to(
            device if rows is None else rows.device
        )
        for (column, rows), pieces in zip(columns, zip(*split, strict=True), strict=True)
    ]
    return rebuild_tree(node, tree, iter(gathered))


def _check_request(dst: int | None, order: str, total: int | None, size: int) -> None:
    if order not in ("ranks", "interleaved"):
        raise InvalidArgument(f"order must be 'ranks' or 'interleaved', got {order!r}")
    if dst is not None and not (isinstance(dst, int) and 0 <= dst < size):
        raise InvalidArgument(f"dst must be a rank of a group of {size}, got {dst!r}")
    if total is None:
        return
    if not isinstance(total, int) or total < 0:
        raise InvalidArgument(f"total must be a number of rows, got {total!r}")
    if order == "ranks":
        raise InvalidArgument("total needs order='interleaved'")


def _agree_on_tree(descriptions: Mapping[int, Any], group: dist.ProcessGroup) -> TreeSpec:
    """Combine the descriptions of all ranks, or raise the same error on all."""
    for rank, description in descriptions.items():
        if "error" in description:
            kind, text = description["error"]
            raise ARGUMENT_ERRORS[kind](f"{OPERATION}: {text} (on rank {rank})")
    label = getattr(group, "label", "")
    requests = {
        rank: ", ".join(f"{name}={value!r}" for name, value in each["request"].items())
        for rank, each in descriptions.items()
    }
    trees = {rank: parse_description(each["tree"]) for rank, each in descriptions.items()}
    try:
        (first, request), *others = requests.items()
        for rank, other in others:
            if other != request:
                raise DescriptionMismatch(
                    f"rank {first} passed {request}, rank {rank} passed {other}"
                )
        dst = descriptions[first]["request"]["dst"]
        if dst is not None and dst not in descriptions:
            raise PeerLeft(
                f"{OPERATION}: rank {dst} (dst) has left the group",
                group=label,
                operation=OPERATION,
                ranks=(dst,),
            )
        return merge_trees(trees)
    except DescriptionMismatch as error:
        raise RankMismatch(f"{OPERATION}: {error}", group=label, operation=OPERATION) from None


def _check_total(columns: Sequence[Column], total: int, size: int) -> None:
    for column in columns:
        for rank, rows in column.rows.items():
            share = len(range(rank, total, size))
            if column.shape is not None and rows < share:
                raise InvalidArgument(
                    f"{OPERATION}: with total={total}, rank {rank} of {size} must have {share} "
                    f"rows, got {rows}{_at(column.key)}"
                )


def start_transfer(data: Tensor, root: int, group: dist.ProcessGroup, dst: int | None) -> dist.Work:
    """Send bytes of one rank to another, or to all if `dst` is None; or receive them."""
    if dst is None:
        options = c10d.BroadcastOptions()
        options.rootRank = root
        return group.broadcast([data], options)
    if group.rank() == root:
        return group.send([data], dst, SEND_TAG)
    return group.recv([data], root, SEND_TAG)


def _assemble_rows(
    column: Column, pieces: Sequence[Tensor], size: int, order: str, total: int | None
) -> Tensor:
    count, shape = sum(column.rows.values()), column.shape or ()
    data = torch.cat(list(pieces))
    if order == "interleaved" and column.shape is not None:
        # The order in which `DistributedSampler` distributes rows.
        positions = torch.cat([torch.arange(n) * size + r for r, n in column.rows.items()])
        indices = positions.argsort()
        if total is not None:
            indices = indices[: int((positions < total).sum())]
        rows = data.view(count, math.prod(shape) * column.dtype.itemsize)
        count, data = len(indices), rows[indices.to(data.device)].reshape(-1)
    return data.view(column.dtype).view(count, *shape)
