"""A store client with per-request timeouts.

torch's stores block until the server answers, so a stopped server would void every deadline.
Requests run on a borrowed thread; the caller stops waiting after the timeout and the thread is
abandoned, not joined. While a request is unanswered, further requests on the same connection
fail at once.

`borrow_thread` and `in_background` serve other work that may get stuck. A thread that would wait
on at
interpreter exit must check `is_exiting`.
"""

from __future__ import annotations

import atexit
import logging
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Self, TypeVar

from torch._C._distributed_c10d import PrefixStore, Store

from ..errors import RendezvousTimeout

_log = logging.getLogger(__name__)

T = TypeVar("T")
EXIT_GRACE = 1.0  # seconds
FIRST_PAUSE, LAST_PAUSE = 5e-5, 2e-2  # seconds between two looks
REQUEST_TIMEOUT = 2.0  # seconds; an answer on the same machine takes some 50 microseconds


def clone_connection(store: Store) -> Store:
    """Open a second connection to a store."""
    # Out of descriptors, torch would try again until the store's timeout; this raises at once.
    socket.socket().close()
    clone: Store = store.clone()  # type: ignore[attr-defined]  # missing in torch's stubs
    return clone


class BlockingStoreClient:
    """What we ask of a store, for whoever may wait as long as an answer takes."""

    def __init__(self, store: Store) -> None:
        self.raw = store
        """The store itself."""

    def under(self, prefix: str) -> Self:
        """Return the part of the store whose keys begin with `prefix`, on the same connection."""
        return self._over(PrefixStore(prefix, self.raw))

    def connect(self) -> Store:
        """Open another connection to the same part of the store."""
        return self._ask(lambda: clone_connection(self.raw))

    def add(self, key: str, amount: int) -> int:
        """Add to a counter and return its new value."""
        return self._ask(lambda: self.raw.add(key, amount))

    def set(self, key: str, value: str) -> None:
        """Write a value."""
        self._ask(lambda: self.raw.set(key, value))

    def set_all(self, values: dict[str, str]) -> None:
        """Write several values, with one message where the store can."""
        keys, told = list(values), list(values.values())
        self._ask(lambda: self.raw.multi_set(keys, told))  # type: ignore[attr-defined]  # no stub

    def read(self, key: str) -> bytes | None:
        """Read a value, or None where there is none yet."""
        return self._ask(lambda: self.raw.get(key) if self.raw.check([key]) else None)

    def fetch(self, key: str) -> bytes:
        """Read a value that is there."""
        return self.write_once(key, "")  # which asks once, where reading would ask twice

    def has(self, *keys: str) -> bool:
        """Tell whether there is a value, or one of each."""
        return self._ask(lambda: self.raw.check(list(keys)))

    def write_once(self, key: str, value: str) -> bytes:
        """Write a value unless there is one, and return what is there."""
        return self._ask(lambda: self.raw.compare_set(key, "", value))

    def all_keys(self) -> list[str]:
        """List the keys that there are."""
        return self._ask(self.raw.list_keys)

    def delete(self, key: str) -> None:
        """Take a value away, if there is one."""
        self._ask(lambda: self.raw.delete_key(key))

    def await_all(self, keys: Sequence[str], seconds: float) -> bool:
        """Wait until there are all these values, and tell whether there are.

        It looks again and again, for when a store's own wait ends without them torch says so in two
        lines on the user's screen, every time.
        """

        def look() -> bool:
            until = time.monotonic() + seconds
            pause = FIRST_PAUSE
            while not self.raw.check(list(keys)):
                left = until - time.monotonic()
                if left <= 0:
                    return False
                time.sleep(min(pause, left))
                pause = min(pause * 1.25, LAST_PAUSE)
            return True

        return self._ask(look)

    def _over(self, store: Store) -> Self:
        return type(self)(store)

    def _ask(self, question: Callable[[], T]) -> T:
        return question()


class StoreClient(BlockingStoreClient):
    """The same, with an end to the waiting."""

    def __init__(
        self, store: Store, *, patience: float = REQUEST_TIMEOUT, line: _Connection | None = None
    ) -> None:
        super().__init__(store)
        self._patience = patience
        self._line = line or _Connection()

    def _over(self, store: Store) -> Self:
        return type(self)(store, patience=self._patience, line=self._line)

    def _ask(self, question: Callable[[], T]) -> T:
        return self._line.ask(question, self._patience)


class _Connection:
    """A connection on which one question at a time may remain unanswered."""

    def __init__(self) -> None:
        self._unanswered: threading.Event | None = None

    def ask(self, question: Callable[[], T], patience: float) -> T:
        stuck = self._unanswered
        if stuck is not None and not stuck.is_set():
            raise RendezvousTimeout("the store does not answer")  # ask no more until it has
        answers: list[T] = []
        errors: list[BaseException] = []
        ended = threading.Event()

        def put() -> None:
            try:
                answers.append(question())
            except BaseException as error:  # noqa: BLE001 - raised again by whoever asks
                errors.append(error)
            finally:
                ended.set()

        borrow_thread(put)
        if not ended.wait(patience):
            self._unanswered = ended
            raise RendezvousTimeout("the store does not answer")
        if errors:
            raise errors[0]
        return answers[0]


class _ThreadPool:
    """Threads to be borrowed; one is made when all are out, so nobody queues behind a stuck one."""

    def __init__(self) -> None:
        self._idle: list[queue.SimpleQueue[Callable[[], None]]] = []
        self._out: set[int] = set()
        self.is_exiting = False
        os.register_at_fork(after_in_child=self._idle.clear)  # a fork takes no threads along
        atexit.register(self._settle)

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
        me = threading.get_ident()
        while True:
            job = inbox.get()
            self._out.add(me)
            try:
                job()
            except BaseException:  # noqa: BLE001 - a thread that ends here is waited for at exit
                _log.exception("a job on a borrowed thread failed; please report this")
            del job  # what it worked on must not live until the next one comes
            self._out.discard(me)
            self._idle.append(inbox)

    def _settle(self) -> None:
        """Give threads a moment to come home: one that does so during the exit ends the process.

        Those that look whether the program `is_exiting` do. Peers mostly exit together, and it is
        their closing connections that end the waits of others.
        """
        self.is_exiting = True
        until = time.monotonic() + EXIT_GRACE
        while self._out and time.monotonic() < until:
            time.sleep(0.01)


_pool: _ThreadPool | None = None
_pool_lock = threading.Lock()


def is_exiting() -> bool:
    """Tell whether the program ends; to be asked by borrowed threads that would wait on."""
    return _pool is not None and _pool.is_exiting


def borrow_thread(job: Callable[[], None]) -> None:
    """Run a job, which must not raise, on a thread that may be blocked for long."""
    global _pool  # noqa: PLW0603 - made on first use, for importing must not register hooks
    with _pool_lock:
        if _pool is None:
            _pool = _ThreadPool()
    _pool.borrow(job)


CHECK_INTERVAL = 0.25  # seconds


class _Job(threading.local):
    """What the calling thread does for another."""

    given_up: threading.Event | None = None


_job = _Job()


def is_abandoned() -> bool:
    """Whether this thread works for a caller that waits no longer; to be asked between waits."""
    return _job.given_up is not None and _job.given_up.is_set()


def in_background(work: Callable[[], T], look: Callable[[], None]) -> T:
    """Run `work` on a borrowed thread and return what it does; `look` may raise meanwhile."""
    given_up = threading.Event()
    done: list[T] = []
    errors: list[BaseException] = []
    ended = threading.Event()
    # Threads inherit the cores that they may run on. Those of an engine that is made here are to
    # have the caller's, not those that the borrowed thread happened to be made with.
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None

    def run() -> None:
        _job.given_up = given_up
        try:
            if cores is not None:
                os.sched_setaffinity(0, cores)
            done.append(work())
        except BaseException as error:  # noqa: BLE001 - raised again by whoever waits
            errors.append(error)
        finally:
            _job.given_up = None
            ended.set()

    borrow_thread(run)
    try:
        while not ended.wait(CHECK_INTERVAL):
            look()
    except BaseException:
        given_up.set()
        raise
    if errors:
        raise errors[0]
    return done[0]
