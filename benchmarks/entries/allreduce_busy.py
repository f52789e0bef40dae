"""Allreduce while other processes keep every core busy: one that spins for each, at equal priority.

A rank that waits shares its core with a stranger, who takes it for milliseconds at a time. An
engine that only spins collapses here; one that only sleeps is woken late. The spinning processes
are the same ones for all competitors. See `allreduce` for who they are.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from benchmarks.busy import busy_cores
from benchmarks.entries.allreduce import KIB, MIB, engines
from benchmarks.entry import Aim, Competitors, entry
from benchmarks.stats import Compare
from phalanx.testing import RankContext


@entry(
    title="Allreduce by two ranks on busy cores: how many times faster than Gloo there",
    ranks=(2,),
    grid={"bytes": [4, 16 * KIB, MIB, 25 * MIB]},
    peer="gloo",
    compare=Compare.SPEED,
    aims=[Aim("shared", at_least=5)],
    repeats=20,
    seconds=0.2,  # many times what the scheduler gives a process at once
)
def allreduce_busy(ctx: RankContext, **grid: Any) -> Iterator[Competitors]:
    busy = busy_cores() if ctx.rank == 0 else contextlib.nullcontext()
    with engines(ctx, grid["bytes"]) as competitors, busy:
        yield competitors
