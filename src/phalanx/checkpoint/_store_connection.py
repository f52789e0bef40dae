"""A store connection whose calls end by a deadline.

torch's store client waits for an answer without limit, so a stopped server or an unreachable
machine would void every deadline. A thread per request costs more than a barrier does. Callers
therefore make their requests themselves, and one watchdog thread per process shuts down the
socket of a request that is overdue, which makes the call raise.
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
from types import TracebackType
from weakref import WeakSet

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed import DistError, DistNetworkError

from ..errors import InvalidState, RendezvousTimeout
from ..groups._background_threads import in_background
from ..groups._store import wait_for_listener

Address = tuple[str, int]

WATCH_INTERVAL = 0.25  # seconds between two looks
IDLE_TICKS = 40  # after so many looks at nothing, the thread ends
EXIT_LINGER = (
    0.1  # seconds in which those who were let go last can read why, before the server ends
)
FD_DIRECTORY = "/dev/fd"

_opening = threading.Lock()  # so that a socket that appears meanwhile is the one being opened


class StoreConnection:
    """A store of one's own, with a deadline for a ``with`` block of calls to it.

    `address` is that of a server which may not be there yet; where this process is to host it
    itself, there is none to wait for.
    """

    def __init__(
        self, connect: Callable[[], Store], address: Address | None, *, patience: float
    ) -> None:
        self._sockets: list[socket.socket] = []
        self._pid = os.getpid()
        self.was_cut = False
        self.deadline = time.monotonic() + patience
        if address is not None:  # before others are kept from connecting, this process's host too
            wait_for_listener(*address, timedelta(seconds=patience))
        if not _opening.acquire(timeout=patience):
            raise RendezvousTimeout("the store does not answer")
        try:
            before = set(_open_sockets().values())
            # A server that is stopped is connected to, and says nothing.
            self.store = in_background(connect, self._check_deadline)
            opened = [each for each, node in _open_sockets().items() if node not in before]
            found = store_address(self.store)
            self._sockets = _sockets_to_port(found[1], opened) if found else []
        finally:
            _opening.release()

    def _check_deadline(self) -> None:
        if time.monotonic() > self.deadline:
            raise RendezvousTimeout("the store does not answer")

    @property
    def is_inherited(self) -> bool:
        """Tell whether it is that of the process which this one was forked off from."""
        return self._pid != os.getpid()

    def check_process(self) -> None:
        """Raise in a process that was forked off: two that talk on one socket mix up answers."""
        if self.is_inherited:
            raise InvalidState(
                f"this barrier was made by process {self._pid}, and is of no use in one that was "
                "forked off: make another there"
            )

    def until(self, deadline: float) -> StoreConnection:
        """Name the moment, by the monotonic clock, at which the block's calls are to be cut off."""
        self.deadline = deadline
        return self

    def cut(self) -> None:
        """Make the call that is under way raise, and every later one."""
        self.was_cut = True
        for each in self._sockets:
            try:
                each.shutdown(socket.SHUT_RDWR)
            except OSError:  # closed by the other side meanwhile
                continue

    def flush_at_exit(self) -> None:
        """Do not end before the server, which may be a thread of this process, has read all."""
        _register_exit_flush()
        _flushed_at_exit.add(self)

    def close(self) -> None:
        """Let go of the sockets; the store closes its own."""
        for each in self._sockets:
            each.close()
        self._sockets = []

    def __del__(self) -> None:
        self.close()

    def __enter__(self) -> Store:
        _watchdog.add(self)
        return self.store

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        _watchdog.pending.pop(self, None)


class _Watchdog:
    """The thread that looks after all connections of this process."""

    def __init__(self) -> None:
        # Added to and taken from without a lock, as a dictionary allows: this is on the way of
        # every call.
        self.pending: dict[StoreConnection, None] = {}
        self._lock = threading.Lock()  # over `_pid` and the end of the thread
        self._pid = 0  # of the process that the thread runs in; a fork takes none along

    def add(self, connection: StoreConnection) -> None:
        self.pending[connection] = None
        if self._pid != os.getpid():
            self._start()

    def _start(self) -> None:
        with self._lock:
            if self._pid == os.getpid():
                return
            self._pid = os.getpid()
            for connection in list(self.pending):
                if connection.is_inherited:
                    del self.pending[connection]
            threading.Thread(target=self._run, name="phalanx-barriers", daemon=True).start()

    def _run(self) -> None:
        idle = 0
        while True:
            time.sleep(WATCH_INTERVAL)
            idle = 0 if self.pending else idle + 1
            now = time.monotonic()
            for connection in list(self.pending):
                if now > connection.deadline and not connection.was_cut:
                    connection.cut()
            if idle >= IDLE_TICKS and self._end():
                return

    def _end(self) -> bool:
        with self._lock:
            self._pid = 0
            if not self.pending:
                return True
            self._pid = os.getpid()  # somebody came just now, and may have seen the thread running
            return False


_watchdog = _Watchdog()


_flushed_at_exit: WeakSet[StoreConnection] = WeakSet()


@cache
def _register_exit_flush() -> None:
    atexit.register(_flush_connections)


def _flush_connections() -> None:
    mine = [each for each in _flushed_at_exit if not each.is_inherited and not each.was_cut]
    for connection in mine:
        with suppress(DistError), connection.until(time.monotonic() + WATCH_INTERVAL) as store:
            store.check(["anything"])  # is answered after all that was sent before
    if mine:
        time.sleep(EXIT_LINGER)


def wait_for_key(store: Store, key: str, seconds: float, *, heed_signals: bool) -> bool:
    """Wait until a key is there, and tell whether it was in time.

    A signal is for the main thread, and torch would keep it waiting, too. To heed signals costs as
    much as a fifth of a barrier.
    """
    # Less than a millisecond would be none, which is forever to some stores.
    wait = partial(store.wait, [key], timedelta(seconds=max(seconds, 0.001)))
    try:
        if heed_signals and threading.current_thread() is threading.main_thread():
            in_background(wait, _run_signal_handlers)
        else:
            wait()
    except DistNetworkError:
        raise
    except RuntimeError:  # a file's store has no class of its own for it
        return False
    return True


def _run_signal_handlers() -> None:
    """Let Python run the handlers of signals."""


def _open_sockets() -> dict[int, int]:
    """List this process's sockets by their descriptors; several may be the same one's."""
    found = {}
    for name in os.listdir(FD_DIRECTORY):
        try:
            status = os.fstat(int(name))
        except OSError:  # the one that lists the folder
            continue
        if stat.S_ISSOCK(status.st_mode):
            found[int(name)] = status.st_ino
    return found


def store_address(store: Store) -> Address | None:
    """Tell the host and port that a store is served at, if it is."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return (store.host, store.port) if isinstance(store, TCPStore) else None


def _sockets_to_port(port: int, descriptors: list[int]) -> list[socket.socket]:
    """Hold on to the sockets that lead to a port, so that their numbers cannot become others'.

    Where this process hosts the store, the server's ends appear too, other ranks' among them.
    """
    found = []
    for each in descriptors:
        with suppress(OSError):  # closed by now
            mine = socket.socket(fileno=os.dup(each))
            if _peer_port(mine) == port:
                found.append(mine)
            else:
                mine.close()
    return found


def _peer_port(mine: socket.socket) -> int:
    """Tell the port at the other end, or 0 if there is none."""
    with suppress(OSError):  # it listens
        if mine.family in (socket.AF_INET, socket.AF_INET6):
            return int(mine.getpeername()[1])
    return 0
