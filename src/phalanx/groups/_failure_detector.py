"""Failure detection for a process group.

While calls complete in time this module does nothing. When a call is overdue, `FailureDetector`
finds out why: a dead peer, a peer that shut the group down, a peer that made a different call,
or a peer that is alive and late. The first rank to find a cause records it in the status store;
every other rank raises the same cause.

The end of the module keeps engines alive that still have calls in flight. Gloo cannot be
interrupted: destroying it blocks the interpreter until its last call times out. Engines of
closed groups are released when their calls have ended; what is busy at interpreter exit is
leaked on purpose.

`FailureDetector.failure` is set once, under its lock; the first cause wins. No lock is held
across a
store request.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress

from .. import native
from ..errors import GroupError, RankReport
from ._engine import Engine, EngineMismatch, PeerDead, is_peer_failure
from ._flight_recorder import Call, FlightRecorder, describe_frame
from ._formatting import RankCall, first_line, format_rank_ranges, format_ranks
from ._peers import Roster
from ._status_store import Failure, FailureKind, StatusStore
from ._watchdog import WATCH_INTERVAL


class PendingCall:
    """What is known of a call that is being waited for; a `Work` is one."""

    call: Call
    timeout: float
    """Seconds that the call may take."""
    peer: int | None = None
    """The one rank that a send or receive depends on; None where it is everybody."""

    # Filled in once the call is overdue; most never are, so these cost an ordinary call nothing.
    has_dead_peer = False
    """Whether a rank that the call needs was dead when somebody last looked."""
    next_query = 0.0
    """When the others are to be asked again; whether they live is seen without asking."""

    @property
    def deadline(self) -> float:
        """When the call must have ended."""
        return self.call.started + self.timeout

    def is_completed(self) -> bool:
        """Tell whether the call has ended, well or badly."""
        raise NotImplementedError

    def engine_is_done(self) -> bool:
        """Tell whether the engine has let go of the call, whatever the group thinks of it."""
        raise NotImplementedError

    def check_future(self) -> bool:
        """End the future if the call cannot succeed any more, and tell whether it has ended."""
        raise NotImplementedError

    def settle(self) -> None:
        """Wait until the call has ended."""
        raise NotImplementedError


REPORT_TIMEOUT = 3 * WATCH_INTERVAL
"""Seconds that a healthy rank needs at most to answer a ring, with time to spare."""

REPORT_TIMEOUT_AFTER_DEATH = 0.03
"""Seconds for the same after a death, which is told at once: whoever waits too answers by itself,
and the others are said to be busy."""

QUERY_INTERVAL = 0.1
"""Seconds between two questions to the others about one overdue call."""

DIAGNOSIS_TIMEOUT = 3.0
"""Seconds to find out why an engine's connection broke before saying only that it did."""

PRUNE_IN_FLIGHT_ABOVE = 256
"""Calls that nobody waited for, before the finished ones among them are looked for."""

_KINDS_WITH_REPORTS = frozenset({"timeout", "lost", "engine"})
"""Failures whose story the others' reports help to tell."""

Reports = dict[int, RankReport]

# Here every rank passes the same shape, so a different one is the cause of the hang.
_SAME_SHAPE_OPERATIONS = frozenset({"allreduce", "broadcast", "reduce", "barrier", "allgather"})


class FailureDetector:
    """The state of one rank's membership in one group."""

    def __init__(
        self,
        *,
        name: str,
        rank: int,
        size: int,
        roster: Roster,
        board: StatusStore | None,
        recorder: FlightRecorder,
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
        self._wake = wake or _no_op
        self._drive = drive or _no_op
        self._members = members
        self._excluded: set[int] = set()
        self._owner = threading.get_ident()
        self._pid = os.getpid()
        # Over `failure`, which is set once, by whoever is first, and `_excluded`.
        self._failing = threading.Lock()
        self._resume = _no_op
        self.half_started = ""
        """A call that failed between two of its parts: ranks may have begun different ones."""
        self.started_parts: list[object] = []
        """Keeps what the engine has got of it alive; nothing reads it."""
        self._futures: list[PendingCall] = []
        self.in_flight: dict[Call, PendingCall] = {}
        """Calls whose end nobody has seen yet."""

    # -- a call is overdue -----------------------------------------------------------------

    def look(self, pending: PendingCall, *, sure: bool = False) -> Failure | None:
        """Find out whether an overdue call can still succeed; None means wait on.

        `sure` says that the engine has failed already, so nothing can be on its way any more.
        """
        board = self._board
        if self.failure is not None or board is None:
            return self.failure
        now = time.monotonic()
        if not sure and now < pending.next_query and not self._needed(pending, self.dead()):
            return None
        pending.next_query = now + QUERY_INTERVAL
        board.request_reports()
        known = board.failure()
        if known is not None:
            return self.fail(known, publish=False)
        return self._look_for_dead(pending, sure=sure) or self._look_for_left(pending)

    def timed_out(self, pending: PendingCall, *, after: float) -> tuple[Failure, Reports]:
        """Say who kept the call from ending in time, and what everybody is doing."""
        call, peer = pending.call, pending.peer
        reports = self._gather_reports()
        clash = None if call.transfer else self._find_mismatch(call, reports)
        if clash is not None:
            return clash, reports
        told = f"timed out after {after:g} s"
        missing = [] if call.transfer else self._missing(call, reports)
        missing = missing if peer is None else [peer]
        if missing:
            told += f": {format_ranks(missing)} did not take part"
        elif call.transfer:
            told += ": nobody sent anything"
        elif self.size > 1:
            told += " although every rank took part"
        told += self.store_caveat()
        return self._failure("timeout", told, tuple(missing), call), reports

    def store_caveat(self) -> str:
        """Tell, after what is said of others, if they may not have been heard."""
        if self._board is None or not self._board.last_error:
            return ""
        return f" (and {self._board.last_error})"

    def diagnose(self, pending: PendingCall, error: Exception) -> Failure:
        """Find the reason behind an engine's error."""
        if isinstance(error, EngineMismatch):
            return self._engine_mismatch(pending.call, error)
        until = time.monotonic() + (DIAGNOSIS_TIMEOUT if is_peer_failure(error) else 0)
        while True:
            failure = self.look(pending, sure=True)
            if failure is not None:
                return failure
            if isinstance(error, PeerDead):  # which did its part for others, perhaps, but not here
                told = f"{self.describe_ranks([error.rank])} is dead"
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
        if self.failure is None and publish and self._board is not None and self._is_own_process():
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
        return failure.kind == "lost" and set(failure.ranks) <= self._excluded

    def error(
        self,
        failure: Failure,
        pending: PendingCall | None,
        call: Call | None,
        reports: Reports | None = None,
    ) -> GroupError:
        """Make the error that this rank raises for `failure`."""
        if reports is None:
            asks = pending is not None and failure.kind in _KINDS_WITH_REPORTS
            within = REPORT_TIMEOUT_AFTER_DEATH if failure.kind == "lost" else REPORT_TIMEOUT
            reports = self._gather_reports(within) if asks else {}
        reports.pop(self.rank, None)  # this rank's own part is told by the error itself
        return failure.error(group=self.name, rank=self.rank, call=call, reports=reports)

    def leave(self, site: str) -> None:
        """Tell the others that this rank takes part in nothing after its last call."""
        if self._board is None or not self._is_own_process():
            return
        if self.failure is None:
            self._board.leave(sequence=self._recorder.collectives, site=site)
        else:  # which is what the others are to hear of
            self._board.close()

    def exit(self) -> None:
        """Tell the others that this rank's program has ended in good order."""
        if not self.closed and self.failure is None:
            self.leave("the end of its program")

    def _is_own_process(self) -> bool:
        """Tell this process from a forked child, which must not speak for its parent."""
        return os.getpid() == self._pid

    # -- membership ------------------------------------------------------------------------

    def absent(self) -> set[int]:
        """List the ranks that take no part in what comes next."""
        if self._members is None or self.closed:
            return set()
        return set(range(self.size)) - set(self._members())

    def set_members(self, members: Sequence[int] | None) -> None:
        """Set who takes part in what comes next, where the engine does not know; None is all."""
        self._members = None if members is None else lambda: list(members)

    def resume_without(self, without: set[int], forget: Callable[[int], None]) -> None:
        """Leave a failure behind that was the death of these ranks."""
        with self._failing:
            self._excluded |= without
            if self._board is not None:
                self._board.reset_failure(format_rank_ranges(sorted(self._excluded)))
            self.failure = None

        def resume() -> None:
            for rank in sorted(self._excluded):
                forget(rank)

        self._resume = resume
        resume()

    def is_excluded(self, rank: int) -> bool:
        """Tell whether a rank was lost and is gone on without."""
        return rank in self._excluded

    def settle_all(self) -> None:
        """Wait for every collective under way."""
        for work in list(self.in_flight.values()):
            work.settle()

    # -- calls under way -------------------------------------------------------------------

    def begun(self, call: Call, work: PendingCall) -> None:
        """Remember a call whose end nobody has seen yet."""
        self.in_flight[call] = work
        self.prune_in_flight()

    def prune_in_flight(self) -> None:
        """Forget the calls that have ended, if many are under way for all that is known."""
        if len(self.in_flight) > PRUNE_IN_FLIGHT_ABOVE:
            for known in list(self.in_flight.values()):
                known.is_completed()  # which forgets those that are

    def ended(self, call: Call) -> None:
        """Forget a call whose end was seen."""
        self.in_flight.pop(call, None)

    def is_busy(self) -> bool:
        """Tell whether the engine has calls under way, even if the group has given them up."""
        if not self._is_own_process():
            return True  # they are the parent's, and so is the engine
        return any(not work.engine_is_done() for work in list(self.in_flight.values()))

    def let_go(self) -> None:
        """Forget the engine: the group is closed, and nothing is under way any more."""
        self._lost_ranks, self._wake, self._drive = list[int], _no_op, _no_op
        self._members = None
        self.in_flight.clear()

    def watch_future(self, work: PendingCall) -> None:
        """Let the watcher see to it that the work's future ends."""
        self._futures.append(work)

    # -- the watcher calls -----------------------------------------------------------------

    def poll(self) -> None:
        """Answer whoever asks what this rank is doing."""
        board = None if self.closed else self._board
        if board is not None and board.answer(self.report) and self.failure is None:
            known = board.failure()
            if known is not None:
                self.fail(known, publish=False)
        self.drive()
        self.check_futures()

    def drive(self) -> None:
        """Let an engine without a thread of its own get on with calls that nobody waits for."""
        for work in list(self.in_flight.values()):
            work.engine_is_done()
        self._drive()

    def check_futures(self) -> None:
        """End the futures of calls that cannot succeed any more."""
        for work in list(self._futures):
            if work.check_future():
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

    def _failure(
        self, kind: FailureKind, cause: str, ranks: tuple[int, ...], call: Call
    ) -> Failure:
        return Failure(
            kind=kind,
            by=self.rank,
            cause=cause,
            ranks=ranks,
            operation=call.what,
            sequence=call.sequence,
        )

    def _look_for_dead(self, pending: PendingCall, *, sure: bool = False) -> Failure | None:
        """Find ranks that died before they did their part; `sure` when the engine failed too."""
        assert self._board is not None
        dead = self._needed(pending, self.dead() - set(self._board.left()))
        # What a rank did before it ended may be seen only now: look once more.
        first, pending.has_dead_peer = not pending.has_dead_peer, bool(dead)
        if not dead or (first and not sure):
            return None
        who = self.describe_ranks(dead)
        verb = "is" if len(dead) == 1 else "are"
        return self._failure("lost", f"{who} {verb} dead", tuple(dead), pending.call)

    def _look_for_left(self, pending: PendingCall) -> Failure | None:
        """Find ranks that shut down before this call, and will take no part in it."""
        assert self._board is not None
        left = self._board.left()
        call = pending.call
        gone = {rank for rank, (last, _) in left.items() if call.transfer or last < call.sequence}
        for rank in self._needed(pending, gone):
            cause = f"rank {rank} shut the group down at {left[rank][1]}"
            return self._failure("aborted", cause, (rank,), call)
        return None

    def _needed(self, pending: PendingCall, gone: set[int]) -> list[int]:
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

    def describe_ranks(self, ranks: list[int]) -> str:
        """Name ranks together with their processes."""
        return " and ".join(f"rank {rank} ({self._describe_process(rank)})" for rank in ranks)

    def _describe_process(self, rank: int) -> str:
        member = self._roster.members[rank]
        return str(member) if member.is_dead else f"a thread of {member}"

    def ask(self) -> Reports:
        """Collect what every rank is doing, those who have left included."""
        board = self._board
        return (
            {}
            if board is None
            else self._await_reports(board, board.request_reports(), REPORT_TIMEOUT, set())
        )

    def _gather_reports(self, within: float = REPORT_TIMEOUT) -> Reports:
        """Collect what every rank is doing, allowing the watchers time to answer."""
        if self._board is None:
            return {}
        return self._await_reports(
            self._board, self._board.request_reports(), within, self.absent()
        )

    def _await_reports(
        self, board: StatusStore, ring: int, within: float, absent: set[int]
    ) -> Reports:
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
        state = "busy" if within == REPORT_TIMEOUT_AFTER_DEATH else "silent"
        return reports | {rank: RankReport(rank, state) for rank in silent}

    def _missing(self, call: Call, reports: Reports) -> list[int]:
        out = self.absent() | {self.rank}
        others = (report for rank, report in sorted(reports.items()) if rank not in out)
        return [r.rank for r in others if r.collectives is None or r.collectives < call.sequence]

    def _engine_mismatch(self, call: Call, error: EngineMismatch) -> Failure:
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
        mine = RankCall(self.rank, call.what, call.site)
        return mismatch_failure(mine, RankCall(other, what or "something else", site or "?"), call)

    def _find_mismatch(self, call: Call, reports: Reports) -> Failure | None:
        """See whether a peer is stuck in a different operation under the same number."""
        for rank, report in sorted(reports.items()):
            collective = not (report.operation or "").startswith(("send ", "recv"))
            waiting = report.state == "waiting" and collective
            same_number = waiting and report.sequence == call.sequence
            if rank == self.rank or not same_number or report.operation == call.what:
                continue
            name = (report.operation or "").partition(" ")[0]
            if name != call.operation or name in _SAME_SHAPE_OPERATIONS:
                mine = RankCall(self.rank, call.what, call.site)
                return mismatch_failure(
                    mine, RankCall(rank, str(report.operation), str(report.site)), call
                )
        return None


def _no_op() -> None:
    """Do what an engine without such a thing does."""


def mismatch_failure(mine: RankCall, theirs: RankCall, call: Call) -> Failure:
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


_engines_lock = threading.Lock()
_live_engines: weakref.WeakKeyDictionary[FailureDetector, list[Engine]] = (
    weakref.WeakKeyDictionary()
)
_retired_engines: list[tuple[FailureDetector, list[Engine]]] = []


def register_engine(health: FailureDetector, engine: Engine) -> None:
    """Do not let the exit of the interpreter wait for calls of this engine, one of the group's."""
    with _engines_lock:
        if not _live_engines:
            atexit.unregister(_leak_busy_engines)
            atexit.register(_leak_busy_engines)
        _live_engines.setdefault(health, []).append(engine)
    if hasattr(engine, "rest"):
        # The group keeps the memory of calls that nobody waits for; before it goes, at the exit of
        # the interpreter too, nobody may be working on that any more.
        weakref.finalize(health, _stop_engine_thread, weakref.ref(engine))


def _stop_engine_thread(engine: weakref.ref[Engine]) -> None:
    alive = engine()
    if alive is not None:
        alive.rest()


def release_engine(health: FailureDetector, engine: Engine) -> None:
    """Let go of one of a group's engines; nothing of its is under way."""
    with _engines_lock:
        kept = _live_engines.get(health, [])
        kept[:] = [other for other in kept if other is not engine]


def retire_engines(health: FailureDetector) -> None:
    """Let go of a group's engines as soon as their calls have ended."""
    with _engines_lock:
        engines = _live_engines.pop(health, [])
        _retired_engines[:] = [(old, kept) for old, kept in _retired_engines if old.is_busy()]
        if health.is_busy():
            _retired_engines.append((health, engines))
        else:
            # torch holds on to groups that have ended; the memory of their engines is not to stay.
            health.let_go()


def _leak_busy_engines() -> None:
    # Some thread may wait for a call when the interpreter goes away, in torch's C++ or ours, and
    # come back to an interpreter that is no more. It must not take the process with it.
    if native.engine is not None:
        native.engine.park_dying_threads()
    with _engines_lock:
        for health, engines in [*_live_engines.items(), *_retired_engines]:
            if health.is_busy():
                for engine in engines:
                    ctypes.pythonapi.Py_IncRef(ctypes.py_object(engine))
