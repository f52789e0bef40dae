"""Staging buffers: anonymous memory shared with the writer process, and the layout of a state in
it.

Copying into fresh memory costs several times the copy: the kernel clears and maps every page on
first touch. Buffers are therefore kept from save to save, and their pages are populated in the
background where the size is known. Where it is not, data is written to the file behind the
memory, which neither clears nor maps.

A state is described to the writer process as its tree, with an offset in the buffer for each
tensor. Nothing is pickled.
"""

from __future__ import annotations

import ctypes
import fcntl
import itertools
import mmap
import os
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, TypeAlias

import msgspec
import torch
from torch import Tensor

from .. import native
from ..errors import SaveFailed
from ._manifest import StateKey
from ._state_encoding import decode, encode
from ._state_tree import (
    Branch,
    Mark,
    Node,
    PerRank,
    Replicated,
    ReplicatedShard,
    Scalar,
    TensorLeaf,
)
from ._tensor_file import dtype_from_name, dtype_name, nbytes, tensor_memory

ALIGNMENT = 64
"""Of every tensor in a buffer, in bytes."""
_POPULATE_BYTES = (
    4 << 20
)  # bytes that are populated at once; a copy that begins waits for one slice
_MADV_POPULATE_WRITE = 23  # since Linux 5.14

_libc = ctypes.CDLL(None, use_errno=True)  # unlike the mmap module, it lets other threads run
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_numbers = itertools.count()

_CACHE_BYTES = 32 << 20  # bytes; what is larger does not stay in a cache until somebody reads it
_copy_past_cache: Callable[[int, int, int], object] = (
    ctypes.memmove if native.engine is None else native.engine.stream_bytes
)
"""A quarter faster, for it does not fetch what it is about to overwrite."""


def map_shared(fd: int, size: int) -> Tensor:
    """Return the memory behind a descriptor as a tensor of bytes, which holds the mapping."""
    return torch.frombuffer(mmap.mmap(fd, size), dtype=torch.uint8)


class StagingBuffer:
    """Shared memory that grows and never shrinks."""

    def __init__(self) -> None:
        self.number = next(_numbers)
        self.fd = os.memfd_create("phalanx-staging", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        # Whoever maps it may rely on its length.
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        self.capacity = 0
        self._mapping: mmap.mmap
        self.bytes = torch.empty(0, dtype=torch.uint8)
        """The memory, for who fills it."""
        self._populated = 0
        self._is_in_use = False
        self._copy: Callable[[int, int, int], object] = ctypes.memmove

    def __del__(self) -> None:
        if hasattr(self, "fd"):
            os.close(self.fd)

    def reserve(self, size: int) -> None:
        """Make room for so many bytes, without making their pages."""
        size = max(size, 1)  # nothing cannot be mapped
        if size > self.capacity:
            os.ftruncate(self.fd, size)
            self._mapping = mmap.mmap(self.fd, size)
            self.bytes = torch.frombuffer(self._mapping, dtype=torch.uint8)
            self.capacity, self._populated = size, 0
            self._copy = _copy_past_cache if size > _CACHE_BYTES else ctypes.memmove

    def lend(
        self, give_back: Callable[[StagingBuffer], object]
    ) -> tuple[Tensor, weakref.finalize[[StagingBuffer], Any]]:
        """Return the memory as bytes, and how to give it back.

        That happens by itself when no tensor is left that lies in what was returned.
        """
        lent = (ctypes.c_ubyte * self.capacity).from_buffer(self._mapping)
        return torch.frombuffer(lent, dtype=torch.uint8), weakref.finalize(lent, give_back, self)

    def put(self, offset: int, tensor: Tensor) -> None:
        """Copy a tensor that lies in main memory in one piece; other threads run meanwhile."""
        data = tensor_memory(tensor)
        size = len(data)
        if self.has_pages(offset + size):
            self._copy(self.bytes.data_ptr() + offset, tensor.data_ptr(), size)
            return
        while data:
            count = os.pwrite(self.fd, data, offset)
            data, offset = data[count:], offset + count

    def has_pages(self, size: int) -> bool:
        """Tell whether so many bytes can be copied to at full speed."""
        return size <= self._populated

    @property
    def lacks_pages(self) -> bool:
        """Tell whether some pages were never made, or never mapped."""
        return self._populated < self.capacity

    def populate(self) -> None:
        """Make and map all pages, unless the buffer is wanted meanwhile."""
        while self.lacks_pages and not self._is_in_use:
            start, whole = self._populated, self.bytes
            length = min(_POPULATE_BYTES, len(whole) - start)
            if _libc.madvise(whole.data_ptr() + start, length, _MADV_POPULATE_WRITE):
                return  # an old kernel, or no memory left: the copy will tell
            if whole is self.bytes:  # else it has grown
                self._populated = start + length

    def take(self) -> None:
        """Keep the buffer from being populated while it is copied to."""
        self._is_in_use = True

    def let_go(self) -> None:
        """Allow it again."""
        self._is_in_use = False


class StagingBufferPool:
    """The buffers that are free, and the making of pages of those that will be needed."""

    def __init__(self) -> None:
        self._free: list[StagingBuffer] = []
        self._lock = threading.Lock()  # for those who take
        self._is_closed = False

    def take(self, size: int) -> StagingBuffer:
        """Return a buffer with room for so many bytes: the largest free one, or a new one."""
        try:
            buffer = self._largest() or StagingBuffer()
            buffer.take()
            buffer.reserve(size)
        except OSError as error:
            raise out_of_memory(size, error) from error
        return buffer

    def _largest(self) -> StagingBuffer | None:
        with self._lock:
            largest = max(self._free, key=lambda each: each.capacity, default=None)
            if largest is not None:
                self._free.remove(largest)
            return largest

    def give_back(self, buffer: StagingBuffer) -> None:
        """Let others have a buffer.

        Without a lock: the collector of garbage may call this at any time, in any thread.
        """
        if not self._is_closed:
            self._free.append(buffer)

    def prepare(self, size: int) -> Future[None]:
        """Make the pages of a buffer of that size in the background, and keep it for a save."""
        buffer = self.take(size)
        self.give_back(buffer)
        return self.populate(buffer)

    def populate(self, buffer: StagingBuffer) -> Future[None]:
        """Make and map pages of a buffer that lacks some, until somebody copies to it."""
        buffer.let_go()
        done: Future[None] = Future()

        done.set_running_or_notify_cancel()  # it cannot be cancelled

        def populate() -> None:
            buffer.populate()
            done.set_result(None)

        if not (buffer.lacks_pages and start_daemon_thread(populate, "phalanx-staging-memory")):
            done.set_result(None)
        return done

    def close(self) -> None:
        """Free the buffers that are not in use; those that are go with their last user."""
        self._is_closed = True
        while (buffer := self._largest()) is not None:
            buffer.take()  # so that what makes pages ends


def out_of_memory(size: int, error: OSError) -> SaveFailed:
    """Return what to raise where there is no room for a copy."""
    return SaveFailed(f"no memory for a copy of {size} bytes: {error}")


def start_daemon_thread(call: Callable[[], object], name: str) -> threading.Thread | None:
    """Call something in a thread of its own, if there may be one more.

    Unlike those of an executor, it can be had when the interpreter is about to end.
    """
    thread = threading.Thread(target=call, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError:
        return None
    return thread


class TensorLayout(msgspec.Struct, tag="t", array_like=True, frozen=True):
    """A tensor, and where its bytes are."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    device: str
    mark: Mark
    offset: int
    """Where in the buffer it begins; -1 if this rank has none of it."""
    piece: tuple[int, int, str] | None
    """If only some bytes of it are there: which ones, and the fingerprint of the whole."""


class ScalarLayout(msgspec.Struct, tag="s", array_like=True, frozen=True):
    """A value, as a manifest has it."""

    value: Any
    mark: Mark


class BranchLayout(msgspec.Struct, tag="b", array_like=True, frozen=True):
    """A dict, a list, a tuple, or what a codec has made of a value."""

    kind: str
    items: list[tuple[StateKey, Layout]]
    mark: Mark


Layout: TypeAlias = TensorLayout | ScalarLayout | BranchLayout


def layout_of_tree(node: Node, offset_of: Callable[[TensorLeaf], int]) -> Layout:
    """Put a tree into words, with the places of its tensors."""
    if isinstance(node, TensorLeaf):
        data = node.data
        piece = (
            (data.start, data.stop, data.fingerprint) if isinstance(data, ReplicatedShard) else None
        )
        about = (node.name, dtype_name(node.dtype), node.shape, node.device, node.mark)
        return TensorLayout(*about, offset_of(node), piece)
    if isinstance(node, Scalar):
        return ScalarLayout(encode(node, _no_tensor), node.mark)
    assert isinstance(node, Branch), "a state that was parsed lacks nothing"
    items = [(key, layout_of_tree(child, offset_of)) for key, child in node.children.items()]
    return BranchLayout(node.kind, items, node.mark)


def tree_from_layout(note: Layout, buffer: Tensor) -> Node:
    """Make the tree again, with tensors that lie in the buffer."""
    if isinstance(note, TensorLayout):
        return _read_tensor(note, buffer)
    if isinstance(note, ScalarLayout):
        scalar = decode(note.value, tensor=_no_tensor, rank=None)
        assert isinstance(scalar, Scalar)
        return replace(scalar, mark=note.mark)
    children = {key: tree_from_layout(child, buffer) for key, child in note.items}
    return Branch(note.kind, children, note.mark)


def _read_tensor(note: TensorLayout, buffer: Tensor) -> TensorLeaf:
    dtype = dtype_from_name(note.dtype)
    assert dtype is not None, "both processes have the same torch"
    data: Tensor | ReplicatedShard
    if note.piece is None:
        size = nbytes(dtype, note.shape)
        data = _view(buffer, note.offset, size, dtype).view(note.shape)
    else:
        start, stop, fingerprint = note.piece
        is_here = note.offset >= 0
        part = _view(buffer, note.offset, stop - start, dtype) if is_here else None
        about = (note.name, dtype, note.shape, note.device)
        data = ReplicatedShard(*about, start, stop, fingerprint, part)
    return TensorLeaf(note.name, dtype, note.shape, note.device, data, note.mark)


def _view(buffer: Tensor, offset: int, size: int, dtype: torch.dtype) -> Tensor:
    return buffer[offset : offset + size].view(dtype)


def state_from_tree(node: Node, within: Mark = "") -> Any:
    """Make a state of a tree: with marks, and with nodes where a plain value would say less.

    Such are what a codec has made, for the codec may not be known in this process, and a tensor
    that comes from another device.
    """
    if node.mark != within:
        marked = Replicated if node.mark == "alike" else PerRank
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


def _no_tensor(*_: Any) -> Any:
    raise AssertionError("a tensor has a note of its own")
