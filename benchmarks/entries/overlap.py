"""What a step costs that issues its reductions, computes, and then waits: who drives them best?

One step issues eight all-reduces of 4 MiB, computes for about as long as they take alone, and waits
for all. ``caller`` is the engine without a thread: the ranks do their shares when they issue the
next call or wait. ``thread`` has one do them meanwhile. ``gloo`` has its own threads. ``compute``
is the same step without any communication: what a perfect overlap would cost.

``work``
    What the rank does meanwhile. ``core`` keeps its core busy, as a backward pass on the CPU does.
    ``elsewhere`` sleeps for as long, as one does that waits for a device or a disk. On two cores,
    two ranks of the first kind leave no core for a thread, and of the second one for each. So the
    two stand for a machine with as many cores as ranks and for one with more; where there are
    more than two cores, both are the latter. One rank alone has nothing to reduce and is left out.
``order``
    ``first``: all calls, then all the computing. ``between``: an eighth of the computing before
    each call, as gradients come out of a backward pass; without a thread, a call is then an
    occasion to do the shares of those before it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch._C._distributed_c10d import PrefixStore

from benchmarks.entries.group_overhead import torch_group
from benchmarks.entry import Aim, Competitors, entry
from benchmarks.stats import Compare
from phalanx.groups import ProcessGroup, ReduceOp
from phalanx.testing import RankContext

CALLS = 8
COUNT = (4 << 20) // 4
SIDE = 256  # of the matrices that are multiplied, which stay in the cache

Starts = list[Callable[[], Any]]


@entry(
    title="Eight all-reduces of 4 MiB beside as much computing: who drives them best",
    ranks=(2,),
    grid={"work": ["core", "elsewhere"], "order": ["first", "between"]},
    peer="caller",
    compare=Compare.COST,
    aims=[Aim("thread", at_most=0.75, where={"work": "elsewhere"})],
    repeats=30,
    process_sets=3,
    seconds=0.1,
)
def overlap(ctx: RankContext, *, work: str, order: str) -> Iterator[Competitors]:
    gloo = torch_group(PrefixStore("torch", ctx.store), ctx.rank, ctx.size)
    caller = ctx.group("shm", driver="caller")
    starts = {
        "caller": _starts(caller),
        "thread": _starts(ctx.group("shm", driver="thread")),
        "gloo": [_start(gloo, torch.zeros(COUNT)) for _ in range(CALLS)],
        "compute": [_nothing] * CALLS,
    }
    seconds = _alone(caller, starts["caller"])
    step = {"first": _calls_first, "between": _calls_between}[order]
    compute = _computation(seconds / CALLS, elsewhere=work == "elsewhere")
    yield {name: partial(step, each, compute) for name, each in starts.items()}


def _starts(group: ProcessGroup) -> Starts:
    return [_start(group, group.allocate((COUNT,)).zero_()) for _ in range(CALLS)]


def _start(group: Any, tensor: torch.Tensor) -> Callable[[], Any]:
    return lambda: group.allreduce(tensor)


def _alone(group: ProcessGroup, starts: Starts) -> float:
    """Find out how long the reductions take alone; all ranks go by the longest answer."""
    longest = torch.tensor([min(_reduced(group, starts) for _ in range(20))], dtype=torch.float64)
    group.allreduce(longest, op=ReduceOp.MAX).wait()
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


def _calls_first(starts: Starts, compute: Callable[[], None]) -> None:
    works = [start() for start in starts]
    for _ in starts:
        compute()
    _wait(works)


def _calls_between(starts: Starts, compute: Callable[[], None]) -> None:
    works = []
    for start in starts:
        compute()
        works.append(start())
    _wait(works)


def _nothing() -> None:
    pass


def _wait(works: list[Any]) -> None:
    for work in works:
        if work is not None:
            work.wait()
