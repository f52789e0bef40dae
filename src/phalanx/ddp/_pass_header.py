"""The header of a backward pass: numbers that travel behind the last bucket's gradients.

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

PASS_NUMBER, WEIGHT, UNUSED, LATE, GRAPH_CHANGED, ADDS_PREVIOUS, FINGERPRINT = range(7)
TIMES_START = FINGERPRINT + 3  # of a row: forward, backward, then bucket arrivals
FIXED_FIELDS = TIMES_START + 2
DIGIT_BITS = 20  # bits of a fingerprint in one number; float32 holds 24 exactly
PASS_NUMBER_CYCLE = 1 << 20
"""Pass numbers start again at 1 after this one, so that float32 holds them exactly."""
NO_WEIGHT = -1.0
NO_DATA = -2.0  # the weight of a rank without data, whose peers may or may not use weights
HEADER_DTYPES = {torch.float32: ctypes.c_float, torch.float64: ctypes.c_double}
"""Dtypes that hold the counts and times of a header exactly enough, and their C types."""


class PassHeader:
    """The numbers behind the gradients of the last bucket."""

    def __init__(self, space: Tensor, rank: int, size: int, parameters: int, buckets: int) -> None:
        self.space = space  # the end of the last bucket, which is reduced with it
        self._host = space if space.device.type == "cpu" else torch.empty_like(space, device="cpu")
        kind: Any = HEADER_DTYPES[space.dtype]
        self._numbers = (kind * space.numel()).from_address(self._host.data_ptr())
        self._width = FIXED_FIELDS + buckets
        self._rows_end = size * self._width
        self._mine = rank * self._width
        self._used = slice(self._rows_end, self._rows_end + parameters)
        self._late = slice(self._rows_end + parameters, self._rows_end + 2 * parameters)
        self._blank = (kind * space.numel())()
        self._blank[self._used] = [1.0] * parameters
        self._divisor = 1

    @staticmethod
    def numel(size: int, parameters: int, buckets: int) -> int:
        """Return how many numbers a header has."""
        return size * (FIXED_FIELDS + buckets) + 2 * parameters

    def write(
        self,
        pass_number: int,
        weight: float,
        fingerprint: int,
        times: Sequence[float],
        *,
        unused: Collection[int],
        late: Collection[int],
        graph_changed: bool,
        adds_previous: bool,
    ) -> None:
        """Write this rank's row and counts; `unused` and `late` are indices of parameters."""
        ctypes.memmove(self._numbers, self._blank, ctypes.sizeof(self._blank))
        digits = [(fingerprint >> i * DIGIT_BITS) % (1 << DIGIT_BITS) for i in range(3)]
        counts = len(unused), len(late), graph_changed, adds_previous
        row = [pass_number, weight, *counts, *digits, *times]
        self._numbers[self._mine : self._mine + self._width] = row
        for i in unused:
            self._numbers[self._used.start + i] = 0.0
        for i in late:
            self._numbers[self._late.start + i] = 1.0
        if self._host is not self.space:
            self.space.copy_(self._host)

    def receive(self, pass_number: int) -> None:
        """Prepare for reading after the reduction of this rank's pass."""
        if self._host is not self.space:
            self._host.copy_(self.space)
        mine = self._numbers[self._mine + PASS_NUMBER]
        # A group that takes means has divided by the number of participants, which only it knows.
        self._divisor = round(pass_number / mine) if mine else 1

    def _column(self, field: int) -> list[float]:
        """Return one field of all rows, not yet multiplied by the divisor."""
        column: list[float] = self._numbers[field : self._rows_end : self._width]
        return column

    def same_pass_number(self) -> bool:
        pass_numbers = self._column(PASS_NUMBER)
        return pass_numbers.count(pass_numbers[0]) == len(pass_numbers)

    def pass_numbers(self) -> list[int]:
        """Return the pass number of each rank; 0 for a rank that did not take part."""
        return [round(number * self._divisor) for number in self._column(PASS_NUMBER)]

    def weights(self) -> list[float]:
        """Return the weight of each rank; 0 for a rank without data."""
        return [max(0.0, weight * self._divisor) for weight in self._column(WEIGHT)]

    def with_data(self) -> list[int]:
        """List the ranks that have data."""
        rows = enumerate(zip(self._column(PASS_NUMBER), self._column(WEIGHT), strict=True))
        return [r for r, (number, weight) in rows if number and weight * self._divisor != NO_DATA]

    def without_weight(self) -> list[int]:
        """List the ranks that have data and no weight."""
        column = self._column(WEIGHT)
        return [r for r, weight in enumerate(column) if weight * self._divisor == NO_WEIGHT]

    def any_graph_changed(self) -> bool:
        return any(self._column(GRAPH_CHANGED))

    def any_adds_previous(self) -> bool:
        """Whether any rank will add earlier reduced gradients to the result of this pass."""
        return any(self._column(ADDS_PREVIOUS))

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
        digits = zip(*(self._column(FINGERPRINT + i) for i in range(3)), strict=True)
        present = zip(self._column(PASS_NUMBER), digits, strict=True)
        return len({fingerprint for number, fingerprint in present if number}) == 1

    def times(self) -> list[list[float]]:
        """Return every rank's times: forward, backward, and when each bucket was ready."""
        starts = range(TIMES_START, self._rows_end, self._width)
        times = (self._numbers[start : start + self._width - TIMES_START] for start in starts)
        return [[time * self._divisor for time in row] for row in times]
