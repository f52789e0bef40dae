"""A reusable barrier in a key-value store, with one outcome per use on all ranks.

The invariant: *the n-th call has the same outcome on every rank.* Every call takes the next
number, whether it passes or fails, so ranks need not be told where the others are.

A use that passes costs a rank two round trips: it adds itself to the counter of the epoch, the
*word*, and waits for a key that the last rank to arrive sets. While it waits, its progress is in a
key of its own, which is how others can name the missing ranks.

A use fails in one atomic step: a rank whose deadline has passed swaps the word, as it last saw
it, for a negative number. If a rank arrived in between, the swap fails and is tried again; if
that was the last rank, the use has passed. A rank that adds to a word that was swapped or
deleted gets less than an open word ever holds: it is late. The *record* tells what happened and
which epoch is open.

A rank that recreates its barrier ends the epoch too, so that its former barrier no longer
counts. Ranks that wait in a use then enter it again in the next epoch.

==================  ===========================================================================
``record``          what the ranks have agreed on: see `Record`
``word/E``          `OPEN` plus the arrivals in epoch E, each an `arrival_increment`
``at/R``            the last use that rank R arrived at, and its text
``said/N/R/I``      piece I of the text of rank R at use N, if it is long
``use/E/N``         set once use N is over in epoch E: the texts, `PASSED` or `FAILED`
``instances/R``     how many barriers rank R has made
==================  ===========================================================================
"""

from __future__ import annotations

import json
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NoReturn, Self

from torch._C._distributed_c10d import Store
from torch.distributed import DistError

from ..errors import (
    BarrierError,
    BarrierTimeout,
    InvalidArgument,
    InvalidState,
    InvalidType,
    RendezvousError,
)
from ..groups._formatting import first_line, format_ranks
from ._store_connection import Address, StoreConnection, wait_for_key

OPEN = 1 << 62
PASSED, FAILED = "passed", "failed"

_WITH_TEXT = 1 << 31  # arrivals with a text are counted above this bit, and all below it
_UNUSED_VALUE = "-0"  # what no key holds


def arrival_increment(text: str | None) -> int:
    """Tell what a rank adds to the word when it comes, with or without something to say."""
    return 1 if text is None else _WITH_TEXT + 1


def count_arrivals(word: int) -> int:
    """Count the arrivals in a word, or in a part of one."""
    return word & (_WITH_TEXT - 1)


def peek(store: Store, key: str) -> bytes | None:
    """Read a key that may not be there, in one round trip where `get` takes two, and waits."""
    found: bytes = store.compare_set(key, _UNUSED_VALUE, _UNUSED_VALUE)
    return None if found == _UNUSED_VALUE.encode() else found


def read_all(store: Store, keys: list[str], *, default: str) -> list[bytes]:
    """Read keys, some of which may not be there; those are then set to the default."""
    if store.check(keys):
        return store.multi_get(keys)
    return [store.compare_set(key, "", default) for key in keys]


class BarrierKeys:
    """The keys of one barrier."""

    def __init__(self, prefix: str) -> None:
        # The length keeps one prefix's keys from being those of another that it is the start of.
        self.root = f"barrier:{len(prefix)}:{prefix}:"
        self.record = f"{self.root}record"

    def word(self, epoch: int) -> str:
        """Name the counter of an epoch."""
        return f"{self.root}word/{epoch}"

    def at(self, rank: int) -> str:
        """Name a rank's progress."""
        return f"{self.root}at/{rank}"

    def said(self, use: int, rank: int, pieces: int) -> list[str]:
        """Name the pieces of what a rank says at a use."""
        return [f"{self.root}said/{use}/{rank}/{piece}" for piece in range(pieces)]

    def uses(self, epoch: int) -> str:
        """Name the ends of all uses in an epoch; each one's number follows."""
        return f"{self.root}use/{epoch}/"

    def instances(self, rank: int) -> str:
        """Name the number of barriers that a rank has made."""
        return f"{self.root}instances/{rank}"


@dataclass(frozen=True)
class UseFailure:
    """Why a use failed; the same on every rank."""

    use: int
    by: int
    """The rank that found it."""
    cause: str
    """What that rank did: ``timed out after 5 s``."""
    progress: Mapping[int, int] = field(default_factory=dict)
    """The last use that each missing rank came to; 0 if it never came."""
    timeout: bool = True
    """Whether a deadline was the cause."""

    @classmethod
    def from_plain(cls, data: dict[str, Any]) -> Self:
        """Read what JSON has made of it."""
        progress = {int(rank): last for rank, last in data["progress"].items()}
        return cls(**{**data, "progress": progress})

    def error(self, barrier: str, use: int, rank: int, *, late: bool = False) -> BarrierError:
        """Make the error that `rank` raises out of its call number `use`."""
        told = self.cause
        if rank != self.by and not told.startswith("rank"):
            told = f"rank {self.by} {told}"
        if use != self.use:
            told = (
                f"this rank came too late: the use had failed, and so have all up to {self.use}. "
                "Every rank makes every call; one that has left some out makes its barrier anew"
            )
        elif late:
            told = f"this rank came too late: {told}"
        kind = BarrierTimeout if self.timeout else BarrierError
        # A rank that reads this has come, at least by now.
        progress = {r: last for r, last in self.progress.items() if r != rank or not late}
        return kind(
            f"barrier {barrier!r}, use {use}, rank {rank}: {told}",
            barrier=barrier,
            use=use,
            progress=progress if use == self.use else {},
        )


@dataclass(frozen=True)
class EpochRecord:
    """An epoch: uses from `first` on are counted in its word, until one of them fails."""

    store: str
    """Tells this store's contents from those of one that was started in its place."""
    size: int
    """The number of ranks."""
    epoch: int = 0
    first: int = 1
    """The first use of the epoch; every one before it has been decided."""
    passed: int = 0
    """The last use that was passed before the epoch."""
    failure: UseFailure | None = None
    """How the last use that failed did."""
    instances: Mapping[int, int] = field(default_factory=dict)
    """Which of its barriers, in the order in which it made them, is each rank's; the first if not
    here."""

    @classmethod
    def from_text(cls, text: bytes) -> Self:
        """Read what `text` wrote."""
        data = json.loads(text)
        failure = data["failure"] and UseFailure.from_plain(data["failure"])
        instances = {int(rank): number for rank, number in data["instances"].items()}
        return cls(**{**data, "failure": failure, "instances": instances})

    def text(self) -> str:
        """Write it down."""
        return json.dumps(asdict(self))


class BarrierEpoch:
    """One rank's view of what the ranks have agreed on."""

    store: Store
    record: EpochRecord
    open: int
    """The use that is next to be decided, as far as this rank knows."""
    uses: str
    """What the keys begin with that tell in this epoch that a use is over; its number follows."""
    base: int
    """The word, when nobody has come to that use yet."""

    def __init__(self, prefix: str, keys: BarrierKeys, *, rank: int, size: int) -> None:
        self.prefix = prefix
        self.rank = rank
        self.size = size
        self.instance = 1
        self._keys = keys
        self._word_key = ""
        self._text = b""

    def enter(self, store: Store) -> None:
        """Count this as the rank's barrier, and read the record, or begin it."""
        self.store = store
        self.instance = store.add(self._keys.instances(self.rank), 1)
        if not store.check([self._keys.record]):
            fresh = EpochRecord(store=uuid.uuid4().hex, size=self.size).text()
            store.compare_set(self._keys.word(0), "", f"{OPEN}")
            store.compare_set(self._keys.record, "", fresh)
        self._adopt(store.get(self._keys.record))
        if self.record.epoch > 0:
            store.delete_key(self._keys.word(0))  # made anew, if somebody was much faster

    def is_in(self, store: Store) -> bool:
        """Go over to another connection, and tell whether it leads to where this epoch was."""
        self.store = store
        current = peek(store, self._keys.record)
        if current is None or EpochRecord.from_text(current).store != self.record.store:
            return False
        self._follow(current)
        return True

    def add(self, step: int) -> int | None:
        """Count this rank in the word, and return it, or None if the epoch is over."""
        value = self.store.add(self._word_key, step)
        if value >= OPEN:
            return value
        self.store.delete_key(self._word_key)  # which the addition has made anew, perhaps
        return None

    def look(self) -> int:
        """Read the word; it is less than `OPEN` if the epoch is over."""
        return int(peek(self.store, self._word_key) or 0)

    def close(self, value: int) -> tuple[bool, int]:
        """End the epoch, unless the open use is complete; tell whether this rank did, and the word.

        `value` is what this rank has last seen the word to be.
        """
        mine = -1 - self.rank
        while True:
            now = int(self.store.compare_set(self._word_key, f"{value}", f"{mine}"))
            if now == value:  # torch's way to say that the key is gone
                return False, mine
            if now < OPEN:
                return now == mine, now
            value = now
            if count_arrivals(value - self.base) >= self.size:
                return False, value

    def swap(self, value: int) -> bool:
        """End the epoch if the word is this, whether a use is complete or not."""
        mine = f"{-1 - self.rank}"
        return bool(self.store.compare_set(self._word_key, f"{value}", mine) == mine.encode())

    def turn(
        self, first: int, failure: UseFailure | None = None, instances: dict[int, int] | None = None
    ) -> bool:
        """Begin the next epoch, unless somebody else has, and tell whether this rank did.

        Without a failure, `first` is the use that was open.
        """
        old = self.record
        new = replace(
            old,
            epoch=old.epoch + 1,
            first=first,
            passed=self.open - 1 if self.open > old.first else old.passed,
            failure=failure or old.failure,
            instances={**old.instances, **(instances or {})},
        )
        word = self._keys.word(new.epoch)
        self.store.compare_set(word, "", f"{OPEN}")
        self.store.delete_key(self._word_key)
        held = self.store.compare_set(self._keys.record, self._text.decode(), new.text())
        self._adopt(held)
        if self.record.epoch > new.epoch:
            self.store.delete_key(word)  # made anew, for others were faster
        return bool(held == new.text().encode())

    def follow(self) -> bool:
        """Go over to the epoch that is open now, and tell whether that is another."""
        return self._follow(self.store.get(self._keys.record))

    def _follow(self, current: bytes) -> bool:
        if current == self._text:
            return False
        self._adopt(current)
        return True

    def _adopt(self, text: bytes) -> None:
        record = EpochRecord.from_text(text)
        if record.instances.get(self.rank, 1) > self.instance:
            raise InvalidState(
                f"rank {self.rank} has made another barrier {self.prefix!r} since, which took this "
                "one's place: use that one, or give each a prefix of its own"
            )
        if record.size != self.size:
            raise InvalidArgument(
                f"barrier {self.prefix!r} is one of {record.size} ranks, and rank {self.rank} has "
                f"made it for {self.size}: give all the same world size, or another prefix"
            )
        self._text = text
        self.record = record
        self._word_key = self._keys.word(record.epoch)
        self.uses = self._keys.uses(record.epoch)
        self.base = OPEN
        self.open = record.first


MAX_VALUE_BYTES = 4 << 20
"""Bytes that are put into one value; torch's server takes 8 MiB, and drops who sends more."""


def check_text(text: str) -> str:
    """Return what a rank wants to say, if it can be said."""
    if not isinstance(text, str):
        raise InvalidType(f"exchange takes a string, not {type(text).__name__}: json.dumps it")
    return text


class ChunkedTexts:
    """What one rank says at its uses, and how it reads what the others say."""

    def __init__(self, keys: BarrierKeys, *, rank: int, size: int) -> None:
        self._keys = keys
        self._rank = rank
        self._size = size
        self._pieces: list[tuple[int, list[str]]] = []  # that are in the store, by use

    def say(self, store: Store, use: int, text: str) -> str:
        """Put what is long into the store, and return what is to be said beside the progress."""
        said = json.dumps(text)  # plain ASCII, whatever is in it
        if len(said) <= MAX_VALUE_BYTES // self._size:  # so that all fit into one value
            return said
        parts = [
            said[start : start + MAX_VALUE_BYTES] for start in range(0, len(said), MAX_VALUE_BYTES)
        ]
        keys = self._keys.said(use, self._rank, len(parts))
        self._pieces.append((use, keys))
        for key, part in zip(keys, parts, strict=True):
            store.set(key, part)
        return str(len(parts))

    def hear(self, store: Store, use: int, told: bytes) -> list[str]:
        """Read what everybody said at a use from what was gathered."""
        return [
            each if isinstance(each, str) else self._collect(store, use, rank, each)
            for rank, each in enumerate(json.loads(told))
        ]

    def _collect(self, store: Store, use: int, rank: int, pieces: int) -> str:
        parts = [store.get(key) for key in self._keys.said(use, rank, pieces)]
        text: str = json.loads(b"".join(parts))
        return text

    def sweep(self, store: Store, passed: int) -> None:
        """Delete the pieces of all uses but the last that has passed: others may be reading it."""
        for _, keys in [each for each in self._pieces if each[0] != passed]:
            for key in keys:
                store.delete_key(key)
        self._pieces = [each for each in self._pieces if each[0] == passed]


def join_texts(said: list[str]) -> str:
    """Make one value of what `ChunkedTexts.say` has returned on every rank."""
    return f"[{','.join(said)}]"


WAKE_AFTER = 1.0
"""Seconds that some rank has been in a failed use, at least, when the others in it are woken."""

FAILURE_FREE_WINDOW = 0.1
"""Seconds after a use has passed in which nobody can be woken from a failed one: far fewer than
`WAKE_AFTER`, for clocks differ, and stand still while a machine is suspended."""

STORE_GRACE = 1.0  # seconds after a deadline in which the store must have answered
EPOCH_TURN_TIMEOUT = 1.0  # seconds that a rank which has ended a use is given to say why
NEVER = float("-inf")


class StoreBarrierMember:
    """One rank's place at a barrier."""

    def __init__(
        self,
        connect: Callable[[], Store],
        prefix: str,
        *,
        rank: int,
        size: int,
        host: str = "the store",
        patience: float = 60.0,
        address: Address | None = None,
    ) -> None:
        self.prefix = prefix
        self.rank = rank
        self.size = size
        self._connect = connect
        self._address = address
        self._host = host
        self._keys = BarrierKeys(prefix)
        self._at_keys = [self._keys.at(each) for each in range(size)]
        self._at_key = self._at_keys[rank]
        self._epoch = BarrierEpoch(prefix, self._keys, rank=rank, size=size)
        self._words = ChunkedTexts(self._keys, rank=rank, size=size)
        self._lock = threading.Lock()  # held for a whole use, by whichever thread makes it
        self._number: int  # of the last use
        self._step = arrival_increment(None)  # what this rank has added for it
        self._use_key = ""  # which will tell that it is over
        self._began = NEVER  # when this rank came to it
        self._passed_at = NEVER  # when this rank came to the use before, if that has passed
        self._passed: int  # the last use that has
        self._over: tuple[str, str]  # the keys of the last two that have
        self._floor: int  # the last that all came to elsewhere
        self._woken: list[tuple[int, str]]  # the uses whose waiters this rank has woken
        self._unresolved_cause = ""  # why this rank does not know how its last use ended
        self._open(patience)
        try:
            with self._connection.until(time.monotonic() + patience):
                self._enter()
        except DistError as error:
            raise self._broken(error, patience) from error

    # -- a use -----------------------------------------------------------------------------

    def meet(self, text: str | None, timeout: float) -> list[str]:
        """Wait for every rank, and return what each has said; nothing if this one is silent."""
        if not self._lock.acquire(timeout=timeout):
            raise BarrierTimeout(
                f"barrier {self.prefix!r}, rank {self.rank}: another thread of this process has "
                f"been in it for {timeout:g} s: give each a barrier with a prefix of its own",
                barrier=self.prefix,
            )
        try:
            return self._use(text, timeout)
        finally:
            self._lock.release()

    def _use(self, text: str | None, timeout: float) -> list[str]:
        self._connection.check_process()
        self._began = time.monotonic()
        self._number += 1
        passed_at = NEVER
        try:
            if self._unresolved_cause:
                self._reconnect(timeout)
            with self._connection.until(self._began + timeout + STORE_GRACE):
                texts = self._meet(self._number, text, timeout)
            passed_at = self._began
            return texts
        except BarrierError:
            raise  # which all agree on
        except (DistError, RendezvousError) as error:
            self._unresolved_cause = "lost its connection"
            raise self._broken(error, timeout) from error
        except BaseException as error:
            self._unresolved_cause = f"raised {type(error).__name__}"
            self._connection.cut()  # on which another thread may wait yet
            raise
        finally:
            self._passed_at = passed_at

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count what the block raises as this rank's use: the others have come to it."""
        try:
            yield
        except Exception as error:
            with self._lock:
                self._number += 1
                self._unresolved_cause = self._unresolved_cause or f"raised {type(error).__name__}"
            raise

    def skip_to(self, use: int, *, passed: int) -> None:
        """Make `use` the next; those before it were decided elsewhere, and `passed` passed."""
        self._number = use - 1
        self._floor = passed

    def note(self, use: int) -> None:
        """Say that this rank has come to a use elsewhere, and that it failed."""
        with suppress(DistError), self._connection.until(time.monotonic() + STORE_GRACE):
            self._store.set(self._at_key, f"{use}")

    def forget(self) -> None:
        """Delete what is left of the last use, which all ranks are known to have left."""
        with suppress(DistError), self._connection.until(time.monotonic() + STORE_GRACE):
            self._store.delete_key(self._use_key)

    def _meet(self, use: int, text: str | None, timeout: float) -> list[str]:
        self._step = arrival_increment(text)
        if text is not None:  # whoever comes last will read it
            self._words.sweep(self._store, self._passed)
            said = self._words.say(self._store, use, text)
            self._store.set(self._at_key, f"{use} {said}")
        while True:
            value = self._arrive(use)
            arrived = count_arrivals(value - self._epoch.base)
            if arrived == self.size:
                return self._complete(use, text, value)
            if text is None:
                self._store.set(self._at_key, f"{use}")
            self._sweep(use, is_first=arrived == 1)
            left = self._began + timeout - time.monotonic()
            heeds = not self._is_back_to_back(text)
            if wait_for_key(self._store, self._use_key, left, heed_signals=heeds):
                texts = self._outcome(use, text)
            else:
                texts = self._decide(use, text, value, f"timed out after {timeout:g} s")
            if texts is not None:
                return texts

    def _arrive(self, use: int) -> int:
        """Be counted in the epoch that is open, and return its word."""
        while True:
            if use < self._epoch.record.first:
                self._store.set(self._at_key, f"{use}")
                raise self._failed(use, late=True)
            if use > self._epoch.open:
                self._fail_uses_before(use)
                continue
            self._use_key = f"{self._epoch.uses}{use}"
            value = self._epoch.add(self._step)
            if value is not None:
                return value
            self._follow()

    def _is_back_to_back(self, text: str | None) -> bool:
        """Tell whether this is one of many uses of which each has but passed, where time counts."""
        return text is None and time.monotonic() - self._passed_at < FAILURE_FREE_WINDOW

    def _complete(self, use: int, text: str | None, value: int) -> list[str]:
        """Let everybody go, as the one who knows that all have come."""
        if value != self._epoch.base + self.size * self._step:
            self._reject_mixed_calls(use, value)
        if text is None:
            self._store.set(self._use_key, PASSED)
            return self._pass(use)
        return self._pass(use, self._gather(use))

    def _gather(self, use: int) -> list[str]:
        """Collect what all have said, and publish it unless somebody has."""
        said = [each.decode().partition(" ") for each in self._store.multi_get(self._at_keys)]
        if all(number == f"{use}" for number, _, _ in said):
            mine = join_texts([each for _, _, each in said])
            told = self._store.compare_set(self._use_key, "", mine)
        else:  # some have read it, and are gone
            told = self._store.get(self._use_key)
        return self._words.hear(self._store, use, told)

    def _outcome(self, use: int, text: str | None) -> list[str] | None:
        """Read how a use has ended; None if this rank is to come to it again."""
        # Nobody comes to this use before the one before it has passed. If that was but now, nobody
        # has been here long enough to wake others from a failure, and there is no need to look.
        if self._is_back_to_back(text):
            return self._pass(use)
        told = peek(self._store, self._use_key)
        if told is None or told == FAILED.encode():
            has_turned = self._epoch.follow()
            assert has_turned, "nobody is woken before the record tells why"
            return self._verdict(use, text)
        return self._pass(use, [] if text is None else self._words.hear(self._store, use, told))

    def _verdict(self, use: int, text: str | None) -> list[str] | None:
        """Tell what the record says of a use in an epoch that is over; None if nothing."""
        record = self._epoch.record
        if use >= record.first:
            return None
        if use != record.passed:  # none after it can have, without this rank
            raise self._failed(use)
        self._passed = use
        self._over = (self._over[1], self._use_key)
        return [] if text is None else self._gather(use)

    def _pass(self, use: int, texts: list[str] | None = None) -> list[str]:
        self._epoch.base += self.size * self._step
        self._epoch.open = use + 1
        self._passed = use
        self._over = (self._over[1], self._use_key)
        return texts or []

    def _sweep(self, use: int, *, is_first: bool) -> None:
        """Delete the keys of uses that nobody is in any more."""
        before, last = self._over
        if is_first and before:  # all have come to the last, so have left the one before
            self._store.delete_key(before)
            self._over = ("", last)
        while self._woken and self._woken[0][0] < use - 1:
            self._store.delete_key(self._woken.pop(0)[1])

    # -- a use that does not pass ----------------------------------------------------------

    def _decide(self, use: int, text: str | None, value: int, cause: str) -> list[str] | None:
        """End a use, one way or the other, whoever is still to come; None as in `_results`."""
        by_me, value = self._epoch.close(value)
        if value >= OPEN:  # it is complete
            if (
                count_arrivals(value - self._epoch.base) > self.size
            ):  # and some are at the next by now
                return self._outcome(use, text)
            return self._complete(use, text, value)  # as whoever came last does, if it can
        if by_me:
            self._fail(use, cause)
        else:
            self._follow()
        return self._verdict(use, text)

    def _fail(self, use: int, cause: str) -> None:
        """Begin an epoch after `use`, which has failed for this cause and by missing ranks."""
        progress = {rank: at for rank, at in enumerate(self._progress()) if at < use}
        told = f"missing {format_ranks(sorted(progress))}" if progress else "the last came too late"
        failure = UseFailure(use, self.rank, f"{cause}: {told}", progress)
        key = f"{self._epoch.uses}{use}"
        won = self._epoch.turn(use + 1, failure)
        if won and time.monotonic() - self._began >= WAKE_AFTER:
            self._wake(use, key)

    def _follow(self) -> None:
        """Go over to the epoch that another rank begins; begin it if that one cannot."""
        until = time.monotonic() + EPOCH_TURN_TIMEOUT
        while time.monotonic() < until:
            if self._epoch.follow():
                return
            time.sleep(0.005)
        # Whoever ended the use had come to it; this rank may never have come to any.
        self._epoch.open = max(self._epoch.open, *self._progress())
        self._fail(self._epoch.open, "found the use given up by a rank that did not say why")

    def _fail_uses_before(self, use: int) -> None:
        """Fail the uses that this rank has raised from without the store's knowing."""
        self._epoch.close(self._epoch.base)
        cause = f"has gone on to use {use}"
        self._epoch.turn(use, UseFailure(use - 1, self.rank, cause, timeout=False))

    def _reject_mixed_calls(self, use: int, value: int) -> NoReturn:
        cause = "found that some ranks called execute_barrier here, and others exchange"
        if self._epoch.swap(value):
            self._epoch.turn(use + 1, UseFailure(use, self.rank, cause, timeout=False))
            self._wake_soon(use, self._use_key)
        else:
            self._follow()
        raise self._failed(use)

    def _wake_soon(self, use: int, key: str) -> None:
        """Wake those who wait in a use when they have been in it for long enough."""
        time.sleep(WAKE_AFTER)
        self._connection.until(time.monotonic() + STORE_GRACE)
        self._wake(use, key)

    def _wake(self, use: int, key: str) -> None:
        """Have those who wait in a use look at the record; for `WAKE_AFTER` some have waited."""
        self._store.set(key, FAILED)
        self._woken.append((use, key))

    def _failed(self, use: int, *, late: bool = False) -> BarrierError:
        failure = self._epoch.record.failure
        assert failure is not None, "a use that has not passed has failed"
        return failure.error(self.prefix, use, self.rank, late=late)

    def _broken(self, error: Exception, timeout: float) -> BarrierError:
        """Say that there is no store to meet in."""
        told = f"{self._host} is gone: {first_line(error)}"
        silent = self._connection.was_cut or isinstance(error, TimeoutError)
        if silent:
            told = f"{self._host} did not answer within {timeout:g} s: is its process stopped?"
        failure = UseFailure(self._number, self.rank, told, timeout=silent)
        return failure.error(self.prefix, self._number, self.rank)

    def _progress(self) -> list[int]:
        """Tell the last use that each rank has come to."""
        values = read_all(self._store, self._at_keys, default="0")
        said = [int(value.partition(b" ")[0]) for value in values]
        # Who comes last does not say so, but all know.
        return [max(at, self._passed, self._floor) for at in said]

    # -- coming, and coming again ----------------------------------------------------------

    def _open(self, patience: float) -> None:
        self._connection = StoreConnection(self._connect, self._address, patience=patience)
        self._store = self._connection.store
        if self.rank == 0:
            self._connection.flush_at_exit()

    def _enter(self) -> None:
        """Take this rank's place: at the first use, or at the next if it had a barrier before."""
        self._epoch.enter(self._store)
        self._number = self._passed = self._floor = 0
        self._over = ("", "")
        self._woken = []
        if self._epoch.instance > 1:
            self._take_over()

    def _take_over(self) -> None:
        """Take the place of a barrier of this rank; a use that it was counted in cannot pass."""
        epoch = self._epoch
        while True:
            value = epoch.look()
            if value < OPEN:
                self._follow()
                continue
            uses, waiting = divmod(count_arrivals(value), self.size)
            epoch.open = use = epoch.record.first + uses
            counted = waiting > 0 and self._progress()[self.rank] == use
            if not epoch.swap(value):
                continue  # somebody came
            key = f"{epoch.uses}{use}"
            cause = f"rank {self.rank} has made its barrier anew while others waited for it"
            failure = UseFailure(use, self.rank, cause, timeout=False) if counted else None
            if epoch.turn(use + counted, failure, {self.rank: epoch.instance}):
                break
        self._number = epoch.record.first - 1
        if waiting:
            self._wake_soon(use, key)

    def _reconnect(self, timeout: float) -> None:
        """Open another connection, and find out what has become of the use that broke off."""
        self._connection.close()
        self._open(timeout)
        with self._connection.until(self._began + timeout + STORE_GRACE):
            if not self._epoch.is_in(self._store):
                self._enter()  # another store, in which counting begins anew
                self._number += 1
            elif self._epoch.open < self._number:
                text = None if self._step == arrival_increment(None) else ""
                self._use_key = f"{self._epoch.uses}{self._epoch.open}"
                with suppress(BarrierError):
                    self._decide(self._epoch.open, text, self._epoch.base, self._unresolved_cause)
        self._unresolved_cause = ""
