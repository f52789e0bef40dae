"""What a fault does, and `Fault`: an action at a fault point.

An action is a name and at most one number, so it also has a text, such as ``stop:0.5``: faults are
sent to launched workers and written to traces in this form, and nothing has to be unpickled.

`ACTIONS` describes them. Most are carried out by the process that they affect, at a fault point;
some can be injected from outside, two of these only so.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from ..errors import InvalidArgument


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


def _read_address_0(_: None) -> None:
    ctypes.string_at(0)


def _hold_gil(seconds: float) -> None:
    # Functions of a PyDLL are called without releasing the GIL.
    sleep = ctypes.PyDLL(None).usleep
    sleep.argtypes = [ctypes.c_uint]
    deadline = time.monotonic() + seconds
    while (left := deadline - time.monotonic()) > 0:  # a signal ends the call early
        sleep(min(int(left * 1e6) + 1, 1_000_000))  # what POSIX allows at once


def _is_nothing(value: float | None) -> bool:
    return value is None


def _is_duration(value: float | None) -> bool:
    return value is not None and 0 <= value < math.inf


def _is_duration_or_nothing(value: float | None) -> bool:
    return value is None or _is_duration(value)


def _is_signal(value: float | None) -> bool:
    return value in signal.valid_signals()


def _is_exit_code(value: float | None) -> bool:
    return value in range(256)


class _Kind(NamedTuple):
    """What is known of the actions of one name."""

    accepts: Callable[[float | None], bool]
    """Whether a value is an argument of it."""
    expected: str
    """What it accepts, in words."""
    act: Callable[[Any], None] | None
    """Affects the calling process; None if only another process can carry it out."""
    default: float | None = None
    is_external: bool = False
    """Whether another process can carry it out, as a failure of a `FaultPlan`."""
    is_fatal: bool = False
    """Whether a rank does not survive it. A rank also does not survive a stop for ever."""
    is_integral: bool = False


_NOTHING = (_is_nothing, "no argument")
_SECONDS = (_is_duration, "a finite number of seconds, at least 0")
ACTIONS = {
    "kill": _Kind(
        _is_signal,
        f"the number of a signal, from 1 to {int(signal.SIGRTMAX)}",
        _kill_self,
        default=int(signal.SIGKILL),
        is_external=True,
        is_fatal=True,
        is_integral=True,
    ),
    "stop": _Kind(
        _is_duration_or_nothing,
        "a finite number of seconds, at least 0, or no argument",
        _stop_self,
        is_external=True,
    ),
    "delay": _Kind(*_SECONDS, time.sleep),
    "segfault": _Kind(*_NOTHING, _read_address_0, is_external=True, is_fatal=True),
    "exit_abruptly": _Kind(
        _is_exit_code,
        "an exit code from 0 to 255",
        os._exit,
        default=137,
        is_fatal=True,
        is_integral=True,
    ),
    "hold_gil": _Kind(*_SECONDS, _hold_gil),
    "store_unreachable": _Kind(*_SECONDS, None, is_external=True),
    "kill_supervisor": _Kind(*_NOTHING, None, is_external=True),
}


@dataclass(frozen=True)
class Action:
    """What a fault does; made by `kill`, `stop`, `delay` and the like."""

    name: str
    argument: float | None = None

    def __post_init__(self) -> None:
        kind = _kind_of(self.name)
        if not kind.accepts(self.argument):
            raise InvalidArgument(f"{self.name} needs {kind.expected}, got {self.argument}")
        if kind.is_integral:  # given as a Signals or as 15.0, say
            assert self.argument is not None
            object.__setattr__(self, "argument", int(self.argument))

    @property
    def is_fatal(self) -> bool:
        """Whether the rank does not survive it."""
        return ACTIONS[self.name].is_fatal or (self.name == "stop" and self.argument is None)

    def __call__(self) -> None:
        """Act on the calling rank."""
        act = ACTIONS[self.name].act
        assert act is not None, f"{self} cannot be carried out by a rank"
        act(self.argument)

    def __str__(self) -> str:
        return self.name if self.argument is None else f"{self.name}:{self.argument}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """Return the action of a text such as ``kill``, ``kill:15`` or ``stop:0.5``."""
        name, _, argument = text.strip().partition(":")
        kind = _kind_of(name)
        try:
            value = _number(argument) if argument else kind.default
        except ValueError as error:
            raise InvalidArgument(f"{name} needs {kind.expected}, got {argument}") from error
        return cls(name, value)


def _kind_of(name: str) -> _Kind:
    if name not in ACTIONS:
        raise InvalidArgument(f"there is no action {name!r}; the actions are {', '.join(ACTIONS)}")
    return ACTIONS[name]


def _number(text: str) -> float:
    return int(text) if text.isdecimal() else float(text)


def kill(signum: int = signal.SIGKILL) -> Action:
    """Kill the rank's process with a signal, as a crash or the kernel would."""
    return Action("kill", signum)


def stop(*, resume_after: float | None = None) -> Action:
    """Stop the rank's process, for `resume_after` seconds or forever.

    The process stays alive and keeps its connections, but does not respond.
    """
    return Action("stop", resume_after)


def delay(seconds: float) -> Action:
    """Delay the thread that reaches the point by some seconds."""
    return Action("delay", seconds)


def segfault() -> Action:
    """Crash the rank's process by reading from address 0."""
    return Action("segfault")


def exit_abruptly(code: int = 137) -> Action:
    """End the rank's process without any cleanup.

    137 is the code of a container whose process was killed because it had used up its memory.
    """
    return Action("exit_abruptly", code)


def hold_gil(seconds: float) -> Action:
    """Block all Python threads of the rank's process for some seconds, as a C extension can."""
    return Action("hold_gil", seconds)


def store_unreachable(seconds: float) -> Action:
    """Stop the launcher's store for some seconds; only in a `FaultPlan`."""
    return Action("store_unreachable", seconds)


def kill_supervisor() -> Action:
    """Kill the launcher of the run with SIGKILL; only in a `FaultPlan`."""
    return Action("kill_supervisor")


@dataclass(frozen=True)
class Fault:
    """An action at the nth time that a rank reaches a fault point."""

    point: str
    action: Action
    rank: int | None = None
    """The affected rank, as the launcher numbers ranks; all ranks by default."""
    nth: int = 1
    """Counted per process, from when the fault is armed."""
    optional: bool = False
    """Whether it is fine if the point is never reached."""
    incarnation: int | None = 0
    """Which process of the rank: 0 is the first, 1 its replacement; None means every one. Only
    launched workers are replaced."""
    once: bool = False
    """Whether it fires only once in a run, in the first process that gets there; only in launched
    workers."""
    survivors: int = 0
    """How many other workers of an elastic run must be members. With fewer it does not fire, and
    waits for the next time that the point is reached."""

    def __post_init__(self) -> None:
        if self.nth < 1:
            raise InvalidArgument(f"nth must be at least 1, got {self.nth}")
        if ACTIONS[self.action.name].act is None:
            raise InvalidArgument(
                f"{self.action.name} is not an action of a rank: use it in a FaultPlan"
            )

    @property
    def needs_log(self) -> bool:
        """Whether it depends on what happened in other processes."""
        return self.once or self.survivors > 0

    def applies_to(self, rank: int, incarnation: int = 0) -> bool:
        """Return whether the fault affects a process of `rank`."""
        return self.rank in (None, rank) and self.incarnation in (None, incarnation)

    def __str__(self) -> str:
        times = "" if self.nth == 1 else f" (time {self.nth})"
        return f"{self.action.name} at '{self.point}'{times}"


def faults_to_json(faults: Sequence[Fault]) -> str:
    """Return faults as text for another process."""
    return json.dumps([{**asdict(each), "action": str(each.action)} for each in faults])


def faults_from_json(text: str) -> list[Fault]:
    """Return the faults of a text; raise `InvalidArgument` if it has anything else."""
    try:
        entries = json.loads(text)
        return [Fault(**{**each, "action": Action.parse(each["action"])}) for each in entries]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        if isinstance(error, InvalidArgument):
            raise
        raise InvalidArgument(f"not a list of faults: {text!r}") from error
