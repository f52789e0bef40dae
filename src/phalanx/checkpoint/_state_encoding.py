"""The state tree as the JSON of a manifest, and back.

::

    {"step": 7, "betas": {"$tuple": [0.9, 0.999]}, "state": {"$dict": [[0, ...], [1, ...]]}}

JSON's own types stay as they are; an object with a single key that starts with a dollar is
something that JSON lacks. `StateManifest` is a manifest whose state can be decoded. A manifest
may come from an attacker even if its checksum is right, so names, ranges and shapes are checked
before use; what is wrong raises `DamagedCheckpoint` with the name of the file.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeAlias

import msgspec
import torch

from ._manifest import (
    MalformedManifest,
    Manifest,
    PieceEntry,
    StateKey,
    StatePath,
    TensorEntry,
    check_ranges,
    format_path,
    is_rank_key,
    raise_damaged,
    tensor_name,
)
from ._state_tree import (
    MAX_DEPTH,
    Absent,
    Branch,
    Node,
    Scalar,
    TensorLeaf,
    codec_named,
    drop_absent,
)
from ._tensor_file import dtype_from_name, dtype_name, is_quantized, nbytes

Json: TypeAlias = Any


def encode(
    node: Node,
    tensor: Callable[[TensorLeaf], Json],
    *,
    per_rank: Mapping[StatePath, Mapping[int, Json]] | None = None,
    path: StatePath = (),
) -> Json:
    """Return a tree as JSON. `tensor` encodes tensors; `per_rank` has the parts that differ."""
    return _Encoder(tensor, per_rank or {}).encode(node, path)


class _Encoder:
    def __init__(
        self,
        tensor: Callable[[TensorLeaf], Json],
        per_rank: Mapping[StatePath, Mapping[int, Json]],
    ) -> None:
        self._tensor = tensor
        self._per_rank = per_rank
        self._per_rank_below: dict[StatePath, list[StatePath]] = defaultdict(list)
        for path in per_rank:
            self._per_rank_below[path[:-1]].append(path)

    def encode(self, node: Node, path: StatePath) -> Json:
        if path in self._per_rank:
            return self._encode_per_rank(path)
        if isinstance(node, TensorLeaf):
            return {"$tensor": self._tensor(node)}
        if isinstance(node, Scalar):
            return encode_scalar(node.value)
        assert isinstance(node, Branch)
        items = {key: self.encode(child, (*path, key)) for key, child in node.children.items()}
        if node.kind == "dict":
            for each in self._per_rank_below[path]:
                if each[-1] not in items:  # a key that only other ranks have
                    items[each[-1]] = self._encode_per_rank(each)
            return _encode_dict(items)
        if node.kind == "list":
            return list(items.values())
        if node.kind == "tuple":
            return {"$tuple": list(items.values())}
        return {"$codec": [node.kind.removeprefix("codec:"), items["value"]]}

    def _encode_per_rank(self, path: StatePath) -> Json:
        by_rank = sorted(self._per_rank[path].items())
        return {"$per_rank": {str(rank): each for rank, each in by_rank}}


def _encode_dict(items: dict[StateKey, Json]) -> Json:
    if all(isinstance(key, str) and not key.startswith("$") for key in items):
        return items
    return {"$dict": [[key, value] for key, value in items.items()]}


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


def decode(
    json: Json, *, tensor: Callable[[Json, StatePath], Node], rank: int | None, path: StatePath = ()
) -> Node:
    """Return the tree of a JSON value, with the parts of `rank` where ranks differ.

    Raises `MalformedManifest` for anything that `encode` does not write.
    """
    if len(path) > MAX_DEPTH:
        raise MalformedManifest(f"the state is nested deeper than {MAX_DEPTH} levels")

    def inner(value: Json, key: StateKey) -> Node:
        return decode(value, tensor=tensor, rank=rank, path=(*path, key))

    if isinstance(json, list):
        return _absent_if_incomplete(
            Branch("list", {i: inner(each, i) for i, each in enumerate(json)})
        )
    if not isinstance(json, dict):
        return Scalar(json)
    tag = next(iter(json), "")
    if not tag.startswith("$"):
        for key in json:
            _require(not key.startswith("$"), path, f"has the key {key!r} among others")
        return Branch("dict", {key: inner(each, key) for key, each in json.items()})
    _require(len(json) == 1, path, f"has other keys than {tag!r}")
    body = json[tag]
    if tag == "$tensor":
        return tensor(body, path)
    if tag == "$per_rank":
        return _decode_per_rank(
            body, path, rank, partial(decode, tensor=tensor, rank=rank, path=path)
        )
    if tag in ("$tuple", "$dict", "$codec"):
        return _absent_if_incomplete(_decode_branch(tag, body, path, inner))
    return Scalar(_decode_scalar(tag, body, path))


def _absent_if_incomplete(branch: Branch) -> Node:
    """A list or tuple is absent as a whole if one of its items is."""
    if branch.kind == "dict":
        return branch
    return next((each for each in branch.children.values() if isinstance(each, Absent)), branch)


def _decode_branch(
    tag: str, body: Json, path: StatePath, inner: Callable[[Json, StateKey], Node]
) -> Branch:
    _require(isinstance(body, list), path, f"has no list under {tag!r}")
    if tag == "$tuple":
        return Branch("tuple", {i: inner(each, i) for i, each in enumerate(body)})
    if tag == "$dict":
        children: dict[StateKey, Node] = {}
        for pair in body:
            _require(isinstance(pair, list) and len(pair) == 2, path, "has no pairs under '$dict'")
            key, value = pair
            _require(key is None or isinstance(key, str | int | float), path, "has an invalid key")
            _require(key not in children, path, f"has the key {key!r} twice")
            children[key] = inner(value, key)
        return Branch("dict", children)
    _require(len(body) == 2 and isinstance(body[0], str), path, "does not name its codec")
    name, value = body
    if codec_named(name) is None:
        raise MalformedManifest(
            f"{format_path(path)} was stored by the codec {name!r}, which is not registered"
        )
    return Branch(f"codec:{name}", {"value": inner(value, "value")})


def _decode_per_rank(
    body: Json, path: StatePath, rank: int | None, read: Callable[[Json], Node]
) -> Node:
    _require(isinstance(body, dict), path, "has no object under '$per_rank'")
    by_rank: dict[int, Json] = {}
    for text, value in body.items():
        _require(is_rank_key(text), path, f"has an invalid rank {text!r:.40}")
        by_rank[int(text)] = value
    # Decode all of them, so that every rank detects damage in any.
    nodes = {each: read(value) for each, value in by_rank.items()}
    return nodes.get(-1 if rank is None else rank, Absent(tuple(sorted(nodes))))


def _decode_scalar(tag: str, body: Json, path: StatePath) -> Any:
    if tag == "$float" and body in ("nan", "inf", "-inf"):
        return float(body)
    if tag == "$int" and isinstance(body, str) and body.lstrip("-").isdigit():
        try:
            return int(body)
        except ValueError:
            raise MalformedManifest(
                f"{format_path(path)} is not an integer: {body[:40]!r}"
            ) from None
    if tag == "$size" and isinstance(body, list) and all(type(each) is int for each in body):
        _require(all(0 <= each < 2**63 for each in body), path, "is a size out of range")
        return torch.Size(body)
    if tag == "$dtype" and isinstance(body, str) and (dtype := dtype_from_name(body)) is not None:
        return dtype
    if tag == "$device" and isinstance(body, str):
        try:
            return torch.device(body)
        except RuntimeError:
            pass
    raise MalformedManifest(f"{format_path(path)} has an invalid {tag!r}: {body!r:.60}")


def _require(condition: bool, path: StatePath, complaint: str) -> None:
    if not condition:
        raise MalformedManifest(f"{format_path(path)} {complaint}")


class StateManifest(Manifest, forbid_unknown_fields=True):
    """A manifest whose state can be decoded, validated as far as possible without its files."""

    def check(self) -> None:
        """Validate every tensor, and that the tensors cover the files exactly."""
        check_ranges(self.files, self.tensors())

    def tree(self, rank: int | None, file: str) -> Node:
        """Return the tree of the state, with the parts of `rank` where ranks differ."""
        try:
            tree = decode(self.state, tensor=self._leaf, rank=rank)
        except MalformedManifest as error:
            raise_damaged(file, str(error))
        # A rank that took part in the save and had no such key lacks nothing.
        return drop_absent(tree) if rank is not None and rank < self.ranks else tree

    def tensors(self) -> list[TensorEntry]:
        found: list[TensorEntry] = []

        def record(body: Any, path: StatePath) -> TensorLeaf:
            leaf = self._leaf(body, path)
            found.append(leaf.data)
            return leaf

        decode(self.state, tensor=record, rank=None)
        return found

    def _leaf(self, body: Any, path: StatePath) -> TensorLeaf:
        where = format_path(path)
        try:
            entry = msgspec.convert(body, TensorEntry, strict=True)
        except msgspec.ValidationError as error:
            raise MalformedManifest(f"{where}: {error}") from None
        dtype = dtype_from_name(entry.dtype)
        if dtype is None or is_quantized(dtype):
            raise MalformedManifest(
                f"{where} has the dtype {entry.dtype!r:.40}, which this torch does not store"
            )
        try:
            device = torch.device(entry.device).type
        except RuntimeError:
            raise MalformedManifest(f"{where} has an unknown device {entry.device!r:.40}") from None
        _check_shape(entry, dtype, where)
        if len({(piece.file, piece.at) for piece in entry.pieces}) < len(entry.pieces):
            raise MalformedManifest(f"{where} has the same piece twice")
        for piece in entry.pieces:
            self._check_piece(piece, dtype, where)
        return TensorLeaf(tensor_name(path), dtype, tuple(entry.shape), device, entry)

    def _check_piece(self, piece: PieceEntry, dtype: torch.dtype, where: str) -> None:
        begin, end = piece.at
        file = self.files.get(piece.file)
        if file is None:
            raise MalformedManifest(
                f"{where} is in {piece.file!r:.80}, which is not a file of the checkpoint"
            )
        if not file.header.bytes <= begin <= end <= file.bytes:
            raise MalformedManifest(
                f"{where} is at {begin}..{end} of {piece.file}, outside its data"
            )
        if (end - begin) % dtype.itemsize:
            raise MalformedManifest(f"{where} has a piece that ends inside an element")


def _check_shape(entry: TensorEntry, dtype: torch.dtype, where: str) -> None:
    total = sum(end - begin for begin, end in (piece.at for piece in entry.pieces))
    # Zeros count as one: torch multiplies the other lengths for its strides.
    if nbytes(dtype, [max(length, 1) for length in entry.shape]) >= 2**62:
        raise MalformedManifest(f"{where} has the shape {entry.shape}, which is too large")
    if len(entry.shape) > 64 or total != nbytes(dtype, entry.shape):
        raise MalformedManifest(
            f"{where} is {entry.dtype}{entry.shape}, but its pieces have {total} bytes"
        )
