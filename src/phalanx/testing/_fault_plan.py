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
import os
import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ..errors import InvalidArgument
from ._actions import EXTERNAL, Action, kill

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
        if self.at < 0 or not 0 <= self.share < 1:
            raise InvalidArgument(
                f"a failure needs at >= 0 and 0 <= share < 1, got {self.at} and {self.share}"
            )
        if self.action.name not in EXTERNAL:
            raise InvalidArgument(
                f"{self.action.name} cannot be done to a worker from outside; use "
                f"{', '.join(EXTERNAL)}, or a Fault"
            )

    def __str__(self) -> str:
        return f"{self.at!r},{self.share if self.rank is None else self.rank!r},{self.action}"


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
            actions: the weight of each action; only kills by default.
        """
        if not mean_time_between_failures > 0 or count < 0:
            raise InvalidArgument(
                "mean_time_between_failures must be positive and count at least 0, got "
                f"{mean_time_between_failures} and {count}"
            )
        generator = random.Random(seed)
        weights = {kill(): 1.0} if actions is None else dict(actions)
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
        them, a worker chosen by `seed` is killed. Empty lines, comments after ``#`` and a header
        are ignored.
        """
        generator = random.Random(seed)
        lines = [text.partition("#")[0] for text in Path(path).read_text().splitlines()]
        failures: list[PlannedFailure] = []
        for number, cells in enumerate(csv.reader(lines), 1):
            is_header = not failures and cells and _to_float(cells[0]) is None
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


def _to_float(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


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
