"""Several calls of an engine that count as one."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.futures import Future

from ._engine import RawWork

__all__ = ["JointWork"]

_NO_TIMEOUT = timedelta(0)


class JointWork:
    """Done when all of its parts are."""

    def __init__(self, parts: Sequence[RawWork]) -> None:
        self._parts = list(parts)

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        """Wait for every part within one timeout."""
        until = time.monotonic() + timeout.total_seconds()
        failure: RuntimeError | None = None
        for part in self._parts:
            try:
                if timeout <= _NO_TIMEOUT:
                    part.wait()
                else:
                    part.wait(timedelta(seconds=max(until - time.monotonic(), 0.001)))
            except RuntimeError as error:  # wait for the others all the same: all or nothing
                failure = error
        if failure is not None:
            raise failure
        return True

    def is_completed(self) -> bool:
        """Tell whether every part has ended."""
        return all(part.is_completed() for part in self._parts)

    def get_future(self) -> Future[Any]:
        """Return a future of every part's future."""
        return torch.futures.collect_all([part.get_future() for part in self._parts])

    def result(self) -> list[Tensor]:
        """Return what every part filled."""
        return [tensor for part in self._parts for tensor in part.result()]

    def _source_rank(self) -> int:
        return -1
