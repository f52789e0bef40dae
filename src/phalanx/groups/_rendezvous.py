"""Rendezvous: ranks meet in a store, agree on the group to form and connect their engines.

Every rank writes a `RendezvousRequest`; rank 0 compares them and writes one `RendezvousResult`,
which all ranks read. Ranks that already know each other, as in a split, skip reading the
requests. Then each rank builds its engine, either from something that rank 0 offers with the
result or by connecting through the store; the group exists when all ranks have an engine.

Everything that could make ranks wait for each other without end is checked while they wait: a
rank that does not join, forms another group, disagrees on size or backend, claims a rank that is
taken, or dies. A rank that fails on the way writes down why, and the others raise it.

All store requests run on a worker thread, so that a stopped store host cannot void the
deadline.
"""

from __future__ import annotations

import hashlib
import itertools
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar

from torch._C._distributed_c10d import Store

from .. import _faultpoints as faultpoints
from .._formatting import first_line, format_rank_ranges, format_ranks
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
from ._peers import PeerProcess, Roster
from ._status_store import Failure, StatusStore
from ._store import BlockingStoreClient, StoreClient, clone_connection, from_json, to_json
from ._timing import default_timing
from ._worker_threads import in_background

if TYPE_CHECKING:
    from ._backend_registry import Backend
    from ._process_group import GroupConfig
    from .backends._shm_region import RegionOffer

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
    site: str = field(compare=False, repr=False)

    @property
    def size(self) -> int:
        return len(self.store_ranks)

    @property
    def key_prefix(self) -> str:
        """The group's prefix in the store; two splits of one name are two groups."""
        if self.store_ranks == tuple(range(self.size)):
            return f"phalanx/{self.name}"
        return f"phalanx/{self.name}@{format_rank_ranges(self.store_ranks)}"

    def __str__(self) -> str:
        options = f", {self.options}" if self.options else ""
        facts = f"world size {self.size}, backend {self.backend}{options}"
        return f"group {self.name!r} ({facts}) at {self.site}"


@dataclass(frozen=True)
class RendezvousRequest:
    """What a rank writes when it joins."""

    terms: RendezvousTerms
    process: PeerProcess
    attempt: int
    purpose: str
    name_suffix: int
    """The first suffix from which on the name is free on this rank; see `_torch_integration`."""


@dataclass(frozen=True)
class RendezvousResult:
    """The result of a rendezvous; the first that is written is in effect for all ranks."""

    token: str = ""
    processes: tuple[PeerProcess, ...] = ()  # unless all ranks know each other already
    same_purpose: bool = True
    offer: dict[str, str] | None = None  # of rank 0, for the others to build their engines on
    name_suffix: int = 0  # the first suffix with which the name is free on all ranks
    error: tuple[str, str, str, tuple[int, ...]] | None = None
    """Why there is no group: the type, text, group and ranks of an error."""
    present: tuple[int, ...] | None = None
    """The ranks that the error is for; None means all. A rank that joins later tries again."""


_ERROR_TYPES: dict[str, type[GroupError] | type[RendezvousError]] = {
    error.__name__: error for error in (RankMismatch, PeerLost, RendezvousTimeout, RendezvousError)
}


def _error_result(error: PhalanxError, present: tuple[int, ...] | None = None) -> str:
    group: str = getattr(error, "group", "")
    ranks: Sequence[int] = getattr(error, "ranks", ())
    facts = type(error).__name__, str(error), group, tuple(ranks)
    return to_json(RendezvousResult(error=facts, present=present))


def _make_error(kind: str, message: str, group: str, ranks: tuple[int, ...]) -> PhalanxError:
    error = _ERROR_TYPES.get(kind, RendezvousError)
    if issubclass(error, GroupError):
        return error(message, group=group, ranks=ranks)
    return error(message)


class KnownPeers(NamedTuple):
    """What ranks of one group know of each other before they form another."""

    processes: tuple[PeerProcess, ...]
    next_attempt: Callable[[], int]
    """Counts this rank's attempts to form a group of this name; the same on all ranks."""
    ranks_on_machine: int = 1  # of their common group, on this rank's machine


class FormationCheck(Protocol):
    """Reveals that ranks which form a group for different purposes have met.

    `text` describes the purpose, usually equally on all members. `store_entries` are written into
    the store, by key, for others to read. `find_mismatch` returns the error if one of these members
    cannot mean the same group; it is called for members with another purpose, and for those that
    do not join.
    """

    @property
    def text(self) -> str: ...
    def store_entries(self) -> dict[str, str]: ...
    def find_mismatch(
        self, store: BlockingStoreClient, members: Sequence[int]
    ) -> RankMismatch | None: ...


class Rendezvous:
    """One rank's part in forming a group: `meet` the others, or meet them and `connect` an engine.

    `check`, if given, is called while this rank waits; it raises if the group cannot form.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        terms: RendezvousTerms,
        timeout: timedelta,
        *,
        known_peers: KnownPeers | None = None,
        formation_check: FormationCheck | None = None,
        name_suffix: int = 0,
        check: Callable[[], None] | None = None,
    ) -> None:
        # The processes, the result and the group's part of the store, as far as they are known.
        known = () if known_peers is None else known_peers.processes
        self.roster = Roster("", known)
        self.result = RendezvousResult()
        self.group_store = BlockingStoreClient(store)
        self._store = self.group_store
        self._own_connection: StoreClient | None = None
        self._prefix = ""  # of the group's part of the store
        self._has_joined = False  # other ranks may know that this one has
        self._terms = terms
        self._rank = rank
        self._others = [each for each in range(terms.size) if each != rank]
        self._requests: dict[int, RendezvousRequest] = {}  # those read, by rank
        self._known_peers = known_peers
        self._process = known[rank] if known else PeerProcess.current()
        self._formation_check = formation_check
        self._purpose = "" if formation_check is None else formation_check.text
        self._name_suffix = name_suffix
        self._extra_check = check
        self._timing = default_timing()
        self._timeout = timeout.total_seconds()
        self._deadline = time.monotonic() + self._timeout
        self._abandoned: PhalanxError | None = None
        self._offer: RegionOffer | None = None  # creates or opens what engines are built on
        self._has_reported = False
        # Ranks seen forming another group at the last check, and its time; reset by each attempt.
        self._suspects: dict[int, bytes] = {}
        self._other_groups_checked = 0.0

    def meet(self) -> None:
        """Agree with the other ranks on the group, without an engine."""
        self._in_background(self._join)

    def connect(self, backend: Backend, config: GroupConfig) -> Engine:
        """Meet the other ranks and return an engine."""
        peers = self._known_peers
        make_offer = backend.traits.offer
        if peers is not None and make_offer is not None and config.device.type == "cpu":
            processes = peers.processes
            on_machine = peers.ranks_on_machine
            if len({process.machine for process in processes}) == 1:
                self._offer = make_offer(self._rank, processes, on_machine, config.options)
        try:
            if backend.traits.connects_in_background:
                return self._in_background(lambda: self._join_and_connect(backend, config))
            self._in_background(lambda: self._join(backend))
            engine = self._connect(backend, config)
            self._in_background(self._await_others)
            return engine
        except BaseException as error:
            # Deaths, deadlines and results are known to the others without this rank.
            known = (PeerLost, RendezvousTimeout) if self.result.token else PhalanxError
            if self._has_joined and not isinstance(error, known):
                self.give_up(error)
            raise

    def give_up(self, error: BaseException) -> None:
        """Tell the other ranks why this rank has no group, whether or not they have theirs."""
        with suppress(Exception):  # otherwise they find out at the deadline
            client = self._connection.under(self._prefix)
            self._report(error, client.set)
            status = StatusStore(client.under("status"), rank=self._rank, size=self._terms.size)
            cause = f"could not form the group: {_error_text(error)}"
            status.fail(Failure("engine", self._rank, cause))
            status.close()

    def find_mismatch(self) -> RankMismatch | None:
        """Return the error if ranks that meant different groups have met."""
        check = self._formation_check
        if check is None or self.result.same_purpose:
            return None
        return self._in_background(lambda: check.find_mismatch(self._store, self._others))

    def _in_background(self, work: Callable[[], T]) -> T:
        """Run a step on a worker thread, and check for deaths, errors and the deadline here."""
        try:
            return in_background(work, self._check)
        except BaseException as error:
            abandoned = RendezvousError(f"rank {self._rank} abandoned {self._terms}")
            self._abandoned = error if isinstance(error, PhalanxError) else abandoned
            raise

    def _check(self) -> None:
        """Raise if the group cannot form; an engine may wait for a peer that has failed."""
        self._check_locally()
        if self._has_joined:
            error = None
            with suppress(Exception):  # this rank raises at the deadline instead
                error = self._connection.under(self._prefix).read("error")
            self._raise_peer_error(error)

    def _check_locally(self) -> None:
        """The same without a request, since the store may not answer."""
        if self._extra_check is not None:
            self._extra_check()
        self._require_alive(dict(enumerate(self.roster.processes)))
        if time.monotonic() >= self._deadline + self._timing.deadline_grace:
            raise self._timed_out(
                "the store does not answer, or the engine of some rank does not connect"
            )

    @property
    def _connection(self) -> StoreClient:
        """A connection to the store on which no engine waits."""
        if self._own_connection is None:  # cached_property holds one lock over all instances
            self._own_connection = StoreClient(StoreClient(self._store.raw).connect())
        return self._own_connection

    def _join(self, backend: Backend | None = None) -> None:
        """Write the request and wait for the result; rank 0 adds an offer, if it can make one."""
        while True:
            self._write_request()
            try:
                result = self._write_result() if self._rank == 0 else self._await_result()
            except PhalanxError as error:
                result = self._close(error)
            if result.present is None or self._rank in result.present:
                break  # otherwise that attempt ended before this rank joined it
        if result.error is not None:
            raise _make_error(*result.error)
        if self._known_peers is None and len(result.processes) != self._terms.size:
            # Rank 0 has a smaller world size than this rank.
            first = from_json(self.group_store.fetch("request/0"), RendezvousRequest)
            raise self._disagreement(0, first.terms)
        known = self._known_peers
        processes = result.processes if known is None else known.processes
        self.roster = Roster(result.token, processes)
        self.result = result
        if backend is not None:
            self._require_one_process(backend)

    def _require_one_process(self, backend: Backend) -> None:
        processes = {(process.machine, process.pid) for process in self.roster.processes}
        if backend.traits.ranks_are_threads and len(processes) > 1:
            raise InvalidState(
                f"ranks of a {backend.name!r} group must be threads of one process; use 'gloo' for "
                "several processes"
            )

    def _write_request(self) -> None:
        if self._known_peers is not None:
            attempt = self._known_peers.next_attempt()
        else:
            attempt = self._store.add(f"{self._terms.key_prefix}/attempt/{self._rank}", 1)
            if attempt > 1:
                self._refuse_duplicate_rank(attempt - 1)
        self._prefix = f"{self._terms.key_prefix}/{attempt}"
        self.group_store = self._store.under(self._prefix)
        self._has_joined = True
        self._requests = {}
        self._suspects = {}
        self._other_groups_checked = time.monotonic()
        suffix = self._name_suffix
        mine = RendezvousRequest(self._terms, self._process, attempt, self._purpose, suffix)
        request = to_json(mine)
        check = self._formation_check
        self._store.set_all(
            {
                **({} if check is None else check.store_entries()),
                self._forming_key(self._rank): request,
                f"{self._prefix}/request/{self._rank}": request,
                f"{self._prefix}/{self._agreement_key(self._rank)}": "",
            }
        )
        if faultpoints.armed:
            faultpoints.reach("form:requested")

    def _refuse_duplicate_rank(self, last_attempt: int) -> None:
        """A name may be used again, but not by another process while the first one lives."""
        text = self._store.read(f"{self._terms.key_prefix}/{last_attempt}/request/{self._rank}")
        if text is None:
            return
        holder = from_json(text, RendezvousRequest).process
        same_process = (holder.machine, holder.pid) == (self._process.machine, self._process.pid)
        if not same_process and not holder.is_dead:
            # The counter is the holder's.
            self._store.add(f"{self._terms.key_prefix}/attempt/{self._rank}", -1)
            raise InvalidState(
                f"rank {self._rank} of {self._terms} is already taken by {holder}. Two processes "
                "have the same rank: check RANK or the rank argument"
            )

    def _forming_key(self, rank: int) -> str:
        return f"phalanx/forming/{self._terms.store_ranks[rank]}"

    def _agreement_key(self, rank: int) -> str:
        """Return a key that a rank writes only if its request agrees in everything."""
        request = repr((self._terms, self._purpose, self._name_suffix)).encode()
        return f"agrees/{hashlib.blake2b(request, digest_size=8).hexdigest()}/{rank}"

    def _write_result(self) -> RendezvousResult:
        """Compare the requests and write the result, on rank 0; return the result in effect."""
        written = self._await_requests()
        if written is not None:  # by a rank that waits for us in another group
            return written
        requests = self._requests
        processes: tuple[PeerProcess, ...] = ()
        if self._known_peers is None:
            self._read_requests(self._others, self.group_store.fetch)
            processes = (self._process, *(requests[rank].process for rank in self._others))
        result = RendezvousResult(
            token=uuid.uuid4().hex,
            processes=processes,
            same_purpose=all(each.purpose == self._purpose for each in requests.values()),
            offer=self._create_offer(),
            name_suffix=max([self._name_suffix, *(r.name_suffix for r in requests.values())]),
        )
        return from_json(self.group_store.write_once("result", to_json(result)), RendezvousResult)

    def _close(self, error: PhalanxError) -> RendezvousResult:
        """End this attempt, so that a rank that joins later does not wait in it."""
        present = tuple(set(range(self._terms.size)) - set(self._missing()))
        mine = _error_result(error, present)
        in_effect = self.group_store.write_once("result", mine)
        if in_effect == mine.encode():
            raise error  # which has more attributes than what is written
        return from_json(in_effect, RendezvousResult)

    def _await_requests(self) -> RendezvousResult | None:
        """Wait, on rank 0, for all other ranks; return the result if one of them has written it."""
        keys = [f"request/{rank}" for rank in self._others]
        if self._known_peers is not None:  # equal requests need not be read
            keys = [self._agreement_key(rank) for rank in self._others]
        while keys and not self._await_keys(keys):
            result = self._read_result(self._others)
            if result is not None or len(self._requests) == len(self._others):
                return result
            self._check_late()
        return None

    def _await_result(self) -> RendezvousResult:
        while not self._await_keys(["result"]):
            result = self._read_result([0])
            if result is not None:
                return result
            self._check_late()
        return from_json(self.group_store.fetch("result"), RendezvousResult)

    def _await_keys(self, keys: Sequence[str]) -> bool:
        remaining = max(self._deadline - time.monotonic(), 0.001)
        return self.group_store.await_all(keys, min(self._timing.poll_interval, remaining))

    def _read_result(self, ranks: list[int]) -> RendezvousResult | None:
        """Return the result if there is one; otherwise read the requests of `ranks`.

        Raises for the first request that disagrees and for dead ranks.
        """
        self._check_abandoned()
        result = self.group_store.read("result")
        if result is not None:
            return from_json(result, RendezvousResult)
        self._read_requests(ranks, self.group_store.read)
        self._require_alive({rank: each.process for rank, each in self._requests.items()})
        return None

    def _check_late(self) -> None:
        """Raise after the deadline, or if a missing rank is forming another group."""
        now = time.monotonic()
        if now >= self._deadline:
            missing = self._missing()
            who = f"missing: {format_ranks(missing)}" if missing else "rank 0 wrote no result"
            hint = "Check that all ranks were started, with the same store and world size"
            raise self._timed_out(f"{who}. {hint}")
        if now - self._other_groups_checked >= self._timing.other_groups_interval:
            self._other_groups_checked = now
            self._suspects = self._check_other_groups(self._missing(), self._suspects)

    def _read_requests(self, ranks: list[int], read: Callable[[str], bytes | None]) -> None:
        for rank in ranks:
            text = None if rank in self._requests else read(f"request/{rank}")
            if text is not None:
                self._requests[rank] = request = from_json(text, RendezvousRequest)
                if self._rank == 0 and request.terms != self._terms:
                    raise self._disagreement(rank, request.terms)

    def _missing(self) -> list[int]:
        ranks = range(self._terms.size)
        return [rank for rank in ranks if not self.group_store.has(f"request/{rank}")]

    def _require_alive(self, processes: dict[int, PeerProcess]) -> None:
        dead = [rank for rank, process in processes.items() if process.is_dead]
        if dead:
            who = f"rank {dead[0]} ({processes[dead[0]]})"
            message = f"{who} died during the rendezvous of {self._terms}"
            raise PeerLost(message, group=self._terms.name, ranks=dead)

    def _check_other_groups(self, missing: list[int], before: dict[int, bytes]) -> dict[int, bytes]:
        """Raise if a missing rank is forming another group that needs this rank.

        Only if it was so at the check before, too: another thread of this process may be about
        to join that group. Otherwise both sides would wait forever.
        """
        if self._formation_check is not None:
            mismatch = self._formation_check.find_mismatch(self._store, missing)
            if mismatch is not None:
                raise mismatch
        found = {}
        for rank in missing:
            text = self._store.read(self._forming_key(rank))
            if not text:
                continue
            request = from_json(text, RendezvousRequest)
            theirs = request.terms
            needs_me = self._terms.store_ranks[self._rank] in theirs.store_ranks
            there = self._store.under(f"{theirs.key_prefix}/{request.attempt}")
            same_group = theirs.key_prefix == self._terms.key_prefix
            if same_group or not needs_me or there.has("result") or request.process.is_dead:
                continue
            found[rank] = text
            if before.get(rank) == text:
                error = self._disagreement(rank, theirs)
                # Written into their group too, since they cannot see this rank's.
                there.write_once("result", _error_result(error))
                raise error
        return found

    def _disagreement(self, rank: int, theirs: RendezvousTerms) -> RankMismatch:
        sides = sorted([(self._rank, self._terms), (rank, theirs)], key=lambda side: side[0])
        calls = "; ".join(f"rank {rank} forms {terms}" for rank, terms in sides)
        return RankMismatch(
            f"ranks disagree on the group to form: {calls}. Form the same groups in the same order "
            "on every rank",
            group=self._terms.name,
            ranks=[side[0] for side in sides],
        )

    def _timed_out(self, cause: str) -> RendezvousTimeout:
        return RendezvousTimeout(
            f"{self._terms} did not form within {self._timeout:g} s on rank {self._rank}; {cause}"
        )

    def _check_abandoned(self) -> None:
        """Raise, on the worker thread, what the caller has raised already."""
        if self._abandoned is not None:
            raise self._abandoned

    def _join_and_connect(self, backend: Backend, config: GroupConfig) -> Engine:
        self._join(backend)
        engine = self._engine_from_offer()
        if engine is None:
            engine = self._connect(backend, config)
            self._await_others()
        return engine

    def _create_offer(self) -> dict[str, str] | None:
        try:
            return None if self._offer is None else self._offer.make()
        except PeerLost:
            raise
        except Exception:  # noqa: BLE001 - connecting through the store may work
            self._offer = None
            return None

    def _engine_from_offer(self) -> Engine | None:
        # Taken out of `self`, so that a refused offer closes what it has opened.
        offer, self._offer = self._offer, None
        if offer is None or self.result.offer is None:
            return None
        if self._rank != 0:
            try:
                offer.take(self.result.offer)
            except PeerLost:
                raise
            except Exception as error:  # noqa: BLE001 - the others must not go ahead
                self.group_store.set("refused", f"rank {self._rank}: {_error_text(error)}")
                return None
        pause = 0.00005  # mapping takes microseconds; a rank that is late costs little
        checked = time.monotonic()
        while offer.absent():
            time.sleep(pause)
            pause = min(pause * 1.5, 0.002)
            if time.monotonic() - checked >= self._timing.poll_interval:
                checked = time.monotonic()
                if self.group_store.has("refused"):
                    return None
                missing = format_ranks(offer.absent())
                self._check_time(f"{missing} did not map the memory that rank 0 offered")
        return offer.engine()

    def _connect(self, backend: Backend, config: GroupConfig) -> Engine:
        try:
            if self._known_peers is not None:
                # Others may need the parent group's connection while the engine connects.
                self.group_store = BlockingStoreClient(clone_connection(self.group_store.raw))
            return backend.factory(
                self.group_store.under("engine").raw,
                self._rank,
                self._terms.size,
                timedelta(seconds=self._timeout),
                config.device,
                **config.options,
            )
        except (PeerLost, RendezvousTimeout):
            raise
        except Exception as error:
            is_ours = isinstance(error, PhalanxError) or not isinstance(
                error, RuntimeError | OSError
            )
            if not is_ours:  # it may have waited for a rank that has no engine
                self._raise_peer_error(self.group_store.read("error"))
            self._report(error, self.group_store.set)
            if is_ours:
                raise
            self._check_locally()  # a death is the better explanation
            raise self._connect_error(_error_text(error)) from error

    def _await_others(self) -> None:
        store = self.group_store
        if store.add("connected", 1) == self._terms.size:
            store.set("complete", "")
            return
        while not store.await_all(["complete"], self._timing.poll_interval):
            self._raise_peer_error(store.read("error"))
            self._check_time("the engine of some rank does not connect")

    def _report(self, error: BaseException, write: Callable[[str, str], None]) -> None:
        """Write down, once, why this rank has no engine."""
        if not self._has_reported:
            self._has_reported = True
            write("error", f"rank {self._rank}: {_error_text(error)}")

    def _raise_peer_error(self, error: bytes | None) -> None:
        if error is not None:
            self._has_reported = True  # a peer has
            raise self._connect_error(error.decode())

    def _connect_error(self, cause: str) -> RendezvousError:
        return RendezvousError(f"{self._terms} could not connect its engines: {cause}")

    def _check_time(self, cause: str) -> None:
        self._check_abandoned()
        if time.monotonic() >= self._deadline:
            raise self._timed_out(cause)


def _error_text(error: BaseException) -> str:
    # The text of an exit is only its code.
    text = first_line(error) if isinstance(error, Exception) else ""
    return text or type(error).__name__


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
    merge: StoreClient | None = None
    groups: list[MergingGroup] = []
    while (present := sum(len(group.global_ranks) for group in groups)) < size:
        if time.monotonic() >= until:
            if leads and merge is not None:  # mark it as full, so that no other group joins it
                merge.add("ranks", size)
            names = ", ".join(f"{group.name!r} ({len(group.global_ranks)})" for group in groups)
            raise RendezvousTimeout(
                f"merge_remote_group timed out after {timeout.total_seconds():g} s: {present} of "
                f"{size} ranks joined, from groups: {names or 'none'}"
            )
        if merge is None and (number := store.read(f"joined/{mine.token}")):
            merge = store.under(f"merge/{int(number)}")
        refused = store.read(f"refused/{mine.token}")
        if refused is not None:
            raise InvalidArgument(refused.decode())
        text = None if merge is None else merge.read(f"group/{len(groups)}")
        if text is None:
            time.sleep(default_timing().brief_poll_interval)
        else:
            groups.append(from_json(text, MergingGroup))
    assert merge is not None
    ordered = sorted(groups, key=lambda group: (group.global_ranks[0], group.name, group.token))
    return merge, ordered


def _join_merge(store: StoreClient, mine: MergingGroup, size: int) -> None:
    ranks = len(mine.global_ranks)
    for number in itertools.count():
        merge = store.under(f"merge/{number}")
        count = merge.add("ranks", ranks)
        if count <= size:
            merge.set(f"group/{merge.add('groups', 1) - 1}", to_json(mine))
            store.set(f"joined/{mine.token}", str(number))
            return
        if count - ranks < size:
            merge.add("ranks", -ranks)
            store.set(f"refused/{mine.token}", _too_many_ranks(size, count))
            return


def _too_many_ranks(size: int, count: int) -> str:
    return f"merge_remote_group: size is {size}, but the groups have at least {count} ranks"
