"""Ranks that meet in a store, use after use, and agree on the outcome of each.

The law: *the n-th call has the same outcome on every rank.* Every call takes the next number,
whether it passes or fails, so ranks need not be told where the others are.

A use that passes costs a rank two round trips: it adds itself to a counter, the epoch's *word*, and
waits for a key that whoever came last has set. While it waits, its progress goes into a
key of its own, without an answer; that is how others can tell who is missing.

A use fails in one atomic step: a rank whose deadline has passed swaps the word, as it has last seen
it, for a negative number. If somebody came meanwhile the swap does not happen and is tried again;
if that was the last rank, the use has passed. Whoever adds to a word that was swapped, or has been
deleted since, gets less than an open one ever holds: it is late. It finds in the *record* what
happened, and which epoch is open now. The record is swapped, too, so that of several ranks that
tell of a failure one is heard.

`_barrier_keys` tells what is in the store.
"""

from __future__ import annotations

import json
import math
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from typing import NoReturn

from torch._C._distributed_c10d import Store
from torch.distributed import DistError, DistStoreError

from ..errors import BarrierError, InvalidState, RendezvousError
from ..groups._words import first_line, ranks_text
from ._barrier_connection import Address, Connection
from ._barrier_keys import FAILED, OPEN, PASSED, Keys, arrivals, read_all, read_texts, step_of
from ._barrier_record import Failure, Record

__all__ = ["Line"]

WAKE_AFTER = 1.0
"""Seconds that some rank has been in a failed use, at least, when the others in it are woken."""

CANNOT_HAVE_FAILED = 0.9
"""Seconds after a use has passed in which nobody can be woken from a failed one: fewer than
`WAKE_AFTER`, for clocks differ."""

GRACE = 1.0  # seconds after a deadline in which the store must have answered
TURNING = 1.0  # seconds that a rank which has ended a use is given to say why
NEVER = -math.inf


class Line:
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
        self._keys = Keys(prefix)
        self._record_key = self._keys.record
        self._at_keys = [self._keys.at(each) for each in range(size)]
        self._at_key = self._at_keys[rank]
        self._lock = threading.Lock()  # held for a whole use, by whichever thread makes it
        self._number = 0  # of the last use
        self._step = step_of(None)  # what this rank has added for it
        self._began = NEVER  # when this rank came to it
        self._passed_at = NEVER  # when this rank came to the use before, if that has passed
        self._passed = (0, 0)  # the last two uses that all came to
        self._floor = 0  # the last that all came to elsewhere
        self._woken = 0  # the use whose waiters this rank has woken, until its key is deleted
        self._is_unsettled = False  # whether the connection broke in the middle of a use
        self._connection = Connection(connect, address, patience=patience)
        self._store = self._connection.store
        if rank == 0:
            self._connection.be_heard_at_exit()
        try:
            with self._connection.until(time.monotonic() + patience):
                self._enter()
        except DistError as error:
            raise self._broken(error, patience) from error

    # -- a use -----------------------------------------------------------------------------

    def meet(self, text: str | None, timeout: float) -> list[str]:
        """Wait for every rank, and return what each has said; nothing if this one is silent."""
        with self._lock:
            self._began = time.monotonic()
            self._number += 1
            passed = False
            try:
                if self._is_unsettled:
                    self._reconnect(timeout)
                with self._connection.until(self._began + timeout + GRACE):
                    texts = self._meet(self._number, text, timeout)
                passed = True
            except (DistError, RendezvousError) as error:
                self._is_unsettled = True
                raise self._broken(error, timeout) from error
            finally:
                self._passed_at = self._began if passed else NEVER
            return texts

    def skip_to(self, use: int, *, passed: int) -> None:
        """Make `use` the next; those before it were decided elsewhere, and `passed` passed."""
        self._number = use - 1
        self._floor = passed

    def note(self, use: int) -> None:
        """Say that this rank has come to a use elsewhere, and that it failed."""
        with suppress(DistError), self._connection.until(time.monotonic() + GRACE):
            self._store.set(self._at_key, f"{use}")

    def forget(self, use: int) -> None:
        """Delete what is left of a use that all ranks are known to have left."""
        with suppress(DistError), self._connection.until(time.monotonic() + GRACE):
            self._store.delete_key(self._keys.use(use))

    def _meet(self, use: int, text: str | None, timeout: float) -> list[str]:
        self._step = step_of(text)
        if text is not None:  # whoever comes last will read it
            self._store.set(self._at_key, f"{use} {text}")
        value = self._arrive(use)
        arrived = arrivals(value - self._base)
        if arrived == self.size:
            return self._complete(use, text, value)
        if text is None:
            self._store.set(self._at_key, f"{use}")
        if arrived == 1:  # the one who has time
            self._sweep(use)
        try:
            left = self._began + timeout - time.monotonic()
            self._store.wait([self._keys.use(use)], timedelta(seconds=max(left, 0)))
        except DistStoreError:
            return self._decide(use, text, value, f"timed out after {timeout:g} s")
        # Nobody comes to this use before the one before it has passed. If that was but now, nobody
        # has been here long enough to wake others from a failure, and there is no need to look.
        if text is None and time.monotonic() - self._passed_at < CANNOT_HAVE_FAILED:
            return self._pass(use)
        return self._outcome(use, text)

    def _arrive(self, use: int) -> int:
        """Be counted in the epoch that is open, and return its word."""
        while True:
            if use < self._record.first:
                self._store.set(self._at_key, f"{use}")
                raise self._failed(use, late=True)
            if use > self._open:
                self._give_up_before(use)
                continue
            value = self._store.add(self._word_key, self._step)
            if value >= OPEN:
                return value
            self._store.delete_key(self._word_key)  # which the addition has made anew, perhaps
            self._follow()

    def _complete(self, use: int, text: str | None, value: int) -> list[str]:
        """Let everybody go, as the one who knows that all have come."""
        if value != self._base + self.size * self._step:
            self._refuse_mixture(use)
        if text is None:
            self._store.set(self._keys.use(use), PASSED)
            return self._pass(use)
        return self._pass(use, self._gather(use))

    def _gather(self, use: int) -> list[str]:
        """Collect what all have said, and publish it unless somebody has."""
        key = self._keys.use(use)
        said = [each.decode().partition(" ") for each in self._store.multi_get(self._at_keys)]
        if any(number != f"{use}" for number, _, _ in said):  # some have read it, and are gone
            return read_texts(self._store.get(key))
        mine = json.dumps([each for _, _, each in said])
        return read_texts(self._store.compare_set(key, "", mine))

    def _outcome(self, use: int, text: str | None) -> list[str]:
        """Read how a use has ended."""
        # One round trip, where `get` takes two. The key of a use that has passed is there until
        # this rank has gone on; if it is not, then this is right, too.
        told = self._store.compare_set(self._keys.use(use), "", FAILED)
        if told == FAILED.encode():
            self._adopt(self._store.get(self._record_key))
            raise self._failed(use)
        return self._pass(use, [] if text is None else read_texts(told))

    def _pass(self, use: int, texts: list[str] | None = None) -> list[str]:
        self._base += self.size * self._step
        self._open = use + 1
        self._passed = (self._passed[1], use)
        return texts or []

    def _sweep(self, use: int) -> None:
        """Delete the keys of uses that nobody is in any more."""
        before, last = self._passed
        if last == use - 1 and before:  # all have come to the last, so have left the one before
            self._store.delete_key(self._keys.use(before))
        if 0 < self._woken < use - 1:
            self._store.delete_key(self._keys.use(self._woken))
            self._woken = 0

    # -- a use that does not pass ----------------------------------------------------------

    def _decide(self, use: int, text: str | None, value: int, cause: str) -> list[str]:
        """End a use, one way or the other, whoever is still to come."""
        by_me, value = self._close(value)
        if value >= OPEN:  # it is complete
            if arrivals(value - self._base) > self.size:  # and some are at the next by now
                return self._outcome(use, text)
            return self._complete(use, text, value)  # as whoever came last does, if it can
        if by_me:
            self._fail(use, cause)
        else:
            self._follow()
        if use == self._record.passed:  # none after it can be, without this rank
            self._passed = (self._passed[1], use)
            return [] if text is None else self._gather(use)
        raise self._failed(use)

    def _close(self, value: int) -> tuple[bool, int]:
        """Swap the word for a negative number, unless it is complete; tell who did, and the word.

        `value` is what this rank has last seen it to be.
        """
        mine = -1 - self.rank
        while True:
            now = int(self._store.compare_set(self._word_key, f"{value}", f"{mine}"))
            if now == value:  # torch's way to say that the key is gone
                return False, mine
            if now < OPEN:
                return now == mine, now
            value = now
            if arrivals(value - self._base) >= self.size:
                return False, value

    def _fail(self, use: int, cause: str) -> None:
        """Begin an epoch after `use`, which has failed for this cause and by missing ranks."""
        progress = self._progress(use)
        missing = (
            f"missing {ranks_text(sorted(progress))}" if progress else "the last came too late"
        )
        failure = Failure(use, self.rank, f"{cause}: {missing}", progress)
        won = self._turn(use + 1, failure)
        if won and time.monotonic() - self._began >= WAKE_AFTER:
            self._wake(use)

    def _follow(self) -> None:
        """Go over to the epoch that another rank begins; begin it if that one cannot."""
        until = time.monotonic() + TURNING
        while time.monotonic() < until:
            current = self._store.get(self._record_key)
            if current != self._record_text.encode():
                self._adopt(current)
                return
            time.sleep(0.005)
        self._fail(self._open, "found the use given up by a rank that did not say why")

    def _turn(
        self, first: int, failure: Failure | None, instances: dict[int, int] | None = None
    ) -> bool:
        """Begin a new epoch, unless somebody else has, and tell whether this rank did."""
        old = self._record
        new = replace(
            old,
            epoch=old.epoch + 1,
            first=first,
            passed=self._open - 1 if self._open > old.first else old.passed,
            failure=failure,
            instances={**old.instances, **(instances or {})},
        )
        self._store.compare_set(self._keys.word(new.epoch), "", f"{OPEN}")
        self._store.delete_key(self._word_key)
        held = self._store.compare_set(self._record_key, self._record_text, new.text())
        self._adopt(held)
        return held == new.text().encode()

    def _adopt(self, text: bytes) -> None:
        self._record_text = text.decode()
        self._record = record = Record.from_text(text)
        self._word_key = self._keys.word(record.epoch)
        self._base = OPEN
        self._open = record.first
        if record.instances.get(self.rank, 1) > self._instance:
            raise InvalidState(
                f"rank {self.rank} has made another barrier {self.prefix!r} since, which took this "
                "one's place: use that one, or give each a prefix of its own"
            )

    def _give_up_before(self, use: int) -> None:
        """Fail the uses that this rank has raised from, or passed, without the store's knowing."""
        cause = f"has gone on to use {use}"
        self._close(self._base)
        self._turn(use, Failure(use - 1, self.rank, cause, timeout=False))

    def _refuse_mixture(self, use: int) -> NoReturn:
        cause = "found that some ranks called execute_barrier here, and others exchange"
        self._store.set(self._word_key, f"{-1 - self.rank}")  # nobody else does: all are here
        self._turn(use + 1, Failure(use, self.rank, cause, timeout=False))
        time.sleep(WAKE_AFTER)
        self._wake(use)
        raise self._failed(use)

    def _wake(self, use: int) -> None:
        """Wake those who wait in a failed use, in which somebody has been for `WAKE_AFTER`."""
        self._store.set(self._keys.use(use), FAILED)
        self._woken = use

    def _failed(self, use: int, *, late: bool = False) -> BarrierError:
        failure = self._record.failure
        if failure is None:  # of an epoch that began after the use, for another reason
            failure = Failure(self._record.first, self.rank, "")
        return failure.error(self.prefix, use, self.rank, late=late)

    def _broken(self, error: Exception, timeout: float) -> BarrierError:
        """Say that there is no store to meet in."""
        told = f"{self._host} is gone: {first_line(error)}"
        silent = self._connection.was_cut or isinstance(error, TimeoutError)
        if silent:
            told = f"{self._host} did not answer within {timeout:g} s: is its process stopped?"
        failure = Failure(self._number, self.rank, told, timeout=silent)
        return failure.error(self.prefix, self._number, self.rank)

    def _progress(self, use: int) -> dict[int, int]:
        """Tell how far those have come who have not come to a use."""
        values = read_all(self._store, self._at_keys, default="0")
        said = [int(value.partition(b" ")[0]) for value in values]
        # Who comes last does not say so, but all know.
        last = [max(at, self._passed[1], self._floor) for at in said]
        return {rank: at for rank, at in enumerate(last) if at < use}

    # -- coming, and coming again ----------------------------------------------------------

    def _enter(self) -> None:
        """Take this rank's place: at the first use, or at the next if it had a barrier before."""
        self._instance = self._store.add(self._keys.instances(self.rank), 1)
        if not self._store.check([self._record_key]):
            fresh = Record(store=uuid.uuid4().hex).text()
            self._store.compare_set(self._keys.word(0), "", f"{OPEN}")
            self._store.compare_set(self._record_key, "", fresh)
        self._adopt(self._store.get(self._record_key))
        if self._record.epoch > 0:
            self._store.delete_key(self._keys.word(0))  # made anew, if somebody was much faster
        self._number = 0
        if self._instance > 1:
            self._take_over()

    def _take_over(self) -> None:
        """Take the place of a barrier of this rank; a use that others wait in cannot pass."""
        while True:
            value = int(self._store.compare_set(self._word_key, "-0", "-0"))  # which it never is
            if value < OPEN:
                self._follow()
                continue
            count = arrivals(value)
            self._open = self._record.first + count // self.size
            use, waiting = self._open, count % self.size > 0
            mine = f"{-1 - self.rank}"
            if self._store.compare_set(self._word_key, f"{value}", mine) != mine.encode():
                continue  # somebody came
            cause = f"rank {self.rank} has made its barrier anew while others waited for it"
            failure = Failure(use, self.rank, cause, timeout=False) if waiting else None
            if self._turn(use + waiting, failure, {self.rank: self._instance}):
                break
        self._number = self._record.first - 1
        if waiting:
            time.sleep(WAKE_AFTER)
            self._wake(use)

    def _reconnect(self, timeout: float) -> None:
        """Open another connection, and find out what has become of the use that broke off."""
        self._connection.close()
        self._connection = Connection(self._connect, self._address, patience=timeout)
        with self._connection.until(self._began + timeout + GRACE) as self._store:
            known = self._store.check([self._record_key])
            current = self._store.get(self._record_key) if known else b""
            if not known or Record.from_text(current).store != self._record.store:
                self._enter()  # another store, in which counting begins anew
                self._number += 1
            elif current != self._record_text.encode():
                self._adopt(current)
            else:
                text = None if self._step == step_of(None) else ""
                with suppress(BarrierError):
                    self._decide(self._open, text, self._base, "lost its connection")
        self._is_unsettled = False
