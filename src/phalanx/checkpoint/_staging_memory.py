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
from collections.abc import Callable
from concurrent.futures import Future

import torch
from torch import Tensor

from .. import native
from ._tensors import memory

__all__ = ["ALIGNMENT", "Buffer", "BufferPool", "map_shared"]

ALIGNMENT = 64
"""Of every tensor in a buffer, in bytes."""
_SLICE = 4 << 20  # bytes that are populated at once; a copy that begins waits for one slice
_MADV_DONTFORK = 10
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
        self._bytes = torch.empty(0, dtype=torch.uint8)
        self._populated = 0
        self._is_in_use = False
        self._copy: Callable[[int, int, int], object] = ctypes.memmove

    def __del__(self) -> None:
        if hasattr(self, "fd"):
            os.close(self.fd)

    def reserve(self, size: int) -> None:
        """Make room for so many bytes, without making their pages."""
        if size > self.capacity:
            os.ftruncate(self.fd, size)
            self._bytes = map_shared(self.fd, size)
            _libc.madvise(self._bytes.data_ptr(), size, _MADV_DONTFORK)
            self.capacity, self._populated = size, 0
            self._copy = _copy_past_cache if size > _CACHE else ctypes.memmove

    def tensor(self, offset: int, dtype: torch.dtype, shape: tuple[int, ...], size: int) -> Tensor:
        """Return a place in the buffer as a tensor."""
        return self._bytes[offset : offset + size].view(dtype).view(shape)

    def put(self, offset: int, tensor: Tensor) -> None:
        """Copy a tensor that lies in main memory in one piece; other threads run meanwhile."""
        data = memory(tensor)
        size = len(data)
        if offset + size <= self._populated:
            self._copy(self._bytes.data_ptr() + offset, tensor.data_ptr(), size)
            return
        while data:
            count = os.pwrite(self.fd, data, offset)
            data, offset = data[count:], offset + count

    @property
    def lacks_pages(self) -> bool:
        """Tell whether some pages were never made, or never mapped."""
        return self._populated < self.capacity

    def populate(self) -> None:
        """Make and map all pages, unless the buffer is wanted meanwhile."""
        while self.lacks_pages and not self._is_in_use:
            start, whole = self._populated, self._bytes
            length = min(_SLICE, len(whole) - start)
            if _libc.madvise(whole.data_ptr() + start, length, _MADV_POPULATE_WRITE):
                return  # an old kernel, or no memory left: the copy will tell
            if whole is self._bytes:  # else it has grown
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
        self._lock = threading.Lock()

    def take(self, size: int) -> Buffer:
        """Return a buffer with room for so many bytes: the largest free one, or a new one."""
        with self._lock:
            buffer = self._free.pop() if self._free else Buffer()
        buffer.take()
        buffer.reserve(size)
        return buffer

    def give_back(self, buffer: Buffer) -> None:
        """Let others have a buffer."""
        with self._lock:
            self._free.append(buffer)
            self._free.sort(key=lambda each: each.capacity)

    def prepare(self, size: int) -> Future[None]:
        """Make the pages of a buffer of that size in the background, and keep it for a save."""
        buffer = self.take(size)
        self.give_back(buffer)
        return self.populate(buffer)

    def populate(self, buffer: Buffer) -> Future[None]:
        """Make and map pages of a buffer that lacks some, until somebody copies to it."""
        buffer.let_go()
        done: Future[None] = Future()

        def populate() -> None:
            buffer.populate()
            done.set_result(None)

        if buffer.lacks_pages:
            threading.Thread(target=populate, name="phalanx-staging-memory", daemon=True).start()
        else:
            done.set_result(None)
        return done

    def close(self) -> None:
        """Free the buffers that are not in use; those that are go with their last user."""
        with self._lock:
            for buffer in self._free:
                buffer.take()  # so that what makes pages ends
            self._free.clear()
