"""What a block around uneven inputs can tell of itself when it is over."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["JoinReport"]


@dataclass(frozen=True)
class JoinReport:
    """How many steps each rank had data for, and when it had none any more."""

    steps: tuple[int, ...]
    """By rank. If the first joinable is one of torch's own classes, nobody counts the steps that
    all ranks have made, so that they are counted from where the first rank ran out."""
    seconds: tuple[float, ...]
    """By rank: from the block's beginning to the end of this rank's data."""

    @property
    def last_joiners(self) -> tuple[int, ...]:
        """Tell the ranks that nobody had more steps than."""
        most = max(self.steps)
        return tuple(rank for rank, steps in enumerate(self.steps) if steps == most)

    @property
    def idle(self) -> float:
        """Tell the share of all ranks' steps in which they had no data, of 1."""
        whole = max(self.steps) * len(self.steps)
        return 1 - sum(self.steps) / whole if whole else 0.0

    @property
    def idle_time(self) -> float:
        """Tell the share of all ranks' time in which they had no data, of 1."""
        whole = max(self.seconds) * len(self.seconds)
        return 1 - sum(self.seconds) / whole if whole else 0.0

    def __str__(self) -> str:
        ends = dict.fromkeys(self.last_joiners, "to the end")
        lines = [
            f"rank {rank}: {steps} steps, {ends.get(rank, 'out of data')} after {seconds:.2f} s"
            for rank, (steps, seconds) in enumerate(zip(self.steps, self.seconds, strict=True))
        ]
        return "\n".join([*lines, f"idle: {self.idle:.1%} of steps, {self.idle_time:.1%} of time"])

    @classmethod
    def of(cls, rows: Sequence[tuple[int, int, float]]) -> JoinReport:
        """Put together what ranks say: steps with data, steps made up for, and seconds."""
        total = max(steps + behind for steps, behind, _ in rows)
        # Who made up for steps knows how many it missed, even where nobody counts the others.
        shadows = any(behind for _, behind, _ in rows)
        counted = (total - behind if shadows else steps for steps, behind, _ in rows)
        return cls(tuple(counted), tuple(seconds for _, _, seconds in rows))
