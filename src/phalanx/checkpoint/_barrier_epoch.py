"""The epoch of a barrier that is open, as one rank knows it: its word, and the record.

The word counts arrivals; it is swapped for a negative number by whoever ends the epoch, and then
deleted. The record tells how, and which epoch is next. It is swapped, too, so that of several ranks
that have something to tell one is heard.
"""

from __future__ import annotations

import uuid
from dataclasses import replace

from torch._C._distributed_c10d import Store

from ..errors import InvalidArgument, InvalidState
from ._barrier_keys import OPEN, Keys, arrivals, peek
from ._barrier_record import Failure, Record

__all__ = ["Epoch"]


class Epoch:
    """One rank's view of what the ranks have agreed on."""

    store: Store
    record: Record
    open: int
    """The use that is next to be decided, as far as this rank knows."""
    uses: str
    """What the keys begin with that tell in this epoch that a use is over; its number follows."""
    base: int
    """The word, when nobody has come to that use yet."""

    def __init__(self, prefix: str, keys: Keys, *, rank: int, size: int) -> None:
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
            fresh = Record(store=uuid.uuid4().hex, size=self.size).text()
            store.compare_set(self._keys.word(0), "", f"{OPEN}")
            store.compare_set(self._keys.record, "", fresh)
        self._adopt(store.get(self._keys.record))
        if self.record.epoch > 0:
            store.delete_key(self._keys.word(0))  # made anew, if somebody was much faster

    def is_in(self, store: Store) -> bool:
        """Go over to another connection, and tell whether it leads to where this epoch was."""
        self.store = store
        current = peek(store, self._keys.record)
        if current is None or Record.from_text(current).store != self.record.store:
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
            if arrivals(value - self.base) >= self.size:
                return False, value

    def swap(self, value: int) -> bool:
        """End the epoch if the word is this, whether a use is complete or not."""
        mine = f"{-1 - self.rank}"
        return bool(self.store.compare_set(self._word_key, f"{value}", mine) == mine.encode())

    def turn(
        self, first: int, failure: Failure | None = None, instances: dict[int, int] | None = None
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
        record = Record.from_text(text)
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
