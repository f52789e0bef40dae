"""What an entry declares, and where entries are found."""

from __future__ import annotations

import difflib
import importlib
import itertools
import pkgutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from phalanx.errors import InvalidArgument

from .stats import Compare

__all__ = [
    "Absent",
    "Aim",
    "Case",
    "Competitors",
    "Counted",
    "Entry",
    "SelfTimed",
    "entry",
    "find",
    "names",
]

Value = int | float | str


@dataclass(frozen=True)
class SelfTimed:
    """A competitor that keeps the clock itself, because not all that it does is to be timed."""

    run: Callable[[int], float]
    """Makes so many calls and returns the seconds that they took together."""
    calls: int | None = None
    """How many calls to make in a round, if that need not be found out first."""


@dataclass(frozen=True)
class Counted:
    """A competitor of whose calls it is also told how many bytes each makes a rank send."""

    call: Callable[[], object]


@dataclass(frozen=True)
class Absent:
    """A competitor that cannot take part here; all ranks say so, or none."""

    why: str


Competitor = Callable[[], object] | SelfTimed | Counted | Absent
"""A plain callable is called again and again."""

Competitors = Mapping[str, Competitor]
"""What is timed, by name."""


@dataclass(frozen=True)
class Aim:
    """A bound on a competitor's comparison with the peer, or on its time where there is none."""

    competitor: str
    at_most: float | None = None
    at_least: float | None = None
    where: Mapping[str, Value] = field(default_factory=dict)
    """The parameters, ``ranks`` among them, of the cases that it is for; all by default."""
    against: str | None = None
    """The peer that it is about, if not the entry's."""
    compare: Compare | None = None
    """How to compare with the peer, if not as the entry does."""

    def __post_init__(self) -> None:
        assert (self.at_most is None) != (self.at_least is None), "one bound, and one only"

    def covers(self, case: Case) -> bool:
        """Tell whether the aim is for this case."""
        return self.where.items() <= case.labels.items()


@dataclass(frozen=True)
class Case:
    """One point of an entry's grid."""

    ranks: int
    params: Mapping[str, Value]

    @property
    def labels(self) -> dict[str, Value]:
        """Tell what tells the case apart from others."""
        return {"ranks": self.ranks, **self.params}


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A question, and the competitors that answer it."""

    setup: Callable[..., Iterator[Competitors]]
    title: str
    ranks: Sequence[int] = (1,)
    grid: Mapping[str, Sequence[Value]] = field(default_factory=dict)
    peer: str | None = None
    """The competitor that the others are held against."""
    compare: Compare = Compare.SPEED
    aims: Sequence[Aim] = ()
    repeats: int = 30
    """In how many rounds every competitor is timed."""
    process_sets: int = 1
    """Over how many sets of processes the rounds are divided, each started afresh: where something
    happens to lie in memory makes a difference of some percent that no repetition shows."""
    seconds: float = 0.05
    """How long a competitor is timed in one round, at least."""

    @property
    def module(self) -> str:
        """Tell the module that the entry is in."""
        return self.setup.__module__

    @property
    def name(self) -> str:
        """Tell what to call the entry on the command line."""
        return self.module.rpartition(".")[2]

    def cases(self, *, quick: bool = False) -> list[Case]:
        """List the points of the grid; a quick run has only the first value of each parameter."""
        grid = [values[:1] if quick else values for values in self.grid.values()]
        points = [dict(zip(self.grid, point, strict=True)) for point in itertools.product(*grid)]
        return [Case(ranks, point) for ranks in self.ranks for point in points]


def entry(**declared: Any) -> Callable[[Callable[..., Iterator[Competitors]]], Entry]:
    """Make an entry of a generator function that sets its competitors up; see `Entry`."""
    return lambda setup: Entry(setup=setup, **declared)


def names() -> list[str]:
    """List the entries that there are."""
    from . import entries

    return sorted(module.name for module in pkgutil.iter_modules(entries.__path__))


def find(name: str) -> Entry:
    """Find an entry by its name."""
    known = names()
    if name not in known:
        close = difflib.get_close_matches(name, known, 1)
        hint = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(known)}"
        raise InvalidArgument(f"there is no benchmark {name!r}: {hint}")
    return load(f"{__package__}.entries.{name}")


def load(module: str) -> Entry:
    """Import the module of an entry and return the entry."""
    found = importlib.import_module(module)
    (only,) = [value for value in vars(found).values() if isinstance(value, Entry)]
    return only
