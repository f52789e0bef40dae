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
from contextlib import suppress
from itertools import dropwhile
from typing import Any

import torch
from torch._C._distributed_c10d import HashStore

from ..errors import InvalidArgument
from ._context import RankContext, RankRunner, run_body
from ._results import (
    PRIVATE_MODULES,
    RankResult,
    RunDeadline,
    check_fault_ranks,
    hang_outcome,
    results_or_raise,
)
from .faults import Fault, mark_thread_as_rank


class ThreadRanks(RankRunner):
    """Threads of this process that run test bodies as ranks."""

    def __init__(self, size: int = 4, *, backend: str = "local") -> None:
        super().__init__(size, backend)

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
        size = self._world_size(ranks)
        if any(fault.action.name != "delay" for fault in faults):
            raise InvalidArgument(
                "a fault can only delay a thread; use RankPool to kill or stop a rank"
            )
        check_fault_ranks(faults, size=size)
        store = HashStore()  # shared by all threads
        contexts = [
            RankContext(rank, size, self.backend, timeout, lambda: store) for rank in range(size)
        ]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            reports = _run_on_threads(
                lambda context: body(context, *args, **(kwargs or {})),
                contexts,
                faults,
                RunDeadline(timeout, linger),
            )
        return results_or_raise(name or f"{body.__module__}.{body.__qualname__}", reports)


def _run_on_threads(
    call: Callable[[RankContext], Any],
    contexts: Sequence[RankContext],
    faults: Sequence[Fault],
    deadline: RunDeadline,
) -> dict[int, RankResult]:
    finished: queue.SimpleQueue[tuple[int, RankResult]] = queue.SimpleQueue()

    def run_rank(context: RankContext) -> None:
        mark_thread_as_rank()
        finished.put((context.rank, run_body(call, context, faults=faults)))

    threads = [
        # A daemon, so that an abandoned one does not keep the process alive.
        threading.Thread(target=run_rank, args=(each,), name=f"rank {each.rank}", daemon=True)
        for each in contexts
    ]
    for thread in threads:
        thread.start()
    reports: dict[int, RankResult] = {}
    while len(reports) < len(threads) and deadline.remaining:
        try:
            rank, report = finished.get(timeout=deadline.remaining)
        except queue.Empty:
            break
        reports[rank] = report
        if report.is_failure():
            deadline.shorten()
    stuck = [context for context in contexts if context.rank not in reports]
    for context in stuck:
        stack = _stack_of(threads[context.rank])
        reports[context.rank] = RankResult(hang_outcome(deadline.elapsed, stack))
    for context in stuck:
        with suppress(Exception):  # the run has failed already, for a reason that is reported
            context.abort()  # unblocks ranks that wait for a peer
    return reports


def _stack_of(thread: threading.Thread) -> str:
    frame = sys._current_frames().get(thread.ident or 0)
    stack = traceback.extract_stack(frame) if frame is not None else traceback.StackSummary()
    # The outermost frames are of threading, then come our own, then the body.
    ours = dropwhile(lambda frame: PRIVATE_MODULES not in frame.filename, stack)
    body = dropwhile(lambda frame: PRIVATE_MODULES in frame.filename, ours)
    return "".join(traceback.format_list(list(body)))
