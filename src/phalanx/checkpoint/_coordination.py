"""How the ranks of a save exchange results, and learn which of them failed.

`Coordinator.run_on_all_ranks` runs an action on every rank, and raises on all ranks if it failed
on one. It needs a `TextExchange`, which carries one text per rank to all ranks: a barrier that has
`exchange`, or `StorageExchange`, which stores small files in the workspace of the save.

Every text carries the number and the phase of the save. A rank that restarted may be at a later
save than its peers: ranks that find themselves in an older save abandon it, and the others start
theirs again.
"""

from __future__ import annotations

import itertools
import json
import os
import secrets
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, NamedTuple, Protocol, TypeVar

from .._formatting import format_ranks
from ..errors import CheckpointError, MisuseError, SaveFailed, SaveTimeout, UnsupportedState
from ._progress import Phase, ProgressMeter
from ._storage import MESSAGE_PREFIX, MessageStore, job_name
from ._types import BarrierLike, RankInfo, error_class, error_name

# In seconds.
_FIRST_POLL, _MAX_POLL = 0.001, 0.05
_LEADER_GRACE = 1.0  # how much longer others wait than rank 0, which names the missing ranks
_CLOSE_TIMEOUT = 10.0  # how long rank 0 waits until the others have read the last messages

T = TypeVar("T")


class PeersBehind(SaveFailed):
    """Some ranks are at an older save. They abandon it, and arrive at this one later."""


class _Position(NamedTuple):
    save_number: int
    phase: str
    world_size: int


class TextExchange(Protocol):
    """Carries one text per rank to all ranks."""

    def exchange(self, text: str) -> list[str]:
        """Wait for all ranks, and return their texts by rank."""


class Coordinator:
    """The ranks of one save; without a `TextExchange`, this is the only rank.

    `save_number` is the same on all ranks, and greater than those of earlier saves.
    """

    def __init__(
        self,
        rank_info: RankInfo,
        text_exchange: TextExchange | None = None,
        *,
        save_number: int = 0,
        meter: ProgressMeter | None = None,
    ) -> None:
        self.rank = rank_info.global_rank
        self.size = rank_info.global_world_size
        self._meter = meter or ProgressMeter()
        self._text_exchange = text_exchange
        self._save_number = save_number

    def close(self) -> None:
        if isinstance(self._text_exchange, StorageExchange):
            self._text_exchange.close()

    def run_on_all_ranks(
        self, phase: str, action: Callable[[], T], *, wrap_errors: bool = True
    ) -> list[T]:
        """Run an action on every rank and return the results by rank, or raise on every rank.

        Results must be JSON-serializable. With `wrap_errors`, as in a save, all ranks raise
        `SaveFailed` with the first cause; only a rank whose caller made a mistake (`MisuseError`,
        `UnsupportedState`) raises that error itself. Without, the rank that failed raises its own
        error, and the others a `CheckpointError` of the same class.
        """
        position = _Position(self._save_number, phase, self.size)
        error: BaseException | None = None
        self._meter.enter(phase)
        try:
            text = json.dumps({"at": position, "result": action()})
        except BaseException as raised:  # noqa: BLE001 - the other ranks must learn of any error
            error = raised
            failure = {"failed": f"{type(raised).__name__}: {raised}", "kind": error_name(raised)}
            text = json.dumps({"at": position, **failure})
        self._meter.enter(Phase.WAITING)
        try:
            exchange = self._text_exchange
            texts = [text] if exchange is None else exchange.exchange(text)
            replies = [json.loads(each) for each in texts]
        except Exception as raised:
            if error is None and wrap_errors:
                kind = SaveTimeout if isinstance(raised, TimeoutError) else SaveFailed
                raise kind(f"the save was abandoned while {phase}: {raised}") from raised
            if error is None:
                raise
            replies = []  # no other rank learned of it, but it did happen here
        if error is not None and not (wrap_errors and isinstance(error, Exception)):
            raise error
        base = SaveFailed if wrap_errors else CheckpointError
        self._check_positions([_Position(*each["at"]) for each in replies], phase, base)
        failures = {rank: each for rank, each in enumerate(replies) if "failed" in each}
        if isinstance(error, MisuseError | UnsupportedState):
            raise error
        if error is not None:
            failures.setdefault(self.rank, json.loads(text))
        if failures:
            # The one error that all ranks raise: that of the lowest rank, since clocks may differ.
            first, *others = sorted(failures)
            where = f"the save failed on rank {first}" if wrap_errors else f"rank {first} failed"
            also = f" ({format_ranks(others)} failed too)" if others else ""
            cause = f"{where} while {phase}: {failures[first]['failed']}{also}"
            raise error_class(failures[first]["kind"], base)(cause) from error
        if len(replies) != self.size:
            raise base(f"the barrier has {len(replies)} ranks, expected {self.size}")
        return [each["result"] for each in replies]

    def _check_positions(
        self, positions: list[_Position], phase: str, base: type[CheckpointError]
    ) -> None:
        if len({*positions}) <= 1:
            return
        sizes = [each.world_size for each in positions]
        if len({*sizes}) > 1:
            raise base(f"ranks disagree on the world size: {format_by_rank(sizes)}")
        newest = max(each.save_number for each in positions)
        ahead = [rank for rank, each in enumerate(positions) if each.save_number == newest]
        if base is not SaveFailed or len(ahead) == len(positions):
            phases = format_by_rank(each.phase for each in positions)
            raise base(f"ranks are in different calls or phases: {phases}")
        if self.rank in ahead:
            raise PeersBehind(f"only {format_ranks(ahead)} arrived at save number {newest}")
        at = f"{format_ranks(ahead)} {'is' if len(ahead) == 1 else 'are'} at save number {newest}"
        raise SaveFailed(f"save number {self._save_number} was abandoned while {phase}: {at}")


def format_by_rank(values: Iterable[Any]) -> str:
    """Write the values of all ranks: ``rank 0: 4, rank 1: 8``."""
    return ", ".join(f"rank {rank}: {value}" for rank, value in enumerate(values))


class StorageExchange:
    """Ranks that exchange message files.

    Ranks other than 0 store a *join* message, and rank 0 answers each with the random id of the
    session. Exchanges of a session are numbered, and each rank stores one message per exchange. A
    locked *alive* message shows that a rank lives; *failed* has its error; *done* says that it has
    read everything. If there is a barrier that cannot carry texts, ranks wait at it too.
    """

    def __init__(
        self,
        rank_info: RankInfo,
        messages: MessageStore,
        *,
        timeout: float,
        barrier: BarrierLike | None = None,
    ) -> None:
        self._rank = rank_info.global_rank
        self._size = rank_info.global_world_size
        self._messages = messages
        self._timeout = timeout
        self._barrier = barrier
        self._job_prefix = f"{MESSAGE_PREFIX}{job_name()}"
        self._session = ""
        self._presence: int | None = None  # its lock shows that this rank is alive
        self._exchanges = 0
        self._all_present = False  # whether all ranks completed the last exchange

    def exchange(self, text: str) -> list[str]:
        self._all_present = False
        try:
            if not self._session:
                self._session = self._form_session() if self._rank == 0 else self._join_session()
                self._presence = self._messages.put_locked(self._name("alive", self._rank))
            self._exchanges += 1
            self._messages.put(self._name(self._exchanges, self._rank), text)
            if self._barrier is not None:
                self._barrier.execute_barrier()
            texts = self._poll(self._collect, self._timeout)
            if texts is None:
                raise self._missing_ranks_error()
        except BaseException as error:
            if self._session:
                with suppress(OSError):  # must not hide the cause
                    failure = f"rank {self._rank}: {error}"
                    self._messages.put(self._name("failed", self._rank), failure)
            raise
        self._all_present = True
        return texts

    def _name(self, kind: int | str, rank: int) -> str:
        return f"{MESSAGE_PREFIX}{self._session}.{kind}.{rank}"

    def _form_session(self) -> str:
        """Wait until every other rank joins, and answer it."""
        joins: dict[int, set[str]] = defaultdict(set)

        def all_arrived() -> bool:
            for name in self._messages.names():
                if name.startswith(f"{self._job_prefix}.join."):
                    rank, nonce = name.split(".")[-2:]
                    joins[int(rank)].add(nonce)
            return len(joins) == self._size - 1

        session = secrets.token_hex(8)
        error: SaveFailed | None = None
        if not self._poll(all_arrived, self._timeout):
            missing = format_ranks([rank for rank in range(1, self._size) if rank not in joins])
            error = SaveTimeout(f"{missing} did not arrive within {self._timeout} s")
        elif duplicates := [rank for rank, nonces in joins.items() if len(nonces) > 1]:
            twice = format_ranks(duplicates)
            error = SaveFailed(f"two processes claim to be {twice}; do two jobs save here?")
        reply = json.dumps({"failed": str(error)} if error else {"session": session})
        for nonce in itertools.chain.from_iterable(joins.values()):
            self._messages.put(f"{self._job_prefix}.answer.{nonce}", reply)
        if error is not None:
            raise error
        return session

    def _join_session(self) -> str:
        """Ask to join until rank 0 answers, since rank 0 first removes old messages."""
        nonce = secrets.token_hex(8)
        join = f"{self._job_prefix}.join.{self._rank}.{nonce}"
        answer = f"{self._job_prefix}.answer.{nonce}"

        def read_answer() -> str | None:
            names = self._messages.names()
            if answer in names:
                return self._messages.get(answer)
            if join not in names:
                self._messages.put(join, "")
            return None

        try:
            grace = min(self._timeout / 2, _LEADER_GRACE)
            found = self._poll(read_answer, self._timeout + grace)
            if found is None:
                raise SaveTimeout(f"rank 0 did not arrive within {self._timeout} s")
        finally:
            self._messages.remove(join)
            self._messages.remove(answer)
        reply = json.loads(found)
        if "failed" in reply:
            raise SaveFailed(reply["failed"])
        return str(reply["session"])

    def _collect(self) -> list[str] | None:
        names = self._messages.names()
        for rank in range(self._size):
            if (failed := self._name("failed", rank)) in names:
                raise SaveFailed(self._messages.get(failed) or f"rank {rank} failed")
        wanted = [self._name(self._exchanges, rank) for rank in range(self._size)]
        missing = [rank for rank, name in enumerate(wanted) if name not in names]
        for rank in missing:
            is_dead = self._messages.is_abandoned(self._name("alive", rank))
            # It may have sent its message and left since the names were listed.
            if is_dead and self._messages.get(wanted[rank]) is None:
                raise SaveFailed(f"rank {rank} died")
        if missing:
            return None
        texts = [text for name in wanted if (text := self._messages.get(name)) is not None]
        return texts if len(texts) == self._size else None

    def _missing_ranks_error(self) -> SaveFailed:
        names, count = self._messages.names(), self._exchanges
        seen = [
            sum(self._name(number, rank) in names for number in range(1, count + 1))
            for rank in range(self._size)
        ]
        missing = ", ".join(
            f"rank {rank} (at exchange {number} of {count})"
            for rank, number in enumerate(seen)
            if number < count
        )
        return SaveTimeout(f"{missing} did not arrive within {self._timeout} s")

    def close(self) -> None:
        """Leave the session. Rank 0 removes the messages when all ranks have read them."""
        try:
            if self._session and self._rank != 0:
                self._messages.put(self._name("done", self._rank), "")
            elif self._all_present:  # else late ranks must find them; the next save removes them
                done = {self._name("done", rank) for rank in range(1, self._size)}
                timeout = min(self._timeout, _CLOSE_TIMEOUT)
                if self._poll(lambda: self._messages.names().issuperset(done), timeout):
                    for name in self._messages.names():
                        if name.startswith(f"{MESSAGE_PREFIX}{self._session}."):
                            self._messages.remove(name)
        except OSError:
            pass  # the save has already succeeded or failed
        finally:
            if self._presence is not None:
                os.close(self._presence)
                self._presence = None

    def _poll(self, look: Callable[[], T], timeout: float) -> T | None:
        """Call `look` at growing intervals until it returns something; None after `timeout`."""
        deadline = time.monotonic() + timeout
        pause = _FIRST_POLL
        while not (seen := look()):
            if time.monotonic() > deadline:
                return None
            time.sleep(pause)
            pause = min(pause * 1.5, _MAX_POLL)
        return seen
