"""What an engine cannot be expected to beat: plain work on as many bytes, and the call alone."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable

import torch
from torch._C._distributed_c10d import PrefixStore

from phalanx.groups import ProcessGroup
from phalanx.testing import RankContext

from .entry import SelfTimed

__all__ = ["alone", "in_place", "lone_group", "memcpy", "warm"]

_memcpy = ctypes.CDLL(None).memcpy
_memcpy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
_memcpy.restype = None


def warm(nbytes: int) -> torch.Tensor:
    """Make a private tensor of zeros, every page of which is there."""
    return torch.empty(nbytes // 4).zero_()


def memcpy(nbytes: int) -> Callable[[], None]:
    """Prepare one copy between private buffers, with the C library's own function."""
    source, target = warm(nbytes), warm(nbytes)

    def copy() -> None:
        _memcpy(target.data_ptr(), source.data_ptr(), nbytes)

    return copy


def in_place(nbytes: int) -> Callable[[], object]:
    """Prepare one pass over private memory that reads and writes every byte.

    When all ranks do it at once, that is what an allreduce in place asks of the memory, whatever
    the number of ranks: every buffer is read and written once, and nobody has to wait.
    """
    memory = warm(nbytes)
    return memory.neg_


def alone(ctx: RankContext, call: Callable[[], object]) -> SelfTimed:
    """Let rank 0 make the calls while the others sleep."""

    def turn(calls: int) -> float:
        if ctx.rank != 0:
            return 0.0
        start = time.perf_counter()
        for _ in range(calls):
            call()
        return time.perf_counter() - start

    return SelfTimed(turn)


def lone_group(ctx: RankContext, backend: str) -> ProcessGroup:
    """Form a group of this rank only, where a call costs what it does with nobody to wait for."""
    store = PrefixStore(f"lone {ctx.rank}", ctx.store)
    return ctx.group(backend, store=store, rank=0, world_size=1)
