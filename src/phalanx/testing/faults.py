"""Fault injection: kill, stop or delay a rank at a named point.

A fault is declared with the run and sent to its rank::

    pool.run(body, 3, faults=[Fault("allreduce:issued", kill(), rank=2)])

or injected by the body itself, on every rank that runs it::

    with faults.inject("my point", delay(0.5)):
        ...

Groups mark ``<operation>:before``, ``<operation>:issued`` and ``<operation>:after``;
``form:signed in`` and, in shared memory, ``form:mapped`` while they form; and, besides ``before``
and ``after``, ``rejoin:away``, ``rejoin:waiting`` and, in shared memory, ``rejoin:entering``. A
save of a checkpoint marks, each after ``checkpoint:``, ``begin``, ``locked``, ``tensor`` (before
each one), ``flush`` (of each file), ``written``, ``publish``, ``published`` and ``committed``, and
over another one also ``moved``, ``replace`` and ``replaced``. A body marks its own points with
`reach`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from .. import _faultpoints
from ..errors import InvalidArgument

__all__ = [
    "Action",
    "Fault",
    "delay",
    "inject",
    "kill",
    "reach",
    "stop",
]


_current_rank = threading.local()


class ArmedFault:
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
def arm_faults(faults: Sequence[Fault]) -> Iterator[list[ArmedFault]]:
    """Keep faults armed for the calling rank, and show which of them have struck."""
    thread = getattr(_current_rank, "thread", None)
    injections = [ArmedFault(fault, thread=thread) for fault in faults]
    with ExitStack() as stack:
        for injection in injections:
            _faultpoints.arm(injection)
            stack.callback(_faultpoints.disarm, injection)
        yield injections


@contextmanager
def thread_as_rank() -> Iterator[None]:
    """Let this thread be a rank of its own: what is armed in it strikes no other."""
    _current_rank.thread = threading.get_ident()
    try:
        yield
    finally:
        del _current_rank.thread


# Only somebody else can wake a stopped process. It counts from the moment when the process has
# really stopped, for a wake-up that comes before the stop would be lost.
_RESUME_SCRIPT = """
until grep -q '^State:.T' /proc/$1/status; do [ -d /proc/$1 ] || exit; sleep 0.01; done
sleep $2; kill -CONT $1
"""


@dataclass(frozen=True)
class _Kill:
    signal: int

    def __call__(self) -> None:
        os.kill(os.getpid(), self.signal)

    def __str__(self) -> str:
        return "kill"


@dataclass(frozen=True)
class _Stop:
    resume_after: float | None

    def __call__(self) -> None:
        if self.resume_after is None:
            os.kill(os.getpid(), signal.SIGSTOP)
            return
        waker = ["sh", "-c", _RESUME_SCRIPT, "sh", str(os.getpid()), str(self.resume_after)]
        with subprocess.Popen(waker, stdin=subprocess.DEVNULL):
            os.kill(os.getpid(), signal.SIGSTOP)

    def __str__(self) -> str:
        return "stop"


@dataclass(frozen=True)
class _Delay:
    seconds: float

    def __call__(self) -> None:
        time.sleep(self.seconds)

    def __str__(self) -> str:
        return "delay"


Action = _Kill | _Stop | _Delay
"""What `kill`, `stop` and `delay` return."""


def kill(signum: int = signal.SIGKILL) -> Action:
    """End the rank's process with a signal, at once, as a crash or the kernel would."""
    return _Kill(signum)


def stop(*, resume_after: float | None = None) -> Action:
    """Stop the rank's process, for ever or for some seconds.

    It is alive, holds its connections and answers nothing.
    """
    return _Stop(resume_after)


def delay(seconds: float) -> Action:
    """Hold the rank up for some seconds; only the thread that reaches the point sleeps."""
    return _Delay(seconds)


@dataclass(frozen=True)
class Fault:
    """What shall happen when a rank reaches a point for the nth time."""

    point: str
    action: Action
    rank: int | None = None
    """The rank that it strikes; every rank by default."""
    nth: int = 1
    """Counted for each rank from the start of its run."""
    optional: bool = False
    """Whether the run is in order when the point is never reached."""

    def __post_init__(self) -> None:
        if self.nth < 1:
            raise InvalidArgument(f"nth counts from 1, but it is {self.nth}")

    @property
    def final(self) -> bool:
        """Whether the rank does not come back from it."""
        return isinstance(self.action, _Kill) or self.action == _Stop(None)

    @property
    def needs_process(self) -> bool:
        """Whether it strikes a whole process, so that a rank that is a thread cannot have it."""
        return not isinstance(self.action, _Delay)

    def strikes(self, rank: int) -> bool:
        """Tell whether the fault is meant for `rank`."""
        return self.rank is None or self.rank == rank

    def __str__(self) -> str:
        times = "" if self.nth == 1 else f" for the time {self.nth}"
        return f"{self.action} at '{self.point}'{times}"


@contextmanager
def inject(point: str, action: Action, *, nth: int = 1) -> Iterator[None]:
    """Act at the nth time that the calling rank reaches `point` inside the block."""
    with arm_faults([Fault(point, action, nth=nth)]):
        yield


def reach(point: str) -> None:
    """Mark a point of a test body."""
    _faultpoints.reach(point)
