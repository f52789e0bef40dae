"""Staging: copy a state so that training may change it while the copy is written.

Of state that is marked `Replicated`, only the bytes that this rank writes are copied. Plain values
and small tensors are copied in the call; large tensors by the caller or by a thread, as configured.
A tensor that was modified before its copy was complete fails the save: version counters and sampled
bytes are compared before and after.

The copy is in memory shared with the writer process, which receives the tree of the state without
its tensors, and their places by name. The kernel clears and maps fresh pages on first touch, so
buffers are kept from save to save and populated in the background; until then data is written to
the file behind the memory, which does neither.
"""

from __future__ import annotations

import ctypes
import fcntl
import itertools
import mmap
import os
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import native
from ..errors import InvalidState, SaveFailed, Unprepared
from ._progress import wrap_future
from ._replication import replicated_shards
from ._state_tree import (
    Branch,
    Mark,
    Node,
    PerRank,
    Replicated,
    ReplicatedShard,
    Scalar,
    TensorLeaf,
    leaves,
    map_leaves,
    parse_state,
)
from ._tensor_file import is_plain, nbytes, tensor_memory
from ._types import STATE_DICT, RankInfo, check_not_forked

_MAX_COPY_THREADS = 4  # more do not make memory any faster
_BYTES_PER_THREAD = 16 << 20
_SMALL_BYTES = 256 << 10  # tensors up to this size are copied in the call
_SAMPLE_DISTANCE = 64 << 10  # bytes from one sample of a tensor to the next
_SAMPLE_BYTES = 16
_CHUNK_BYTES = 8 << 20  # that a thread copies at a time
_ALIGNMENT = 64  # bytes, of every tensor in a buffer
_POPULATE_BYTES = 4 << 20  # per system call, for which a copy that begins may have to wait
_MADV_POPULATE_WRITE = 23  # since Linux 5.14

_libc = ctypes.CDLL(None, use_errno=True)  # releases the GIL, unlike the mmap module
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_numbers = itertools.count()

_CACHE_BYTES = 32 << 20  # larger copies do not stay in a cache until they are read
_copy_past_cache: Callable[[int, int, int], object] = (
    ctypes.memmove if native.engine is None else native.engine.stream_bytes
)
"""A quarter faster, since it does not fetch the destination into the cache."""


class StagingBuffer:
    """Shared memory that never shrinks."""

    def __init__(self) -> None:
        self.number = next(_numbers)
        self.fd = os.memfd_create("phalanx-staging", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        # The process that maps it relies on its length.
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        self.capacity = 0
        self._mapping: mmap.mmap
        self.bytes = torch.empty(0, dtype=torch.uint8)
        self._populated = 0
        self.stop_populating = False
        self._copy: Callable[[int, int, int], object] = ctypes.memmove

    def __del__(self) -> None:
        if hasattr(self, "fd"):
            os.close(self.fd)

    def reserve(self, size: int) -> None:
        """Grow to at least `size` bytes, without populating pages."""
        size = max(size, 1)  # an empty mapping is an error
        if size > self.capacity:
            os.ftruncate(self.fd, size)
            self._mapping = mmap.mmap(self.fd, size)
            self.bytes = torch.frombuffer(self._mapping, dtype=torch.uint8)
            self.capacity, self._populated = size, 0
            self._copy = _copy_past_cache if size > _CACHE_BYTES else ctypes.memmove

    def export(
        self, give_back: Callable[[StagingBuffer], object]
    ) -> tuple[Tensor, weakref.finalize[[StagingBuffer], Any]]:
        """Return the memory as bytes, and a finalizer that gives the buffer back.

        The finalizer runs by itself when no tensor in the returned memory is left.
        """
        memory = (ctypes.c_ubyte * self.capacity).from_buffer(self._mapping)
        given_back = weakref.finalize(memory, give_back, self)
        return torch.frombuffer(memory, dtype=torch.uint8), given_back

    def put(self, offset: int, tensor: Tensor) -> None:
        """Copy a contiguous CPU tensor without holding the GIL."""
        data = tensor_memory(tensor)
        size = len(data)
        if offset + size <= self._populated:
            self._copy(self.bytes.data_ptr() + offset, tensor.data_ptr(), size)
            return
        while data:
            count = os.pwrite(self.fd, data, offset)
            data, offset = data[count:], offset + count

    @property
    def lacks_pages(self) -> bool:
        return self._populated < self.capacity

    def populate(self) -> None:
        """Populate all pages, until another thread sets `stop_populating`."""
        while self.lacks_pages and not self.stop_populating:
            start, whole = self._populated, self.bytes
            length = min(_POPULATE_BYTES, len(whole) - start)
            if _libc.madvise(whole.data_ptr() + start, length, _MADV_POPULATE_WRITE):
                return  # an old kernel, or no memory left: then the copy fails
            if whole is self.bytes:  # else it has grown meanwhile
                self._populated = start + length


class StagingBufferPool:
    """The free buffers; populates the pages of those that will be needed."""

    def __init__(self) -> None:
        self._free: list[StagingBuffer] = []
        self._lock = threading.Lock()  # for taking
        self._is_closed = False

    def take(self, size: int) -> StagingBuffer:
        """Take the largest free buffer, or a new one, and grow it to `size` bytes."""
        try:
            buffer = self._take_largest() or StagingBuffer()
            buffer.stop_populating = True
            buffer.reserve(size)
        except OSError as error:
            raise out_of_memory(size, error) from error
        return buffer

    def _take_largest(self) -> StagingBuffer | None:
        with self._lock:
            largest = max(self._free, key=lambda each: each.capacity, default=None)
            if largest is not None:
                self._free.remove(largest)
            return largest

    def give_back(self, buffer: StagingBuffer) -> None:
        """Return a buffer to the pool.

        Takes no lock: the garbage collector may call this at any time, in any thread.
        """
        if not self._is_closed:
            self._free.append(buffer)

    def populate(self, buffer: StagingBuffer) -> Future[None]:
        """Populate the pages that a buffer lacks in the background, until it is used."""
        buffer.stop_populating = False
        done: Future[None] = Future()
        done.set_running_or_notify_cancel()  # it cannot be cancelled

        def populate() -> None:
            buffer.populate()
            done.set_result(None)

        if not (buffer.lacks_pages and start_daemon_thread(populate, "phalanx-staging-memory")):
            done.set_result(None)
        return done

    def close(self) -> None:
        """Free the buffers of the pool; those in use are freed by their last user."""
        self._is_closed = True
        while (buffer := self._take_largest()) is not None:
            buffer.stop_populating = True


def out_of_memory(size: int, error: OSError) -> SaveFailed:
    return SaveFailed(f"cannot allocate {size} bytes to stage the state: {error}")


def start_daemon_thread(call: Callable[[], object], name: str) -> threading.Thread | None:
    """Start a thread; return None if the interpreter is shutting down and does not allow it."""
    thread = threading.Thread(target=call, name=name, daemon=True)
    with suppress(RuntimeError):
        thread.start()
        return thread
    return None


class Place(NamedTuple):
    offset: int
    size: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    def view_in(self, memory: Tensor) -> Tensor:
        data = memory[self.offset : self.offset + self.size]
        return data.view(self.dtype).view(self.shape)


def with_tensors(tree: Node, tensors: Mapping[str, Tensor]) -> Node:
    """Return a tree with other tensors, by name; with none where a name is missing."""

    def change(leaf: TensorLeaf) -> TensorLeaf:
        data: Any = tensors.get(leaf.name)
        if isinstance(leaf.data, ReplicatedShard):
            data = replace(leaf.data, data=data)
        # Not `replace`, which is slow for states of many small tensors.
        return TensorLeaf(leaf.name, leaf.dtype, leaf.shape, leaf.device, data, leaf.mark)

    return map_leaves(tree, change)


def state_from_tree(node: Node, within: Mark = "") -> Any:
    """Convert a tree to a state with marks.

    Values encoded by a codec stay nodes, since this process may not have the codec; so do shards,
    and tensors from another device, whose name a plain tensor would lose.
    """
    if node.mark != within:
        marked = Replicated if node.mark == "replicated" else PerRank
        return marked(state_from_tree(node, node.mark))
    if isinstance(node, Scalar):
        return node.value
    if isinstance(node, TensorLeaf):
        is_plain = node.device == "cpu" and not isinstance(node.data, ReplicatedShard)
        return node.data if is_plain else node
    assert isinstance(node, Branch)
    if node.kind == "codec":
        return node
    items = {key: state_from_tree(child, within) for key, child in node.children.items()}
    if node.kind == "dict":
        return items
    return (list if node.kind == "list" else tuple)(items.values())


@dataclass(frozen=True, slots=True)
class _StagedTensor:
    name: str
    source: Tensor
    place: Place
    version: int | None  # torch's count of completed changes; None for an inference tensor

    @property
    def is_deferrable(self) -> bool:
        """Whether the tensor is worth a thread, and a change before its copy is detectable.

        On an accelerator changes need no detection: the device queue orders them after the copy.
        """
        return self.place.size > _SMALL_BYTES and (
            self.source.device.type != "cpu" or is_plain(self.source)
        )

    def sample(self) -> Tensor:
        data = self.source.view(-1).view(torch.uint8)
        shape = (len(data) // _SAMPLE_DISTANCE, _SAMPLE_BYTES)
        return data.as_strided(shape, (_SAMPLE_DISTANCE, 1)).clone()

    def check_allocated(self) -> None:
        """Raise if the tensor has lost its memory: reading it would crash the process."""
        source = self.source
        lengths = zip(source.shape, source.stride(), strict=True)
        last = source.storage_offset() + sum((size - 1) * stride for size, stride in lengths)
        allocated = source.untyped_storage().nbytes()
        if self.place.size and allocated < (last + 1) * source.dtype.itemsize:
            raise SaveFailed(
                f"{self.name} has no values to copy: its storage was resized to {allocated} bytes"
            )

    def check_unchanged(self, before: Tensor | None) -> None:
        """Raise if the tensor has changed since it was planned and sampled.

        torch counts a change when it is complete; samples show one that is under way.
        """
        is_changed = self.version is not None and self.source._version != self.version
        if is_changed or not (before is None or torch.equal(before, self.sample())):
            raise SaveFailed(
                f"{self.name} was changed while it was copied. Wait for the first of the two "
                "futures that save returns before the optimizer steps, or copy within save "
                "(CheckpointStagerConfig(use_async_staging=False))"
            )

    def chunks(self) -> Iterator[tuple[int, Tensor]]:
        """Split the tensor into chunks with their offsets, so that threads get even work."""
        if self.place.size <= _CHUNK_BYTES:
            yield self.place.offset, self.source
            return
        flat = self.source.view(-1)
        count = _CHUNK_BYTES // flat.dtype.itemsize
        for start in range(0, len(flat), count):
            yield self.place.offset + start * flat.dtype.itemsize, flat[start : start + count]


class StagingCopy:
    """A parsed state, and the copy of its tensors into one buffer, the small ones first."""

    buffer: StagingBuffer

    def __init__(
        self, state_dict: STATE_DICT, rank_info: RankInfo, config: CheckpointStagerConfig
    ) -> None:
        self._config = config
        self.tree = parse_state(state_dict)
        if rank_info.global_world_size > 1:
            shards = replicated_shards(self.tree, rank_info)
            self.tree = map_leaves(
                self.tree, lambda leaf: replace(leaf, data=shards.get(leaf.name, leaf.data))
            )
        # By name: tensors that share memory have one name, and are copied once.
        self.slots: dict[str, _StagedTensor] = {}
        self.size = 0  # bytes of tensors
        self.buffer_size = 0  # bytes of buffer, with alignment
        self.seconds = 0.0  # time spent copying so far
        for leaf in leaves(self.tree):
            source = leaf.data.data if isinstance(leaf.data, ReplicatedShard) else leaf.data
            if source is not None and leaf.name not in self.slots:
                size = nbytes(source.dtype, source.shape)
                version = None if source.is_inference() else source._version
                place = Place(self.buffer_size, size, source.dtype, tuple(source.shape))
                self.slots[leaf.name] = _StagedTensor(leaf.name, source.detach(), place, version)
                self.size += size
                self.buffer_size += size + -size % _ALIGNMENT
        self._large = [slot for slot in self.slots.values() if slot.is_deferrable]
        self._before: dict[str, Tensor] = {}

    def copy_small(self) -> None:
        """Copy the tensors that are not worth a thread, and sample the others."""
        self._copy([slot for slot in self.slots.values() if not slot.is_deferrable])
        if self._config.use_async_staging:
            for slot in self._large:
                slot.check_allocated()
                if is_plain(slot.source):
                    self._before[slot.name] = slot.sample()

    def copy_large(self) -> None:
        """Copy the other tensors, and raise if one has changed meanwhile."""
        self._copy(self._large)
        for slot in self._large:
            slot.check_allocated()
            slot.check_unchanged(self._before.get(slot.name))

    def _copy(self, slots: Sequence[_StagedTensor]) -> None:
        began = time.perf_counter()
        for slot in slots:
            slot.check_allocated()
        others = [slot for slot in slots if not is_plain(slot.source)]
        for slot in others:
            target = slot.place.view_in(self.buffer.bytes)
            target.copy_(slot.source, non_blocking=bool(self._config.use_non_blocking_copy))
        self._copy_plain([slot for slot in slots if is_plain(slot.source)])
        if others and torch.accelerator.is_available():
            torch.accelerator.synchronize()
        self.seconds += time.perf_counter() - began

    def _copy_plain(self, slots: Sequence[_StagedTensor]) -> None:
        size = sum(slot.place.size for slot in slots)
        threads = min(torch.get_num_threads(), _MAX_COPY_THREADS, size // _BYTES_PER_THREAD)
        chunks = iter([chunk for slot in slots for chunk in slot.chunks()])  # shared by all threads
        errors: list[BaseException] = []

        def copy_chunks() -> None:
            try:
                while not errors and (chunk := next(chunks, None)) is not None:
                    self.buffer.put(*chunk)
            except BaseException as error:  # noqa: BLE001 - raised below
                errors.append(error)

        helpers = [
            start_daemon_thread(copy_chunks, "phalanx-staging-copy") for _ in range(threads - 1)
        ]
        copy_chunks()
        for helper in helpers:
            if helper is not None:
                helper.join()
        if errors:
            raise errors[0]


class CheckpointStager(ABC):
    """Copies states for a writer."""

    @abstractmethod
    def stage(self, state_dict: STATE_DICT, **kwargs: Any) -> STATE_DICT | Future[STATE_DICT]:
        """Copy a state, and return the copy or its future."""

    def prepare(self, state_dict: STATE_DICT | int) -> Future[None]:  # noqa: ARG002
        """Allocate memory for states like this one, or of a size in bytes, if that helps."""
        return wrap_future(None)

    @abstractmethod
    def close(self) -> None:
        """Release the resources of the stager."""


class _IfPossible(int):
    """True by default: unlike a True that was asked for, it needs no accelerator."""

    def __repr__(self) -> str:
        return repr(bool(self))


@dataclass
class CheckpointStagerConfig:
    """How states are copied."""

    use_pinned_memory: bool = True
    """Ignored: memory that is shared with a process is not pinned. Upstream has it."""
    use_shared_memory: bool = True
    """Copy into memory that is shared with the writer process; otherwise it copies once more."""
    use_async_staging: bool = True
    """Return from `stage` before large tensors are copied. They must not be changed until the
    future is done; if one is, the save fails and names it."""
    use_non_blocking_copy: bool = _IfPossible(True)  # type: ignore[assignment]
    """Start the copies of all tensors on an accelerator before waiting for any of them. The
    default does so if there is an accelerator; with True, a stager raises if there is none."""


class StagedState(dict[str, Any]):
    """The copy of a state. Its memory is reused once it was written or garbage collected."""

    def __init__(self, copy: StagingCopy, give_back: Callable[[StagingBuffer], object]) -> None:
        self._memory, self.release = copy.buffer.export(give_back)
        self.places = {name: slot.place for name, slot in copy.slots.items()}
        tensors = {name: place.view_in(self._memory) for name, place in self.places.items()}
        super().__init__(state_from_tree(with_tensors(copy.tree, tensors)))
        self.buffer = copy.buffer
        self.tree = with_tensors(copy.tree, {})
        self.size, self.seconds = copy.size, copy.seconds


class DefaultStager(CheckpointStager):
    """Copy states into memory that is kept from save to save, and shared with the writer."""

    def __init__(
        self, config: CheckpointStagerConfig | None = None, *, rank_info: RankInfo | None = None
    ) -> None:
        self._config = config or CheckpointStagerConfig()
        if self._config.use_non_blocking_copy is True and not torch.accelerator.is_available():
            raise Unprepared(
                "use_non_blocking_copy=True needs an accelerator, and torch finds none. Leave the "
                "option out, or pass False"
            )
        self._rank_info = rank_info or RankInfo(0, 1)
        self._pool = StagingBufferPool()
        self._thread = ThreadPoolExecutor(1, "phalanx-staging")  # starts when needed
        self._is_closed = False
        self._pid = os.getpid()

    def stage(self, state_dict: STATE_DICT, **kwargs: Any) -> STATE_DICT | Future[STATE_DICT]:
        """Copy a state; large tensors in the background, if so configured."""
        del kwargs  # for writers
        self._check_usable()
        copy = StagingCopy(state_dict, self._rank_info, self._config)
        if not self._config.use_shared_memory:
            own = {name: slot.source.to("cpu", copy=True) for name, slot in copy.slots.items()}
            return dict(state_from_tree(with_tensors(copy.tree, own)))
        copy.buffer = self._pool.take(copy.buffer_size)
        staged: Future[STATE_DICT] = Future()
        staged.set_running_or_notify_cancel()  # it cannot be cancelled
        # In the call: a forward pass may change small tensors, such as the statistics of a norm.
        with self._returning(copy):
            copy.copy_small()
        if self._config.use_async_staging:
            with suppress(RuntimeError):  # the interpreter is shutting down
                self._thread.submit(self._finish, copy, staged)
                return staged
        self._finish(copy, staged)
        return staged.result()

    def prepare(self, state_dict: STATE_DICT | int) -> Future[None]:
        """Allocate memory in the background; see `AsyncCheckpointer.prepare`."""
        self._check_usable()
        if not self._config.use_shared_memory:
            return wrap_future(None)
        size = state_dict
        if not isinstance(size, int):
            size = StagingCopy(size, self._rank_info, self._config).buffer_size
        buffer = self._pool.take(size)
        self._pool.give_back(buffer)
        return self._pool.populate(buffer)

    def _check_usable(self) -> None:
        if self._is_closed:
            raise InvalidState("the stager was closed")
        check_not_forked(self._pid, "stager")

    def _finish(self, copy: StagingCopy, staged: Future[STATE_DICT]) -> None:
        try:
            with self._returning(copy):
                copy.copy_large()
            result = StagedState(copy, self._pool.give_back)
            self._pool.populate(copy.buffer)
        except BaseException as error:  # noqa: BLE001 - the future raises it
            staged.set_exception(error)
        else:
            staged.set_result(result)

    @contextmanager
    def _returning(self, copy: StagingCopy) -> Iterator[None]:
        """Give the buffer back on an error; not on an interrupt: threads may still fill it."""
        try:
            yield
        except Exception as error:
            self._pool.give_back(copy.buffer)
            if isinstance(error, OSError):
                raise out_of_memory(copy.buffer_size, error) from error
            raise

    def close(self) -> None:
        """Wait for pending copies, and free unused memory."""
        self._is_closed = True
        self._thread.shutdown(wait=True)
        self._pool.close()
