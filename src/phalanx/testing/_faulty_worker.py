"""Runs a script in a launched worker with faults armed: ``-m phalanx.testing._faulty_worker``.

``PHALANX_FAULTS`` has the faults of all workers as JSON; those of this one are armed. The worker is
the one that ``phalanx run --elastic`` describes, else the launcher's rank, whose incarnation is the
number of restarts. With ``PHALANX_FAULT_LOG``, faults that fire and points that are reached are
appended to that file, a line of JSON each, before anything is done there.
"""

from __future__ import annotations

import faulthandler
import fcntl
import json
import os
import runpy
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from .. import _faultpoints
from ..env import launched_rank, read_elastic_env
from ..errors import InvalidArgument
from ._actions import Fault, faults_from_json
from ._chaos import FAULT_LOG_VARIABLE, FAULTS_VARIABLE, STACK_SIGNAL
from .faults import arm_faults

_MEMBER_POINT = "elastic:member"  # which a worker reaches when it has become a member


def current_worker(environ: Mapping[str, str] = os.environ) -> tuple[int, int]:
    """Return the rank, as the launcher numbers ranks, and the incarnation of this process."""
    elastic = read_elastic_env(environ)
    if elastic is not None:
        rank, _, incarnation = elastic.worker.partition(".")
        return int(rank), int(incarnation)
    launched = launched_rank(environ)
    return (0, 0) if launched is None else (launched.rank, launched.restart_count)


class FaultLog:
    """What happened in all workers of a run: a file with a line of JSON per event.

    A worker locks the file while it decides whether to fire a fault, so that one with `once` fires
    in one worker only.
    """

    def __init__(self, path: str, worker: str, faults: Sequence[Fault]) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._worker = worker
        self._faults = faults  # those of all workers
        self._points: set[str] = set()
        self._write(started=os.getpid())

    def _write(self, **event: Any) -> None:
        # In one call, so that lines are not interleaved.
        line = {"time": time.monotonic(), "worker": self._worker, **event}
        os.write(self._file, f"{json.dumps(line)}\n".encode())

    def reach(self, point: str) -> None:
        """Note a point at the first time that it is reached."""
        if point not in self._points:
            self._points.add(point)
            self._write(reached=point)

    def may_fire(self, fault: Fault) -> bool:
        """Return whether a fault fires now, and note that it does."""
        (number,) = (i for i, each in enumerate(self._faults) if each is fault)
        # The lock belongs to the open file, which forked loader workers share. So it is released
        # before the action, and not by the end of this process.
        fcntl.flock(self._file, fcntl.LOCK_EX)
        try:
            fires = not fault.needs_log or self._is_due(number)
            if fires:
                self._write(fired=number)
            return fires
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)

    def _is_due(self, number: int) -> bool:
        fault = self._faults[number]
        text = os.pread(self._file, os.fstat(self._file).st_size, 0).decode()
        events = [json.loads(line) for line in text.splitlines()]
        if fault.once and any(event.get("fired") == number for event in events):
            return False
        return len(self._members(events) - {self._worker}) >= fault.survivors

    def _members(self, events: Iterable[Mapping[str, Any]]) -> set[str]:
        """Return the workers that became members and have neither been killed nor replaced."""
        newest: dict[str, str] = {}  # by rank
        members: set[str] = set()
        for event in events:
            worker = event["worker"]
            newest[worker.partition(".")[0]] = worker
            if event.get("reached") == _MEMBER_POINT:
                members.add(worker)
            elif "fired" in event and self._faults[event["fired"]].action.is_fatal:
                members.discard(worker)
        return members & {*newest.values()}


def run_script(script: str, args: list[str]) -> None:
    """Run a script as ``python script args...`` would."""
    sys.argv[:] = [script, *args]
    if not sys.flags.safe_path:
        sys.path[0] = os.path.dirname(os.path.realpath(script))
    runpy.run_path(script, run_name="__main__")


def main() -> None:
    """Arm the faults of this worker and run the script."""
    if len(sys.argv) < 2:
        raise InvalidArgument("usage: python -m phalanx.testing._faulty_worker SCRIPT [ARGS]...")
    faulthandler.register(STACK_SIGNAL, all_threads=True)
    every = faults_from_json(os.environ.get(FAULTS_VARIABLE, "[]"))
    rank, incarnation = current_worker()
    faults = [fault for fault in every if fault.applies_to(rank, incarnation)]
    path = os.environ.get(FAULT_LOG_VARIABLE)
    if path is None and any(fault.needs_log for fault in faults):
        raise InvalidArgument(f"faults with once or survivors need a file in {FAULT_LOG_VARIABLE}")
    with ExitStack() as stack:
        may_fire = None
        # Without faults nothing is armed: that would change the path of group calls.
        if path is not None and every:
            log = FaultLog(path, f"{rank}.{incarnation}", every)
            may_fire, note = log.may_fire, log.reach  # one object, by which it is disarmed
            _faultpoints.arm(note)
            stack.callback(_faultpoints.disarm, note)
        stack.enter_context(arm_faults(faults, may_fire=may_fire))
        run_script(sys.argv[1], sys.argv[2:])


if __name__ == "__main__":
    main()
