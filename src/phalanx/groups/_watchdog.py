"""The watchdog: one thread per process that serves ranks which are busy in user code.

A rank in user code cannot answer a peer that asks what it is doing, so this thread answers for
it. It also completes futures that nobody waits for and closes hosted stores. It polls each
registered object every `Timing.watch_interval` seconds; `poll` must neither block nor raise.

Registered objects are held weakly. The thread is a daemon, but it is joined at exit: a thread
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
    """An object that the watchdog polls."""

    def poll(self) -> None:
        """Do what is due; must not block or raise."""

    def exit(self) -> None:
        """The program ends without an error."""


class _Watchdog:
    def __init__(self) -> None:
        self._watched: weakref.WeakSet[Watched] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def add(self, watched: Watched) -> None:
        with self._lock:
            self._watched.add(watched)
            if self._thread is None:
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


_instance: _Watchdog | None = None
_instance_pid = 0
_instance_lock = threading.Lock()


def watch(watched: Watched) -> None:
    """Poll `watched` until it is garbage-collected."""
    global _instance, _instance_pid
    with _instance_lock:
        if _instance is None or _instance_pid != os.getpid():  # a fork copies no threads
            _instance, _instance_pid = _Watchdog(), os.getpid()
    _instance.add(watched)
