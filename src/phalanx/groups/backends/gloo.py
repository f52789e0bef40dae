"""Gloo: torch's engine for CPU tensors over TCP."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store
from torch.futures import Future

from .._engine import NO_TIMEOUT, REAL_DTYPES, Engine, PythonWork, RawWork, Traits
from .._worker_threads import run_on_worker
from . import refuse_options


def make(
    store: Store, rank: int, world_size: int, timeout: timedelta, device: torch.device, **_: object
) -> Engine:
    """Connect this rank to its peers."""
    del device
    engine = dist.ProcessGroupGloo(store, rank, world_size, timeout)
    engine._set_sequence_number_for_group()
    return engine


class _Transfer(PythonWork):
    """A send or receive whose wait runs on a worker thread.

    Gloo breaks the connection when a timed wait times out, so a caller that checks for failures
    while it waits must not wait in Gloo itself. The worker is taken at the first check and
    returned when the transfer ends.
    """

    def __init__(self, raw: RawWork, seconds: float) -> None:
        super().__init__([])
        self._raw = raw
        self._until = time.monotonic() + seconds
        self._start_once = threading.Lock()

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        self._start()
        return super().wait(timeout)

    def is_completed(self) -> bool:
        self._start()
        return super().is_completed()

    def get_future(self) -> Future[Any]:
        self._start()
        return super().get_future()

    def _source_rank(self) -> int:
        return self._raw._source_rank()

    def _start(self) -> None:
        if self._start_once.acquire(blocking=False):  # and never released
            run_on_worker(self._run)

    def _run(self) -> None:
        error: RuntimeError | None = None
        try:
            self._raw.wait(timedelta(seconds=max(self._until - time.monotonic(), 0.001)))
        except RuntimeError as caught:
            error = caught
        self.finish(error)


TRAITS = Traits(
    devices=frozenset({"cpu", "cuda"}),
    dtypes=REAL_DTYPES - {torch.int16} | {torch.bool},
    averages=frozenset({"allreduce"}),
    wrap_transfer=_Transfer,
    connects_in_background=True,
    check_options=refuse_options("gloo"),
)
