"""Saving 1 GiB of state that two ranks hold alike, while training goes on.

A stall is the time from the call of ``save`` until tensors may be changed; a write, that until the
checkpoint is there. A saver is made afresh for every round, and has the time to start, for
training does not begin with a save. ``phalanx, unprepared`` was not told what to make room for.

The peers are given what is best for them here: memory that they keep, shared where a process
writes. Only ours has checksums. By default checkpoints go to files in memory; where they are
flushed, they go to a disk, and only the experimental checkpointer leaves them to the kernel. It has
every rank write all of the state.
"""

from __future__ import annotations

import itertools
import os
import shutil
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.checkpoint import _experimental as upstream
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from benchmarks.entry import Aim, Competitors, SelfTimed, entry
from benchmarks.stats import Compare
from phalanx.checkpoint import Replicated, make_async_checkpointer
from phalanx.checkpoint.components import RankInfo
from phalanx.testing import RankContext

TENSORS, TENSOR = 64, 4 << 20  # of float32: 1 GiB
PEERS = ("async_save", "async_save, process", "experimental")

Futures = tuple["Future[Any] | None", "Future[Any]"]


class Saver(ABC):
    """Somebody who saves; made anew for every measurement."""

    @abstractmethod
    def save(self, path: str) -> Futures:
        """Begin a save: the futures of the copy, if it is not made yet, and of the write."""

    @abstractmethod
    def close(self) -> None:
        """End."""


class AsyncSave(Saver):
    """``torch.distributed.checkpoint.async_save``, with a stager that keeps its memory."""

    def __init__(self, state: dict[str, torch.Tensor], *, process: bool, flush: bool) -> None:
        self._state = state
        self._flush = flush
        self._type = AsyncCheckpointerType.PROCESS if process else AsyncCheckpointerType.THREAD
        # Neither pinned memory nor copies that do not block exist without an accelerator.
        self._stager = DefaultStager(StagingOptions(False, process, False, False))

    def save(self, path: str) -> Futures:
        """Copy, and have a thread or a process write."""
        written = dcp.async_save(
            self._state,
            storage_writer=dcp.FileSystemWriter(path, sync_files=self._flush),
            async_checkpointer_type=self._type,
            async_stager=self._stager,
        )
        assert isinstance(written, Future)
        return None, written

    def close(self) -> None:
        """Free the memory."""
        self._stager.close()


class Experimental(Saver):
    """Upstream's checkpointer of the same design as ours."""

    def __init__(self, state: dict[str, torch.Tensor], ctx: RankContext) -> None:
        staging = upstream.staging.CheckpointStagerConfig(False, True, False, False)
        config = upstream.config.CheckpointerConfig(staging_config=staging)
        info = upstream.types.RankInfo(global_rank=ctx.rank, global_world_size=ctx.size)
        self._made = upstream.builder.make_async_checkpointer(config, info)
        self._made._checkpoint_process.process_creation_future.result()
        self._state = state
        self._rank = ctx.rank

    def save(self, path: str) -> Futures:
        """Have all of the state written by every rank, to a place of its own."""
        futures = self._made.save(f"{path}/{self._rank}", self._state)
        assert futures is not None
        return futures

    def close(self) -> None:
        """End the process."""
        self._made.close()


class Ours(Saver):
    """phalanx."""

    def __init__(
        self, state: dict[str, torch.Tensor], ctx: RankContext, *, flush: bool, prepared: bool
    ) -> None:
        self._state = {"model": Replicated(state)}
        init = _nothing if flush else _without_flush
        info = RankInfo(ctx.rank, ctx.size)
        self._made = make_async_checkpointer(rank_info=info, subprocess_init_fn=init)
        if prepared:
            self._made.prepare(self._state).result()
        self._made._checkpoint_process.process_creation_future.result()

    def save(self, path: str) -> Futures:
        """Have this rank's part written."""
        return self._made.save(path, self._state)

    def close(self) -> None:
        """End the process."""
        self._made.close()


def _nothing() -> None:
    pass


def _without_flush() -> None:
    """Make this process, which does nothing but write checkpoints, leave them to the kernel."""
    os.fsync = lambda _: None


@dataclass(frozen=True)
class Life:
    """What was measured of a saver, from its first save to its end."""

    first_stall: float
    later_stall: float
    write: float
    """How long the last save took until the checkpoint was there."""

    @classmethod
    def of(cls, saver: Saver, folder: str) -> Life:
        """Save as often as it takes."""
        first, later, last = (timed(saver, f"{folder}/{i}") for i in range(3))
        return cls(first[0], (later[0] + last[0]) / 2, last[1])


def timed(saver: Saver, path: str) -> tuple[float, float]:
    """Save, and return how long tensors had to stay as they were, and how long it all took."""
    dist.barrier()
    stall, whole = _timed(saver, path)
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(path)
    return stall, whole


def _timed(saver: Saver, path: str) -> tuple[float, float]:
    began = time.perf_counter()
    copied, written = saver.save(path)
    if copied is not None:
        copied.result()
    stall = time.perf_counter() - began
    written.result()
    return stall, time.perf_counter() - began


MEASURES: dict[str, tuple[str, bool]] = {
    "first stall": ("first_stall", False),
    "later stall": ("later_stall", False),
    "write": ("write", False),
    "write, flushed": ("write", True),
}
"""What is measured of a life, and whether data is flushed to disk in it."""

_lives: dict[tuple[str, bool], list[Life]] = {}
"""By competitor: to start a process takes longer than all that is measured, so that one life of a
saver serves several cases."""


def better_than_all(of: str, at_most: float, competitor: str = "phalanx") -> list[Aim]:
    """Hold us against every peer, and so against the better of them."""
    return [Aim(competitor, at_most=at_most, against=peer, where={"of": of}) for peer in PEERS]


@entry(
    title="Saving 1 GiB that two ranks hold alike, while training goes on",
    ranks=(2,),
    grid={"of": tuple(MEASURES)},
    peer="async_save",
    compare=Compare.COST,
    aims=[
        *better_than_all("first stall", 1 / 5),
        *better_than_all("later stall", 1 / 2),
        *better_than_all("write", 1),
    ],
    repeats=6,
)
def checkpoint(ctx: RankContext, of: str) -> Iterator[Competitors]:
    torch.set_num_threads(1)
    measure, flush = MEASURES[of]
    store = PrefixStore(f"checkpoint {of}", ctx.store)
    dist.init_process_group("gloo", store=store, rank=ctx.rank, world_size=ctx.size)
    state = {f"layer{i:02}": torch.full((TENSOR,), float(i)) for i in range(TENSORS)}
    part = torch.ones(TENSORS * TENSOR // ctx.size)
    made: dict[str, Callable[[], Saver]] = {
        "async_save": lambda: AsyncSave(state, process=False, flush=flush),
        "async_save, process": lambda: AsyncSave(state, process=True, flush=flush),
        "experimental": lambda: Experimental(state, ctx),
        "phalanx": lambda: Ours(state, ctx, flush=flush, prepared=True),
    }
    if measure == "first_stall":
        made["phalanx, unprepared"] = lambda: Ours(state, ctx, flush=flush, prepared=False)

    def timer(name: str) -> Callable[[int], float]:
        lives = _lives.setdefault((name, flush), [])
        numbers = itertools.count()

        def run(calls: int) -> float:
            del calls
            number = next(numbers)
            if number == len(lives):
                lives.append(_live(made[name], flush=flush))
            took: float = getattr(lives[number], measure)
            return took

        return run

    competitors: dict[str, Any] = {name: SelfTimed(timer(name), calls=1) for name in made}
    if measure != "write":
        competitors["memcpy of a part"] = SelfTimed(lambda _: _copy_time(part), calls=1)
    yield competitors
    dist.destroy_process_group()


def _live(make: Callable[[], Saver], *, flush: bool) -> Life:
    # Without a flush, on files in memory: a disk would begin to write at a time of its own choice.
    place = None if flush else "/dev/shm"
    folder = [
        tempfile.mkdtemp(prefix="phalanx-benchmark-", dir=place) if dist.get_rank() == 0 else ""
    ]
    dist.broadcast_object_list(folder)
    saver = make()
    try:
        return Life.of(saver, folder[0])
    finally:
        saver.close()
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(folder[0])


def _copy_time(part: torch.Tensor) -> float:
    """Time a copy of what a rank writes into memory that is there: the least that a save takes."""
    copy = torch.ones_like(part)
    dist.barrier()
    began = time.perf_counter()
    copy.copy_(part)
    return time.perf_counter() - began
