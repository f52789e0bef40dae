"""Find out what ranks hold alike, by comparing digests from the root of the state downwards.

A branch whose digest is the same everywhere is alike as a whole; only where it is not, the digests
of its children are told. So ranks that differ in nothing but their random numbers exchange a few
lines, however large the model.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import xxhash
from torch import Tensor

from ..errors import StateMismatch
from ._bytes import checksum
from ._dtypes import name_of_dtype
from ._encoding import encode
from ._marks import Piece
from ._meeting import names_of
from ._paths import Key, Path, display, name_of
from ._structure import Branch, Node, TensorLeaf
from ._tensors import chunks, memory, nbytes

__all__ = ["Exchange", "digest", "find_differences", "fingerprint", "marked_apart"]

Exchange = Callable[[Callable[[], Any]], list[Any]]
"""Find out something that JSON can say, tell it to all ranks, and return what each has told."""
_Facts = list[str]

_SAMPLES = 16
_SAMPLE = 1024  # bytes


def digest(tensor: Tensor) -> str:
    """Return the digest of a tensor's type, shape and every byte."""
    hashed = _begin(tensor)
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    for chunk in chunks(memory(plain)):
        hashed.update(chunk)
    return hashed.hexdigest()


def fingerprint(tensor: Tensor) -> str:
    """Return the digest of a tensor's type, shape, and samples of its bytes."""
    size = nbytes(tensor.dtype, tensor.shape)
    if size <= _SAMPLES * _SAMPLE:
        return digest(tensor)
    hashed = _begin(tensor)
    data = tensor.detach().resolve_conj().resolve_neg().reshape(-1).view(torch.uint8)
    # In one view and one copy: this is in the way of the training loop.
    samples = data.as_strided((_SAMPLES, _SAMPLE), (size // _SAMPLES, 1))
    hashed.update(memory(samples.contiguous().cpu()))
    hashed.update(memory(data[-_SAMPLE:].cpu()))
    return hashed.hexdigest()


def _begin(tensor: Tensor) -> xxhash.xxh3_128:
    return xxhash.xxh3_128(f"{name_of_dtype(tensor.dtype)}{[*tensor.shape]}".encode())


def find_differences(tree: Node, exchange: Exchange) -> dict[Path, tuple[int, ...]]:
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
    return dict(sorted(comparison.apart.items(), key=lambda item: name_of(item[0])))


def marked_apart(node: Node, path: Path = ()) -> Iterator[Path]:
    """Yield where a state is marked as each rank's own."""
    if node.mark == "per rank":
        yield path
    elif isinstance(node, Branch):
        for key, child in node.children.items():
            yield from marked_apart(child, (*path, key))


class _Comparison:
    """What is known so far."""

    def __init__(self, tree: Node) -> None:
        self._tree = tree
        self._digests: dict[Path, str] = {}
        self.apart: dict[Path, tuple[int, ...]] = {}
        self.unclear: list[Path] = []
        """Branches that differ: the answer is further down."""

    def begin(self) -> _Facts:
        """Digest the whole state, and say what there is to compare at its root."""
        _digest(self._tree, (), self._digests)
        return self.facts(())

    def facts(self, path: Path) -> _Facts:
        """Say what there is to compare at a place: mark, kind, digest."""
        node = _find(self._tree, path)
        kind = "leaf"
        if isinstance(node, Branch):
            length = "" if node.kind == "dict" else len(node.children)
            kind = f"branch {node.kind} {length}"
        return [node.mark, kind, self._digests[path]]

    def facts_below(self, paths: list[Path]) -> list[list[tuple[Key, _Facts]]]:
        """Say it of all children of each of some branches."""
        return [
            [(key, self.facts((*path, key))) for key in _children(_find(self._tree, path))]
            for path in paths
        ]

    def judge(self, path: Path, told: Sequence[_Facts | None]) -> None:
        """Decide about one place in the state by what each rank says of it."""
        marks = {facts[0] for facts in told if facts is not None}
        kinds = {None if facts is None else facts[1] for facts in told}
        is_branch = len(kinds) == 1 and str(*kinds).startswith("branch")
        if all(facts == told[0] for facts in told):
            below = marked_apart(_find(self._tree, path), path)
            self.apart.update(dict.fromkeys(below, tuple(range(len(told)))))
        elif is_branch and marks in ({""}, {"alike"}):
            self.unclear.append(path)
        elif "alike" in marks:
            raise StateMismatch(_complaint(path, told, marks))
        else:
            present = (rank for rank, facts in enumerate(told) if facts is not None)
            self.apart[path] = tuple(present)


def _complaint(path: Path, told: Sequence[_Facts | None], marks: set[str]) -> str:
    if len(marks) > 1:
        return f"{display(path)} is marked as alike on some ranks only"
    others = [rank for rank, facts in enumerate(told) if facts != told[0]]
    return f"{display(path)} is marked as alike, but differs from rank 0 on {names_of(others)}"


def _find(node: Node, path: Path) -> Node:
    for key in path:
        node = _children(node)[key]
    return node


def _children(node: Node) -> dict[Key, Node]:
    assert isinstance(node, Branch)
    return node.children


def _digest(node: Node, path: Path, digests: dict[Path, str]) -> str:
    """Note the digests of a node and of all below it."""
    if node.mark == "per rank":
        found = ""  # not looked at
    elif isinstance(node, TensorLeaf):
        found = f"{node.name} {_digest_of_tensor(node)}"
    elif isinstance(node, Branch):
        below = {
            name_of((key,)): _digest(child, (*path, key), digests)
            for key, child in node.children.items()
        }
        found = checksum(json.dumps([node.kind, sorted(below.items())]).encode())
    else:
        found = checksum(json.dumps(encode(node, _no_tensor)).encode())
    digests[path] = f"{node.mark} {found}"
    return digests[path]


def _digest_of_tensor(leaf: TensorLeaf) -> str:
    if isinstance(leaf.data, Piece):
        return leaf.data.fingerprint
    return fingerprint(leaf.data) if leaf.mark == "alike" else digest(leaf.data)


def _no_tensor(leaf: TensorLeaf) -> Any:
    raise AssertionError(f"{leaf.name} is not a scalar")
