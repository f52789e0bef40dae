"""Who is missing, who is dead, and what to tell the user.

The waiting itself is `_work`'s. This is what a waiter does once a call is overdue, and what the
watcher does on behalf of a rank that nobody can ask.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from ..errors import GroupError, RankReport
from ._board import Board
from ._engine import EngineMismatch, PeerDead, is_about_peers
from ._failure import Failure, Kind
from ._pending import Pending
from ._record import Call, Recorder, describe_frame
from ._roster import Roster
from ._watch import INTERVAL
from ._words import Side, first_line, ranks_text, runs

__all__ = ["Health", "Reports", "mismatch"]

ANSWER_TIME = 3 * INTERVAL
"""Seconds that a healthy rank needs at most to answer a ring, with time to spare."""

AT_ONCE = 0.03
"""Seconds for the same after a death, which is told at once: whoever waits too answers by itself,
and the others are said to be busy."""

NEXT_QUESTION = 0.1
"""Seconds between two questions to the others about one overdue call."""

DIAGNOSIS_TIME = 3.0
"""Seconds to find out why an engine's connection broke before saying only that it did."""

MANY_IN_FLIGHT = 256
"""Calls that nobody waited for, before the finished ones among them are looked for."""

_MYSTERIES = frozenset({"timeout", "lost", "engine"})
"""Failures whose story the others' reports help to tell."""

Reports = dict[int, RankReport]

# Here every rank passes the same shape, so a different one is the cause of the hang.
_SYMMETRIC = frozenset({"allreduce", "broadcast", "reduce", "barrier", "allgather"})


class Health:
    """The state of one rank's membership in one group."""

    def __init__(
        self,
        *,
        name: str,
        rank: int,
        size: int,
        roster: Roster,
        board: Board | None,
        recorder: Recorder,
        streams: bool = False,
        lost_ranks: Callable[[], list[int]] | None = None,
        wake: Callable[[], None] | None = None,
        drive: Callable[[], None] | None = None,
        members: Callable[[], list[int]] | None = None,
    ) -> None:
        self.name = name
        self.rank = rank
        self.size = size
        self.closed = False
        """Whether this rank has ended its part; peers are told otherwise then."""
        self.streams = streams
        """Whether waiting orders a device's stream instead of blocking the caller."""
        self.failure: Failure | None = None
        self.waiting: Call | None = None
        self._roster = roster
        self._board = board
        self._recorder = recorder
        self._lost_ranks = lost_ranks or list[int]
        self._wake = wake or _nothing
        self._drive = drive or _nothing
        self._members = members
        self._forgotten: set[int] = set()
        self._owner = threading.get_ident()
        self._pid = os.getpid()
        # Over `failure`, which is set once, by whoever is first, and `_forgotten`.
        self._failing = threading.Lock()
        self._resume = _nothing
        self.half_begun = ""
        """A call that failed between two of its parts: ranks may have begun different ones."""
        self.parts_begun: list[object] = []
        """Keeps what the engine has got of it alive; nothing reads it."""
        self._futures: list[Pending] = []
        self.in_flight: dict[Call, Pending] = {}
        """Calls whose end nobody has seen yet."""

    # -- a call is overdue -----------------------------------------------------------------

    def look(self, pending: Pending, *, sure: bool = False) -> Failure | None:
        """Find out whether an overdue call can still succeed; None means wait on.

        `sure` says that the engine has failed already, so nothing can be on its way any more.
        """
        board = self._board
        if self.failure is not None or board is None:
            return self.failure
        now = time.monotonic()
        if not sure and now < pending.next_question and not self._needed(pending, self.dead()):
            return None
        pending.next_question = now + NEXT_QUESTION
        board.ring()
        known = board.failure()
        if known is not None:
            return self.fail(known, publish=False)
        return self._look_for_dead(pending, sure=sure) or self._look_for_left(pending)

    def timed_out(self, pending: Pending, *, after: float) -> tuple[Failure, Reports]:
        """Say who kept the call from ending in time, and what everybody is doing."""
        call, peer = pending.call, pending.peer
        reports = self._gather_reports()
        clash = None if call.transfer else self._clash(call, reports)
        if clash is not None:
            return clash, reports
        told = f"timed out after {after:g} s"
        missing = [] if call.transfer else self._missing(call, reports)
        missing = missing if peer is None else [peer]
        if missing:
            told += f": {ranks_text(missing)} did not take part"
        elif call.transfer:
            told += ": nobody sent anything"
        elif self.size > 1:
            told += " although every rank took part"
        told += self.doubt()
        return self._failure("timeout", told, tuple(missing), call), reports

    def doubt(self) -> str:
        """Tell, after what is said of others, if they may not have been heard."""
        if self._board is None or not self._board.trouble:
            return ""
        return f" (and {self._board.trouble})"

    def diagnose(self, pending: Pending, error: Exception) -> Failure:
        """Find the reason behind an engine's error."""
        if isinstance(error, EngineMismatch):
            return self._engines_clash(pending.call, error)
        until = time.monotonic() + (DIAGNOSIS_TIME if is_about_peers(error) else 0)
        while True:
            failure = self.look(pending, sure=True)
            if failure is not None:
                return failure
            if isinstance(error, PeerDead):  # which did its part for others, perhaps, but not here
                told = f"{self.name_all([error.rank])} is dead"
                return self._failure("lost", told, (error.rank,), pending.call)
            if time.monotonic() >= pending.deadline:
                return self.timed_out(pending, after=pending.timeout)[0]
            if time.monotonic() >= until:
                told = f"failed in its engine: {first_line(error)}"
                return self._failure("engine", told, (), pending.call)
            time.sleep(0.02)

    # -- the group fails -------------------------------------------------------------------

    def fail(self, failure: Failure, *, publish: bool = True) -> Failure:
        """Make `failure` the group's, unless it has failed already; returns what holds."""
        if self._is_over(failure):
            return failure
        if self.failure is None and publish and self._board is not None and self._is_the_rank():
            failure = self._board.fail(failure)
        with self._failing:
            if self._is_over(failure):
                return failure
            first = self.failure is None
            self.failure = holds = self.failure or failure
        if first:
            self._wake()
            if self._is_over(failure):  # the group went on before its calls were ended
                self._resume()
        return holds

    def _is_over(self, failure: Failure) -> bool:
        """Tell whether it is a death that the group has left behind, heard of late."""
        return failure.kind == "lost" and set(failure.ranks) <= self._forgotten

    def error(
        self,
        failure: Failure,
        pending: Pending | None,
        call: Call | None,
        reports: Reports | None = None,
    ) -> GroupError:
        """Make the error that this rank raises for `failure`."""
        if reports is None:
            asks = pending is not None and failure.kind in _MYSTERIES
            within = AT_ONCE if failure.kind == "lost" else ANSWER_TIME
            reports = self._gather_reports(within) if asks else {}
        reports.pop(self.rank, None)  # this rank's own part is told by the error itself
        return failure.error(group=self.name, rank=self.rank, call=call, reports=reports)

    def leave(self, site: str) -> None:
        """Tell the others that this rank takes part in nothing after its last call."""
        if self._board is None or not self._is_the_rank():
            return
        if self.failure is None:
            self._board.leave(sequence=self._recorder.collectives, site=site)
        else:  # which is what the others are to hear of
            self._board.close()

    def exit(self) -> None:
        """Tell the others that this rank's program has ended in good order."""
        if not self.closed and self.failure is None:
            self.leave("the end of its program")

    def _is_the_rank(self) -> bool:
        """Tell this process from a forked child, which must not speak for its parent."""
        return os.getpid() == self._pid

    # -- membership ------------------------------------------------------------------------

    def absent(self) -> set[int]:
        """List the ranks that take no part in what comes next."""
        if self._members is None or self.closed:
            return set()
        return set(range(self.size)) - set(self._members())

    def take_part(self, members: Sequence[int] | None) -> None:
        """Set who takes part in what comes next, where the engine does not know; None is all."""
        self._members = None if members is None else lambda: list(members)

    def go_on(self, without: set[int], forget: Callable[[int], None]) -> None:
        """Leave a failure behind that was the death of these ranks."""
        with self._failing:
            self._forgotten |= without
            if self._board is not None:
                self._board.turn_page(runs(sorted(self._forgotten)))
            self.failure = None

        def resume() -> None:
            for rank in sorted(self._forgotten):
                forget(rank)

        self._resume = resume
        resume()

    def is_forgotten(self, rank: int) -> bool:
        """Tell whether a rank was lost and is gone on without."""
        return rank in self._forgotten

    def settle_all(self) -> None:
        """Wait for every collective under way."""
        for work in list(self.in_flight.values()):
            work.settle()

    # -- calls under way -------------------------------------------------------------------

    def begun(self, call: Call, work: Pending) -> None:
        """Remember a call whose end nobody has seen yet."""
        self.in_flight[call] = work
        self.look_through()

    def look_through(self) -> None:
        """Forget the calls that have ended, if many are under way for all that is known."""
        if len(self.in_flight) > MANY_IN_FLIGHT:
            for known in list(self.in_flight.values()):
                known.is_completed()  # which forgets those that are

    def ended(self, call: Call) -> None:
        """Forget a call whose end was seen."""
        self.in_flight.pop(call, None)

    def is_busy(self) -> bool:
        """Tell whether the engine has calls under way, even if the group has given them up."""
        if not self._is_the_rank():
            return True  # they are the parent's, and so is the engine
        return any(not work.engine_is_done() for work in list(self.in_flight.values()))

    def let_go(self) -> None:
        """Forget the engine: the group is closed, and nothing is under way any more."""
        self._lost_ranks, self._wake, self._drive = list[int], _nothing, _nothing
        self._members = None
        self.in_flight.clear()

    def look_after(self, work: Pending) -> None:
        """Let the watcher see to it that the work's future ends."""
        self._futures.append(work)

    # -- the watcher calls -----------------------------------------------------------------

    def attend(self) -> None:
        """Answer whoever asks what this rank is doing."""
        board = None if self.closed else self._board
        if board is not None and board.answer(self.report) and self.failure is None:
            known = board.failure()
            if known is not None:
                self.fail(known, publish=False)
        self.drive()
        self.attend_futures()

    def drive(self) -> None:
        """Let an engine without a thread of its own get on with calls that nobody waits for."""
        for work in list(self.in_flight.values()):
            work.engine_is_done()
        self._drive()

    def attend_futures(self) -> None:
        """End the futures of calls that cannot succeed any more."""
        for work in list(self._futures):
            if work.attend_future():
                with suppress(ValueError):  # the watcher is not the only one who attends
                    self._futures.remove(work)

    def report(self) -> RankReport:
        """Tell what this rank is doing."""
        waiting, last = self.waiting, self._recorder.last
        call = waiting or last
        state = "failed" if self.failure else "waiting" if waiting else "idle"
        return RankReport(
            rank=self.rank,
            state=state,
            operation=None if call is None else call.what,
            sequence=None if call is None else call.sequence,
            site=None if call is None else call.site,
            here=describe_frame(sys._current_frames().get(self._owner)),
            collectives=self._recorder.collectives,
            quiet=None if last is None else last.age,
        )

    # -- inside ----------------------------------------------------------------------------

    def _failure(self, kind: Kind, cause: str, ranks: tuple[int, ...], call: Call) -> Failure:
        return Failure(
            kind=kind,
            by=self.rank,
            cause=cause,
            ranks=ranks,
            operation=call.what,
            sequence=call.sequence,
        )

    def _look_for_dead(self, pending: Pending, *, sure: bool = False) -> Failure | None:
        """Find ranks that died before they did their part; `sure` when the engine failed too."""
        assert self._board is not None
        dead = self._needed(pending, self.dead() - set(self._board.left()))
        # What a rank did before it ended may be seen only now: look once more.
        first, pending.has_dead_peer = not pending.has_dead_peer, bool(dead)
        if not dead or (first and not sure):
            return None
        who = self.name_all(dead)
        verb = "is" if len(dead) == 1 else "are"
        return self._failure("lost", f"{who} {verb} dead", tuple(dead), pending.call)

    def _look_for_left(self, pending: Pending) -> Failure | None:
        """Find ranks that shut down before this call, and will take no part in it."""
        assert self._board is not None
        left = self._board.left()
        call = pending.call
        gone = {rank for rank, (last, _) in left.items() if call.transfer or last < call.sequence}
        for rank in self._needed(pending, gone):
            cause = f"rank {rank} shut the group down at {left[rank][1]}"
            return self._failure("aborted", cause, (rank,), call)
        return None

    def _needed(self, pending: Pending, gone: set[int]) -> list[int]:
        """Of the ranks that are gone, list those without whom the call cannot end."""
        gone = gone - {self.rank} - self.absent()
        if pending.peer is not None:
            return sorted(gone & {pending.peer})
        others = self.size - 1 - len(self.absent() - {self.rank})
        if pending.call.transfer and len(gone) < others:
            return []  # a receive from anybody: one sender is enough
        return sorted(gone)

    def dead(self) -> set[int]:
        """List the other ranks that are provably dead."""
        return {*self._roster.dead(), *self._lost_ranks()} - {self.rank}

    def name_all(self, ranks: list[int]) -> str:
        """Name ranks together with their processes."""
        return " and ".join(f"rank {rank} ({self._whereabouts(rank)})" for rank in ranks)

    def _whereabouts(self, rank: int) -> str:
        member = self._roster.members[rank]
        return str(member) if member.is_dead else f"a thread of {member}"

    def ask(self) -> Reports:
        """Collect what every rank is doing, those who have left included."""
        board = self._board
        return {} if board is None else self._await_reports(board, board.ring(), ANSWER_TIME, set())

    def _gather_reports(self, within: float = ANSWER_TIME) -> Reports:
        """Collect what every rank is doing, allowing the watchers time to answer."""
        if self._board is None:
            return {}
        return self._await_reports(self._board, self._board.ring(), within, self.absent())

    def _await_reports(self, board: Board, ring: int, within: float, absent: set[int]) -> Reports:
        mute = {rank: RankReport(rank, "stopped") for rank in self._roster.stopped()}
        mute |= {rank: RankReport(rank, "dead") for rank in self.dead()}
        mute |= {rank: RankReport(rank, "left") for rank in absent - self.dead()}
        mute |= {rank: RankReport(rank, "left", site=at) for rank, (_, at) in board.left().items()}
        until = time.monotonic() + within
        while True:
            board.answer(self.report)  # this may be the watcher itself, and the others ask too
            reports = board.reports(since=ring) | mute
            silent = [rank for rank in range(self.size) if rank not in reports]
            if silent in ([], [self.rank]) or time.monotonic() >= until:
                break
            time.sleep(0.01)
        state = "busy" if within == AT_ONCE else "silent"
        return reports | {rank: RankReport(rank, state) for rank in silent}

    def _missing(self, call: Call, reports: Reports) -> list[int]:
        out = self.absent() | {self.rank}
        others = (report for rank, report in sorted(reports.items()) if rank not in out)
        return [r.rank for r in others if r.collectives is None or r.collectives < call.sequence]

    def _engines_clash(self, call: Call, error: EngineMismatch) -> Failure:
        """Name both sides of what the engine found; the other one's line is asked for."""
        known = None if self._board is None else self._board.failure()
        if known is not None:
            return known
        other = error.ranks[0] if error.ranks[1] == self.rank else error.ranks[1]
        report = self._gather_reports().get(other)
        what = report.operation if report is not None else None
        site = report.site if report is not None else None
        if report is not None and what is not None and report.sequence != call.sequence:
            what = f"something else before {what} #{report.sequence}"  # which it has come to since
        mine = Side(self.rank, call.what, call.site)
        return mismatch(mine, Side(other, what or "something else", site or "?"), call)

    def _clash(self, call: Call, reports: Reports) -> Failure | None:
        """See whether a peer is stuck in a different operation under the same number."""
        for rank, report in sorted(reports.items()):
            collective = not (report.operation or "").startswith(("send ", "recv"))
            waiting = report.state == "waiting" and collective
            same_number = waiting and report.sequence == call.sequence
            if rank == self.rank or not same_number or report.operation == call.what:
                continue
            name = (report.operation or "").partition(" ")[0]
            if name != call.operation or name in _SYMMETRIC:
                mine = Side(self.rank, call.what, call.site)
                return mismatch(mine, Side(rank, str(report.operation), str(report.site)), call)
        return None


def _nothing() -> None:
    """Do what an engine without such a thing does."""


def mismatch(mine: Side, theirs: Side, call: Call) -> Failure:
    """Say that two ranks called different things."""
    sides = sorted((mine, theirs))
    cause = "ranks disagree: " + ", ".join(map(str, sides))
    if mine.what == theirs.what:
        cause += "; the calls shown are equal, so they differ in the reduce op or in the root"
    return Failure(
        kind="mismatch",
        by=mine.rank,
        cause=cause,
        ranks=tuple(side.rank for side in sides),
        operation=call.what,
        sequence=call.sequence,
    )
