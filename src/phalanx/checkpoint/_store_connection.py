"""A store connection whose calls end by a deadline.

torch's store client waits for an answer without limit, so a stopped server or an unreachable
machine would void every deadline. Callers make their requests themselves, and one watchdog thread
per process shuts down the socket of an overdue request, which makes the call raise.

`groups._store` runs each request on another thread instead, which would double the time of a
`TCPStoreBarrier`; here an overdue connection is lost.
"""

from __future__ import annotations

import atexit
import os
import socket
import stat
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import cache, partial
from weakref import WeakSet

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed import DistError, DistNetworkError

from ..errors import RendezvousTimeout
from ..groups._store import wait_for_listener
from ..groups._worker_threads import in_background

Address = tuple[str, int]

_FLUSH_TIMEOUT = 0.25  # seconds

# Held while a connection is opened, so that a socket that appears meanwhile belongs to it.
_opening = threading.Lock()


class StoreConnection:
    """A store client for one thread; the calls in a ``with`` block share a deadline.

    If `address` is given, wait until its server listens; None where this process hosts the server.
    """

    def __init__(
        self, connect: Callable[[], Store], address: Address | None, *, timeout: float
    ) -> None:
        self._fds: list[int] = []  # duplicates of the sockets of `store`
        self.pid = os.getpid()
        self.was_cut = False
        self.deadline = time.monotonic() + timeout
        if address is not None:  # outside the lock: the server may be another thread's to start
            wait_for_listener(*address, timedelta(seconds=timeout))
        if not _opening.acquire(timeout=timeout):
            raise RendezvousTimeout("the store does not answer")
        try:
            before = set(_open_sockets().values())
            # A stopped server accepts connections and never answers.
            self.store = in_background(connect, self._check_deadline)
            if found := store_address(self.store):
                self._fds = _sockets_to_port(found[1], before)
        finally:
            _opening.release()

    def _check_deadline(self) -> None:
        if time.monotonic() > self.deadline:
            raise RendezvousTimeout("the store does not answer")

    def with_deadline(self, deadline: float) -> StoreConnection:
        """Set the time, by the monotonic clock, at which calls of the block are cut off."""
        self.deadline = deadline
        return self

    def cut(self) -> None:
        """Make the pending call raise, and every later one."""
        self.was_cut = True
        for fd in self._fds:
            # An error: the other side closed it.
            with suppress(OSError), socket.socket(fileno=os.dup(fd)) as each:
                each.shutdown(socket.SHUT_RDWR)

    def flush_at_exit(self) -> None:
        """Make the process, which may host the server, wait at exit until requests are read."""
        _register_once(flush_connections)
        _flushed_at_exit.add(self)

    def close(self) -> None:
        """Close our duplicates of the sockets; the store closes its own."""
        # Not socket objects: the garbage collector would warn of those it finalizes first.
        while self._fds:
            os.close(self._fds.pop())

    __del__ = close

    def __enter__(self) -> Store:
        _watchdog.add(self)
        return self.store

    def __exit__(self, *_: object) -> None:
        _watchdog.pending.pop(self, None)


class _DeadlineThread:
    def __init__(self, interval: float = 0.25, idle_intervals: int = 40) -> None:
        self._interval = interval
        self._idle_intervals = idle_intervals
        # Modified without a lock, which a dict allows: every call goes through here.
        self.pending: dict[StoreConnection, None] = {}
        self._lock = threading.Lock()  # guards `_pid` and the end of the thread
        self._pid = 0  # of the process that runs the thread; a fork has none

    def add(self, connection: StoreConnection) -> None:
        self.pending[connection] = None
        if self._pid == os.getpid():
            return
        with self._lock:
            if self._pid != os.getpid():
                self._pid = os.getpid()
                for each in list(self.pending):
                    if each.pid != os.getpid():  # of the parent of this fork
                        del self.pending[each]
                threading.Thread(target=self._run, name="phalanx-barriers", daemon=True).start()

    def _run(self) -> None:
        idle = 0
        while True:
            time.sleep(self._interval)
            idle = 0 if self.pending else idle + 1
            now = time.monotonic()
            for connection in list(self.pending):
                if now > connection.deadline and not connection.was_cut:
                    connection.cut()
            if idle >= self._idle_intervals:
                with self._lock:
                    self._pid = 0
                    if not self.pending:
                        return
                    # A caller came just now, and may have seen the thread running.
                    self._pid = os.getpid()


_watchdog = _DeadlineThread()

_flushed_at_exit: WeakSet[StoreConnection] = WeakSet()


_register_once = cache(atexit.register)


def flush_connections(linger: float = 0.1) -> None:
    """Wait until servers have read all requests; then `linger`, for peers to read the outcome."""
    mine = [each for each in _flushed_at_exit if each.pid == os.getpid() and not each.was_cut]
    for connection in mine:
        deadline = time.monotonic() + _FLUSH_TIMEOUT
        with suppress(DistError), connection.with_deadline(deadline) as store:
            store.check(["any key"])  # answered after all earlier requests
    if mine:
        time.sleep(linger)


def wait_for_key(store: Store, key: str, seconds: float, *, heed_signals: bool) -> bool:
    """Wait until a key exists; return whether it did in time.

    Python runs signal handlers on the main thread, which torch would block. Heeding signals costs
    up to a fifth of a barrier.
    """
    # Below a millisecond torch rounds to zero, which some stores take for no limit.
    wait = partial(store.wait, [key], timedelta(seconds=max(seconds, 0.001)))
    try:
        if heed_signals and threading.current_thread() is threading.main_thread():
            in_background(wait, lambda: None)
        else:
            wait()
    except DistNetworkError:
        raise
    except RuntimeError:  # FileStore has no class of its own for a timeout
        return False
    return True


def store_address(store: Store) -> Address | None:
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return (store.host, store.port) if isinstance(store, TCPStore) else None


def _open_sockets() -> dict[int, int]:
    """Map the descriptors of this process's sockets to their inodes."""
    found = {}
    for name in os.listdir("/dev/fd"):
        with suppress(OSError):  # the descriptor of the listing is closed by now
            status = os.fstat(int(name))
            if stat.S_ISSOCK(status.st_mode):
                found[int(name)] = status.st_ino
    return found


def _sockets_to_port(port: int, before: set[int]) -> list[int]:
    """Duplicate the sockets connected to a port, so that their numbers are not reused.

    Those whose inodes are in `before` belong to others. Where this process hosts the store, the
    server's ends appear too, those of other ranks among them.
    """
    found = []
    for descriptor, inode in _open_sockets().items():
        if inode not in before:
            # An error: it is closed by now, or listening.
            with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as each:
                is_tcp = each.family in (socket.AF_INET, socket.AF_INET6)
                if is_tcp and each.getpeername()[1] == port:
                    found.append(os.dup(each.fileno()))
    return found
