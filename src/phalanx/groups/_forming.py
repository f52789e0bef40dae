"""How ranks become a group: everybody signs in, rank 0 compares, everybody reads the verdict.

A rank writes once and waits in the store; rank 0 reads each sign-in once, or not at all where the
ranks know each other and all say the same. Whatever could make ranks wait for each other without
end is looked for while they wait: a rank that never comes, one that forms another group instead,
one that disagrees on the size or the backend, two processes that claim the same rank, one that died
after it signed in.

All of it is done on a borrowed thread, for a store's host may be stopped or out of reach.
"""

from __future__ import annotations

import hashlib
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol, TypeVar

from torch._C._distributed_c10d import Store

from .. import _faultpoints as faultpoints
from ..errors import InvalidState, PhalanxError, RankMismatch, RendezvousError, RendezvousTimeout
from ._background import in_background
from ._patient import PatientStore, PlainStore
from ._roster import Member, Roster
from ._telling import SignIn, Terms, Verdict, death

__all__ = ["Forming", "Kin", "Purpose", "next_default_name"]

T = TypeVar("T")

TURN = 0.05  # seconds for which others cannot ask on the same connection
LOOK_ELSEWHERE_AFTER = 1.0  # seconds before a waiting rank asks what the others are doing instead
GRACE = 0.5  # seconds for the thread that knows more to say why time is up


@dataclass(frozen=True)
class Kin:
    """What ranks of one group know of each other before they form another."""

    members: tuple[Member, ...]
    next_turn: Callable[[], int]
    """Counts how often this rank has come to form a group of this name, as the others do."""
    crowd: int = 1
    """How many ranks of the group that they come from share this rank's machine."""

    @property
    def one_machine(self) -> bool:
        """Whether all of them are on one machine."""
        return len({member.machine for member in self.members}) == 1


class Purpose(Protocol):
    """What a group is for, from which can be seen that ranks meet by mistake."""

    @property
    def text(self) -> str:
        """What all members say alike, mostly."""

    def notes(self) -> dict[str, str]:
        """Return what to write into the store, by key, for others to read."""

    def contradiction(self, store: PlainStore, members: Sequence[int]) -> RankMismatch | None:
        """Tell what is wrong with one of these members, if anything is.

        It is asked about those that have another purpose, and about those that do not come.
        """


def next_default_name(store: PatientStore, rank: int) -> str:
    """Name a group that the user did not name: by its turn among those of this store."""
    return f"group{store.add(f'phalanx/unnamed/turn/{rank}', 1) - 1}"


class Forming:
    """One rank's way into a group."""

    def __init__(
        self,
        store: Store,
        *,
        rank: int,
        terms: Terms,
        timeout: timedelta,
        kin: Kin | None = None,
        purpose: Purpose | None = None,
        name_number: int = 0,
    ) -> None:
        self.terms = terms
        self.rank = rank
        self.roster: Roster | None = None
        """The members, once they are known."""
        self._store = PlainStore(store)
        self._hall = self._store.under(f"phalanx/{terms.room}")
        self._member = Member.here() if kin is None else kin.members[rank]
        self._kin = kin
        self._purpose = purpose
        self._name_number = name_number
        self._timeout = timeout
        self._started = time.monotonic()
        self.deadline = self._started + timeout.total_seconds()
        self._turn = 0
        self._room = self._hall  # `_enter` knows better
        self._given_up: PhalanxError | None = None

    @property
    def room(self) -> PlainStore:
        """A part of the store that is the group's own."""
        return self._room

    @property
    def has_signed_in(self) -> bool:
        """Whether this rank has a room, and others may know that it has come."""
        return self._room is not self._hall

    def carry_out(self, work: Callable[[], T], look: Callable[[], None] | None = None) -> T:
        """Run a part of the forming on a borrowed thread, and notice deaths and the deadline.

        `look` notices more than that, and raises too.
        """
        if self._kin is not None and self.roster is None:
            self.roster = Roster(token="", members=self._kin.members)
        try:
            return in_background(work, self.look if look is None else look)
        except BaseException as error:
            if not isinstance(error, PhalanxError):
                self._given_up = RendezvousError(f"{self.terms} was given up by rank {self.rank}")
            else:
                self._given_up = error
            raise

    def check_given_up(self) -> None:
        """Raise, on the borrowed thread, what the caller has raised already."""
        if self._given_up is not None:
            raise self._given_up

    def look(self) -> None:
        """Raise if the group cannot come about; asks nobody, for the store may not answer."""
        members = () if self.roster is None else self.roster.members
        dead = [rank for rank, member in enumerate(members) if member.is_dead]
        if dead:
            raise death(dead, members[dead[0]], self.terms)
        if time.monotonic() >= self.deadline + GRACE:
            raise RendezvousTimeout(
                f"{self.terms} did not form in time: the store does not answer, or some rank's "
                "engine is stuck"
            )

    def meet(self, offer: Callable[[], dict[str, Any] | None]) -> Verdict:
        """Sign in and return the verdict; rank 0 makes the `offer` that goes with it."""
        while True:
            self._enter()
            verdict = self._judge(offer) if self.rank == 0 else self._await_verdict()
            late = verdict.here is not None and self.rank not in verdict.here
            if not late:  # otherwise it was for those who were here then, and this turn is over
                break
        if verdict.error is not None:
            raise verdict.error
        members = verdict.members if self._kin is None else self._kin.members
        self.roster = Roster(token=verdict.token, members=members)
        return verdict

    def contradiction(self) -> RankMismatch | None:
        """Tell whether ranks of different purposes have met by mistake."""
        purpose = self._purpose
        if purpose is None:
            return None
        return self.carry_out(lambda: purpose.contradiction(self._store, self._others()))

    # -- signing in ------------------------------------------------------------------------

    def _enter(self) -> None:
        """Sign in, in the room of this name's n-th use."""
        if self._kin is not None:
            self._turn = self._kin.next_turn()
        else:
            self._turn = self._hall.add(f"turn/{self.rank}", 1)
            if self._turn > 1:
                self._refuse_second_claim()
        self._room = self._hall.under(str(self._turn))
        purpose = "" if self._purpose is None else self._purpose.text
        sign_in = SignIn(self.terms, self._member, self._turn, purpose, self._name_number)
        signed = sign_in.to_json()
        here = f"phalanx/{self.terms.room}/{self._turn}"
        notes = {} if self._purpose is None else self._purpose.notes()
        self._store.set_all(
            {
                **notes,
                self._forming_key(self.rank): signed,
                f"{here}/member/{self.rank}": signed,
                f"{here}/{self._like(self.rank)}": "",
            }
        )
        if faultpoints.armed:
            faultpoints.reach("form:signed in")

    def _refuse_second_claim(self) -> None:
        """A name may be used again, but not by another process while the first one lives."""
        signed = self._hall.under(str(self._turn - 1)).read(f"member/{self.rank}")
        if signed is None:
            return
        holder = SignIn.from_json(signed).member
        same_process = (holder.machine, holder.pid) == (self._member.machine, self._member.pid)
        if not same_process and not holder.is_dead:
            self._hall.add(f"turn/{self.rank}", -1)  # it is the holder's to count
            raise InvalidState(
                f"rank {self.rank} of {self.terms} is taken by {holder}: two processes were "
                "given the same rank; check RANK, or the rank argument"
            )

    def _forming_key(self, rank: int) -> str:
        return f"phalanx/forming/{self.terms.seats[rank]}"

    def _like(self, rank: int) -> str:
        """Name a key that only a rank which says all the same writes."""
        purpose = "" if self._purpose is None else self._purpose.text
        said = repr((self.terms.key(), purpose, self._name_number)).encode()
        return f"like/{hashlib.blake2b(said, digest_size=8).hexdigest()}/{rank}"

    # -- rank 0 ----------------------------------------------------------------------------

    def _judge(self, offer: Callable[[], dict[str, Any] | None]) -> Verdict:
        signed: dict[int, SignIn] = {}
        others = self._others()
        wanted = [f"member/{r}" if self._kin is None else self._like(r) for r in others]
        try:
            arrived = self._wait(wanted, lambda: self._collect(signed))
            if isinstance(arrived, Verdict):  # somebody who should be here waits for us elsewhere
                return arrived
            if self._kin is None:
                self._read(signed, self._room.fetch)
        except PhalanxError as error:
            return self._close(error)
        members = () if self._kin else (self._member, *(signed[r].member for r in others))
        purpose = "" if self._purpose is None else self._purpose.text
        alike = all(each.purpose == purpose for each in signed.values())
        number = max([self._name_number, *(each.name_number for each in signed.values())])
        made = Verdict(uuid.uuid4().hex, members, alike, offer(), number)
        return self._settle(made)

    def _collect(self, signed: dict[int, SignIn]) -> bool:
        """Read who has come since; refuse the first that disagrees."""
        self._read(signed, self._room.read)
        members = {rank: each.member for rank, each in signed.items()}
        dead = [rank for rank, member in members.items() if member.is_dead]
        if dead:
            raise death(dead, members[dead[0]], self.terms)
        return len(signed) == self.terms.size - 1

    def _read(self, signed: dict[int, SignIn], read: Callable[[str], bytes | None]) -> None:
        for rank in self._others():
            data = None if rank in signed else read(f"member/{rank}")
            if data is not None:
                signed[rank] = SignIn.from_json(data)
                if not signed[rank].terms.agrees(self.terms):
                    raise self._disagreement(rank, signed[rank].terms)

    # -- the other ranks -------------------------------------------------------------------

    def _await_verdict(self) -> Verdict:
        try:
            self._wait(["verdict"], self._look_at_judge)
        except PhalanxError as error:
            return self._close(error)
        verdict = Verdict.from_json(self._room.fetch("verdict"))
        return verdict if verdict.error is not None else self._agreed(verdict)

    def _agreed(self, verdict: Verdict) -> Verdict:
        """Check that the verdict is about the same group: a rank too many is told so."""
        if self._kin is None and len(verdict.members) != self.terms.size:
            judge = SignIn.from_json(self._room.fetch("member/0"))
            return Verdict(error=self._disagreement(0, judge.terms))
        return verdict

    def _look_at_judge(self) -> bool:
        judge = self._room.read("member/0")
        if judge is not None:
            member = SignIn.from_json(judge).member
            if member.is_dead and not self._room.has("verdict"):
                raise death([0], member, self.terms)
        return False

    # -- the verdict -----------------------------------------------------------------------

    def _settle(self, verdict: Verdict) -> Verdict:
        """Write down a verdict unless there is one, and return the one that holds."""
        return Verdict.from_json(self._room.write_once("verdict", verdict.to_json()))

    def _close(self, error: PhalanxError) -> Verdict:
        """Close the room: a rank that was not here must not look for the others in it later."""
        here = tuple(set(range(self.terms.size)) - set(self._absent()))
        settled = self._settle(Verdict(error=error, here=here))
        if settled.error is not None and str(settled.error) == str(error):
            return Verdict(error=error)  # as it was raised, with all that it knows
        return settled

    # -- waiting ---------------------------------------------------------------------------

    def _wait(self, keys: Sequence[str], arrived: Callable[[], bool]) -> Verdict | None:
        """Wait for keys; returns early with a verdict that somebody else has written down."""
        if not keys:
            return None
        suspects: dict[int, Terms] = {}
        asked = self._started
        while not self._room.await_all(keys, min(TURN, self._time_left())):
            self.check_given_up()
            verdict = self._room.read("verdict")
            if verdict is not None:
                return Verdict.from_json(verdict)
            if arrived():
                break
            now = time.monotonic()
            if now >= self.deadline:
                raise self._timed_out(self._absent())
            if now - asked >= LOOK_ELSEWHERE_AFTER:
                asked = now
                suspects = self._look_elsewhere(self._absent(), suspects)
        return None

    def _time_left(self) -> float:
        return max(self.deadline - time.monotonic(), 0.001)

    def _others(self) -> list[int]:
        return [rank for rank in range(self.terms.size) if rank != self.rank]

    def _absent(self) -> list[int]:
        ranks = range(self.terms.size)
        return [rank for rank in ranks if not self._room.has(f"member/{rank}")]

    def _look_elsewhere(self, missing: list[int], before: dict[int, Terms]) -> dict[int, Terms]:
        """Find ranks that form another group while this one waits for them.

        Seen twice, a while apart, it is no accident: unless another thread of this process goes
        to meet them there, both sides would wait for ever.
        """
        contradiction = self._purpose and self._purpose.contradiction(self._store, missing)
        if contradiction:
            raise contradiction
        found = {}
        for rank in missing:
            data = self._store.read(self._forming_key(rank))
            if not data:
                continue
            signed = SignIn.from_json(data)
            theirs = signed.terms
            # Elsewhere is no harm, unless they wait for this very rank there.
            needs_me = self.terms.seats[self.rank] in theirs.seats
            there = self._store.under(f"phalanx/{theirs.room}/{signed.turn}")
            if theirs.room == self.terms.room or not needs_me or there.has("verdict"):
                continue
            if not signed.member.is_dead:
                found[rank] = theirs
                if before.get(rank) == theirs:
                    error = self._disagreement(rank, theirs)
                    # They are told in their own room, for this rank will not be here to be seen.
                    there.write_once("verdict", Verdict(error=error).to_json())
                    raise error
        return found

    def _disagreement(self, rank: int, theirs: Terms) -> RankMismatch:
        sides = sorted([(self.rank, self.terms), (rank, theirs)], key=lambda side: side[0])
        told = ", ".join(f"rank {rank} forms {terms}" for rank, terms in sides)
        return RankMismatch(
            f"ranks disagree on the group to form: {told}. Every rank must form the same groups in "
            "the same order",
            group=self.terms.name,
            ranks=[side[0] for side in sides],
        )

    def _timed_out(self, missing: list[int]) -> RendezvousTimeout:
        who = ", ".join(map(str, missing)) or "0 (which signed in but never answered)"
        return RendezvousTimeout(
            f"{self.terms} did not form within {self._timeout.total_seconds():g} s: rank "
            f"{self.rank} is here, missing: {who}. Did those processes start, with the same store "
            "and world size?"
        )
