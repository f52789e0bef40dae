"""Failure detection for a process group.

While calls complete in time this module does nothing. When a call is overdue, `FailureDetector`
finds out why: a dead peer, a peer that shut the group down, a peer that made a different call,
or a peer that is alive and late. The first rank to find a cause records it in the status store;
every other rank raises the same cause.

The end of the module keeps engines alive that still have calls in flight. Gloo cannot be
interrupted: destroying it blocks the interpreter until its last call times out. Engines of
closed groups are dropped when their calls have ended; engines that are busy at interpreter exit,
and all of torch's, are leaked on purpose.

`FailureDetector.failure` is set once, under its lock; the first cause wins. No lock is held
across a store request.
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
from dataclasses import replace
from typing import TYPE_CHECKING

from .. import errors, native
from .._formatting import first_line, format_rank_ranges, format_ranks
from ..errors import GroupError, RankReport
from ._call_site import describe_frame
from ._engine import Engine, EngineMismatch, PeerDead, RankCall, Traits, is_peer_failure
from ._flight_recorder import Call, FlightRecorder
from ._peers import Roster
from ._status_store import Failure, FailureKind, StatusStore
from ._timing import default_timing
from ._torch_integration import engines_owned_by_torch

if TYPE_CHECKING:
    from ._work import Work


class PendingCall:
    """A call that a thread waits for."""

    call: Call
    timeout: float
    peer: int | None = None  # the one rank that a send or receive depends on; None means all

    # Set when the call is overdue. Class attributes, so that ordinary calls pay nothing for them.
    has_dead_peer = False  # a rank that the call needs was dead at the last check
    next_query = 0.0  # when to query the status store again; dead peers are seen without it

    @property
    def deadline(self) -> float:
        return self.call.started + self.timeout


PRUNE_IN_FLIGHT_ABOVE = 256  # calls in flight from which completed ones are looked for

_ERROR_BY_KIND: dict[FailureKind, type[GroupError]] = {
    "timeout": errors.CollectiveTimeout,
    "lost": errors.PeerLost,
    "mismatch": errors.RankMismatch,
    "aborted": errors.GroupAborted,
    "engine": GroupError,
}

Reports = dict[int, RankReport]

# Here every rank passes the same shape, so a different one is the cause of the hang.
_SAME_SHAPE_OPERATIONS = frozenset({"allreduce", "broadcast", "reduce", "barrier", "allgather"})


class FailureDetector:
    """Finds out why calls of one rank in one group do not complete, and fails the group."""

    def __init__(
        self,
        *,
        name: str,
        rank: int,
        size: int,
        roster: Roster,
        status_store: StatusStore | None,
        recorder: FlightRecorder,
        traits: Traits,
        engine: Engine,
    ) -> None:
        self.name = name
        self.rank = rank
        self.size = size
        self.closed = False
        self.waits_on_stream = traits.waits_on_stream
        self.failure: Failure | None = None
        self.waiting: Call | None = None
        self.partially_started_call = ""
        """A call that failed between two of its parts: ranks may have started different parts."""
        self.partially_started_works: list[object] = []  # kept alive for the engine; never read
        self.in_flight: dict[Call, Work] = {}  # calls whose end has not been observed
        self.roster = roster
        self._ranks_are_threads = traits.ranks_are_threads
        self.status_store = status_store
        self._recorder = recorder
        self._engine_dead_ranks: Callable[[], list[int]] = getattr(engine, "dead_ranks", list[int])
        self._abort_calls: Callable[[], None] = getattr(engine, "abort_calls", _no_op)
        self._progress: Callable[[], None] = getattr(engine, "progress", _no_op)
        self._members: Callable[[], list[int]] | None = getattr(engine, "members", None)
        self.timing = default_timing()
        self.excluded: set[int] = set()
        self._owner = threading.get_ident()
        self._pid = os.getpid()
        self._lock = threading.Lock()  # guards `failure` and `excluded`
        self._resume = _no_op
        self.works_with_futures: list[Work] = []

    def check(self, pending: PendingCall, *, engine_failed: bool = False) -> Failure | None:
        """Check whether an overdue call can still succeed; None means to keep waiting.

        `engine_failed` means that nothing more can arrive.
        """
        status = self.status_store
        if self.failure is not None or status is None:
            return self.failure
        now = time.monotonic()
        is_due = engine_failed or now >= pending.next_query
        if not is_due and not self._needed(pending, self.dead_ranks()):
            return None
        pending.next_query = now + self.timing.query_interval
        status.request_reports()
        if (known := self.learn_failure()) is not None:
            return known
        dead = self.dead_ranks()  # before the shutdowns: a rank writes its own before it exits
        shut_down = status.shut_down()
        lost = self._needed(pending, dead - shut_down.keys())
        # What it did before may arrive only now, so report a death only at the second check.
        is_second_check = pending.has_dead_peer
        pending.has_dead_peer = bool(lost)
        call = pending.call
        if lost and (engine_failed or is_second_check):
            return self.lost_failure(lost, call)
        gone = {r for r, (last, _) in shut_down.items() if call.transfer or last < call.sequence}
        for rank in self._needed(pending, gone):
            return self.shutdown_failure(rank, shut_down[rank][1], call)
        return None

    def timed_out(self, pending: PendingCall, *, after: float) -> tuple[Failure, Reports]:
        """Return which ranks kept the call from completing, and what every rank is doing."""
        call = pending.call
        reports = self.gather_reports()
        mismatch = None if call.transfer else self._find_mismatch(call, reports)
        if mismatch is not None:
            return mismatch, reports
        cause = f"timed out after {after:g} s{self.store_caveat()}"
        missing = [] if pending.peer is None else [pending.peer]
        if not call.transfer:
            others = reports.keys() - self.absent() - {self.rank}
            done = {rank: reports[rank].collectives or 0 for rank in sorted(others)}
            missing = [rank for rank in done if done[rank] < call.sequence]
        if missing:
            cause += f". Missing: {format_ranks(missing)}."
        elif call.transfer:
            cause += ": no rank sent anything"
        elif self.size > 1:
            cause += " although every rank took part"
        return self.make_failure("timeout", cause, missing, call), reports

    def store_caveat(self) -> str:
        """Return a remark for errors about other ranks while the store does not answer."""
        if self.status_store is None or not self.status_store.last_error:
            return ""
        return f" (and {self.status_store.last_error})"

    def diagnose(self, pending: PendingCall, error: Exception) -> Failure:
        if isinstance(error, EngineMismatch):
            return self._engine_mismatch(pending.call, error)
        timeout = self.timing.diagnosis_timeout if is_peer_failure(error) else 0
        until = time.monotonic() + timeout
        while True:
            failure = self.check(pending, engine_failed=True)
            if failure is not None:
                return failure
            if isinstance(error, PeerDead):  # it may have done its part for others, but not here
                return self.lost_failure([error.rank], pending.call)
            if time.monotonic() >= pending.deadline:
                return self.timed_out(pending, after=pending.timeout)[0]
            if time.monotonic() >= until:
                cause = f"failed in its engine: {first_line(error)}"
                return self.make_failure("engine", cause, (), pending.call)
            time.sleep(self.timing.dead_peer_poll_interval)

    def lost_failure(self, ranks: Sequence[int], call: Call) -> Failure:
        processes = " and ".join(map(self.describe_process, ranks))
        cause = f"{processes} {'is' if len(ranks) == 1 else 'are'} dead"
        return self.make_failure("lost", cause, ranks, call)

    def describe_process(self, rank: int) -> str:
        """Name a rank and its process: ``rank 2 (pid 4711 on node3)``."""
        thread = "a thread of " if self._ranks_are_threads else ""
        return f"rank {rank} ({thread}{self.roster.processes[rank]})"

    def shutdown_failure(self, rank: int, site: str, call: Call) -> Failure:
        cause = f"rank {rank} shut the group down at {site}"
        return self.make_failure("aborted", cause, [rank], call)

    def make_failure(
        self, kind: FailureKind, cause: str, ranks: Sequence[int], call: Call
    ) -> Failure:
        return Failure(kind, self.rank, cause, tuple(ranks), call.what, call.sequence)

    def fail(self, failure: Failure, *, publish: bool = True) -> Failure:
        """Fail the group, unless it has failed already; return the failure in effect."""
        if self._is_outdated(failure):
            return failure
        status = self.status_store
        if self.failure is None and publish and status is not None and self._is_own_process():
            failure = status.fail(failure)
        with self._lock:
            if self._is_outdated(failure):
                return failure
            is_first = self.failure is None
            self.failure = in_effect = self.failure or failure
        if is_first:
            self._abort_calls()
            if self._is_outdated(failure):  # the group resumed before its calls were ended
                self._resume()
        return in_effect

    def learn_failure(self) -> Failure | None:
        """Fail the group if another rank has; return the failure in effect."""
        known = None if self.status_store is None else self.status_store.failure()
        return None if known is None else self.fail(known, publish=False)

    def _is_outdated(self, failure: Failure) -> bool:
        """Whether it is the death of ranks that have been excluded since."""
        return failure.kind == "lost" and set(failure.ranks) <= self.excluded

    def error(
        self,
        failure: Failure,
        pending: PendingCall | None,
        call: Call | None,
        reports: Reports | None = None,
    ) -> GroupError:
        """Make the error that this rank raises for `failure` out of `call`."""
        if reports is None:
            wanted = pending is not None and failure.kind in ("timeout", "lost", "engine")
            lost = failure.kind == "lost"
            reports = self.gather_reports(after_death=lost) if wanted else {}
        reports.pop(self.rank, None)  # the error itself describes this rank
        where = f"group {self.name!r}, rank {self.rank}"
        cause = failure.cause
        operation = failure.operation
        sequence = failure.sequence
        is_same_call = call is not None and (call.what, call.sequence) == (operation, sequence)
        names_its_subject = failure.ranks and failure.kind in ("lost", "mismatch", "aborted")
        separator = ": "
        if failure.by != self.rank and not names_its_subject:
            there = f" in {operation} #{sequence}" if operation and not is_same_call else ""
            cause = f"rank {failure.by}{there} {cause}"
        elif failure.kind == "timeout" and is_same_call:
            separator = " "  # the call is the subject
        if call is not None:
            where = f"{call.what} #{call.sequence} at {call.site} ({where})"
            operation = operation or call.what
            sequence = call.sequence if sequence is None else sequence
        return _ERROR_BY_KIND[failure.kind](
            f"{where}{separator}{cause}",
            group=self.name,
            operation=operation,
            sequence=sequence,
            ranks=failure.ranks,
            reports=reports,
        )

    def record_shutdown(self, site: str) -> None:
        """Tell the other ranks that this one takes part in no further call."""
        if self.status_store is None or not self._is_own_process():
            return
        if self.failure is None:
            self.status_store.record_shutdown(sequence=self._recorder.collectives, site=site)
        else:  # the others must see the failure instead
            self.status_store.close()

    def exit(self) -> None:
        """Record a shutdown, since the program ends without an error."""
        if not self.closed and self.failure is None:
            self.record_shutdown("the end of its program")

    def _is_own_process(self) -> bool:
        """Whether this is not a forked child, which must not write on behalf of its parent."""
        return os.getpid() == self._pid

    def absent(self) -> set[int]:
        """Return the ranks that do not take part in the next call."""
        if self._members is None or self.closed:
            return set()
        return set(range(self.size)) - set(self._members())

    def set_members(self, members: Sequence[int] | None) -> None:
        """Set who takes part in the next call, for engines that do not know; None means all."""
        self._members = None if members is None else lambda: list(members)

    def resume_without(self, without: set[int], exclude: Callable[[int], None]) -> None:
        """Clear a failure that was the death of these ranks."""
        with self._lock:
            self.excluded |= without
            if self.status_store is not None:
                self.status_store.reset_failure(format_rank_ranges(sorted(self.excluded)))
            self.failure = None

        def resume() -> None:
            for rank in sorted(self.excluded):
                exclude(rank)

        self._resume = resume
        resume()

    def prune_in_flight(self) -> None:
        """Drop calls that have ended, if many are tracked."""
        if len(self.in_flight) > PRUNE_IN_FLIGHT_ABOVE:
            for known in list(self.in_flight.values()):
                known.is_completed()  # drops it if so

    def ended(self, call: Call) -> None:
        self.in_flight.pop(call, None)

    def is_busy(self) -> bool:
        """Whether the engine has calls in flight, even if the group has given them up."""
        if not self._is_own_process():
            return True  # they are the parent's, and so is the engine
        return any(not work.engine_is_done() for work in list(self.in_flight.values()))

    def poll(self) -> None:
        """Write a report if one was requested, and complete calls that no thread waits for."""
        status = None if self.closed else self.status_store
        if status is not None and status.answer(self.report) and self.failure is None:
            self.learn_failure()
        for work in list(self.in_flight.values()):
            work.engine_is_done()  # advances it, on engines without a thread
        self._progress()
        self.check_futures()

    def check_futures(self) -> None:
        for work in list(self.works_with_futures):
            if work.check_future():
                with suppress(ValueError):  # the watchdog and the caller may both be here
                    self.works_with_futures.remove(work)

    def report(self) -> RankReport:
        waiting = self.waiting
        last = self._recorder.last
        call = waiting or last
        state = "failed" if self.failure else "waiting" if waiting else "idle"
        report = RankReport(
            rank=self.rank,
            state=state,
            here=describe_frame(sys._current_frames().get(self._owner)),
            collectives=self._recorder.collectives,
            quiet=None if last is None else last.age,
        )
        if call is None:
            return report
        report = replace(report, operation=call.what, call=call.operation, site=call.site)
        return replace(report, transfer=call.transfer, sequence=call.sequence)

    def dead_ranks(self) -> set[int]:
        dead = {rank for rank, process in enumerate(self.roster.processes) if process.is_dead}
        return (dead | set(self._engine_dead_ranks())) - {self.rank}

    def _needed(self, pending: PendingCall, gone: set[int]) -> list[int]:
        """Of the ranks that are gone, return those without which the call cannot complete."""
        needed = set(range(self.size)) - {self.rank} - self.absent()
        if pending.peer is not None:
            needed &= {pending.peer}
        elif pending.call.transfer and not needed <= gone:
            return []  # a receive from any rank: one sender is enough
        return sorted(gone & needed)

    def gather_reports(self, *, after_death: bool = False, of_absent: bool = False) -> Reports:
        """Collect what every rank is doing, giving the watchdogs time to answer."""
        status = self.status_store
        if status is None:
            return {}
        absent = set() if of_absent else self.absent()
        request = status.request_reports()
        processes = enumerate(self.roster.processes)
        dead = self.dead_ranks()
        known = {rank: RankReport(rank, "stopped") for rank, each in processes if each.is_stopped}
        known |= {rank: RankReport(rank, "dead") for rank in dead}
        known |= {rank: RankReport(rank, "left") for rank in absent - dead}
        for rank, (_, site) in status.shut_down().items():
            known[rank] = RankReport(rank, "shut down", site=site)
        timing = self.timing
        timeout = timing.report_timeout_after_death if after_death else timing.report_timeout
        until = time.monotonic() + timeout
        while True:
            status.answer(self.report)  # others may be waiting too, and this may be the watchdog
            reports = status.reports(since=request) | known
            silent = [rank for rank in range(self.size) if rank not in reports]
            if silent in ([], [self.rank]) or time.monotonic() >= until:
                break
            time.sleep(timing.brief_poll_interval)
        state = "busy" if after_death else "silent"
        return reports | {rank: RankReport(rank, state) for rank in silent}

    def _engine_mismatch(self, call: Call, error: EngineMismatch) -> Failure:
        """Name both sides of a mismatch that the engine found; the peer reports its own."""
        if (known := self.learn_failure()) is not None:
            return known
        other = error.ranks[0] if error.ranks[1] == self.rank else error.ranks[1]
        report = self.gather_reports().get(other) or RankReport(other, "silent")
        what = report.operation or "something else"
        if report.operation is not None and report.sequence != call.sequence:
            what = f"something else before {what} #{report.sequence}"  # it has moved on since
        mine = RankCall(self.rank, call.what, call.site)
        return mismatch_failure(mine, RankCall(other, what, report.site or "?"), call)

    def _find_mismatch(self, call: Call, reports: Reports) -> Failure | None:
        for rank, report in sorted(reports.items()):
            waiting = report.state == "waiting" and not report.transfer
            same_number = waiting and report.sequence == call.sequence
            if rank == self.rank or not same_number or report.operation == call.what:
                continue
            if report.call != call.operation or call.operation in _SAME_SHAPE_OPERATIONS:
                mine = RankCall(self.rank, call.what, call.site)
                theirs = RankCall(rank, str(report.operation), str(report.site))
                return mismatch_failure(mine, theirs, call)
        return None


def _no_op() -> None:
    """Stand in for what an engine does not have."""


def mismatch_failure(mine: RankCall, theirs: RankCall, call: Call) -> Failure:
    sides = sorted((mine, theirs))
    cause = "ranks disagree: " + ", ".join(map(str, sides))
    if mine.what == theirs.what:
        cause += "; the calls shown are equal, so they differ in the reduce op or in the root"
    ranks = tuple(side.rank for side in sides)
    return Failure("mismatch", mine.rank, cause, ranks, call.what, call.sequence)


_engines_lock = threading.Lock()
_engines_of_open_groups = weakref.WeakKeyDictionary[FailureDetector, list[Engine]]()
_engines_of_closed_groups: list[tuple[FailureDetector, list[Engine]]] = []


def keep_engine_alive(detector: FailureDetector, engine: Engine) -> None:
    """Keep the interpreter's exit from waiting for calls of this engine of a group."""
    with _engines_lock:
        if not _engines_of_open_groups:
            atexit.unregister(_leak_engines)
            atexit.register(_leak_engines)
        _engines_of_open_groups.setdefault(detector, []).append(engine)
    if hasattr(engine, "stop_thread"):
        # The group owns the memory of calls that no thread waits for. The engine's thread must stop
        # before that memory is freed, at interpreter exit too.
        weakref.finalize(detector, _stop_engine_thread, weakref.ref(engine))


def _stop_engine_thread(engine: weakref.ref[Engine]) -> None:
    if (alive := engine()) is not None:
        alive.stop_thread()


def drop_engine(detector: FailureDetector, engine: Engine) -> None:
    """Drop one of a group's engines, which has nothing in flight."""
    with _engines_lock:
        kept = _engines_of_open_groups.get(detector, [])
        kept[:] = [other for other in kept if other is not engine]


def drop_engines_when_idle(detector: FailureDetector) -> None:
    """Drop a group's engines as soon as their calls have ended."""
    with _engines_lock:
        engines = _engines_of_open_groups.pop(detector, [])
        busy = [(old, kept) for old, kept in _engines_of_closed_groups if old.is_busy()]
        _engines_of_closed_groups[:] = busy
        if detector.is_busy():
            _engines_of_closed_groups.append((detector, engines))
        else:
            # torch keeps groups that have ended; free the memory of their engines.
            detector._engine_dead_ranks = list[int]
            detector._abort_calls = _no_op
            detector._progress = _no_op
            detector._members = None
            detector.in_flight.clear()


def _leak_engines() -> None:
    # A thread may still wait for a call in C++ when the interpreter is gone; returning to Python
    # would then crash the process.
    if native.engine is not None:
        native.engine.park_dying_threads()
    # torch's engines join their threads when destroyed; a thread may be parked or wait for a lock.
    leaked = engines_owned_by_torch()
    with _engines_lock:
        for detector, engines in [*_engines_of_open_groups.items(), *_engines_of_closed_groups]:
            is_busy = detector.is_busy()
            leaked += [each for each in engines if is_busy or not hasattr(each, "started_works")]
    for engine in leaked:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(engine))
