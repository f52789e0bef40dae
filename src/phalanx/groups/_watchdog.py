"""The watchdog: one thread per process that serves ranks which are busy in user code.

Such a rank cannot answer a peer that asks what it is doing. The watchdog also completes futures
that no thread waits for and closes hosted stores. It polls each object passed to `watch`, held
weakly, every `Timing.watch_interval` seconds. It is a daemon, but it is joined at exit: a thread
inside the store's C++ code while the interpreter shuts down would crash the process.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import weakref
from typing import Protocol

from ._timing import default_timing

_log = logging.getLogger(__name__)


class Watched(Protocol):
    """An object that the watchdog polls; `poll` must not block. `exit`: the program ends well."""

    def poll(self) -> None: ...
    def exit(self) -> None: ...


class _Watchdog:
    def __init__(self) -> None:
        self.pid = os.getpid()
        self._watched: weakref.WeakSet[Watched] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="phalanx-watch", daemon=True)
        self._thread.start()
        atexit.register(self._exit)

    def add(self, watched: Watched) -> None:
        with self._lock:
            self._watched.add(watched)

    def _exit(self) -> None:
        self._stop.set()
        self._thread.join(timeout=5)
        if not hasattr(sys, "last_value"):  # which the interpreter sets when an exception ends it
            for watched in list(self._watched):
                watched.exit()

    def _run(self) -> None:
        while not self._stop.wait(default_timing().watch_interval):
            self._poll_all()  # in a function, so that no local keeps a group alive between polls

    def _poll_all(self) -> None:
        with self._lock:
            due = list(self._watched)
        for watched in due:
            try:
                watched.poll()
            except Exception:  # noqa: BLE001 - one group's error must not stop the others' polls
                _log.exception("phalanx's watchdog failed on %r; please report this", watched)


_watchdog: _Watchdog | None = None
_watchdog_lock = threading.Lock()


def watch(watched: Watched) -> None:
    """Poll `watched` until it is garbage-collected."""
    global _watchdog  # noqa: PLW0603 - one per process
    with _watchdog_lock:
        if _watchdog is None or _watchdog.pid != os.getpid():  # a fork copies no threads
            _watchdog = _Watchdog()
        _watchdog.add(watched)
