"""What the user says about how ranks hold a part of the state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["Alike", "PerRank", "Piece"]


@dataclass(frozen=True)
class Alike:
    """Mark a part of the state that all ranks hold alike, such as a data-parallel model.

    It is written once, each rank writing a share of it. That it really is alike is checked by
    samples only; state that is not marked at all is compared byte by byte.
    """

    value: Any


@dataclass(frozen=True)
class PerRank:
    """Mark a part of the state that each rank has its own of; nobody compares it."""

    value: Any


@dataclass(frozen=True)
class Piece:
    """Stand in for a tensor that is alike, with only the bytes that this rank is to write.

    `own_parts` makes them, so that an asynchronous save need not copy what others write.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    device: str
    start: int
    """The first byte of the tensor that is here."""
    stop: int
    """The byte after the last one that is here."""
    fingerprint: str
    """Of the whole tensor, to be compared among the ranks."""
    data: torch.Tensor | None
    """The bytes as a flat tensor of the same dtype; None if this rank writes none of it."""
