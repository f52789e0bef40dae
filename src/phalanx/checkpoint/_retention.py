"""Retention: which checkpoints of a directory are kept, and removing the others.

A damaged checkpoint does not count as one of the last, and is never removed: it may be worth
rescuing. The newest one that counts is known to be good. Torch-free.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ..errors import InvalidArgument
from ._checkpoint_directory import CheckpointDirectory
from ._types import check_integer


@dataclass(frozen=True)
class RetentionPolicy:
    """Keep the last checkpoints, and those whose step is a multiple of `every`."""

    last: int
    every: int | None = None

    def __post_init__(self) -> None:
        if check_integer("keep_last", self.last) < 1:
            raise InvalidArgument(f"keep_last must be at least 1, got {self.last}")
        if self.every is not None and check_integer("keep_every", self.every) < 1:
            raise InvalidArgument(f"keep_every must be at least 1, got {self.every}")


class RetentionDecision(NamedTuple):
    step: int
    kept: str | None  # why it is kept; None if it is removed


def prune(
    directory: CheckpointDirectory,
    policy: RetentionPolicy,
    *,
    written: int | None = None,
    dry_run: bool = False,
) -> list[RetentionDecision]:
    """Remove checkpoints that the policy does not keep, and return the decision on each.

    The newest good checkpoint is the one `written` just now; without it, all data of the newest one
    is read and verified.
    """
    decisions: list[RetentionDecision] = []
    good = 0
    for step in reversed(directory.steps()):
        is_trusted = good > 0 or (written is not None and step >= written)
        why: str | None
        if good == policy.last and policy.every and step % policy.every == 0:
            why = f"multiple of {policy.every}"
        elif directory.is_damaged(step, read_data=not is_trusted):
            why = "damaged"
        elif good < policy.last:
            good += 1
            why = "the last one" if policy.last == 1 else f"one of the last {policy.last}"
        else:
            why = directory.obstacle(step)
            if why is None and not dry_run and not directory.remove(step):
                why = "it is being read"
        decisions.append(RetentionDecision(step, why))
    return decisions[::-1]
