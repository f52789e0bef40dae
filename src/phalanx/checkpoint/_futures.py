"""Futures of saves."""

from __future__ import annotations

import time
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from ._progress import SaveProgress, SaveReport

__all__ = ["Outcome", "WriteFuture", "wrap_future"]


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
class Outcome:
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
        self._outcome: Outcome | None = None
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

    def succeed(self, outcome: Outcome) -> None:
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
