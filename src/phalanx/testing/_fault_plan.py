"""`FaultPlan`: failures to inject from outside at given times.

A plan is saved as a trace that people can write too: a line per failure, with its time in seconds
and, if wanted, the rank and the action::

    seconds,rank,action
    4.2
    7.5,1
    9.0,0.73,stop:0.5

A rank with a decimal point is a share of the list of living workers, from 0.0 up to 1.0: 0.73 of
three workers is the last one. A random plan has these, since nobody knows in advance which workers
will be alive.
"""

from __future__ import annotations

import csv
import math
import os
import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ..errors import InvalidArgument
from ._actions import ACTIONS, Action, kill

_HEADER = "seconds,rank,action"


@dataclass(frozen=True, kw_only=True)
class PlannedFailure:
    """One failure of a `FaultPlan`."""

    at: float
    """Seconds after the first worker became a member of the run."""
    action: Action
    rank: int | None = None
    """The rank of the worker, as the launcher numbers ranks; None to choose one by `share`."""
    share: float = 0.0
    """Which of the living workers: from 0, the first, up to 1."""

    def __post_init__(self) -> None:
        if not 0 <= self.at < math.inf or not 0 <= self.share < 1:
            raise InvalidArgument(
                "a failure needs a finite at >= 0 and 0 <= share < 1, got "
                f"{self.at} and {self.share}"
            )
        if self.rank is not None and (not isinstance(self.rank, int) or self.rank < 0):
            raise InvalidArgument(f"rank must be an integer >= 0 or None, got {self.rank!r}")
        if not ACTIONS[self.action.name].is_external:
            external = [name for name, kind in ACTIONS.items() if kind.is_external]
            raise InvalidArgument(
                f"{self.action.name} cannot be done to a worker from outside; use "
                f"{', '.join(external)}, or a Fault"
            )

    def __str__(self) -> str:
        # A share has a decimal point, by which it is told from a rank.
        where = float(self.share) if self.rank is None else self.rank
        return f"{float(self.at)!r},{where!r},{self.action}"


@dataclass(frozen=True)
class FaultPlan:
    """Failures to inject into a run from outside, in order of time."""

    failures: tuple[PlannedFailure, ...]

    @classmethod
    def random(
        cls,
        seed: int,
        *,
        mean_time_between_failures: float,
        count: int,
        actions: Mapping[Action, float] | None = None,
    ) -> FaultPlan:
        """Draw a plan from a seed; equal arguments give equal plans.

        Args:
            seed: of the generator.
            mean_time_between_failures: in seconds; the gaps are distributed exponentially.
            count: how many failures.
            actions: the weight of each action, at least 0 and of one more than 0; only kills by
                default.
        """
        if not 0 < mean_time_between_failures < math.inf or count < 0:
            raise InvalidArgument(
                "mean_time_between_failures must be positive and finite, and count at least 0, got "
                f"{mean_time_between_failures} and {count}"
            )
        weights = {kill(): 1.0} if actions is None else dict(actions)
        if not all(0 <= each < math.inf for each in weights.values()) or not any(weights.values()):
            given = ", ".join(f"{action}: {weight}" for action, weight in weights.items())
            raise InvalidArgument(
                "actions must have finite weights >= 0, and one > 0, got " + (given or "no actions")
            )
        generator = random.Random(seed)
        now, failures = 0.0, []
        for _ in range(count):
            now += generator.expovariate(1 / mean_time_between_failures)
            (action,) = generator.choices(list(weights), list(weights.values()))
            failures.append(PlannedFailure(at=now, action=action, share=generator.random()))
        return cls(tuple(failures))

    @classmethod
    def from_trace(cls, path: str | os.PathLike[str], *, seed: int = 0) -> FaultPlan:
        """Read a plan from a text file with the times of failures in seconds.

        Each line has a time and, separated by commas, optionally a rank and an action; without
        them, a worker chosen by `seed` is killed. Empty lines, comments after ``#`` and a header,
        which can only be the first line, are ignored.

        Raises:
            InvalidArgument: if a line is something else; it names the line.
        """
        generator = random.Random(seed)
        text = Path(path).read_text(encoding="utf-8-sig")  # spreadsheets write a byte order mark
        lines = [line.partition("#")[0] for line in text.splitlines()]
        failures: list[PlannedFailure] = []
        for number, cells in enumerate(csv.reader(lines), 1):
            is_header = number == 1 and _is_header(cells)
            if is_header or not any(each.strip() for each in cells):
                continue
            try:
                failures.append(_parse_failure(cells, share=generator.random()))
            except ValueError as error:
                raise InvalidArgument(f"{os.fspath(path)}:{number}: {error}") from error
        return cls(tuple(sorted(failures, key=lambda each: each.at)))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as a trace, from which `from_trace` makes an equal plan."""
        Path(path).write_text("".join(f"{each}\n" for each in (_HEADER, *self.failures)))


def _is_header(cells: list[str]) -> bool:
    first = cells[0].strip() if cells else ""
    try:
        float(first)  # which also nan and inf are
    except ValueError:
        # A mistyped time is not a header.
        return first != "" and first[0] not in "+-.0123456789"
    return False


def _parse_failure(cells: list[str], *, share: float) -> PlannedFailure:
    at, where, what = [*(each.strip() for each in cells), "", ""][:3]
    if len(cells) > 3:
        raise InvalidArgument(f"expected at most {_HEADER}, got {len(cells)} columns")
    if where.isdecimal():
        rank, share = int(where), 0.0
    else:
        rank, share = None, float(where or share)
    action = Action.parse(what) if what else kill()
    return PlannedFailure(at=float(at), action=action, rank=rank, share=share)
