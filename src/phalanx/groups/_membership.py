"""Membership changes: ranks leave, are excluded after their death, and rejoin.

The calls of the remaining ranks continue from a sequence number that is equal on all of them.
Where the engine supports departures (`can_leave_alone`) it does the work. Elsewhere ranks agree on
who stays with one small collective (`ProcessGroup.update_membership`), and the remaining ranks
connect an engine of their own, which is kept for the next departure of the same ranks. `rejoin`
waits until every rank has called it; on engines without such a wait, `RejoinBarrier` waits in the
store.

All members of a subset use its engine at the same points, so all of them drop it at the same
point.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any

from torch._C._distributed_c10d import Store
from torch.distributed import DistNetworkError

from .. import _faultpoints as faultpoints
from .._formatting import first_line, format_rank_ranges, format_ranks
from ..errors import GroupError, InvalidArgument, InvalidState, PeerLost, PhalanxError
from . import _validation
from ._backend_registry import find_backend
from ._call_site import user_site
from ._engine import Engine
from ._failure_detector import PendingCall, drop_engine, keep_engine_alive
from ._flight_recorder import Call
from ._issuer import Issuer
from ._rendezvous import KnownPeers, Rendezvous, RendezvousTerms
from ._status_store import FailureKind
from ._store import BlockingStoreClient, StoreClient
from ._timing import default_timing
from .backends._subset import SubsetEngine
from .backends.local import single_rank_engine

if TYPE_CHECKING:
    from ._process_group import GroupConfig

LEAVES, STAYS = 1, 2  # a rank's answer in `update_membership`; 0 is a rank that had left before

MAX_KEPT_DEPARTURES = 4  # between two rejoins, whose engines are kept for the next time


@dataclass
class _KeptEngine:
    engine: Engine
    departure: int  # departures since the last rejoin when it was made
    used: int  # rejoins when it was last used
    store: BlockingStoreClient | None  # of its ranks' rendezvous


class Membership:
    """The ranks that take part in one group's calls, and the engines of subsets of them.

    Changes pause the group's `Issuer`, or make it use another engine.
    """

    def __init__(self, issuer: Issuer, config: GroupConfig, store: Store | None) -> None:
        self._issuer = issuer
        self._detector = issuer.detector
        self._rank = issuer.detector.rank
        self._size = issuer.detector.size
        self._config = config
        self._store = store
        self._leaving: set[int] = set()  # ranks that announced their departure since the rejoin
        self.is_rejoining = False
        self._barrier: RejoinBarrier | None = None
        self._full_engine: Engine | None = None  # of all ranks, while a subset's is in use
        self.kept_engines: dict[tuple[int, ...], _KeptEngine] = {}
        self._attempts: defaultdict[str, count[int]] = defaultdict(partial(count, 1))
        self._rejoins = 0
        self._departures = 0

    def members(self) -> tuple[int, ...]:
        absent = self._detector.absent() | self._leaving
        return tuple(rank for rank in range(self._size) if rank not in absent)

    def leave(self) -> None:
        self._issuer.check_usable("leave")
        self._engine_supporting("leave", "call update_membership on every rank")
        self._leave("leave")

    def exclude(self, ranks: Sequence[int]) -> None:
        detector = self._detector
        if self._issuer.closed and not self._issuer.has_left:
            self._issuer.refuse("exclude")
        engine = self._engine_supporting("exclude", "make a group of survivors with split_group")
        excluded = {_validation.as_rank("exclude", rank, self._size, word="rank") for rank in ranks}
        if alive := sorted(excluded - detector.dead_ranks()):
            raise InvalidArgument(
                f"exclude: {format_ranks(alive)} {'is' if len(alive) == 1 else 'are'} alive; "
                "exclude() accepts only dead ranks, and a live rank must call leave()"
            )
        failure = detector.failure
        if failure is not None and failure.kind != "lost":
            self._issuer.refuse("exclude")
        if detector.partially_started_call:
            raise InvalidState(
                f"exclude: {detector.partially_started_call} was interrupted while starting, so "
                "ranks may have issued different parts of it; create a new group of the survivors "
                "with split_group"
            )
        if lost := sorted(set(failure.ranks if failure is not None else ()) - excluded):
            raise InvalidArgument(f"exclude: {format_ranks(lost)} also died; pass error.lost")
        detector.resume_without(excluded, engine.exclude)

    def update(self, answers: Sequence[int], call: Call) -> tuple[int, ...]:
        """Apply the ranks' answers of one `update_membership` call; return who stays."""
        staying = tuple(rank for rank, answer in enumerate(answers) if answer == STAYS)
        leaving = {rank for rank, answer in enumerate(answers) if answer == LEAVES}
        if self._rank in leaving:
            self._leave("update_membership")
            if not self._issuer.can_leave_alone:
                self._detector.set_members(staying)
        elif leaving and not self._issuer.can_leave_alone:
            self._use_subset_engine(staying, call)
        self._leaving |= leaving
        return staying

    def rejoin(self, timeout: timedelta | None) -> None:
        """Leave, unless this rank has, and become a member again together with all others."""
        issuer = self._issuer
        seconds = issuer.timeout if timeout is None else _validation.as_seconds(timeout)
        _fault_point("before")
        with issuer.state_lock:
            if self.is_rejoining:
                raise InvalidState("rejoin: another thread of this rank is already in rejoin()")
            self.is_rejoining = True
        try:
            if not issuer.has_left:
                self._leave("rejoin")
            elif self._detector.failure is not None:
                issuer.refuse("rejoin")
            _fault_point("left")
            rejoiner: Any = issuer.engine
            if not issuer.can_leave_alone:
                if self._barrier is None:
                    self._barrier = RejoinBarrier(self._store, rank=self._rank, size=self._size)
                rejoiner = self._barrier
            waiting = _RejoinCall(issuer, rejoiner, seconds)
            sequence = waiting.run()
            with issuer.issue_lock, issuer.state_lock:
                if not issuer.has_left:  # closed meanwhile
                    issuer.refuse("rejoin")
                issuer.recorder.collectives = waiting.call.sequence = sequence
                issuer.recorder.starting = None
                waiting.call.ended = time.monotonic()
                self._leaving = set()
                if not issuer.can_leave_alone:
                    issuer.use_engine(self._full_engine or issuer.engine, None)
                self._rejoins += 1
                self._departures = 0
                issuer.reopen()
            self._drop_kept(self._is_stale_after_rejoin)
            _fault_point("after")
        finally:
            self.is_rejoining = False

    def detach_engines(self) -> None:
        self._full_engine = self._barrier = None
        self.kept_engines = {}

    def _engine_supporting(self, operation: str, hint: str) -> Engine:
        issuer = self._issuer
        if not hasattr(issuer.engine, operation):
            raise InvalidState(
                f"{operation}: {issuer.backend} does not support {operation}(); {hint}, or use shm"
            )
        return issuer.engine

    def _leave(self, operation: str) -> None:
        issuer = self._issuer
        issuer.pause(operation)
        try:
            for work in list(self._detector.in_flight.values()):
                work.wait()
            in_flight = issuer.engine.leave() if issuer.can_leave_alone else ""
            if in_flight:
                raise InvalidState(f"{operation}: wait for this rank's {in_flight} first")
        except BaseException:
            with issuer.state_lock:
                if issuer.has_left:  # not closed meanwhile
                    issuer.reopen()
            raise

    def _use_subset_engine(self, members: tuple[int, ...], call: Call) -> None:
        """Continue among some ranks; all of them do this at the same point."""
        issuer = self._issuer
        self._departures += 1
        kept = self.kept_engines.get(members)
        if kept is None:
            if len(members) == 1:
                kept = _KeptEngine(single_rank_engine(), self._departures, self._rejoins, None)
            else:
                engine, store = self._connect(members, call)
                kept = _KeptEngine(engine, self._departures, self._rejoins, store)
        elif hasattr(kept.engine, "set_timeout"):
            kept.engine.set_timeout(timedelta(seconds=issuer.timeout))
        kept.used = self._rejoins
        with issuer.issue_lock, issuer.state_lock:
            issuer.check_usable(call.operation)
            if members not in self.kept_engines:
                self.kept_engines[members] = kept
                keep_engine_alive(self._detector, kept.engine)
            if self._full_engine is None:
                self._full_engine = issuer.engine
            inner = issuer.track(kept.engine)
            issuer.use_engine(SubsetEngine(self._full_engine, inner, members, self._size), members)
        if not self._detector.is_busy():
            self._drop_kept(self._is_surplus)

    def _is_surplus(self, kept: _KeptEngine) -> bool:
        """Whether an engine is of a departure after the first few, and not of the last two.

        Each has file descriptors. One that is dropped here is not used before all ranks drop it.
        """
        return MAX_KEPT_DEPARTURES < kept.departure < self._departures - 1

    def _is_stale_after_rejoin(self, kept: _KeptEngine) -> bool:
        """Whether an engine is of a departure after the first few, or unused in two rounds."""
        return kept.departure > MAX_KEPT_DEPARTURES or kept.used < self._rejoins - 2

    def _drop_kept(self, is_stale: Callable[[_KeptEngine], bool]) -> None:
        for members, kept in list(self.kept_engines.items()):
            if is_stale(kept):
                del self.kept_engines[members]
                drop_engine(self._detector, kept.engine)
                if kept.store is not None and self._rank == members[0]:
                    with suppress(Exception):  # the store does not answer
                        store = StoreClient(kept.store.raw)
                        # Other ranks may still look whether there is a result.
                        for key in set(store.all_keys()) - {"result"}:
                            store.delete(key)

    def _connect(self, ranks: tuple[int, ...], call: Call) -> tuple[Engine, BlockingStoreClient]:
        """Connect an engine of some ranks; also return the store that they used for it."""
        issuer = self._issuer
        detector = self._detector
        assert self._store is not None, "a group of several ranks has a store"
        backend = find_backend(issuer.backend)
        began = time.monotonic()
        name = f"{detector.name}/{format_rank_ranges(ranks)} left"
        processes = tuple(detector.roster.processes[rank] for rank in ranks)

        def check() -> None:
            if detector.failure is not None:
                raise detector.error(detector.failure, None, None)

        rendezvous = Rendezvous(
            self._store,
            rank=ranks.index(self._rank),
            terms=RendezvousTerms(name, ranks, backend.name, "", user_site()),
            timeout=timedelta(seconds=issuer.timeout),
            known_peers=KnownPeers(processes, partial(next, self._attempts[name])),
            check=check,
        )
        try:
            return rendezvous.connect(backend, self._config), rendezvous.group_store
        except PhalanxError as error:
            failure = detector.failure
            reports = None
            if failure is None and isinstance(error, PeerLost):
                failure = detector.lost_failure([ranks[place] for place in error.ranks], call)
            elif failure is None:
                late = time.monotonic() - began >= issuer.timeout
                reports = detector.gather_reports(of_absent=True)
                mute = [r for r in ranks if r in reports and reports[r].operation is None]
                cause = (
                    f"could not connect ranks {format_rank_ranges(ranks)}, which stay: "
                    f"{first_line(error)}"
                )
                kind: FailureKind = "timeout" if late or mute else "engine"
                failure = detector.make_failure(kind, cause, mute, call)
            raise detector.error(detector.fail(failure), None, call, reports) from error


class RejoinBarrier:
    """Waits in the store until every rank rejoins, for engines that cannot."""

    def __init__(self, store: Store | None, *, rank: int, size: int) -> None:
        self._group_store = None if store is None else StoreClient(store)
        self._store: StoreClient | None = None
        self._rank = rank
        self._others = [other for other in range(size) if other != rank]
        self._missing = self._others
        self._round = 1
        self._has_arrived = False
        self._is_disconnected = False

    def rejoin(self, calls: int, seconds: float) -> tuple[str, int]:
        """Announce this rank, or wait for the others; return the stage and the most `calls`."""
        if self._group_store is None:  # this is the only rank
            return "entered", calls
        if self._is_disconnected:
            time.sleep(seconds)
            return "waiting", 0
        most = None
        try:
            if self._store is None:
                # A separate connection: a wait in the store blocks other requests on the same one.
                self._store = StoreClient(self._group_store.connect()).under("rejoin")
            most = self._take_step(self._store, calls, seconds)
        except DistNetworkError:  # the connection is closed for good; torch logs further attempts
            self._is_disconnected = True
        except Exception:  # noqa: BLE001 - its host is stopped, out of threads: it may pass
            time.sleep(default_timing().rejoin_retry_delay)
        return ("waiting", 0) if most is None else ("entered", most)

    def missing_in_rejoin(self) -> list[int]:
        """List the ranks that have not arrived, as far as is known."""
        store = self._store
        if store is not None and not self._is_disconnected:
            with suppress(Exception):  # the store does not answer
                self._missing = [r for r in self._missing if not store.has(f"{self._round}/{r}")]
        return self._missing

    def _take_step(self, store: StoreClient, calls: int, seconds: float) -> int | None:
        """Return the sequence number to continue from, if every rank has arrived."""
        mine = f"{self._round}/{self._rank}"
        if not self._has_arrived:
            store.set(mine, str(calls))
            self._has_arrived = True
            return None
        keys = [mine, *(f"{self._round}/{rank}" for rank in self._others)]
        if not store.await_all(keys, seconds):
            return None
        most = max(int(store.fetch(key)) for key in keys)
        if self._round > 1:
            store.delete(f"{self._round - 1}/{self._rank}")
        self._round += 1
        self._has_arrived = False
        self._missing = self._others
        return most


class _RejoinCall(PendingCall):
    """One rank's wait to rejoin; `rejoiner` is the engine or a `RejoinBarrier`."""

    def __init__(self, issuer: Issuer, rejoiner: Any, seconds: float) -> None:
        self._issuer = issuer
        self._detector = issuer.detector
        self._recorder = issuer.recorder
        self._rejoiner = rejoiner
        self.timeout = seconds
        self._counts_from = 0.0
        if self._recorder.starting is not None:  # an interrupt came before `run` could wait
            self._recorder.undo(self._recorder.starting)
        # It is numbered like a collective: the number after the last call of any rank.
        self.call: Call = self._recorder.begin("rejoin", [])

    def run(self) -> int:
        """Wait for all ranks; return the sequence number to continue from."""
        calls = self._recorder.collectives
        timing = default_timing()
        error: GroupError | None = None
        previous = ""
        self._detector.waiting = self.call
        try:
            while True:
                began = time.monotonic()
                wait = 0.0
                if error is None:
                    wait = min(timing.rejoin_check_interval, max(self.deadline - began, 0.001))
                stage, most = self._rejoiner.rejoin(calls, wait)
                if stage != previous:
                    error = None
                    _fault_point(stage)
                if stage == "entered":
                    return int(most)
                if stage == previous:
                    if error is not None:  # no rank has arrived since it was found
                        raise error
                    error = self._check()
                    woken = time.monotonic() - began < timing.rejoin_retry_delay
                    if error is None and woken:
                        time.sleep(timing.rejoin_retry_delay)
                previous = stage
        except BaseException:
            self._recorder.undo(self.call)
            raise
        finally:
            self._detector.waiting = None

    @property
    def deadline(self) -> float:
        """When the wait ends: `timeout` after the last call of a missing rank."""
        return max(self.call.started, self._counts_from) + self.timeout

    def _check(self) -> GroupError | None:
        """Return the error if this cannot succeed any more, or not in time."""
        if not self._issuer.has_left:  # closed meanwhile
            self._issuer.refuse("rejoin")
        detector = self._detector
        detector.learn_failure()
        status = detector.status_store
        shut_down = {} if status is None else status.shut_down()
        dead = detector.dead_ranks() - shut_down.keys()
        # A rank that arrived before it died or shut the group down counts.
        missing = set(self._rejoiner.missing_in_rejoin()) if dead or shut_down else set()
        if detector.failure is None and (lost := sorted(dead & missing)):
            detector.fail(detector.lost_failure(lost, self.call))
        failure = detector.failure
        if failure is None and (gone := sorted(shut_down.keys() & missing)):
            failure = detector.shutdown_failure(gone[0], shut_down[gone[0]][1], self.call)
        if failure is not None:
            return detector.error(failure, self, self.call)
        return None if time.monotonic() < self.deadline else self._overdue()

    def _overdue(self) -> GroupError | None:
        """Ask whether the missing ranks still make calls, and time out if they do not."""
        detector = self._detector
        missing = self._rejoiner.missing_in_rejoin()
        reports = detector.gather_reports(of_absent=True)
        quiet = [r.quiet for r in reports.values() if r.rank in missing and r.quiet is not None]
        if quiet:
            self._counts_from = time.monotonic() - min(quiet)
        if time.monotonic() < self.deadline:
            return None
        cause = f"timed out after {self.timeout:g} s{detector.store_caveat()}"
        if missing:
            cause += f": {format_ranks(missing)} did not call rejoin(), and made no other call"
        # This does not fail the group: the others continue, and this rank may wait again.
        failure = detector.make_failure("timeout", cause, missing, self.call)
        return detector.error(failure, self, self.call, reports)


def _fault_point(point: str) -> None:
    if faultpoints.armed:
        faultpoints.reach(f"rejoin:{point}")
