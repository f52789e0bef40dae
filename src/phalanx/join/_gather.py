"""Collects what ranks have different amounts of: the outputs and metrics of an evaluation.

First every rank shows what it has and what it asks for, on a card of JSON. So all ranks know how
many bytes come from where, or what is wrong; then they raise alike. Then each rank's bytes are
broadcast, all of them at once. That takes as long as one collective of equal parts, even where
parts are nearly equal, and nothing is padded.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d

from ..errors import InvalidArgument, InvalidType, MisuseError, PeerLeft, RankMismatch
from ..groups._factory import default_group
from ..groups._reductions import as_bytes
from ._cards import device_of, exchange
from ._trees import Column, Disagreement, build, columns, merge, outline, parse, take

__all__ = ["gather_uneven"]

TAG = 0x7EA
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
    wish = Wish(dst, order, total)
    node = _agree(exchange(_card(tree, wish, group), group), group)
    parts, own = list(columns(node)), list(take(node, tree))
    if total is not None:
        _check_shares(parts, total, group.size())
    received = _move(parts, _packed(own, group), group, dst)
    if received is None:
        return None
    gathered = [
        _rows(part, pieces, wish, group.size()).to(_device(mine, group))
        for part, mine, pieces in zip(parts, own, _unpacked(parts, received), strict=True)
    ]
    return build(node, tree, iter(gathered))


# -- what ranks show each other ------------------------------------------------------------


class Wish(NamedTuple):
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


MISTAKES: dict[str, type[MisuseError]] = {
    kind.__name__: kind for kind in (InvalidArgument, InvalidType)
}


def _card(tree: Any, wish: Wish, group: dist.ProcessGroup) -> str:
    """Write down what this rank has, or what is wrong with it: nobody waits for who cannot come."""
    try:
        wish.check(group.size())
        card = {"wish": wish, "tree": outline(tree)}
    except Exception as error:  # noqa: BLE001 - whatever it is, the others must hear of it
        kind = type(error).__name__
        known = kind in MISTAKES
        told = str(error) if known else f"{kind}: {error}"
        card = {"mistake": [kind if known else InvalidType.__name__, told]}
    return json.dumps(card, separators=(",", ":"))


def _agree(texts: Mapping[int, str], group: dist.ProcessGroup) -> Any:
    """Make one outline of what all ranks have, or raise what all raise."""
    cards = {rank: json.loads(text) for rank, text in texts.items()}
    for rank, card in cards.items():
        if "mistake" in card:
            kind, told = card["mistake"]
            raise MISTAKES[kind](f"{OPERATION}: {told} (on rank {rank})")
    wishes = {rank: Wish(*card["wish"]) for rank, card in cards.items()}
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
    except Disagreement as error:
        raise _mismatch(str(error), group) from None


def _mismatch(told: str, group: dist.ProcessGroup) -> RankMismatch:
    label = getattr(group, "label", "")
    return RankMismatch(f"{OPERATION}: {told}", group=label, operation=OPERATION)


def _check_shares(parts: Sequence[Column], total: int, size: int) -> None:
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


def _packed(own: Sequence[Tensor | None], group: dist.ProcessGroup) -> Tensor:
    """Write what a rank has into one tensor of bytes."""
    pieces = [as_bytes(rows).view(-1).to(device_of(group)) for rows in own if rows is not None]
    return torch.cat([torch.empty(0, dtype=torch.uint8, device=device_of(group)), *pieces])


def _unpacked(parts: Sequence[Column], received: Mapping[int, Tensor]) -> list[list[Tensor]]:
    """Find the bytes of every column in those of each rank."""
    by_rank = [
        torch.split(data, [part.nbytes(rank) for part in parts]) for rank, data in received.items()
    ]
    return [[pieces[place] for pieces in by_rank] for place in range(len(parts))]


def _rows(part: Column, pieces: list[Tensor], wish: Wish, size: int) -> Tensor:
    """Put the rows of a column one after the other."""
    count, shape = sum(part.rows.values()), part.shape or ()
    data = torch.cat(pieces)
    if wish.order == "interleaved" and part.shape is not None:
        order = _in_turn(part.rows, size, wish.total).to(data.device)
        data = data.view(count, math.prod(shape) * part.dtype.itemsize)[order].reshape(-1)
        count = len(order)
    return data.view(part.dtype).view(count, *shape)


def _in_turn(rows: Mapping[int, int], size: int, total: int | None) -> Tensor:
    """Tell which row of all, rank after rank, comes when if ranks have them in turn."""
    turns = torch.cat([torch.arange(count) * size + rank for rank, count in rows.items()])
    order = turns.argsort()
    return order if total is None else order[: int((turns < total).sum())]


def _move(
    parts: Sequence[Column], mine: Tensor, group: dist.ProcessGroup, dst: int | None
) -> dict[int, Tensor] | None:
    """Bring everybody's bytes to where they are wanted, by rank; None where they are not."""
    ranks = parts[0].rows if parts else ()
    sizes = {rank: sum(part.nbytes(rank) for part in parts) for rank in ranks}
    if dst is not None:
        return _to_one(mine, sizes, group, dst)
    return _to_all(mine, sizes, group)


def _to_all(mine: Tensor, sizes: Mapping[int, int], group: dist.ProcessGroup) -> dict[int, Tensor]:
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


def _to_one(
    mine: Tensor, sizes: Mapping[int, int], group: dist.ProcessGroup, dst: int
) -> dict[int, Tensor] | None:
    """Send each rank's bytes to one."""
    if group.rank() != dst:
        if len(mine):
            group.send([mine], dst, TAG).wait()
        return None
    received = {rank: mine if rank == dst else mine.new_empty(size) for rank, size in sizes.items()}
    works = [
        group.recv([data], rank, TAG)
        for rank, data in received.items()
        if rank != dst and len(data)
    ]
    for work in works:
        work.wait()
    return received
