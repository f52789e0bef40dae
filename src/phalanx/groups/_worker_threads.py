"""Worker threads, for work that may block for long.

`run_on_worker` runs a job on a pooled thread; one is created when all are busy, so no job queues
behind a stuck one. `BackgroundCall` and `in_background` collect the result, for callers that must
be able to stop waiting. A job that would keep waiting at interpreter exit must check `is_exiting`;
one whose caller may have stopped waiting checks `is_abandoned`.
"""

from __future__ import annotations

import atexit
import logging
import os
import queue
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from ._timing import default_timing

_log = logging.getLogger(__name__)

T = TypeVar("T")


class _ThreadPool:
    def __init__(self) -> None:
        self._idle: list[queue.SimpleQueue[Callable[[], None]]] = []
        self._busy: set[int] = set()
        self.is_exiting = False
        os.register_at_fork(after_in_child=self._idle.clear)  # a fork copies no threads
        atexit.register(self._drain)

    def run(self, job: Callable[[], None]) -> None:
        try:
            inbox = self._idle.pop()
        except IndexError:
            inbox = queue.SimpleQueue()
            threading.Thread(
                target=self._serve, args=(inbox,), name="phalanx-worker", daemon=True
            ).start()
        inbox.put(job)

    def _serve(self, inbox: queue.SimpleQueue[Callable[[], None]]) -> None:
        me = threading.get_ident()
        while True:
            job = inbox.get()
            self._busy.add(me)
            try:
                job()
            except BaseException:  # noqa: BLE001 - a thread that ends here is waited for at exit
                _log.exception("a job on a worker thread failed; please report this")
            del job  # free what it worked on before the next job comes
            self._busy.discard(me)
            self._idle.append(inbox)

    def _drain(self) -> None:
        """Wait a moment for busy threads: one that returns during the exit crashes the process.

        Most return: they check `is_exiting`, or peers exit too and their connections close.
        """
        self.is_exiting = True
        until = time.monotonic() + default_timing().exit_grace
        while self._busy and time.monotonic() < until:
            time.sleep(0.01)


_pool: _ThreadPool | None = None
_pool_lock = threading.Lock()


def is_exiting() -> bool:
    return _pool is not None and _pool.is_exiting


def run_on_worker(job: Callable[[], None]) -> None:
    """Run a job, which must not raise, on a thread that may block for long."""
    global _pool  # noqa: PLW0603 - created on first use, since importing must not register hooks
    with _pool_lock:
        if _pool is None:
            _pool = _ThreadPool()
    _pool.run(job)


_call = threading.local()  # with the `BackgroundCall` that this thread runs, as `.running`


def is_abandoned() -> bool:
    """Whether the caller of this thread's `BackgroundCall` has stopped waiting."""
    running: BackgroundCall[object] | None = getattr(_call, "running", None)
    return running is not None and running.is_abandoned


class BackgroundCall(Generic[T]):
    """A function that runs on a worker thread."""

    def __init__(self, function: Callable[[], T]) -> None:
        self.ended = threading.Event()
        self.is_abandoned = False
        self._results: list[T] = []
        self._error: BaseException | None = None

        def run() -> None:
            _call.running = self
            try:
                self._results.append(function())
            except BaseException as error:  # noqa: BLE001 - raised by `result`
                self._error = error
            finally:
                _call.running = None
                self.ended.set()

        run_on_worker(run)

    def result(self) -> T:
        if self._error is not None:
            raise self._error
        return self._results[0]


def in_background(work: Callable[[], T], check: Callable[[], None]) -> T:
    """Run `work` on a worker thread and return its result; `check` may raise meanwhile."""
    # Threads inherit their cores. Threads of an engine created here must have the caller's cores,
    # not those that the worker thread was created with.
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None

    def run() -> T:
        if cores is not None:
            os.sched_setaffinity(0, cores)
        return work()

    call = BackgroundCall(run)
    try:
        while not call.ended.wait(default_timing().background_check_interval):
            check()
    except BaseException:
        call.is_abandoned = True
        raise
    return call.result()
