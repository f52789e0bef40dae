"""Replicated state: find what all ranks hold identically, and divide its bytes among them.

Ranks compare digests from the root of the state tree downwards and descend only where they
differ, so ranks that differ in their random number generators alone exchange a few lines,
however large the model. State that is marked `Replicated` is compared by sampled digests only.

Replicated tensors are laid end to end in the order of their names, and each rank writes an
equal length. The division follows from names, sizes and the world size, so it is never
communicated.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import torch
import xxhash
from torch import Tensor

from ..errors import StateMismatch
from ._coordination import format_ranks
from ._manifest import StateKey, StatePath, format_path, tensor_name
from ._state_encoding import encode
from ._state_tree import (
    Branch,
    Node,
    ReplicatedShard,
    TensorLeaf,
    leaves,
    parse_state,
    rebuild_state,
)
from ._storage import checksum
from ._tensor_file import chunks, dtype_name, nbytes, tensor_memory
from ._types import STATE_DICT, RankInfo

Exchange = Callable[[Callable[[], Any]], list[Any]]
"""Find out something that JSON can say, tell it to all ranks, and return what each has told."""
_Facts = list[str]

_SAMPLES = 16
_SAMPLE_BYTES = 1024  # bytes


def tensor_digest(tensor: Tensor) -> str:
    """Return the digest of a tensor's type, shape and every byte."""
    hashed = _start_digest(tensor)
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    for chunk in chunks(tensor_memory(plain)):
        hashed.update(chunk)
    return hashed.hexdigest()


def sampled_digest(tensor: Tensor) -> str:
    """Return the digest of a tensor's type, shape, and samples of its bytes."""
    size = nbytes(tensor.dtype, tensor.shape)
    if size <= _SAMPLES * _SAMPLE_BYTES:
        return tensor_digest(tensor)
    hashed = _start_digest(tensor)
    data = tensor.detach().resolve_conj().resolve_neg().reshape(-1).view(torch.uint8)
    # In one view and one copy: this is in the way of the training loop.
    samples = data.as_strided((_SAMPLES, _SAMPLE_BYTES), (size // _SAMPLES, 1))
    hashed.update(tensor_memory(samples.contiguous().cpu()))
    hashed.update(tensor_memory(data[-_SAMPLE_BYTES:].cpu()))
    return hashed.hexdigest()


def _start_digest(tensor: Tensor) -> xxhash.xxh3_128:
    return xxhash.xxh3_128(f"{dtype_name(tensor.dtype)}{[*tensor.shape]}".encode())


def find_differences(tree: Node, exchange: Exchange) -> dict[StatePath, tuple[int, ...]]:
    """Return where the ranks' states differ, and which ranks have something there.

    Every rank gets the same answer, in the same order. Raises `StateMismatch`, on every rank, if
    they differ in what is marked as alike.
    """
    comparison = _Comparison(tree)
    comparison.judge((), exchange(comparison.begin))
    while comparison.unclear:
        paths, comparison.unclear = comparison.unclear, []
        told = exchange(partial(comparison.facts_below, paths))
        for place, path in enumerate(paths):
            by_rank = [dict(each[place]) for each in told]
            for key in dict.fromkeys(key for each in by_rank for key in each):
                comparison.judge((*path, key), [each.get(key) for each in by_rank])
    return dict(sorted(comparison.apart.items(), key=lambda item: tensor_name(item[0])))


def per_rank_paths(node: Node, path: StatePath = ()) -> Iterator[StatePath]:
    """Yield where a state is marked as each rank's own."""
    if node.mark == "per rank":
        yield path
    elif isinstance(node, Branch):
        for key, child in node.children.items():
            yield from per_rank_paths(child, (*path, key))


class _Comparison:
    """What is known so far."""

    def __init__(self, tree: Node) -> None:
        self._tree = tree
        self._digests: dict[StatePath, str] = {}
        self.apart: dict[StatePath, tuple[int, ...]] = {}
        self.unclear: list[StatePath] = []
        """Branches that differ: the answer is further down."""

    def begin(self) -> _Facts:
        """Digest the whole state, and say what there is to compare at its root."""
        _digest_tree(self._tree, (), self._digests)
        return self.facts(())

    def facts(self, path: StatePath) -> _Facts:
        """Say what there is to compare at a place: mark, kind, digest."""
        node = _find(self._tree, path)
        kind = "leaf"
        if isinstance(node, Branch):
            length = "" if node.kind == "dict" else len(node.children)
            kind = f"branch {node.kind} {length}"
        return [node.mark, kind, self._digests[path]]

    def facts_below(self, paths: list[StatePath]) -> list[list[tuple[StateKey, _Facts]]]:
        """Say it of all children of each of some branches."""
        return [
            [(key, self.facts((*path, key))) for key in _children(_find(self._tree, path))]
            for path in paths
        ]

    def judge(self, path: StatePath, told: Sequence[_Facts | None]) -> None:
        """Decide about one place in the state by what each rank says of it."""
        marks = {facts[0] for facts in told if facts is not None}
        kinds = {None if facts is None else facts[1] for facts in told}
        is_branch = len(kinds) == 1 and str(*kinds).startswith("branch")
        if all(facts == told[0] for facts in told):
            below = per_rank_paths(_find(self._tree, path), path)
            self.apart.update(dict.fromkeys(below, tuple(range(len(told)))))
        elif is_branch and marks in ({""}, {"alike"}):
            self.unclear.append(path)
        elif "alike" in marks:
            raise StateMismatch(_mismatch_message(path, told, marks))
        else:
            present = (rank for rank, facts in enumerate(told) if facts is not None)
            self.apart[path] = tuple(present)


def _mismatch_message(path: StatePath, told: Sequence[_Facts | None], marks: set[str]) -> str:
    if len(marks) > 1:
        return f"{format_path(path)} is marked as alike on some ranks only"
    others = [rank for rank, facts in enumerate(told) if facts != told[0]]
    return (
        f"{format_path(path)} is marked as alike, but differs from rank 0 on {format_ranks(others)}"
    )


def _find(node: Node, path: StatePath) -> Node:
    for key in path:
        node = _children(node)[key]
    return node


def _children(node: Node) -> dict[StateKey, Node]:
    assert isinstance(node, Branch)
    return node.children


def _digest_tree(node: Node, path: StatePath, digests: dict[StatePath, str]) -> str:
    """Note the digests of a node and of all below it."""
    if node.mark == "per rank":
        found = ""  # not looked at
    elif isinstance(node, TensorLeaf):
        found = f"{node.name} {_leaf_digest(node)}"
    elif isinstance(node, Branch):
        below = {
            tensor_name((key,)): _digest_tree(child, (*path, key), digests)
            for key, child in node.children.items()
        }
        found = checksum(json.dumps([node.kind, sorted(below.items())]).encode())
    else:
        found = checksum(json.dumps(encode(node, _no_tensor)).encode())
    digests[path] = f"{node.mark} {found}"
    return digests[path]


def _leaf_digest(leaf: TensorLeaf) -> str:
    if isinstance(leaf.data, ReplicatedShard):
        return leaf.data.fingerprint
    return sampled_digest(leaf.data) if leaf.mark == "alike" else tensor_digest(leaf.data)


def _no_tensor(leaf: TensorLeaf) -> Any:
    raise AssertionError(f"{leaf.name} is not a scalar")


MIN_SPLIT_BYTES = 1 << 20
"""Bytes of a tensor that is never cut."""
_SPLIT_ALIGNMENT = 4096  # bytes: cuts are at multiples of it, which are multiples of any element


@dataclass(frozen=True, order=True, slots=True)
class TensorRange:
    """The bytes of a tensor that one rank writes."""

    name: str
    start: int
    stop: int


def divide_among_ranks(
    sizes: Mapping[str, int],
    ranks: int,
    *,
    grain: int = MIN_SPLIT_BYTES,
    cut: int = _SPLIT_ALIGNMENT,
) -> list[list[TensorRange]]:
    """Divide tensors of these sizes in bytes over ranks: a list of parts for each rank.

    Every byte has exactly one rank; an empty tensor has the first. The parts differ in size by
    less than twice `grain`.
    """
    names = sorted(sizes)
    begins = [0, *accumulate(sizes[name] for name in names)]
    ideal = (round(begins[-1] * rank / ranks) for rank in range(ranks))
    borders = [_align_border(border, begins, grain, cut) for border in ideal]
    borders.append(begins[-1])
    shares: list[list[TensorRange]] = [[] for _ in range(ranks)]
    for name, begin in zip(names, begins, strict=False):
        if not sizes[name]:
            shares[0].append(TensorRange(name, 0, 0))
        start, rank = 0, bisect_right(borders, begin) - 1
        while start < sizes[name]:
            stop = min(sizes[name], borders[rank + 1] - begin)
            if start < stop:
                shares[rank].append(TensorRange(name, start, stop))
            start, rank = stop, rank + 1
    return shares


def _align_border(border: int, begins: list[int], grain: int, cut: int) -> int:
    """Move a border to where the tensor that it falls into may be cut."""
    place = bisect_right(begins, border) - 1
    if place == len(begins) - 1:
        return border  # the end of the line
    begin, end = begins[place], begins[place + 1]
    if end - begin <= grain:
        return begin if border - begin < end - border else end
    return begin + (border - begin) // cut * cut


def ranges_of_rank(alike: Iterable[TensorLeaf], ranks: int, rank: int) -> list[TensorRange]:
    """Return what one of the ranks writes of tensors that are alike.

    Those that are marked so are divided by themselves: their division must be known before it is
    known what else is alike.
    """
    by_mark: dict[bool, list[TensorLeaf]] = {True: [], False: []}
    for leaf in alike:
        by_mark[leaf.mark == "alike"].append(leaf)
    divided = (
        divide_among_ranks(tensor_sizes(tensors), ranks)[rank] for tensors in by_mark.values()
    )
    return [part for share in divided for part in share]


def tensor_sizes(tensors: Iterable[TensorLeaf]) -> dict[str, int]:
    """Return the sizes in bytes that `divide_among_ranks` divides."""
    return {leaf.name: nbytes(leaf.dtype, leaf.shape) for leaf in tensors}


def elements_in_range(tensor: Tensor, part: TensorRange) -> Tensor:
    """Return the elements of a tensor that a part has, without a copy where that is possible."""
    if part.stop - part.start == nbytes(tensor.dtype, tensor.shape):
        return tensor.detach()
    size = tensor.dtype.itemsize
    return tensor.detach().reshape(-1)[part.start // size : part.stop // size]


def own_shards(state_dict: STATE_DICT, rank_info: RankInfo) -> STATE_DICT:
    """Return the state with only the bytes of what is marked `Replicated` that this rank writes.

    Nothing is copied: what is left are views of the tensors, as `ReplicatedShard`. A writer takes
    the
    result for the state itself, so that an asynchronous save needs to stage no more than this.
    """
    tree = parse_state(state_dict)
    pieces = replicated_shards(tree, rank_info)
    state: STATE_DICT = rebuild_state(
        tree, lambda leaf: pieces.get(leaf.name, leaf.data), marked=True
    )
    return state


def replicated_shards(tree: Node, rank_info: RankInfo) -> dict[str, ReplicatedShard]:
    """Return by name what this rank writes of the tensors that are marked `Replicated`."""
    coded = {leaf.name for leaf in _leaves_in_codecs(tree)}  # a codec must be given whole tensors
    alike = {leaf.name: leaf for leaf in leaves(tree) if leaf.mark == "alike"}
    share = ranges_of_rank(alike.values(), rank_info.global_world_size, rank_info.global_rank)
    mine = {part.name: part for part in share}
    return {
        name: _shard_of_leaf(leaf, mine.get(name))
        for name, leaf in alike.items()
        if name not in coded
    }


def _shard_of_leaf(leaf: TensorLeaf, part: TensorRange | None) -> ReplicatedShard:
    if isinstance(leaf.data, ReplicatedShard):
        return leaf.data
    start, stop = (part.start, part.stop) if part is not None else (0, 0)
    data = elements_in_range(leaf.data, part) if part is not None else None
    mark = sampled_digest(leaf.data)
    return ReplicatedShard(leaf.name, leaf.dtype, leaf.shape, leaf.device, start, stop, mark, data)


def _leaves_in_codecs(node: Node) -> Iterator[TensorLeaf]:
    if isinstance(node, Branch):
        for child in node.children.values():
            yield from leaves(child) if node.kind.startswith("codec:") else _leaves_in_codecs(child)
