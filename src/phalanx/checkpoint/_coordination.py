"""How the ranks of a save exchange results, and learn which of them failed.

A `Coordinator` carries one text per rank to all ranks. `BarrierCoordinator` uses a barrier that has
`exchange`; where there is none, `StorageCoordinator` exchanges small files in the directory that
is saved to. `Coordinator.together` runs an action on every rank, and raises on all if it failed on
one.

Every text carries the number and the phase of the save. A rank that restarted may be at a later
save than its peers: those that find themselves in an older save give it up, and the others
start theirs again.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import secrets
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any, TypeVar

import torch.distributed as dist

from .. import errors
from ..env import read_rank_env
from ..errors import CheckpointDirectoryInUse, CheckpointError, InvalidType, SaveFailed, SaveTimeout
from ..groups import ProcessGroup
from ..groups._factory import default_group
from . import _progress
from ._barriers import DistBarrier, GroupBarrier
from ._storage import MESSAGE_PREFIX, MessageStore
from ._types import BarrierLike, RankInfo

T = TypeVar("T")


_save_number: ContextVar[int | None] = ContextVar("phalanx_checkpoint_turn", default=None)


@contextmanager
def numbered_save(number: int) -> Iterator[None]:
    """Number the save that the block does, where the writer has not made all that came before."""
    token = _save_number.set(number)
    try:
        yield
    finally:
        _save_number.reset(token)


def current_save_number() -> int | None:
    """Return the number that was given to the save under way."""
    return _save_number.get()


class PeersBehind(SaveFailed):
    """Some ranks are at an older save: they give it up, and will come to this one."""


class Coordinator(ABC):
    """The ranks that save together."""

    turn = 0
    """The number of the save: the same on all ranks, and greater than those before."""

    def __init__(self, rank_info: RankInfo) -> None:
        self.rank = rank_info.global_rank
        self.size = rank_info.global_world_size

    @abstractmethod
    def exchange(self, text: str) -> list[str]:
        """Wait for all ranks, and return their texts by rank."""

    def close(self) -> None:
        """Part from each other."""
        return

    def place(self, phase: str) -> list[Any]:
        """Say where this rank is: in which save, in which part of it, and among how many."""
        return [self.turn, phase, self.size]

    def together(self, phase: str, action: Callable[[], T]) -> list[T]:
        """Do something on every rank and return what came of it, by rank.

        What `action` returns must be something that JSON can say. If it has failed on any rank,
        all raise `SaveFailed` with the cause.
        """
        error: BaseException | None = None
        at = self.place(phase)
        _progress.enter_phase(phase)
        try:
            said = json.dumps({"at": at, "did": action()})
        except BaseException as raised:  # noqa: BLE001 - whatever it is, the others must hear of it
            error = raised
            said = json.dumps(
                {"at": at, "failed": _describe_error(raised), "kind": _failure_kind(raised)}
            )
        _progress.enter_phase("waiting for ranks")
        try:
            texts = self.exchange(said)
        except Exception as raised:
            if error is None:
                kind = SaveTimeout if isinstance(raised, TimeoutError) else SaveFailed
                raise kind(f"the save was given up while {phase}: {raised}") from raised
            texts = []  # nobody has heard of it, but it did happen here
        if error is not None and not isinstance(error, Exception):
            raise error  # an interrupt stays one
        told = [json.loads(text) for text in texts]
        self._check_places([each["at"] for each in told], phase)
        failures = {rank: each for rank, each in enumerate(told) if "failed" in each}
        if error is not None:
            failures.setdefault(self.rank, json.loads(said))
        if failures:
            raise _first_failure(failures, phase) from error
        if len(told) != self.size:
            raise SaveFailed(f"the barrier is of {len(told)} ranks, and the save of {self.size}")
        return [each["did"] for each in told]

    def _check_places(self, places: list[tuple[int, str, int]], phase: str) -> None:
        """Raise if others are in another save, in another part of it, or of another number."""
        if all(place == places[0] for place in places):
            return
        sizes = [size for _, _, size in places]
        if len({*sizes}) > 1:
            told = ", ".join(f"rank {rank} says {size}" for rank, size in enumerate(sizes))
            raise SaveFailed(f"ranks do not agree on how many they are: {told}")
        newest = max(turn for turn, _, _ in places)
        ahead = [rank for rank, (turn, _, _) in enumerate(places) if turn == newest]
        if len(ahead) == len(places):
            told = ", ".join(
                f"rank {rank} while {each}" for rank, (_, each, _) in enumerate(places)
            )
            raise SaveFailed(f"ranks have met at different points of a save: {told}")
        if self.rank in ahead:
            raise PeersBehind(f"only {format_ranks(ahead)} came to save number {newest}")
        raise SaveFailed(
            f"save number {self.turn} was given up while {phase}: {format_ranks(ahead)} had lost it, "
            f"and came to number {newest}"
        )


def _first_failure(failures: dict[int, dict[str, str]], phase: str) -> SaveFailed:
    """Make the one error for all that failed at a meeting; nobody knows which clock to believe."""
    first, *others = sorted(failures)
    more = f" (and {format_ranks(others)} failed too)" if others else ""
    kind = _FAILURE_KINDS.get(failures[first]["kind"], SaveFailed)
    return kind(f"the save failed on rank {first} while {phase}: {failures[first]['failed']}{more}")


_FAILURE_KINDS: dict[str, type[SaveFailed]] = {
    "in use": CheckpointDirectoryInUse,
    "timeout": SaveTimeout,
}


def _failure_kind(error: BaseException) -> str:
    return next((name for name, kind in _FAILURE_KINDS.items() if isinstance(error, kind)), "")


def _describe_error(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def format_ranks(ranks: Sequence[int]) -> str:
    """Name some ranks."""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))}"


class SingleRankCoordinator(Coordinator):
    """One rank."""

    def exchange(self, text: str) -> list[str]:
        """Return what was said."""
        return [text]


class BarrierCoordinator(Coordinator):
    """Ranks whose barrier carries texts."""

    def __init__(self, rank_info: RankInfo, barrier: Any) -> None:
        super().__init__(rank_info)
        self._barrier = barrier

    def exchange(self, text: str) -> list[str]:
        """Leave it to the barrier."""
        texts: list[str] = self._barrier.exchange(text)
        return texts


def run_on_all_ranks(company: Coordinator, doing: str, action: Callable[[], T]) -> list[T]:
    """Do something on every rank and return what came of it, by rank, or raise on every rank.

    What `action` returns must be something that JSON can say. Unlike in a save, an error is raised
    as it is where it happened; nothing has to be taken back elsewhere.
    """
    said: dict[str, Any] = {"at": company.place(doing)}  # as in a save, which others may be at
    try:
        said["did"] = action()
    except BaseException as error:
        said |= {"failed": str(error), "kind": type(error).__name__}
        with suppress(Exception):  # whoever cannot be told will miss us soon
            company.exchange(json.dumps(said))
        raise
    told = [json.loads(text) for text in company.exchange(json.dumps(said))]
    if any(each["at"] != said["at"] for each in told):
        places = format_by_rank(each["at"][1] for each in told)
        raise CheckpointError(f"ranks have met in different calls: {places}")
    for rank, each in enumerate(told):
        if "failed" in each:
            raise _error_class(each["kind"])(
                f"rank {rank} failed while {doing}: {each['kind']}: {each['failed']}"
            )
    return [each["did"] for each in told]


def format_by_rank(values: Iterable[Any]) -> str:
    """List what each rank has said."""
    return ", ".join(f"rank {rank}: {value}" for rank, value in enumerate(values))


def _error_class(name: str) -> type[CheckpointError]:
    """Return the error of a name, if it is one of checkpoints."""
    kind = getattr(errors, name, None)
    if isinstance(kind, type) and issubclass(kind, CheckpointError):
        return kind
    return CheckpointError


_MAX_POLL_INTERVAL = 0.05  # seconds between two looks
_LEADER_GRACE = 1.0  # seconds for rank 0 to say that it has given up
_CLOSE_TIMEOUT = 10.0  # seconds to read notes that are there


class StorageCoordinator(Coordinator):
    """Ranks that meet in a folder; a barrier that cannot carry texts is waited at as well."""

    def __init__(
        self,
        rank_info: RankInfo,
        board: MessageStore,
        *,
        timeout: float,
        barrier: BarrierLike | None,
    ) -> None:
        super().__init__(rank_info)
        self._board = board
        self._timeout = timeout
        self._barrier = barrier
        self._hello_prefix = f"{MESSAGE_PREFIX}{job_name()}"
        self._nonce = secrets.token_hex(8)
        self._session = ""
        self._standing: int | None = None
        """The lock by which others know that this rank lives."""
        self._exchanges = 0
        self._all_present = False
        """Whether all ranks were there when they last met."""

    def exchange(self, text: str) -> list[str]:
        """Leave a note, and read those of all."""
        self._all_present = False
        try:
            if not self._session:
                self._session = self._form() if self.rank == 0 else self._enter()
                self._standing = self._board.stand(self._note("here", self.rank))
            self._exchanges += 1
            self._board.put(self._note(self._exchanges, self.rank), text)
            if self._barrier is not None:
                self._barrier.execute_barrier()
            texts = self._poll(self._collect, self._absence_error)
        except BaseException as error:
            if self._session:
                with suppress(OSError):  # the cause is what counts
                    self._board.put(self._note("gone", self.rank), f"rank {self.rank}: {error}")
            raise
        self._all_present = True
        return texts

    def _note(self, meeting: int | str, rank: int) -> str:
        return f"{MESSAGE_PREFIX}{self._session}.{meeting}.{rank}"

    def _form(self) -> str:
        """Wait for the hello of every other rank, and answer it."""
        session = secrets.token_hex(8)
        hellos: dict[int, set[str]] = defaultdict(set)

        def all_are_here() -> bool | None:
            for name in self._board.names():
                if name.startswith(f"{self._hello_prefix}.hello."):
                    rank, nonce = name.split(".")[-2:]
                    hellos[int(rank)].add(nonce)
            return True if len(hellos) == self.size - 1 else None

        def complain() -> SaveFailed:
            missing = [rank for rank in range(1, self.size) if rank not in hellos]
            return SaveTimeout(f"{format_ranks(missing)} did not come within {self._timeout} s")

        try:
            self._poll(all_are_here, complain)
            double = [rank for rank, nonces in hellos.items() if len(nonces) > 1]
            if double:
                raise SaveFailed(
                    f"two processes say that they are {format_ranks(double)}: two jobs?"
                )
        except SaveFailed as error:
            self._answer(hellos, {"failed": str(error)})
            raise
        self._answer(hellos, {"session": session})
        return session

    def _answer(self, hellos: dict[int, set[str]], answer: dict[str, str]) -> None:
        for nonces in hellos.values():
            for nonce in nonces:
                self._board.put(f"{self._hello_prefix}.answer.{nonce}", json.dumps(answer))

    def _enter(self) -> str:
        """Say hello until rank 0 answers, for it may tidy up before it listens."""
        hello = f"{self._hello_prefix}.hello.{self.rank}.{self._nonce}"
        answer = f"{self._hello_prefix}.answer.{self._nonce}"

        def listen() -> str | None:
            names = self._board.names()
            if answer in names:
                return self._board.get(answer)
            if hello not in names:
                self._board.put(hello, "")
            return None

        def complain() -> SaveFailed:
            return SaveTimeout(f"rank 0 did not come within {self._timeout} s")

        try:
            # Longer than rank 0 waits for the others: it knows who of them is missing.
            patience = self._timeout + min(self._timeout / 2, _LEADER_GRACE)
            said = json.loads(self._poll(listen, complain, timeout=patience))
        finally:
            self._board.remove(hello)
            self._board.remove(answer)
        if "failed" in said:
            raise SaveFailed(said["failed"])
        session: str = said["session"]
        return session

    def _collect(self) -> list[str] | None:
        names = self._board.names()
        for rank in range(self.size):
            if self._note("gone", rank) in names:
                raise SaveFailed(self._board.get(self._note("gone", rank)) or f"rank {rank} left")
        wanted = [self._note(self._exchanges, rank) for rank in range(self.size)]
        if not names.issuperset(wanted):
            self._check_peers_alive([rank for rank, note in enumerate(wanted) if note not in names])
            return None
        texts = [text for name in wanted if (text := self._board.get(name)) is not None]
        return texts if len(texts) == self.size else None

    def _check_peers_alive(self, missing: list[int]) -> None:
        """Do not wait for the dead."""
        for rank in missing:
            if self._board.is_abandoned(self._note("here", rank)):
                last = self._note(self._exchanges, rank)
                if self._board.get(last) is None:  # it may have come, and gone in peace
                    raise SaveFailed(f"rank {rank} is dead")

    def _absence_error(self) -> SaveFailed:
        names = self._board.names()
        lines = []
        for rank in range(self.size):
            met = [
                meeting
                for meeting in range(1, self._exchanges + 1)
                if self._note(meeting, rank) in names
            ]
            if self._exchanges not in met:
                lines.append(f"rank {rank} (it was at {len(met)} of {self._exchanges} meetings)")
        return SaveTimeout(f"{', '.join(lines)} did not come within {self._timeout} s")

    def close(self) -> None:
        """Part, and have rank 0 take away the notes when everybody has read them."""
        try:
            with suppress(OSError):  # the save has succeeded or failed by now
                self._part()
        finally:
            if self._standing is not None:
                os.close(self._standing)
                self._standing = None

    def _part(self) -> None:
        if not self._session:
            return
        if self.rank != 0:
            self._board.put(self._note("bye", self.rank), "")
        elif self._all_present:  # else those who come late shall find them; the next save tidies up
            byes = {self._note("bye", rank) for rank in range(1, self.size)}
            try:
                self._poll(
                    lambda: self._board.names().issuperset(byes) or None,
                    lambda: SaveTimeout("nobody says goodbye"),
                    timeout=min(self._timeout, _CLOSE_TIMEOUT),
                )
            except SaveTimeout:
                return  # they have what they need, or are dead
            for name in self._board.names():
                if name.startswith(f"{MESSAGE_PREFIX}{self._session}."):
                    self._board.remove(name)

    def _poll(
        self,
        look: Callable[[], T | None],
        complain: Callable[[], SaveFailed],
        *,
        timeout: float | None = None,
    ) -> T:
        """Look until there is something to see, ever less often."""
        deadline = time.monotonic() + (self._timeout if timeout is None else timeout)
        pause = 0.001
        while True:
            seen = look()
            if seen is not None:
                return seen
            if time.monotonic() > deadline:
                raise complain()
            time.sleep(pause)
            pause = min(pause * 1.5, _MAX_POLL_INTERVAL)


_adopted_job = ""


def adopt_job_name(job: str) -> None:
    """Let this process save as one of a job's: it writes for a rank that it is not itself."""
    global _adopted_job  # noqa: PLW0603 - a process belongs to one job
    _adopted_job = job


def job_name() -> str:
    """Name the job, so that the ranks of two jobs at one folder do not answer each other."""
    if _adopted_job:
        return _adopted_job
    variables = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "SLURM_JOB_ID")
    known = [f"{name}={os.environ[name]}" for name in variables if name in os.environ]
    return hashlib.sha256(" ".join(known or [str(os.getppid())]).encode()).hexdigest()[:16]


_log = logging.getLogger(__name__)


def rank_and_barrier(
    group: dist.ProcessGroup | None, *, timeout_secs: float
) -> tuple[RankInfo, Any]:
    """Return this rank's place in a group, and a barrier for all of its ranks, which call this.

    Without a group it is the default one; a rank that is alone has no barrier.
    """
    group = default_group_or_warn() if group is None else group
    if group is None or group.size() == 1:
        return RankInfo(0, 1), None
    return RankInfo(group.rank(), group.size()), _barrier_for(group, timeout_secs)


def default_group_or_warn() -> dist.ProcessGroup | None:
    """Return the default group; warn if there is none, though other ranks were launched."""
    group = default_group()
    if group is None and {"RANK", "WORLD_SIZE"} <= os.environ.keys():
        launched = read_rank_env()
        if launched.world_size > 1:
            _log.warning(
                "rank %d of %d takes itself for the only one, as it was given no group; pass "
                "group=..., or the ranks will not agree",
                launched.rank,
                launched.world_size,
            )
    return group


def _barrier_for(group: dist.ProcessGroup, timeout: float) -> Any:
    if isinstance(group, ProcessGroup):
        return GroupBarrier(group, timeout_secs=timeout)
    if group is dist.group.WORLD:
        return DistBarrier(timeout_secs=timeout)
    raise InvalidType(
        "group is one of phalanx.groups.new_group or torch's default group, not another "
        f"{type(group).__name__} of torch"
    )
