"""Rendezvous: ranks meet in a store, agree on the group to form and connect their engines.

Every rank writes a `RendezvousRequest`; rank 0 compares them and writes one `RendezvousResult`,
which all ranks read. Ranks that already know each other, as in a split, skip reading the
requests. Then each rank builds its engine (`EngineSetup`), either from something that rank 0
offers with the result or by connecting through the store; the group exists when all ranks have
an engine.

Everything that could make ranks wait for each other without end is checked while they wait: a
rank that does not join, forms another group, disagrees on size or backend, claims a rank that is
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
from ._background_threads import in_background
from ._engine import Engine
from ._formatting import first_line, format_rank_ranges, format_ranks
from ._peers import Member, Roster
from ._status_store import Failure, StatusStore
from ._store import BlockingStoreClient, StoreClient, clone_connection
from ._timing import Timing, default_timing

T = TypeVar("T")


@dataclass(frozen=True)
class RendezvousTerms:
    """What all ranks must agree on to form a group, and the call site of this rank."""

    name: str
    store_ranks: tuple[int, ...]
    """The group's ranks in the numbering that all users of the store share. Groups that form at
    the same time may have different processes of the same rank."""
    backend: str
    options: str
    site: str

    @property
    def size(self) -> int:
        """The world size of the group."""
        return len(self.store_ranks)

    @property
    def key_prefix(self) -> str:
        """The group's prefix in the store; two splits of one name are two groups."""
        if self.store_ranks == tuple(range(self.size)):
            return self.name
        return f"{self.name}@{format_rank_ranges(self.store_ranks)}"

    def key(self) -> tuple[object, ...]:
        """Return what must be equal on all ranks."""
        return self.name, self.store_ranks, self.backend, self.options

    def __str__(self) -> str:
        facts = [f"world size {self.size}", f"backend {self.backend}"]
        if self.options:
            facts.append(self.options)
        return f"group {self.name!r} ({', '.join(facts)}) at {self.site}"


@dataclass(frozen=True)
class RendezvousRequest:
    """What a rank writes when it joins."""

    terms: RendezvousTerms
    member: Member
    attempt: int
    purpose: str
    name_number: int = 0
    """The first suffix from which on the name is free on this rank; see `_torch_integration`."""

    def to_json(self) -> str:
        # `asdict` would take as long as everything else together.
        return json.dumps({**vars(self), "terms": vars(self.terms), "member": vars(self.member)})

    @classmethod
    def from_json(cls, text: bytes) -> RendezvousRequest:
        data = json.loads(text)
        terms = data["terms"]
        data["terms"] = RendezvousTerms(**{**terms, "store_ranks": tuple(terms["store_ranks"])})
        data["member"] = Member.from_json(data["member"])
        return cls(**data)


_ERROR_TYPES: dict[str, type[GroupError] | type[RendezvousError]] = {
    error.__name__: error for error in (RankMismatch, PeerLost, RendezvousTimeout, RendezvousError)
}


@dataclass(frozen=True)
class RendezvousResult:
    """The result of a rendezvous; the first that is written holds for all ranks."""

    token: str = ""
    members: tuple[Member, ...] = ()
    """The group's processes, unless all ranks know them already."""
    same_purpose: bool = True
    """Whether all ranks gave the same purpose."""
    offer: dict[str, Any] | None = None
    """What rank 0 offers the others to build their engines on."""
    name_number: int = 0
    """The first suffix with which the name is free on all ranks."""
    error: PhalanxError | None = None
    """Why there is no group."""
    author: int = -1
    """The rank that wrote the error."""
    present: tuple[int, ...] | None = None
    """The ranks that the error is for; None means all. A rank that joins later tries again."""

    def to_json(self) -> str:
        if self.error is not None:
            error = _error_to_json(self.error)
            return json.dumps({"error": error, "author": self.author, "present": self.present})
        members = [member.to_json() for member in self.members]
        facts = {"token": self.token, "members": members, "same_purpose": self.same_purpose}
        return json.dumps({**facts, "offer": self.offer, "name_number": self.name_number})

    @classmethod
    def from_json(cls, text: bytes) -> RendezvousResult:
        data = json.loads(text)
        if "error" in data:
            present = None if data["present"] is None else tuple(data["present"])
            error = _error_from_json(data["error"])
            return cls(error=error, author=data["author"], present=present)
        members = tuple(Member.from_json(member) for member in data.pop("members"))
        return cls(**data, members=members)


def _error_to_json(error: PhalanxError) -> dict[str, Any]:
    return {
        "kind": type(error).__name__,
        "message": str(error),
        "ranks": getattr(error, "ranks", ()),
        "group": getattr(error, "group", ""),
    }


def _error_from_json(data: dict[str, Any]) -> PhalanxError:
    kind = _ERROR_TYPES.get(data["kind"], RendezvousError)
    if issubclass(kind, GroupError):
        return kind(data["message"], group=data["group"], ranks=data["ranks"])
    return kind(data["message"])


@dataclass(frozen=True)
class KnownPeers:
    """What ranks of one group know of each other before they form another."""

    members: tuple[Member, ...]
    next_attempt: Callable[[], int]
    """Counts this rank's attempts to form a group of this name; the same on all ranks."""
    ranks_on_machine: int = 1
    """How many ranks of their common group share this rank's machine."""

    @property
    def one_machine(self) -> bool:
        """Whether all of them are on one machine."""
        return len({member.machine for member in self.members}) == 1


class Purpose(Protocol):
    """What a group is for; reveals that ranks which meant different groups have met."""

    @property
    def text(self) -> str:
        """A description, usually equal on all members."""

    def notes(self) -> dict[str, str]:
        """Return what to write into the store, by key, for others to read."""

    def contradiction(
        self, store: BlockingStoreClient, members: Sequence[int]
    ) -> RankMismatch | None:
        """Return the error if one of these members cannot mean the same group.

        Called for members with another purpose, and for members that do not join.
        """


def next_default_name(store: StoreClient, rank: int) -> str:
    """Name a group that the user did not name, by its number among those of this store."""
    return f"group{store.add(f'phalanx/unnamed/{rank}', 1) - 1}"


class Rendezvous:
    """One rank's part in forming a group."""

    def __init__(
        self,
        store: Store,
        *,
        rank: int,
        terms: RendezvousTerms,
        timeout: timedelta,
        known_peers: KnownPeers | None = None,
        purpose: Purpose | None = None,
        name_number: int = 0,
        timing: Timing | None = None,
    ) -> None:
        self.terms = terms
        self.rank = rank
        self.timing = timing or default_timing()
        self.timeout = timeout.total_seconds()
        self.roster: Roster | None = None
        """The members, once they are known."""
        self._store = BlockingStoreClient(store)
        self._name_store = self._store.under(f"phalanx/{terms.key_prefix}")
        self._group_store: BlockingStoreClient | None = None
        self._member = Member.here() if known_peers is None else known_peers.members[rank]
        self._known_peers = known_peers
        self._purpose = purpose
        self._purpose_text = "" if purpose is None else purpose.text
        self._name_number = name_number
        self._started = time.monotonic()
        self.deadline = self._started + self.timeout
        self._attempt = 0
        self._abandoned: PhalanxError | None = None

    @property
    def group_store(self) -> BlockingStoreClient:
        """The group's own part of the store."""
        assert self._group_store is not None, "this rank has joined"
        return self._group_store

    @property
    def has_joined(self) -> bool:
        """Whether other ranks may know that this rank has joined."""
        return self._group_store is not None

    def run_in_background(
        self, work: Callable[[], T], check: Callable[[], None] | None = None
    ) -> T:
        """Run a step on a borrowed thread; `check` raises on deaths and at the deadline."""
        if self._known_peers is not None and self.roster is None:
            self.roster = Roster(token="", members=self._known_peers.members)
        try:
            return in_background(work, self.check if check is None else check)
        except BaseException as error:
            if isinstance(error, PhalanxError):
                self._abandoned = error
            else:
                self._abandoned = RendezvousError(f"rank {self.rank} abandoned {self.terms}")
            raise

    def check_abandoned(self) -> None:
        """Raise, on the borrowed thread, what the caller has raised already."""
        if self._abandoned is not None:
            raise self._abandoned

    def check(self) -> None:
        """Raise if the group cannot form; makes no request, since the store may not answer."""
        self._check_alive(dict(enumerate(() if self.roster is None else self.roster.members)))
        if time.monotonic() >= self.deadline + self.timing.deadline_grace:
            raise RendezvousTimeout(
                f"{self.terms} did not form within {self.timeout:g} s: the store does not answer, "
                "or the engine of some rank does not connect"
            )

    def join(self, make_offer: Callable[[], dict[str, Any] | None]) -> RendezvousResult:
        """Write the request and return the result; rank 0 adds what `make_offer` returns."""
        while True:
            self._write_request()
            result = self._compare_requests(make_offer) if self.rank == 0 else self._await_result()
            if result.present is None or self.rank in result.present:
                break  # otherwise that attempt ended before this rank joined it
        if result.error is not None:
            raise result.error
        members = result.members if self._known_peers is None else self._known_peers.members
        self.roster = Roster(token=result.token, members=members)
        return result

    def contradiction(self) -> RankMismatch | None:
        """Return the error if ranks that meant different groups have met."""
        purpose = self._purpose
        if purpose is None:
            return None
        return self.run_in_background(lambda: purpose.contradiction(self._store, self._others()))

    # -- joining ---------------------------------------------------------------------------

    def _write_request(self) -> None:
        if self._known_peers is not None:
            self._attempt = self._known_peers.next_attempt()
        else:
            self._attempt = self._name_store.add(f"attempt/{self.rank}", 1)
            if self._attempt > 1:
                self._refuse_duplicate_rank()
        self._group_store = self._name_store.under(str(self._attempt))
        request = RendezvousRequest(
            self.terms, self._member, self._attempt, self._purpose_text, self._name_number
        ).to_json()
        prefix = f"phalanx/{self.terms.key_prefix}/{self._attempt}"
        notes = {} if self._purpose is None else self._purpose.notes()
        self._store.set_all(
            {
                **notes,
                self._forming_key(self.rank): request,
                f"{prefix}/request/{self.rank}": request,
                f"{prefix}/{self._agreement_key(self.rank)}": "",
            }
        )
        if faultpoints.armed:
            faultpoints.reach("form:signed in")

    def _refuse_duplicate_rank(self) -> None:
        """A name may be used again, but not by another process while the first one lives."""
        text = self._name_store.under(str(self._attempt - 1)).read(f"request/{self.rank}")
        if text is None:
            return
        holder = RendezvousRequest.from_json(text).member
        same_process = (holder.machine, holder.pid) == (self._member.machine, self._member.pid)
        if not same_process and not holder.is_dead:
            self._name_store.add(f"attempt/{self.rank}", -1)  # the counter is the holder's
            raise InvalidState(
                f"rank {self.rank} of {self.terms} is already taken by {holder}. Two processes "
                "have the same rank: check RANK or the rank argument"
            )

    def _forming_key(self, rank: int) -> str:
        return f"phalanx/forming/{self.terms.store_ranks[rank]}"

    def _agreement_key(self, rank: int) -> str:
        """Return a key that a rank writes only if its request agrees in everything."""
        request = repr((self.terms.key(), self._purpose_text, self._name_number)).encode()
        return f"agrees/{hashlib.blake2b(request, digest_size=8).hexdigest()}/{rank}"

    # -- rank 0 ----------------------------------------------------------------------------

    def _compare_requests(
        self, make_offer: Callable[[], dict[str, Any] | None]
    ) -> RendezvousResult:
        requests: dict[int, RendezvousRequest] = {}
        others = self._others()
        known = self._known_peers is not None
        keys = [self._agreement_key(rank) if known else f"request/{rank}" for rank in others]
        try:
            result = self._wait(keys, lambda: self._all_joined(requests))
            if result is not None:  # written by a rank that waits for us in another group
                return result
            if not known:
                self._read_requests(requests, self.group_store.fetch)
        except PhalanxError as error:
            return self._close(error)
        members = () if known else (self._member, *(requests[r].member for r in others))
        return self._write_result(
            RendezvousResult(
                token=uuid.uuid4().hex,
                members=members,
                same_purpose=all(r.purpose == self._purpose_text for r in requests.values()),
                offer=make_offer(),
                name_number=max([self._name_number, *(r.name_number for r in requests.values())]),
            )
        )

    def _all_joined(self, requests: dict[int, RendezvousRequest]) -> bool:
        """Read new requests; raises for the first that disagrees and for dead ranks."""
        self._read_requests(requests, self.group_store.read)
        self._check_alive({rank: request.member for rank, request in requests.items()})
        return len(requests) == self.terms.size - 1

    def _read_requests(
        self, requests: dict[int, RendezvousRequest], read: Callable[[str], bytes | None]
    ) -> None:
        for rank in self._others():
            text = None if rank in requests else read(f"request/{rank}")
            if text is not None:
                requests[rank] = RendezvousRequest.from_json(text)
                if requests[rank].terms.key() != self.terms.key():
                    raise self._disagreement(rank, requests[rank].terms)

    # -- the other ranks -------------------------------------------------------------------

    def _await_result(self) -> RendezvousResult:
        try:
            self._wait(["result"], self._check_rank_zero)
        except PhalanxError as error:
            return self._close(error)
        result = RendezvousResult.from_json(self.group_store.fetch("result"))
        if result.error is not None or self._known_peers is not None:
            return result
        if len(result.members) != self.terms.size:  # rank 0 has a smaller world size than this
            first = RendezvousRequest.from_json(self.group_store.fetch("request/0"))
            return RendezvousResult(error=self._disagreement(0, first.terms))
        return result

    def _check_rank_zero(self) -> bool:
        request = self.group_store.read("request/0")
        if request is not None:
            member = RendezvousRequest.from_json(request).member
            if member.is_dead and not self.group_store.has("result"):
                self._check_alive({0: member})
        return False

    # -- the result ------------------------------------------------------------------------

    def _write_result(self, result: RendezvousResult) -> RendezvousResult:
        """Write a result unless there is one, and return the one that holds."""
        return RendezvousResult.from_json(self.group_store.write_once("result", result.to_json()))

    def _close(self, error: PhalanxError) -> RendezvousResult:
        """End this attempt, so that a rank that joins later does not wait in it."""
        present = tuple(set(range(self.terms.size)) - set(self._missing()))
        holds = self._write_result(RendezvousResult(error=error, author=self.rank, present=present))
        if holds.error is not None and holds.author == self.rank:
            return RendezvousResult(error=error)  # the original has more attributes
        return holds

    # -- waiting ---------------------------------------------------------------------------

    def _wait(self, keys: Sequence[str], is_over: Callable[[], bool]) -> RendezvousResult | None:
        """Wait for keys; returns early with a result that another rank has written."""
        if not keys:
            return None
        suspects: dict[int, RendezvousTerms] = {}
        checked = self._started
        store = self.group_store
        while not store.await_all(keys, min(self.timing.poll_interval, self._time_left())):
            self.check_abandoned()
            result = store.read("result")
            if result is not None:
                return RendezvousResult.from_json(result)
            if is_over():
                break
            now = time.monotonic()
            if now >= self.deadline:
                raise self._timed_out(self._missing())
            if now - checked >= self.timing.other_groups_interval:
                checked = now
                suspects = self._check_other_groups(self._missing(), suspects)
        return None

    def _time_left(self) -> float:
        return max(self.deadline - time.monotonic(), 0.001)

    def _others(self) -> list[int]:
        return [rank for rank in range(self.terms.size) if rank != self.rank]

    def _missing(self) -> list[int]:
        ranks = range(self.terms.size)
        return [rank for rank in ranks if not self.group_store.has(f"request/{rank}")]

    def _check_alive(self, members: dict[int, Member]) -> None:
        dead = [rank for rank, member in members.items() if member.is_dead]
        if dead:
            who = f"rank {dead[0]} ({members[dead[0]]})"
            message = f"{who} died during the rendezvous of {self.terms}"
            raise PeerLost(message, group=self.terms.name, ranks=dead)

    def _check_other_groups(
        self, missing: list[int], before: dict[int, RendezvousTerms]
    ) -> dict[int, RendezvousTerms]:
        """Raise if a missing rank is forming another group that needs this rank.

        Only if it was so at the check before, too: another thread of this process may be about
        to join that group. Otherwise both sides would wait forever.
        """
        contradiction = self._purpose and self._purpose.contradiction(self._store, missing)
        if contradiction:
            raise contradiction
        found = {}
        for rank in missing:
            text = self._store.read(self._forming_key(rank))
            if not text:
                continue
            request = RendezvousRequest.from_json(text)
            theirs = request.terms
            needs_me = self.terms.store_ranks[self.rank] in theirs.store_ranks
            there = self._store.under(f"phalanx/{theirs.key_prefix}/{request.attempt}")
            same_group = theirs.key_prefix == self.terms.key_prefix
            if same_group or not needs_me or there.has("result") or request.member.is_dead:
                continue
            found[rank] = theirs
            if before.get(rank) == theirs:
                error = self._disagreement(rank, theirs)
                # Written into their group too, since they cannot see this rank's.
                there.write_once("result", RendezvousResult(error=error).to_json())
                raise error
        return found

    def _disagreement(self, rank: int, theirs: RendezvousTerms) -> RankMismatch:
        sides = sorted([(self.rank, self.terms), (rank, theirs)], key=lambda side: side[0])
        calls = "; ".join(f"rank {rank} forms {terms}" for rank, terms in sides)
        return RankMismatch(
            f"ranks disagree on the group to form: {calls}. Form the same groups in the same order "
            "on every rank",
            group=self.terms.name,
            ranks=[side[0] for side in sides],
        )

    def _timed_out(self, missing: list[int]) -> RendezvousTimeout:
        who = (
            f"missing: {format_ranks(missing)}" if missing else "rank 0 joined but wrote no result"
        )
        return RendezvousTimeout(
            f"{self.terms} did not form within {self.timeout:g} s on rank {self.rank}; {who}. "
            "Check that all ranks were started, with the same store and world size"
        )


class EngineOffer(Protocol):
    """Something that rank 0 creates and the other ranks open, to build their engines on."""

    def make(self) -> dict[str, Any] | None:
        """Create it, on rank 0, and return what the others need to open it; may raise."""

    def take(self, offer: dict[str, Any]) -> None:
        """Open it, on the other ranks; may raise."""

    def absent(self) -> list[int]:
        """Return the ranks that have not opened it yet."""

    def engine(self) -> Engine:
        """Return this rank's engine. All ranks have theirs, so this must not fail."""


class EngineSetup:
    """One rank's way from a rendezvous to a connected engine."""

    def __init__(
        self,
        rendezvous: Rendezvous,
        *,
        make: Callable[[Store], Engine],
        offer: EngineOffer | None,
        lends_store: bool,
    ) -> None:
        self._rendezvous = rendezvous
        self._make_engine = make
        self._offer = offer
        self._lends_store = lends_store
        self._own_store: BlockingStoreClient | None = None
        self._has_reported = False
        self._clients: dict[BlockingStoreClient, StoreClient] = {}
        self.result: RendezvousResult = RendezvousResult()

    @property
    def group_store(self) -> BlockingStoreClient:
        """The group's own part of the store."""
        return self._rendezvous.group_store if self._own_store is None else self._own_store

    def run(self, check: Callable[[], None], *, background: bool) -> Engine:
        """Join the other ranks and return an engine; `check` may refuse the members."""
        try:
            return self._run(check, background=background)
        except BaseException as error:
            if not self._is_known(error):
                self.give_up(error)
            raise

    def give_up(self, error: BaseException) -> None:
        """Tell the other ranks why this rank has no group, whether or not they have theirs."""
        rank, size = self._rendezvous.rank, self._rendezvous.terms.size
        with suppress(Exception):  # otherwise they find out at the deadline
            client = self._client()
            self._report(error, client.set)
            status = StatusStore(client.under("status"), rank=rank, size=size)
            status.fail(Failure("engine", rank, f"could not form the group: {_error_text(error)}"))
            status.close()

    def _run(self, check: Callable[[], None], *, background: bool) -> Engine:
        rendezvous = self._rendezvous

        def join() -> None:
            self.result = rendezvous.join(self._create_offer)
            check()

        def join_and_connect() -> Engine:
            join()
            engine = self._engine_from_offer()
            if engine is None:
                engine = self._connect()
                self._await_others()
            return engine

        if background:
            return rendezvous.run_in_background(join_and_connect, self._check)
        rendezvous.run_in_background(join, self._check)
        engine = self._connect()
        rendezvous.run_in_background(self._await_others, self._check)
        return engine

    # -- failures --------------------------------------------------------------------------

    def _is_known(self, error: BaseException) -> bool:
        """Whether the others find out by themselves: a death, a deadline, a result."""
        if not self._rendezvous.has_joined:
            return True  # they only see that it is missing
        met = bool(self.result.token)
        return isinstance(error, (PeerLost, RendezvousTimeout) if met else PhalanxError)

    def _report(self, error: BaseException, write: Callable[[str, str], None]) -> None:
        """Write down, once, why this rank has no engine."""
        if not self._has_reported:
            self._has_reported = True
            write("error", f"rank {self._rendezvous.rank}: {_error_text(error)}")

    def _client(self) -> StoreClient:
        """Return a connection to the group's store on which no engine waits."""
        store = self._rendezvous.group_store
        client = self._clients.get(store)
        if client is None:
            client = self._clients[store] = StoreClient(StoreClient(store.raw).connect())
        return client

    def _check(self) -> None:
        """Raise if the group cannot form; an engine may wait for a peer that has failed."""
        self._rendezvous.check()
        if not self._rendezvous.has_joined:
            return
        try:
            error = self._client().read("error")
        except Exception:  # noqa: BLE001 - this rank raises at the deadline instead
            return
        if error is not None:
            raise self._peer_error(error)

    def _peer_error(self, error: bytes) -> RendezvousError:
        self._has_reported = True  # a peer has
        return self._connect_error(error.decode())

    def _connect_error(self, cause: str) -> RendezvousError:
        return RendezvousError(f"{self._rendezvous.terms} could not connect its engines: {cause}")

    # -- by an offer -----------------------------------------------------------------------

    def _create_offer(self) -> dict[str, Any] | None:
        try:
            return None if self._offer is None else self._offer.make()
        except PeerLost:
            raise
        except Exception:  # noqa: BLE001 - connecting through the store may work
            self._offer = None
            return None

    def _engine_from_offer(self) -> Engine | None:
        try:
            return self._take_offer()
        finally:
            self._offer = None  # close what it opened, if it was refused

    def _take_offer(self) -> Engine | None:
        offer, data = self._offer, self.result.offer
        if offer is None or data is None:
            return None
        if self._rendezvous.rank != 0:
            try:
                offer.take(data)
            except PeerLost:
                raise
            except Exception as error:  # noqa: BLE001 - the others must not go ahead
                self._offer = offer = None
                refusal = f"rank {self._rendezvous.rank}: {_error_text(error)}"
                self.group_store.set("refused", refusal)
                return None
        pause, checked = 0.00005, time.monotonic()
        while offer.absent():
            time.sleep(pause)
            pause = min(pause * 1.5, 0.002)
            if time.monotonic() - checked >= self._rendezvous.timing.poll_interval:
                checked = time.monotonic()
                if self.group_store.has("refused"):
                    return None
                missing = format_ranks(offer.absent())
                self._check_time(f"{missing} did not map the memory that rank 0 offered")
        return offer.engine()

    # -- through the store -----------------------------------------------------------------

    def _connect(self) -> Engine:
        rendezvous = self._rendezvous
        try:
            if self._lends_store:  # whose connection others may need while the engine connects
                raw = rendezvous.group_store.raw
                self._own_store = BlockingStoreClient(clone_connection(raw))
            return self._make_engine(self.group_store.under("engine").raw)
        except (PeerLost, RendezvousTimeout):
            raise
        except Exception as error:
            self._report(error, self.group_store.set)
            if isinstance(error, PhalanxError) or not isinstance(error, RuntimeError | OSError):
                raise
            rendezvous.check()  # a death is the better explanation
            raise self._connect_error(_error_text(error)) from error

    def _await_others(self) -> None:
        store = self.group_store
        if store.add("connected", 1) == self._rendezvous.terms.size:
            store.set("complete", "")
            return
        while not store.await_all(["complete"], self._rendezvous.timing.poll_interval):
            error = store.read("error")
            if error is not None:
                raise self._peer_error(error)
            self._check_time("the engine of some rank does not connect")

    def _check_time(self, cause: str) -> None:
        rendezvous = self._rendezvous
        rendezvous.check_abandoned()
        if time.monotonic() >= rendezvous.deadline:
            raise RendezvousTimeout(
                f"{rendezvous.terms} did not form within {rendezvous.timeout:g} s: {cause}"
            )


def _error_text(error: BaseException) -> str:
    name = type(error).__name__
    if not isinstance(error, Exception):  # the text of an exit is only its code
        return name
    return first_line(error) or name


@dataclass(frozen=True)
class MergingGroup:
    """One of the groups that merge."""

    token: str
    name: str
    global_ranks: list[int]


def gather_merging_groups(
    store: StoreClient, mine: MergingGroup, *, leads: bool, size: int, timeout: timedelta
) -> tuple[StoreClient, list[MergingGroup]]:
    """Wait until groups of `size` ranks in total have joined; all ranks return the same list.

    The first rank of each group `leads` and registers it. The store may serve several merges, one
    after the other: each has a counter of ranks, and a group joins the first merge that is not
    full.
    """
    if len(mine.global_ranks) > size:
        raise InvalidArgument(_too_many_ranks(size, len(mine.global_ranks)))
    until = time.monotonic() + timeout.total_seconds()
    if leads:
        _join_merge(store, mine, size)
    number: bytes | None = None
    groups: list[MergingGroup] = []
    while sum(len(group.global_ranks) for group in groups) < size:
        if time.monotonic() >= until:
            _raise_merge_timeout(store, number, groups, leads=leads, size=size, timeout=timeout)
        number = number or store.read(f"joined/{mine.token}")
        refused = store.read(f"refused/{mine.token}")
        if refused is not None:
            raise InvalidArgument(refused.decode())
        text = number and _merge_store(store, number).read(f"group/{len(groups)}")
        if text:
            groups.append(MergingGroup(**json.loads(text)))
        else:
            time.sleep(0.005)
    assert number is not None
    ordered = sorted(groups, key=lambda group: (group.global_ranks[0], group.name, group.token))
    return _merge_store(store, number), ordered


def _join_merge(store: StoreClient, mine: MergingGroup, size: int) -> None:
    number, ranks = 0, len(mine.global_ranks)
    while (
        count := (merge := _merge_store(store, str(number).encode())).add("ranks", ranks)
    ) > size:
        if count - ranks < size:
            merge.add("ranks", -ranks)
            store.set(f"refused/{mine.token}", _too_many_ranks(size, count))
            return
        number += 1
    merge.set(f"group/{merge.add('groups', 1) - 1}", json.dumps(asdict(mine)))
    store.set(f"joined/{mine.token}", str(number))


def _too_many_ranks(size: int, count: int) -> str:
    return f"merge_remote_group: size is {size}, but the groups have at least {count} ranks"


def _merge_store(store: StoreClient, number: bytes) -> StoreClient:
    return store.under(f"merge/{number.decode()}")


def _raise_merge_timeout(
    store: StoreClient,
    number: bytes | None,
    groups: list[MergingGroup],
    *,
    leads: bool,
    size: int,
    timeout: timedelta,
) -> NoReturn:
    if leads and number is not None:  # mark it as full, so that no other group joins it
        _merge_store(store, number).add("ranks", size)
    present = sum(len(group.global_ranks) for group in groups)
    names = ", ".join(f"{group.name!r} ({len(group.global_ranks)})" for group in groups)
    raise RendezvousTimeout(
        f"merge_remote_group timed out after {timeout.total_seconds():g} s: {present} of {size} "
        f"ranks joined, from groups: {names or 'none'}"
    )
