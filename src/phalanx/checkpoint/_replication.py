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
from ..groups._formatting import format_ranks
from ._manifest import StateKey, StatePath, format_path, tensor_name
from ._state_encoding import encode_scalar
from ._state_tree import (
    Branch,
    Node,
    ReplicatedShard,
    Scalar,
    TensorLeaf,
    find_node,
    leaves,
    walk,
)
from ._storage import checksum
from ._tensor_file import chunks, dtype_name, nbytes, tensor_memory
from ._types import RankInfo

Exchange = Callable[[Callable[[], Any]], list[Any]]
"""Run a function on all ranks and return its JSON-serializable results by rank."""
_Summary = list[str]
"""What ranks compare about a node: mark, kind, digest."""

_SAMPLES = 16
_SAMPLE_BYTES = 1024


def tensor_digest(tensor: Tensor) -> str:
    """Return the digest of a tensor's dtype, shape and every byte."""
    digest = _start_digest(tensor)
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    for chunk in chunks(tensor_memory(plain)):
        digest.update(chunk)
    return digest.hexdigest()


def sampled_digest(tensor: Tensor) -> str:
    """Return the digest of a tensor's dtype, shape, and samples of its bytes."""
    size = nbytes(tensor.dtype, tensor.shape)
    if size <= _SAMPLES * _SAMPLE_BYTES:
        return tensor_digest(tensor)
    digest = _start_digest(tensor)
    data = tensor.detach().resolve_conj().resolve_neg().reshape(-1).view(torch.uint8)
    # One view and one copy, since training waits for this.
    samples = data.as_strided((_SAMPLES, _SAMPLE_BYTES), (size // _SAMPLES, 1))
    digest.update(tensor_memory(samples.contiguous().cpu()))
    digest.update(tensor_memory(data[-_SAMPLE_BYTES:].cpu()))
    return digest.hexdigest()


def _start_digest(tensor: Tensor) -> xxhash.xxh3_128:
    return xxhash.xxh3_128(f"{dtype_name(tensor.dtype)}{[*tensor.shape]}".encode())


def find_differences(tree: Node, exchange: Exchange) -> dict[StatePath, tuple[int, ...]]:
    """Return where the ranks' states differ, and which ranks have something there.

    Every rank gets the same result, in the same order. All ranks raise `StateMismatch` if a part
    that is marked `Replicated` differs.
    """
    comparison = _Comparison(tree)
    comparison.classify((), exchange(comparison.begin))
    while comparison.unresolved:
        paths, comparison.unresolved = comparison.unresolved, []
        summaries = exchange(partial(comparison.summaries_below, paths))
        for i, path in enumerate(paths):
            by_rank = [dict(each[i]) for each in summaries]
            for key in dict.fromkeys(key for each in by_rank for key in each):
                comparison.classify((*path, key), [each.get(key) for each in by_rank])
    return dict(sorted(comparison.per_rank.items(), key=lambda item: tensor_name(item[0])))


def per_rank_paths(node: Node, path: StatePath = ()) -> Iterator[StatePath]:
    """Yield the paths that are marked `PerRank`."""
    nodes = walk(node, descend=lambda _, each: each.mark != "per rank", path=path)
    return (where for where, each in nodes if each.mark == "per rank")


class _Comparison:
    """The state of a comparison between ranks."""

    def __init__(self, tree: Node) -> None:
        self._tree = tree
        self._digests: dict[StatePath, str] = {}
        self.per_rank: dict[StatePath, tuple[int, ...]] = {}
        """Paths that differ, and which ranks have something there."""
        self.unresolved: list[StatePath] = []
        """Branches that differ, to be compared child by child."""

    def begin(self) -> _Summary:
        """Digest the whole state, and return the summary of its root."""
        _digest_tree(self._tree, (), self._digests)
        return self._summary(self._tree, ())

    def _summary(self, node: Node, path: StatePath) -> _Summary:
        kind = "leaf"
        if isinstance(node, Branch):
            length = "" if node.kind == "dict" else len(node.children)
            kind = f"branch {node.kind} {length}"
        return [node.mark, kind, self._digests[path]]

    def summaries_below(self, paths: list[StatePath]) -> list[list[tuple[StateKey, _Summary]]]:
        branches = [(path, self._find(path)) for path in paths]
        return [
            [(key, self._summary(child, (*path, key))) for key, child in branch.children.items()]
            for path, branch in branches
            if isinstance(branch, Branch)
        ]

    def classify(self, path: StatePath, summaries: Sequence[_Summary | None]) -> None:
        """Decide about one path, given the summaries of all ranks."""
        marks = {each[0] for each in summaries if each is not None}
        kinds = {None if each is None else each[1] for each in summaries}
        is_branch = len(kinds) == 1 and str(*kinds).startswith("branch")
        if all(each == summaries[0] for each in summaries):
            below = per_rank_paths(self._find(path), path)
            self.per_rank.update(dict.fromkeys(below, tuple(range(len(summaries)))))
        elif is_branch and marks in ({""}, {"replicated"}):
            self.unresolved.append(path)
        elif "replicated" in marks:
            raise StateMismatch(_mismatch_message(path, summaries, marks))
        else:
            present = (rank for rank, each in enumerate(summaries) if each is not None)
            self.per_rank[path] = tuple(present)

    def _find(self, path: StatePath) -> Node:
        node = find_node(self._tree, path)
        assert node is not None
        return node


def _mismatch_message(
    path: StatePath, summaries: Sequence[_Summary | None], marks: set[str]
) -> str:
    if len(marks) > 1:
        return f"{format_path(path)} is marked Replicated on some ranks only"
    others = [rank for rank, each in enumerate(summaries) if each != summaries[0]]
    return (
        f"{format_path(path)} is marked Replicated but differs between rank 0 and "
        f"{format_ranks(others)}"
    )


def _digest_tree(node: Node, path: StatePath, digests: dict[StatePath, str]) -> str:
    if node.mark == "per rank":
        digest = ""  # not compared
    elif isinstance(node, TensorLeaf):
        digest = f"{node.name} {_leaf_digest(node)}"
    elif isinstance(node, Branch):
        below = {
            tensor_name((key,)): _digest_tree(child, (*path, key), digests)
            for key, child in node.children.items()
        }
        digest = checksum(json.dumps([node.kind, sorted(below.items())]).encode())
    else:
        assert isinstance(node, Scalar)
        digest = checksum(json.dumps(encode_scalar(node.value)).encode())
    digests[path] = f"{node.mark} {digest}"
    return digests[path]


def _leaf_digest(leaf: TensorLeaf) -> str:
    if isinstance(leaf.data, ReplicatedShard):
        return leaf.data.fingerprint
    return sampled_digest(leaf.data) if leaf.mark == "replicated" else tensor_digest(leaf.data)


MIN_SPLIT_BYTES = 1 << 20
"""Tensors of at most this size are never divided."""
_SPLIT_ALIGNMENT = 4096  # bytes; a multiple of every element size


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
    """Divide tensors of these sizes in bytes among ranks; return a list of ranges for each rank.

    Every byte has exactly one rank; rank 0 has the empty tensors. The ranks' totals differ by less
    than twice `grain`.
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
    i = bisect_right(begins, border) - 1
    if i == len(begins) - 1:
        return border  # the end of the last tensor
    begin, end = begins[i], begins[i + 1]
    if end - begin <= grain:
        return begin if border - begin < end - border else end
    return begin + (border - begin) // cut * cut


def ranges_of_rank(replicated: Iterable[TensorLeaf], ranks: int, rank: int) -> list[TensorRange]:
    """Return the ranges of replicated tensors that a rank writes.

    Tensors marked `Replicated` are divided separately: an asynchronous save needs their division
    before ranks have compared the rest.
    """
    by_mark: dict[bool, list[TensorLeaf]] = {True: [], False: []}
    for leaf in replicated:
        by_mark[leaf.mark == "replicated"].append(leaf)
    divided = (
        divide_among_ranks(tensor_sizes(tensors), ranks)[rank] for tensors in by_mark.values()
    )
    return [part for share in divided for part in share]


def tensor_sizes(tensors: Iterable[TensorLeaf]) -> dict[str, int]:
    return {leaf.name: nbytes(leaf.dtype, leaf.shape) for leaf in tensors}


def elements_in_range(tensor: Tensor, part: TensorRange) -> Tensor:
    """Return the elements in a range, as a view where possible."""
    if part.stop - part.start == nbytes(tensor.dtype, tensor.shape):
        return tensor.detach()
    size = tensor.dtype.itemsize
    return tensor.detach().reshape(-1)[part.start // size : part.stop // size]


def replicated_shards(tree: Node, rank_info: RankInfo) -> dict[str, ReplicatedShard]:
    """Return by name what this rank writes of the tensors that are marked `Replicated`."""
    in_codecs = {  # a codec must be given whole tensors
        leaf.name
        for _, node in walk(tree)
        if isinstance(node, Branch) and node.kind.startswith("codec:")
        for leaf in leaves(node)
    }
    replicated = {leaf.name: leaf for leaf in leaves(tree) if leaf.mark == "replicated"}
    ranges = ranges_of_rank(replicated.values(), rank_info.global_world_size, rank_info.global_rank)
    mine = {part.name: part for part in ranges}
    return {
        name: _shard_of_leaf(leaf, mine.get(name))
        for name, leaf in replicated.items()
        if name not in in_codecs
    }


def _shard_of_leaf(leaf: TensorLeaf, part: TensorRange | None) -> ReplicatedShard:
    if isinstance(leaf.data, ReplicatedShard):
        return leaf.data
    start, stop = (part.start, part.stop) if part is not None else (0, 0)
    data = elements_in_range(leaf.data, part) if part is not None else None
    digest = sampled_digest(leaf.data)
    return ReplicatedShard(
        leaf.name, leaf.dtype, leaf.shape, leaf.device, start, stop, digest, data
    )
