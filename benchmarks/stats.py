"""What is made of the samples: medians, and comparisons of pairs taken moments apart.

Times on a shared machine are skewed: most are near the best, some are far above it. So nothing here
averages. And since a busy moment hits neighbours alike, competitors are compared pair by pair, each
sample with the one that the peer gave in the same round, before the median is taken: the median of
differences is much steadier than the difference of medians.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median, quantiles

__all__ = ["FEWEST", "Compare", "Spread", "compare_pairs", "percentile", "quartiles", "sure_median"]

FEWEST = 6
"""How many values it takes for 95% confidence in a median."""


class Compare(enum.StrEnum):
    """How a competitor is held against its peer."""

    ADDED = "added"
    """The time that it takes more."""
    COST = "cost"
    """Its time as a multiple of the peer's: less is better."""
    SPEED = "speed"
    """The peer's time as a multiple of its own: more is better."""


@dataclass(frozen=True)
class Spread:
    """A median, two values around it, and the range."""

    median: float
    low: float
    high: float
    least: float
    most: float
    count: int
    """How many values all this is of."""


_PAIRED: dict[Compare, Callable[[float, float], float]] = {
    Compare.ADDED: lambda own, peer: own - peer,
    Compare.COST: lambda own, peer: own / peer,
    Compare.SPEED: lambda own, peer: peer / own,
}


def quartiles(samples: Sequence[float]) -> Spread:
    """Tell between which values the middle half of the samples lies."""
    at_least_two = samples if len(samples) > 1 else [*samples, *samples]
    low, middle, high = quantiles(at_least_two, method="inclusive")
    return Spread(middle, low, high, min(samples), max(samples), len(samples))


def percentile(samples: Sequence[float], percent: float) -> float:
    """Return the least sample that so many percent of the samples do not exceed."""
    ordered = sorted(samples)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


def compare_pairs(how: Compare, own: Sequence[float], peer: Sequence[float]) -> Spread:
    """Compare each sample with the one that the peer gave in the same round."""
    compare = _PAIRED[how]
    return sure_median([compare(mine, theirs) for mine, theirs in zip(own, peer, strict=True)])


def sure_median(values: Sequence[float], *, confidence: float = 0.95) -> Spread:
    """Tell between which values the median lies of all that could have been measured.

    By order statistics: how many values are below the true median is binomial, whatever their
    distribution, so two of the sorted values enclose it with a known probability. With fewer than
    `FEWEST` values no two do, and it is the range. Rounds are taken for independent; as far as
    they are not, the truth is wider.
    """
    ordered = sorted(values)
    n = len(ordered)
    inside, below = 0, 0.5**n
    while inside < (n - 1) // 2:
        below += math.comb(n, inside + 1) / 2**n
        if below > (1 - confidence) / 2:
            break
        inside += 1
    return Spread(
        median=median(ordered),
        low=ordered[inside],
        high=ordered[n - 1 - inside],
        least=ordered[0],
        most=ordered[-1],
        count=n,
    )
