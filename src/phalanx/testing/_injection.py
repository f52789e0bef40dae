"""Faults that are armed: in this process, or in one of its threads."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from .. import _faultpoints

if TYPE_CHECKING:
    from .faults import Fault

__all__ = ["Injection", "arm", "thread_is_rank"]

_rank = threading.local()


class Injection:
    """A fault that waits for its point."""

    def __init__(self, fault: Fault, *, thread: int | None) -> None:
        self.fault = fault
        self.struck = False
        self._thread = thread
        self._left = fault.nth
        self._lock = threading.Lock()  # over the count; not held while the fault acts

    def __call__(self, point: str) -> None:
        """Count a point reached, and act when it is the one."""
        if point != self.fault.point or self._thread not in (None, threading.get_ident()):
            return
        with self._lock:
            self._left -= 1
            due = self._left == 0
        if due:
            self.struck = True
            self.fault.action()


@contextmanager
def arm(faults: Sequence[Fault]) -> Iterator[list[Injection]]:
    """Keep faults armed for the calling rank, and show which of them have struck."""
    thread = getattr(_rank, "thread", None)
    injections = [Injection(fault, thread=thread) for fault in faults]
    with ExitStack() as stack:
        for injection in injections:
            _faultpoints.arm(injection)
            stack.callback(_faultpoints.disarm, injection)
        yield injections


@contextmanager
def thread_is_rank() -> Iterator[None]:
    """Let this thread be a rank of its own: what is armed in it strikes no other."""
    _rank.thread = threading.get_ident()
    try:
        yield
    finally:
        del _rank.thread
