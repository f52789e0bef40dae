"""Progress and results of saves: `SaveProgress`, `SaveReport`, `WriteFuture`.

The writing side reports phases and bytes to a `ProgressMeter`, which may live in memory shared
with another process. Without a meter, a report costs one lookup every few megabytes.

Torch-free: `_local_storage` imports this module.
"""

from __future__ import annotations

import mmap
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

PHASES = (
    "staging",
    "starting the writer process",
    "getting ready",
    "comparing state",
    "writing",
    "flushing",
    "waiting for ranks",
    "committing",
)
"""What a save does; other words are told as the one before them."""


@dataclass(frozen=True)
class SaveProgress:
    """How far this rank is with a save."""

    path: str
    phase: str
    """One of staging, writing, flushing, waiting for ranks, and what lies between them."""
    bytes_written: int
    bytes_total: int
    """What this rank is to write of the tensors; 0 as long as it is not known."""
    seconds: float
    """Since `save` was called."""
    bytes_per_second: float
    """In the phase of writing, up to now."""


@dataclass(frozen=True)
class SaveReport:
    """What a save took, on this rank."""

    path: str
    bytes_staged: int
    bytes_written: int
    stall_seconds: float
    """How long the call of `save` took, with what it waited for."""
    staging_seconds: float
    """How long the tensors were being copied."""
    total_seconds: float
    """From the call of `save` until the checkpoint was in place."""
    phases: dict[str, float] = field(default_factory=dict)
    """The seconds of each phase in the writer process."""

    @property
    def bytes_per_second(self) -> float:
        """How fast data was written and flushed."""
        seconds = self.phases.get("writing", 0.0) + self.phases.get("flushing", 0.0)
        return self.bytes_written / seconds if seconds else 0.0


class ProgressMeter:
    """Takes note of a save; a process that shares its memory can read along."""

    SIZE = 32
    """Bytes of memory that it needs."""

    def __init__(self, shared: mmap.mmap | None = None) -> None:
        # Words of eight bytes, each of them written at once: nobody reads half a number.
        memory = memoryview(bytearray(self.SIZE) if shared is None else shared)
        self._words = memory[: self.SIZE].cast("q")
        self._seconds: dict[int, float] = defaultdict(float)
        self._since = time.perf_counter()

    def restart(self) -> None:
        """Begin a new save."""
        self._words[0] = PHASES.index("getting ready")
        self._words[1] = self._words[2] = self._words[3] = 0
        self._since = time.perf_counter()
        self._seconds.clear()

    def enter(self, phase: str) -> None:
        """Note the beginning of a phase."""
        now = time.perf_counter()
        self._seconds[self._words[0]] += now - self._since
        self._since = now
        if phase in PHASES:
            self._words[0] = PHASES.index(phase)

    def expect(self, size: int) -> None:
        """Note how many bytes there are to write; a save that begins anew writes all of them."""
        self._words[1], self._words[2] = 0, size

    def wrote(self, size: int) -> None:
        """Note that some more were written."""
        self._words[1] += size
        spent = self._seconds[self._words[0]] + time.perf_counter() - self._since
        self._words[3] = round(spent * 1e9)

    @property
    def phase(self) -> str:
        """What the save is doing."""
        return PHASES[self._words[0]]

    @property
    def written(self) -> int:
        """How many bytes were written."""
        return self._words[1]

    @property
    def total(self) -> int:
        """How many there will be."""
        return self._words[2]

    @property
    def bytes_per_second(self) -> float:
        """How fast they were written."""
        return self.written / (self._words[3] / 1e9) if self._words[3] else 0.0

    def seconds(self) -> dict[str, float]:
        """How long each phase has taken until now."""
        self.enter(self.phase)
        return {PHASES[i]: each for i, each in sorted(self._seconds.items()) if each > 0}


_meter: ContextVar[ProgressMeter | None] = ContextVar("phalanx_checkpoint_meter", default=None)


@contextmanager
def metered(meter: ProgressMeter) -> Iterator[None]:
    """Tell `meter` how far the save is that the block does."""
    meter.restart()
    token = _meter.set(meter)
    try:
        yield
    finally:
        _meter.reset(token)


def enter_phase(phase: str) -> None:
    """Say that a phase begins."""
    meter = _meter.get()
    if meter is not None:
        meter.enter(phase)


def expect_bytes(size: int) -> None:
    """Say how many bytes this rank will write."""
    meter = _meter.get()
    if meter is not None:
        meter.expect(size)


def count_written(size: int) -> None:
    """Say that some more are written."""
    meter = _meter.get()
    if meter is not None:
        meter.wrote(size)


def wrap_future(original_result: Any) -> Future[None]:
    """Return a future that is done when the given one is, fails as it does, and holds nothing.

    For what is no future, return one that is done.
    """
    wrapped: Future[None] = Future()
    wrapped.set_running_or_notify_cancel()
    if not isinstance(original_result, Future):
        wrapped.set_result(None)
        return wrapped

    def pass_on(original: Future[Any]) -> None:
        try:
            original.result()
        except BaseException as error:  # noqa: BLE001 - also that it was cancelled
            wrapped.set_exception(error)
        else:
            wrapped.set_result(None)

    original_result.add_done_callback(pass_on)
    return wrapped


@dataclass(frozen=True)
class WriteResult:
    """What a save that succeeded has done."""

    bytes_staged: int
    staging_seconds: float
    bytes_written: int
    phases: dict[str, float]
    finished: float = field(default_factory=time.perf_counter)


class WriteFuture(Future[None]):
    """The end of a save; it knows whether anybody has asked how it went."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path
        self.was_asked = False
        self.began = time.perf_counter()
        self.stall_seconds = 0.0
        self._outcome: WriteResult | None = None
        self.set_running_or_notify_cancel()  # what others may be waiting for cannot be cancelled

    @property
    def report(self) -> SaveReport | None:
        """What the save took, once it has succeeded."""
        outcome = self._outcome
        if outcome is None:
            return None
        return SaveReport(
            path=self.path,
            bytes_staged=outcome.bytes_staged,
            bytes_written=outcome.bytes_written,
            stall_seconds=self.stall_seconds,
            staging_seconds=outcome.staging_seconds,
            total_seconds=outcome.finished - self.began,
            phases=outcome.phases,
        )

    def progress(self, *, phase: str, written: int, total: int, speed: float) -> SaveProgress:
        """Tell how far the save is, given what is known of it."""
        seconds = time.perf_counter() - self.began
        return SaveProgress(self.path, phase, written, total, seconds, speed)

    def succeed(self, outcome: WriteResult) -> None:
        """Note that the checkpoint is in place."""
        self._outcome = outcome
        self.set_result(None)

    def result(self, timeout: float | None = None) -> None:
        """Wait for the end, and raise what went wrong."""
        self.exception(timeout)
        super().result()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the end, and return what went wrong."""
        error = super().exception(timeout)
        self.was_asked = True
        return error

    def failure(self) -> BaseException | None:
        """Return what went wrong, if it is over; this does not count as asking."""
        return super().exception() if self.done() else None
