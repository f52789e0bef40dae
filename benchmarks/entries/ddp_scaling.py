"""A step of training by more and more ranks, most of them without a core of their own.

Every rank has a batch of its own, so the work grows with the ranks: ``alone``, without any
communication, is what two cores make of it.
"""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.entries.ddp import SMALLEST, steps
from benchmarks.entry import Competitors, entry
from benchmarks.stats import Compare
from phalanx.testing import RankContext


@entry(
    title="A step of training by 1, 2, 4 and 8 ranks on two cores",
    ranks=(1, 2, 4, 8),
    peer="alone",
    compare=Compare.COST,
    repeats=20,
    seconds=0.1,
)
def ddp_scaling(ctx: RankContext) -> Iterator[Competitors]:
    yield steps(ctx, SMALLEST)
