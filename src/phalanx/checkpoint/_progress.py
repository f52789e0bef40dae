"""How far a save is: what the writing tells, and what it makes of it in the end.

The writing says what it is doing to whoever listens (`listening`); nobody does by default, and then
it costs one look at a variable for every few megabytes.
"""

from __future__ import annotations

import mmap
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

__all__ = ["Meter", "SaveProgress", "SaveReport", "enter", "expect", "listening", "wrote"]

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


class Meter:
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


_listener: ContextVar[Meter | None] = ContextVar("phalanx_checkpoint_meter", default=None)


@contextmanager
def listening(meter: Meter) -> Iterator[None]:
    """Tell `meter` how far the save is that the block does."""
    meter.restart()
    token = _listener.set(meter)
    try:
        yield
    finally:
        _listener.reset(token)


def enter(phase: str) -> None:
    """Say that a phase begins."""
    meter = _listener.get()
    if meter is not None:
        meter.enter(phase)


def expect(size: int) -> None:
    """Say how many bytes this rank will write."""
    meter = _listener.get()
    if meter is not None:
        meter.expect(size)


def wrote(size: int) -> None:
    """Say that some more are written."""
    meter = _listener.get()
    if meter is not None:
        meter.wrote(size)
