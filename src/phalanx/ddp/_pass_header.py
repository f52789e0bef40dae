"""The header of a backward pass: what ranks exchange behind the last bucket's gradients.

It has one row of numbers per rank, written by that rank only, and two counts per parameter, to
which every rank adds. The reduction of the bucket delivers rows and counts, so the header needs
no call of its own. The row of a rank that has left the group stays zero; pass numbers start at
1.

The header is read and written as plain CPU memory: a torch operation on a few numbers would
cost as much as the rest of a pass. Every value must be exact in float32.
"""

from __future__ import annotations

import ctypes
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

NUMBER, WEIGHT, UNUSED, LATE, GRAPH_CHANGED, KEPT_REDUCED, DIGITS = range(7)
FORWARD = DIGITS + 3  # the times of a row begin here: forward, backward, then bucket arrivals
FIXED_FIELDS = FORWARD + 2
DIGIT_BITS = 20  # bits of a fingerprint in one number; float32 holds 24 exactly
PASS_NUMBER_CYCLE = 1 << 20
"""Pass numbers start again at 1 after this one, so that float32 holds them exactly."""
NO_WEIGHT = -1.0
NO_DATA = -2.0
"""The weight of a rank without data, whose peers may or may not use weights."""
HEADER_DTYPES = {torch.float32: ctypes.c_float, torch.float64: ctypes.c_double}
"""Dtypes that hold the counts and times of a header exactly enough, and their C types."""


class PassHeader:
    """The numbers behind the gradients of the last bucket."""

    def __init__(self, space: Tensor, rank: int, size: int, parameters: int, buckets: int) -> None:
        self.space = space
        """The end of the last bucket, which is reduced with it."""
        self._host = space if space.device.type == "cpu" else torch.empty_like(space, device="cpu")
        kind: Any = HEADER_DTYPES[space.dtype]
        self._numbers = (kind * space.numel()).from_address(self._host.data_ptr())
        self._width = FIXED_FIELDS + buckets
        self._rows = size * self._width
        self._mine = rank * self._width
        self._used = slice(self._rows, self._rows + parameters)
        self._late = slice(self._rows + parameters, self._rows + 2 * parameters)
        self._blank = (kind * space.numel())()
        self._blank[self._used] = [1.0] * parameters
        self._divisor = 1

    @staticmethod
    def room(size: int, parameters: int, buckets: int) -> int:
        """Return how many numbers a header has."""
        return size * (FIXED_FIELDS + buckets) + 2 * parameters

    def write(
        self,
        number: int,
        weight: float,
        fingerprint: int,
        times: Sequence[float],
        *,
        unused: Collection[int],
        late: Collection[int],
        graph_changed: bool,
        keeps_reduced: bool,
    ) -> None:
        """Write this rank's row and counts.

        `times`: seconds in forward and backward, and when each bucket was ready. `unused`, `late`:
        parameters by index.
        """
        ctypes.memmove(self._numbers, self._blank, ctypes.sizeof(self._blank))
        digits = [(fingerprint >> place * DIGIT_BITS) % (1 << DIGIT_BITS) for place in range(3)]
        counts = len(unused), len(late), graph_changed, keeps_reduced
        row = [number, weight, *counts, *digits, *times]
        self._numbers[self._mine : self._mine + self._width] = row
        for i in unused:
            self._numbers[self._used.start + i] = 0.0
        for i in late:
            self._numbers[self._late.start + i] = 1.0
        if self._host is not self.space:
            self.space.copy_(self._host)

    def receive(self, number: int) -> None:
        """Prepare for reading after the reduction; `number` is this rank's pass number."""
        if self._host is not self.space:
            self._host.copy_(self.space)
        mine = self._numbers[self._mine + NUMBER]
        # A group that takes means has divided by the number of participants, which only it knows.
        self._divisor = round(number / mine) if mine else 1

    def _column(self, field: int) -> list[float]:
        """Return one field of all rows, not yet multiplied by the divisor."""
        column: list[float] = self._numbers[field : self._rows : self._width]
        return column

    def same_number(self) -> bool:
        numbers = self._column(NUMBER)
        return numbers.count(numbers[0]) == len(numbers)

    def numbers(self) -> list[int]:
        """Return the pass number of each rank; 0 for a rank that did not take part."""
        return [round(number * self._divisor) for number in self._column(NUMBER)]

    def weights(self) -> list[float]:
        """Return the weight of each rank; 0 for a rank without data."""
        return [max(0.0, weight * self._divisor) for weight in self._column(WEIGHT)]

    def with_data(self) -> list[int]:
        """List the ranks that have data."""
        rows = enumerate(zip(self._column(NUMBER), self._column(WEIGHT), strict=True))
        return [r for r, (number, weight) in rows if number and weight * self._divisor != NO_DATA]

    def without_weight(self) -> list[int]:
        """List the ranks that have data and no weight."""
        column = self._column(WEIGHT)
        return [r for r, weight in enumerate(column) if weight * self._divisor == NO_WEIGHT]

    def any_graph_changed(self) -> bool:
        return any(self._column(GRAPH_CHANGED))

    def any_kept_reduced(self) -> bool:
        """Whether any rank will add earlier reduced gradients to the result of this pass."""
        return any(self._column(KEPT_REDUCED))

    def used(self) -> list[bool] | None:
        """Return for every parameter whether any rank has a gradient; None if all have."""
        if not any(self._column(UNUSED)):
            return None
        counts = zip(self._numbers[self._used], self._numbers[self._late], strict=True)
        return [used > 0 or late > 0 for used, late in counts]

    def late(self) -> list[int]:
        """List the parameters for which any rank has a late gradient."""
        if not any(self._column(LATE)):
            return []
        return [i for i, count in enumerate(self._numbers[self._late]) if count > 0]

    def same_fingerprints(self) -> bool:
        """Whether all participants have the same parameter values."""
        digits = zip(*(self._column(DIGITS + place) for place in range(3)), strict=True)
        present = zip(self._column(NUMBER), digits, strict=True)
        return len({fingerprint for number, fingerprint in present if number}) == 1

    def clocks(self) -> list[list[float]]:
        """Return every rank's times: forward, backward, and when each bucket was ready."""
        starts = range(FORWARD, self._rows, self._width)
        times = (self._numbers[start : start + self._width - FORWARD] for start in starts)
        return [[time * self._divisor for time in row] for row in times]
