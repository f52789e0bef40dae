"""The engines of a group whose own cannot go on without a rank: one for each set of members.

Whoever is left after a departure makes an engine of those, once; it is kept, for the same ranks
often run out of data first, epoch after epoch. All members of a set use its engine at the same
points, so they all let go of it at the same point, too.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ._engine import Engine, noting
from ._hall import Hall
from ._patient import PatientStore, PlainStore
from ._record import Call
from ._refusal import refuse
from ._regrouping import connect
from ._retired import guard, release
from .backends._narrowed import Narrowed, alone

if TYPE_CHECKING:
    from ._group import ProcessGroup

__all__ = ["Narrowing", "narrow", "narrowing_of", "tidy", "widen"]

KEPT = 4
"""Departures, from one return to the next, whose engines are kept for the next time."""


@dataclass
class _Kept:
    engine: Engine
    departure: int
    """Its number among those since everybody was a member, when it was made."""
    used: int
    """The last return before which it was used."""
    room: PlainStore | None
    """Where its ranks have met."""


class Narrowing:
    """What a group has of engines beside the one that it uses."""

    def __init__(self, group: ProcessGroup) -> None:
        self.full: Engine = group._engine
        """The one of all ranks."""
        self.hall = Hall(group._store, rank=group._rank, size=group._size)
        self.kept: dict[tuple[int, ...], _Kept] = {}
        self.returns = 0
        self.departures = 0


def narrowing_of(group: ProcessGroup) -> Narrowing:
    """Return a group's engines; most groups never need more than one."""
    if group._narrowing is None:
        group._narrowing = Narrowing(group)
    return group._narrowing


def narrow(group: ProcessGroup, members: tuple[int, ...], call: Call) -> None:
    """Go on among some ranks, all of which do this at the same point."""
    mine = narrowing_of(group)
    mine.departures += 1
    kept = mine.kept.get(members)
    if kept is None:
        single = len(members) == 1
        engine, room = (alone(), None) if single else connect(group, members, call)
        kept = _Kept(engine, mine.departures, mine.returns, room)
    elif hasattr(kept.engine, "set_timeout"):
        kept.engine.set_timeout(group.timeout)
    kept.used = mine.returns
    with group._order, group._state:
        if group._closed or group._health.failure is not None:
            refuse(group, call.operation)
        if members not in mine.kept:
            mine.kept[members] = kept
            guard(group._health, kept.engine)
        inner = noting(kept.engine, group._begun)
        group._use(Narrowed(mine.full, inner, members, group._size), members)
    # A long row of departures is not to use up what a process may open. What one rank lets go of
    # now is not needed again before all of them do.
    if not group._health.is_busy():
        _let_go(group, mine, lambda kept: KEPT < kept.departure < mine.departures - 1)


def widen(group: ProcessGroup) -> None:
    """Go on among all ranks; everybody has come back, and nothing is under way."""
    mine = group._narrowing
    if mine is None:
        return
    group._use(mine.full, None)
    mine.returns += 1
    mine.departures = 0


def tidy(group: ProcessGroup) -> None:
    """Let go of engines that are not worth keeping; everybody has come back."""
    mine = group._narrowing
    if mine is None:
        return
    _let_go(group, mine, lambda kept: kept.departure > KEPT or kept.used < mine.returns - 2)


def _let_go(group: ProcessGroup, mine: Narrowing, which: Callable[[_Kept], bool]) -> None:
    for members, kept in list(mine.kept.items()):
        if which(kept):
            del mine.kept[members]
            release(group._health, kept.engine)
            if kept.room is not None and group._rank == members[0]:
                _sweep(PatientStore(kept.room.raw))


def _sweep(room: PatientStore) -> None:
    """Take away what ranks have said to form an engine, but for what others may ask about."""
    with suppress(Exception):  # the store does not answer, and so has other troubles
        for key in room.all_keys():
            if key != "verdict":
                room.delete(key)
