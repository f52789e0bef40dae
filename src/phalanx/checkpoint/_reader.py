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
from torch import Tensor

from ..errors import (
    CheckpointNotFound,
    DamagedCheckpoint,
    InvalidArgument,
    MissingKeys,
    StateMismatch,
)
from ..groups._formatting import format_ranks
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
    leaves,
    rebuild_state,
    unsupported_reason,
    walk,
)
from ._storage import Snapshot, Source, Storage, storage_at
from ._tensor_file import dtype_name, tensor_memory
from ._types import STATE_DICT, RankInfo

T = TypeVar("T")

_PROCESS_LIMITS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
"""Errors of this process, which say nothing about the checkpoint."""


def _max_open_files() -> int:
    """Return how many files to keep open: a checkpoint may have thousands, one per rank."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if soft == resource.RLIM_INFINITY else max(1, soft // 2)


def _files_of(tensors: Iterable[TensorLeaf]) -> set[str]:
    return {piece.file for leaf in tensors for piece in leaf.data.pieces}


class _FileGone(FileNotFoundError):
    """A file of the checkpoint does not exist, or was removed by a save."""


class OpenCheckpoint:
    """A checkpoint that is being read: its manifest and open files."""

    def __init__(self, path: str, snapshot: Snapshot) -> None:
        self.path = path
        self._manifest_file = f"{path}/{MANIFEST}"
        self._snapshot = snapshot
        self._sources: dict[str, Source] = {}
        """Open files, oldest first."""
        self._max_open = _max_open_files()
        with self._reporting_damage(self._manifest_file):
            data = snapshot.manifest()
        self.manifest = StateManifest.load(data, self._manifest_file)

    def survives_removal(self, tensors: Iterable[TensorLeaf]) -> bool:
        """Whether these tensors stay readable even if a save removes their files."""
        return self._snapshot.survives_removal and len(_files_of(tensors)) <= self._max_open

    def tree(self, rank: int | None) -> Node:
        return self.manifest.tree(rank, self._manifest_file)

    def open_files(self, tensors: Iterable[TensorLeaf]) -> None:
        """Open the files that hold these tensors, and check their lengths and headers."""
        for name in sorted(_files_of(tensors)):
            self._source(name)

    def _source(self, name: str) -> Source:
        if name not in self._sources:
            if len(self._sources) >= self._max_open:
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
                self._max_open = len(self._sources)  # the process uses the other descriptors
                self._sources.pop(next(iter(self._sources))).close()

    def _check_file(self, name: str) -> None:
        entry, source = self.manifest.files[name], self._sources[name]
        if source.length != entry.bytes:
            raise EOFError(f"it has {source.length} bytes, expected {entry.bytes}")
        if source.checksum(0, entry.header.bytes) != entry.header.xxh3_128:
            raise EOFError("the checksum of its header is wrong")

    def fetch(self, leaf: TensorLeaf) -> Tensor:
        """Return a new, verified CPU tensor."""
        tensor = torch.empty(leaf.shape, dtype=leaf.dtype)
        self.read_into(leaf, tensor)
        return tensor

    def read_into(self, leaf: TensorLeaf, tensor: Tensor) -> None:
        """Read into a CPU tensor, and verify what was read."""
        data = tensor_memory(tensor)
        for piece in leaf.data.pieces:
            size = piece.at[1] - piece.at[0]
            self._read_piece(piece, data[:size])
            data = data[size:]

    def verify(self, leaf: TensorLeaf) -> None:
        """Read and verify a tensor without keeping it."""
        for piece in leaf.data.pieces:
            self._read_piece(piece, None)

    def _read_piece(self, piece: PieceEntry, data: memoryview | None) -> None:
        begin, end = piece.at
        source = self._source(piece.file)
        with self._reporting_damage(f"{self.path}/{piece.file}"):
            if source.checksum(begin, end, into=data) != piece.xxh3_128:
                raise EOFError(f"the checksum of its bytes {begin} to {end} is wrong")

    @contextmanager
    def _reporting_damage(self, file: str) -> Iterator[None]:
        """Raise `DamagedCheckpoint` with the file, or `_FileGone` if a save removed it."""
        try:
            yield
        except FileNotFoundError as error:
            raise _FileGone(str(error)) from error
        except (OSError, EOFError) as error:
            if isinstance(error, OSError) and error.errno in _PROCESS_LIMITS:
                raise
            raise DamagedCheckpoint(f"{file} cannot be used: {error}") from error

    def close(self) -> None:
        for source in self._sources.values():
            source.close()
        self._sources.clear()


@contextmanager
def open_checkpoint(storage: Storage, prepare: Callable[[OpenCheckpoint], T]) -> Iterator[T]:
    """Yield what `prepare` returns for the current checkpoint, while its files are open.

    If a save replaces the checkpoint meanwhile, so that a file is gone, `prepare` is called again
    with the new one; it must not have side effects.
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
"""Return a tensor of the checkpoint on its target device."""
_Apply = Callable[[], Any]
"""Apply a loaded value to the target, and return it."""


class LoadPlan:
    """What to load into a state, and which keys are missing."""

    def __init__(
        self, checkpoint: OpenCheckpoint, tree: Node, state: Any, fresh: FetchTensor
    ) -> None:
        self.missing: list[str] = []
        self._checkpoint = checkpoint
        self._fresh = fresh
        self._in_place: list[tuple[TensorLeaf, Tensor]] = []
        self._prefetched: dict[int, Tensor] = {}
        """Tensors that may be unreadable later, by index in `_in_place`."""
        self._new: list[Node] = []
        self._built: list[Any] = []
        """The values of `_new`."""
        self._loads: list[_Apply] = []
        """Calls of ``load_state_dict``."""
        self._root = self._fit(state, tree, ())
        self._prepare()

    def _prepare(self) -> None:
        """Verify everything; build new values, and leave existing tensors for `apply`."""
        new = [leaf for node in self._new for leaf in leaves(node)]
        in_place = [leaf for leaf, _ in self._in_place]
        self._checkpoint.open_files([*new, *in_place])
        self._built = [rebuild_state(node, self._fresh) for node in self._new]
        is_readable_later = self._checkpoint.survives_removal([*new, *in_place])
        for i, leaf in enumerate(in_place):
            if is_readable_later:
                self._checkpoint.verify(leaf)
            else:
                self._prefetched[i] = self._checkpoint.fetch(leaf)

    def apply(self) -> Any:
        for load in self._loads:
            load()
        for i, (leaf, tensor) in enumerate(self._in_place):
            with torch.no_grad(), torch.inference_mode(tensor.is_inference()):
                if i in self._prefetched:
                    tensor.copy_(self._prefetched.pop(i))
                else:
                    self._load_in_place(leaf, tensor)
        return self._root()

    def _load_in_place(self, leaf: TensorLeaf, tensor: Tensor) -> None:
        is_lazy = tensor.is_conj() or tensor.is_neg()  # memory differs from values
        if tensor.is_cpu and tensor.is_contiguous() and not is_lazy:
            self._checkpoint.read_into(leaf, tensor)
            with suppress(RuntimeError):  # inference tensors have no version
                torch.autograd.graph.increment_version(tensor)
        else:
            tensor.copy_(self._checkpoint.fetch(leaf))

    def _fit(self, target: Any, node: Node, path: StatePath) -> _Apply:
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
            for where, absent in _absent_nodes(node, path):
                raise _missing_keys(where, absent)  # an object needs its whole state
            state = self._build(node)
            self._loads.append(lambda: target.load_state_dict(state()))
            return lambda: target
        if target is None or codec_for(target) is not None:
            return self._build(node)
        if not isinstance(node, Scalar):
            raise _mismatch(path, type(target).__name__, node)
        return self._build(node)

    def _fit_tensor(self, target: Tensor, node: Node, path: StatePath) -> _Apply:
        reason = unsupported_reason(target) or _overlap_reason(target)
        if reason:
            raise StateMismatch(f"{format_path(path)} cannot be loaded in place: it is {reason}")
        shape = tuple(target.shape)
        if not isinstance(node, TensorLeaf) or (node.shape, node.dtype) != (shape, target.dtype):
            raise _mismatch(path, f"{dtype_name(target.dtype)}{[*shape]}", node)
        self._in_place.append((node, target))
        return lambda: target

    def _fit_dict(self, target: dict[Any, Any], node: Node, path: StatePath) -> _Apply:
        if not isinstance(node, Branch) or node.kind != "dict":
            raise _mismatch(path, "dict", node)
        items: dict[Any, _Apply] = {}
        for key, value in target.items():
            if key in node.children:
                items[key] = self._fit(value, node.children[key], (*path, key))
            else:
                self.missing.append(format_path((*path, key)))

        def apply() -> Any:
            for key, item in items.items():
                target[key] = item()
            return target

        return apply

    def _fit_list(self, target: Any, node: Node, path: StatePath) -> _Apply:
        kind = type(target).__name__
        if not isinstance(node, Branch) or node.kind != kind:
            raise _mismatch(path, kind, node)
        items: list[_Apply] = []
        for i in range(max(len(target), len(node.children))):
            where = (*path, i)
            if i not in node.children:
                self.missing.append(format_path(where))
                items.append(partial(target.__getitem__, i))
            elif i < len(target):
                items.append(self._fit(target[i], node.children[i], where))
            else:
                items.append(self._build(node.children[i]))
        return lambda: type(target)(item() for item in items)

    def _build(self, node: Node) -> _Apply:
        i = len(self._new)
        self._new.append(node)
        return lambda: self._built[i]


def _overlap_reason(tensor: Tensor) -> str:
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    if any(length > 1 and stride == 0 for length, stride in sizes):
        return "an expanded tensor, whose elements share memory; pass a copy (contiguous)"
    return ""


def _absent_nodes(node: Node, path: StatePath = ()) -> Iterator[tuple[StatePath, Absent]]:
    return ((where, each) for where, each in walk(node, path=path) if isinstance(each, Absent))


def _missing_keys(path: StatePath, absent: Absent) -> MissingKeys:
    return MissingKeys(
        f"{format_path(path)} differs between ranks, and the checkpoint has it for "
        f"{format_ranks(absent.ranks)} only. Choose one with rank=, or leave the key out"
    )


def _mismatch(path: StatePath, wanted: str, node: Node) -> StateMismatch:
    if isinstance(node, TensorLeaf):
        found = f"{dtype_name(node.dtype)}{[*node.shape]}"
    elif isinstance(node, Branch):
        found = f"a {node.kind}"
    else:
        assert isinstance(node, Scalar)
        found = f"{node.value!r:.40}"
    return StateMismatch(f"{format_path(path)} is {found} in the checkpoint, expected {wanted}")


_IGNORED_ARGUMENTS = {"mmap", "weights_only"}
"""Arguments that upstream passes to `torch.load`."""


class CheckpointReader:
    """Read and verify states from storage."""

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
        """Return the state at `path` and the missing keys; with `strict`, raise if there are any.

        Given a state, load only its keys: tensors in place, objects through ``load_state_dict``,
        any value for None. The state is not changed before everything was matched and verified.
        Where ranks differ, each rank gets what the same rank saved, or what `rank` saved.
        """
        unknown = set(kwargs) - _IGNORED_ARGUMENTS
        if unknown:
            raise InvalidArgument(f"unknown arguments: {', '.join(sorted(unknown))}")
        own = self._rank_info.global_rank if rank is None else rank
        if type(own) is not int or own < 0:
            raise InvalidArgument(f"rank must be a non-negative integer, got {rank!r}")
        locate = _DeviceMapper(map_location)

        def prepare(checkpoint: OpenCheckpoint) -> Callable[[], tuple[Any, list[str]]]:
            tree = checkpoint.tree(own)
            if state_dict is None:
                state, missing = _read_all(checkpoint, tree, locate)
            else:
                plan = LoadPlan(checkpoint, tree, state_dict, locate.fresh(checkpoint))
                missing = plan.missing
            if strict and missing:
                raise MissingKeys(f"the checkpoint at {path} is missing keys: {missing}")
            return lambda: (state if state_dict is None else plan.apply(), missing)

        with open_checkpoint(storage_at(os.fsdecode(path)), prepare) as finish:
            return finish()


def _read_all(
    checkpoint: OpenCheckpoint, tree: Node, locate: _DeviceMapper
) -> tuple[Any, list[str]]:
    if isinstance(tree, Absent):
        raise MissingKeys(
            f"{checkpoint.path} has only state of {format_ranks(tree.ranks)}. Choose one with rank="
        )
    checkpoint.open_files(leaves(tree))
    state = rebuild_state(tree, locate.fresh(checkpoint))
    return state, [format_path(path) for path, _ in _absent_nodes(tree)]


class _DeviceMapper:
    """Where new tensors go: by `map_location` as in `torch.load`, else where they were."""

    def __init__(self, map_location: Any) -> None:
        self._map = map_location

    def fresh(self, checkpoint: OpenCheckpoint) -> Callable[[TensorLeaf], Tensor]:
        """Return a function that fetches tensors; those that shared memory share it again."""
        known: dict[Any, Tensor] = {}

        def get(leaf: TensorLeaf) -> Tensor:
            ranges = tuple((piece.file, piece.at) for piece in leaf.data.pieces)
            identity = (leaf.name if 0 in leaf.shape else ranges, leaf.dtype, leaf.shape)
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
        accelerator = torch.accelerator.current_accelerator()
        is_available = accelerator is not None and accelerator.type == saved_on
        return tensor.to(saved_on) if is_available else tensor
