"""Where a copy lands whose place in shared memory has no pages yet.

To write to fresh shared memory takes four times as long as to memory that is there, for the kernel
makes every page of 4 KiB by itself. Private memory can have pages of 2 MiB, even where shared
memory may not, and takes less than twice as long. So training has to wait only for a copy into such
memory; from there the bytes are moved to where the writer process can see them while training goes
on. Every piece is freed as it is moved: the copy is hardly ever there twice.
"""

from __future__ import annotations

import mmap
import os
import time

import torch
from torch import Tensor

from ._staging_memory import ALIGNMENT, advise, copy_past_cache
from ._tensors import memory

__all__ = ["Landing", "land"]

WORTH = 32 << 20
"""Bytes of a copy that is worth it."""
_HUGE = 2 << 20  # bytes of a page
_SLOWEST = 1e-9  # seconds per byte; shared memory takes half of that
_LOT = 8 << 20  # bytes that are moved at once
_SETTING = "/sys/kernel/mm/transparent_hugepage/enabled"
_MADV_DONTNEED = 4
_MADV_HUGEPAGE = 14


def land(size: int) -> Landing | None:
    """Return a landing for so many bytes, if it would help and there is room for it."""
    if size < WORTH or not _are_pages_huge():
        return None
    try:
        return Landing(size)
    except OSError:
        return None


def _are_pages_huge() -> bool:
    try:
        with open(_SETTING) as file:
            return "[never]" not in file.read()
    except OSError:
        return False


class Landing:
    """Private memory that stands in for a buffer, place by place, until it is moved there."""

    def __init__(self, size: int) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        mapped = torch.frombuffer(mmap.mmap(-1, size + _HUGE, flags=flags), dtype=torch.uint8)
        start = -mapped.data_ptr() % _HUGE
        self._bytes = mapped[start : start + size]
        self._taken: list[tuple[int, int]] = []
        self._is_slow = False
        advise(self._bytes, 0, size, _MADV_HUGEPAGE)

    def put(self, offset: int, tensor: Tensor, size: int) -> bool:
        """Copy a tensor in main memory to its place, or decline to."""
        if self._is_slow:
            return False
        began = time.thread_time()  # not that of others, who may have the core meanwhile
        copy_past_cache(self._bytes.data_ptr() + offset, tensor.data_ptr(), size)
        # Where memory is in small pieces, the kernel may take its time to make large ones of them;
        # so may the host of a virtual machine, of which it has not had these before.
        if size > _HUGE and time.thread_time() - began > size * _SLOWEST:
            self._is_slow = True
        self._taken.append((offset, offset + size))
        return True

    def move_to(self, fd: int) -> None:
        """Write all that has landed to the same places of a file."""
        whole = memory(self._bytes)
        for start, stop in self._spans():
            for begin in range(start, stop, _LOT):
                end = min(begin + _LOT, stop)
                written = begin
                while written < end:
                    written += os.pwrite(fd, whole[written:end], written)
                first, last = begin + -begin % _HUGE, end - end % _HUGE
                if first < last:
                    advise(self._bytes, first, last - first, _MADV_DONTNEED)

    def _spans(self) -> list[tuple[int, int]]:
        """Join the places that were taken, where nothing but filling is between them."""
        spans: list[tuple[int, int]] = []
        for start, stop in sorted(self._taken):
            if spans and start - spans[-1][1] < ALIGNMENT:
                spans[-1] = spans[-1][0], stop
            else:
                spans.append((start, stop))
        return spans
