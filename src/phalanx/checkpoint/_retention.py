"""Retention: which checkpoints of a directory are kept, and why. Torch-free.

A damaged checkpoint does not count as one of the last, and is never removed: it may be worth
rescuing. The newest one that counts is known to be good.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass

from ..errors import CheckpointNotFound, InvalidArgument, InvalidType
from ._step_directory import StepDirectory
from ._verify import verify


@dataclass(frozen=True)
class RetentionPolicy:
    """How much is kept: the last ones, and every one whose step is a multiple."""

    last: int
    every: int | None = None

    def __post_init__(self) -> None:
        if _check_integer("keep_last", self.last) < 1:
            raise InvalidArgument(f"keep_last is {self.last}: at least the last one is kept")
        if self.every is not None and _check_integer("keep_every", self.every) < 0:
            raise InvalidArgument(f"keep_every is {self.every}; it cannot be negative")

    def marks(self, step: int) -> bool:
        """Tell whether a step is kept for its number."""
        return bool(self.every and step % self.every == 0)


def _check_integer(name: str, number: object) -> int:
    try:
        return operator.index(number)  # type: ignore[arg-type]
    except TypeError:
        raise InvalidType(f"{name} is a whole number, not {number!r}") from None


@dataclass(frozen=True)
class RetentionDecision:
    """What becomes of a checkpoint."""

    step: int
    kept: str | None
    """Why it is kept; None if it goes."""


def prune(
    shelf: StepDirectory,
    keep: RetentionPolicy,
    *,
    written: int | None = None,
    dry_run: bool = False,
) -> list[RetentionDecision]:
    """Remove what need not be kept, and say what became of every checkpoint.

    What is damaged does not count as one of the last, and somebody may want to rescue it. The
    newest one that counts is known to be good: it was `written` just now, or all of it is read.
    """
    verdicts: list[RetentionDecision] = []
    good = 0
    for step in reversed(shelf.steps()):
        if good == keep.last and keep.marks(step):
            why: str | None = f"every {keep.every}"
        elif _is_damaged(shelf, step, is_trusted=good > 0 or _is_at_or_after(step, written)):
            why = "damaged"
        elif good < keep.last:
            good += 1
            why = "the last one" if keep.last == 1 else f"one of the last {keep.last}"
        else:
            why = _remove_unless_blocked(shelf, step, dry_run=dry_run)
        verdicts.append(RetentionDecision(step, why))
    return verdicts[::-1]


def _is_at_or_after(step: int, written: int | None) -> bool:
    return written is not None and step >= written


def _is_damaged(shelf: StepDirectory, step: int, *, is_trusted: bool) -> bool:
    """Tell whether a checkpoint cannot be whole; of one that is trusted, no data is read."""
    if shelf.damage(step) is not None:
        return True
    try:
        return not is_trusted and bool(verify(shelf.place(step)))
    except (CheckpointNotFound, OSError):
        return True


def _remove_unless_blocked(shelf: StepDirectory, step: int, *, dry_run: bool) -> str | None:
    """Remove a checkpoint, unless something is against it."""
    try:
        obstacle = shelf.obstacle(step)
    except FileNotFoundError:
        return None  # somebody else has removed it
    if obstacle is not None or dry_run:
        return obstacle
    return None if shelf.remove(step) else "it is being read"
