"""Which checkpoints of a folder are kept, and why."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import InvalidArgument
from ._shelf import Shelf

__all__ = ["Keep", "Verdict", "prune"]


@dataclass(frozen=True)
class Keep:
    """How much is kept: the last ones, and every one whose step is a multiple."""

    last: int
    every: int | None = None

    def __post_init__(self) -> None:
        if self.last < 1:
            raise InvalidArgument(f"keep_last is {self.last}: at least the last one is kept")
        if self.every is not None and self.every < 0:
            raise InvalidArgument(f"keep_every is {self.every}; it cannot be negative")

    def marks(self, step: int) -> bool:
        """Tell whether a step is kept for its number."""
        return bool(self.every and step % self.every == 0)


@dataclass(frozen=True)
class Verdict:
    """What becomes of a checkpoint."""

    step: int
    kept: str | None
    """Why it is kept; None if it goes."""


def prune(shelf: Shelf, keep: Keep, *, dry_run: bool = False) -> list[Verdict]:
    """Remove what need not be kept, and say what became of every checkpoint.

    What is damaged does not count as one of the last, and somebody may want to rescue it.
    """
    verdicts: list[Verdict] = []
    good = 0
    for step in reversed(shelf.steps()):
        if good == keep.last and keep.marks(step):
            why: str | None = f"every {keep.every}"
        elif shelf.damage(step) is not None:
            why = "damaged"
        elif good < keep.last:
            good += 1
            why = "the last one" if keep.last == 1 else f"one of the last {keep.last}"
        else:
            why = _dismiss(shelf, step, dry_run=dry_run)
        verdicts.append(Verdict(step, why))
    return verdicts[::-1]


def _dismiss(shelf: Shelf, step: int, *, dry_run: bool) -> str | None:
    """Remove a checkpoint, unless something is against it."""
    try:
        obstacle = shelf.obstacle(step)
    except FileNotFoundError:
        return None  # somebody else has removed it
    if obstacle is not None or dry_run:
        return obstacle
    return None if shelf.remove(step) else "it is being read"
