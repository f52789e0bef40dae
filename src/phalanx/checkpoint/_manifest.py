"""The manifest: which files and which state a checkpoint consists of.

The first line of the file holds a checksum of all that follows. `Manifest` checks types and
known fields; what it says about tensors is checked by `StateManifest` before a load, and listed
for people by `list_entries`. Paths into a state, for display and as tensor names, are here too.

Torch-free, so that the command line can list and verify checkpoints without it.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, NoReturn, Self, TypeAlias

import msgspec
from msgspec import Meta, Struct

from ..errors import DamagedCheckpoint, UnsupportedState
from ._storage import checksum

StateKey: TypeAlias = str | int | float | bool | None
"""A key of a dict or an index of a list."""
StatePath: TypeAlias = tuple[StateKey, ...]


def format_path(path: StatePath) -> str:
    """Format a path for people: ``optimizer.param_groups[0].lr``."""
    text = ""
    for key in path:
        if isinstance(key, str):
            text += f".{key}" if text else key
        else:
            text += f"[{key}]"
    return text or "the state"


def tensor_name(path: StatePath) -> str:
    """Return a unique name for a path: ``model/layer.weight``."""
    return "/".join(map(_escape_key, path))


def _escape_key(key: StateKey) -> str:
    if not isinstance(key, str):
        return json.dumps(key)
    plain = key.replace("~", "~0").replace("/", "~1")
    # The key "0" differs from 0, and the safetensors format reserves one name.
    return json.dumps(plain) if _needs_quotes(plain) else plain


def _needs_quotes(key: str) -> bool:
    if not key or key.startswith('"') or key == "__metadata__":
        return True
    if key[0].isalpha() and key not in ("true", "false", "null", "NaN", "Infinity"):
        return False  # the common case
    try:
        json.loads(key)
    except (ValueError, RecursionError):
        return False
    return True


MANIFEST = "manifest.json"
"""A directory is a checkpoint if and only if it contains a file of this name."""
VERSION = 1
MAX_MANIFEST_BYTES = 1 << 30
"""A manifest of a million tensors has a fifth of this."""

_FORMAT: Literal["phalanx checkpoint"] = "phalanx checkpoint"
_CHECKSUM_LINE = re.compile(rb'\{\n  "xxh3_128": "([0-9a-f]{32})",\n')
_FILE_NAME = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,200}\.safetensors$"

Checksum = Annotated[str, Meta(pattern="^[0-9a-f]{32}$")]
Natural = Annotated[int, Meta(ge=0, le=2**62)]


class MalformedManifest(ValueError):
    """A manifest is invalid. The reader adds the name of the file."""


class PieceEntry(Struct, forbid_unknown_fields=True):
    """Some of a tensor's bytes, as a range of a file."""

    file: str
    at: tuple[Natural, Natural]
    xxh3_128: Checksum


class TensorEntry(Struct, forbid_unknown_fields=True):
    """A tensor as a sequence of pieces."""

    dtype: str
    shape: list[Natural]
    pieces: list[PieceEntry]
    device: str = "cpu"


class HeaderEntry(Struct, forbid_unknown_fields=True):
    """The header of a file, before its first tensor."""

    bytes: Natural
    xxh3_128: Checksum


class FileEntry(Struct, forbid_unknown_fields=True):
    """A data file."""

    bytes: Natural
    header: HeaderEntry


class Manifest(Struct, forbid_unknown_fields=True):
    """The content of a manifest."""

    format: Literal["phalanx checkpoint"]
    version: int
    save: Annotated[str, Meta(pattern="^[0-9a-f]{16}$")]
    """The random id of the save, which is part of the names of its files."""
    ranks: Annotated[int, Meta(ge=1, le=2**24)]
    files: dict[Annotated[str, Meta(pattern=_FILE_NAME)], FileEntry]
    state: Any

    @classmethod
    def make(cls, save: str, ranks: int, files: dict[str, FileEntry], state: Any) -> Self:
        return cls(_FORMAT, VERSION, save, ranks, files, state)

    def dump(self) -> bytes:
        """Return the file's content: indented JSON with a checksum in its first line."""
        fields = {name: msgspec.to_builtins(getattr(self, name)) for name in self.__struct_fields__}
        body = ",\n".join(
            f"  {json.dumps(name)}: {_pretty(each, 1)}" for name, each in fields.items()
        )
        rest = f"{body}\n}}\n".encode()
        data = f'{{\n  "xxh3_128": "{checksum(rest)}",\n'.encode() + rest
        if len(data) > MAX_MANIFEST_BYTES:
            raise UnsupportedState(
                f"the manifest would have {len(data)} bytes, the limit is {MAX_MANIFEST_BYTES}. "
                "Store large amounts of numbers or text in tensors"
            )
        return data

    @classmethod
    def load(cls, data: bytes, file: str) -> Self:
        """Parse a file; raises `DamagedCheckpoint` if its checksum or a field is wrong."""
        try:
            document = msgspec.convert(_parse(data), cls, strict=True)
            document.check()
        except (MalformedManifest, msgspec.ValidationError) as error:
            raise_damaged(file, str(error))
        except RecursionError:
            raise_damaged(file, "it is nested too deeply")
        return document

    def check(self) -> None:
        """Validate beyond the types of fields; raises `MalformedManifest`."""


def check_ranges(files: dict[str, FileEntry], tensors: Iterable[TensorEntry]) -> None:
    """Check that the tensors cover every file without gap or overlap, so every byte is verified.

    Only identical tensors may share bytes. Otherwise a small file could fill the memory, as many
    tensors of different shapes.
    """
    ranges: dict[str, dict[tuple[int, int], TensorEntry]] = defaultdict(dict)
    for tensor in tensors:
        for piece in tensor.pieces:
            begin, end = piece.at
            known = ranges[piece.file].setdefault(piece.at, tensor)
            if begin > end:
                raise MalformedManifest(
                    f"{piece.file} has a range that runs backwards, {begin} to {end}"
                )
            if begin < end and known is not tensor and known != tensor:
                raise MalformedManifest(f"{piece.file} has different tensors at {begin} to {end}")
    for name, entry in files.items():
        position = entry.header.bytes
        for begin, end in sorted(ranges[name]):
            if begin != position:
                raise MalformedManifest(f"{name}: tensors overlap or leave a gap at {position}")
            position = end
        if position != entry.bytes:
            raise MalformedManifest(
                f"{name} has {entry.bytes} bytes, but its tensors end at {position}"
            )


def is_rank_key(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 9


def raise_damaged(file: str, problem: str) -> NoReturn:
    raise DamagedCheckpoint(f"{file} cannot be used: {problem}") from None


class _Outline(Struct):
    version: int
    files: dict[str, FileEntry]


def read_file_entries(data: bytes, file: str) -> dict[str, FileEntry]:
    """Return the files of a manifest, about twenty times faster than parsing all of it.

    The checksum is verified; the state is skipped.
    """
    try:
        _check_checksum(data)
        outline = msgspec.json.decode(data, type=_Outline)
        _check_version(outline.version)
    except (MalformedManifest, msgspec.DecodeError) as error:
        raise_damaged(file, str(error))
    except RecursionError:
        raise_damaged(file, "it is nested too deeply")
    return outline.files


def _check_checksum(data: bytes) -> None:
    line = _CHECKSUM_LINE.match(data)
    if line is None:
        raise MalformedManifest("it does not begin like a manifest")
    if checksum(data[line.end() :]) != line[1].decode():
        raise MalformedManifest("its checksum is wrong: it was damaged or edited")


def _check_version(version: int) -> None:
    if version != VERSION:
        raise MalformedManifest(f"it has version {version}, this phalanx reads version {VERSION}")


def _parse(data: bytes) -> Any:
    _check_checksum(data)
    try:
        fields = json.loads(data, object_pairs_hook=_unique_keys, parse_constant=_no_constant)
    except MalformedManifest:
        raise
    except (ValueError, RecursionError) as error:
        raise MalformedManifest(f"it is not JSON: {error}") from None
    if b"\\ud" in data.lower():  # may be a lone surrogate, which cannot be printed
        _check_text(fields)
    del fields["xxh3_128"]
    version = fields.get("version")
    if type(version) is int:
        _check_version(version)
    return fields


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        raise MalformedManifest("it has an object with a duplicate key")
    return fields


def _check_text(fields: Any) -> None:
    try:
        json.dumps(fields, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise MalformedManifest("it has text that is not valid Unicode") from None


def _no_constant(text: str) -> NoReturn:
    raise MalformedManifest(f"it has the number {text}, which is not JSON")


def _pretty(value: Any, depth: int) -> str:
    """Indent JSON, but keep small values on one line."""
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


_MAX_JSON_DEPTH = 400  # more than any state that can be saved


@dataclass(frozen=True)
class ManifestEntry:
    """One value of a state."""

    name: str
    rank: int | None
    """The rank it belongs to; None if it is replicated."""
    tensor: TensorEntry | None
    value: Any = None
    """The JSON value, if it is not a tensor."""

    @property
    def bytes(self) -> int:
        pieces = [] if self.tensor is None else self.tensor.pieces
        return sum(end - begin for begin, end in (piece.at for piece in pieces))

    @property
    def owner(self) -> str:
        """The rank it belongs to, for people."""
        return "all" if self.rank is None else f"rank {self.rank}"


def list_entries(document: Manifest) -> list[ManifestEntry]:
    """List the values of a state in order; raises `MalformedManifest` if it is invalid."""
    try:
        return list(_walk(document.state, ()))
    except RecursionError:
        raise MalformedManifest("the state is nested too deeply") from None


def _walk(json: Any, path: StatePath) -> Iterator[ManifestEntry]:
    if len(path) > _MAX_JSON_DEPTH:
        raise MalformedManifest("the state is nested too deeply")
    tag = next(iter(json), None) if isinstance(json, dict) else None
    if isinstance(json, dict) and isinstance(tag, str) and tag.startswith("$"):
        yield from _walk_tagged(tag, json[tag], path)
    elif isinstance(json, dict | list) and json:
        for key, each in json.items() if isinstance(json, dict) else enumerate(json):
            yield from _walk(each, (*path, key))
    else:
        yield ManifestEntry(format_path(path), None, None, json)


def _walk_tagged(tag: str, body: Any, path: StatePath) -> Iterator[ManifestEntry]:
    match tag, body:
        case "$tensor", _:
            try:
                yield ManifestEntry(
                    format_path(path), None, msgspec.convert(body, TensorEntry, strict=True)
                )
            except msgspec.ValidationError as error:
                raise MalformedManifest(f"{format_path(path)}: {error}") from None
        case "$per_rank", dict():
            for rank, each in body.items():
                if not is_rank_key(rank):
                    raise MalformedManifest(f"{format_path(path)} has an invalid rank {rank!r:.40}")
                yield from (replace(entry, rank=int(rank)) for entry in _walk(each, path))
        case "$tuple", list():
            yield from _walk(body, path)
        case "$dict", list() if all(isinstance(each, list) and len(each) == 2 for each in body):
            for key, each in body:
                yield from _walk(each, (*path, key))
        case "$codec", [str(), value]:
            yield from _walk(value, path)
        case _:
            yield ManifestEntry(format_path(path), None, None, body)
