"""How ranks, tensors and calls are written in messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch


class RankCall(NamedTuple):
    """What one rank called, for a message that names both sides."""

    rank: int
    what: str
    site: str

    def __str__(self) -> str:
        return f"rank {self.rank} called {self.what} at {self.site}"


def describe(dtype: torch.dtype, shape: Sequence[int]) -> str:
    """Tell a tensor in short: ``float32[10, 3]``."""
    return f"{dtype_name(dtype)}{list(shape)}"


def dtype_name(dtype: torch.dtype) -> str:
    """Tell an element type: ``float32``."""
    return str(dtype).removeprefix("torch.")


def op_name(op: object) -> str:
    """Tell a reduce operation: ``SUM``."""
    return str(op).rpartition(".")[2]


def first_line(error: Exception) -> str:
    """Tell an error without the stack trace that torch appends."""
    return str(error).partition("\n")[0]


def format_ranks(ranks: Sequence[int]) -> str:
    """Name ranks in a sentence: ``rank 2`` or ``ranks 1, 2``."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def format_rank_ranges(ranks: Sequence[int]) -> str:
    """Write ranks in short: ``0-3,7``."""
    parts: list[list[int]] = []
    for rank in ranks:
        if parts and rank == parts[-1][-1] + 1:
            parts[-1][1:] = [rank]
        else:
            parts.append([rank])
    return ",".join("-".join(map(str, part)) for part in parts)
