"""Integers, and tuples of them nested as deep as one likes, as users give them."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import SupportsIndex, TypeAlias

from ..errors import InvalidArgument, InvalidType

__all__ = ["IntTuple", "contiguous", "integers", "structure"]

IntTuple: TypeAlias = "SupportsIndex | tuple[IntTuple, ...]"


def integers(value: object, *, name: str, least: int) -> tuple[int, ...]:
    """Return the integers of a nested tuple, each of them at least `least`."""
    if isinstance(value, tuple):
        return tuple([each for part in value for each in integers(part, name=name, least=least)])
    number = value if type(value) is int else _index(value, name=name)
    if number < least:
        raise InvalidArgument(f"{name} has a {number}; each number has to be at least {least}")
    return (number,)


def structure(value: object) -> object:
    """Return something that is equal for tuples that are nested alike."""
    return tuple(map(structure, value)) if isinstance(value, tuple) else None


def contiguous(sizes: Sequence[int]) -> tuple[int, ...]:
    """Return the strides with which the last of several sizes runs fastest, without gaps."""
    return tuple([math.prod(sizes[position + 1 :]) for position in range(len(sizes))])


def _index(value: object, *, name: str) -> int:
    if not isinstance(value, SupportsIndex):
        raise InvalidType(f"{name} takes an integer or a tuple of integers, not {value!r}")
    return operator.index(value)
