"""Runs entries: sets of rank processes, one case after the other, one result of all of them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import mean

from phalanx.testing import RankContext, RankPool

from .entry import Case, Entry
from .machine import Machine, busy_seconds
from .measure import Plan, RankSamples, measure
from .results import CaseResult, EntryResult, Results

__all__ = ["run"]

TIMEOUT = 600.0
"""Seconds that one case may take."""

Listener = Callable[[str], None]


@dataclass(frozen=True)
class Part:
    """What one set of processes has found about a case."""

    ranks: Sequence[RankSamples]
    others: float | None

    def slowest(self, name: str) -> list[float]:
        """Take from every round the time of the rank that took longest: all wait for it."""
        return [max(turn) for turn in zip(*(r.seconds[name] for r in self.ranks), strict=True)]


def run(
    entries: Sequence[Entry], *, repeats: int | None = None, quick: bool = False, tell: Listener
) -> Results:
    """Run entries, telling which case is at work."""
    machine = Machine.here()
    return Results(
        machine, [_run_entry(entry, repeats=repeats, quick=quick, tell=tell) for entry in entries]
    )


def _run_entry(entry: Entry, *, repeats: int | None, quick: bool, tell: Listener) -> EntryResult:
    sets = 1 if quick else entry.process_sets
    total = repeats or (5 if quick else entry.repeats)
    plan = Plan(math.ceil(total / sets), seconds=0.001 if quick else entry.seconds)
    cases = entry.cases(quick=quick)
    parts: dict[int, list[Part]] = {i: [] for i in range(len(cases))}
    for turn in range(sets):
        with RankPool(max(entry.ranks)) as pool:
            pool.run(_be_there)  # what it takes to start is not to count as others' work
            for i, case in enumerate(cases):
                labels = (f"{name}={value}" for name, value in case.labels.items())
                tell(f"{entry.name} {turn + 1}/{sets} {' '.join(labels)}")
                parts[i].append(_run_part(pool, entry, case, plan))
    return EntryResult.of(entry, [join(case, parts[i]) for i, case in enumerate(cases)])


def _be_there(ctx: RankContext) -> None:
    del ctx


def _run_part(pool: RankPool, entry: Entry, case: Case, plan: Plan) -> Part:
    began, busy = time.monotonic(), busy_seconds()
    args = (entry.module, case, plan)
    ranks: list[RankSamples] = pool.run(measure, case.ranks, args=args, timeout=TIMEOUT)
    busy_now, took = busy_seconds(), time.monotonic() - began
    if busy is None or busy_now is None:
        return Part(ranks, None)
    own = sum(rank.cpu for rank in ranks)
    return Part(ranks, max(0.0, (busy_now - busy - own) / took))


def most_sent(parts: Sequence[Part], name: str) -> int:
    """Tell the bytes of the rank that sends most per call."""
    return max(rank.sent.get(name, 0) for part in parts for rank in part.ranks)


def join(case: Case, parts: Sequence[Part]) -> CaseResult:
    """Make one result of what several sets of processes have found."""
    firsts = [part.ranks[0] for part in parts]
    names = [name for name in firsts[0].seconds if all(name in first.seconds for first in firsts)]
    others = [part.others for part in parts if part.others is not None]
    return CaseResult(
        case=case,
        samples={name: [s for part in parts for s in part.slowest(name)] for name in names},
        calls={name: min(first.calls[name] for first in firsts) for name in names},
        threads=firsts[0].threads,
        others=round(mean(others), 2) if others else None,
        absent={name: why for first in firsts for name, why in first.absent.items()},
        sent={name: most_sent(parts, name) for name in names if name in firsts[0].sent},
    )
