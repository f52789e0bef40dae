"""Where the largest elements are."""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["largest"]

_MANY = 1 << 16
"""From how many on a sample is worth its while."""
_STRIDE = 251
"""One in so many is in the sample; a prime, for rows of matrices are often multiples of others."""


def largest(values: Tensor, count: int) -> Tensor:
    """Find the places of the `count` elements that are farthest from zero; NaN is farther.

    A sample tells how large they are at least, more or less. It is enough to search among those
    that are as large, unless they are too few.
    """
    magnitudes = values.abs()
    if values.device.type == "cpu" and len(values) >= max(4 * count, _MANY):
        expected = count / _STRIDE
        more = int(expected + 4 * math.sqrt(expected)) + 1
        least = torch.topk(magnitudes[::_STRIDE], more).values[-1]
        places = (magnitudes < least).logical_not_().nonzero().view(-1)
        if len(places) >= count:
            return places[torch.topk(magnitudes[places], count, sorted=False).indices]
    return torch.topk(magnitudes, count, sorted=False).indices
