"""Timings of the last steps. Raw numbers are always recorded; `StepStats` are built on request."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from ._buckets import Bucket

HISTORY_STEPS = 128


@dataclass(frozen=True)
class StepStats:
    """The timings of one step, in seconds.

    Ranks end a step at nearly the same moment, so times since the end of a step are comparable
    between ranks.
    """

    forward: float
    """Time in forward since the previous step ended."""
    backward: float
    """From the start of the backward pass until `.grad` is reduced."""
    exposed: float
    """Communication that did not overlap with computation."""
    nbytes: int
    """Bytes of all buckets before any communication hook, including the pass header."""
    forwards: tuple[float, ...]
    """Every rank's time in forward."""
    backwards: tuple[float, ...]
    """Every rank's time in backward, before it waited for others."""
    arrivals: tuple[tuple[float, ...], ...]
    """By rank, then bucket: when it was ready, since the end of the last step."""

    @property
    def slowest(self) -> int:
        """The straggler: the rank whose last bucket was ready last."""
        lasts = [arrivals[-1] for arrivals in self.arrivals]
        return lasts.index(max(lasts))


@dataclass
class PassTiming:
    """The timings of one pass on this rank, in seconds of `time.perf_counter`."""

    since: float  # the end of the last pass: a moment that is nearly the same for all ranks
    forward: float  # the seconds spent in forward since then
    began: float = field(default_factory=time.perf_counter)
    arrivals: list[float] = field(default_factory=list)  # when each bucket was launched
    exposed: float = 0.0
    ended: float = 0.0


class StatsHistory:
    """The timings of the last steps."""

    def __init__(self) -> None:
        self._steps: deque[tuple[PassTiming, int, list[list[float]]]] = deque(maxlen=HISTORY_STEPS)

    def add(self, timing: PassTiming, times: list[list[float]], buckets: Sequence[Bucket]) -> None:
        """Keep a step; `times` has a row per rank: forward, backward, arrivals of buckets."""
        self._steps.append((timing, sum(bucket.nbytes for bucket in buckets), times))

    def steps(self) -> list[StepStats]:
        return [
            StepStats(
                timing.forward,
                timing.ended - timing.began,
                timing.exposed,
                nbytes,
                forwards=tuple(row[0] for row in times),
                backwards=tuple(row[1] for row in times),
                arrivals=tuple(tuple(row[2:]) for row in times),
            )
            for timing, nbytes, times in self._steps
        ]
