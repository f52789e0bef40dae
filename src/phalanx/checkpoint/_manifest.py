"""The manifest: what a checkpoint consists of, readable, sealed, and believed in nothing.

The first line has a checksum of all that follows it. What passes it may still have been written by
an enemy, so every statement is checked before it is used: names of files, ranges, shapes. Whatever
is wrong raises `DamagedCheckpoint` with the name of the file.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from typing import Annotated, Any, Literal, NoReturn

import msgspec
import torch
from msgspec import Meta, Struct

from ..errors import DamagedCheckpoint
from ._dtypes import dtype_named
from ._encoding import Malformed, decode
from ._paths import Path, display, name_of
from ._structure import Node, TensorLeaf, without_absent
from ._tensors import checksum, nbytes

__all__ = ["MANIFEST", "VERSION", "FileEntry", "Manifest", "PieceEntry", "TensorEntry"]

MANIFEST = "manifest.json"
"""Its name. A folder is a checkpoint if and only if it has one."""
VERSION = 1
LARGEST = 1 << 30
"""Bytes; a manifest of a million tensors has a fifth of it."""

_FORMAT: Literal["phalanx checkpoint"] = "phalanx checkpoint"
_SEAL = re.compile(rb'\{\n  "xxh3_128": "([0-9a-f]{32})",\n')
_FILE_NAME = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,200}\.safetensors$"

Checksum = Annotated[str, Meta(pattern="^[0-9a-f]{32}$")]
Natural = Annotated[int, Meta(ge=0, le=2**62)]


class PieceEntry(Struct, forbid_unknown_fields=True):
    """Some of a tensor's bytes: from where to where they are in a file."""

    file: str
    at: tuple[Natural, Natural]
    xxh3_128: Checksum


class TensorEntry(Struct, forbid_unknown_fields=True):
    """A tensor; the pieces follow each other in it."""

    dtype: str
    shape: list[Natural]
    pieces: list[PieceEntry]
    device: str = "cpu"


class HeaderEntry(Struct, forbid_unknown_fields=True):
    """The beginning of a file, before its first tensor."""

    bytes: Natural
    xxh3_128: Checksum


class FileEntry(Struct, forbid_unknown_fields=True):
    """A file of tensors."""

    bytes: Natural
    header: HeaderEntry


class Manifest(Struct, forbid_unknown_fields=True):
    """All that is known of a checkpoint."""

    format: Literal["phalanx checkpoint"]
    version: int
    save: Annotated[str, Meta(pattern="^[0-9a-f]{16}$")]
    """A random number of the save, which is part of the names of its files."""
    ranks: Annotated[int, Meta(ge=1, le=2**24)]
    files: dict[Annotated[str, Meta(pattern=_FILE_NAME)], FileEntry]
    state: Any

    @classmethod
    def make(cls, save: str, ranks: int, files: dict[str, FileEntry], state: Any) -> Manifest:
        """Make a manifest of this version."""
        return cls(_FORMAT, VERSION, save, ranks, files, state)

    def dump(self) -> bytes:
        """Write it down, readable, with its seal."""
        fields = {name: msgspec.to_builtins(getattr(self, name)) for name in self.__struct_fields__}
        body = ",\n".join(
            f"  {json.dumps(name)}: {_pretty(each, 1)}" for name, each in fields.items()
        )
        rest = f"{body}\n}}\n".encode()
        return f'{{\n  "xxh3_128": "{checksum(rest)}",\n'.encode() + rest

    @classmethod
    def load(cls, data: bytes, file: str) -> Manifest:
        """Read one, and check all that can be checked without the files that it names."""
        try:
            manifest = msgspec.convert(_parse(data), cls, strict=True)
            manifest._check_ranges()
        except (Malformed, msgspec.ValidationError) as error:
            _refuse(file, str(error))
        except RecursionError:
            _refuse(file, "it is nested too deep")
        return manifest

    def tree(self, rank: int | None, file: str) -> Node:
        """Return the tree of the state, with what `rank` holds where ranks differ."""
        try:
            tree = decode(self.state, tensor=self._leaf, rank=rank)
        except Malformed as error:
            _refuse(file, str(error))
        # A rank that was there and has saved nothing under a key has lost nothing.
        return without_absent(tree) if rank is not None and rank < self.ranks else tree

    def tensors(self) -> list[TensorEntry]:
        """Return what is said of all tensors of all ranks."""
        found: list[TensorEntry] = []

        def note(body: Any, path: Path) -> TensorLeaf:
            leaf = self._leaf(body, path)
            found.append(leaf.data)
            return leaf

        decode(self.state, tensor=note, rank=None)
        return found

    def _leaf(self, body: Any, path: Path) -> TensorLeaf:
        """Check what is said of one tensor."""
        where = display(path)
        try:
            entry = msgspec.convert(body, TensorEntry, strict=True)
        except msgspec.ValidationError as error:
            raise Malformed(f"{where}: {error}") from None
        dtype = dtype_named(entry.dtype)
        if dtype is None:
            raise Malformed(f"{where} has the type {entry.dtype!r:.40}, which torch lacks")
        try:
            device = torch.device(entry.device).type
        except RuntimeError:
            raise Malformed(f"{where} has no device {entry.device!r:.40}") from None
        _check_shape(entry, dtype, where)
        if len({(piece.file, piece.at) for piece in entry.pieces}) < len(entry.pieces):
            raise Malformed(f"{where} has the same piece twice")
        for piece in entry.pieces:
            self._check_piece(piece, dtype, where)
        return TensorLeaf(name_of(path), dtype, tuple(entry.shape), device, entry)

    def _check_piece(self, piece: PieceEntry, dtype: torch.dtype, where: str) -> None:
        begin, end = piece.at
        file = self.files.get(piece.file)
        if file is None:
            raise Malformed(f"{where} is in {piece.file!r:.80}, which is not among the files")
        if not file.header.bytes <= begin <= end <= file.bytes:
            raise Malformed(f"{where} is at {begin}..{end} of {piece.file}, outside of its data")
        if (end - begin) % dtype.itemsize:
            raise Malformed(f"{where} has a piece that ends inside of an element")

    def _check_ranges(self) -> None:
        """Let the tensors cover every file without gap or overlap, so that no byte is unchecked."""
        ranges: dict[str, dict[tuple[int, int], str]] = defaultdict(dict)
        for leaf in self.tensors():
            for piece in leaf.pieces:
                known = ranges[piece.file].setdefault(piece.at, piece.xxh3_128)
                if known != piece.xxh3_128:
                    raise Malformed(f"{piece.file} has two checksums for one range")
        for name, entry in self.files.items():
            position = entry.header.bytes
            for begin, end in sorted(ranges[name]):
                if begin != position:
                    raise Malformed(f"{name}: tensors overlap or leave a gap at {position}")
                position = end
            if position != entry.bytes:
                raise Malformed(
                    f"{name} has {entry.bytes} bytes, but its tensors end at {position}"
                )


def _check_shape(entry: TensorEntry, dtype: torch.dtype, where: str) -> None:
    total = sum(end - begin for begin, end in (piece.at for piece in entry.pieces))
    # Lengths next to a zero count too: torch multiplies them for its strides.
    if nbytes(dtype, [max(length, 1) for length in entry.shape]) >= 2**62:
        raise Malformed(f"{where} has the shape {entry.shape}, which nobody can hold")
    if len(entry.shape) > 64 or total != nbytes(dtype, entry.shape):
        raise Malformed(f"{where} is {entry.dtype}{entry.shape}, but its pieces have {total} bytes")


def _parse(data: bytes) -> Any:
    seal = _SEAL.match(data)
    if seal is None:
        raise Malformed("it does not begin like a manifest")
    if checksum(data[seal.end() :]) != seal[1].decode():
        raise Malformed("its checksum is wrong; it was damaged, or changed by hand")
    try:
        fields = json.loads(data, object_pairs_hook=_unique, parse_constant=_no_constant)
    except Malformed:
        raise
    except (ValueError, RecursionError) as error:
        raise Malformed(f"it is not JSON: {error}") from None
    del fields["xxh3_128"]
    version = fields.get("version")
    if type(version) is int and version != VERSION:
        raise Malformed(f"it is of version {version}, and this phalanx reads version {VERSION}")
    return fields


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        raise Malformed("it has an object with a key twice")
    return fields


def _no_constant(text: str) -> NoReturn:
    raise Malformed(f"it has the number {text}, which is not JSON")


def _refuse(file: str, complaint: str) -> NoReturn:
    raise DamagedCheckpoint(f"{file} cannot be used: {complaint}") from None


def _pretty(value: Any, depth: int) -> str:
    """Indent, but keep what belongs together on one line."""
    if _is_flat(value):
        return json.dumps(value)
    pad = "  " * (depth + 1)
    if isinstance(value, dict):
        lines = [
            f"{pad}{json.dumps(key)}: {_pretty(each, depth + 1)}" for key, each in value.items()
        ]
    else:
        lines = [pad + _pretty(each, depth + 1) for each in value]
    opening, closing = "{}" if isinstance(value, dict) else "[]"
    return f"{opening}\n" + ",\n".join(lines) + f"\n{'  ' * depth}{closing}"


def _is_flat(value: Any) -> bool:
    if not isinstance(value, dict | list):
        return True
    inner = list(value.values()) if isinstance(value, dict) else value
    if "$tensor" in value or (len(inner) == 1 and isinstance(inner[0], list)):
        return "$tensor" in value or _is_flat(inner[0])
    return not any(isinstance(each, dict | list) for each in inner)
