"""Ranks that meet in a store, use after use, and agree on the outcome of each.

The law: *the n-th call has the same outcome on every rank.* Every call takes the next number,
whether it passes or fails, so ranks need not be told where the others are.

A use that passes costs a rank two round trips: it adds itself to a counter, the epoch's *word*, and
waits for a key that whoever came last has set. While it waits, its progress goes into a key of its
own, without an answer; that is how others can tell who is missing.

A use fails in one atomic step: a rank whose deadline has passed swaps the word, as it has last seen
it, for a negative number. If somebody came meanwhile the swap does not happen and is tried again;
if that was the last rank, the use has passed. Whoever adds to a word that was swapped, or has been
deleted since, gets less than an open one ever holds: it is late. It finds in the *record* what
happened, and which epoch is open now.

A rank whose barrier is made anew ends the epoch, too, so that the one before it is not heard any
more. Those who wait in a use then come to it again in the next epoch.

`_barrier_keys` tells what is in the store.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn

from torch._C._distributed_c10d import Store
from torch.distributed import DistError

from ..errors import BarrierError, BarrierTimeout, RendezvousError
from ..groups._formatting import first_line, format_ranks
from ._barrier_connection import Address, Connection, await_key
from ._barrier_epoch import Epoch
from ._barrier_keys import FAILED, OPEN, PASSED, Keys, arrivals, peek, read_all, step_of
from ._barrier_record import Failure
from ._barrier_words import Words, gathered

__all__ = ["Line"]

WAKE_AFTER = 1.0
"""Seconds that some rank has been in a failed use, at least, when the others in it are woken."""

CANNOT_HAVE_FAILED = 0.1
"""Seconds after a use has passed in which nobody can be woken from a failed one: far fewer than
`WAKE_AFTER`, for clocks differ, and stand still while a machine is suspended."""

GRACE = 1.0  # seconds after a deadline in which the store must have answered
TURNING = 1.0  # seconds that a rank which has ended a use is given to say why
NEVER = float("-inf")


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
        self._at_keys = [self._keys.at(each) for each in range(size)]
        self._at_key = self._at_keys[rank]
        self._epoch = Epoch(prefix, self._keys, rank=rank, size=size)
        self._words = Words(self._keys, rank=rank, size=size)
        self._lock = threading.Lock()  # held for a whole use, by whichever thread makes it
        self._number: int  # of the last use
        self._step = step_of(None)  # what this rank has added for it
        self._use_key = ""  # which will tell that it is over
        self._began = NEVER  # when this rank came to it
        self._passed_at = NEVER  # when this rank came to the use before, if that has passed
        self._passed: int  # the last use that has
        self._over: tuple[str, str]  # the keys of the last two that have
        self._floor: int  # the last that all came to elsewhere
        self._woken: list[tuple[int, str]]  # the uses whose waiters this rank has woken
        self._broke_off = ""  # why this rank does not know how its last use ended
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
            if self._broke_off:
                self._reconnect(timeout)
            with self._connection.until(self._began + timeout + GRACE):
                texts = self._meet(self._number, text, timeout)
            passed_at = self._began
            return texts
        except BarrierError:
            raise  # which all agree on
        except (DistError, RendezvousError) as error:
            self._broke_off = "lost its connection"
            raise self._broken(error, timeout) from error
        except BaseException as error:
            self._broke_off = f"raised {type(error).__name__}"
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
                self._broke_off = self._broke_off or f"raised {type(error).__name__}"
            raise

    def skip_to(self, use: int, *, passed: int) -> None:
        """Make `use` the next; those before it were decided elsewhere, and `passed` passed."""
        self._number = use - 1
        self._floor = passed

    def note(self, use: int) -> None:
        """Say that this rank has come to a use elsewhere, and that it failed."""
        with suppress(DistError), self._connection.until(time.monotonic() + GRACE):
            self._store.set(self._at_key, f"{use}")

    def forget(self) -> None:
        """Delete what is left of the last use, which all ranks are known to have left."""
        with suppress(DistError), self._connection.until(time.monotonic() + GRACE):
            self._store.delete_key(self._use_key)

    def _meet(self, use: int, text: str | None, timeout: float) -> list[str]:
        self._step = step_of(text)
        if text is not None:  # whoever comes last will read it
            self._words.sweep(self._store, self._passed)
            said = self._words.say(self._store, use, text)
            self._store.set(self._at_key, f"{use} {said}")
        while True:
            value = self._arrive(use)
            arrived = arrivals(value - self._epoch.base)
            if arrived == self.size:
                return self._complete(use, text, value)
            if text is None:
                self._store.set(self._at_key, f"{use}")
            self._sweep(use, is_first=arrived == 1)
            left = self._began + timeout - time.monotonic()
            heeds = not self._is_in_a_row(text)
            if await_key(self._store, self._use_key, left, heed_signals=heeds):
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
                self._give_up_before(use)
                continue
            self._use_key = f"{self._epoch.uses}{use}"
            value = self._epoch.add(self._step)
            if value is not None:
                return value
            self._follow()

    def _is_in_a_row(self, text: str | None) -> bool:
        """Tell whether this is one of many uses of which each has but passed, where time counts."""
        return text is None and time.monotonic() - self._passed_at < CANNOT_HAVE_FAILED

    def _complete(self, use: int, text: str | None, value: int) -> list[str]:
        """Let everybody go, as the one who knows that all have come."""
        if value != self._epoch.base + self.size * self._step:
            self._refuse_mixture(use, value)
        if text is None:
            self._store.set(self._use_key, PASSED)
            return self._pass(use)
        return self._pass(use, self._gather(use))

    def _gather(self, use: int) -> list[str]:
        """Collect what all have said, and publish it unless somebody has."""
        said = [each.decode().partition(" ") for each in self._store.multi_get(self._at_keys)]
        if all(number == f"{use}" for number, _, _ in said):
            mine = gathered([each for _, _, each in said])
            told = self._store.compare_set(self._use_key, "", mine)
        else:  # some have read it, and are gone
            told = self._store.get(self._use_key)
        return self._words.hear(self._store, use, told)

    def _outcome(self, use: int, text: str | None) -> list[str] | None:
        """Read how a use has ended; None if this rank is to come to it again."""
        # Nobody comes to this use before the one before it has passed. If that was but now, nobody
        # has been here long enough to wake others from a failure, and there is no need to look.
        if self._is_in_a_row(text):
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
        """End a use, one way or the other, whoever is still to come; None as in `_outcome`."""
        by_me, value = self._epoch.close(value)
        if value >= OPEN:  # it is complete
            if arrivals(value - self._epoch.base) > self.size:  # and some are at the next by now
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
        failure = Failure(use, self.rank, f"{cause}: {told}", progress)
        key = f"{self._epoch.uses}{use}"
        won = self._epoch.turn(use + 1, failure)
        if won and time.monotonic() - self._began >= WAKE_AFTER:
            self._wake(use, key)

    def _follow(self) -> None:
        """Go over to the epoch that another rank begins; begin it if that one cannot."""
        until = time.monotonic() + TURNING
        while time.monotonic() < until:
            if self._epoch.follow():
                return
            time.sleep(0.005)
        # Whoever ended the use had come to it; this rank may never have come to any.
        self._epoch.open = max(self._epoch.open, *self._progress())
        self._fail(self._epoch.open, "found the use given up by a rank that did not say why")

    def _give_up_before(self, use: int) -> None:
        """Fail the uses that this rank has raised from without the store's knowing."""
        self._epoch.close(self._epoch.base)
        cause = f"has gone on to use {use}"
        self._epoch.turn(use, Failure(use - 1, self.rank, cause, timeout=False))

    def _refuse_mixture(self, use: int, value: int) -> NoReturn:
        cause = "found that some ranks called execute_barrier here, and others exchange"
        if self._epoch.swap(value):
            self._epoch.turn(use + 1, Failure(use, self.rank, cause, timeout=False))
            self._wake_soon(use, self._use_key)
        else:
            self._follow()
        raise self._failed(use)

    def _wake_soon(self, use: int, key: str) -> None:
        """Wake those who wait in a use when they have been in it for long enough."""
        time.sleep(WAKE_AFTER)
        self._connection.until(time.monotonic() + GRACE)
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
        failure = Failure(self._number, self.rank, told, timeout=silent)
        return failure.error(self.prefix, self._number, self.rank)

    def _progress(self) -> list[int]:
        """Tell the last use that each rank has come to."""
        values = read_all(self._store, self._at_keys, default="0")
        said = [int(value.partition(b" ")[0]) for value in values]
        # Who comes last does not say so, but all know.
        return [max(at, self._passed, self._floor) for at in said]

    # -- coming, and coming again ----------------------------------------------------------

    def _open(self, patience: float) -> None:
        self._connection = Connection(self._connect, self._address, patience=patience)
        self._store = self._connection.store
        if self.rank == 0:
            self._connection.be_heard_at_exit()

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
            uses, waiting = divmod(arrivals(value), self.size)
            epoch.open = use = epoch.record.first + uses
            counted = waiting > 0 and self._progress()[self.rank] == use
            if not epoch.swap(value):
                continue  # somebody came
            key = f"{epoch.uses}{use}"
            cause = f"rank {self.rank} has made its barrier anew while others waited for it"
            failure = Failure(use, self.rank, cause, timeout=False) if counted else None
            if epoch.turn(use + counted, failure, {self.rank: epoch.instance}):
                break
        self._number = epoch.record.first - 1
        if waiting:
            self._wake_soon(use, key)

    def _reconnect(self, timeout: float) -> None:
        """Open another connection, and find out what has become of the use that broke off."""
        self._connection.close()
        self._open(timeout)
        with self._connection.until(self._began + timeout + GRACE):
            if not self._epoch.is_in(self._store):
                self._enter()  # another store, in which counting begins anew
                self._number += 1
            elif self._epoch.open < self._number:
                text = None if self._step == step_of(None) else ""
                self._use_key = f"{self._epoch.uses}{self._epoch.open}"
                with suppress(BarrierError):
                    self._decide(self._epoch.open, text, self._epoch.base, self._broke_off)
        self._broke_off = ""
