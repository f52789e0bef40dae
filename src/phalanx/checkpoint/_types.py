"""Types that all of checkpointing shares: `RankInfo`, `STATE_DICT` and two protocols."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from ..errors import InvalidArgument

STATE_DICT: TypeAlias = dict[str, Any]
"""Nested dicts, lists and tuples of tensors, JSON-like values and objects with a ``state_dict``."""


@dataclass
class RankInfo:
    """Say which rank this is, and of how many."""

    global_rank: int
    """This rank's number among those that save and load together."""
    global_world_size: int
    """How many of them there are."""

    def __post_init__(self) -> None:
        if not 0 <= self.global_rank < self.global_world_size:
            raise InvalidArgument(
                f"rank {self.global_rank} of {self.global_world_size}: ranks are counted from 0"
            )


class BarrierLike(Protocol):
    """What the writer needs of a barrier; one that has `exchange` saves it small files."""

    def execute_barrier(self) -> None:
        """Wait until every rank has come."""


class Stateful(Protocol):
    """What may stand in a state by itself: a module, an optimizer, a data loader."""

    def state_dict(self) -> Any:
        """Return the state."""

    def load_state_dict(self, state_dict: Any) -> Any:
        """Take the state back."""
