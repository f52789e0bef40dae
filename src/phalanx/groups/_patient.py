"""A store that is asked with patience, not for ever.

torch's stores wait for an answer as long as it takes; the host of a store that is stopped or out of
reach would make every deadline void. So a question is put by a borrowed thread, and the asker
stops waiting when its patience ends.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import TypeVar

from torch._C._distributed_c10d import PrefixStore, Store

__all__ = ["PatientStore", "StoreSilent", "borrow_thread"]

T = TypeVar("T")
ANSWER_WITHIN = 2.0  # seconds; an answer on the same machine takes some 50 microseconds


class StoreSilent(RuntimeError):
    """The store did not answer in time."""


class PatientStore:
    """What we ask of a store, with an end to the waiting."""

    def __init__(self, store: Store, *, line: _Line | None = None) -> None:
        self.raw = store
        """The store itself, for whoever may wait as long as it takes."""
        self._line = line or _Line()

    def under(self, prefix: str) -> PatientStore:
        """Return the part of the store whose keys begin with `prefix`, on the same connection."""
        return PatientStore(PrefixStore(prefix, self.raw), line=self._line)

    def add(self, key: str, amount: int) -> int:
        """Add to a counter and return its new value."""
        return self._line.ask(lambda: self.raw.add(key, amount))

    def set(self, key: str, value: str) -> None:
        """Write a value."""
        self._line.ask(lambda: self.raw.set(key, value))

    def read(self, key: str) -> bytes | None:
        """Read a value, or None where there is none yet."""
        return self._line.ask(lambda: self.raw.get(key) if self.raw.check([key]) else None)

    def has(self, key: str) -> bool:
        """Tell whether there is a value."""
        return self._line.ask(lambda: self.raw.check([key]))


class _Line:
    """A connection on which one question at a time may remain unanswered."""

    def __init__(self) -> None:
        self._unanswered: threading.Event | None = None

    def ask(self, question: Callable[[], T]) -> T:
        stuck = self._unanswered
        if stuck is not None and not stuck.is_set():
            raise StoreSilent("the store does not answer")  # ask no more until it has
        answers: list[T] = []
        errors: list[RuntimeError] = []
        ended = threading.Event()

        def put() -> None:
            try:
                answers.append(question())
            except RuntimeError as error:
                errors.append(error)
            finally:
                ended.set()

        borrow_thread(put)
        if not ended.wait(ANSWER_WITHIN):
            self._unanswered = ended
            raise StoreSilent("the store does not answer")
        if errors:
            raise errors[0]
        return answers[0]


class _Threads:
    """Threads to be borrowed; one is made when all are out, so nobody queues behind a stuck one."""

    def __init__(self) -> None:
        self._idle: list[queue.SimpleQueue[Callable[[], None]]] = []

    def borrow(self, job: Callable[[], None]) -> None:
        try:
            inbox = self._idle.pop()
        except IndexError:
            inbox = queue.SimpleQueue()
            threading.Thread(
                target=self._serve, args=(inbox,), name="phalanx-borrowed", daemon=True
            ).start()
        inbox.put(job)

    def _serve(self, inbox: queue.SimpleQueue[Callable[[], None]]) -> None:
        while True:
            inbox.get()()
            self._idle.append(inbox)


_threads = _Threads()


def borrow_thread(job: Callable[[], None]) -> None:
    """Run a job, which must not raise, on a thread that may be blocked for long."""
    _threads.borrow(job)
