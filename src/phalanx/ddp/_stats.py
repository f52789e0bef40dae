"""Timings of the last steps. Raw numbers are always recorded; `StepStats` are built on request."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from ._buckets import Bucket

HISTORY_STEPS = 128  # steps


class _Timing(Protocol):
    began: float
    ended: float
    forward: float
    exposed: float


@dataclass(frozen=True)
class StepStats:
    """One step: what it cost here, and when its gradients were ready on every rank.

    Times are in seconds. Ranks leave a step together, so times since its end can be compared.
    """

    forward: float
    """In forward, since the last step ended."""
    backward: float
    """From the first gradient to the last, with the communication that it did not hide."""
    exposed: float
    """Of that, in communication while nothing was computed."""
    nbytes: int
    """Sent through the group, by this rank."""
    forwards: tuple[float, ...]
    """Every rank's time in forward."""
    backwards: tuple[float, ...]
    """Every rank's time in backward, before it waited for others."""
    arrivals: tuple[tuple[float, ...], ...]
    """By rank, then bucket: when it was ready there, counted from the end of the last step."""

    @property
    def slowest(self) -> int:
        """Tell the rank for whose last bucket the others waited."""
        lasts = [arrivals[-1] for arrivals in self.arrivals]
        return lasts.index(max(lasts))


class StatsHistory:
    """The last steps."""

    def __init__(self) -> None:
        self._steps: deque[tuple[float, float, float, int, list[list[float]]]] = deque(
            maxlen=HISTORY_STEPS
        )

    def add(self, timing: _Timing, clocks: list[list[float]], buckets: Sequence[Bucket]) -> None:
        """Keep a step; `clocks` has a row per rank: forward, backward, arrivals of buckets."""
        nbytes = sum(bucket.nbytes for bucket in buckets)
        spent = timing.ended - timing.began
        self._steps.append((timing.forward, spent, timing.exposed, nbytes, clocks))

    def steps(self) -> list[StepStats]:
        """List the last steps, oldest first."""
        return [_to_step_stats(*step) for step in self._steps]


def _to_step_stats(
    forward: float, backward: float, exposed: float, nbytes: int, clocks: list[list[float]]
) -> StepStats:
    return StepStats(
        forward=forward,
        backward=backward,
        exposed=exposed,
        nbytes=nbytes,
        forwards=tuple(row[0] for row in clocks),
        backwards=tuple(row[1] for row in clocks),
        arrivals=tuple(tuple(row[2:]) for row in clocks),
    )
