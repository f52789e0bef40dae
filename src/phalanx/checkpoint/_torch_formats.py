"""Checkpoints that torch wrote: DCP folders, and those of its experimental checkpointer.

A DCP folder has a pickle, ``.metadata``, which says where in the files ``__0_0.distcp`` every chunk
of a tensor is. A chunk is an archive of ``torch.save``, and so is a value that is not a tensor.
The experimental checkpointer writes one archive per rank, ``checkpoint_0.pt``.

All of them may come from an attacker. `_dcp_metadata` reads the pickle. Archives go through
``torch.load(weights_only=True)`` onto the meta device, which reads no data. It runs no code, but
does not bound its time and memory: the pickle of an archive can exhaust both. Data is read when it
is asked for, from places whose bounds, sizes and checksums were checked.
"""

from __future__ import annotations

import io
import pickle
import re
import reprlib
import struct
import sys
import zipfile
import zlib
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import IO, Any, ClassVar, NamedTuple

import torch
import xxhash
from torch import Tensor
from torch.serialization import get_unsafe_globals_in_checkpoint

from .._formatting import dtype_name, format_ranks, format_tensor
from ..errors import CheckpointNotFound, DamagedCheckpoint, InvalidArgument, UnsupportedState
from ._checkpoint_directory import (
    DCP_METADATA,
    DCP_RANK_METADATA,
    RANK_ARCHIVE,
    torch_layout,
)
from ._dcp_metadata import ByteRange, DcpChunk, DcpMetadata, parse_metadata
from ._manifest import (
    MAX_DEPTH,
    MAX_MANIFEST_BYTES,
    FileEntry,
    HeaderEntry,
    MalformedManifest,
    ManifestEntry,
    ShardEntry,
    StateKey,
    StatePath,
    TensorEntry,
    format_path,
    reporting_damage,
    tensor_name,
)
from ._state_encoding import encode_scalar
from ._state_tree import (
    KEY_TYPES,
    SCALAR_TYPES,
    Branch,
    BranchKind,
    Deferred,
    Node,
    Scalar,
    TensorLeaf,
    codecs_by_class,
    leaves,
    map_leaves,
    read_deferred,
    unsupported_reason,
    walk,
)
from ._storage import Snapshot, Source, storage_at
from ._tensor_file import chunks, nbytes, tensor_memory

_WRITER_OF_FILE = re.compile(r"__(\d{1,8})_\d+\.distcp")
_MAX_OPEN_FILES = 64
_MAX_LIST_GAPS = 1 << 20
_OTHER_VALUES = (bytes, bytearray, complex, set, frozenset)
"""What ``weights_only`` admits besides our own types. It is returned, but cannot be converted."""


class StoredBytes(NamedTuple):
    """A record of an archive: the memory of one or more tensors."""

    file: str
    begin: int
    length: int
    crc: int  # 0 if torch did not compute it


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of an archive: elements of a record."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int  # in elements
    data: StoredBytes
    is_conj: bool
    is_neg: bool

    @property
    def is_plain(self) -> bool:
        """Whether its bytes are the record, in order."""
        size = nbytes(self.dtype, self.shape)
        expected = 1
        for length, stride in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if length != 1 and stride != expected:
                return size == 0
            expected *= length
        return size == self.data.length and not self.is_conj and not self.is_neg

    def view_of(self, memory: Tensor) -> Tensor:
        """Return it as a view of the record's bytes."""
        tensor = torch.empty(0, dtype=self.dtype)
        tensor.set_(memory.untyped_storage(), self.offset, self.shape, self.stride)
        tensor = tensor.conj() if self.is_conj else tensor
        return torch._neg_view(tensor) if self.is_neg else tensor


class _View(io.RawIOBase):
    """A range of a data file, as a file of its own."""

    def __init__(self, source: Source, begin: int, end: int) -> None:
        self._source, self._begin, self._length = source, begin, end - begin
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._length}[whence]
        if base + offset < 0:
            raise ValueError(f"cannot seek to {base + offset}")
        self._position = base + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        count = max(0, min(len(buffer), self._length - self._position))
        if count:
            memory = memoryview(buffer).cast("B")[:count]
            self._source.read_into(memory, self._begin + self._position)
            self._position += count
        return count


class _Archive:
    """An archive of ``torch.save`` in a range of a file. Its tensors are on the meta device."""

    def __init__(self, source: Source, at: ByteRange, label: str) -> None:
        self._at, self._label = at, label
        view = io.BufferedReader(_View(source, at.begin, at.end), 1 << 16)
        try:
            self._records = self._read_directory(view)
        except MalformedManifest:
            raise
        except (zipfile.BadZipFile, NotImplementedError, struct.error, ValueError) as error:
            raise MalformedManifest(f"it is not an archive of torch.save ({error})") from None
        self.value = self._load(view)

    def _read_directory(self, view: IO[bytes]) -> dict[int, StoredBytes]:
        """Return the records with data by their position in the archive."""
        records: dict[int, StoredBytes] = {}
        room = self._at.end - self._at.begin
        self._pickle_bytes = 0
        with zipfile.ZipFile(view) as directory:
            infos = directory.infolist()
        for info in infos:
            if info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size:
                raise MalformedManifest(f"its record {info.filename!r:.60} is compressed")
        if sum(info.file_size for info in infos) > room:
            raise MalformedManifest("its records overlap")
        for info in infos:
            view.seek(info.header_offset)
            start = info.header_offset + 30 + sum(struct.unpack("<26x2H", view.read(30)))
            if start + info.file_size > room:
                raise MalformedManifest(f"its record {info.filename!r:.60} is cut off")
            name = info.filename.partition("/")[2]
            if name.startswith("data/"):
                if info.file_size:
                    begin = self._at.begin + start
                    records[start] = StoredBytes(self._at.file, begin, info.file_size, info.CRC)
                continue
            view.seek(start)
            content = view.read(info.file_size)
            if info.CRC not in (0, zlib.crc32(content)):
                raise MalformedManifest(f"the checksum of its {name!r:.60} is wrong")
            if name == "byteorder" and content != sys.byteorder.encode():
                raise UnsupportedState(f"{self._label} has the byte order of another machine")
            if name == "data.pkl":
                self._pickle_bytes = len(content)
        view.seek(0)
        return records

    def _load(self, view: IO[bytes]) -> Any:
        try:
            return torch.load(view, map_location="meta", weights_only=True, mmap=False)
        except OSError:
            raise
        except Exception as error:  # noqa: BLE001 - a damaged file may raise any
            unsafe: list[str] = []
            if isinstance(error, pickle.UnpicklingError):
                view.seek(0)
                try:
                    unsafe = sorted(get_unsafe_globals_in_checkpoint(view))
                except Exception:  # noqa: BLE001 - then it is damaged
                    unsafe = []
            if unsafe:
                raise UnsupportedState(
                    f"{self._label} needs {', '.join(unsafe)}, which torch.load(weights_only=True) "
                    "does not admit. If you trust the file, pass the classes to "
                    "torch.serialization.add_safe_globals"
                ) from None
            reason = f"{type(error).__name__}: {error}".split("\n")[0]
            raise MalformedManifest(f"torch cannot load it ({reason:.200})") from None

    def tensor(self, tensor: Tensor, path: StatePath) -> StoredTensor:
        is_supported = not unsupported_reason(tensor, is_stored=True)
        position = tensor.untyped_storage()._checkpoint_offset if is_supported else None
        if not is_supported or position is None:
            raise UnsupportedState(
                f"{format_path(path)} in {self._label} is {unsupported_reason(tensor)}"
            )
        shape, stride, offset = tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset())
        length = tensor.untyped_storage().nbytes()
        data = StoredBytes(self._at.file, 0, 0, 0)
        if tensor.numel():
            last = offset + sum((n - 1) * step for n, step in zip(shape, stride, strict=True))
            known = self._records.get(position)
            if known is None or known.length != length or min(offset, *stride, 0) < 0:
                raise MalformedManifest(f"the data of {format_path(path)} is not in it")
            if (last + 1) * tensor.dtype.itemsize > length:
                raise MalformedManifest(
                    f"{format_path(path)} is {format_tensor(tensor.dtype, shape)}, which exceeds "
                    f"its {length} bytes"
                )
            data = known
        return StoredTensor(
            tensor.dtype, shape, stride, offset, data, tensor.is_conj(), tensor.is_neg()
        )

    def tree(self, path: StatePath) -> Node:
        """Return the tree of its value, which is at `path` of the state."""
        # A list can contain another one a thousand times; its pickle has room for it once.
        self._room = 8 * self._pickle_bytes + 1000
        return self._tree(self.value, path)

    def _tree(self, value: Any, path: StatePath) -> Node:
        self._room -= 1
        if self._room < 0 or len(path) > MAX_DEPTH:
            raise MalformedManifest(f"{format_path(path[:6])} is nested too deeply")
        if isinstance(value, Tensor):
            stored = self.tensor(value, path)
            return TensorLeaf(tensor_name(path), stored.dtype, stored.shape, "cpu", stored)
        if codec := codecs_by_class.get(type(value)):
            child = self._tree(codec.encode(value), (*path, "value"))
            return Branch("codec", {"value": child}, codec=codec.name)
        if type(value) in (dict, OrderedDict):
            for key in value:
                if type(key) not in KEY_TYPES:
                    raise UnsupportedState(
                        f"{format_path(path)} in {self._label} has the key "
                        f"{reprlib.repr(key)}; keys must be strings, numbers, booleans or None"
                    )
            return Branch("dict", {k: self._tree(v, (*path, k)) for k, v in value.items()})
        if type(value) in (list, tuple):
            kind: BranchKind = "list" if type(value) is list else "tuple"
            return Branch(kind, {i: self._tree(v, (*path, i)) for i, v in enumerate(value)})
        if type(value) in SCALAR_TYPES or type(value) in _OTHER_VALUES:
            return Scalar(value)
        raise UnsupportedState(
            f"{format_path(path)} in {self._label} has the type {type(value).__name__}, which "
            "phalanx does not read. Load the file with torch.load, or call register_codec"
        )


class TorchCheckpoint(ABC):
    """A checkpoint of torch that is being read; the counterpart of `OpenCheckpoint`.

    The data of a leaf is a `StoredTensor`, or the chunks of a tensor of DCP.
    """

    format: ClassVar[str]
    has_string_keys = False
    """Whether keys of dicts were turned into strings."""

    def __init__(
        self, path: str, snapshot: Snapshot, progress: Callable[[int], None] = lambda _: None
    ) -> None:
        self.path = path
        self._snapshot = snapshot
        self._progress = progress
        self._sources: dict[str, Source] = {}  # open files, oldest first
        self._shared: dict[StoredBytes, Tensor] = {}  # memory of tensors that were fetched
        self._latest: tuple[StoredBytes, Tensor] | None = None
        self._verified: set[StoredBytes] = set()
        self._chunks: dict[DcpChunk, StoredTensor] = {}

    @property
    @abstractmethod
    def ranks(self) -> list[int]:
        """The ranks that have a state of their own; empty if all have the same."""

    @property
    def world_size(self) -> int:
        """The number of ranks of which a state was saved; raises if one is missing."""
        for rank, found in enumerate(self.ranks):
            if rank != found:
                raise DamagedCheckpoint(
                    f"{self.path} lacks the state of rank {rank}, but has that of rank {found}"
                )
        return len(self.ranks) or 1

    @property
    @abstractmethod
    def writers(self) -> int:
        """How many ranks wrote files."""

    @abstractmethod
    def tree(self, rank: int) -> Node:
        """Return the state of a rank, without data."""

    @abstractmethod
    def files(self) -> list[str]:
        """Return the names of its files."""

    def sizes(self) -> Iterator[tuple[str, int]]:
        """Yield its files with their sizes in bytes."""
        for name in self.files():
            with self._reporting_damage(name), closing(self._snapshot.open(name)) as source:
                yield name, source.length

    def _no_state(self, rank: int) -> CheckpointNotFound:
        return CheckpointNotFound(
            f"{self.path} has no state of rank {rank}, only of {format_ranks(self.ranks)}. Pass "
            "rank= to load the state of another rank"
        )

    def survives_removal(self, tensors: Iterable[TensorLeaf]) -> bool:  # noqa: ARG002
        """Whether to read twice, first to verify: from a disk, but not from an object store."""
        return self._snapshot.survives_removal

    def open_files(self, tensors: Iterable[TensorLeaf]) -> None:
        """Check the places of these tensors, without reading their data."""
        for leaf in tensors:
            for _ in self._stored(leaf):
                pass

    def identity(self, leaf: TensorLeaf) -> Any:
        """Return what is equal for tensors that were the same one."""
        return leaf.name if 0 in leaf.shape else leaf.data

    def fetch(self, leaf: TensorLeaf) -> Tensor:
        """Return a new CPU tensor. Those that shared memory in an archive share it again."""
        stored = leaf.data
        if isinstance(stored, StoredTensor) and 0 not in leaf.shape:
            if stored.is_conj or stored.is_neg:
                return self.read(leaf)  # a copy in any case
            if stored.data not in self._shared:
                self._shared[stored.data] = self._read_bytes(stored.data)
            return stored.view_of(self._shared[stored.data])
        return self.read(leaf)

    def read(self, leaf: TensorLeaf) -> Tensor:
        """Return a new, contiguous CPU tensor that shares memory with no other."""
        for _, stored in self._stored(leaf):
            if nbytes(stored.dtype, stored.shape) > stored.data.length:
                what = format_tensor(leaf.dtype, leaf.shape)
                raise UnsupportedState(
                    f"{leaf.name} is an expanded tensor, {what} of {stored.data.length} bytes. "
                    "Save a copy of it (contiguous)"
                )
        tensor = torch.empty(leaf.shape, dtype=leaf.dtype)
        self.read_into(tensor, leaf)
        return tensor

    def read_into(self, tensor: Tensor, leaf: TensorLeaf) -> None:
        """Read a tensor into a contiguous CPU tensor."""
        for offsets, stored in self._stored(leaf):
            if 0 in stored.shape:
                continue
            target = tensor
            for dim, offset in enumerate(offsets):
                target = target.narrow(dim, offset, stored.shape[dim])
            if stored.is_plain and target.is_contiguous():
                self._read_record(stored.data, tensor_memory(target))
                continue
            if self._latest is None or self._latest[0] != stored.data:
                self._latest = None  # free it first
                self._latest = stored.data, self._read_bytes(stored.data)
            target.copy_(stored.view_of(self._latest[1]))

    def verify(self, leaf: TensorLeaf) -> None:
        """Read the bytes of a tensor and compare their checksums, where torch has written any."""
        for _, stored in self._stored(leaf):
            if stored.data not in self._verified:
                self._read_record(stored.data, None)
                self._verified.add(stored.data)

    def digest(self, leaf: TensorLeaf) -> str:
        """Return the checksum of a tensor's values, like `stored_digest`."""
        digest = xxhash.xxh3_128()
        for chunk in chunks(tensor_memory(self.read(leaf))):
            digest.update(chunk)
        return digest.hexdigest()

    def _stored(self, leaf: TensorLeaf) -> Iterator[tuple[tuple[int, ...], StoredTensor]]:
        """Yield the places of a tensor's elements, each with its offsets in the tensor."""
        if isinstance(leaf.data, StoredTensor):
            yield (0,) * len(leaf.shape), leaf.data
            return
        for chunk in leaf.data:
            if chunk not in self._chunks:
                with self._reporting_damage(chunk.at.file):
                    self._chunks[chunk] = self._read_chunk(leaf, chunk)
            yield chunk.offsets, self._chunks[chunk]

    def _read_chunk(self, leaf: TensorLeaf, chunk: DcpChunk) -> StoredTensor:
        what = f"{leaf.name} at {list(chunk.offsets)}"
        archive = self._archive(chunk.at, what)
        if not isinstance(archive.value, Tensor):
            raise MalformedManifest(f"{what} is not a tensor")
        stored = archive.tensor(archive.value, (what,))
        if (stored.dtype, stored.shape) != (leaf.dtype, chunk.sizes):
            found = format_tensor(stored.dtype, stored.shape)
            wanted = format_tensor(leaf.dtype, chunk.sizes)
            raise MalformedManifest(f"{what} is {found}, expected {wanted}")
        return stored

    def _archive(self, at: ByteRange, what: str) -> _Archive:
        source = self._source(at.file)
        if at.end > source.length:
            raise MalformedManifest(
                f"it has {source.length} bytes, but {what} is at {at.begin} to {at.end}"
            )
        return _Archive(source, at, f"{self.path}/{at.file}")

    def _whole_file(self, name: str, path: StatePath = ()) -> Node:
        with self._reporting_damage(name):
            at = ByteRange(name, 0, self._source(name).length)
            return _share_names(self._archive(at, "its content").tree(path))

    def _read_bytes(self, data: StoredBytes) -> Tensor:
        memory = torch.empty(data.length, dtype=torch.uint8)
        self._read_record(data, tensor_memory(memory))
        return memory

    def _read_record(self, data: StoredBytes, into: memoryview | None) -> None:
        crc, end = 0, data.begin + data.length
        with self._reporting_damage(data.file):
            for chunk in self._source(data.file).read_chunks(data.begin, end, into):
                crc = zlib.crc32(chunk, crc)
                self._progress(len(chunk))
            if data.crc and crc != data.crc:
                raise MalformedManifest(f"the checksum of its bytes {data.begin} to {end} is wrong")

    def _source(self, name: str) -> Source:
        if name not in self._sources:
            if len(self._sources) >= _MAX_OPEN_FILES:
                self._sources.pop(next(iter(self._sources))).close()
            self._sources[name] = self._snapshot.open(name)
        return self._sources[name]

    def _read_file(self, name: str) -> bytes:
        with self._reporting_damage(name), closing(self._snapshot.open(name)) as source:
            if source.length > MAX_MANIFEST_BYTES:
                raise MalformedManifest(f"it has {source.length} bytes")
            data = bytearray(source.length)
            source.read_into(memoryview(data), 0)
        return bytes(data)

    @contextmanager
    def _reporting_damage(self, name: str) -> Iterator[None]:
        file = f"{self.path}/{name}"
        with reporting_damage(file):
            try:
                yield
            except (OSError, EOFError) as error:
                raise DamagedCheckpoint(f"{file} cannot be used: {error}") from error

    def close(self) -> None:
        for source in self._sources.values():
            source.close()
        self._sources.clear()
        self._shared.clear()
        self._latest = None


def _share_names(tree: Node) -> Node:
    """Give tensors that are the same one name, so that they are written once."""
    names: dict[Any, str] = {}
    for leaf in leaves(tree):
        if 0 not in leaf.shape:
            names[leaf.data] = min(leaf.name, names.get(leaf.data, leaf.name))
    return map_leaves(tree, lambda leaf: replace(leaf, name=names.get(leaf.data, leaf.name)))


class RankArchives(TorchCheckpoint):
    """One archive per rank, as torch's experimental checkpointer writes them."""

    format = "torch's experimental checkpointer"

    def __init__(
        self,
        path: str,
        snapshot: Snapshot,
        names: Iterable[str],
        progress: Callable[[int], None] = lambda _: None,
    ) -> None:
        super().__init__(path, snapshot, progress)
        found = {name: each for name in names if (each := RANK_ARCHIVE.fullmatch(name))}
        self._names = {int(each[1]): name for name, each in found.items()}

    @property
    def ranks(self) -> list[int]:
        return sorted(self._names)

    @property
    def writers(self) -> int:
        return len(self._names)

    def files(self) -> list[str]:
        return [self._names[rank] for rank in self.ranks]

    def tree(self, rank: int) -> Node:
        if rank not in self._names:
            raise self._no_state(rank)
        return self._whole_file(self._names[rank])


class DcpFolder(TorchCheckpoint):
    """A folder of ``torch.distributed.checkpoint``.

    Tensors that were sharded are whole; a save without collectives has a state per rank.
    """

    format = "torch.distributed.checkpoint"
    has_string_keys = True

    def __init__(
        self,
        path: str,
        snapshot: Snapshot,
        names: Iterable[str],
        progress: Callable[[int], None] = lambda _: None,
    ) -> None:
        super().__init__(path, snapshot, progress)
        self._names = sorted(names)
        by_rank = {
            int(found[1]): name for name in names if (found := DCP_RANK_METADATA.fullmatch(name))
        }
        self._by_rank = {} if DCP_METADATA in self._names else by_rank

    @property
    def ranks(self) -> list[int]:
        return sorted(self._by_rank)

    @property
    def writers(self) -> int:
        found = map(_WRITER_OF_FILE.fullmatch, self._names)
        return len({each[1] for each in found if each is not None}) or 1

    def files(self) -> list[str]:
        return [name for name in self._names if name.endswith((DCP_METADATA, ".distcp"))]

    def tree(self, rank: int) -> Node:
        if self._by_rank and rank not in self._by_rank:
            raise self._no_state(rank)
        name = self._by_rank.get(rank, DCP_METADATA)
        data = self._read_file(name)
        with self._reporting_damage(name):
            self._reject_safetensors()
            return _restore_parameter_numbers(_nest(self._nodes(parse_metadata(data))))

    def _nodes(self, metadata: DcpMetadata) -> Iterator[tuple[StatePath, Node]]:
        for name, path in metadata.paths.items():
            if name in metadata.tensors:
                dtype, shape, chunks = metadata.tensors[name]
                yield path, TensorLeaf(tensor_name(path), dtype, shape, "cpu", chunks)
            elif name in metadata.values:
                yield path, Deferred(partial(self._value, metadata.values[name], path))

    def _reject_safetensors(self) -> None:
        """Raise for DCP's other serialization format, whose metadata names impossible places."""
        for name in [each for each in self.files() if each.endswith(".distcp")][:1]:
            source = self._source(name)
            start = bytearray(min(9, source.length))
            source.read_into(memoryview(start), 0)
            if start[8:] == b"{":
                raise UnsupportedState(
                    f"{self.path}/{name} is a safetensors file, as DCP writes them with "
                    "SerializationFormat.SAFETENSORS. Load it with safetensors.torch.load_file"
                )

    def _value(self, at: ByteRange, path: StatePath) -> Node:
        with self._reporting_damage(at.file):
            return self._archive(at, format_path(path)).tree(path)


def _nest(nodes: Iterable[tuple[StatePath, Node]]) -> Node:
    """Return the tree with these nodes at their paths; integers are indices of lists."""
    root: dict[StateKey, Any] = {}
    for path, node in nodes:
        inner = root
        for key in path[:-1]:
            inner = inner.setdefault(key, {})
            if type(inner) is not dict:
                raise MalformedManifest(f"{format_path(path)} is inside a value")
        if inner.setdefault(path[-1], node) is not node:
            raise MalformedManifest(f"{format_path(path)} occurs twice")
    gaps = 0

    def build(children: Any, path: StatePath) -> Node:
        nonlocal gaps
        if type(children) is not dict:
            node: Node = children
            return node
        built = {key: build(child, (*path, key)) for key, child in children.items()}
        if not any(type(key) is int for key in built):
            return Branch("dict", built)
        if not all(type(key) is int for key in built):
            raise MalformedManifest(f"{format_path(path)} is a list and a dict")
        length = max(map(int, built)) + 1
        gaps += length - len(built)
        if gaps > _MAX_LIST_GAPS:
            raise MalformedManifest(f"{format_path(path)} has {length} items, most of them missing")
        # DCP stores nothing for an empty dict, and puts None there.
        return Branch("list", {i: built.get(i, Scalar(None)) for i in range(length)})

    return build(root, ())


def _restore_parameter_numbers(node: Node) -> Node:
    """Return the tree with numbers as keys of an optimizer's state, where DCP made them strings.

    An optimizer takes strings for parameters that it does not have, without a word.
    """
    if not isinstance(node, Branch):
        return node
    children = {key: _restore_parameter_numbers(each) for key, each in node.children.items()}
    state = children.get("state")
    if isinstance(state, Branch) and all(str(key).isdecimal() for key in state.children):
        numbers = {str(each): each for each in _parameter_numbers(children.get("param_groups"))}
        if {*state.children} <= {*numbers}:
            by_number: dict[StateKey, Node] = {}
            by_number |= {numbers[str(key)]: each for key, each in state.children.items()}
            children["state"] = Branch("dict", by_number)
    return Branch(node.kind, children, node.mark, node.codec)


def _parameter_numbers(groups: Node | None) -> Iterator[int]:
    for group in groups.children.values() if isinstance(groups, Branch) else ():
        params = group.children.get("params") if isinstance(group, Branch) else None
        with suppress(DamagedCheckpoint, UnsupportedState):  # raised if they are asked for
            for _, each in walk(read_deferred(params)) if params is not None else ():
                if isinstance(each, Scalar) and type(each.value) is int:
                    yield each.value


def open_torch_checkpoint(
    path: str, snapshot: Snapshot, progress: Callable[[int], None] = lambda _: None
) -> TorchCheckpoint | None:
    """Return the checkpoint of torch in a folder; None if there is none."""
    names = snapshot.names()
    layout = torch_layout(names)
    if layout == "dcp":
        return DcpFolder(path, snapshot, names, progress)
    if layout == "rank archives":
        return RankArchives(path, snapshot, names, progress)
    if layout == "hugging face":
        raise InvalidArgument(
            f"{path} is a folder of safetensors in the layout of Hugging Face, not a checkpoint. "
            "Load its files with safetensors.torch.load_file, or the folder with "
            "torch.distributed.checkpoint.HuggingFaceStorageReader"
        )
    return None


class StoredEntry(TensorEntry):
    """A tensor of a checkpoint of torch, as a manifest would describe it."""

    leaf: Any = None


@dataclass(frozen=True)
class TorchSummary:
    """The content of a checkpoint of torch, in the terms of a manifest."""

    path: str
    format: str
    world_size: int
    files: dict[str, FileEntry]
    entries: list[ManifestEntry]

    def digest(self, tensor: TensorEntry) -> str:
        assert isinstance(tensor, StoredEntry)
        with _opened(self.path) as checkpoint:
            return checkpoint.digest(tensor.leaf)


@contextmanager
def _opened(
    path: str, progress: Callable[[int], None] = lambda _: None
) -> Iterator[TorchCheckpoint]:
    storage = storage_at(path)
    with closing(storage.snapshot()) as snapshot:
        checkpoint = open_torch_checkpoint(storage.path, snapshot, progress)
        if checkpoint is None:
            raise CheckpointNotFound(f"there is no checkpoint at {path}")
        with closing(checkpoint):
            yield checkpoint


def summarize_torch_checkpoint(path: str) -> TorchSummary:
    """Describe a checkpoint of torch; raises `CheckpointNotFound` if there is none."""
    with _opened(path) as checkpoint:
        entries: list[ManifestEntry] = []
        if not checkpoint.ranks:
            entries += _entries(checkpoint.tree(0), None)
        for rank in checkpoint.ranks:
            entries += _entries(checkpoint.tree(rank), rank)
        files = {name: FileEntry(size, HeaderEntry(0, "")) for name, size in checkpoint.sizes()}
        return TorchSummary(path, checkpoint.format, checkpoint.writers, files, entries)


def _entries(tree: Node, rank: int | None, path: StatePath = ()) -> Iterator[ManifestEntry]:
    for where, node in walk(tree, path=path):
        name = format_path(where)
        if isinstance(node, TensorLeaf):
            place = ShardEntry("", (0, nbytes(node.dtype, node.shape)), "")
            entry = StoredEntry(dtype_name(node.dtype), [*node.shape], [place], leaf=node)
            yield ManifestEntry(name, rank, entry)
        elif isinstance(node, Scalar):
            is_known = type(node.value) in SCALAR_TYPES
            value = encode_scalar(node.value) if is_known else repr(node.value)
            yield ManifestEntry(name, rank, None, value)
        elif isinstance(node, Deferred):
            try:
                yield from _entries(node.read(), rank, where)
            except UnsupportedState as error:
                yield ManifestEntry(name, rank, None, str(error))


def verify_torch_checkpoint(path: str, progress: Callable[[int], None]) -> list[str]:
    """Read all data of a checkpoint of torch; return what is wrong with it."""
    problems: list[str] = []
    with _opened(path, progress) as checkpoint:

        def check(node: Node) -> None:
            for _, each in walk(node):
                try:
                    if isinstance(each, TensorLeaf):
                        checkpoint.verify(each)
                    elif isinstance(each, Deferred):
                        check(each.read())
                except (DamagedCheckpoint, UnsupportedState) as error:
                    problems.append(str(error))

        for rank in checkpoint.ranks or [0]:
            check(Deferred(partial(checkpoint.tree, rank)))
    return problems
