"""The state tree as the JSON of a manifest, and back.

::

    {"step": 7, "betas": {"$tuple": [0.9, 0.999]}, "state": {"$dict": [[0, ...], [1, ...]]}}

JSON's own types stay as they are; an object with a single key that starts with a dollar is
something that JSON lacks. `Manifest.load` has checked its structure; dtypes, shapes, devices and
codecs are checked here.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

import msgspec
import torch

from .._formatting import dtype_name
from ._manifest import (
    MalformedManifest,
    Manifest,
    StateKey,
    StatePath,
    TensorEntry,
    branch_items,
    format_path,
    reporting_damage,
    split_tag,
    tensor_name,
)
from ._state_tree import Absent, Branch, BranchKind, Node, Scalar, TensorLeaf, codecs_by_name
from ._tensor_file import DTYPES, nbytes

Json: TypeAlias = Any


def encode(
    node: Node,
    tensor: Callable[[TensorLeaf], Json],
    *,
    per_rank: Mapping[StatePath, Mapping[int, Json]] | None = None,
) -> Json:
    """Return a tree as JSON. `tensor` encodes tensors; `per_rank` has the parts that differ."""
    encoded: dict[StatePath, Json] = {}
    per_rank_keys: dict[StatePath, list[StateKey]] = defaultdict(list)
    for path, by_rank in (per_rank or {}).items():
        encoded[path] = {"$per_rank": {str(rank): by_rank[rank] for rank in sorted(by_rank)}}
        if path:  # not the whole state
            per_rank_keys[path[:-1]].append(path[-1])

    def visit(node: Node, path: StatePath) -> Json:
        if path in encoded:
            return encoded[path]
        if isinstance(node, TensorLeaf):
            return {"$tensor": tensor(node)}
        if isinstance(node, Scalar):
            return encode_scalar(node.value)
        assert isinstance(node, Branch)
        items = {key: visit(child, (*path, key)) for key, child in node.children.items()}
        if node.kind == "dict":
            for key in per_rank_keys[path]:  # including those that only other ranks have
                items.setdefault(key, encoded[*path, key])
            if all(isinstance(key, str) and not key.startswith("$") for key in items):
                return items
            return {"$dict": [[key, value] for key, value in items.items()]}
        if node.kind == "list":
            return list(items.values())
        if node.kind == "tuple":
            return {"$tuple": list(items.values())}
        return {"$codec": [node.codec, items["value"]]}

    return visit(node, ())


def encode_scalar(value: Any) -> Json:
    match value:
        case torch.Size():
            return {"$size": list(value)}
        case torch.dtype():
            return {"$dtype": dtype_name(value)}
        case torch.device():
            return {"$device": str(value)}
        case float() if not math.isfinite(value):
            return {"$float": str(value)}
        case int() if not -(2**63) <= value < 2**64:
            return {"$int": str(value)}
    return value


_SCALARS: dict[str, Callable[[Any], Any]] = {
    "$size": torch.Size,
    "$dtype": DTYPES.__getitem__,
    "$device": torch.device,
    "$float": float,
    "$int": int,
}


def decode(
    value: Json,
    *,
    tensor: Callable[[Json, StatePath], Node],
    rank: int | None,
    world_size: int = 0,
    path: StatePath = (),
) -> Node:
    """Return the tree of a JSON value, with the values of `rank` where ranks differ.

    A key that only other ranks have is `Absent`. If `rank` is one of the `world_size` ranks that
    saved, the key is left out: the rank did not have it then either. Raises `MalformedManifest`
    for a codec, dtype or device that does not exist here.
    """
    inner = partial(decode, tensor=tensor, rank=rank, world_size=world_size)
    tag, body = split_tag(value)
    if tag == "$tensor":
        return tensor(body, path)
    if tag == "$per_rank":
        # Decode all of them, so that every rank detects damage in any.
        decoded = {int(key): inner(each, path=path) for key, each in body.items()}
        nodes = {key: replace(node, mark="per rank") for key, node in decoded.items()}
        return nodes.get(-1 if rank is None else rank, Absent(tuple(sorted(nodes))))
    if tag in _SCALARS:
        return _decode_scalar(tag, body, path)
    if not isinstance(body, dict | list):
        return Scalar(body)
    kind: BranchKind = "dict" if tag == "$dict" or isinstance(body, dict) else "list"
    codec, items = "", branch_items(tag, body)
    if tag == "$tuple":
        kind = "tuple"
    elif tag == "$codec":
        codec, output = body
        if codec not in codecs_by_name:
            raise MalformedManifest(
                f"{format_path(path)} was stored by the codec {codec!r}, which is not registered"
            )
        kind, items = "codec", [("value", output)]
    children = {key: inner(each, path=(*path, key)) for key, each in items}
    absent = {key: each for key, each in children.items() if isinstance(each, Absent)}
    if absent and kind != "dict":
        return next(iter(absent.values()))  # a list or tuple is absent as a whole
    if rank is not None and rank < world_size:
        children = {key: each for key, each in children.items() if key not in absent}
    return Branch(kind, children, codec=codec)


def _decode_scalar(tag: str, body: Json, path: StatePath) -> Scalar:
    try:
        return Scalar(_SCALARS[tag](body))
    except (KeyError, ValueError, RuntimeError):
        problem = f"{format_path(path)} has an invalid {tag!r}: {body!r:.60}"
        raise MalformedManifest(problem) from None


def decode_state(manifest: Manifest, rank: int | None, file: str) -> Node:
    with reporting_damage(file):
        size = manifest.world_size
        return decode(manifest.state, tensor=_decode_tensor, rank=rank, world_size=size)


def _decode_tensor(body: Json, path: StatePath) -> TensorLeaf:
    where = format_path(path)
    entry = msgspec.convert(body, TensorEntry)
    dtype = DTYPES.get(entry.dtype)
    if dtype is None or entry.dtype.startswith(("qint", "quint")):  # those need a scale
        raise MalformedManifest(
            f"{where} has the dtype {entry.dtype!r:.40}, which this torch does not store"
        )
    try:
        device = torch.device(entry.device).type
    except RuntimeError:
        raise MalformedManifest(f"{where} has an unknown device {entry.device!r:.40}") from None
    # Zeros count as one: torch multiplies the other lengths for its strides.
    if nbytes(dtype, [max(length, 1) for length in entry.shape]) >= 2**62:
        raise MalformedManifest(f"{where} has the shape {entry.shape}, which is too large")
    if len(entry.shape) > 64 or entry.bytes != nbytes(dtype, entry.shape):
        raise MalformedManifest(
            f"{where} is {entry.dtype}{entry.shape}, but its shards have {entry.bytes} bytes"
        )
    if any((shard.at[1] - shard.at[0]) % dtype.itemsize for shard in entry.shards):
        raise MalformedManifest(f"{where} has a shard that ends inside an element")
    return TensorLeaf(tensor_name(path), dtype, tuple(entry.shape), device, entry)
