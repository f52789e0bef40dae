"""Allreduce by four ranks, on a machine that may have fewer cores than that.

With two cores, half of the ranks cannot run at any moment; whoever waits must let the others work.
See `allreduce` for the competitors.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.entries.allreduce import MIB, engines
from benchmarks.entry import Aim, Competitors, entry
from benchmarks.stats import Compare
from phalanx.testing import RankContext


@entry(
    title="Allreduce by four ranks: how many times faster than Gloo",
    ranks=(4,),
    grid={"bytes": [4, MIB, 25 * MIB]},
    peer="gloo",
    compare=Compare.SPEED,
    aims=[
        Aim("shared", at_least=20, where={"bytes": MIB}),
        Aim("shared", at_least=1, against="mpi"),
    ],
    repeats=20,
    seconds=0.1,
)
def allreduce_crowded(ctx: RankContext, **grid: Any) -> Iterator[Competitors]:
    with engines(ctx, grid["bytes"]) as competitors:
        yield competitors
