"""What a group of ours adds to every call, over torch's own group of the same engine.

The figure wanted is a few microseconds, and Gloo's own time varies by tens: every call is handed to
another thread and back, so it depends on what the scheduler makes of two wake-ups. So the question
is asked in several ways.

``cores``
    With ``one`` for each rank, a handover is a switch on a warm core, always the same, and nothing
    overlaps: this is the exact figure, and the one that the aim is for. With ``any``, as users run
    it, another core is woken each time, which costs more than all that is to be measured, most of
    all in a virtual machine; and the code that runs after it, ours too, finds cold caches.
``clock``
    ``wait``: issue and wait, on the wall clock. ``cpu``: the same, by the CPU time of the calling
    thread, which leaves out what other threads and programs do meanwhile. ``issue``: the calling
    side alone; calls are issued in bursts and waited for while the clock stands still. That is what
    a program pays that goes on computing meanwhile.
``ranks``
    With one, nothing travels. With two there is a socket in between, and a second process that has
    to be woken in time.

``engine`` is Gloo without any group around it. torch's group reaches it through the dispatcher;
ours goes there directly, so it has that much to spare.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllreduceOptions, PrefixStore, Store

from benchmarks.entry import Aim, Competitors, SelfTimed, entry
from benchmarks.stats import Compare
from phalanx.testing import RankContext

BURST = 32  # fewer than either kind of group would mind having under way
TIMEOUT = timedelta(minutes=5)

Start = Callable[[], Any]


@entry(
    title="An allreduce of 4 floats: what our group adds to Gloo",
    ranks=(1, 2),
    grid={"cores": ["one", "any"], "clock": ["wait", "cpu", "issue"]},
    peer="torch",
    compare=Compare.ADDED,
    aims=[
        Aim("ours", at_most=5e-6, where={"ranks": 1, "cores": "one"}),
        Aim("ours", at_most=5e-6, where={"cores": "any", "clock": "issue"}),
    ],
    repeats=60,
    process_sets=5,
    seconds=0.02,
)
def group_overhead(ctx: RankContext, *, cores: str, clock: str) -> Iterator[Competitors]:
    with _confined(ctx.rank) if cores == "one" else contextlib.nullcontext():
        timed = {"wait": _wait, "cpu": _cpu, "issue": _issue}[clock]
        yield {name: SelfTimed(timed(start)) for name, start in _starts(ctx).items()}


def _starts(ctx: RankContext) -> dict[str, Start]:
    theirs = torch_group(PrefixStore("torch", ctx.store), ctx.rank, ctx.size)
    ours = ctx.group("gloo")
    bare: Any = gloo(PrefixStore("engine", ctx.store), ctx.rank, ctx.size)
    options = AllreduceOptions()
    tensor = torch.zeros(4)  # zeros, for they stay what they are however often they are added up
    return {
        "torch": lambda: theirs.allreduce(tensor),
        "ours": lambda: ours.allreduce(tensor),
        "engine": lambda: bare.allreduce([tensor], options),
    }


@contextlib.contextmanager
def _confined(rank: int) -> Iterator[None]:
    """Keep this thread, and those that it starts, on one core."""
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {sorted(allowed)[rank % len(allowed)]})
    try:
        yield
    finally:
        os.sched_setaffinity(0, allowed)


def torch_group(store: Store, rank: int, size: int) -> dist.ProcessGroup:
    """Make a group as `torch.distributed._dist2.new_group("gloo")` does, from any store."""
    engine = gloo(store, rank, size)
    group = dist.ProcessGroup(store, rank, size)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, engine)
    return group


def gloo(store: Store, rank: int, size: int) -> dist.ProcessGroupGloo:
    """Make an engine as every group here has one."""
    engine = dist.ProcessGroupGloo(store, rank, size, TIMEOUT)
    engine._set_sequence_number_for_group()
    return engine


def _wait(start: Start) -> Callable[[int], float]:
    return lambda calls: _completed(start, calls, time.perf_counter)


def _cpu(start: Start) -> Callable[[int], float]:
    return lambda calls: _completed(start, calls, time.thread_time)


def _completed(start: Start, calls: int, clock: Callable[[], float]) -> float:
    began = clock()
    for _ in range(calls):
        start().wait()
    return clock() - began


def _issue(start: Start) -> Callable[[int], float]:
    def turn(calls: int) -> float:
        seconds, left = 0.0, calls
        while left:
            burst = min(BURST, left)
            began = time.perf_counter()
            works = [start() for _ in range(burst)]
            seconds += time.perf_counter() - began
            for work in works:
                work.wait()
            left -= burst
        return seconds

    return turn
