"""`CheckpointReader`: read a checkpoint at any number of ranks, into new or existing state.

A load has two phases. The first, `LoadPlan`, opens the files, matches the checkpoint with the
caller's state and verifies every checksum. The second, `LoadPlan.apply`, changes that state. If a
save replaces the checkpoint during the first phase, the load starts over with the new one.
"""

from __future__ import annotations

import errno
import os
import resource
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .._formatting import format_ranks, format_tensor
from ..errors import DamagedCheckpoint, InvalidArgument, MissingKeys, StateMismatch
from ._manifest import (
    MANIFEST,
    Manifest,
    ShardEntry,
    StateKey,
    StatePath,
    format_path,
    no_checkpoint,
)
from ._state_encoding import decode_state
from ._state_tree import (
    Absent,
    Branch,
    Deferred,
    Node,
    PerRank,
    Replicated,
    Scalar,
    TensorLeaf,
    codecs_by_class,
    leaves,
    read_deferred,
    rebuild_state,
    unsupported_reason,
    walk,
)
from ._storage import Snapshot, Source, Storage, storage_at
from ._tensor_file import is_plain, tensor_memory
from ._torch_formats import TorchCheckpoint, open_torch_checkpoint
from ._types import STATE_DICT, RankInfo
from ._verify import WRONG_HEADER

_PROCESS_LIMITS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
"""Errors of this process, which say nothing about the checkpoint."""


def _files_of(tensors: Iterable[TensorLeaf]) -> set[str]:
    return {shard.file for leaf in tensors for shard in leaf.data.shards}


class _FileGone(FileNotFoundError):
    """A file of the checkpoint does not exist, or was removed by a save."""


class _DamagedFile(Exception):
    """A file does not match the manifest; the message says how."""


class OpenCheckpoint:
    """A checkpoint that is being read: its manifest and open files."""

    format = "phalanx"
    has_string_keys = False

    def __init__(self, path: str, snapshot: Snapshot) -> None:
        self.path = path
        self.manifest_file = f"{path}/{MANIFEST}"
        self._snapshot = snapshot
        self._sources: dict[str, Source] = {}  # open files, oldest first
        # A checkpoint may have thousands of files, one per rank.
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._max_open = sys.maxsize if limit == resource.RLIM_INFINITY else max(1, limit // 2)
        with self._reporting_damage(self.manifest_file):
            data = snapshot.manifest()
        self.manifest = Manifest.load(data, self.manifest_file)
        self.world_size = self.manifest.world_size

    def survives_removal(self, tensors: Iterable[TensorLeaf]) -> bool:
        """Whether these tensors stay readable even if a save removes their files."""
        return self._snapshot.survives_removal and len(_files_of(tensors)) <= self._max_open

    def open_files(self, tensors: Iterable[TensorLeaf]) -> None:
        """Open the files that hold these tensors, and check their lengths and headers."""
        for name in sorted(_files_of(tensors)):
            self._source(name)

    def _source(self, name: str) -> Source:
        if name in self._sources:
            return self._sources[name]
        source, entry = None, self.manifest.files[name]
        with self._reporting_damage(f"{self.path}/{name}"):
            while source is None:
                if len(self._sources) >= self._max_open:
                    self._sources.pop(next(iter(self._sources))).close()
                try:
                    source = self._snapshot.open(name)
                except OSError as error:
                    if error.errno != errno.EMFILE or not self._sources:
                        raise
                    self._max_open = len(self._sources)  # the process uses the other descriptors
            self._sources[name] = source
            if problem := entry.length_problem(source):
                raise _DamagedFile(problem)
            if source.checksum(0, entry.header.bytes) != entry.header.xxh3_128:
                raise _DamagedFile(WRONG_HEADER)
        return source

    def fetch(self, leaf: TensorLeaf) -> Tensor:
        """Return a new, verified CPU tensor."""
        tensor = torch.empty(leaf.shape, dtype=leaf.dtype)
        self.read_into(tensor, leaf)
        return tensor

    read = fetch

    def tree(self, rank: int) -> Node:
        """Return the state of a rank, without data."""
        return decode_state(self.manifest, rank, self.manifest_file)

    def identity(self, leaf: TensorLeaf) -> Any:
        """Return what is equal for tensors that shared memory."""
        ranges = tuple((shard.file, shard.at) for shard in leaf.data.shards)
        return (leaf.name if 0 in leaf.shape else ranges, leaf.dtype, leaf.shape)

    def verify(self, leaf: TensorLeaf) -> None:
        for shard in leaf.data.shards:
            self._read_shard(shard, into=None)

    def read_into(self, tensor: Tensor, leaf: TensorLeaf) -> None:
        """Read and verify a tensor into a contiguous CPU tensor."""
        memory = tensor_memory(tensor)
        for shard in leaf.data.shards:
            length = shard.at[1] - shard.at[0]
            self._read_shard(shard, into=memory[:length])
            memory = memory[length:]

    def _read_shard(self, shard: ShardEntry, into: memoryview | None) -> None:
        begin, end = shard.at
        source = self._source(shard.file)
        with self._reporting_damage(f"{self.path}/{shard.file}"):
            if source.checksum(begin, end, into=into) != shard.xxh3_128:
                raise _DamagedFile(f"the checksum of its bytes {begin} to {end} is wrong")

    @contextmanager
    def _reporting_damage(self, file: str) -> Iterator[None]:
        """Raise `DamagedCheckpoint` with the file, or `_FileGone` if a save removed it."""
        try:
            yield
        except FileNotFoundError as error:
            raise _FileGone(str(error)) from error
        except (OSError, EOFError, _DamagedFile) as error:
            if isinstance(error, OSError) and error.errno in _PROCESS_LIMITS:
                raise
            raise DamagedCheckpoint(f"{file} cannot be used: {error}") from error

    def close(self) -> None:
        for source in self._sources.values():
            source.close()
        self._sources.clear()


Children = dict[StateKey, Node]
_Apply = Callable[[], Any]  # apply a loaded value to the target, and return it


class LoadPlan:
    """What to load into a state, or as a new one, and which keys are missing.

    Creating a plan verifies everything and builds new values; existing tensors are left for
    `apply`.
    """

    def __init__(
        self,
        checkpoint: OpenCheckpoint | TorchCheckpoint,
        rank: int,
        state: Any,
        map_location: Any,
    ) -> None:
        tree = checkpoint.tree(rank)
        self.missing: list[str] = []
        if state is None:
            self.missing = [format_path(path) for path, _ in _absent_nodes(tree)]
        self._checkpoint = checkpoint
        self._map_location = map_location
        self._in_place: list[tuple[TensorLeaf, Tensor]] = []
        self._prefetched: dict[int, Tensor] = {}  # by index: those that may be unreadable later
        self._new: list[Node] = []
        self._built: list[Any] = []  # the values of `_new`
        self._new_tensors: dict[Any, Tensor] = {}  # those that shared memory share it again
        self._loads: list[_Apply] = []  # calls of `load_state_dict`
        self._root = self._fit(state, tree, ())
        in_place = [leaf for leaf, _ in self._in_place]
        tensors = [leaf for node in self._new for leaf in leaves(node)] + in_place
        checkpoint.open_files(tensors)
        self._built += [rebuild_state(node, self._fetch_new) for node in self._new]
        is_readable_later = checkpoint.survives_removal(tensors)
        for i, leaf in enumerate(in_place):
            if is_readable_later:
                checkpoint.verify(leaf)
            else:
                self._prefetched[i] = self._read_copy(leaf)

    def _fetch_new(self, leaf: TensorLeaf) -> Tensor:
        identity = self._checkpoint.identity(leaf)
        if identity not in self._new_tensors:
            tensor = self._checkpoint.fetch(leaf)
            self._new_tensors[identity] = _move(tensor, leaf.device, self._map_location)
        return self._new_tensors[identity]

    def apply(self) -> Any:
        for load in self._loads:
            load()
        for i, (leaf, tensor) in enumerate(self._in_place):
            with torch.no_grad(), torch.inference_mode(tensor.is_inference()):
                if i in self._prefetched:
                    tensor.copy_(self._prefetched.pop(i))
                elif is_plain(tensor):
                    self._checkpoint.read_into(tensor, leaf)
                    with suppress(RuntimeError):  # inference tensors have no version
                        torch.autograd.graph.increment_version(tensor)
                else:
                    tensor.copy_(self._read_copy(leaf))
        return self._root()

    def _read_copy(self, leaf: TensorLeaf) -> Tensor:
        """Return a new tensor with the shape of an existing one; `fetch` may keep its memory."""
        tensor = torch.empty(leaf.shape, dtype=leaf.dtype)
        self._checkpoint.read_into(tensor, leaf)
        return tensor

    def _fit(self, target: Any, node: Node, path: StatePath) -> _Apply:
        if isinstance(node, Deferred):
            node = node.read()
        if isinstance(node, Absent):
            raise _missing_keys(path, node)
        if isinstance(target, Replicated | PerRank):
            inner, mark = self._fit(target.value, node, path), type(target)
            return lambda: mark(inner())
        if isinstance(target, Tensor):
            return self._fit_tensor(target, node, path)
        if isinstance(target, dict) or type(target) in (list, tuple):
            kind = "dict" if isinstance(target, dict) else type(target).__name__
            if not isinstance(node, Branch) or node.kind != kind:
                raise _mismatch(path, kind, node)
            fit = self._fit_dict if kind == "dict" else self._fit_list
            return fit(target, node.children, path)
        if callable(getattr(target, "load_state_dict", None)):
            absent = next(_absent_nodes(node, path), None)
            if absent is not None:  # an object needs its whole state
                raise _missing_keys(*absent)
            state = self._build(node)
            self._loads.append(lambda: target.load_state_dict(state()))
            return lambda: target
        takes_any = target is None or type(target) in codecs_by_class
        if not takes_any and not isinstance(node, Scalar):
            raise _mismatch(path, type(target).__name__, node)
        return self._build(node)

    def _fit_tensor(self, target: Tensor, node: Node, path: StatePath) -> _Apply:
        reason = unsupported_reason(target)
        if not reason and any(
            length > 1 and stride == 0
            for length, stride in zip(target.shape, target.stride(), strict=True)
        ):
            reason = "an expanded tensor, whose elements share memory; pass a copy (contiguous)"
        if reason:
            raise StateMismatch(f"{format_path(path)} cannot be loaded in place: it is {reason}")
        shape = tuple(target.shape)
        if not isinstance(node, TensorLeaf) or (node.shape, node.dtype) != (shape, target.dtype):
            raise _mismatch(path, format_tensor(target.dtype, shape), node)
        self._in_place.append((node, target))
        return lambda: target

    def _fit_dict(self, target: Any, children: Children, path: StatePath) -> _Apply:
        items: dict[Any, _Apply] = {}
        for key, value in target.items():
            is_text = self._checkpoint.has_string_keys and key not in children
            saved_as = str(key) if is_text else key
            if saved_as in children:
                items[key] = self._fit(value, children[saved_as], (*path, key))
            else:
                self.missing.append(format_path((*path, key)))

        def apply() -> Any:
            for key, item in items.items():
                target[key] = item()
            return target

        return apply

    def _fit_list(self, target: Any, children: Children, path: StatePath) -> _Apply:
        items: list[_Apply] = []
        for i in range(max(len(target), len(children))):
            where = (*path, i)
            if i not in children:
                self.missing.append(format_path(where))
                items.append(partial(target.__getitem__, i))
            elif i < len(target):
                items.append(self._fit(target[i], children[i], where))
            else:
                items.append(self._build(children[i]))
        return lambda: type(target)(item() for item in items)

    def _build(self, node: Node) -> _Apply:
        i = len(self._new)
        self._new.append(read_deferred(node))
        built = self._built  # not `self`: a cycle would keep the state until garbage is collected
        return lambda: built[i]


def _absent_nodes(node: Node, path: StatePath = ()) -> Iterator[tuple[StatePath, Absent]]:
    return ((where, each) for where, each in walk(node, path=path) if isinstance(each, Absent))


def _missing_keys(path: StatePath, absent: Absent) -> MissingKeys:
    removal = ", or remove the key from state" if path else ""
    return MissingKeys(
        f"{format_path(path)} was saved per rank, by {format_ranks(absent.ranks)} only. Pass rank= "
        f"to load that rank's value{removal}"
    )


def _mismatch(path: StatePath, wanted: str, node: Node) -> StateMismatch:
    if isinstance(node, TensorLeaf):
        found = format_tensor(node.dtype, node.shape)
    elif isinstance(node, Branch):
        found = f"a {node.codec or node.kind}"
    else:
        assert isinstance(node, Scalar)
        found = f"{node.value!r:.40}"
    return StateMismatch(f"{format_path(path)} is {found} in the checkpoint, expected {wanted}")


def open_checkpoint(storage: Storage, stack: ExitStack) -> OpenCheckpoint | TorchCheckpoint:
    """Open a checkpoint of ours, else one of torch; its directory closes with the stack."""
    try:
        snapshot = stack.enter_context(closing(storage.snapshot()))
    except (FileNotFoundError, NotADirectoryError):
        raise no_checkpoint(storage.path) from None
    try:
        return OpenCheckpoint(storage.path, snapshot)
    except FileNotFoundError:
        checkpoint = open_torch_checkpoint(storage.path, snapshot)
    if checkpoint is None:
        raise no_checkpoint(storage.path)
    return checkpoint


class CheckpointReader:
    """Read and verify states from storage."""

    def __init__(self, rank_info: RankInfo) -> None:
        self.rank_info = rank_info

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
        Where ranks differ, each rank gets what the same rank saved, or what `rank` saved. Folders
        of ``torch.distributed.checkpoint`` and of its experimental checkpointer are read too.
        Other arguments are ignored, as upstream does.
        """
        del kwargs  # upstream takes and ignores any
        own = self.rank_info.global_rank if rank is None else rank
        if type(own) is not int or own < 0:
            raise InvalidArgument(f"rank must be a non-negative integer, got {rank!r}")
        storage = storage_at(os.fsdecode(path))
        tried: set[str] = set()
        while True:
            with ExitStack() as stack:
                checkpoint = stack.enter_context(closing(open_checkpoint(storage, stack)))
                try:
                    plan = LoadPlan(checkpoint, own, state_dict, map_location)
                except _FileGone as error:
                    # A save may have replaced the checkpoint meanwhile; then load the new one.
                    assert isinstance(checkpoint, OpenCheckpoint)
                    if checkpoint.manifest.save_id in tried:
                        raise DamagedCheckpoint(f"{storage.path} lacks a file: {error}") from error
                    tried.add(checkpoint.manifest.save_id)
                    continue
                if strict and plan.missing:
                    raise MissingKeys(f"the checkpoint at {path} is missing keys: {plan.missing}")
                return plan.apply(), plan.missing


def _move(tensor: Tensor, saved_on: str, map_location: Any) -> Tensor:
    """Move a new tensor by `map_location` as in `torch.load`, else to where it was."""
    if callable(map_location):
        storage = map_location(tensor.untyped_storage(), saved_on)
        return tensor if storage is None else tensor.to(storage.device)
    if isinstance(map_location, dict):
        return tensor.to(map_location.get(saved_on, map_location.get(f"{saved_on}:0", "cpu")))
    if map_location is not None:
        return tensor.to(map_location)
    accelerator = torch.accelerator.current_accelerator()
    is_available = accelerator is not None and accelerator.type == saved_on
    return tensor.to(saved_on) if is_available else tensor
