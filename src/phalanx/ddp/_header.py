"""What ranks tell each other in every backward pass, behind the gradients of the last bucket.

A row of numbers per rank, which only that rank fills, and two counts per parameter, to which every
rank adds. The reduction that the bucket goes through anyway brings each rank's row to all, and the
counts' sums: nothing of its own is sent. A row of another rank is zero here before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

__all__ = ["Header", "Row"]

FORWARD = 7  # where a row's times begin: in forward, in backward, then the arrivals of buckets
FIXED = FORWARD + 2
DIGIT = 20  # bits of a fingerprint that a number has; float32 has 24 exactly
CYCLE = 1 << 20
"""Backward passes are counted to this and over again, so that float32 has the count exactly."""
NO_WEIGHT = -1.0


@dataclass(frozen=True)
class Row:
    """What one rank says of its pass."""

    number: int
    weight: float
    unused: int
    late: int
    fingerprint: int = 0
    """60 bits of the parameters' values, in passes in which they are compared."""

    def numbers(self) -> list[float]:
        """Put it into numbers that come through a reduction exactly."""
        digits = [(self.fingerprint >> shift) % (1 << DIGIT) for shift in (0, DIGIT, 2 * DIGIT)]
        return [self.number, self.weight, self.unused, self.late, *digits]

    @classmethod
    def from_numbers(cls, numbers: list[float]) -> Row:
        """Read it again."""
        number, weight, unused, late, *digits = numbers
        whole = sum(round(digit) << DIGIT * place for place, digit in enumerate(digits))
        return cls(round(number), weight, round(unused), round(late), whole)


class Header:
    """The numbers behind the gradients of the last bucket."""

    def __init__(self, space: Tensor, *, rank: int, size: int, parameters: int, buckets: int):
        width = FIXED + buckets
        self._space = space
        self._rows = space[: size * width].view(size, width)
        self._mine = self._rows[rank]
        self._used = space[size * width :][:parameters]
        self._late = space[size * width + parameters :]
        self._blank = space.new_zeros(space.shape)
        self._blank[size * width :][:parameters] = 1
        self._factor = 1.0

    @staticmethod
    def room(*, size: int, parameters: int, buckets: int) -> int:
        """Tell how many numbers a header has."""
        return size * (FIXED + buckets) + 2 * parameters

    def write(
        self,
        row: Row,
        *,
        forward: float,
        backward: float,
        arrivals: Sequence[float],
        unused: Sequence[int],
        late: Sequence[int],
    ) -> None:
        """Fill this rank's part; times are in seconds, and parameters by their place among all."""
        self._space.copy_(self._blank)
        told = [*row.numbers(), forward, backward, *arrivals]
        self._mine.copy_(self._space.new_tensor(told))
        if unused:
            self._used[list(unused)] = 0
        if late:
            self._late[list(late)] = 1

    def read(self, divisor: int) -> list[Row]:
        """Tell what every rank said, given by how much the reduction has divided the sum of it."""
        self._factor = divisor
        return [Row.from_numbers(row) for row in (self._rows[:, :FORWARD] * divisor).tolist()]

    def used(self) -> list[bool]:
        """Tell of every parameter whether any rank used it."""
        return (self._used > 0).tolist()

    def late(self) -> list[int]:
        """List the parameters of which any rank has more than it could send."""
        return [i for i, count in enumerate(self._late.tolist()) if count > 0]

    def clocks(self) -> Tensor:
        """Copy every rank's times: in forward, in backward, and when each bucket was ready."""
        return self._rows[:, FORWARD:] * self._factor
