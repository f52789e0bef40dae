"""Ranges in torch's profiler: the calls of our engines, and phases of data parallelism.

torch's engines record their own calls (``gloo:all_reduce``). A call on one of ours is recorded in
the same words, as ``shm:all_reduce``. A range must lie inside or outside every other range of its
thread, or viewers drop it. So a range from start to end is possible only where torch waits before
it returns (``dist.all_reduce(tensor)``). Any other call has one range for its start and, if
somebody waits, a second one for that (``shm:all_reduce_wait``).

While no profiler runs, the cost is one check of a value in `flags`. The fast path makes it natively
and leaves calls to the slow path while a profiler runs.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd import profiler

from ._engine import RawWork

ENABLED = "_is_profiler_enabled"
flags: dict[str, Any] = vars(profiler)
"""Where `ENABLED` tells whether a profiler may run in this process. Ranges are recorded only on
threads that it observes."""
if os.environ.get("KINETO_USE_DAEMON"):
    flags = {ENABLED: True}  # a daemon may start one at any time, in C++, which sets no flag

# In the words of torch's engines, whichever form a call has.
OPERATIONS = {
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce",
    "allgather": "all_gather",
    "allgather_coalesced": "all_gather",
    "all_gather_single": "all_gather",
    "all_gather_single_coalesced": "all_gather",
    "reduce_scatter_single": "reduce_scatter",
    "reduce_scatter_single_coalesced": "reduce_scatter",
    "alltoall": "all_to_all",
    "all_to_all_single": "all_to_all",
    "recv_anysource": "recvAnySource",
}

_Range = torch._C._profiler._RecordFunctionFast
_SCOPE = {"scope": "user_scope"}  # as torch's engines; honoured where shapes are recorded
_NO_RANGE = nullcontext()


class CallRange:
    """The range of one call, and of the waits for it."""

    __slots__ = ("_ends_with_wait", "_name", "_open")

    def __init__(self, backend: str, operation: str, tensors: list[Tensor], opts: Any) -> None:
        sparse = "sparse_" if tensors and tensors[0].is_sparse else ""
        self._name = f"{backend}:{sparse}{OPERATIONS.get(operation, operation)}"
        # torch's functions reset it if they wait for the call themselves.
        self._ends_with_wait = not getattr(opts, "asyncOp", True)
        self._open: AbstractContextManager[object] | None = None

    def start(self, tensors: list[Tensor], method: Callable[..., RawWork], *args: Any) -> RawWork:
        """Start the call in a range, which stays open if torch waits for the call."""
        started = _Range(self._name, tensors, _SCOPE)
        started.__enter__()
        try:
            raw = method(*args)
            if self._ends_with_wait:
                self._open = started
        finally:
            if self._open is None:
                started.__exit__(None, None, None)
        return raw

    def begin_wait(self) -> AbstractContextManager[object]:
        """Return a range that has begun and ends with a wait: the call's, if that is open."""
        waiting, self._open = self._open, None
        if waiting is None:
            waiting = _Range(f"{self._name}_wait", [], _SCOPE)
            waiting.__enter__()
        return waiting


def record(name: str) -> AbstractContextManager[object]:
    """Record the body as a range, if a profiler runs."""
    return profiler.record_function(name) if flags[ENABLED] else _NO_RANGE
