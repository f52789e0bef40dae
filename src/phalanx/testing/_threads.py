"""`ThreadRanks`: threads as ranks, for tests that need many ranks and kill none.

A thread cannot be killed. If one hangs, its groups are aborted; if that does not end it, it is
left behind as a daemon.
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
from ._results import Hung, RankResult, is_failure, is_internal_frame, settle
from ._run import RankContext, RunDeadline, check_faults, check_size, run_body
from .faults import Fault, thread_as_rank


class ThreadRanks:
    """Threads of this process that run a body as the ranks of a group.

    A thread cannot be killed: one that hangs is reported, its groups are aborted, and if that does
    not end it, it is left behind.
    """

    def __init__(self, size: int = 4, *, backend: str = "local") -> None:
        self.size = check_size(size)
        """The largest number of ranks that a run can have."""
        self.backend = backend
        """The backend of the groups that a body's context makes."""

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
        size = check_size(self.size if ranks is None else ranks, most=self.size)
        check_faults(faults, size=size)
        if any(fault.needs_process for fault in faults):
            raise InvalidArgument("a thread can be delayed, but only a process killed or stopped")

        def call(context: RankContext) -> Any:
            return body(context, *args, **(kwargs or {}))

        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            run = _ThreadRun(self.backend, size, timeout=timeout, linger=linger)
            run.start(call, faults)
            reports = run.collect()
        return settle(name or f"{body.__module__}.{body.__qualname__}", reports)


class _ThreadRun:
    def __init__(self, backend: str, size: int, *, timeout: float, linger: float) -> None:
        store = HashStore()  # one object: thread ranks meet in it
        self._contexts = [
            RankContext(rank, size, backend=backend, timeout=timeout, connect=lambda: store)
            for rank in range(size)
        ]
        self._patience = RunDeadline(timeout, linger)
        self._finished: queue.SimpleQueue[tuple[int, RankResult]] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []

    def start(self, call: Callable[[RankContext], Any], faults: Sequence[Fault]) -> None:
        def live(context: RankContext) -> None:
            with thread_as_rank():
                report = run_body(call, context, faults=faults)
            self._finished.put((context.rank, report))

        for context in self._contexts:
            # A daemon, so that one left behind does not keep the process alive.
            thread = threading.Thread(
                target=live, args=(context,), name=f"rank {context.rank}", daemon=True
            )
            self._threads.append(thread)
            thread.start()

    def collect(self) -> dict[int, RankResult]:
        reports: dict[int, RankResult] = {}
        while len(reports) < len(self._threads) and self._patience.left:
            try:
                rank, report = self._finished.get(timeout=self._patience.left)
            except queue.Empty:
                break
            reports[rank] = report
            if is_failure(report.outcome, mortal=False):
                self._patience.shorten()
        stuck = [rank for rank in range(len(self._threads)) if rank not in reports]
        reports.update({rank: RankResult(self._stuck(rank)) for rank in stuck})
        for rank in stuck:
            self._contexts[rank].abort()  # ends those that wait for a peer
        return reports

    def _stuck(self, rank: int) -> Hung:
        ident = self._threads[rank].ident
        frame = sys._current_frames().get(ident) if ident is not None else None
        stack = traceback.extract_stack(frame) if frame is not None else traceback.StackSummary()
        # The body is called by our frames, and those by the ones of a thread.
        ours = dropwhile(lambda frame: not is_internal_frame(frame.filename), stack)
        body = dropwhile(lambda frame: is_internal_frame(frame.filename), ours)
        return Hung(self._patience.spent, "".join(traceback.format_list(list(body))))
