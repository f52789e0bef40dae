"""The tree of a state in JSON, readable: what JSON has of its own stays as it is.

::

    {"step": 7, "betas": {"$tuple": [0.9, 0.999]}, "state": {"$dict": [[0, ...], [1, ...]]}}

An object with one key that starts with a dollar is not a dict but something that JSON lacks.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeAlias

import torch

from ._codecs import codec_named
from ._document import Malformed, is_rank
from ._dtypes import dtype_named, name_of_dtype
from ._paths import Key, Path, display
from ._structure import MAX_DEPTH, Absent, Branch, Node, Scalar, TensorLeaf

__all__ = ["Malformed", "decode", "encode"]

Json: TypeAlias = Any


def encode(
    node: Node,
    tensor: Callable[[TensorLeaf], Json],
    *,
    per_rank: Mapping[Path, Mapping[int, Json]] | None = None,
    path: Path = (),
) -> Json:
    """Write a tree as JSON: `tensor` tells the place of each, `per_rank` has what ranks hold."""
    return _Encoder(tensor, per_rank or {}).encode(node, path)


class _Encoder:
    def __init__(
        self, tensor: Callable[[TensorLeaf], Json], apart: Mapping[Path, Mapping[int, Json]]
    ) -> None:
        self._tensor = tensor
        self._apart = apart
        self._apart_in: dict[Path, list[Path]] = defaultdict(list)
        for path in apart:
            self._apart_in[path[:-1]].append(path)

    def encode(self, node: Node, path: Path) -> Json:
        if path in self._apart:
            return self._encode_apart(path)
        if isinstance(node, TensorLeaf):
            return {"$tensor": self._tensor(node)}
        if isinstance(node, Scalar):
            return _encode_scalar(node.value)
        assert isinstance(node, Branch)
        items = {key: self.encode(child, (*path, key)) for key, child in node.children.items()}
        if node.kind == "dict":
            for each in self._apart_in[path]:
                if each[-1] not in items:  # a key that only other ranks have
                    items[each[-1]] = self._encode_apart(each)
            return _encode_dict(items)
        if node.kind == "list":
            return list(items.values())
        if node.kind == "tuple":
            return {"$tuple": list(items.values())}
        return {"$codec": [node.kind.removeprefix("codec:"), items["value"]]}

    def _encode_apart(self, path: Path) -> Json:
        by_rank = sorted(self._apart[path].items())
        return {"$per_rank": {str(rank): each for rank, each in by_rank}}


def _encode_dict(items: dict[Key, Json]) -> Json:
    if all(isinstance(key, str) and not key.startswith("$") for key in items):
        return items
    return {"$dict": [[key, value] for key, value in items.items()]}


def _encode_scalar(value: Any) -> Json:
    match value:
        case torch.Size():
            return {"$size": list(value)}
        case torch.dtype():
            return {"$dtype": name_of_dtype(value)}
        case torch.device():
            return {"$device": str(value)}
        case float() if not math.isfinite(value):
            return {"$float": str(value)}
        case int() if not -(2**63) <= value < 2**64:
            return {"$int": str(value)}
    return value


def decode(
    json: Json, *, tensor: Callable[[Json, Path], Node], rank: int | None, path: Path = ()
) -> Node:
    """Read a tree from JSON, with what `rank` holds where ranks differ.

    Raises `Malformed` for what `encode` cannot have written.
    """
    if len(path) > MAX_DEPTH:
        raise Malformed(f"the state is nested deeper than {MAX_DEPTH} levels")

    def inner(value: Json, key: Key) -> Node:
        return decode(value, tensor=tensor, rank=rank, path=(*path, key))

    if isinstance(json, list):
        return _whole(Branch("list", {i: inner(each, i) for i, each in enumerate(json)}))
    if not isinstance(json, dict):
        return Scalar(json)
    tag = next(iter(json), "")
    if not tag.startswith("$"):
        for key in json:
            _need(not key.startswith("$"), path, f"has the key {key!r} beside others")
        return Branch("dict", {key: inner(each, key) for key, each in json.items()})
    _need(len(json) == 1, path, f"has keys beside {tag!r}")
    body = json[tag]
    if tag == "$tensor":
        return tensor(body, path)
    if tag == "$per_rank":
        return _choose(body, path, rank, partial(decode, tensor=tensor, rank=rank, path=path))
    if tag in ("$tuple", "$dict", "$codec"):
        return _whole(_decode_branch(tag, body, path, inner))
    return Scalar(_decode_scalar(tag, body, path))


def _whole(branch: Branch) -> Node:
    """Let a list be absent as a whole if one of its items is."""
    if branch.kind == "dict":
        return branch
    return next((each for each in branch.children.values() if isinstance(each, Absent)), branch)


def _decode_branch(tag: str, body: Json, path: Path, inner: Callable[[Json, Key], Node]) -> Branch:
    _need(isinstance(body, list), path, f"has no list under {tag!r}")
    if tag == "$tuple":
        return Branch("tuple", {place: inner(each, place) for place, each in enumerate(body)})
    if tag == "$dict":
        children: dict[Key, Node] = {}
        for pair in body:
            _need(isinstance(pair, list) and len(pair) == 2, path, "has no pairs under '$dict'")
            key, value = pair
            _need(key is None or isinstance(key, str | int | float), path, "has a key of no use")
            _need(key not in children, path, f"has the key {key!r} twice")
            children[key] = inner(value, key)
        return Branch("dict", children)
    _need(len(body) == 2 and isinstance(body[0], str), path, "does not name its codec")
    name, value = body
    if codec_named(name) is None:
        raise Malformed(
            f"{display(path)} was stored by the codec {name!r}, which is not registered here"
        )
    return Branch(f"codec:{name}", {"value": inner(value, "value")})


def _choose(body: Json, path: Path, rank: int | None, read: Callable[[Json], Node]) -> Node:
    _need(isinstance(body, dict), path, "has no object under '$per_rank'")
    by_rank: dict[int, Json] = {}
    for text, value in body.items():
        _need(is_rank(text), path, f"has no rank {text!r:.40}")
        by_rank[int(text)] = value
    # All of them are read, so that what is wrong with one is known on every rank.
    nodes = {each: read(value) for each, value in by_rank.items()}
    return nodes.get(-1 if rank is None else rank, Absent(tuple(sorted(nodes))))


def _decode_scalar(tag: str, body: Json, path: Path) -> Any:
    if tag == "$float" and body in ("nan", "inf", "-inf"):
        return float(body)
    if tag == "$int" and isinstance(body, str) and body.lstrip("-").isdigit():
        try:
            return int(body)
        except ValueError:
            raise Malformed(f"{display(path)} is no integer: {body[:40]!r}") from None
    if tag == "$size" and isinstance(body, list) and all(type(each) is int for each in body):
        _need(all(0 <= each < 2**63 for each in body), path, "is a size out of range")
        return torch.Size(body)
    if tag == "$dtype" and isinstance(body, str) and (dtype := dtype_named(body)) is not None:
        return dtype
    if tag == "$device" and isinstance(body, str):
        try:
            return torch.device(body)
        except RuntimeError:
            pass
    raise Malformed(f"{display(path)} has {tag!r} with what it cannot be: {body!r:.60}")


def _need(condition: bool, path: Path, complaint: str) -> None:
    if not condition:
        raise Malformed(f"{display(path)} {complaint}")
