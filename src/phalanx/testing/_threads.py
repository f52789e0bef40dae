"""`ThreadRanks`: threads as ranks, for tests that need many ranks and kill none.

A thread cannot be killed. If one hangs, its groups are aborted; if it still hangs, it is abandoned
as a daemon.
"""

from __future__ import annotations

import queue
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from itertools import dropwhile
from typing import Any

import torch
from torch._C._distributed_c10d import HashStore

from ..errors import InvalidArgument
from ._results import Hung, RankResult, is_failure, is_internal_frame, results_or_raise
from ._run import RankContext, RunDeadline, check_faults, check_size, run_body
from .faults import Fault, thread_as_rank


class ThreadRanks:
    """Threads of this process that run test bodies as ranks."""

    def __init__(self, size: int = 4, *, backend: str = "local") -> None:
        self.size = check_size(size)
        """The maximum number of ranks of a run."""
        self.backend = backend
        """The default backend of `RankContext.group`."""

    def run(
        self,
        body: Callable[..., Any],
        ranks: int | None = None,
        *,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        timeout: float = 30.0,
        linger: float = 1.0,
        faults: Sequence[Fault] = (),
        name: str | None = None,
    ) -> list[Any]:
        """Call ``body(context, *args, **kwargs)`` on every rank and return the results by rank."""
        __tracebackhide__ = True
        size = check_size(self.size if ranks is None else ranks, maximum=self.size)
        check_faults(faults, size=size)
        if any(fault.needs_process for fault in faults):
            raise InvalidArgument(
                "a fault can only delay a thread; use RankPool to kill or stop a rank"
            )

        def call(context: RankContext) -> Any:
            return body(context, *args, **(kwargs or {}))

        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            run = _ThreadRun(self.backend, size, timeout=timeout, linger=linger)
            run.start(call, faults)
            reports = run.collect()
        return results_or_raise(name or f"{body.__module__}.{body.__qualname__}", reports)


class _ThreadRun:
    def __init__(self, backend: str, size: int, *, timeout: float, linger: float) -> None:
        store = HashStore()  # shared by all threads
        self._contexts = [
            RankContext(rank, size, backend=backend, timeout=timeout, connect=lambda: store)
            for rank in range(size)
        ]
        self._deadline = RunDeadline(timeout, linger)
        self._finished: queue.SimpleQueue[tuple[int, RankResult]] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []

    def start(self, call: Callable[[RankContext], Any], faults: Sequence[Fault]) -> None:
        def run_rank(context: RankContext) -> None:
            with thread_as_rank():
                report = run_body(call, context, faults=faults)
            self._finished.put((context.rank, report))

        for context in self._contexts:
            # A daemon, so that an abandoned one does not keep the process alive.
            thread = threading.Thread(
                target=run_rank, args=(context,), name=f"rank {context.rank}", daemon=True
            )
            self._threads.append(thread)
            thread.start()

    def collect(self) -> dict[int, RankResult]:
        reports: dict[int, RankResult] = {}
        while len(reports) < len(self._threads) and self._deadline.remaining:
            try:
                rank, report = self._finished.get(timeout=self._deadline.remaining)
            except queue.Empty:
                break
            reports[rank] = report
            if is_failure(report.outcome, may_die=False):
                self._deadline.shorten()
        stuck = [rank for rank in range(len(self._threads)) if rank not in reports]
        reports.update({rank: RankResult(self._stuck(rank)) for rank in stuck})
        for rank in stuck:
            self._contexts[rank].abort()  # unblocks ranks that wait for a peer
        return reports

    def _stuck(self, rank: int) -> Hung:
        ident = self._threads[rank].ident
        frame = sys._current_frames().get(ident) if ident is not None else None
        stack = traceback.extract_stack(frame) if frame is not None else traceback.StackSummary()
        # The outermost frames are of threading, then come our own, then the body.
        ours = dropwhile(lambda frame: not is_internal_frame(frame.filename), stack)
        body = dropwhile(lambda frame: is_internal_frame(frame.filename), ours)
        return Hung(self._deadline.elapsed, "".join(traceback.format_list(list(body))))
