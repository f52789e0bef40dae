"""Memory that is shared with the writer process: it has no name, and is gone with its processes.

What is copied into fresh memory pays for its pages: the kernel clears each, and maps each at its
first touch, which takes several times as long as the copy. So a buffer is kept from save to save,
and its pages are made in the background where a size is known beforehand. Where it is
not, data is *written* to the file behind the memory: the kernel then neither clears nor maps.
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
from typing import Any

import torch
from torch import Tensor

from .. import native
from ..errors import SaveFailed
from ._tensors import memory

__all__ = [
    "ALIGNMENT",
    "Buffer",
    "BufferPool",
    "map_shared",
    "no_memory",
    "run_beside",
]

ALIGNMENT = 64
"""Of every tensor in a buffer, in bytes."""
_SLICE = 4 << 20  # bytes that are populated at once; a copy that begins waits for one slice
_MADV_POPULATE_WRITE = 23  # since Linux 5.14

_libc = ctypes.CDLL(None, use_errno=True)  # unlike the mmap module, it lets other threads run
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_numbers = itertools.count()

_CACHE = 32 << 20  # bytes; what is larger does not stay in a cache until somebody reads it
_copy_past_cache: Callable[[int, int, int], object] = (
    ctypes.memmove if native.engine is None else native.engine.stream_bytes
)
"""A quarter faster, for it does not fetch what it is about to overwrite."""


def map_shared(fd: int, size: int) -> Tensor:
    """Return the memory behind a descriptor as a tensor of bytes, which holds the mapping."""
    return torch.frombuffer(mmap.mmap(fd, size), dtype=torch.uint8)


class Buffer:
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
            self._copy = _copy_past_cache if size > _CACHE else ctypes.memmove

    def lend(
        self, give_back: Callable[[Buffer], object]
    ) -> tuple[Tensor, weakref.finalize[[Buffer], Any]]:
        """Return the memory as bytes, and how to give it back.

        That happens by itself when no tensor is left that lies in what was returned.
        """
        lent = (ctypes.c_ubyte * self.capacity).from_buffer(self._mapping)
        return torch.frombuffer(lent, dtype=torch.uint8), weakref.finalize(lent, give_back, self)

    def put(self, offset: int, tensor: Tensor) -> None:
        """Copy a tensor that lies in main memory in one piece; other threads run meanwhile."""
        data = memory(tensor)
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
            length = min(_SLICE, len(whole) - start)
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


class BufferPool:
    """The buffers that are free, and the making of pages of those that will be needed."""

    def __init__(self) -> None:
        self._free: list[Buffer] = []
        self._lock = threading.Lock()  # for those who take
        self._is_closed = False

    def take(self, size: int) -> Buffer:
        """Return a buffer with room for so many bytes: the largest free one, or a new one."""
        try:
            buffer = self._largest() or Buffer()
            buffer.take()
            buffer.reserve(size)
        except OSError as error:
            raise no_memory(size, error) from error
        return buffer

    def _largest(self) -> Buffer | None:
        with self._lock:
            largest = max(self._free, key=lambda each: each.capacity, default=None)
            if largest is not None:
                self._free.remove(largest)
            return largest

    def give_back(self, buffer: Buffer) -> None:
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

    def populate(self, buffer: Buffer) -> Future[None]:
        """Make and map pages of a buffer that lacks some, until somebody copies to it."""
        buffer.let_go()
        done: Future[None] = Future()

        done.set_running_or_notify_cancel()  # it cannot be cancelled

        def populate() -> None:
            buffer.populate()
            done.set_result(None)

        if not (buffer.lacks_pages and run_beside(populate, "phalanx-staging-memory")):
            done.set_result(None)
        return done

    def close(self) -> None:
        """Free the buffers that are not in use; those that are go with their last user."""
        self._is_closed = True
        while (buffer := self._largest()) is not None:
            buffer.take()  # so that what makes pages ends


def no_memory(size: int, error: OSError) -> SaveFailed:
    """Return what to raise where there is no room for a copy."""
    return SaveFailed(f"no memory for a copy of {size} bytes: {error}")


def run_beside(call: Callable[[], object], name: str) -> threading.Thread | None:
    """Call something in a thread of its own, if there may be one more.

    Unlike those of an executor, it can be had when the interpreter is about to end.
    """
    thread = threading.Thread(target=call, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError:
        return None
    return thread
