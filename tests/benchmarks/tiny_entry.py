"""An entry whose competitors report their own times, so that all figures are known."""

from benchmarks.entry import Aim, SelfTimed, entry
from benchmarks.stats import Compare

happened = []


@entry(
    title="Known numbers",
    ranks=(1, 2),
    grid={"size": [3, 4]},
    peer="twice",
    compare=Compare.COST,
    aims=[Aim("once", at_most=0.6, where={"ranks": 2}), Aim("once", at_least=0.6)],
    repeats=7,
    process_sets=2,
    seconds=0.0,
)
def tiny(ctx, *, size):
    def turn(name, calls, seconds):
        happened.append(name)
        return calls * seconds * size * (1 + ctx.rank)

    yield {
        "once": SelfTimed(lambda calls: turn("once", calls, 1)),
        "twice": SelfTimed(lambda calls: turn("twice", calls, 2)),
    }
    happened.append("the end")
