"""`CheckpointReader`: read a checkpoint at any number of ranks, into new or existing state.

A load has two phases. The first opens the manifest and the files, compares them with the state
that was given, and verifies every checksum. The second, `LoadPlan.apply`, changes the caller's
state. Nothing of the caller's is touched before all of it was found to fit, so the first phase
may start over when a save replaces the checkpoint that is being read.
"""

from __future__ import annotations

import errno
import os
import resource
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from functools import partial
from typing import Any, TypeVar

import torch
import xxhash
from torch import Tensor

from ..errors import (
    CheckpointNotFound,
    DamagedCheckpoint,
    InvalidArgument,
    MissingKeys,
    StateMismatch,
)
from ._coordination import format_ranks
from ._manifest import MANIFEST, PieceEntry, StatePath, format_path
from ._state_encoding import StateManifest
from ._state_tree import (
    Absent,
    Branch,
    Node,
    PerRank,
    Replicated,
    Scalar,
    TensorLeaf,
    codec_for,
    find_absent,
    leaves,
    rebuild_state,
    unsupported_reason,
)
from ._storage import Snapshot, Source, Storage, storage_at
from ._tensor_file import dtype_name, tensor_memory
from ._types import STATE_DICT, RankInfo

T = TypeVar("T")

_PROCESS_LIMITS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
"""What says something about this process, and nothing about the checkpoint."""


def _max_open_files() -> int:
    """Return how many files to have open: there is one of each rank, and there may be thousands."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if soft == resource.RLIM_INFINITY else max(1, soft // 2)


def _files_of(tensors: Iterable[TensorLeaf]) -> set[str]:
    return {piece.file for leaf in tensors for piece in leaf.data.pieces}


class _FileGone(FileNotFoundError):
    """A file of the checkpoint is not there, or no longer."""


class OpenCheckpoint:
    """A checkpoint that is being read: its manifest, and those of its files that are needed."""

    def __init__(self, path: str, snapshot: Snapshot) -> None:
        self.path = path
        self._manifest_file = f"{path}/{MANIFEST}"
        self._snapshot = snapshot
        self._sources: dict[str, Source] = {}
        """Files that are open, those that were opened first in front."""
        self._most = _max_open_files()
        self._spare = bytearray()
        with self._reporting_damage(self._manifest_file):
            data = snapshot.manifest()
        self.manifest = StateManifest.load(data, self._manifest_file)

    def stays(self, tensors: Iterable[TensorLeaf]) -> bool:
        """Tell whether these can be read until all is closed, whatever others do to the files."""
        return self._snapshot.stays and len(_files_of(tensors)) <= self._most

    def tree(self, rank: int | None) -> Node:
        """Return the tree of the state, with what `rank` holds where ranks differ."""
        return self.manifest.tree(rank, self._manifest_file)

    def open_files(self, tensors: Iterable[TensorLeaf]) -> None:
        """Open the files that hold these tensors, and check their lengths and headers."""
        for name in sorted(_files_of(tensors)):
            self._source(name)

    def _source(self, name: str) -> Source:
        """Return a file that is open, for which another one may have to be closed."""
        if name not in self._sources:
            if len(self._sources) >= self._most:
                self._sources.pop(next(iter(self._sources))).close()
            with self._reporting_damage(f"{self.path}/{name}"):
                self._sources[name] = self._open(name)
                self._check_file(name)
        return self._sources[name]

    def _open(self, name: str) -> Source:
        while True:
            try:
                return self._snapshot.open(name)
            except OSError as error:
                if error.errno != errno.EMFILE or not self._sources:
                    raise
                self._most = len(self._sources)  # so many others does this process have open
                self._sources.pop(next(iter(self._sources))).close()

    def _check_file(self, name: str) -> None:
        entry, source = self.manifest.files[name], self._sources[name]
        if source.length != entry.bytes:
            raise EOFError(f"it has {source.length} bytes and should have {entry.bytes}")
        if self._read(source, 0, entry.header.bytes, None) != entry.header.xxh3_128:
            raise EOFError("the checksum of its header is wrong")

    def fetch(self, leaf: TensorLeaf) -> Tensor:
        """Return a new tensor in main memory, verified."""
        tensor = torch.empty(leaf.shape, dtype=leaf.dtype)
        self.read_into(leaf, tensor)
        return tensor

    def read_into(self, leaf: TensorLeaf, tensor: Tensor) -> None:
        """Read into the memory of a tensor, and verify what was read."""
        data = tensor_memory(tensor)
        for piece in leaf.data.pieces:
            size = piece.at[1] - piece.at[0]
            self._read_piece(piece, data[:size])
            data = data[size:]

    def verify(self, leaf: TensorLeaf) -> None:
        """Read a tensor, to nowhere, and verify it."""
        for piece in leaf.data.pieces:
            self._read_piece(piece, None)

    def _read_piece(self, piece: PieceEntry, data: memoryview | None) -> None:
        begin, end = piece.at
        source = self._source(piece.file)
        with self._reporting_damage(f"{self.path}/{piece.file}"):
            if self._read(source, begin, end, data) != piece.xxh3_128:
                raise EOFError(f"the checksum of its bytes {begin} to {end} is wrong")

    def _read(self, source: Source, begin: int, end: int, data: memoryview | None) -> str:
        """Read some bytes of a file, to memory or to nowhere, and return their checksum."""
        digest = xxhash.xxh3_128()
        for position in range(begin, end, source.chunk):
            size = min(source.chunk, end - position)
            chunk = self._scratch(size) if data is None else data[position - begin :][:size]
            source.read_into(chunk, position)
            digest.update(chunk)
        return digest.hexdigest()

    def _scratch(self, size: int) -> memoryview:
        if len(self._spare) < size:
            self._spare = bytearray(size)
        return memoryview(self._spare)[:size]

    @contextmanager
    def _reporting_damage(self, file: str) -> Iterator[None]:
        """Say which file it is that is damaged; one that is gone may just have been replaced."""
        try:
            yield
        except FileNotFoundError as error:
            raise _FileGone(str(error)) from error
        except (OSError, EOFError) as error:
            if isinstance(error, OSError) and error.errno in _PROCESS_LIMITS:
                raise
            raise DamagedCheckpoint(f"{file} cannot be used: {error}") from error

    def close(self) -> None:
        """Close all files."""
        for source in self._sources.values():
            source.close()
        self._sources.clear()


@contextmanager
def open_checkpoint(storage: Storage, prepare: Callable[[OpenCheckpoint], T]) -> Iterator[T]:
    """Give what `prepare` makes of the checkpoint that is at a place now, with its files open.

    If a save replaces it in the meantime, so that a file is gone, it starts again with the new
    one; hence `prepare` must not have changed anything of the caller's.
    """
    tried: set[str] = set()
    while True:
        with _opened(storage) as checkpoint:
            try:
                prepared = prepare(checkpoint)
            except _FileGone as error:
                if checkpoint.manifest.save in tried:
                    raise DamagedCheckpoint(f"{storage.path} lacks a file: {error}") from error
                tried.add(checkpoint.manifest.save)
                continue
            yield prepared
            return


@contextmanager
def _opened(storage: Storage) -> Iterator[OpenCheckpoint]:
    try:
        snapshot = storage.snapshot()
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointNotFound(f"there is no checkpoint at {storage.path}") from None
    with closing(snapshot):
        try:
            checkpoint = OpenCheckpoint(storage.path, snapshot)
        except FileNotFoundError:
            raise CheckpointNotFound(
                f"there is no checkpoint at {storage.path}: it has no {MANIFEST}"
            ) from None
        with closing(checkpoint):
            yield checkpoint


FetchTensor = Callable[[TensorLeaf], Tensor]
"""Return a tensor of the checkpoint on the device where it is wanted."""
_Apply = Callable[[], Any]
"""Put a value in its place, and return it."""


class LoadPlan:
    """What is to be loaded into a state, and what of it is missing."""

    def __init__(
        self, checkpoint: OpenCheckpoint, tree: Node, state: Any, fresh: FetchTensor
    ) -> None:
        self.missing: list[str] = []
        self._checkpoint = checkpoint
        self._fresh = fresh
        self._in_place: list[tuple[TensorLeaf, Tensor]] = []
        self._held: dict[int, Tensor] = {}
        """What could not be read later, by place in the list above."""
        self._new: list[Node] = []
        self._built: list[Any] = []
        """What was made of each of those."""
        self._loads: list[_Apply] = []
        """What objects do to take their state."""
        self._give = self._fit(state, tree, ())
        self._prepare()

    def _prepare(self) -> None:
        """Have all that is wanted verified; new values are made, tensors that exist wait."""
        new = [leaf for node in self._new for leaf in leaves(node)]
        in_place = [leaf for leaf, _ in self._in_place]
        self._checkpoint.open_files([*new, *in_place])
        self._built = [rebuild_state(node, self._fresh) for node in self._new]
        stays = self._checkpoint.stays([*new, *in_place])
        for place, leaf in enumerate(in_place):
            if stays:
                self._checkpoint.verify(leaf)
            else:
                self._held[place] = self._checkpoint.fetch(leaf)

    def apply(self) -> Any:
        """Change the state, and return it."""
        for load in self._loads:
            load()
        for place, (leaf, tensor) in enumerate(self._in_place):
            with torch.no_grad(), torch.inference_mode(tensor.is_inference()):
                if place in self._held:
                    tensor.copy_(self._held.pop(place))
                else:
                    self._load_in_place(leaf, tensor)
        return self._give()

    def _load_in_place(self, leaf: TensorLeaf, tensor: Tensor) -> None:
        is_lazy = tensor.is_conj() or tensor.is_neg()  # its memory is not what it shows
        if tensor.is_cpu and tensor.is_contiguous() and not is_lazy:
            self._checkpoint.read_into(leaf, tensor)
            with suppress(RuntimeError):  # one that was made in inference mode has no version
                torch.autograd.graph.increment_version(tensor)
        else:
            tensor.copy_(self._checkpoint.fetch(leaf))

    def _fit(self, target: Any, node: Node, path: StatePath) -> _Apply:
        """Compare what is wanted at one place with what there is."""
        if isinstance(node, Absent):
            raise _missing_keys(path, node)
        if isinstance(target, Replicated | PerRank):
            inner, mark = self._fit(target.value, node, path), type(target)
            return lambda: mark(inner())
        if isinstance(target, Tensor):
            return self._fit_tensor(target, node, path)
        if isinstance(target, dict):
            return self._fit_dict(target, node, path)
        if type(target) in (list, tuple):
            return self._fit_list(target, node, path)
        if callable(getattr(target, "load_state_dict", None)):
            for place, absent in find_absent(node, path):
                raise _missing_keys(place, absent)  # half of an object's state is none
            state = self._build(node)
            self._loads.append(lambda: target.load_state_dict(state()))
            return lambda: target
        if target is None or codec_for(target) is not None:
            return self._build(node)
        if not isinstance(node, Scalar):
            raise _mismatch(path, type(target).__name__, node)
        return self._build(node)

    def _fit_tensor(self, target: Tensor, node: Node, path: StatePath) -> _Apply:
        complaint = unsupported_reason(target) or _complaint_about_strides(target)
        if complaint:
            raise StateMismatch(f"{format_path(path)} cannot be loaded in place: it is {complaint}")
        shape = tuple(target.shape)
        if not isinstance(node, TensorLeaf) or (node.shape, node.dtype) != (shape, target.dtype):
            raise _mismatch(path, f"{dtype_name(target.dtype)}{[*shape]}", node)
        self._in_place.append((node, target))
        return lambda: target

    def _fit_dict(self, target: dict[Any, Any], node: Node, path: StatePath) -> _Apply:
        if not isinstance(node, Branch) or node.kind != "dict":
            raise _mismatch(path, "dict", node)
        gives: dict[Any, _Apply] = {}
        for key, value in target.items():
            if key in node.children:
                gives[key] = self._fit(value, node.children[key], (*path, key))
            else:
                self.missing.append(format_path((*path, key)))

        def give() -> Any:
            for key, each in gives.items():
                target[key] = each()
            return target

        return give

    def _fit_list(self, target: Any, node: Node, path: StatePath) -> _Apply:
        kind = type(target).__name__
        if not isinstance(node, Branch) or node.kind != kind:
            raise _mismatch(path, kind, node)
        gives: list[_Apply] = []
        for place in range(max(len(target), len(node.children))):
            where = (*path, place)
            if place not in node.children:
                self.missing.append(format_path(where))
                gives.append(partial(target.__getitem__, place))
            elif place < len(target):
                gives.append(self._fit(target[place], node.children[place], where))
            else:
                gives.append(self._build(node.children[place]))
        return lambda: type(target)(give() for give in gives)

    def _build(self, node: Node) -> _Apply:
        """Take over what there is, whatever it is."""
        place = len(self._new)
        self._new.append(node)
        return lambda: self._built[place]


def _complaint_about_strides(tensor: Tensor) -> str:
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    if any(length > 1 and stride == 0 for length, stride in sizes):
        return "an expanded tensor, many elements of which are one; give a copy (contiguous)"
    return ""


def _missing_keys(path: StatePath, absent: Absent) -> MissingKeys:
    return MissingKeys(
        f"{format_path(path)} differs from rank to rank, and the checkpoint has it for "
        f"{format_ranks(absent.ranks)} only; say which one to load (rank=…), or leave it out"
    )


def _mismatch(path: StatePath, wanted: str, node: Node) -> StateMismatch:
    if isinstance(node, TensorLeaf):
        found = f"{dtype_name(node.dtype)}{[*node.shape]}"
    elif isinstance(node, Branch):
        found = f"a {node.kind}"
    else:
        assert isinstance(node, Scalar)
        found = f"{node.value!r:.40}"
    return StateMismatch(f"{format_path(path)} is {found} in the checkpoint, and {wanted} here")


_IGNORED_ARGUMENTS = {"mmap", "weights_only"}
"""What upstream hands to `torch.load`; here, only values are ever loaded."""


class CheckpointReader:
    """Read states from storage, verified before anything of it is handed out."""

    def __init__(self, rank_info: RankInfo) -> None:
        self._rank_info = rank_info

    def read(
        self,
        path: str | os.PathLike[str],
        state_dict: STATE_DICT | None = None,
        *,
        map_location: Any = None,
        rank: int | None = None,
        strict: bool = False,
        **kwargs: Any,
    ) -> tuple[STATE_DICT, list[str]]:
        """Return the state at `path`, and the keys that are missing; strict, raise if there are.

        Given a state, load only what it has: tensors in place, objects through their
        ``load_state_dict``, for None whatever there is. Nothing of it is touched unless all of
        it was found to fit and verified. Where ranks differ, each gets its own of a checkpoint of
        as many ranks, or what rank `rank` has saved.
        """
        unknown = set(kwargs) - _IGNORED_ARGUMENTS
        if unknown:
            raise InvalidArgument(f"reading a checkpoint takes no {', '.join(sorted(unknown))}")
        own = self._rank_info.global_rank if rank is None else rank
        if type(own) is not int or own < 0:
            raise InvalidArgument(f"rank={rank!r} is not the number of a rank")
        locate = _DeviceMapper(map_location)

        def prepare(checkpoint: OpenCheckpoint) -> Callable[[], tuple[Any, list[str]]]:
            tree = checkpoint.tree(own)
            if state_dict is None:
                state, missing = _read_all(checkpoint, tree, locate)
            else:
                fitting = LoadPlan(checkpoint, tree, state_dict, locate.fresh(checkpoint))
                missing = fitting.missing
            if strict and missing:
                raise MissingKeys(f"the checkpoint at {path} is missing keys: {missing}")
            return lambda: (state if state_dict is None else fitting.apply(), missing)

        with open_checkpoint(storage_at(os.fsdecode(path)), prepare) as finish:
            return finish()


def _read_all(
    checkpoint: OpenCheckpoint, tree: Node, locate: _DeviceMapper
) -> tuple[Any, list[str]]:
    if isinstance(tree, Absent):
        raise MissingKeys(
            f"{checkpoint.path} has state of its own for {format_ranks(tree.ranks)} "
            "and nothing else; say which one to load (rank=…)"
        )
    checkpoint.open_files(leaves(tree))
    state = rebuild_state(tree, locate.fresh(checkpoint))
    return state, [format_path(path) for path, _ in find_absent(tree)]


class _DeviceMapper:
    """Where new tensors go: what `map_location` says, as for `torch.load`, or as they were."""

    def __init__(self, map_location: Any) -> None:
        self._map = map_location

    def fresh(self, checkpoint: OpenCheckpoint) -> Callable[[TensorLeaf], Tensor]:
        """Return how to get a tensor of a checkpoint; those that were one memory are one again."""
        known: dict[Any, Tensor] = {}

        def get(leaf: TensorLeaf) -> Tensor:
            places = tuple((piece.file, piece.at) for piece in leaf.data.pieces)
            identity = (leaf.name if 0 in leaf.shape else places, leaf.dtype, leaf.shape)
            if identity not in known:
                known[identity] = self._move(checkpoint.fetch(leaf), leaf.device)
            return known[identity]

        return get

    def _move(self, tensor: Tensor, saved_on: str) -> Tensor:
        if callable(self._map):
            storage = self._map(tensor.untyped_storage(), saved_on)
            return tensor if storage is None else tensor.to(storage.device)
        if isinstance(self._map, dict):
            return tensor.to(self._map.get(saved_on, self._map.get(f"{saved_on}:0", "cpu")))
        if self._map is not None:
            return tensor.to(self._map)
        there = torch.accelerator.current_accelerator()
        is_there = there is not None and there.type == saved_on
        return tensor.to(saved_on) if is_there else tensor
