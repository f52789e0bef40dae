"""The work handle of engines written in Python."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch import Tensor
from torch.futures import Future

from .._engine import NotYet

__all__ = ["PythonWork"]

_NO_TIMEOUT = timedelta(0)


class PythonWork:
    """A call that some thread ends with `finish`."""

    def __init__(self, outputs: list[Tensor]) -> None:
        self._outputs = outputs
        self._ended = threading.Event()
        self._error: Exception | None = None
        self._source = -1
        self._future: Future[Any] | None = None
        self.cancel: Callable[[], None] = _nothing
        """Takes a transfer back that nobody has met."""
        # For what must happen once: the end, and the making and filling of the future.
        self._lock = threading.Lock()

    def finish(self, error: Exception | None = None, *, source: int = -1) -> None:
        """End the call, well or badly; only the first end counts."""
        with self._lock:
            if self._ended.is_set():
                return
            self._error = error
            self._source = source
            self._ended.set()
            future = self._future
        if future is not None:  # outside of the lock, for this runs whatever hangs on it
            self._fill(future)

    @property
    def has_future(self) -> bool:
        """Whether somebody has asked for the future."""
        return self._future is not None

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        """Block until the call has ended; raises ``RuntimeError`` if it has not, or badly."""
        if not self._ended.wait(timeout.total_seconds() or None):
            raise NotYet
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        """Tell whether the call has ended, well or badly."""
        return self._ended.is_set()

    def get_future(self) -> Future[Any]:
        """Return a future of the output tensors."""
        with self._lock:
            if self._future is not None:
                return self._future
            future: Future[Any] = Future()
            self._future = future
            ended = self._ended.is_set()
        if ended:
            self._fill(future)
        return future

    def result(self) -> list[Tensor]:
        """Return the output tensors."""
        return self._outputs

    def _source_rank(self) -> int:
        return self._source

    def _fill(self, future: Future[Any]) -> None:
        if self._error is not None:
            future.set_exception(self._error)
        else:
            future.set_result(self._outputs)


def _nothing() -> None:
    """Take back what cannot be."""
