"""Membership changes: ranks leave, are excluded after their death, and rejoin.

The calls of the remaining ranks continue from a sequence number that all of them see alike.
Where the engine supports departures (`can_leave`) it does the work. Elsewhere ranks agree on
who stays with one small collective (`update_membership`), and the remaining ranks connect an
engine of their own, which is kept for the next departure of the same ranks. `rejoin` waits
until every rank has come back; on engines without such a wait, `RejoinBarrier` waits in the
store.

All members of a subset use its engine at the same points, so all of them release it at the same
point.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch._C._distributed_c10d import Store
from torch.distributed import DistNetworkError

from .. import _faultpoints as faultpoints
from ..errors import (
    GroupError,
    InvalidArgument,
    InvalidState,
    PeerLost,
    PhalanxError,
    RendezvousTimeout,
)
from . import _validation
from ._backend_registry import find_backend
from ._engine import Engine, track_started_works
from ._failure_detector import FailureDetector, PendingCall, register_engine, release_engine
from ._flight_recorder import Call, user_site
from ._formatting import first_line, format_rank_ranges, format_ranks
from ._rendezvous import EngineSetup, KnownPeers, Rendezvous, RendezvousTerms
from ._status_store import Failure, FailureKind
from ._store_client import BlockingStoreClient, StoreClient
from ._work import refuse
from .backends._subset import SubsetEngine
from .backends.local import single_rank_engine

if TYPE_CHECKING:
    from ._process_group import ProcessGroup


_UNSUPPORTED_HINTS = {
    "leave": "that leaves by itself; all ranks call update_membership, and tell each other who stays",
    "exclude": "that is dead; make a group of those who are left with split_group",
}


def members(group: ProcessGroup) -> tuple[int, ...]:
    """List the ranks that take part in a group's next call, as far as this rank knows."""
    absent = group._detector.absent() | group._announced
    return tuple(rank for rank in range(group._size) if rank not in absent)


def leave(group: ProcessGroup) -> None:
    """End this rank's membership as soon as what it has begun is done."""
    engine_supporting(group, "leave")
    leave_during(group, "leave")


def leave_during(group: ProcessGroup, operation: str) -> None:
    """End this rank's membership on behalf of an operation."""
    site = user_site()
    with group._order, group._state:  # no call is begun after this
        if group._closed or group._detector.failure is not None:
            refuse(group, operation)
        group._closed, group._has_left = f"was left at {site}", True
        group._close_fast_path()
    try:
        group._detector.settle_all()
        under_way = group._engine.leave() if group._can_leave else ""
        if under_way:
            raise InvalidState(f"{operation}: wait for this rank's {under_way} first")
    except BaseException:
        with group._state:
            if group._has_left:  # and not closed meanwhile
                group._reopen()
        raise


def exclude(group: ProcessGroup, ranks: Sequence[int]) -> None:
    """Go on without ranks that were lost."""
    engine = engine_supporting(group, "exclude")
    gone = {_validation.rank("exclude", rank, group._size, word="rank") for rank in ranks}
    if group._closed and not group._has_left:
        refuse(group, "exclude")
    alive = gone - group._detector.dead()
    if alive:
        raise InvalidArgument(
            f"exclude: {format_ranks(sorted(alive))} {'is' if len(alive) == 1 else 'are'} alive; "
            "exclude() accepts only dead ranks, and a live rank must call leave()"
        )
    failure = group._detector.failure
    if failure is not None and failure.kind != "lost":
        refuse(group, "exclude")
    if group._detector.half_started:
        raise InvalidState(
            f"exclude: {group._detector.half_started} was interrupted while starting, so ranks may have "
            "issued different parts of it; create a new group of the survivors with split_group"
        )
    lost = set(failure.ranks if failure is not None else ()) - gone
    if lost:
        raise InvalidArgument(f"exclude: {format_ranks(sorted(lost))} also died; pass error.lost")
    group._detector.resume_without(gone, engine.exclude)


def engine_supporting(group: ProcessGroup, operation: str) -> Any:
    """Return the engine of a group whose membership may change; refuse other groups."""
    if not hasattr(group._engine, operation) and not group._closed:
        raise InvalidState(
            f"{operation}: {group._backend} cannot go on without a rank {_UNSUPPORTED_HINTS[operation]}, or "
            "use shm"
        )
    return group._engine


MIN_STORE_WAIT = 0.01  # seconds; a store gives up so short a wait before it has looked


class RejoinBarrier:
    """One rank's place among those who wait to be members again."""

    def __init__(self, store: Store | None, *, rank: int, size: int) -> None:
        self._door = None if store is None else StoreClient(store)
        self._store: StoreClient | None = None
        self._rank = rank
        self._size = size
        self._turn = 1
        self._has_come = False
        self._missing = self._others()
        self._is_lost = False

    def rejoin(self, calls: int, seconds: float) -> tuple[str, int]:
        """Say that this rank has come, or wait for the others; tells how far it has come."""
        if self._door is None:  # and so nobody else
            return "entered", calls
        if self._is_lost:
            time.sleep(seconds)
            return "waiting", 0
        try:
            most = self._take_step(self._enter(self._door), calls, seconds)
        except RendezvousTimeout:  # the store's host is stopped or out of reach, and may come back
            most = None
        except DistNetworkError:  # the connection is closed, for good; torch logs every further try
            self._is_lost = True
            most = None
        except Exception:  # noqa: BLE001 - out of threads, a user's store: it may pass
            time.sleep(max(seconds, MIN_STORE_WAIT))
            most = None
        if most is None:
            return "waiting", 0
        self._turn += 1
        self._has_come = False
        self._missing = self._others()
        return "entered", most

    def awaited(self) -> list[int]:
        """List the ranks that have not come, as far as is known."""
        store, turn = self._store, self._turn
        if store is not None and not self._is_lost:
            with suppress(Exception):  # the store does not answer
                self._missing = [r for r in self._missing if not store.has(f"{turn}/{r}")]
        return self._missing

    def _enter(self, door: StoreClient) -> StoreClient:
        # A connection of its own: a wait in the store keeps others on the same one from asking.
        if self._store is None:
            self._store = StoreClient(door.connect()).under("hall")
        return self._store

    def _take_step(self, store: StoreClient, calls: int, seconds: float) -> int | None:
        """Return where all go on, if everybody has come."""
        turn, rank = self._turn, self._rank
        if not self._has_come:
            store.set(f"{turn}/{rank}", str(calls))
            self._has_come = True
            return None
        keys = [f"{turn}/{other}" for other in range(self._size)]
        if not (store.await_all(keys, seconds) if seconds > MIN_STORE_WAIT else store.has(*keys)):
            return None
        most = max(int(store.fetch(key)) for key in keys)
        if turn > 1:
            store.delete(f"{turn - 1}/{rank}")
        return most

    def _others(self) -> list[int]:
        return [rank for rank in range(self._size) if rank != self._rank]


def connect_subset(
    group: ProcessGroup, ranks: Sequence[int], call: Call
) -> tuple[Engine, BlockingStoreClient]:
    """Make an engine of some ranks of a group, all of which do this at the same point.

    Return the part of the store, too, that they have met in.
    """
    health, began = group._detector, time.monotonic()
    try:
        return _connect_subset_engine(group, ranks)
    except PhalanxError as error:
        failure, reports = health.failure, None
        if failure is None and isinstance(error, PeerLost):
            failure = _lost_failure(health, [ranks[place] for place in error.ranks], call)
        elif failure is None:
            late = time.monotonic() - began >= group._timeout
            reports = health.ask()
            mute = [rank for rank in ranks if rank in reports and reports[rank].operation is None]
            kind: FailureKind = "timeout" if late or mute else "engine"
            told = f"could not go on among ranks {format_rank_ranges(ranks)}: {first_line(error)}"
            failure = Failure(kind, health.rank, told, tuple(mute), call.what, call.sequence)
        raise health.error(health.fail(failure), None, call, reports) from error


def _connect_subset_engine(
    group: ProcessGroup, ranks: Sequence[int]
) -> tuple[Engine, BlockingStoreClient]:
    backend, recipe, family = find_backend(group._backend), group._recipe, group._roster.members
    store, mine = group._store, list(ranks).index(group._rank)
    assert store is not None, "those who are not there do not leave"
    name = f"{group._name}/{format_rank_ranges(ranks)} left"
    timeout = timedelta(seconds=group._timeout)
    forming = _SubsetRendezvous(
        store,
        rank=mine,
        terms=RendezvousTerms(name, tuple(ranks), backend.name, "", user_site()),
        timeout=timeout,
        kin=KnownPeers(
            tuple(family[rank] for rank in ranks), next_turn=partial(group._count_split, name)
        ),
    )
    forming.health = group._detector
    connecting = EngineSetup(
        forming,
        make=lambda room: backend.factory(
            room, mine, len(ranks), timeout, recipe.device, **recipe.options
        ),
        offer=None,
        lends_store=True,
    )
    engine = connecting.run(lambda: None, background=backend.traits.connects_in_background)
    return engine, forming.room


class _SubsetRendezvous(Rendezvous):
    """Forming that ends when the group does."""

    health: FailureDetector

    def look(self) -> None:
        """Raise if the engine cannot come about."""
        failure = self.health.failure
        if failure is not None:
            raise self.health.error(failure, None, None)
        super().look()


def _lost_failure(health: FailureDetector, lost: list[int], call: Call) -> Failure:
    told = f"{health.describe_ranks(lost)} {'is' if len(lost) == 1 else 'are'} dead"
    return Failure("lost", health.rank, told, tuple(lost), call.what, call.sequence)


MAX_KEPT_DEPARTURES = 4
"""Departures, from one return to the next, whose engines are kept for the next time."""


@dataclass
class _KeptEngine:
    engine: Engine
    departure: int
    """Its number among those since everybody was a member, when it was made."""
    used: int
    """The last return before which it was used."""
    room: BlockingStoreClient | None
    """Where its ranks have met."""


class SubsetEngines:
    """What a group has of engines beside the one that it uses."""

    def __init__(self, group: ProcessGroup) -> None:
        self.full: Engine = group._engine
        """The one of all ranks."""
        self.hall = RejoinBarrier(group._store, rank=group._rank, size=group._size)
        self.kept: dict[tuple[int, ...], _KeptEngine] = {}
        self.returns = 0
        self.departures = 0


def subset_engines_of(group: ProcessGroup) -> SubsetEngines:
    """Return a group's engines; most groups never need more than one."""
    if group._subset_engines is None:
        group._subset_engines = SubsetEngines(group)
    return group._subset_engines


def use_subset_engine(group: ProcessGroup, members: tuple[int, ...], call: Call) -> None:
    """Go on among some ranks, all of which do this at the same point."""
    mine = subset_engines_of(group)
    mine.departures += 1
    kept = mine.kept.get(members)
    if kept is None:
        single = len(members) == 1
        engine, room = (
            (single_rank_engine(), None) if single else connect_subset(group, members, call)
        )
        kept = _KeptEngine(engine, mine.departures, mine.returns, room)
    elif hasattr(kept.engine, "set_timeout"):
        kept.engine.set_timeout(group.timeout)
    kept.used = mine.returns
    with group._order, group._state:
        if group._closed or group._detector.failure is not None:
            refuse(group, call.operation)
        if members not in mine.kept:
            mine.kept[members] = kept
            register_engine(group._detector, kept.engine)
        inner = track_started_works(kept.engine, group._started_works)
        group._use(SubsetEngine(mine.full, inner, members, group._size), members)
    # A long row of departures is not to use up what a process may open. What one rank lets go of
    # now is not needed again before all of them do.
    if not group._detector.is_busy():
        _release_engines(
            group, mine, lambda kept: MAX_KEPT_DEPARTURES < kept.departure < mine.departures - 1
        )


def use_full_engine(group: ProcessGroup) -> None:
    """Go on among all ranks; everybody has come back, and nothing is under way."""
    mine = group._subset_engines
    if mine is None:
        return
    group._use(mine.full, None)
    mine.returns += 1
    mine.departures = 0


def release_stale_engines(group: ProcessGroup) -> None:
    """Let go of engines that are not worth keeping; everybody has come back."""
    mine = group._subset_engines
    if mine is None:
        return
    _release_engines(
        group,
        mine,
        lambda kept: kept.departure > MAX_KEPT_DEPARTURES or kept.used < mine.returns - 2,
    )


def _release_engines(
    group: ProcessGroup, mine: SubsetEngines, which: Callable[[_KeptEngine], bool]
) -> None:
    for members, kept in list(mine.kept.items()):
        if which(kept):
            del mine.kept[members]
            release_engine(group._detector, kept.engine)
            if kept.room is not None and group._rank == members[0]:
                _delete_rendezvous_keys(StoreClient(kept.room.raw))


def _delete_rendezvous_keys(room: StoreClient) -> None:
    """Take away what ranks have said to form an engine, but for what others may ask about."""
    with suppress(Exception):  # the store does not answer, and so has other troubles
        for key in room.all_keys():
            if key != "verdict":
                room.delete(key)


REJOIN_CHECK_INTERVAL = (
    0.5  # seconds between two looks around; a death, or an abort, ends a turn before
)
REJOIN_RETRY_DELAY = 0.01


def rejoin(group: ProcessGroup, timeout: timedelta | None) -> None:
    """Leave, unless this rank has, and become a member again together with all others."""
    seconds = group._timeout if timeout is None else _validation.seconds(timeout)
    _fault_point("before")
    with group._state:
        if group._is_rejoining:
            raise InvalidState("rejoin: another thread of this rank is in it")
        group._is_rejoining = True
    try:
        if not group._has_left:
            leave_during(group, "rejoin")
        elif group._detector.failure is not None:
            refuse(group, "rejoin")
        _fault_point("away")
        engine = group._engine if group._can_leave else subset_engines_of(group).hall
        _RejoinCall(group, engine, seconds).run()
    finally:
        group._is_rejoining = False


class _RejoinCall(PendingCall):
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
        group._detector.waiting = call
        try:
            most = self._await_all()
        except BaseException:
            group._recorder.undo(call)
            raise
        finally:
            group._detector.waiting = None
        with group._order, group._state:
            if not group._has_left:  # but closed meanwhile
                refuse(group, "rejoin")
            group._recorder.collectives = call.sequence = most
            group._recorder.starting = None
            call.ended = time.monotonic()
            group._announced = set()
            use_full_engine(group)
            group._reopen()
        release_stale_engines(group)
        _fault_point("after")

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
            turn = (
                min(REJOIN_CHECK_INTERVAL, max(self.deadline - began, 0.001))
                if error is None
                else 0.0
            )
            stage, most = self._engine.rejoin(calls, turn)
            if stage != before:
                error = None
                _fault_point(stage)
            if stage == "entered":
                return int(most)
            if stage == before:
                if error is not None:  # and nobody has come since it was found
                    raise error
                error = self._look()
                if (
                    error is None and time.monotonic() - began < REJOIN_RETRY_DELAY
                ):  # an engine that was woken
                    time.sleep(REJOIN_RETRY_DELAY)
            before = stage

    def _look(self) -> GroupError | None:
        """Find out whether this cannot end well any more, or not in time."""
        group, health = self._group, self._group._detector
        if not group._has_left:  # but closed
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
        health, missing = self._group._detector, self._engine.awaited()
        reports = health.ask()
        quiet = [r.quiet for r in reports.values() if r.rank in missing and r.quiet is not None]
        if quiet:
            self._counts_from = time.monotonic() - min(quiet)
        if time.monotonic() < self.deadline:
            return None
        who = (
            f": {format_ranks(missing)} did not come, and made no call meanwhile" if missing else ""
        )
        told = f"timed out after {self.timeout:g} s{who}{health.store_caveat()}"
        # The group is not broken by it: the others go on, and this rank may wait again.
        return health.error(self._failure("timeout", told, missing), self, self.call, reports)

    def _look_for_dead(self, closed: set[int]) -> None:
        """Fail the group if a rank is dead that has not come so far; what it did before counts."""
        health = self._group._detector
        dead = health.dead() - closed
        if lost := sorted(
            dead and dead & set(self._engine.awaited())
        ):  # final, now that it is known
            told = f"{health.describe_ranks(lost)} {'is' if len(lost) == 1 else 'are'} dead"
            health.fail(self._failure("lost", told, lost))

    def _closed_by(self, closed: dict[int, tuple[int, str]]) -> Failure | None:
        """Find a rank that has shut the group down, and so will not come."""
        for rank in sorted(closed and closed.keys() & set(self._engine.awaited())):
            told = f"rank {rank} shut the group down at {closed[rank][1]}"
            return self._failure("aborted", told, [rank])
        return None

    def _failure(self, kind: FailureKind, cause: str, ranks: list[int]) -> Failure:
        return Failure(kind, self._group._rank, cause, tuple(ranks), "rejoin", self.call.sequence)


def _fault_point(point: str) -> None:
    if faultpoints.armed:
        faultpoints.reach(f"rejoin:{point}")


LEAVES, STAYS = 1, 2


def update_membership(group: ProcessGroup, stays: bool) -> tuple[int, ...]:
    """Find out who stays, and go on among those."""
    device = group._recipe.device
    said = torch.tensor([STAYS if stays else LEAVES], dtype=torch.uint8, device=device)
    heard = torch.zeros(group._size, dtype=torch.uint8, device=device)  # who has left says nothing
    work = group._gather_into("update_membership", [heard], [said], None, None)
    work.wait()
    answers = list(enumerate(heard.tolist()))
    staying = tuple(rank for rank, answer in answers if answer == STAYS)
    leaving = {rank for rank, answer in answers if answer == LEAVES}
    if not stays:
        leave_during(group, "update_membership")
        if not group._can_leave:
            group._detector.set_members(staying)
    elif leaving and not group._can_leave:
        use_subset_engine(group, staying, work.call)
    group._announced |= leaving
    return staying
