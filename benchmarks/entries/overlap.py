"""What a step costs that issues its reductions, computes, and then waits: who drives them best?

One step issues eight all-reduces of 4 MiB, computes for about as long as they take alone, and waits
for all. ``caller`` is the engine without a thread: the ranks do their shares when they wait.
``thread`` has one do them meanwhile. ``gloo`` has its own threads. ``compute`` is the same step
without any communication: what a perfect overlap would cost.

``work``
    What the rank does meanwhile. ``core`` keeps its core busy, as a backward pass on the CPU does.
    ``elsewhere`` sleeps for as long, as one does that waits for a device or a disk. With as many
    ranks as cores, the first leaves no core for a thread, and the second leaves one for each. So
    on this number of ranks the two rows stand for machines with no cores to spare and with enough.
``clock``
    ``step``: the whole step. ``issue``: the calls alone, which the computation has to wait for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._C._distributed_c10d import PrefixStore

from benchmarks.entries.group_overhead import torch_group
from benchmarks.entry import Aim, Competitors, SelfTimed, entry
from benchmarks.stats import Compare
from phalanx.groups import ProcessGroup
from phalanx.testing import RankContext

CALLS = 8
COUNT = (4 << 20) // 4
SIDE = 256  # of the matrices that are multiplied, which stay in the cache

Starts = list[Callable[[], Any]]


@entry(
    title="Eight all-reduces of 4 MiB beside as much computing: who drives them best",
    ranks=(2,),
    grid={"work": ["core", "elsewhere"], "clock": ["step", "issue"]},
    peer="caller",
    compare=Compare.COST,
    aims=[
        Aim("thread", at_most=1.0, where={"work": "elsewhere", "clock": "step"}),
        Aim("thread", at_most=1.0, where={"work": "elsewhere", "clock": "issue"}),
    ],
    repeats=30,
    process_sets=3,
    seconds=0.1,
)
def overlap(ctx: RankContext, *, work: str, clock: str) -> Iterator[Competitors]:
    gloo = torch_group(PrefixStore("torch", ctx.store), ctx.rank, ctx.size)
    caller = ctx.group("shm", driver="caller")
    starts = {
        "caller": _starts(caller),
        "thread": _starts(ctx.group("shm", driver="thread")),
        "gloo": [_start(gloo, torch.zeros(COUNT)) for _ in range(CALLS)],
        "compute": [],
    }
    compute = _computation(_alone(caller, starts["caller"]), elsewhere=work == "elsewhere")
    timed = {"step": _step, "issue": _issue}[clock]
    yield {name: SelfTimed(timed(each, compute)) for name, each in starts.items()}


def _starts(group: ProcessGroup) -> Starts:
    return [_start(group, group.allocate((COUNT,)).zero_()) for _ in range(CALLS)]


def _start(group: Any, tensor: torch.Tensor) -> Callable[[], Any]:
    return lambda: group.allreduce(tensor)


def _alone(group: ProcessGroup, starts: Starts) -> float:
    """Find out how long the reductions take alone; all ranks use the longest answer."""
    best = min(_reduced(group, starts) for _ in range(20))
    longest = torch.tensor([best], dtype=torch.float64)
    group.allreduce(longest, op=torch.distributed.ReduceOp.MAX).wait()
    return longest.item()


def _reduced(group: ProcessGroup, starts: Starts) -> float:
    group.barrier().wait()
    began = time.perf_counter()
    for work in [start() for start in starts]:
        work.wait()
    return time.perf_counter() - began


def _computation(seconds: float, *, elsewhere: bool) -> Callable[[], None]:
    if elsewhere:
        return lambda: time.sleep(seconds)
    left, right, out = torch.zeros(SIDE, SIDE), torch.zeros(SIDE, SIDE), torch.zeros(SIDE, SIDE)
    once = min(_timed(lambda: torch.mm(left, right, out=out)) for _ in range(50))
    turns = max(1, round(seconds / once))

    def multiply() -> None:
        for _ in range(turns):
            torch.mm(left, right, out=out)

    return multiply


def _timed(run: Callable[[], object]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def _step(starts: Starts, compute: Callable[[], None]) -> Callable[[int], float]:
    def turn(calls: int) -> float:
        began = time.perf_counter()
        for _ in range(calls):
            works = [start() for start in starts]
            compute()
            for work in works:
                work.wait()
        return time.perf_counter() - began

    return turn


def _issue(starts: Starts, compute: Callable[[], None]) -> Callable[[int], float]:
    def turn(calls: int) -> float:
        seconds = 0.0
        for _ in range(calls):
            began = time.perf_counter()
            works = [start() for start in starts]
            seconds += time.perf_counter() - began
            compute()
            for work in works:
                work.wait()
        return seconds

    return turn
