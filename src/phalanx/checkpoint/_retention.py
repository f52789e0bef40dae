"""Retention: which checkpoints of a directory are kept, and why. Torch-free.

A damaged checkpoint does not count as one of the last, and is never removed: it may be worth
rescuing. The newest one that counts is known to be good.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import CheckpointNotFound, InvalidArgument
from ._step_directory import StepDirectory
from ._types import check_integer
from ._verify import verify


@dataclass(frozen=True)
class RetentionPolicy:
    """Keep the last checkpoints, and those whose step is a multiple of `every`."""

    last: int
    every: int | None = None

    def __post_init__(self) -> None:
        if check_integer("keep_last", self.last) < 1:
            raise InvalidArgument(f"keep_last must be at least 1, got {self.last}")
        if self.every is not None and check_integer("keep_every", self.every) < 0:
            raise InvalidArgument(f"keep_every must not be negative, got {self.every}")


@dataclass(frozen=True)
class RetentionDecision:
    """What happens to a checkpoint."""

    step: int
    kept: str | None
    """Why it is kept; None if it is removed."""


def prune(
    directory: StepDirectory,
    policy: RetentionPolicy,
    *,
    written: int | None = None,
    dry_run: bool = False,
) -> list[RetentionDecision]:
    """Remove checkpoints that the policy does not keep, and return the decision on each.

    The newest checkpoint that counts as good is either the one `written` just now, or all of its
    data is read and verified.
    """
    decisions: list[RetentionDecision] = []
    good = 0
    for step in reversed(directory.steps()):
        is_trusted = good > 0 or (written is not None and step >= written)
        why: str | None
        if good == policy.last and policy.every and step % policy.every == 0:
            why = f"every {policy.every}"
        elif _is_damaged(directory, step, is_trusted=is_trusted):
            why = "damaged"
        elif good < policy.last:
            good += 1
            why = "the last one" if policy.last == 1 else f"one of the last {policy.last}"
        else:
            why = _remove_unless_blocked(directory, step, dry_run=dry_run)
        decisions.append(RetentionDecision(step, why))
    return decisions[::-1]


def _is_damaged(directory: StepDirectory, step: int, *, is_trusted: bool) -> bool:
    """Whether a checkpoint is damaged. The data of a trusted one is not read."""
    if directory.damage(step) is not None:
        return True
    try:
        return not is_trusted and bool(verify(directory.path_of(step)))
    except (CheckpointNotFound, OSError):
        return True


def _remove_unless_blocked(directory: StepDirectory, step: int, *, dry_run: bool) -> str | None:
    """Remove a checkpoint; return why not, if it stays."""
    try:
        obstacle = directory.obstacle(step)
    except FileNotFoundError:
        return None  # another process has removed it
    if obstacle is not None or dry_run:
        return obstacle
    return None if directory.remove(step) else "it is being read"
