"""A reusable barrier in a key-value store, with one outcome per round on all ranks.

The invariant: *the n-th call has the same outcome on every rank.* Every call takes the next
number, whether it passes or fails, so ranks need no other means to stay in step.

A round that passes costs a rank two round trips: it adds itself to the counter of the epoch, and
waits for a key that the last rank to arrive sets. While it waits, its progress is in a key of its
own, from which others name the missing ranks.

A round fails in one atomic step: a rank whose deadline has passed swaps the counter, as it last saw
it, for a negative number. If a rank arrived in between, the swap fails and is tried again; if
that was the last rank, the round has passed. A rank that adds to a counter that was swapped or
deleted gets less than an open counter ever holds: it is late. The *record* holds the cause and
the epoch that is open.

A rank that recreates its barrier ends the epoch too, so that its former barrier no longer
counts. Ranks that wait in a round then enter it again in the next epoch.

==================  ===========================================================================
``record``          what the ranks have agreed on: see `EpochRecord`
``count/E``         `OPEN` plus the arrivals in epoch E, each an `arrival_increment`
``progress/R``      the last round that rank R arrived at, and its text
``text/N/R/I``      chunk I of the text of rank R at round N, if it is long
``round/E/N``       set once round N is over in epoch E: the texts, `PASSED` or `FAILED`
``instances/R``     how many barriers rank R has created
==================  ===========================================================================
"""

from __future__ import annotations

import json
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace

import msgspec
from torch._C._distributed_c10d import Store
from torch.distributed import DistError

from .._formatting import first_line, format_ranks
from ..errors import BarrierError, BarrierTimeout, InvalidArgument, InvalidState, RendezvousError
from ._store_connection import Address, StoreConnection, wait_for_key
from ._types import check_not_forked

OPEN = 1 << 62
PASSED, FAILED = "passed", "failed"
NEVER = float("-inf")
MAX_VALUE_BYTES = 4 << 20  # per value; torch's server disconnects clients that send over 8 MiB

_WITH_TEXT = 1 << 31  # arrivals with a text are counted above this bit, and all below it
_UNUSED_VALUE = "-0"  # no key ever holds it


@dataclass(frozen=True)
class BarrierTimings:
    """Intervals of the barrier protocol in seconds; tests pass shorter ones."""

    # How long, at least, some rank has been in a failed round when the others in it are woken.
    wake_after: float = 1.0
    # For so long after a round has passed, no rank can be woken from a failed one. Far shorter than
    # `wake_after`: clocks differ, and stand still while a machine is suspended.
    failure_free_window: float = 0.1
    store_grace: float = 1.0  # how long after a deadline the store may still answer
    epoch_timeout: float = 1.0  # how long a rank that ended an epoch may take to record why
    poll_interval: float = 0.005  # how often the others look for that record
    notify_timeout: float = 1.0  # how long an error may be delayed to notify the others of it


def arrival_increment(text: str | None) -> int:
    return 1 if text is None else _WITH_TEXT + 1


def count_arrivals(value: int) -> int:
    """Return the number of arrivals in a counter's value, or in a difference of two."""
    return value & (_WITH_TEXT - 1)


def peek(store: Store, key: str) -> bytes | None:
    """Read a key that may be missing, in one round trip; `get` takes two, and waits."""
    found: bytes = store.compare_set(key, _UNUSED_VALUE, _UNUSED_VALUE)
    return None if found == _UNUSED_VALUE.encode() else found


@dataclass(frozen=True)
class RoundFailure:
    """Why a round failed; the same on every rank."""

    round: int
    by: int  # the rank that found it
    cause: str  # what that rank did: ``timed out after 5 s``
    # The last round that each missing rank arrived at; 0 if it never arrived.
    progress: Mapping[int, int] = field(default_factory=dict)
    timeout: bool = True  # whether a deadline was the cause

    def error(self, barrier: str, number: int, rank: int, *, late: bool = False) -> BarrierError:
        """Return the error that `rank` raises from its call of that number."""
        reason = self.cause if rank == self.by else f"rank {self.by} {self.cause}"
        if number != self.round:
            reason = (
                f"this rank arrived too late: all rounds up to {self.round} have failed. Every "
                "rank must make every call; a rank that skipped calls must recreate its barrier"
            )
        elif late:
            reason = f"this rank arrived too late: {reason}"
        kind = BarrierTimeout if self.timeout else BarrierError
        # A late rank has arrived by now.
        progress = {r: last for r, last in self.progress.items() if r != rank or not late}
        return kind(
            f"barrier {barrier!r}, round {number}, rank {rank}: {reason}",
            barrier=barrier,
            round=number,
            progress=progress if number == self.round else {},
        )


@dataclass(frozen=True)
class EpochRecord:
    """An epoch: its counter counts rounds from `first` on, until one of them fails."""

    store: str  # identifies the contents of this store; a restarted server has another
    size: int  # the number of ranks
    epoch: int = 0
    first: int = 1  # the first round of the epoch; all earlier ones are decided
    passed: int = 0  # the last round that passed before the epoch
    failure: RoundFailure | None = None  # the last round that failed
    # Which of the barriers that a rank created counts; the first if not listed.
    instances: Mapping[int, int] = field(default_factory=dict)


def _decode(text: bytes) -> EpochRecord:
    return msgspec.json.decode(text, type=EpochRecord)


class StoreBarrierMember:
    def __init__(
        self,
        connect: Callable[[], Store],
        prefix: str,
        *,
        rank: int,
        size: int,
        host: str = "the store",
        timeout: float = 60.0,
        address: Address | None = None,
        timings: BarrierTimings | None = None,
    ) -> None:
        self.prefix = prefix
        self.rank = rank
        self.size = size
        self._connect = connect
        self._address = address
        self._host = host
        self._timings = timings or BarrierTimings()
        # With its length, no prefix's keys can start with those of another.
        self.root = f"barrier:{len(prefix)}:{prefix}:"
        self._record_key = f"{self.root}record"
        self._progress_keys = [f"{self.root}progress/{each}" for each in range(size)]
        self._progress_key = self._progress_keys[rank]
        self._chunks: list[tuple[int, list[str]]] = []  # of this rank's texts: rounds and keys
        self._instance: int  # how many barriers this rank has created, this one included
        self._record: EpochRecord  # of the epoch that is open
        self._record_text: bytes  # as it is in the store
        self._count_key: str  # of its counter
        self._rounds: str  # the prefix of the keys that end its rounds
        self._next: int  # the next round to be decided, as far as this rank knows
        self._base: int  # the counter before the first arrival at that round
        self._lock = threading.Lock()  # held for a whole round
        self._number = 0  # of the last round
        self._has_text = False  # whether it exchanges texts
        self._increment = arrival_increment(None)  # what this rank adds for it
        self._round_key = ""  # set when it is over
        self._began = NEVER  # when this rank arrived at it
        self._passed_at = NEVER  # when this rank arrived at the round before, if that passed
        self._passed: int  # the last round that passed
        self._passed_keys: tuple[str, str]  # the keys of the last two that passed
        self._passed_elsewhere: int  # the last round that all ranks arrived at elsewhere
        self._woken: list[tuple[int, str]]  # rounds whose waiters this rank woke, and their keys
        self._unresolved_cause = ""  # why this rank does not know how its last round ended
        self._open_connection(timeout)
        try:
            with self._connection.with_deadline(time.monotonic() + timeout):
                self._join()
        except DistError as error:
            raise self._store_lost(error, timeout) from error

    # -- a round ---------------------------------------------------------------------------

    def wait(self, text: str | None, timeout: float) -> list[str]:
        """Wait for every rank; return the texts of all, or nothing without a text."""
        # Two processes on one socket get each other's answers.
        check_not_forked(self._connection.pid, "barrier")
        passed_at = NEVER
        if not self._lock.acquire(timeout=timeout):
            raise BarrierTimeout(
                f"barrier {self.prefix!r}, rank {self.rank}: another thread of this process has "
                f"been in it for {timeout:g} s. Give each thread a barrier with its own prefix",
                barrier=self.prefix,
            )
        try:
            self._began = time.monotonic()
            self._number += 1
            if self._unresolved_cause:
                self._reconnect(timeout)
            deadline = self._began + timeout + self._timings.store_grace
            with self._connection.with_deadline(deadline):
                texts = self._wait(self._number, text, timeout)
            passed_at = self._began
            return texts
        except BarrierError:
            raise  # the outcome on all ranks
        except (DistError, RendezvousError) as error:
            self._unresolved_cause = "lost its connection"
            raise self._store_lost(error, timeout) from error
        except BaseException as error:
            self._unresolved_cause = f"raised {type(error).__name__}"
            self._connection.cut()  # another thread may still wait on it
            raise
        finally:
            self._passed_at = passed_at
            self._lock.release()

    def fail_call(self, cause: str) -> None:
        """Count a call that raises before it reaches the store: the others arrive at that round."""
        with self._lock:
            self._number += 1
            self._passed_at = NEVER
            self._unresolved_cause = self._unresolved_cause or cause

    def skip_to(self, number: int, *, passed: int) -> None:
        """Make `number` the next round. Earlier ones ran elsewhere; up to `passed` they passed."""
        self._number = number - 1
        self._passed_elsewhere = passed

    def record_arrival(self, number: int) -> None:
        """Record that this rank arrived at a round elsewhere, which failed."""
        with suppress(DistError), self._extend_deadline():
            self._store.set(self._progress_key, f"{number}")

    def delete_last_round(self) -> None:
        """Delete the key of the last round once all ranks have left it."""
        with suppress(DistError), self._extend_deadline():
            self._store.delete_key(self._round_key)

    def _extend_deadline(self) -> StoreConnection:
        return self._connection.with_deadline(time.monotonic() + self._timings.store_grace)

    def _wait(self, number: int, text: str | None, timeout: float) -> list[str]:
        self._has_text, self._increment = text is not None, arrival_increment(text)
        if text is not None:  # before arriving: the last rank to arrive reads it
            entry = self._store_text(number, text)
            self._store.set(self._progress_key, f"{number} {entry}")
        while True:
            value = self._arrive_at(number)
            arrived = count_arrivals(value - self._base)
            if arrived == self.size:
                return self._complete_round(number, value)
            if text is None:
                self._store.set(self._progress_key, f"{number}")
            before, last = self._passed_keys
            if arrived == 1 and before:  # all ranks arrived at the last round, so all left `before`
                self._store.delete_key(before)
                self._passed_keys = ("", last)
            while self._woken and self._woken[0][0] < number - 1:
                self._store.delete_key(self._woken.pop(0)[1])
            left = self._began + timeout - time.monotonic()
            heed_signals = not self._is_back_to_back()
            if wait_for_key(self._store, self._round_key, left, heed_signals=heed_signals):
                texts = self._read_outcome(number)
            else:
                texts = self._end_round(number, value, f"timed out after {timeout:g} s")
            if texts is not None:
                return texts

    def _store_text(self, number: int, text: str) -> str:
        """Return what goes next to this rank's progress: the text, or the number of its chunks."""
        # Delete the chunks of all rounds but the last that passed: others may be reading it.
        for key in [key for old, keys in self._chunks if old != self._passed for key in keys]:
            self._store.delete_key(key)
        self._chunks = [(old, keys) for old, keys in self._chunks if old == self._passed]
        encoded = json.dumps(text)  # plain ASCII, also of surrogates
        if len(encoded) <= MAX_VALUE_BYTES // self.size:  # so that all fit into one value
            return encoded
        count = -(-len(encoded) // MAX_VALUE_BYTES)
        keys = self._chunk_keys(number, self.rank, count)
        self._chunks.append((number, keys))
        for index, key in enumerate(keys):
            start = index * MAX_VALUE_BYTES
            self._store.set(key, encoded[start : start + MAX_VALUE_BYTES])
        return str(count)

    def _read_texts(self, number: int, gathered: bytes) -> list[str]:
        """Return the texts of all ranks, given a JSON list of what `_store_text` returned."""
        texts = json.loads(gathered)
        for rank, count in enumerate(texts):
            if isinstance(count, int):
                chunks = [self._store.get(key) for key in self._chunk_keys(number, rank, count)]
                texts[rank] = json.loads(b"".join(chunks))
        return list(texts)

    def _chunk_keys(self, number: int, rank: int, count: int) -> list[str]:
        return [f"{self.root}text/{number}/{rank}/{index}" for index in range(count)]

    def _arrive_at(self, number: int) -> int:
        """Count this rank in the open epoch; return the counter."""
        while True:
            if number < self._record.first:
                self._store.set(self._progress_key, f"{number}")
                raise self._round_error(number, late=True)
            if number > self._next:  # this rank raised from rounds that the store knows nothing of
                self._end_epoch(self._base)
                cause = f"continued with round {number}"
                self._begin_epoch(number, RoundFailure(number - 1, self.rank, cause, timeout=False))
                continue
            self._round_key = f"{self._rounds}{number}"
            value = self._store.add(self._count_key, self._increment)
            if value >= OPEN:
                return value
            self._store.delete_key(self._count_key)  # which the addition may have recreated
            self._follow_epoch()

    def _is_back_to_back(self) -> bool:
        """Whether the last round has only just passed; repeated rounds must be fast."""
        window = self._timings.failure_free_window
        return not self._has_text and time.monotonic() - self._passed_at < window

    def _complete_round(self, number: int, value: int) -> list[str]:
        """Release the other ranks, knowing that all have arrived."""
        if value != self._base + self.size * self._increment:
            if self._end_epoch_at(value):
                cause = "found that some ranks called execute_barrier and others exchange"
                self._begin_epoch(number + 1, RoundFailure(number, self.rank, cause, timeout=False))
                self._wake(number, self._round_key, delay=self._timings.wake_after)
            else:
                self._follow_epoch()
            raise self._round_error(number)
        if not self._has_text:
            self._store.set(self._round_key, PASSED)
            return self._pass_round(number)
        return self._pass_round(number, self._gather_texts(number))

    def _gather_texts(self, number: int) -> list[str]:
        """Collect the texts, and publish them unless another rank has."""
        values = self._store.multi_get(self._progress_keys)
        entries = [value.decode().partition(" ") for value in values]
        if all(last == f"{number}" for last, _, _ in entries):
            mine = f"[{','.join(entry for _, _, entry in entries)}]"
            gathered = self._store.compare_set(self._round_key, "", mine)
        else:  # some ranks have read them and are at the next round
            gathered = self._store.get(self._round_key)
        return self._read_texts(number, gathered)

    def _read_outcome(self, number: int) -> list[str] | None:
        """Read how a round ended; None if this rank must arrive at it again."""
        # No rank arrives at this round before the one before it has passed. If that was just now,
        # no rank has been here long enough to wake others from a failure: no need to look.
        if self._is_back_to_back():
            return self._pass_round(number)
        value = peek(self._store, self._round_key)
        if value is None or value == FAILED.encode():
            has_advanced = self._read_record()
            assert has_advanced, "ranks are woken after the record was written"
            return self._outcome_on_record(number)
        return self._pass_round(number, self._read_texts(number, value) if self._has_text else [])

    def _outcome_on_record(self, number: int) -> list[str] | None:
        """Return the outcome of a round in an epoch that is over; None if it is undecided."""
        record = self._record
        if number >= record.first:
            return None
        if number != record.passed:  # later rounds cannot have passed without this rank
            raise self._round_error(number)
        self._mark_passed(number)
        return self._gather_texts(number) if self._has_text else []

    def _pass_round(self, number: int, texts: list[str] | None = None) -> list[str]:
        self._base += self.size * self._increment
        self._next = number + 1
        self._mark_passed(number)
        return texts or []

    def _mark_passed(self, number: int) -> None:
        self._passed = number
        self._passed_keys = (self._passed_keys[1], self._round_key)

    # -- a round that does not pass --------------------------------------------------------

    def _end_round(self, number: int, value: int, cause: str) -> list[str] | None:
        """End a round now, passed or failed; None as in `_read_outcome`."""
        by_me, value = self._end_epoch(value)
        if value >= OPEN:  # complete
            if count_arrivals(value - self._base) > self.size:  # some are at the next round
                return self._read_outcome(number)
            return self._complete_round(number, value)  # in place of the last rank, if it cannot
        if by_me:
            self._fail_round(number, cause)
        else:
            self._follow_epoch()
        return self._outcome_on_record(number)

    def _fail_round(self, number: int, cause: str) -> None:
        """Begin an epoch after `number`, which failed because ranks are missing."""
        progress = {rank: at for rank, at in enumerate(self._progress()) if at < number}
        ranks = f"missing {format_ranks(sorted(progress))}" if progress else ""
        missing = ranks or "the last rank arrived too late"
        key = f"{self._rounds}{number}"
        failure = RoundFailure(number, self.rank, f"{cause}: {missing}", progress)
        advanced = self._begin_epoch(number + 1, failure)
        if advanced and time.monotonic() - self._began >= self._timings.wake_after:
            self._wake(number, key)

    def _follow_epoch(self) -> None:
        """Switch to the epoch that another rank begins; begin it if that rank does not."""
        deadline = time.monotonic() + self._timings.epoch_timeout
        while time.monotonic() < deadline:
            if self._read_record():
                return
            time.sleep(self._timings.poll_interval)
        # The rank that ended the round had arrived at it; this rank may not have arrived at any.
        self._next = max(self._next, *self._progress())
        self._fail_round(self._next, "found that a rank ended the round without recording a cause")

    def _wake(self, number: int, key: str, *, delay: float = 0.0) -> None:
        """Make the ranks that wait in a round read the record; only after `wake_after` in it."""
        if delay:
            time.sleep(delay)
            self._extend_deadline()
        self._store.set(key, FAILED)
        self._woken.append((number, key))

    def _round_error(self, number: int, *, late: bool = False) -> BarrierError:
        failure = self._record.failure
        assert failure is not None, "a round that is over and has not passed has failed"
        return failure.error(self.prefix, number, self.rank, late=late)

    def _store_lost(self, error: Exception, timeout: float) -> BarrierError:
        silent = self._connection.was_cut or isinstance(error, TimeoutError)
        cause = f"{self._host} is gone: {first_line(error)}"
        if silent:
            cause = f"{self._host} did not answer within {timeout:g} s. Its process may be stopped"
        failure = RoundFailure(self._number, self.rank, cause, timeout=silent)
        return failure.error(self.prefix, self._number, self.rank)

    def _progress(self) -> list[int]:
        if self._store.check(self._progress_keys):
            values = self._store.multi_get(self._progress_keys)
        else:
            values = [self._store.compare_set(key, "", "0") for key in self._progress_keys]
        # The last rank to arrive does not record it, but all know.
        known = max(self._passed, self._passed_elsewhere)
        return [max(int(value.partition(b" ")[0]), known) for value in values]

    # -- the record and the counter ---------------------------------------------------------

    def _end_epoch(self, value: int) -> tuple[bool, int]:
        """End the epoch unless the open round is complete; return whether this rank did, and the
        counter. `value` is the counter as this rank last saw it."""
        mine = -1 - self.rank
        while True:
            now = int(self._store.compare_set(self._count_key, f"{value}", f"{mine}"))
            if now == value:  # torch returns the expected value if the key is missing
                return False, mine
            if now < OPEN:
                return now == mine, now
            value = now
            if count_arrivals(value - self._base) >= self.size:
                return False, value

    def _end_epoch_at(self, value: int) -> bool:
        """End the epoch if this is the counter, even if a round is complete."""
        mine = f"{-1 - self.rank}"
        return bool(self._store.compare_set(self._count_key, f"{value}", mine) == mine.encode())

    def _begin_epoch(
        self,
        first: int,
        failure: RoundFailure | None = None,
        instances: dict[int, int] | None = None,
    ) -> bool:
        """Begin the next epoch unless another rank has; return whether this rank did.

        Without a failure, `first` is the round that was open.
        """
        old = self._record
        new = replace(
            old,
            epoch=old.epoch + 1,
            first=first,
            passed=self._next - 1 if self._next > old.first else old.passed,
            failure=failure or old.failure,
            instances={**old.instances, **(instances or {})},
        )
        text, count_key = msgspec.json.encode(new).decode(), f"{self.root}count/{new.epoch}"
        self._store.compare_set(count_key, "", f"{OPEN}")
        self._store.delete_key(self._count_key)
        current = self._store.compare_set(self._record_key, self._record_text.decode(), text)
        self._adopt_record(current)
        if self._record.epoch > new.epoch:
            self._store.delete_key(count_key)  # recreated above: other ranks were faster
        return bool(current == text.encode())

    def _read_record(self) -> bool:
        """Switch to the epoch that is open now; return whether it is another."""
        current = self._store.get(self._record_key)
        if current == self._record_text:
            return False
        self._adopt_record(current)
        return True

    def _adopt_record(self, text: bytes) -> None:
        record = _decode(text)
        if record.instances.get(self.rank, 1) > self._instance:
            raise InvalidState(
                f"barrier {self.prefix!r}, rank {self.rank}: replaced by a newer barrier of this "
                "rank. Keep the newer one, or give each barrier its own prefix"
            )
        if record.size != self.size:
            raise InvalidArgument(
                f"ranks disagree on the world size of barrier {self.prefix!r}: "
                f"rank {self.rank} says {self.size}, the first rank said {record.size}"
            )
        self._record_text = text
        self._record = record
        self._count_key = f"{self.root}count/{record.epoch}"
        self._rounds = f"{self.root}round/{record.epoch}/"
        self._base = OPEN
        self._next = record.first

    # -- joining, and joining again --------------------------------------------------------

    def _open_connection(self, timeout: float) -> None:
        self._connection = StoreConnection(self._connect, self._address, timeout=timeout)
        self._store = self._connection.store
        if self.rank == 0:
            self._connection.flush_at_exit()

    def _join(self) -> None:
        """Join at the first round, or at the next one if this rank had a barrier before."""
        store = self._store
        self._instance = store.add(f"{self.root}instances/{self.rank}", 1)
        if not store.check([self._record_key]):
            fresh = EpochRecord(store=uuid.uuid4().hex, size=self.size)
            store.compare_set(f"{self.root}count/0", "", f"{OPEN}")
            store.compare_set(self._record_key, "", msgspec.json.encode(fresh).decode())
        self._adopt_record(store.get(self._record_key))
        if self._record.epoch > 0:
            # Recreated above, if other ranks have advanced meanwhile.
            store.delete_key(f"{self.root}count/0")
        self._number = self._passed = self._passed_elsewhere = 0
        self._passed_keys = ("", "")
        self._woken = []
        if self._instance == 1:
            return
        # Replace this rank's former barrier; a round in which that one was counted cannot pass.
        while True:
            value = int(peek(store, self._count_key) or 0)
            if value < OPEN:
                self._follow_epoch()
                continue
            rounds, waiting = divmod(count_arrivals(value), self.size)
            self._next = number = self._record.first + rounds
            counted = waiting > 0 and self._progress()[self.rank] == number
            if not self._end_epoch_at(value):
                continue  # a rank arrived
            key = f"{self._rounds}{number}"
            cause = "recreated its barrier while others waited for it"
            failure = RoundFailure(number, self.rank, cause, timeout=False) if counted else None
            if self._begin_epoch(number + counted, failure, {self.rank: self._instance}):
                break
        self._number = self._record.first - 1
        if waiting:
            self._wake(number, key, delay=self._timings.wake_after)

    def _reconnect(self, timeout: float) -> None:
        """Open another connection, and find out how the round ended that broke off."""
        self._connection.close()
        self._open_connection(timeout)
        deadline = self._began + timeout + self._timings.store_grace
        with self._connection.with_deadline(deadline):
            current = peek(self._store, self._record_key)
            if current is None or _decode(current).store != self._record.store:
                self._join()  # a new store, where counting starts over
                self._number += 1
            else:
                if current != self._record_text:
                    self._adopt_record(current)
                if self._next < self._number:
                    self._round_key = f"{self._rounds}{self._next}"
                    with suppress(BarrierError):
                        self._end_round(self._next, self._base, self._unresolved_cause)
        self._unresolved_cause = ""
