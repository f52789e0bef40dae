"""Rendezvous: ranks meet in a store, agree on the group to form and connect their engines.

Every rank writes a `RendezvousRequest`; rank 0 compares them and writes one `RendezvousResult`,
which all ranks read. Ranks that already know each other, as in a split, skip reading the
requests. Then each rank builds its engine (`EngineSetup`), either from something that rank 0
offers with the result or by connecting through the store; the group exists when all ranks have
an engine.

Everything that could make ranks wait for each other without end is checked while they wait: a
rank that never comes, forms another group, disagrees on size or backend, claims a rank that is
taken, or dies. A rank that fails on the way writes down why, and the others raise it.

All store requests run on a borrowed thread, so that a stopped store host cannot void the
deadline.
"""

from __future__ import annotations

import hashlib
import json
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any, NoReturn, Protocol, TypeVar

from torch._C._distributed_c10d import Store

from .. import _faultpoints as faultpoints
from ..errors import (
    GroupError,
    InvalidArgument,
    InvalidState,
    PeerLost,
    PhalanxError,
    RankMismatch,
    RendezvousError,
    RendezvousTimeout,
)
from ._engine import Engine
from ._formatting import first_line, format_rank_ranges, format_ranks
from ._peers import Member, Roster
from ._status_store import Failure, StatusStore
from ._store_client import BlockingStoreClient, StoreClient, clone_connection, in_background


@dataclass(frozen=True)
class RendezvousTerms:
    """What every rank must say alike to form a group, and where it said it."""

    name: str
    seats: tuple[int, ...]
    """The ranks in a numbering that all users of the store share, for groups that form at the same
    time have different ranks of the same number."""
    backend: str
    options: str
    site: str

    @property
    def size(self) -> int:
        """How many ranks the group has."""
        return len(self.seats)

    @property
    def room(self) -> str:
        """Where its ranks meet; two splits of one name are two groups."""
        whole = self.seats == tuple(range(self.size))
        return self.name if whole else f"{self.name}@{format_rank_ranges(self.seats)}"

    def agrees(self, other: RendezvousTerms) -> bool:
        """Tell whether two ranks want the same group; the line of code may differ."""
        return self.key() == other.key()

    def key(self) -> tuple[object, ...]:
        """Return what has to be alike."""
        return self.name, self.seats, self.backend, self.options

    def __str__(self) -> str:
        options = f" with {self.options}" if self.options else ""
        return f"group {self.name!r} of {self.size} on {self.backend}{options} at {self.site}"


@dataclass(frozen=True)
class RendezvousRequest:
    """What a rank says when it comes."""

    terms: RendezvousTerms
    member: Member
    turn: int
    purpose: str
    name_number: int = 0
    """The first that is free on this rank, and all after it, to tell groups of one name apart."""

    def to_json(self) -> str:
        """Write it down."""
        # Not by `asdict`, which takes as long as all the rest.
        told = {"terms": vars(self.terms), "member": vars(self.member)}
        rest = {"turn": self.turn, "purpose": self.purpose, "name_number": self.name_number}
        return json.dumps({**told, **rest})

    @classmethod
    def from_json(cls, text: bytes) -> RendezvousRequest:
        """Read what `to_json` wrote."""
        data = json.loads(text)
        terms = RendezvousTerms(**{**data["terms"], "seats": tuple(data["terms"]["seats"])})
        rest = data["turn"], data["purpose"], data["name_number"]
        return cls(terms, Member.from_json(data["member"]), *rest)


_ERROR_TYPES: dict[str, type[GroupError] | type[RendezvousError]] = {
    error.__name__: error for error in (RankMismatch, PeerLost, RendezvousTimeout, RendezvousError)
}


@dataclass(frozen=True)
class RendezvousResult:
    """What came of a meeting; there is one for all, the first that is written down."""

    token: str = ""
    members: tuple[Member, ...] = ()
    """Who has met, unless everybody knows that already."""
    alike: bool = True
    """Whether all have the same purpose."""
    offer: dict[str, Any] | None = None
    """What rank 0 has made for the others to share."""
    name_number: int = 0
    """The first that is free on all ranks."""
    error: PhalanxError | None = None
    """Why there is no group."""
    here: tuple[int, ...] | None = None
    """Whom the error is for, if not for everybody: who comes later was not meant."""

    def to_json(self) -> str:
        """Write it down."""
        if self.error is not None:
            return json.dumps({"error": _error_to_json(self.error), "here": self.here})
        members = [member.to_json() for member in self.members]
        told = {"token": self.token, "members": members, "alike": self.alike}
        return json.dumps({**told, "offer": self.offer, "name_number": self.name_number})

    @classmethod
    def from_json(cls, text: bytes) -> RendezvousResult:
        """Read what `to_json` wrote."""
        data = json.loads(text)
        if "error" in data:
            here = None if data["here"] is None else tuple(data["here"])
            return cls(error=_error_from_json(data["error"]), here=here)
        members = tuple(Member.from_json(member) for member in data.pop("members"))
        return cls(**data, members=members)


def _error_to_json(error: PhalanxError) -> dict[str, Any]:
    return {
        "kind": type(error).__name__,
        "message": str(error),
        "ranks": getattr(error, "ranks", ()),
        "group": getattr(error, "group", ""),
    }


def _error_from_json(told: dict[str, Any]) -> PhalanxError:
    kind = _ERROR_TYPES.get(told["kind"], RendezvousError)
    if issubclass(kind, GroupError):
        return kind(told["message"], group=told["group"], ranks=told["ranks"])
    return kind(told["message"])


def died_while_forming(ranks: list[int], first: Member, terms: RendezvousTerms) -> PeerLost:
    """Say that ranks died on the way."""
    told = f"rank {ranks[0]} ({first}) died while {terms} was forming"
    return PeerLost(told, group=terms.name, ranks=ranks)


T = TypeVar("T")

POLL_INTERVAL = 0.05  # seconds for which others cannot ask on the same connection
CHECK_OTHER_GROUPS_AFTER = (
    1.0  # seconds before a waiting rank asks what the others are doing instead
)
DEADLINE_GRACE = 0.5  # seconds for the thread that knows more to say why time is up


@dataclass(frozen=True)
class KnownPeers:
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

    def contradiction(
        self, store: BlockingStoreClient, members: Sequence[int]
    ) -> RankMismatch | None:
        """Tell what is wrong with one of these members, if anything is.

        It is asked about those that have another purpose, and about those that do not come.
        """


def next_default_name(store: StoreClient, rank: int) -> str:
    """Name a group that the user did not name: by its turn among those of this store."""
    return f"group{store.add(f'phalanx/unnamed/turn/{rank}', 1) - 1}"


class Rendezvous:
    """One rank's way into a group."""

    def __init__(
        self,
        store: Store,
        *,
        rank: int,
        terms: RendezvousTerms,
        timeout: timedelta,
        kin: KnownPeers | None = None,
        purpose: Purpose | None = None,
        name_number: int = 0,
    ) -> None:
        self.terms = terms
        self.rank = rank
        self.roster: Roster | None = None
        """The members, once they are known."""
        self._store = BlockingStoreClient(store)
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
    def room(self) -> BlockingStoreClient:
        """A part of the store that is the group's own."""
        return self._room

    @property
    def has_requested(self) -> bool:
        """Whether this rank has a room, and others may know that it has come."""
        return self._room is not self._hall

    def run_in_background(self, work: Callable[[], T], look: Callable[[], None] | None = None) -> T:
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

    def check_abandoned(self) -> None:
        """Raise, on the borrowed thread, what the caller has raised already."""
        if self._given_up is not None:
            raise self._given_up

    def look(self) -> None:
        """Raise if the group cannot come about; asks nobody, for the store may not answer."""
        members = () if self.roster is None else self.roster.members
        dead = [rank for rank, member in enumerate(members) if member.is_dead]
        if dead:
            raise died_while_forming(dead, members[dead[0]], self.terms)
        if time.monotonic() >= self.deadline + DEADLINE_GRACE:
            raise RendezvousTimeout(
                f"{self.terms} did not form in time: the store does not answer, or some rank's "
                "engine is stuck"
            )

    def meet(self, offer: Callable[[], dict[str, Any] | None]) -> RendezvousResult:
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
        return self.run_in_background(lambda: purpose.contradiction(self._store, self._others()))

    # -- signing in ------------------------------------------------------------------------

    def _enter(self) -> None:
        """Sign in, in the room of this name's n-th use."""
        if self._kin is not None:
            self._turn = self._kin.next_turn()
        else:
            self._turn = self._hall.add(f"turn/{self.rank}", 1)
            if self._turn > 1:
                self._refuse_duplicate_rank()
        self._room = self._hall.under(str(self._turn))
        purpose = "" if self._purpose is None else self._purpose.text
        sign_in = RendezvousRequest(
            self.terms, self._member, self._turn, purpose, self._name_number
        )
        signed = sign_in.to_json()
        here = f"phalanx/{self.terms.room}/{self._turn}"
        notes = {} if self._purpose is None else self._purpose.notes()
        self._store.set_all(
            {
                **notes,
                self._forming_key(self.rank): signed,
                f"{here}/member/{self.rank}": signed,
                f"{here}/{self._agreement_key(self.rank)}": "",
            }
        )
        if faultpoints.armed:
            faultpoints.reach("form:signed in")

    def _refuse_duplicate_rank(self) -> None:
        """A name may be used again, but not by another process while the first one lives."""
        signed = self._hall.under(str(self._turn - 1)).read(f"member/{self.rank}")
        if signed is None:
            return
        holder = RendezvousRequest.from_json(signed).member
        same_process = (holder.machine, holder.pid) == (self._member.machine, self._member.pid)
        if not same_process and not holder.is_dead:
            self._hall.add(f"turn/{self.rank}", -1)  # it is the holder's to count
            raise InvalidState(
                f"rank {self.rank} of {self.terms} is taken by {holder}: two processes were "
                "given the same rank; check RANK, or the rank argument"
            )

    def _forming_key(self, rank: int) -> str:
        return f"phalanx/forming/{self.terms.seats[rank]}"

    def _agreement_key(self, rank: int) -> str:
        """Name a key that only a rank which says all the same writes."""
        purpose = "" if self._purpose is None else self._purpose.text
        said = repr((self.terms.key(), purpose, self._name_number)).encode()
        return f"like/{hashlib.blake2b(said, digest_size=8).hexdigest()}/{rank}"

    # -- rank 0 ----------------------------------------------------------------------------

    def _judge(self, offer: Callable[[], dict[str, Any] | None]) -> RendezvousResult:
        signed: dict[int, RendezvousRequest] = {}
        others = self._others()
        wanted = [f"member/{r}" if self._kin is None else self._agreement_key(r) for r in others]
        try:
            arrived = self._wait(wanted, lambda: self._collect(signed))
            if isinstance(
                arrived, RendezvousResult
            ):  # somebody who should be here waits for us elsewhere
                return arrived
            if self._kin is None:
                self._read(signed, self._room.fetch)
        except PhalanxError as error:
            return self._close(error)
        members = () if self._kin else (self._member, *(signed[r].member for r in others))
        purpose = "" if self._purpose is None else self._purpose.text
        alike = all(each.purpose == purpose for each in signed.values())
        number = max([self._name_number, *(each.name_number for each in signed.values())])
        made = RendezvousResult(uuid.uuid4().hex, members, alike, offer(), number)
        return self._settle(made)

    def _collect(self, signed: dict[int, RendezvousRequest]) -> bool:
        """Read who has come since; refuse the first that disagrees."""
        self._read(signed, self._room.read)
        members = {rank: each.member for rank, each in signed.items()}
        dead = [rank for rank, member in members.items() if member.is_dead]
        if dead:
            raise died_while_forming(dead, members[dead[0]], self.terms)
        return len(signed) == self.terms.size - 1

    def _read(
        self, signed: dict[int, RendezvousRequest], read: Callable[[str], bytes | None]
    ) -> None:
        for rank in self._others():
            data = None if rank in signed else read(f"member/{rank}")
            if data is not None:
                signed[rank] = RendezvousRequest.from_json(data)
                if not signed[rank].terms.agrees(self.terms):
                    raise self._disagreement(rank, signed[rank].terms)

    # -- the other ranks -------------------------------------------------------------------

    def _await_verdict(self) -> RendezvousResult:
        try:
            self._wait(["verdict"], self._check_rank_zero)
        except PhalanxError as error:
            return self._close(error)
        verdict = RendezvousResult.from_json(self._room.fetch("verdict"))
        return verdict if verdict.error is not None else self._agreed(verdict)

    def _agreed(self, verdict: RendezvousResult) -> RendezvousResult:
        """Check that the verdict is about the same group: a rank too many is told so."""
        if self._kin is None and len(verdict.members) != self.terms.size:
            judge = RendezvousRequest.from_json(self._room.fetch("member/0"))
            return RendezvousResult(error=self._disagreement(0, judge.terms))
        return verdict

    def _check_rank_zero(self) -> bool:
        judge = self._room.read("member/0")
        if judge is not None:
            member = RendezvousRequest.from_json(judge).member
            if member.is_dead and not self._room.has("verdict"):
                raise died_while_forming([0], member, self.terms)
        return False

    # -- the verdict -----------------------------------------------------------------------

    def _settle(self, verdict: RendezvousResult) -> RendezvousResult:
        """Write down a verdict unless there is one, and return the one that holds."""
        return RendezvousResult.from_json(self._room.write_once("verdict", verdict.to_json()))

    def _close(self, error: PhalanxError) -> RendezvousResult:
        """Close the room: a rank that was not here must not look for the others in it later."""
        here = tuple(set(range(self.terms.size)) - set(self._absent()))
        settled = self._settle(RendezvousResult(error=error, here=here))
        if settled.error is not None and str(settled.error) == str(error):
            return RendezvousResult(error=error)  # as it was raised, with all that it knows
        return settled

    # -- waiting ---------------------------------------------------------------------------

    def _wait(self, keys: Sequence[str], arrived: Callable[[], bool]) -> RendezvousResult | None:
        """Wait for keys; returns early with a verdict that somebody else has written down."""
        if not keys:
            return None
        suspects: dict[int, RendezvousTerms] = {}
        asked = self._started
        while not self._room.await_all(keys, min(POLL_INTERVAL, self._time_left())):
            self.check_abandoned()
            verdict = self._room.read("verdict")
            if verdict is not None:
                return RendezvousResult.from_json(verdict)
            if arrived():
                break
            now = time.monotonic()
            if now >= self.deadline:
                raise self._timed_out(self._absent())
            if now - asked >= CHECK_OTHER_GROUPS_AFTER:
                asked = now
                suspects = self._check_other_groups(self._absent(), suspects)
        return None

    def _time_left(self) -> float:
        return max(self.deadline - time.monotonic(), 0.001)

    def _others(self) -> list[int]:
        return [rank for rank in range(self.terms.size) if rank != self.rank]

    def _absent(self) -> list[int]:
        ranks = range(self.terms.size)
        return [rank for rank in ranks if not self._room.has(f"member/{rank}")]

    def _check_other_groups(
        self, missing: list[int], before: dict[int, RendezvousTerms]
    ) -> dict[int, RendezvousTerms]:
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
            signed = RendezvousRequest.from_json(data)
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
                    there.write_once("verdict", RendezvousResult(error=error).to_json())
                    raise error
        return found

    def _disagreement(self, rank: int, theirs: RendezvousTerms) -> RankMismatch:
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


class EngineOffer(Protocol):
    """Something that rank 0 makes and the others reach by what they are told of it."""

    def make(self) -> dict[str, Any] | None:
        """Make it, on rank 0, and return what to tell the others; may raise, or return None."""

    def take(self, told: dict[str, Any]) -> None:
        """Reach it, on the other ranks; may raise."""

    def absent(self) -> list[int]:
        """List the ranks that have not reached it yet."""

    def engine(self) -> Engine:
        """Return this rank's engine; all ranks have theirs, so nothing may go wrong here."""


class EngineSetup:
    """One rank's way to an engine."""

    def __init__(
        self,
        forming: Rendezvous,
        *,
        make: Callable[[Store], Engine],
        offer: EngineOffer | None,
        lends_store: bool,
    ) -> None:
        self._forming = forming
        self._make_engine = make
        self._offer = offer
        self._lends_store = lends_store
        self._own_store: BlockingStoreClient | None = None
        self._has_reported = False
        self._lines: dict[BlockingStoreClient, StoreClient] = {}
        self.verdict: RendezvousResult = RendezvousResult()
        """What the ranks have come to."""

    @property
    def room(self) -> BlockingStoreClient:
        """The group's own part of the store."""
        return self._forming.room if self._own_store is None else self._own_store

    def run(self, check: Callable[[], None], *, background: bool) -> Engine:
        """Meet the others and return an engine; `check` may refuse those who have come."""
        try:
            return self._run(check, background=background)
        except BaseException as error:
            if not self._is_known(error):
                self.give_up(error)
            raise

    def give_up(self, error: BaseException) -> None:
        """Tell the others why this rank has no group, whether or not they have theirs."""
        rank, size = self._forming.rank, self._forming.terms.size
        with suppress(Exception):  # who is not told learns it by the deadline
            line = self._line()
            self._tell(error, line.set)
            board = StatusStore(line.under("board"), rank=rank, size=size)
            board.fail(Failure("engine", rank, f"could not form the group: {_error_text(error)}"))
            board.close()

    def _run(self, check: Callable[[], None], *, background: bool) -> Engine:
        forming = self._forming

        def meet() -> None:
            self.verdict = forming.meet(self._make_offer)
            check()

        def meet_and_connect() -> Engine:
            meet()
            engine = self._take_offer()
            if engine is None:
                engine = self._make()
                self._await_others()
            return engine

        if background:
            return forming.run_in_background(meet_and_connect, self._look)
        forming.run_in_background(meet, self._look)
        engine = self._make()
        forming.run_in_background(self._await_others, self._look)
        return engine

    # -- what goes wrong -------------------------------------------------------------------

    def _is_known(self, error: BaseException) -> bool:
        """Whether the others learn of an error by themselves: a death, a deadline, a verdict."""
        if not self._forming.has_requested:
            return True  # which is all that they need to know
        met = bool(self.verdict.token)
        return isinstance(error, (PeerLost, RendezvousTimeout) if met else PhalanxError)

    def _tell(self, error: BaseException, write: Callable[[str, str], None]) -> None:
        """Write down, once, why this rank has no engine."""
        if not self._has_reported:
            self._has_reported = True
            write("broken", f"rank {self._forming.rank}: {_error_text(error)}")

    def _line(self) -> StoreClient:
        """Return a connection to the room that no engine waits on."""
        room = self._forming.room
        line = self._lines.get(room)
        if line is None:
            line = self._lines[room] = StoreClient(StoreClient(room.raw).connect())
        return line

    def _look(self) -> None:
        """Raise if no engine can come about, for this rank's may wait for one that failed."""
        self._forming.look()
        broken = self._ask_for_broken()
        if broken is not None:
            raise self._not_connected(broken)

    def _ask_for_broken(self) -> bytes | None:
        if not self._forming.has_requested:
            return None
        try:
            return self._line().read("broken")
        except Exception:  # noqa: BLE001 - who cannot ask learns it by the deadline
            return None

    def _not_connected(self, broken: bytes) -> RendezvousError:
        self._has_reported = True  # as somebody has
        return RendezvousError(f"{self._forming.terms} did not connect: {broken.decode()}")

    # -- by an offer -----------------------------------------------------------------------

    def _make_offer(self) -> dict[str, Any] | None:
        try:
            return None if self._offer is None else self._offer.make()
        except PeerLost:
            raise
        except Exception:  # noqa: BLE001 - whatever it is, the ordinary way may do without
            self._offer = None  # with all that it has opened
            return None

    def _take_offer(self) -> Engine | None:
        try:
            return self._try_offer()
        finally:
            self._offer = None  # where it was refused, with all that it has opened

    def _try_offer(self) -> Engine | None:
        offer, told = self._offer, self.verdict.offer
        if offer is None or told is None:
            return None
        why = "" if self._forming.rank == 0 else _take_or_explain(offer, told)
        if why:
            self._offer = offer = None
            self.room.set("refused", f"rank {self._forming.rank}: {why}")
            return None
        pause, looked = 0.00005, time.monotonic()
        while offer.absent():
            time.sleep(pause)
            pause = min(pause * 1.5, 0.002)
            if time.monotonic() - looked >= POLL_INTERVAL:
                looked = time.monotonic()
                if self.room.has("refused"):
                    return None
                self._check_time(
                    f"{format_ranks(offer.absent())} did not map the memory that rank 0 offered"
                )
        return offer.engine()

    # -- in the ordinary way ---------------------------------------------------------------

    def _make(self) -> Engine:
        forming = self._forming
        try:
            if self._lends_store:  # to which others may wish to talk while an engine connects
                self._own_store = BlockingStoreClient(clone_connection(forming.room.raw))
            return self._make_engine(self.room.under("engine").raw)
        except (PeerLost, RendezvousTimeout):
            raise
        except Exception as error:
            self._tell(error, self.room.set)
            if isinstance(error, PhalanxError) or not isinstance(error, RuntimeError | OSError):
                raise
            forming.look()  # a death explains it better
            told = f"{forming.terms} did not connect: {_error_text(error)}"
            raise RendezvousError(told) from error

    def _await_others(self) -> None:
        if self.room.add("connected", 1) == self._forming.terms.size:
            self.room.set("complete", "")
            return
        while not self.room.await_all(["complete"], POLL_INTERVAL):
            broken = self.room.read("broken")
            if broken is not None:
                raise self._not_connected(broken)
            self._check_time("some rank's engine is stuck")

    def _check_time(self, why: str) -> None:
        self._forming.check_abandoned()
        if time.monotonic() >= self._forming.deadline:
            raise RendezvousTimeout(f"{self._forming.terms} did not connect in time: {why}")


def _take_or_explain(offer: EngineOffer, told: dict[str, Any]) -> str:
    """Take an offer, or return the reason that keeps this rank from it."""
    try:
        offer.take(told)
    except PeerLost:
        raise
    except Exception as error:  # noqa: BLE001 - whatever it is, the others must not go ahead
        return _error_text(error)
    return ""


def _error_text(error: BaseException) -> str:
    name = type(error).__name__
    if not isinstance(error, Exception):  # whose text says little: the code of an exit
        return name
    return first_line(error) or name


@dataclass(frozen=True)
class MergingGroup:
    """One of the groups that merge."""

    token: str
    name: str
    global_ranks: list[int]


def gather_merging_groups(
    hall: StoreClient, mine: MergingGroup, *, leads: bool, size: int, timeout: timedelta
) -> tuple[StoreClient, list[MergingGroup]]:
    """Wait until the groups of `size` ranks have come; every rank returns the same list.

    The first rank of each group `leads` it in. A lobby holds one merge: the counter of its ranks
    shows whether there is room, so that a later merge in the same store gets the next one.
    """
    if len(mine.global_ranks) > size:
        raise InvalidArgument(_too_many_ranks(size, len(mine.global_ranks)))
    until = time.monotonic() + timeout.total_seconds()
    if leads:
        _enter_lobby(hall, mine, size)
    number: bytes | None = None
    blocks: list[MergingGroup] = []
    while sum(len(block.global_ranks) for block in blocks) < size:
        if time.monotonic() >= until:
            _raise_merge_timeout(hall, number, blocks, leads=leads, size=size, timeout=timeout)
        number = number or hall.read(f"entered/{mine.token}")
        refused = hall.read(f"refused/{mine.token}")
        if refused is not None:
            raise InvalidArgument(refused.decode())
        data = number and _lobby(hall, number).read(f"block/{len(blocks)}")
        if data:
            blocks.append(MergingGroup(**json.loads(data)))
        else:
            time.sleep(0.005)
    assert number is not None
    ordered = sorted(blocks, key=lambda block: (block.global_ranks[0], block.name, block.token))
    return _lobby(hall, number), ordered


def _enter_lobby(hall: StoreClient, mine: MergingGroup, size: int) -> None:
    number, ranks = 0, len(mine.global_ranks)
    while (count := (lobby := _lobby(hall, str(number).encode())).add("ranks", ranks)) > size:
        if count - ranks < size:
            lobby.add("ranks", -ranks)
            hall.set(f"refused/{mine.token}", _too_many_ranks(size, count))
            return
        number += 1
    lobby.set(f"block/{lobby.add('blocks', 1) - 1}", json.dumps(asdict(mine)))
    hall.set(f"entered/{mine.token}", str(number))


def _too_many_ranks(size: int, count: int) -> str:
    return f"merge_remote_group: size is {size}, but the groups have at least {count} ranks"


def _lobby(hall: StoreClient, number: bytes) -> StoreClient:
    return hall.under(f"lobby/{number.decode()}")


def _raise_merge_timeout(
    hall: StoreClient,
    number: bytes | None,
    blocks: list[MergingGroup],
    *,
    leads: bool,
    size: int,
    timeout: timedelta,
) -> NoReturn:
    if leads and number is not None:  # nobody shall wait for this lobby to fill: it is closed
        _lobby(hall, number).add("ranks", size)
    present = sum(len(block.global_ranks) for block in blocks)
    names = ", ".join(f"{block.name!r} ({len(block.global_ranks)})" for block in blocks)
    raise RendezvousTimeout(
        f"merge_remote_group waits for {size} ranks, {present} came within "
        f"{timeout.total_seconds():g} s: {names or 'nobody'}"
    )
