"""How ranks become a group: everybody signs in, rank 0 compares, everybody reads the verdict.

The work is one write and one short poll per rank, and rank 0 reads each sign-in once. Whatever
could make ranks wait for each other without end is looked for while they wait: a rank that never
comes, one that forms another group instead, one that disagrees on the size or the backend, two
processes that claim the same rank, one that died after it signed in.
"""

from __future__ import annotations

import json
import os
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any, NoReturn, TypeVar

from .. import _faultpoints as faultpoints
from ..errors import (
    GroupError,
    InvalidState,
    PeerLost,
    PhalanxError,
    RankMismatch,
    RendezvousError,
    RendezvousTimeout,
)
from ._patient import PatientStore, borrow_thread
from ._roster import Member, Roster
from ._words import first_line, runs

__all__ = ["Terms", "connect", "form", "next_default_name"]

T = TypeVar("T")

LOOK_ELSEWHERE_AFTER = 1.0  # seconds before a waiting rank asks what the others are doing instead


@dataclass(frozen=True)
class Terms:
    """What every rank must say alike to form a group, and where it said it."""

    name: str
    seats: tuple[int, ...]
    """The ranks in a numbering that all users of the store share, for groups that form at the same
    time have different ranks of the same number."""
    backend: str
    options: str
    site: str

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Terms:
        """Read what `asdict` wrote."""
        return cls(**{**data, "seats": tuple(data["seats"])})

    @property
    def size(self) -> int:
        """How many ranks the group has."""
        return len(self.seats)

    @property
    def room(self) -> str:
        """Where its ranks meet; two splits of one name are two groups."""
        whole = self.seats == tuple(range(self.size))
        return self.name if whole else f"{self.name}@{runs(self.seats)}"

    def agrees(self, other: Terms) -> bool:
        """Tell whether two ranks want the same group; the line of code may differ."""
        return self._key() == other._key()

    def _key(self) -> tuple[object, ...]:
        return self.name, self.seats, self.backend, self.options

    def __str__(self) -> str:
        options = f" with {self.options}" if self.options else ""
        return f"group {self.name!r} of {self.size} on {self.backend}{options} at {self.site}"


def next_default_name(store: PatientStore, rank: int) -> str:
    """Name a group that the user did not name: by its turn among those of this store."""
    return f"group{_next_turn(store.under('phalanx/unnamed'), rank) - 1}"


def _next_turn(store: PatientStore, rank: int) -> int:
    """Count how often this rank was here, past the turns that failed while it was away."""
    turn = store.add(f"turn/{rank}", 1)
    failed = int(store.read("failed") or 0)
    return turn if turn > failed else store.add(f"turn/{rank}", failed + 1 - turn)


def form(
    store: PatientStore, *, rank: int, terms: Terms, member: Member, timeout: timedelta
) -> tuple[Roster, PatientStore]:
    """Meet the other ranks; returns who they are and a store of the group's own."""
    return _Forming(store, rank, terms, member, timeout).run()


def connect(
    make: Callable[[], T],
    room: PatientStore,
    *,
    terms: Terms,
    rank: int,
    roster: Roster,
    timeout: timedelta,
    background: bool,
) -> T:
    """Make this rank's engine, and go on when all ranks have made theirs.

    Otherwise a rank that is done with the group at once would hang up on those still connecting.
    """
    deadline = time.monotonic() + timeout.total_seconds()

    def look() -> None:
        _look_for_death(terms, roster, expired=time.monotonic() >= deadline)

    try:
        engine = _in_background(make, look) if background else make()
    except (PeerLost, RendezvousTimeout):
        raise  # the connection to the store may still be taken by what was given up
    except Exception as error:
        room.set("broken", f"rank {rank}: {first_line(error)}")
        if isinstance(error, PhalanxError) or not isinstance(error, RuntimeError):
            raise
        look()  # a death explains it better
        raise RendezvousError(f"{terms} did not connect: {first_line(error)}") from error
    if room.add("connected", 1) == terms.size:
        room.set("complete", "")
    pause = 0.0005
    while not room.has("complete"):
        look()
        broken = room.read("broken")
        if broken is not None:
            raise RendezvousError(f"{terms} did not connect: {broken.decode()}")
        time.sleep(pause)
        pause = min(pause * 1.5, 0.05)
    return engine


def _in_background(make: Callable[[], T], look: Callable[[], None]) -> T:
    """Make an engine on a borrowed thread, and look for trouble while it connects."""
    made: list[T] = []
    errors: list[Exception] = []
    ended = threading.Event()
    # Threads inherit the cores that they may run on. The engine's are to have the caller's, not
    # those that the borrowed thread happened to be made with.
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None

    def work() -> None:
        try:
            if cores is not None:
                os.sched_setaffinity(0, cores)
            made.append(make())
        except Exception as error:  # noqa: BLE001 - raised again by whoever waits
            errors.append(error)
        finally:
            ended.set()

    borrow_thread(work)
    while not ended.wait(0.25):
        look()
    if errors:
        raise errors[0]
    return made[0]


def _look_for_death(terms: Terms, roster: Roster, *, expired: bool) -> None:
    """Ask nobody: an engine that is being made may have the connection to the store for itself."""
    dead = roster.dead()
    if dead:
        raise _death(dead, roster.members[dead[0]], terms)
    if expired:
        raise RendezvousTimeout(f"{terms} did not connect in time: some rank's engine is stuck")


class _Forming:
    def __init__(
        self,
        store: PatientStore,
        rank: int,
        terms: Terms,
        member: Member,
        timeout: timedelta,
    ) -> None:
        self._store = store
        self._rank = rank
        self._terms = terms
        self._member = member
        self._started = time.monotonic()
        self._deadline = self._started + timeout.total_seconds()
        self._timeout = timeout
        self._room = self._hall = store  # `_enter` knows better
        self._turn = 0

    def run(self) -> tuple[Roster, PatientStore]:
        self._enter()
        try:
            verdict = self._judge() if self._rank == 0 else self._await_verdict()
        except BaseException as error:
            self._leave_failed(error)
            raise
        finally:
            self._store.set(self._forming_key(self._rank), "")
        members = tuple(Member.from_json(data) for data in verdict["members"])
        return Roster(token=verdict["token"], members=members), self._room

    # -- signing in ------------------------------------------------------------------------

    def _enter(self) -> None:
        """Sign in, in the room of this name's n-th use."""
        hall = self._store.under(f"phalanx/{self._terms.room}")
        turn = _next_turn(hall, self._rank)
        if turn > 1:
            self._refuse_second_claim(hall, turn)
        self._hall, self._turn = hall, turn
        self._room = hall.under(str(turn))
        signed = json.dumps(
            {"terms": asdict(self._terms), "member": self._member.to_json(), "turn": turn}
        )
        self._store.set(self._forming_key(self._rank), signed)
        self._room.set(f"member/{self._rank}", signed)
        if faultpoints.armed:
            faultpoints.reach("form:signed in")

    def _refuse_second_claim(self, hall: PatientStore, turn: int) -> None:
        """A name may be used again, but not by another process while the first one lives."""
        signed = hall.under(str(turn - 1)).read(f"member/{self._rank}")
        if signed is None:
            return
        holder = Member.from_json(json.loads(signed)["member"])
        same_process = (holder.machine, holder.pid) == (self._member.machine, self._member.pid)
        if not same_process and not holder.is_dead:
            hall.add(f"turn/{self._rank}", -1)  # it is the holder's to count
            raise InvalidState(
                f"rank {self._rank} of {self._terms} is taken by {holder}: two processes were "
                "given the same rank; check RANK, or the rank argument"
            )

    def _leave_failed(self, error: BaseException) -> None:
        """Close the room: a rank that was not here must not look for the others in it later."""
        if isinstance(error, RuntimeError) and not self._store_failed(error):
            self._hall.set("failed", str(self._turn))

    def _store_failed(self, error: RuntimeError) -> bool:
        return not isinstance(error, PhalanxError)

    def _forming_key(self, rank: int) -> str:
        return f"phalanx/forming/{self._terms.seats[rank]}"

    # -- rank 0 ----------------------------------------------------------------------------

    def _judge(self) -> dict[str, Any]:
        members: dict[int, Member] = {0: self._member}
        try:
            self._poll(lambda: self._collect(members), lambda: self._missing(members))
        except PhalanxError as error:
            self._room.write_once("verdict", json.dumps(_told(error)))
            raise
        verdict = {
            "token": uuid.uuid4().hex,
            "members": [members[rank].to_json() for rank in range(self._terms.size)],
        }
        self._room.set("verdict", json.dumps(verdict))
        return verdict

    def _collect(self, members: dict[int, Member]) -> bool:
        """Read who has come since; refuse the first that disagrees."""
        verdict = self._room.read("verdict")
        if verdict is not None:  # somebody who should be here waits for us elsewhere
            raise _retold(json.loads(verdict))
        for rank in self._missing(members):
            data = self._room.read(f"member/{rank}")
            if data is None:
                continue
            signed = json.loads(data)
            theirs = Terms.from_json(signed["terms"])
            if not theirs.agrees(self._terms):
                raise self._disagreement(rank, theirs)
            members[rank] = Member.from_json(signed["member"])
        dead = [rank for rank, member in members.items() if member.is_dead]
        if dead:
            raise _death(dead, members[dead[0]], self._terms)
        return len(members) == self._terms.size

    def _missing(self, members: dict[int, Member]) -> list[int]:
        return [rank for rank in range(self._terms.size) if rank not in members]

    # -- the other ranks -------------------------------------------------------------------

    def _await_verdict(self) -> dict[str, Any]:
        self._poll(self._has_verdict, self._absent)
        verdict: dict[str, Any] = json.loads(self._room.read("verdict") or "{}")
        if "error" in verdict:
            raise _retold(verdict)
        if len(verdict["members"]) != self._terms.size:
            rank0 = json.loads(self._room.read("member/0") or "{}")
            raise self._disagreement(0, Terms.from_json(rank0["terms"]))
        return verdict

    def _has_verdict(self) -> bool:
        if self._room.has("verdict"):
            return True
        judge = self._room.read("member/0")
        if judge is not None:
            member = Member.from_json(json.loads(judge)["member"])
            if member.is_dead and not self._room.has("verdict"):
                raise _death([0], member, self._terms)
        return False

    def _absent(self) -> list[int]:
        ranks = range(self._terms.size)
        return [rank for rank in ranks if not self._room.has(f"member/{rank}")]

    # -- waiting ---------------------------------------------------------------------------

    def _poll(self, arrived: Callable[[], bool], missing: Callable[[], list[int]]) -> None:
        pause = 0.001
        suspects: dict[int, Terms] = {}
        asked = self._started
        while not arrived():
            now = time.monotonic()
            if now >= self._deadline:
                self._give_up(missing())
            if now - asked >= LOOK_ELSEWHERE_AFTER:
                asked = now
                suspects = self._look_elsewhere(missing(), suspects)
            time.sleep(min(pause, max(self._deadline - now, 0)))
            pause = min(pause * 1.5, 0.05)

    def _look_elsewhere(self, missing: list[int], before: dict[int, Terms]) -> dict[int, Terms]:
        """Find ranks that form another group while this one waits for them.

        Seen twice, a while apart, it is no accident: unless another thread of this process goes
        to meet them there, both sides would wait for ever.
        """
        found = {}
        for rank in missing:
            data = self._store.read(self._forming_key(rank))
            if not data:
                continue
            signed = json.loads(data)
            theirs = Terms.from_json(signed["terms"])
            # Elsewhere is no harm, unless they wait for this very rank there.
            needs_me = self._terms.seats[self._rank] in theirs.seats
            alive = not Member.from_json(signed["member"]).is_dead
            if theirs.room != self._terms.room and needs_me and alive:
                found[rank] = theirs
                if before.get(rank) == theirs:
                    error = self._disagreement(rank, theirs)
                    # They are told in their own room, for this rank will not be here to be seen.
                    there = self._store.under(f"phalanx/{theirs.room}/{signed['turn']}")
                    there.write_once("verdict", json.dumps(_told(error)))
                    raise error
        return found

    def _disagreement(self, rank: int, theirs: Terms) -> RankMismatch:
        sides = sorted([(self._rank, self._terms), (rank, theirs)], key=lambda side: side[0])
        told = ", ".join(f"rank {rank} forms {terms}" for rank, terms in sides)
        return RankMismatch(
            f"ranks disagree on the group to form: {told}. Every rank must form the same groups in "
            "the same order",
            group=self._terms.name,
            ranks=[side[0] for side in sides],
        )

    def _give_up(self, missing: list[int]) -> NoReturn:
        who = ", ".join(map(str, missing)) or "0 (which signed in but never answered)"
        raise RendezvousTimeout(
            f"{self._terms} did not form within {self._timeout.total_seconds():g} s: rank "
            f"{self._rank} is here, missing: {who}. Did those processes start, with the same store "
            "and world size?"
        )


def _death(ranks: list[int], first: Member, terms: Terms) -> PeerLost:
    told = f"rank {ranks[0]} ({first}) died while {terms} was forming"
    return PeerLost(told, group=terms.name, ranks=ranks)


_TELLABLE: dict[str, type[GroupError] | type[RendezvousError]] = {
    error.__name__: error for error in (RankMismatch, PeerLost, RendezvousTimeout, RendezvousError)
}


def _told(error: PhalanxError) -> dict[str, Any]:
    return {
        "error": type(error).__name__,
        "message": str(error),
        "ranks": getattr(error, "ranks", ()),
        "group": getattr(error, "group", ""),
    }


def _retold(verdict: dict[str, Any]) -> PhalanxError:
    """Raise here what rank 0 raised there."""
    kind = _TELLABLE.get(verdict["error"], RendezvousError)
    if issubclass(kind, GroupError):
        return kind(verdict["message"], group=verdict["group"], ranks=verdict["ranks"])
    return kind(verdict["message"])
