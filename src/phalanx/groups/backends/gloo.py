"""Gloo: torch's own engine for CPU tensors over TCP."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store
from torch.futures import Future

from ...errors import UnknownOption
from .._engine import Engine, RawWork, Traits
from .._patient import borrow_thread

__all__ = ["TRAITS", "make"]


def check_options(options: dict[str, object]) -> None:
    """Refuse options: Gloo has none."""
    if options:
        names = ", ".join(sorted(options))
        raise UnknownOption(f"gloo takes no options, but was given {names}")


def make(
    store: Store,
    rank: int,
    world_size: int,
    timeout: timedelta,
    device: torch.device,
    **kwargs: object,
) -> Engine:
    """Connect this rank to its peers."""
    del device
    check_options(kwargs)
    engine = dist.ProcessGroupGloo(store, rank, world_size, timeout)
    engine._set_sequence_number_for_group()
    return engine


class _Transfer:
    """A send or receive that is waited for on a thread of its own.

    To Gloo, a timed wait that runs out means that the connection is broken, so a waiter that wants
    to look around now and then must not be the one who waits. The thread is borrowed on the first
    look and given back when the transfer ends.
    """

    def __init__(self, raw: RawWork, seconds: float) -> None:
        self._raw = raw
        self._until = time.monotonic() + seconds
        self._ended = threading.Event()
        self._error: RuntimeError | None = None
        self._started = False
        self._future: Future[Any] | None = None
        self._lock = threading.Lock()  # over the three above

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        self._start()
        if not self._ended.wait(timeout.total_seconds() or None):
            raise RuntimeError("not yet")
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        self._start()
        return self._ended.is_set()

    def get_future(self) -> Future[Any]:
        with self._lock:
            if self._future is None:
                self._future = Future()
                if self._ended.is_set():
                    self._fill(self._future)
        self._start()
        return self._future

    def result(self) -> list[Tensor]:
        return self._raw.result()

    def _source_rank(self) -> int:
        return self._raw._source_rank()

    def _start(self) -> None:
        with self._lock:
            if self._started:
                return
            self._started = True
        borrow_thread(self._run)

    def _run(self) -> None:
        try:
            self._raw.wait(timedelta(seconds=max(self._until - time.monotonic(), 0.001)))
        except RuntimeError as error:
            self._error = error
        with self._lock:
            self._ended.set()
            if self._future is not None:
                self._fill(self._future)

    def _fill(self, future: Future[Any]) -> None:
        if self._error is not None:
            future.set_exception(self._error)
        else:
            future.set_result([])


TRAITS = Traits(
    devices=frozenset({"cpu", "cuda"}),
    dtypes=frozenset(
        {
            torch.float32,
            torch.float64,
            torch.float16,
            torch.bfloat16,
            torch.int8,
            torch.uint8,
            torch.int32,
            torch.int64,
            torch.bool,
        }
    ),
    averages=frozenset({"allreduce"}),
    wrap_transfer=_Transfer,
    check_options=check_options,
)
