"""Fault injection: kill, stop or delay a rank at a named point.

A fault is an argument of a run::

    pool.run(body, 3, faults=[Fault("allreduce:issued", kill(), rank=2)])

or is injected by the body::

    with faults.inject("my point", delay(0.5)):
        ...

Fault points of groups are ``<operation>:before``, ``<operation>:issued`` and
``<operation>:after``; ``form:requested`` and, in shared memory, ``form:mapped``; and
``rejoin:left``, ``rejoin:waiting`` and, in shared memory, ``rejoin:entering``. Those of a save are
``checkpoint:`` followed by ``begin``, ``locked``, ``tensor`` (before each one), ``flush`` (of each
file), ``written``, ``publish``, ``published`` and ``committed``, and when it overwrites another
checkpoint also ``moved``, ``replace``, ``replaced`` and, after the commit, ``discard`` (of each old
file). A checkpoint that is removed reaches ``checkpoint:renamed`` before its files are deleted.
Bodies add points with `reach`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from .. import _faultpoints
from .._faultpoints import reach
from ..errors import InvalidArgument

__all__ = ["Action", "Fault", "delay", "inject", "kill", "reach", "stop"]


_current_rank = threading.local()


class ArmedFault:
    """A fault that has not fired yet."""

    def __init__(self, fault: Fault) -> None:
        self.fault = fault
        self.fired = False
        self._thread: int | None = getattr(_current_rank, "thread", None)
        self._left = fault.nth
        self._lock = threading.Lock()  # guards the count; not held during the action

    def __call__(self, point: str) -> None:
        """Count the point if it is this fault's, and act at the nth time."""
        if point != self.fault.point or self._thread not in (None, threading.get_ident()):
            return
        with self._lock:
            self._left -= 1
            due = self._left == 0
        if due:
            self.fired = True
            self.fault.action()


@contextmanager
def arm_faults(faults: Sequence[Fault]) -> Iterator[list[ArmedFault]]:
    """Arm faults for the calling rank."""
    armed = [ArmedFault(fault) for fault in faults]
    with ExitStack() as stack:
        for each in armed:
            _faultpoints.arm(each)
            stack.callback(_faultpoints.disarm, each)
        yield armed


def mark_thread_as_rank() -> None:
    """Make this thread a rank until it ends: faults armed in it do not affect other threads."""
    _current_rank.thread = threading.get_ident()


def _kill_self(signum: int) -> None:
    os.kill(os.getpid(), signum)  # any thread may handle it, unlike with raise_signal


# A stopped process cannot resume itself. The script waits until the process has stopped, because
# a SIGCONT before that would be lost.
_RESUME_SCRIPT = """
until grep -q '^State:.T' /proc/$1/status; do [ -d /proc/$1 ] || exit; sleep 0.01; done
sleep $2; kill -CONT $1
"""


def _stop_self(resume_after: float | None) -> None:
    if resume_after is None:
        signal.raise_signal(signal.SIGSTOP)
        return
    waker = ["sh", "-c", _RESUME_SCRIPT, "sh", str(os.getpid()), str(resume_after)]
    with subprocess.Popen(waker, stdin=subprocess.DEVNULL):
        signal.raise_signal(signal.SIGSTOP)


@dataclass(frozen=True)
class Action:
    """The result of `kill`, `stop` and `delay`."""

    name: str
    function: Callable[[Any], None]
    argument: Any
    is_fatal: bool
    """Whether the rank does not survive it."""

    def __call__(self) -> None:
        """Act on the calling rank."""
        self.function(self.argument)


def kill(signum: int = signal.SIGKILL) -> Action:
    """Kill the rank's process with a signal, as a crash or the kernel would."""
    return Action("kill", _kill_self, signum, is_fatal=True)


def stop(*, resume_after: float | None = None) -> Action:
    """Stop the rank's process, for `resume_after` seconds or forever.

    The process stays alive and keeps its connections, but does not respond.
    """
    return Action("stop", _stop_self, resume_after, is_fatal=resume_after is None)


def delay(seconds: float) -> Action:
    """Delay the thread that reaches the point by some seconds."""
    return Action("delay", time.sleep, seconds, is_fatal=False)


@dataclass(frozen=True)
class Fault:
    """An action at the nth time that a rank reaches a fault point."""

    point: str
    action: Action
    rank: int | None = None
    """The affected rank; all ranks by default."""
    nth: int = 1
    """Counted per rank from the start of the run."""
    optional: bool = False
    """Whether it is fine if the point is never reached."""

    def __post_init__(self) -> None:
        if self.nth < 1:
            raise InvalidArgument(f"nth must be at least 1, got {self.nth}")

    def applies_to(self, rank: int) -> bool:
        """Return whether the fault affects `rank`."""
        return self.rank is None or self.rank == rank

    def __str__(self) -> str:
        times = "" if self.nth == 1 else f" (time {self.nth})"
        return f"{self.action.name} at '{self.point}'{times}"


def inject(point: str, action: Action, *, nth: int = 1) -> AbstractContextManager[object]:
    """Act at the nth time that the calling rank reaches `point` in the block."""
    return arm_faults([Fault(point, action, nth=nth)])
