"""Coming back: everybody is a member again.

The engine agrees on numbers and lets all in at once (``docs/design.md``, *Membership*). Here is
what a rank does meanwhile: it sleeps, and now and then looks whether somebody can never come.
"""

from __future__ import annotations

import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from .. import _faultpoints as faultpoints
from ..errors import GroupError, InvalidState
from . import _validate as validate
from ._failure import Failure, Kind
from ._membership import depart
from ._narrowing import narrowing_of, tidy, widen
from ._pending import Pending
from ._record import Call
from ._refusal import refuse
from ._words import ranks_text

if TYPE_CHECKING:
    from ._group import ProcessGroup

__all__ = ["rejoin"]

TURN = 0.5  # seconds between two looks around; a death, or an abort, ends a turn before
MOMENT = 0.01


def rejoin(group: ProcessGroup, timeout: timedelta | None) -> None:
    """Leave, unless this rank has, and become a member again together with all others."""
    seconds = group._timeout if timeout is None else validate.seconds(timeout)
    _reach("before")
    with group._state:
        if group._is_returning:
            raise InvalidState("rejoin: another thread of this rank is in it")
        group._is_returning = True
    try:
        if not group._is_away:
            depart(group, "rejoin")
        elif group._health.failure is not None:
            refuse(group, "rejoin")
        _reach("away")
        engine = group._engine if group._can_leave else narrowing_of(group).hall
        _Return(group, engine, seconds).run()
    finally:
        group._is_returning = False


class _Return(Pending):
    """One rank's way back into its group."""

    def __init__(self, group: ProcessGroup, engine: Any, seconds: float) -> None:
        self._group = group
        self._engine = engine
        self.timeout = seconds
        self._counts_from = 0.0
        if group._recorder.starting is not None:  # an interrupt came before `run` could wait
            group._recorder.undo(group._recorder.starting)
        # It takes a number like any collective: the one after the last that any rank has made.
        self.call: Call = group._recorder.begin("rejoin", [])

    def run(self) -> None:
        """Wait for all, and enter."""
        group, call = self._group, self.call
        group._health.waiting = call
        try:
            most = self._await_all()
        except BaseException:
            group._recorder.undo(call)
            raise
        finally:
            group._health.waiting = None
        with group._order, group._state:
            if not group._is_away:  # but closed meanwhile
                refuse(group, "rejoin")
            group._recorder.collectives = call.sequence = most
            group._recorder.starting = None
            call.ended = time.monotonic()
            group._announced = set()
            widen(group)
            group._reopen()
        tidy(group)
        _reach("after")

    @property
    def deadline(self) -> float:
        """When it is given up: so long after the last sign that somebody awaited goes on."""
        return max(self.call.started, self._counts_from) + self.timeout

    def _await_all(self) -> int:
        calls = self._group._recorder.collectives
        error: GroupError | None = None
        before = ""
        while True:
            began = time.monotonic()
            turn = min(TURN, max(self.deadline - began, 0.001)) if error is None else 0.0
            stage, most = self._engine.rejoin(calls, turn)
            if stage != before:
                error = None
                _reach(stage)
            if stage == "entered":
                return int(most)
            if stage == before:
                if error is not None:  # and nobody has come since it was found
                    raise error
                error = self._look()
                if error is None and time.monotonic() - began < MOMENT:  # an engine that was woken
                    time.sleep(MOMENT)
            before = stage

    def _look(self) -> GroupError | None:
        """Find out whether this cannot end well any more, or not in time."""
        group, health = self._group, self._group._health
        if not group._is_away:  # but closed
            refuse(group, "rejoin")
        board = group._board
        known = None if board is None else board.failure()
        if known is not None:
            health.fail(known, publish=False)
        closed = {} if board is None else board.left()
        if health.failure is None:
            self._look_for_dead(set(closed))
        failure = health.failure or self._closed_by(closed)
        if failure is not None:
            return health.error(failure, self, self.call)
        return None if time.monotonic() < self.deadline else self._overdue()

    def _overdue(self) -> GroupError | None:
        """Ask, only now, whether those who are awaited go on, and give up if they do not."""
        health, missing = self._group._health, self._engine.awaited()
        reports = health.ask()
        quiet = [r.quiet for r in reports.values() if r.rank in missing and r.quiet is not None]
        if quiet:
            self._counts_from = time.monotonic() - min(quiet)
        if time.monotonic() < self.deadline:
            return None
        who = f": {ranks_text(missing)} did not come, and made no call meanwhile" if missing else ""
        told = f"timed out after {self.timeout:g} s{who}{health.doubt()}"
        # The group is not broken by it: the others go on, and this rank may wait again.
        return health.error(self._failure("timeout", told, missing), self, self.call, reports)

    def _look_for_dead(self, closed: set[int]) -> None:
        """Fail the group if a rank is dead that has not come so far; what it did before counts."""
        health = self._group._health
        dead = health.dead() - closed
        if lost := sorted(
            dead and dead & set(self._engine.awaited())
        ):  # final, now that it is known
            told = f"{health.name_all(lost)} {'is' if len(lost) == 1 else 'are'} dead"
            health.fail(self._failure("lost", told, lost))

    def _closed_by(self, closed: dict[int, tuple[int, str]]) -> Failure | None:
        """Find a rank that has shut the group down, and so will not come."""
        for rank in sorted(closed and closed.keys() & set(self._engine.awaited())):
            told = f"rank {rank} shut the group down at {closed[rank][1]}"
            return self._failure("aborted", told, [rank])
        return None

    def _failure(self, kind: Kind, cause: str, ranks: list[int]) -> Failure:
        return Failure(kind, self._group._rank, cause, tuple(ranks), "rejoin", self.call.sequence)


def _reach(point: str) -> None:
    if faultpoints.armed:
        faultpoints.reach(f"rejoin:{point}")
