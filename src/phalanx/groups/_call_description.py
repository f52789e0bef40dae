"""Calls, tensors, dtypes and reduce operations as text, for messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch


class RankCall(NamedTuple):
    """The call of one rank, for messages about mismatches."""

    rank: int
    what: str
    site: str

    def __str__(self) -> str:
        return f"rank {self.rank} called {self.what} at {self.site}"


def describe(dtype: torch.dtype, shape: Sequence[int]) -> str:
    """Format a tensor: ``float32[10, 3]``."""
    return f"{dtype_name(dtype)}{list(shape)}"


def dtype_name(dtype: torch.dtype) -> str:
    """Format a dtype: ``float32``."""
    return str(dtype).removeprefix("torch.")


def op_name(op: object) -> str:
    """Format a reduce operation: ``SUM``."""
    return str(op).rpartition(".")[2]
