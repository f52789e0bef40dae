"""The metadata of a DCP folder, read without running any of it.

``torch.distributed.checkpoint`` writes a pickle, which may come from an attacker. The unpickler
here admits only the names that DCP writes, and makes inert records of them: it imports nothing,
calls nothing of torch and sets no attribute of anything else. `parse_metadata` then checks every
value: files are names inside the folder, no two entries share bytes, and the chunks of a tensor
cover it without gap or overlap.
"""

from __future__ import annotations

import io
import pickle
import re
import reprlib
from collections import Counter
from collections.abc import Callable, Iterable
from itertools import pairwise, product
from typing import Any, ClassVar, NamedTuple, TypeAlias

import torch

from .._formatting import format_tensor
from ..errors import UnsupportedState
from ._manifest import MAX_DEPTH, MalformedManifest, StatePath
from ._tensor_file import DTYPES, nbytes

_CHUNK_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,200}")
_MAX_SPLIT_DIMS = 8  # of a tensor that is divided into chunks; a mesh has fewer axes


class _SealedType(type):
    def __setattr__(cls, name: str, value: object) -> None:
        raise TypeError(f"{cls.__name__}.{name} cannot be set")


class _InertRecord(metaclass=_SealedType):
    """What stands for an object in the pickle: its arguments and its state, never interpreted."""

    __slots__ = ("arguments", "state")
    arguments: tuple[Any, ...]
    state: Any

    def __new__(cls, *arguments: Any) -> _InertRecord:
        self = object.__new__(cls)
        self.arguments, self.state = arguments, None
        return self

    def __setstate__(self, state: Any) -> None:
        self.state = state


def _inert(name: str) -> type[_InertRecord]:
    kind: type[_InertRecord] = _SealedType(name, (_InertRecord,), {"__slots__": ()})  # type: ignore[assignment]
    return kind


_Metadata = _inert("Metadata")
_TensorStorage = _inert("TensorStorageMetadata")
_BytesStorage = _inert("BytesStorageMetadata")
_Properties = _inert("TensorProperties")
_Chunk = _inert("ChunkStorageMetadata")
_Index = _inert("MetadataIndex")
_StorageInfo = _inert("StorageInfo")
_Size = _inert("Size")
_Dtype = _inert("dtype")
_Layout = _inert("layout")
_Unused = _inert("unused")  # where the checkpoint was saved, how tensors were laid out in memory


class _OrderedDict(metaclass=_SealedType):
    """Makes an empty dict, but no copy of another one: a small pickle could ask for many."""

    def __new__(cls) -> dict[Any, Any]:  # type: ignore[misc]
        return {}


_DCP = "torch.distributed.checkpoint"
_SHARDED = "torch.distributed._shard.sharded_tensor.metadata"  # until torch 2.2
_ADMITTED: dict[tuple[str, str], type] = {
    (f"{_DCP}.metadata", "Metadata"): _Metadata,
    (f"{_DCP}.metadata", "TensorStorageMetadata"): _TensorStorage,
    (f"{_DCP}.metadata", "BytesStorageMetadata"): _BytesStorage,
    (f"{_DCP}.metadata", "TensorProperties"): _Properties,
    (_SHARDED, "TensorProperties"): _Properties,
    (f"{_DCP}.metadata", "ChunkStorageMetadata"): _Chunk,
    (f"{_DCP}.metadata", "MetadataIndex"): _Index,
    (f"{_DCP}.metadata", "StorageMeta"): _Unused,
    (f"{_DCP}.metadata", "_MEM_FORMAT_ENCODING"): _Unused,
    (_SHARDED, "MEM_FORMAT_ENCODING"): _Unused,
    (f"{_DCP}.filesystem", "_StorageInfo"): _StorageInfo,
    ("torch", "Size"): _Size,
    ("torch.serialization", "_get_layout"): _Layout,
    ("collections", "OrderedDict"): _OrderedDict,
    **{
        (module, f"{kind}Path"): _Unused
        for module in ("pathlib", "pathlib._local")
        for kind in ("Posix", "PurePosix", "Windows", "PureWindows")
    },
}

_OPCODES = [
    *[pickle.PROTO, pickle.FRAME, pickle.STOP, pickle.MARK],
    *[pickle.MEMOIZE, pickle.BINPUT, pickle.LONG_BINPUT, pickle.BINGET, pickle.LONG_BINGET],
    *[pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE, pickle.BINFLOAT],
    *[pickle.BININT, pickle.BININT1, pickle.BININT2, pickle.LONG1],
    *[pickle.SHORT_BINUNICODE, pickle.BINUNICODE, pickle.BINUNICODE8],
    *[pickle.EMPTY_DICT, pickle.SETITEM, pickle.SETITEMS],
    *[pickle.EMPTY_LIST, pickle.APPEND, pickle.APPENDS],
    *[pickle.EMPTY_TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3, pickle.TUPLE],
    *[pickle.GLOBAL, pickle.STACK_GLOBAL, pickle.NEWOBJ, pickle.REDUCE, pickle.BUILD],
]

_HANDLERS: dict[int, Callable[[Any], None]] = {
    opcode[0]: pickle._Unpickler.dispatch[opcode[0]] for opcode in _OPCODES
}


class _MetadataUnpickler(pickle._Unpickler):
    """Unpickle DCP's metadata into records.

    In Python, since the one in C allocates as much memory as an opcode of a few bytes asks for.
    """

    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = {**_HANDLERS}

    def find_class(self, module: str, name: str) -> Any:
        if type(module) is str and type(name) is str:
            if module == "torch" and name in DTYPES:
                return _Dtype(name)
            if (module, name) in _ADMITTED:
                return _ADMITTED[module, name]
        raise MalformedManifest(f"it names {module!s:.80}.{name!s:.80}, which is not part of DCP")

    stack: list[Any]

    def load_setitem(self) -> None:
        _check_keys(self.stack[-2:-1])
        _HANDLERS[pickle.SETITEM[0]](self)

    def load_setitems(self) -> None:
        _check_keys(self.stack[::2])
        _HANDLERS[pickle.SETITEMS[0]](self)

    dispatch[pickle.SETITEM[0]] = load_setitem
    dispatch[pickle.SETITEMS[0]] = load_setitems


def _check_keys(keys: Iterable[Any]) -> None:
    """Check that keys are quick to hash: a tuple that contains another one twice is not."""
    for key in keys:
        if type(key) not in (str, _Index):
            raise MalformedManifest(f"it has a key of type {type(key).__name__}")


def _unpickle(data: bytes) -> Any:
    try:
        return _MetadataUnpickler(io.BytesIO(data)).load()
    except MalformedManifest:
        raise
    except Exception as error:
        raise MalformedManifest(f"its pickle is invalid ({type(error).__name__})") from error


def _shorten(value: Any) -> str:
    """Return the start of a value's repr, which may be too long to compute."""
    return f"{reprlib.repr(value):.80}"


class ByteRange(NamedTuple):
    file: str
    begin: int
    end: int


_Places: TypeAlias = dict[tuple[str, tuple[int, ...] | None], ByteRange]
"""By flattened name, and by offsets for a chunk of a tensor."""


class DcpChunk(NamedTuple):
    """A box of a tensor's elements, and where they are."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    at: ByteRange


class DcpTensor(NamedTuple):
    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[DcpChunk, ...]  # without empty ones


class DcpMetadata(NamedTuple):
    """What a folder contains, by flattened name."""

    tensors: dict[str, DcpTensor]
    values: dict[str, ByteRange]  # what is not a tensor
    paths: dict[str, StatePath]  # of all of them in the state, in its order


def parse_metadata(data: bytes) -> DcpMetadata:
    """Read DCP's metadata; raises `MalformedManifest` for what DCP would not write."""
    fields = _fields(_unpickle(data), _Metadata, "the metadata")
    stored: _Places = {}
    for index, info in _mapping(fields.get("storage_data"), "storage_data").items():
        name = _text(_fields(index, _Index, "an index").get("fqn"))
        offset = index.state.get("offset")
        where = _parse_range(info, f"{name!r:.80}")
        key = name, None if offset is None else _parse_size(offset, "an offset")
        if stored.setdefault(key, where) is not where:
            raise MalformedManifest(f"{name!r:.80} is in two places")
    _check_disjoint(stored.values())
    tensors, values = {}, {}
    entries = _mapping(fields.get("state_dict_metadata"), "state_dict_metadata")
    _check_count(entries.values(), len(data))
    for name, entry in entries.items():
        if type(entry) is not _BytesStorage:
            tensors[name] = _parse_tensor(_text(name), entry, stored)
        elif (_text(name), None) in stored:
            values[name] = stored[name, None]
        else:
            raise MalformedManifest(f"{name!r:.80} is in no file")
    planned = fields.get("planner_data")  # None if the save did not flatten the state
    paths = {} if planned is None else _mapping(planned, "planner_data")
    for name in {**tensors, **values}:
        _check_path(paths.setdefault(name, (name,)), name)
    return DcpMetadata(tensors, values, paths)


def _check_count(entries: Iterable[Any], limit: int) -> None:
    """Check that there are no more chunks than a pickle has bytes: tensors may share a list."""
    count = 0
    for entry in entries:
        state = entry.state if type(entry) is _TensorStorage else None
        boxes = state.get("chunks") if type(state) is dict else None
        count += len(boxes) if type(boxes) is list else 0
    if count > limit:
        raise MalformedManifest(f"its tensors have {count} chunks")


def _fields(record: Any, kind: type[_InertRecord], what: str) -> dict[str, Any]:
    if type(record) is not kind or type(record.state) is not dict:
        raise MalformedManifest(f"{what} is not what DCP writes: {type(record).__name__}")
    return record.state


def _mapping(value: Any, what: str) -> dict[Any, Any]:
    if type(value) is not dict:
        raise MalformedManifest(f"{what} is not a dict, but {type(value).__name__}")
    return value


def _text(value: Any) -> str:
    if type(value) is not str:
        raise MalformedManifest(f"a name is not text, but {type(value).__name__}")
    return value


def _parse_size(value: Any, what: str) -> tuple[int, ...]:
    arguments = value.arguments if type(value) is _Size else ()
    sizes: Any = arguments[0] if len(arguments) == 1 else None
    if type(sizes) not in (tuple, list) or len(sizes) > 64:
        raise MalformedManifest(f"{what} is not a torch.Size of at most 64 dimensions")
    if not all(type(each) is int and 0 <= each < 2**62 for each in sizes):
        raise MalformedManifest(f"{what} has an invalid length: {_shorten(sizes)}")
    return tuple(sizes)


def _parse_range(info: Any, what: str) -> ByteRange:
    fields = _fields(info, _StorageInfo, f"the place of {what}")
    file: Any = fields.get("relative_path")
    offset: Any = fields.get("offset")
    length: Any = fields.get("length")
    if type(file) is not str or not _CHUNK_FILE.fullmatch(file):
        raise MalformedManifest(f"{what} is in {_shorten(file)}, which is not a file of the folder")
    if not all(type(each) is int and 0 <= each < 2**62 for each in (offset, length)):
        raise MalformedManifest(
            f"{what} is at an invalid place: {_shorten(offset)}, {_shorten(length)}"
        )
    if transforms := fields.get("transform_descriptors"):
        raise UnsupportedState(
            f"{what} was transformed when it was saved ({_shorten(transforms)}). Load it with "
            "torch.distributed.checkpoint, and save it without extensions"
        )
    return ByteRange(file, offset, offset + length)


def _check_disjoint(ranges: Iterable[ByteRange]) -> None:
    """Check that no bytes belong to two entries, so that a small file stays a small state."""
    for one, two in pairwise(sorted(ranges)):
        if one.file == two.file and two.begin < one.end:
            raise MalformedManifest(
                f"two entries share bytes {two.begin} to {one.end} of {one.file}"
            )


def _parse_tensor(name: str, entry: Any, stored: _Places) -> DcpTensor:
    fields = _fields(entry, _TensorStorage, f"{name!r:.80}")
    properties = fields.get("properties")
    state = properties.state if type(properties) is _Properties else None
    if type(state) is not tuple or len(state) != 5 or type(state[0]) is not _Dtype:
        raise MalformedManifest(f"{name!r:.80} has no valid dtype")
    dtype, layout = DTYPES[state[0].arguments[0]], state[1]
    if type(layout) is not _Layout or layout.arguments != ("torch.strided",):
        raise UnsupportedState(f"{name} is not a dense tensor, which phalanx does not read")
    shape = _parse_size(fields.get("size"), f"the shape of {name!r:.80}")
    boxes = fields.get("chunks")
    if nbytes(dtype, [max(length, 1) for length in shape]) >= 2**62:
        raise MalformedManifest(f"{name} has the shape {list(shape)}, which is too large")
    if type(boxes) is not list:
        raise MalformedManifest(f"{name!r:.80} has no list of chunks")
    parts = _parse_chunks(name, dtype, shape, boxes, stored)
    if 0 not in shape:
        _check_cover(name, shape, parts)
    elif parts:
        raise MalformedManifest(f"{name} is empty, but has chunks")
    return DcpTensor(dtype, shape, tuple(parts))


def _parse_chunks(
    name: str, dtype: torch.dtype, shape: tuple[int, ...], boxes: list[Any], stored: _Places
) -> list[DcpChunk]:
    parts: dict[tuple[int, ...], DcpChunk] = {}
    for box in boxes:
        chunk = _fields(box, _Chunk, f"a chunk of {name!r:.80}")
        offsets = _parse_size(chunk.get("offsets"), f"an offset in {name!r:.80}")
        sizes = _parse_size(chunk.get("sizes"), f"a chunk of {name!r:.80}")
        if len(offsets) != len(shape) or len(sizes) != len(shape):
            raise MalformedManifest(f"{name} has a chunk of other dimensions than {list(shape)}")
        if 0 in sizes:
            continue
        where = stored.get((name, offsets))
        if where is None:
            raise MalformedManifest(f"the chunk of {name} at {list(offsets)} is in no file")
        if nbytes(dtype, sizes) > where.end - where.begin:
            raise MalformedManifest(
                f"the chunk {format_tensor(dtype, sizes)} of {name} is in "
                f"{where.end - where.begin} bytes of {where.file}"
            )
        if offsets in parts:
            raise MalformedManifest(f"{name} has two chunks at {list(offsets)}: they overlap")
        parts[offsets] = DcpChunk(offsets, sizes, where)
    return [*parts.values()]


def _check_cover(name: str, shape: tuple[int, ...], parts: list[DcpChunk]) -> None:
    """Check that chunks cover a tensor without gap or overlap.

    The corners of a box, counted with alternating signs, are the mixed difference of its indicator
    function. So chunks fill the tensor exactly if their corners add up to those of the tensor.
    """
    whole = DcpChunk((0,) * len(shape), shape, ByteRange("", 0, 0))
    dims = range(len(shape))
    split = [dim for dim in dims if any(each.sizes[dim] != shape[dim] for each in parts)]
    if len(split) > _MAX_SPLIT_DIMS:
        raise MalformedManifest(f"{name} is divided along {len(split)} dimensions")
    corners: Counter[tuple[int, ...]] = Counter()
    for sign, part in [(1, each) for each in parts] + [(-1, whole)]:
        if any(part.offsets[dim] for dim in dims if dim not in split):
            raise MalformedManifest(f"{name} has a chunk outside of its shape {list(shape)}")
        for ends in product((0, 1), repeat=len(split)):
            corner = tuple(
                part.offsets[dim] + end * part.sizes[dim]
                for dim, end in zip(split, ends, strict=True)
            )
            corners[corner] += sign * (-1) ** sum(ends)
    if any(corners.values()):
        raise MalformedManifest(f"the chunks of {name} overlap or leave a gap in {list(shape)}")


def _check_path(path: Any, name: str) -> None:
    is_valid = type(path) is tuple and 0 < len(path) <= MAX_DEPTH and type(path[0]) is str
    if not is_valid or not all(type(k) is str or (type(k) is int and k >= 0) for k in path):
        raise MalformedManifest(f"{name!r:.80} has no valid place in the state: {_shorten(path)}")
