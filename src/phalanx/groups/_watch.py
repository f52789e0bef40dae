"""The watcher: one thread per process that answers for ranks which are busy elsewhere.

A rank that sits in user code cannot say where it is, so this thread does it, and only when a peer
has asked (see `_board`). It also looks after calls that nobody waits for on a thread of their own:
futures handed to C++.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import weakref
from typing import Protocol

__all__ = ["Watched", "watch"]

_log = logging.getLogger(__name__)

INTERVAL = 0.25  # seconds between two looks; a look is one short question to the store


class Watched(Protocol):
    """What the watcher looks after."""

    def attend(self) -> None:
        """Do whatever is due; called every `INTERVAL` seconds, must not block or raise."""

    def exit(self) -> None:
        """Take leave: the program has come to its end."""


class _Watcher:
    def __init__(self) -> None:
        self._watched: weakref.WeakSet[Watched] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def add(self, watched: Watched) -> None:
        with self._lock:
            self._watched.add(watched)
            if self._thread is None:
                # A daemon, yet joined at exit: a thread that is inside the store's C++ code while
                # the interpreter goes away would crash it.
                self._thread = threading.Thread(target=self._run, name="phalanx-watch", daemon=True)
                self._thread.start()
                atexit.register(self.stop)

    def stop(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=5)
        if not hasattr(sys, "last_value"):  # which the interpreter sets when an exception ends it
            for watched in list(self._watched):
                watched.exit()

    def _run(self) -> None:
        while not self._stop.wait(INTERVAL):
            self._look()  # a call of its own, so that no local keeps a group alive between looks

    def _look(self) -> None:
        with self._lock:
            due = list(self._watched)
        for watched in due:
            try:
                watched.attend()
            except Exception:  # noqa: BLE001 - one group's trouble is not the others'
                _log.exception("phalanx's watcher failed on %r; please report this", watched)


_watcher: _Watcher | None = None
_watcher_pid = 0
_start = threading.Lock()


def watch(watched: Watched) -> None:
    """Look after `watched` until it is garbage."""
    global _watcher, _watcher_pid
    with _start:
        if _watcher is None or _watcher_pid != os.getpid():  # a fork took no threads along
            _watcher, _watcher_pid = _Watcher(), os.getpid()
    _watcher.add(watched)
