"""The manifest: which files and which state a checkpoint consists of.

The first line of the file holds a checksum of all that follows. A manifest may come from an
attacker even if its checksum is right, so `Manifest.load` checks the types of all fields, the
structure of the state, and that the tensors cover the files exactly. What only torch can tell, such
as dtypes, is checked by `_state_encoding`. Paths into a state, for display and as tensor names, are
here too.

Torch-free, so that the command line can list and verify checkpoints without it.
"""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from functools import cached_property
from typing import Annotated, Any, Literal, NamedTuple, Self, TypeAlias

import msgspec
from msgspec import Meta, Struct

from ..errors import CheckpointNotFound, DamagedCheckpoint, UnsupportedState
from ._storage import Source, Storage, checksum

StateKey: TypeAlias = str | int | float | bool | None  # A key of a dict or an index of a list
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
    if plain[:1].isalpha() and plain not in ("true", "false", "null", "NaN", "Infinity"):
        return plain  # the common case
    # The key "0" differs from 0, and the safetensors format reserves one name.
    if plain and plain[0] != '"' and plain != "__metadata__":
        try:
            json.loads(plain)
        except (ValueError, RecursionError):
            return plain
    return json.dumps(plain)


MANIFEST = "manifest.json"
"""A directory is a checkpoint if and only if it contains a file of this name."""
VERSION = 1
MAX_MANIFEST_BYTES = 1 << 30  # A manifest of a million tensors has a fifth of this
MAX_DEPTH = 100
"""Levels of nesting of a state. Rejects cycles and attacks.

Its JSON may be three times as deep, and recursive functions must reach its end from any depth of
the caller's stack.
"""

_CHECKSUM_LINE = re.compile(rb'\{\n  "xxh3_128": "([0-9a-f]{32})",\n')
_FILE_NAME = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,200}\.safetensors$"

Checksum = Annotated[str, Meta(pattern="^[0-9a-f]{32}$")]
Natural = Annotated[int, Meta(ge=0, le=2**62)]


class MalformedManifest(ValueError):
    """A manifest is invalid. The reader adds the name of the file."""


class ShardEntry(Struct, forbid_unknown_fields=True):
    """Some of a tensor's bytes, and where they are in a file: from where to where."""

    file: str
    at: tuple[Natural, Natural]
    xxh3_128: Checksum


class TensorEntry(
    Struct, forbid_unknown_fields=True, omit_defaults=True, rename={"shards": "pieces"}
):
    dtype: str
    shape: list[Natural]
    shards: list[ShardEntry]
    device: str = "cpu"

    @property
    def bytes(self) -> int:
        return sum(end - begin for begin, end in (shard.at for shard in self.shards))


class HeaderEntry(Struct, forbid_unknown_fields=True):
    """The header of a file, before its first tensor."""

    bytes: Natural
    xxh3_128: Checksum


class FileEntry(Struct, forbid_unknown_fields=True):
    bytes: Natural
    header: HeaderEntry

    def length_problem(self, source: Source) -> str:
        """Return what is wrong with the length of an open file; "" if it is right."""
        is_right = source.length == self.bytes
        return "" if is_right else f"it has {source.length} bytes, expected {self.bytes}"


class ManifestEntry(NamedTuple):
    name: str
    rank: int | None  # the rank it belongs to; None if it is replicated
    tensor: TensorEntry | None
    value: Any = None  # the JSON value, if it is not a tensor


class _Version(Struct):
    version: int


class ManifestOutline(Struct):
    """A manifest without its state, which is read about twenty times faster."""

    files: dict[str, FileEntry]

    @classmethod
    def load(cls, data: bytes, file: str) -> Self:
        """Parse a file; raises `DamagedCheckpoint` if its checksum or version is wrong."""
        with reporting_damage(file):
            line = _CHECKSUM_LINE.match(data)
            if line is None:
                raise MalformedManifest("it does not begin like a manifest")
            if checksum(data[line.end() :]) != line[1].decode():
                raise MalformedManifest("its checksum is wrong: it was damaged or edited")
            # First: the fields of another version may have other types.
            version = msgspec.json.decode(data, type=_Version).version
            if version != VERSION:
                raise MalformedManifest(
                    f"it has version {version}, this phalanx reads version {VERSION}"
                )
            return msgspec.json.decode(data, type=cls)


class Manifest(
    Struct, forbid_unknown_fields=True, dict=True, rename={"save_id": "save", "world_size": "ranks"}
):
    format: Literal["phalanx checkpoint"]
    version: int
    save_id: Annotated[str, Meta(pattern="^[0-9a-f]{16}$")]
    """The random id of the save, which is part of the names of its files."""
    world_size: Annotated[int, Meta(ge=1, le=2**24)]
    files: dict[Annotated[str, Meta(pattern=_FILE_NAME)], FileEntry]
    state: Any

    @classmethod
    def make(cls, save_id: str, world_size: int, files: dict[str, FileEntry], state: Any) -> Self:
        return cls("phalanx checkpoint", VERSION, save_id, world_size, files, state)

    def dump(self) -> bytes:
        """Return the file's content: indented JSON with a checksum in its first line."""
        rest = f"{_pretty(msgspec.to_builtins(self), 0)}\n".removeprefix("{\n").encode()
        data = f'{{\n  "xxh3_128": "{checksum(rest)}",\n'.encode() + rest
        if len(data) > MAX_MANIFEST_BYTES:
            raise UnsupportedState(
                f"the manifest would have {len(data)} bytes, the limit is {MAX_MANIFEST_BYTES}. "
                "Store large amounts of numbers or text in tensors"
            )
        return data

    @classmethod
    def load(cls, data: bytes, file: str) -> Self:
        """Parse and validate a file; raises `DamagedCheckpoint` if anything is wrong."""
        ManifestOutline.load(data, file)
        with reporting_damage(file):
            fields = b"{" + _CHECKSUM_LINE.sub(b"", data, count=1)
            manifest = msgspec.json.decode(fields, type=cls)
            json.loads(fields, object_pairs_hook=_check_keys, parse_int=len)  # of any length
            _check_shards(manifest.files, manifest.entries)
        return manifest

    @cached_property
    def entries(self) -> list[ManifestEntry]:
        """The values of the state in order; raises `MalformedManifest` if it is invalid."""
        entries: list[ManifestEntry] = []
        _collect_entries(self.state, (), None, 0, entries)
        return entries


@contextmanager
def reporting_damage(file: str) -> Iterator[None]:
    """Raise `DamagedCheckpoint` with the name of the file for what is wrong with its content."""
    try:
        yield
    except MalformedManifest as error:
        raise DamagedCheckpoint(f"{file} cannot be used: {error}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise DamagedCheckpoint(f"{file} cannot be used: it is malformed: {error}") from None
    except RecursionError:
        raise DamagedCheckpoint(f"{file} cannot be used: it is nested too deeply") from None


def _check_keys(pairs: list[tuple[str, Any]]) -> None:
    """Reject an object that has a key twice; parsers differ in which value they return."""
    if len(dict(pairs)) < len(pairs):
        key = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise MalformedManifest(f"it has the same key twice: {key!r:.60}")


def no_checkpoint(path: str) -> CheckpointNotFound:
    return CheckpointNotFound(f"there is no checkpoint at {path}: no {MANIFEST} found")


def named_files(storage: Storage) -> set[str] | None:
    """Return the data files of the current checkpoint; None if its manifest is damaged."""
    try:
        with closing(storage.snapshot()) as snapshot:
            return {*ManifestOutline.load(snapshot.manifest(), storage.path).files}
    except FileNotFoundError:
        return set()
    except DamagedCheckpoint:
        return None


def _check_shards(files: dict[str, FileEntry], entries: Iterable[ManifestEntry]) -> None:
    """Check that the tensors cover every file without gap or overlap, so every byte is verified.

    Only identical tensors may share bytes. Otherwise a small file could fill the memory, as many
    tensors of different shapes.
    """
    ranges: dict[str, dict[tuple[int, int], TensorEntry]] = defaultdict(dict)
    for name, _, tensor, _ in entries:
        if tensor is None:
            continue
        if len({(shard.file, shard.at) for shard in tensor.shards}) < len(tensor.shards):
            raise MalformedManifest(f"{name} has the same shard twice")
        for shard in tensor.shards:
            begin, end = shard.at
            file = files.get(shard.file)
            if file is None:
                raise MalformedManifest(
                    f"{name} is in {shard.file!r:.80}, which is not a file of the checkpoint"
                )
            if not file.header.bytes <= begin <= end <= file.bytes:
                raise MalformedManifest(
                    f"{name} is at {begin}..{end} of {shard.file}, which is not a range of its data"
                )
            known = ranges[shard.file].setdefault(shard.at, tensor)
            if begin < end and known is not tensor and known != tensor:
                raise MalformedManifest(f"{shard.file} has different tensors at {begin} to {end}")
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


_TAGS: dict[str, Any] = {
    "$tensor": TensorEntry,
    "$per_rank": dict[Annotated[str, Meta(pattern=r"^[0-9]{1,8}\Z")], Any],
    "$tuple": list[Any],
    "$dict": list[tuple[StateKey, Any]],
    "$codec": tuple[str, Any],
    "$float": Literal["nan", "inf", "-inf"],
    "$int": Annotated[str, Meta(pattern=r"^-?[0-9]{1,4300}\Z")],
    "$size": list[Annotated[int, Meta(ge=0, le=2**63 - 1)]],
    "$dtype": str,
    "$device": str,
}
"""What JSON lacks is an object with a single key that starts with a dollar, and this content."""


def split_tag(value: Any) -> tuple[str | None, Any]:
    """Return the tag of a JSON value and its content; None and the value if it has no tag."""
    tags = [key for key in value if key.startswith("$")] if isinstance(value, dict) else []
    return (tags[0], value[tags[0]]) if tags else (None, value)


def branch_items(tag: str | None, body: Any) -> list[tuple[StateKey, Any]]:
    """Return the keys and values of a dict, list or tuple; none for any other value."""
    if tag == "$dict":
        return list(body)
    if tag is None and isinstance(body, dict):
        return list(body.items())
    if tag in (None, "$tuple") and isinstance(body, list):
        return list(enumerate(body))
    return []


def _collect_entries(
    value: Any, path: StatePath, rank: int | None, depth: int, entries: list[ManifestEntry]
) -> None:
    if depth > MAX_DEPTH + 1:  # one for the ranks
        raise MalformedManifest("the state is nested too deeply")
    tag, body = split_tag(value)
    if tag is not None:
        body = _parse_tagged(tag, body, len(value), path)
    if tag == "$tensor":
        entries.append(ManifestEntry(format_path(path), rank, body))
    elif tag == "$per_rank":
        for key, each in body.items():
            _collect_entries(each, path, int(key), depth + 1, entries)
    elif tag == "$codec":
        _collect_entries(body[1], path, rank, depth + 1, entries)
    elif items := branch_items(tag, body):
        for key, each in items:
            _collect_entries(each, (*path, key), rank, depth + 1, entries)
    else:
        entries.append(ManifestEntry(format_path(path), rank, None, body))


def _parse_tagged(tag: str, body: Any, keys: int, path: StatePath) -> Any:
    if tag not in _TAGS or keys > 1:
        raise MalformedManifest(f"{format_path(path)} has invalid keys, such as {tag!r:.60}")
    try:
        parsed = msgspec.convert(body, _TAGS[tag], strict=True)
    except msgspec.ValidationError as error:
        raise MalformedManifest(
            f"{format_path(path)} has an invalid {tag!r}: {error}, got {body!r:.60}"
        ) from None
    if tag == "$dict" and len({key for key, _ in parsed}) < len(parsed):
        raise MalformedManifest(f"{format_path(path)} has the same key twice: {body!r:.60}")
    return parsed


def _pretty(value: Any, depth: int) -> str:
    """Indent JSON, but keep small values on one line."""
    if _is_flat(value):
        return json.dumps(value)
    pad = "  " * (depth + 1)
    if isinstance(value, dict):
        parts = [f"{json.dumps(key)}: {_pretty(each, depth + 1)}" for key, each in value.items()]
    else:
        parts = [_pretty(each, depth + 1) for each in value]
    first, last = "{}" if isinstance(value, dict) else "[]"
    lines = ",\n".join(pad + part for part in parts)
    return f"{first}\n{lines}\n{'  ' * depth}{last}"


def _is_flat(value: Any) -> bool:
    if not isinstance(value, dict | list) or "$tensor" in value:
        return True
    inner = list(value.values()) if isinstance(value, dict) else value
    if len(inner) == 1 and isinstance(inner[0], list):
        return _is_flat(inner[0])
    return not any(isinstance(each, dict | list) for each in inner)
