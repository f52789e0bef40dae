"""What ranks hold alike is written once: who writes which bytes of it.

The tensors lie end to end on one line, in the order of their names, and every rank takes an equal
length of it. So the parts are even, no more tensors are cut than there are borders, and every rank
knows the whole division from names, sizes and the number of ranks alone.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate

from torch import Tensor

from ._digests import fingerprint
from ._marks import Piece
from ._structure import Branch, Node, TensorLeaf, leaves, parse, rebuild
from ._tensors import nbytes
from ._types import STATE_DICT, RankInfo

__all__ = ["Part", "elements", "own_parts", "own_pieces", "own_share", "parts", "sizes_of"]

GRAIN = 1 << 20
"""Bytes of a tensor that is never cut."""
_CUT = 4096  # bytes: cuts are at multiples of it, which are multiples of any element


@dataclass(frozen=True, order=True, slots=True)
class Part:
    """The bytes of a tensor that one rank writes."""

    name: str
    start: int
    stop: int


def parts(
    sizes: Mapping[str, int], ranks: int, *, grain: int = GRAIN, cut: int = _CUT
) -> list[list[Part]]:
    """Divide tensors of these sizes in bytes over ranks: a list of parts for each rank.

    Every byte has exactly one rank; an empty tensor has the first. The parts differ in size by
    less than twice `grain`.
    """
    names = sorted(sizes)
    begins = [0, *accumulate(sizes[name] for name in names)]
    ideal = (round(begins[-1] * rank / ranks) for rank in range(ranks))
    borders = [_snap(border, begins, grain, cut) for border in ideal]
    borders.append(begins[-1])
    shares: list[list[Part]] = [[] for _ in range(ranks)]
    for name, begin in zip(names, begins, strict=False):
        if not sizes[name]:
            shares[0].append(Part(name, 0, 0))
        start, rank = 0, bisect_right(borders, begin) - 1
        while start < sizes[name]:
            stop = min(sizes[name], borders[rank + 1] - begin)
            if start < stop:
                shares[rank].append(Part(name, start, stop))
            start, rank = stop, rank + 1
    return shares


def _snap(border: int, begins: list[int], grain: int, cut: int) -> int:
    """Move a border to where the tensor that it falls into may be cut."""
    place = bisect_right(begins, border) - 1
    if place == len(begins) - 1:
        return border  # the end of the line
    begin, end = begins[place], begins[place + 1]
    if end - begin <= grain:
        return begin if border - begin < end - border else end
    return begin + (border - begin) // cut * cut


def own_share(alike: Iterable[TensorLeaf], ranks: int, rank: int) -> list[Part]:
    """Return what one of the ranks writes of tensors that are alike.

    Those that are marked so are divided by themselves: their division must be known before it is
    known what else is alike.
    """
    by_mark: dict[bool, list[TensorLeaf]] = {True: [], False: []}
    for leaf in alike:
        by_mark[leaf.mark == "alike"].append(leaf)
    divided = (parts(sizes_of(tensors), ranks)[rank] for tensors in by_mark.values())
    return [part for share in divided for part in share]


def sizes_of(tensors: Iterable[TensorLeaf]) -> dict[str, int]:
    """Return the sizes in bytes that `parts` divides."""
    return {leaf.name: nbytes(leaf.dtype, leaf.shape) for leaf in tensors}


def elements(tensor: Tensor, part: Part) -> Tensor:
    """Return the elements of a tensor that a part has, without a copy where that is possible."""
    if part.stop - part.start == nbytes(tensor.dtype, tensor.shape):
        return tensor.detach()
    size = tensor.dtype.itemsize
    return tensor.detach().reshape(-1)[part.start // size : part.stop // size]


def own_parts(state_dict: STATE_DICT, rank_info: RankInfo) -> STATE_DICT:
    """Return the state with only the bytes of what is marked `Alike` that this rank writes.

    Nothing is copied: what is left are views of the tensors, as `BucketPiece`. A writer takes the
    result for the state itself, so that an asynchronous save needs to stage no more than this.
    """
    tree = parse(state_dict)
    pieces = own_pieces(tree, rank_info)
    state: STATE_DICT = rebuild(tree, lambda leaf: pieces.get(leaf.name, leaf.data), marked=True)
    return state


def own_pieces(tree: Node, rank_info: RankInfo) -> dict[str, Piece]:
    """Return by name what this rank writes of the tensors that are marked `Alike`."""
    coded = {leaf.name for leaf in _coded(tree)}  # a codec must be given whole tensors
    alike = {leaf.name: leaf for leaf in leaves(tree) if leaf.mark == "alike"}
    share = own_share(alike.values(), rank_info.global_world_size, rank_info.global_rank)
    mine = {part.name: part for part in share}
    return {name: _piece(leaf, mine.get(name)) for name, leaf in alike.items() if name not in coded}


def _piece(leaf: TensorLeaf, part: Part | None) -> Piece:
    if isinstance(leaf.data, Piece):
        return leaf.data
    start, stop = (part.start, part.stop) if part is not None else (0, 0)
    data = elements(leaf.data, part) if part is not None else None
    mark = fingerprint(leaf.data)
    return Piece(leaf.name, leaf.dtype, leaf.shape, leaf.device, start, stop, mark, data)


def _coded(node: Node) -> Iterator[TensorLeaf]:
    if isinstance(node, Branch):
        for child in node.children.values():
            yield from leaves(child) if node.kind.startswith("codec:") else _coded(child)
