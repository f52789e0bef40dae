"""Rebalancing micro-batches by measured speed, and which rank runs missing ones again.

The equal division is that of `phalanx.ddp._summation_tree.SummationPlan`.

Every rank reports its time per micro-batch in every step; all ranks compute the same division from
the same numbers. The bits do not depend on the division.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

SMOOTHING = 0.2  # the weight of the last step in the mean
LEAST_GAIN = 0.1
"""Ranks change their shares, and fetch other data, only for steps that are shorter by this part."""


class Rebalancing:
    """The speeds of the ranks of one group, and their shares of the micro-batches."""

    def __init__(self, leaves: int, shares: Sequence[int]) -> None:
        self._leaves = leaves
        self.shares = list(shares)
        self._seconds: list[float] = []  # of a micro-batch, a moving mean by rank

    def update(self, seconds: Sequence[float]) -> bool:
        """Take the seconds per micro-batch of a step, by rank; return whether shares changed."""
        if not self._seconds:
            self._seconds = list(seconds)
            return False
        pairs = zip(self._seconds, seconds, strict=True)
        self._seconds = [old + SMOOTHING * (new - old) for old, new in pairs]
        shares = divide_by_speed(self._leaves, self._seconds)
        if self._step_time(shares) > (1 - LEAST_GAIN) * self._step_time(self.shares):
            return False
        self.shares = shares
        return True

    def _step_time(self, shares: Sequence[int]) -> float:
        return max(count * each for count, each in zip(shares, self._seconds, strict=True))


def divide_by_speed(leaves: int, seconds: Sequence[float]) -> list[int]:
    """Return how many leaves each rank gets, at least one, so that the last is done earliest."""
    shares = [1] * len(seconds)
    for _ in range(leaves - len(seconds)):
        # The next leaf goes to the rank that would be done with it first.
        ends = [(count + 1) * each for count, each in zip(shares, seconds, strict=True)]
        shares[ends.index(min(ends))] += 1
    return shares


def share_of(numbers: Sequence[int], rank: int, size: int) -> list[range]:
    """Return a rank's share of some numbers in ascending order, as ranges."""
    first, last = (len(numbers) * each // size for each in (rank, rank + 1))
    runs = groupby(enumerate(numbers[first:last]), key=lambda pair: pair[1] - pair[0])
    found = [[number for _, number in run] for _, run in runs]
    return [range(run[0], run[-1] + 1) for run in found]
