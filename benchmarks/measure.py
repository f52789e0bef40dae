"""The clock: one case of an entry on one rank.

All competitors live in the same processes and take turns. A round times each of them once, in an
order drawn anew, the same on every rank: one that always came after the same other, or now and then
after itself, would find caches and threads colder or warmer than the rest do. A turn is as many
calls as fill a certain time, which is found out first; it begins when all ranks are there.

The garbage collector stays on: what a competitor leaves behind is part of what it costs.
"""

from __future__ import annotations

import contextlib
import math
import random
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from phalanx.testing import RankContext

from .entry import Absent, Case, Competitors, Counted, SelfTimed, load
from .wire import counts, sent_since

__all__ = ["Plan", "RankSamples", "measure"]

MOST_CALLS = 1_000_000
COUNTED_CALLS = 2
"""Whose bytes are counted; they are not timed."""


@dataclass(frozen=True)
class Plan:
    """How thoroughly a case is measured."""

    repeats: int
    seconds: float


@dataclass(frozen=True)
class RankSamples:
    """What one rank has measured."""

    seconds: dict[str, list[float]]
    """Per call, one for each round, by competitor."""
    calls: dict[str, int]
    """How many calls a competitor made in one round."""
    threads: int
    """How many threads an operation of torch may use."""
    cpu: float
    """Seconds that this process, and what it started, have kept a core busy for the case."""
    absent: dict[str, str]
    """Which competitors could not take part, and why."""
    sent: dict[str, int] = field(default_factory=dict)
    """Bytes that this rank sent per call, of the competitors whose bytes are counted."""


def measure(ctx: RankContext, module: str, case: Case, plan: Plan) -> RankSamples:
    """Time the competitors of the entry in `module`, as one rank."""
    begun = _cpu_seconds()
    ranks = _Ranks(ctx)
    with contextlib.contextmanager(load(module).setup)(ctx, **case.params) as competitors:
        turns = _turns(competitors)
        calls = {
            name: _declared(competitors[name]) or _calibrate(turn, ranks, plan.seconds)
            for name, turn in turns.items()
        }
        sent = _count(competitors, ranks)
        seconds: dict[str, list[float]] = {name: [] for name in turns}
        draw = random.Random(0)
        for _ in range(plan.repeats):
            for name in draw.sample(list(turns), len(turns)):
                ranks.align()
                seconds[name].append(turns[name](calls[name]) / calls[name])
        ranks.align()  # nobody tidies up while another is still at it
    spent = _cpu_seconds() - begun
    absent = {name: made.why for name, made in competitors.items() if isinstance(made, Absent)}
    return RankSamples(seconds, calls, torch.get_num_threads(), spent, absent, sent)


def _cpu_seconds() -> float:
    """Tell what this process has used, and those that it started and waited for."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


Turn = Callable[[int], float]


def _turns(competitors: Competitors) -> dict[str, Turn]:
    return {name: _turn(made) for name, made in competitors.items() if not isinstance(made, Absent)}


def _turn(made: SelfTimed | Counted | Callable[[], object]) -> Turn:
    if isinstance(made, SelfTimed):
        return made.run
    return _timed(made.call if isinstance(made, Counted) else made)


def _timed(call: Callable[[], object]) -> Turn:
    def turn(calls: int) -> float:
        start = time.perf_counter()
        for _ in range(calls):
            call()
        return time.perf_counter() - start

    return turn


def _declared(made: object) -> int | None:
    return made.calls if isinstance(made, SelfTimed) else None


def _calibrate(turn: Turn, ranks: _Ranks, seconds: float) -> int:
    """Find how many calls take so long; rank 0 decides, so that all ranks make the same."""
    turn(1)  # the first call may open connections
    calls = 1
    while True:
        took = ranks.hear_first(min(_wall(turn, calls, ranks) for _ in range(3)))
        if took >= seconds / 2 or calls >= MOST_CALLS:
            return min(MOST_CALLS, math.ceil(calls * max(1.0, seconds / took)))
        calls *= 2


def _count(competitors: Competitors, ranks: _Ranks) -> dict[str, int]:
    """Find how many bytes a call sends, after calls that have opened connections."""
    found: dict[str, int] = {}
    for name, made in competitors.items():
        if isinstance(made, Counted):
            ranks.align()
            before = counts()
            for _ in range(COUNTED_CALLS):
                made.call()
            sent = sent_since(before)
            if sent is not None:
                found[name] = round(sent / COUNTED_CALLS)
    return found


def _wall(turn: Turn, calls: int, ranks: _Ranks) -> float:
    """Time a turn with all that its own clock leaves out."""
    ranks.align()
    start = time.perf_counter()
    turn(calls)
    return time.perf_counter() - start


class _Ranks:
    """The ranks of a run, over a raw Gloo group: the clock must not depend on what it measures."""

    def __init__(self, ctx: RankContext) -> None:
        store = PrefixStore("benchmark clock", ctx.store)
        minutes = timedelta(minutes=5)
        # Any: torch's stubs leave out the collectives of an engine.
        self._group: Any = dist.ProcessGroupGloo(store, ctx.rank, ctx.size, minutes)
        self._alone = ctx.size == 1

    def align(self) -> None:
        """Wait until all ranks have come here."""
        if not self._alone:
            self._group.barrier().wait()

    def hear_first(self, value: float) -> float:
        """Return the value of rank 0."""
        said = torch.tensor([value], dtype=torch.float64)
        self._group.broadcast([said], dist.BroadcastOptions()).wait()
        return said.item()
