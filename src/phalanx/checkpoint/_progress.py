"""Progress and results of saves: `SaveProgress`, `SaveReport`, `WriteFuture`.

The writing side reports phases and bytes to a `ProgressMeter`, which may live in memory shared
with another process. Torch-free: `_storage` imports this module.
"""

from __future__ import annotations

import mmap
import time
from collections import defaultdict
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from .._formatting import format_size


class Phase(StrEnum):
    STAGING = "staging"
    STARTING = "starting the writer process"
    PREPARING = "preparing"
    COMPARING = "comparing state"
    WRITING = "writing"
    FLUSHING = "flushing"
    WAITING = "waiting for ranks"
    COMMITTING = "committing"


_PHASES = list(Phase)


@dataclass(frozen=True)
class SaveProgress:
    """How far this rank is with a save."""

    path: str
    phase: str
    """The current phase, such as staging, writing, flushing or waiting for ranks."""
    bytes_written: int
    bytes_total: int
    """Bytes of tensors that this rank will write; 0 while unknown."""
    seconds: float
    """Since the call of `save`."""
    bytes_per_second: float
    """Average of the writing phase so far."""

    def __str__(self) -> str:
        written, total = format_size(self.bytes_written), format_size(self.bytes_total)
        amount = f"{written} of {total}, " if self.bytes_total else ""
        return f"{self.phase}, {amount}{self.seconds:.0f} s"


@dataclass(frozen=True)
class SaveReport:
    """What a save cost on this rank."""

    path: str
    bytes_staged: int
    bytes_written: int
    stall_seconds: float
    """Duration of the call of `save`, including waits."""
    staging_seconds: float
    """Time spent copying tensors."""
    total_seconds: float
    """From the call of `save` to the commit."""
    phases: dict[str, float] = field(default_factory=dict)
    """Seconds by phase in the writer process."""

    @property
    def bytes_per_second(self) -> float:
        """Throughput of writing and flushing."""
        seconds = self.phases.get(Phase.WRITING, 0.0) + self.phases.get(Phase.FLUSHING, 0.0)
        return self.bytes_written / seconds if seconds else 0.0


# The words of a meter.
_PHASE, _WRITTEN, _TOTAL, _WRITING_NANOSECONDS = range(4)


class ProgressMeter:
    """Records the progress of a save, optionally in memory that another process reads."""

    SIZE = 32  # bytes of shared memory that it needs

    def __init__(self, shared: mmap.mmap | None = None) -> None:
        # Aligned words of eight bytes: a reader never sees a torn value.
        memory = memoryview(bytearray(self.SIZE) if shared is None else shared)
        self._words = memory[: self.SIZE].cast("q")
        self._seconds: dict[int, float] = defaultdict(float)
        self._since = time.perf_counter()

    def restart(self) -> None:
        self._words[_PHASE] = _PHASES.index(Phase.PREPARING)
        self._words[_WRITTEN] = self._words[_TOTAL] = self._words[_WRITING_NANOSECONDS] = 0
        self._since = time.perf_counter()
        self._seconds.clear()

    def enter(self, phase: str) -> None:
        """Begin a phase. A name that is no `Phase` counts as part of the current one."""
        now = time.perf_counter()
        self._seconds[self._words[_PHASE]] += now - self._since
        self._since = now
        if phase in _PHASES:
            self._words[_PHASE] = _PHASES.index(Phase(phase))

    def expect(self, size: int) -> None:
        """Set the number of bytes to write; a save that starts over writes all of them again."""
        self._words[_WRITTEN], self._words[_TOTAL] = 0, size

    def wrote(self, size: int) -> None:
        self._words[_WRITTEN] += size
        spent = self._seconds[self._words[_PHASE]] + time.perf_counter() - self._since
        self._words[_WRITING_NANOSECONDS] = round(spent * 1e9)

    @property
    def written(self) -> int:
        return self._words[_WRITTEN]

    def progress(self, path: str, began: float) -> SaveProgress:
        writing = self._words[_WRITING_NANOSECONDS] / 1e9
        speed = self.written / writing if writing else 0.0
        phase, seconds = _PHASES[self._words[_PHASE]], time.perf_counter() - began
        return SaveProgress(path, phase, self.written, self._words[_TOTAL], seconds, speed)

    def seconds(self) -> dict[str, float]:
        self.enter(_PHASES[self._words[_PHASE]])
        return {_PHASES[i]: each for i, each in sorted(self._seconds.items()) if each > 0}


def wrap_future(original_result: Any) -> Future[None]:
    """Return a future that completes or fails with the given one, without holding its result.

    For anything that is not a future, return a completed one.
    """
    wrapped: Future[None] = Future()
    wrapped.set_running_or_notify_cancel()

    def forward(original: Future[Any]) -> None:
        try:
            original.result()
        except BaseException as error:  # noqa: BLE001 - includes cancellation
            wrapped.set_exception(error)
        else:
            wrapped.set_result(None)

    if isinstance(original_result, Future):
        original_result.add_done_callback(forward)
    else:
        wrapped.set_result(None)
    return wrapped


def peek_error(write: Future[None]) -> BaseException | None:
    """Return the error of a completed write without marking it as observed."""
    return None if write.cancelled() else Future.exception(write)


class WriteFuture(Future[None]):
    """The future of a write; it records whether the user looked at its outcome."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path
        self.was_observed = False
        self.began = time.perf_counter()
        self.stall_seconds = 0.0
        self._finished = 0.0
        self._costs: dict[str, Any] = {}
        self.set_running_or_notify_cancel()  # other ranks depend on it, so it cannot be cancelled

    @property
    def report(self) -> SaveReport | None:
        """The cost of the save, once it succeeded."""
        if not self._costs:
            return None
        total = self._finished - self.began
        return SaveReport(
            path=self.path, stall_seconds=self.stall_seconds, total_seconds=total, **self._costs
        )

    @property
    def unobserved_error(self) -> BaseException | None:
        """The error of a completed write, unless the user has looked at it."""
        return None if self.was_observed or not self.done() else peek_error(self)

    def succeed(self, **costs: Any) -> None:
        """Complete the future; `costs` are the fields of the report that only the writer knows."""
        self._costs, self._finished = costs, time.perf_counter()
        self.set_result(None)

    def result(self, timeout: float | None = None) -> None:
        """Wait for the commit; raise the error of the save."""
        self.exception(timeout)
        super().result()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the end of the save, and return its error."""
        error = super().exception(timeout)
        self.was_observed = True
        return error
