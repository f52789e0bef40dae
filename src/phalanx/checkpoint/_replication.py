"""Replicated state: find what all ranks hold identically, and divide its bytes among them.

Ranks compare digests from the root of the state tree downwards and descend only where they
differ, so ranks that differ in their random number generators alone exchange a few lines,
however large the model. State that is marked `Replicated` is compared by sampled digests only.

Replicated tensors are laid end to end by name, and each rank writes an equal length. The division
follows from names, sizes and the world size, so it is never communicated.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import accumulate, chain
from typing import Any, NamedTuple

import torch
import xxhash
from torch import Tensor

from .._formatting import format_ranks, format_tensor
from ..errors import StateMismatch
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
    parse_state,
    walk,
)
from ._storage import checksum
from ._tensor_file import chunks, nbytes, resolve, tensor_memory
from ._types import RankInfo

Exchange = Callable[[Callable[[], Any]], list[Any]]
"""Run a function on all ranks and return its JSON-serializable results by rank."""


class _Summary(NamedTuple):
    """What ranks compare about a node. Exchanged as a JSON list."""

    mark: str
    kind: str  # "" for a leaf
    digest: str


_SAMPLES = 16
_SAMPLE_BYTES = 1024


def tensor_digest(tensor: Tensor) -> str:
    """Return the digest of a tensor's dtype, shape and every byte."""
    digest = _start_digest(tensor)
    for chunk in chunks(tensor_memory(resolve(tensor).cpu().contiguous())):
        digest.update(chunk)
    return digest.hexdigest()


def sampled_digest(tensor: Tensor) -> str:
    """Return the digest of a tensor's dtype, shape, and samples of its bytes."""
    size = nbytes(tensor.dtype, tensor.shape)
    if size <= _SAMPLES * _SAMPLE_BYTES:
        return tensor_digest(tensor)
    digest = _start_digest(tensor)
    data = resolve(tensor).reshape(-1).view(torch.uint8)
    # One view and one copy, since training waits for this.
    samples = data.as_strided((_SAMPLES, _SAMPLE_BYTES), (size // _SAMPLES, 1))
    digest.update(tensor_memory(samples.contiguous().cpu()))
    digest.update(tensor_memory(data[-_SAMPLE_BYTES:].cpu()))
    return digest.hexdigest()


def _start_digest(tensor: Tensor) -> xxhash.xxh3_128:
    return xxhash.xxh3_128(format_tensor(tensor.dtype, tensor.shape).encode())


def state_digest(state: Any) -> str:
    """Return a digest of every bit of a state. Nothing in it may be marked."""
    return checksum(_summarize(parse_state(state), (), {}).encode())


def find_differences(tree: Node, exchange: Exchange) -> dict[StatePath, tuple[int, ...]]:
    """Return where the ranks' states differ, and which ranks have something there.

    Every rank gets the same result, in the same order. All ranks raise `StateMismatch` if a part
    that is marked `Replicated` differs.
    """
    own: dict[StatePath, _Summary] = {}
    found: dict[StatePath, tuple[int, ...]] = {}

    def summarize_all() -> _Summary:
        _summarize(tree, (), own)
        return own[()]

    def summaries_below(paths: list[StatePath]) -> list[list[tuple[StateKey, _Summary]]]:
        branches = [(path, find_node(tree, path)) for path in paths]
        return [
            [(key, own[*path, key]) for key in branch.children]
            for path, branch in branches
            if isinstance(branch, Branch)
        ]

    compared: dict[StatePath, list[_Summary | None]]
    compared = {(): [_Summary(*each) for each in exchange(summarize_all)]}
    while compared:
        unresolved = []
        for path, summaries in compared.items():
            differing = _differing_paths(find_node(tree, path), path, summaries)
            if differing is None:
                unresolved.append(path)
            else:
                found.update(differing)
        compared = {}
        replies = exchange(partial(summaries_below, unresolved)) if unresolved else []
        for i, path in enumerate(unresolved):
            by_rank = [dict(reply[i]) for reply in replies]
            for key in dict.fromkeys(chain.from_iterable(by_rank)):
                compared[*path, key] = [
                    _Summary(*each[key]) if key in each else None for each in by_rank
                ]
    return dict(sorted(found.items(), key=lambda item: tensor_name(item[0])))


def per_rank_paths(node: Node, path: StatePath = ()) -> Iterator[StatePath]:
    """Yield the paths that are marked `PerRank`."""
    nodes = walk(node, descend=lambda _, each: each.mark != "per rank", path=path)
    return (where for where, each in nodes if each.mark == "per rank")


def _summarize(node: Node, path: StatePath, summaries: dict[StatePath, _Summary]) -> str:
    """Record the summaries of a node and of all below it; return its digest."""
    kind = ""
    if isinstance(node, Branch):
        size = "" if node.kind == "dict" else len(node.children)  # the keys of dicts may differ
        kind = f"{node.kind} {node.codec} {size}"
    if node.mark == "per rank":
        digest = ""  # not compared
    elif isinstance(node, TensorLeaf):
        if isinstance(node.data, ReplicatedShard):
            digest = node.data.fingerprint
        else:
            data = node.data() if callable(node.data) else node.data
            digest = (sampled_digest if node.mark == "replicated" else tensor_digest)(data)
        digest = f"{node.name} {digest}"
    elif isinstance(node, Branch):
        below = {
            tensor_name((key,)): _summarize(child, (*path, key), summaries)
            for key, child in node.children.items()
        }
        content = [node.kind, node.codec, sorted(below.items())]
        digest = checksum(json.dumps(content).encode())
    else:
        assert isinstance(node, Scalar)
        digest = checksum(json.dumps(encode_scalar(node.value)).encode())
    digest = f"{node.mark} {digest}"
    summaries[path] = _Summary(node.mark, kind, digest)
    return digest


def _differing_paths(
    node: Node | None, path: StatePath, summaries: list[_Summary | None]
) -> dict[StatePath, tuple[int, ...]] | None:
    """Return what differs at a path or below; None if its children must be compared."""
    marks = {each.mark for each in summaries if each is not None}
    kinds = {None if each is None else each.kind for each in summaries}
    others = [rank for rank, each in enumerate(summaries) if each != summaries[0]]
    if not others:
        assert node is not None
        return dict.fromkeys(per_rank_paths(node, path), tuple(range(len(summaries))))
    if len(kinds) == 1 and kinds != {""} and marks in ({""}, {"replicated"}):
        return None
    if len(marks) > 1 and "replicated" in marks:
        raise StateMismatch(f"{format_path(path)} is marked Replicated on some ranks only")
    if "replicated" in marks:
        raise StateMismatch(
            f"{format_path(path)} is marked Replicated but differs between rank 0 and "
            f"{format_ranks(others)}"
        )
    return {path: tuple(rank for rank, each in enumerate(summaries) if each is not None)}


MIN_SPLIT_BYTES = 1 << 20  # tensors of at most this size are never divided
_SPLIT_ALIGNMENT = 4096  # bytes; a multiple of every element size


class ShardBounds(NamedTuple):
    """Which bytes of a tensor one rank writes."""

    name: str
    start: int
    stop: int


def divide_among_ranks(
    sizes: Mapping[str, int],
    world_size: int,
    *,
    grain: int = MIN_SPLIT_BYTES,
    cut: int = _SPLIT_ALIGNMENT,
) -> list[list[ShardBounds]]:
    """Divide tensors of these sizes in bytes among ranks; return the shards of each rank.

    Every byte has exactly one rank; rank 0 has the empty tensors. The ranks' totals differ by less
    than twice `grain`.
    """
    names = sorted(sizes)
    begins = [0, *accumulate(sizes[name] for name in names)]
    ideal = (round(begins[-1] * rank / world_size) for rank in range(world_size))
    borders = [_align_border(border, begins, grain, cut) for border in ideal]
    borders.append(begins[-1])
    shards: list[list[ShardBounds]] = [[] for _ in range(world_size)]
    for name, begin in zip(names, begins[:-1], strict=True):
        if not sizes[name]:
            shards[0].append(ShardBounds(name, 0, 0))
        start, rank = 0, bisect_right(borders, begin) - 1
        while start < sizes[name]:
            stop = min(sizes[name], borders[rank + 1] - begin)
            if start < stop:
                shards[rank].append(ShardBounds(name, start, stop))
            start, rank = stop, rank + 1
    return shards


def _align_border(border: int, begins: list[int], grain: int, cut: int) -> int:
    i = bisect_right(begins, border) - 1
    if i == len(begins) - 1:
        return border  # the end of the last tensor
    begin, end = begins[i], begins[i + 1]
    if end - begin <= grain:
        return begin if border - begin < end - border else end
    return begin + (border - begin) // cut * cut


def shards_of_rank(
    replicated: Iterable[TensorLeaf], world_size: int, rank: int
) -> list[ShardBounds]:
    """Return the shards of replicated tensors that a rank writes.

    Tensors marked `Replicated` are divided separately: an asynchronous save needs their division
    before ranks have compared the rest.
    """
    marked: dict[str, int] = {}
    compared: dict[str, int] = {}
    for leaf in replicated:
        sizes = marked if leaf.mark == "replicated" else compared
        sizes[leaf.name] = nbytes(leaf.dtype, leaf.shape)
    return [s for each in (marked, compared) for s in divide_among_ranks(each, world_size)[rank]]


def shard_elements(tensor: Tensor, bounds: ShardBounds) -> Tensor:
    """Return the elements of a shard, as a view where possible."""
    if bounds.stop - bounds.start == nbytes(tensor.dtype, tensor.shape):
        return tensor.detach()
    size = tensor.dtype.itemsize
    return tensor.detach().reshape(-1)[bounds.start // size : bounds.stop // size]


def replicated_shards(tree: Node, rank_info: RankInfo) -> dict[str, ReplicatedShard]:
    """Return by name what this rank writes of the tensors that are marked `Replicated`."""
    in_codecs = {  # a codec must be given whole tensors
        leaf.name
        for _, node in walk(tree)
        if isinstance(node, Branch) and node.kind == "codec"
        for leaf in leaves(node)
    }
    replicated = {leaf.name: leaf for leaf in leaves(tree) if leaf.mark == "replicated"}
    world_size, rank = rank_info.global_world_size, rank_info.global_rank
    mine = {each.name: each for each in shards_of_rank(replicated.values(), world_size, rank)}
    shards = {}
    for name, leaf in replicated.items():
        if isinstance(leaf.data, ReplicatedShard):
            shards[name] = leaf.data
        elif name not in in_codecs:
            bounds = mine.get(name, ShardBounds(name, 0, 0))
            data = shard_elements(leaf.data, bounds) if name in mine else None
            digest = sampled_digest(leaf.data)
            shards[name] = ReplicatedShard(bounds.start, bounds.stop, digest, data)
    return shards
