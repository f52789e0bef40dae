"""The overhead of ``phalanx run --elastic`` when no rank is lost.

Both competitors are jobs of `ElasticRun` with the same steps, under launchers of their own; they
take turns, and wait for orders meanwhile. ``elastic`` ends every step with a barrier and has a
thread that looks for workers that want to join or leave.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

from benchmarks.elastic_jobs import launched
from benchmarks.entry import Aim, Competitors, entry
from benchmarks.stats import Compare
from phalanx.testing import RankContext


@entry(
    title="A step of an elastic run by two ranks while none is lost",
    ranks=(2,),
    grid={
        "model": ["MLP, 8 tensors", "MLP, 25 M", "transformer"],
        "micro_batches": [2, 4, 8],
    },
    peer="plain",
    compare=Compare.COST,
    aims=[Aim("elastic", at_most=1.02)],
    repeats=24,
    process_sets=2,
    seconds=0.25,
)
def elastic_overhead(ctx: RankContext, *, model: str, micro_batches: int) -> Iterator[Competitors]:
    with ExitStack() as stack:
        ways = {"plain": [], "elastic": ["--elastic"]}
        yield {
            name: stack.enter_context(launched(ctx, options, model, micro_batches))
            for name, options in ways.items()
        }
