"""Those who are left of a group get an engine of their own.

They meet in the group's store, as those of a split do: who they are is known, so rank 0 waits for
the others' words and everybody connects. Whatever goes wrong on the way ends the group, with a
cause that names ranks by the group's own numbers.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING

from ..errors import PeerLost, PhalanxError
from ._connecting import Connecting
from ._engine import Engine
from ._failure import Failure, Kind
from ._forming import Forming, Kin
from ._health import Health
from ._patient import PlainStore
from ._record import Call, user_site
from ._registry import find_backend
from ._telling import Terms
from ._words import first_line, runs

if TYPE_CHECKING:
    from ._group import ProcessGroup

__all__ = ["connect"]


def connect(group: ProcessGroup, ranks: Sequence[int], call: Call) -> tuple[Engine, PlainStore]:
    """Make an engine of some ranks of a group, all of which do this at the same point.

    Return the part of the store, too, that they have met in.
    """
    health, began = group._health, time.monotonic()
    try:
        return _connect(group, ranks)
    except PhalanxError as error:
        failure, reports = health.failure, None
        if failure is None and isinstance(error, PeerLost):
            failure = _lost(health, [ranks[place] for place in error.ranks], call)
        elif failure is None:
            late = time.monotonic() - began >= group._timeout
            reports = health.ask()
            mute = [rank for rank in ranks if rank in reports and reports[rank].operation is None]
            kind: Kind = "timeout" if late or mute else "engine"
            told = f"could not go on among ranks {runs(ranks)}: {first_line(error)}"
            failure = Failure(kind, health.rank, told, tuple(mute), call.what, call.sequence)
        raise health.error(health.fail(failure), None, call, reports) from error


def _connect(group: ProcessGroup, ranks: Sequence[int]) -> tuple[Engine, PlainStore]:
    backend, recipe, family = find_backend(group._backend), group._recipe, group._roster.members
    store, mine = group._store, list(ranks).index(group._rank)
    assert store is not None, "those who are not there do not leave"
    name = f"{group._name}/{runs(ranks)} left"
    timeout = timedelta(seconds=group._timeout)
    forming = _Regrouping(
        store,
        rank=mine,
        terms=Terms(name, tuple(ranks), backend.name, "", user_site()),
        timeout=timeout,
        kin=Kin(tuple(family[rank] for rank in ranks), next_turn=partial(group._count_split, name)),
    )
    forming.health = group._health
    connecting = Connecting(
        forming,
        make=lambda room: backend.factory(
            room, mine, len(ranks), timeout, recipe.device, **recipe.options
        ),
        offer=None,
        lends_store=True,
    )
    engine = connecting.run(lambda: None, background=backend.traits.connects_in_background)
    return engine, forming.room


class _Regrouping(Forming):
    """Forming that ends when the group does."""

    health: Health

    def look(self) -> None:
        """Raise if the engine cannot come about."""
        failure = self.health.failure
        if failure is not None:
            raise self.health.error(failure, None, None)
        super().look()


def _lost(health: Health, lost: list[int], call: Call) -> Failure:
    told = f"{health.name_all(lost)} {'is' if len(lost) == 1 else 'are'} dead"
    return Failure("lost", health.rank, told, tuple(lost), call.what, call.sequence)
