"""How ranks become a group: everybody signs in, rank 0 compares, everybody reads the verdict.

The work is one write and one short poll per rank, and rank 0 reads each sign-in once. Whatever
could make ranks wait for each other without end is looked for while they wait: a rank that never
comes, one that forms another group instead, one that disagrees on the size or the backend, two
processes that claim the same rank, one that died after it signed in.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Sequence
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
from ._patient import PatientStore
from ._roster import Member, Roster
from ._words import first_line

__all__ = ["Terms", "connect", "form", "next_default_name"]

T = TypeVar("T")

LOOK_ELSEWHERE_AFTER = 1.0  # seconds before a waiting rank asks what the others are doing instead


@dataclass(frozen=True)
class Terms:
    """What every rank must say alike to form a group, and where it said it."""

    name: str
    size: int
    backend: str
    options: str
    site: str

    def agrees(self, other: Terms) -> bool:
        """Tell whether two ranks want the same group; the line of code may differ."""
        return self._key() == other._key()

    def _key(self) -> tuple[object, ...]:
        return self.name, self.size, self.backend, self.options

    def __str__(self) -> str:
        options = f" with {self.options}" if self.options else ""
        return f"group {self.name!r} of {self.size} on {self.backend}{options} at {self.site}"


def next_default_name(store: PatientStore, rank: int) -> str:
    """Name a group that the user did not name: by its turn among those of this store."""
    return f"group{store.add(f'phalanx/unnamed/{rank}', 1) - 1}"


def form(
    store: PatientStore,
    *,
    rank: int,
    seats: Sequence[int],
    terms: Terms,
    member: Member,
    timeout: timedelta,
) -> tuple[Roster, PatientStore]:
    """Meet the other ranks; returns who they are and a store of the group's own.

    `seats` numbers the ranks in a way that all users of the store share, for groups that form at
    the same time have different ranks of the same number.
    """
    return _Forming(store, rank, seats, terms, member, timeout).run()


def connect(
    make: Callable[[], T],
    room: PatientStore,
    *,
    terms: Terms,
    rank: int,
    roster: Roster,
    timeout: timedelta,
) -> T:
    """Make this rank's engine, and go on when all ranks have made theirs.

    Otherwise a rank that is done with the group at once would hang up on those still connecting.
    """
    deadline = time.monotonic() + timeout.total_seconds()
    try:
        engine = make()
    except Exception as error:
        room.set("broken", f"rank {rank}: {first_line(error)}")
        if isinstance(error, PhalanxError) or not isinstance(error, RuntimeError):
            raise
        raise RendezvousError(f"{terms} did not connect: {first_line(error)}") from error
    if room.add("connected", 1) == terms.size:
        room.set("complete", "")
    pause = 0.0005
    while not room.has("complete"):
        _look_for_trouble(room, terms, roster, expired=time.monotonic() >= deadline)
        time.sleep(pause)
        pause = min(pause * 1.5, 0.05)
    return engine


def _look_for_trouble(room: PatientStore, terms: Terms, roster: Roster, *, expired: bool) -> None:
    broken = room.read("broken")
    if broken is not None:
        raise RendezvousError(f"{terms} did not connect: {broken.decode()}")
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
        seats: Sequence[int],
        terms: Terms,
        member: Member,
        timeout: timedelta,
    ) -> None:
        self._store = store
        self._rank = rank
        self._seats = seats
        self._terms = terms
        self._member = member
        self._started = time.monotonic()
        self._deadline = self._started + timeout.total_seconds()
        self._timeout = timeout
        self._room = store  # set by `_enter`

    def run(self) -> tuple[Roster, PatientStore]:
        try:
            self._enter()
            verdict = self._judge() if self._rank == 0 else self._await_verdict()
        except PhalanxError:
            raise
        except RuntimeError as error:
            raise RendezvousError(
                f"the store failed while {self._terms} was forming: {first_line(error)}"
            ) from error
        self._store.set(f"phalanx/forming/{self._seats[self._rank]}", "")
        members = tuple(Member.from_json(data) for data in verdict["members"])
        return Roster(token=verdict["token"], members=members), self._room

    # -- signing in ------------------------------------------------------------------------

    def _enter(self) -> None:
        """Sign in, in the room of this name's n-th use."""
        turn = self._store.add(f"phalanx/{self._terms.name}/turn/{self._rank}", 1)
        if turn > 1:
            self._refuse_second_claim(turn)
        self._room = self._store.under(f"phalanx/{self._terms.name}/{turn}")
        signed = json.dumps({"terms": asdict(self._terms), "member": self._member.to_json()})
        self._store.set(
            f"phalanx/forming/{self._seats[self._rank]}", json.dumps(asdict(self._terms))
        )
        self._room.set(f"member/{self._rank}", signed)
        if faultpoints.armed:
            faultpoints.reach("form:signed in")

    def _refuse_second_claim(self, turn: int) -> None:
        """A name may be used again, but not by another process while the first one lives."""
        before = self._store.under(f"phalanx/{self._terms.name}/{turn - 1}")
        signed = before.read(f"member/{self._rank}")
        if signed is None:
            return
        holder = Member.from_json(json.loads(signed)["member"])
        same_process = (holder.machine, holder.pid) == (self._member.machine, self._member.pid)
        if not same_process and not holder.is_dead:
            raise InvalidState(
                f"rank {self._rank} of {self._terms} is taken by {holder}: two processes were "
                "given the same rank; check RANK, or the rank argument"
            )

    # -- rank 0 ----------------------------------------------------------------------------

    def _judge(self) -> dict[str, Any]:
        members: dict[int, Member] = {0: self._member}
        try:
            self._poll(lambda: self._collect(members), lambda: self._missing(members))
        except PhalanxError as error:
            self._room.set("verdict", json.dumps(_told(error)))
            raise
        verdict = {
            "token": uuid.uuid4().hex,
            "members": [members[rank].to_json() for rank in range(self._terms.size)],
        }
        self._room.set("verdict", json.dumps(verdict))
        return verdict

    def _collect(self, members: dict[int, Member]) -> bool:
        """Read who has come since; refuse the first that disagrees."""
        for rank in self._missing(members):
            data = self._room.read(f"member/{rank}")
            if data is None:
                continue
            signed = json.loads(data)
            theirs = Terms(**signed["terms"])
            if not theirs.agrees(self._terms):
                self._refuse(rank, theirs)
            members[rank] = Member.from_json(signed["member"])
        dead = [rank for rank, member in members.items() if member.is_dead]
        if dead:
            raise _death(dead, members[dead[0]], self._terms)
        return len(members) == self._terms.size

    def _missing(self, members: dict[int, Member]) -> list[int]:
        return [rank for rank in range(self._terms.size) if rank not in members]

    # -- the other ranks -------------------------------------------------------------------

    def _await_verdict(self) -> dict[str, Any]:
        self._poll(lambda: self._room.has("verdict"), self._absent)
        verdict: dict[str, Any] = json.loads(self._room.read("verdict") or "{}")
        if "error" in verdict:
            raise _retold(verdict)
        if len(verdict["members"]) != self._terms.size:
            rank0 = json.loads(self._room.read("member/0") or "{}")
            self._refuse(0, Terms(**rank0["terms"]))
        return verdict

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
            data = self._store.read(f"phalanx/forming/{self._seats[rank]}")
            if not data:
                continue
            theirs = Terms(**json.loads(data))
            if theirs.name != self._terms.name:
                found[rank] = theirs
                if before.get(rank) == theirs:
                    self._refuse(rank, theirs)
        return found

    def _refuse(self, rank: int, theirs: Terms) -> NoReturn:
        sides = sorted([(self._rank, self._terms), (rank, theirs)], key=lambda side: side[0])
        told = ", ".join(f"rank {rank} forms {terms}" for rank, terms in sides)
        raise RankMismatch(
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
