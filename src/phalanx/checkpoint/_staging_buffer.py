"""Staging buffers: memory shared with the writer process, and the places of tensors in it.

Copying into fresh memory takes several times as long as the copy: the kernel clears and maps every
page on first touch. Buffers are therefore kept from save to save, and their pages are populated in
the background when the size is known. Before that, data is written to the file behind the memory,
which neither clears nor maps.

The writer process receives the tree of a state without its tensors, and their places by name.
"""

from __future__ import annotations

import ctypes
import fcntl
import itertools
import mmap
import os
import threading
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import native
from ..errors import SaveFailed
from ._state_tree import (
    Branch,
    Mark,
    Node,
    PerRank,
    Replicated,
    ReplicatedShard,
    Scalar,
    TensorLeaf,
    map_leaves,
)
from ._tensor_file import tensor_memory

ALIGNMENT = 64  # bytes, of every tensor in a buffer
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


def map_shared(fd: int, size: int) -> Tensor:
    """Map the memory behind a descriptor as a tensor of bytes, which owns the mapping."""
    return torch.frombuffer(mmap.mmap(fd, size), dtype=torch.uint8)


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
        self.is_in_use = False
        """Set while a copy is under way, to stop `populate`."""
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
        """Whether some pages are not populated."""
        return self._populated < self.capacity

    def populate(self) -> None:
        """Populate all pages, until the buffer is used."""
        while self.lacks_pages and not self.is_in_use:
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
            buffer.is_in_use = True
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

    def prepare(self, size: int) -> Future[None]:
        """Populate a buffer of that size in the background, for a later save."""
        buffer = self.take(size)
        self.give_back(buffer)
        return self.populate(buffer)

    def populate(self, buffer: StagingBuffer) -> Future[None]:
        """Populate the pages that a buffer lacks in the background, until it is used."""
        buffer.is_in_use = False
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
            buffer.is_in_use = True  # ends the thread that populates it


def out_of_memory(size: int, error: OSError) -> SaveFailed:
    """Return the error for a copy that does not fit into memory."""
    return SaveFailed(f"cannot allocate {size} bytes to stage the state: {error}")


def start_daemon_thread(call: Callable[[], object], name: str) -> threading.Thread | None:
    """Start a thread; return None if that is not possible.

    Unlike an executor, this works while the interpreter shuts down.
    """
    thread = threading.Thread(target=call, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError:
        return None
    return thread


class Place(NamedTuple):
    """Where a tensor is in a buffer."""

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
        data = tensors.get(leaf.name)
        if isinstance(leaf.data, ReplicatedShard):
            return replace(leaf, data=replace(leaf.data, data=data))
        return replace(leaf, data=data)

    return map_leaves(tree, change)


def state_from_tree(node: Node, within: Mark = "") -> Any:
    """Convert a tree to a state with marks.

    Values encoded by a codec stay nodes, since this process may not have the codec; so do tensors
    from another device, whose name a plain tensor would lose.
    """
    if node.mark != within:
        marked = Replicated if node.mark == "replicated" else PerRank
        return marked(state_from_tree(node, node.mark))
    if isinstance(node, Scalar):
        return node.value
    if isinstance(node, TensorLeaf):
        is_plain = node.device == "cpu" or isinstance(node.data, ReplicatedShard)
        return node.data if is_plain else node
    assert isinstance(node, Branch)
    if node.kind.startswith("codec:"):
        return node
    items = {key: state_from_tree(child, within) for key, child in node.children.items()}
    if node.kind == "dict":
        return items
    return (list if node.kind == "list" else tuple)(items.values())
