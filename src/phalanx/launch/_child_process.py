"""A process that the launcher has started: a rank or the store.

Each one leads a session of its own, so whatever it starts is found by its process group. A thread
waits for its exit but does not reap it. Only the supervisor's thread does, so the pid of a child
that has not been reaped there is never that of another process.
"""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import NamedTuple

from .._processes import read_stat
from ._error_reports import ErrorReportFilter
from ._outcome import RankExit
from ._worker_channel import WorkerChannel

UNKNOWN_EXIT_CODE = 255


@dataclass(frozen=True, eq=False)
class ChildProcess:
    """A rank or the store; leader of its own session and process group."""

    rank: int | None
    process: subprocess.Popen[bytes]
    reports: ErrorReportFilter
    channel: WorkerChannel | None = None
    """To the worker of an elastic run."""

    @property
    def has_exited(self) -> bool:  # processes that it started may still run
        return self.process.returncode is not None

    def watch(self, put: Callable[[ProcessExited], None]) -> None:
        """Put an event when the process has exited."""

        def wait() -> None:
            if hasattr(os, "waitid"):
                # If the program ignores SIGCHLD, the kernel reaps children itself.
                with suppress(ChildProcessError):
                    os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT)
            else:  # macOS
                self.process.wait()
            put(ProcessExited(self, time.monotonic()))

        name = "store" if self.rank is None else f"rank {self.rank}"
        threading.Thread(target=wait, name=f"phalanx-wait-{name}", daemon=True).start()

    def reap(self) -> int:
        """Return the exit code, negative for the number of a signal. It must have exited."""
        if hasattr(os, "waitid"):
            try:
                os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT)
            except ChildProcessError:
                # The program ignores SIGCHLD. It is not known whether the process succeeded.
                self.process.wait()
                return UNKNOWN_EXIT_CODE
        return self.process.wait()

    def reap_adopted(self) -> None:
        """Reap what the process has left to this one, if this one is PID 1 of a container."""
        if os.getpid() != 1:
            return
        group = self.process.pid
        with suppress(ChildProcessError):  # there are none
            while True:
                found = os.waitid(os.P_PGID, group, os.WEXITED | os.WNOHANG | os.WNOWAIT)
                # The leader is reaped elsewhere. It may be another rank: the id may be reused.
                if found is None or found.si_pid == group:
                    return
                os.waitid(os.P_PID, found.si_pid, os.WEXITED)

    def send(self, number: int) -> None:
        """Signal the process, unless it has exited."""
        if not self.has_exited:
            with suppress(ProcessLookupError):
                os.kill(self.process.pid, number)

    def send_to_group(self, number: int) -> bool:
        """Signal the process and all that it started; return whether there are any."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)
            return True
        return False


class ProcessExited(NamedTuple):
    """The event that a child has exited."""

    child: ChildProcess
    at: float  # on the monotonic clock


class RecordedExit(NamedTuple):
    """How a child ended, and its output, which may not have been read yet."""

    result: RankExit
    reports: ErrorReportFilter

    def with_output(self) -> RankExit:
        """Return how it ended, with the output so far if it did not succeed."""
        if not self.result.code and not self.result.reason:
            return self.result
        return replace(self.result, final_output=self.reports.final_output())


def with_orphans(children: Iterable[ChildProcess]) -> list[ChildProcess]:
    """Return the children that exited while a process that they started still runs."""
    exited = {c.process.pid: c for c in children if c.has_exited and c.send_to_group(0)}
    if not exited:
        return []
    try:
        pids = [int(name) for name in os.listdir("/proc") if name.isdecimal()]
    except OSError:  # there is no descriptor left, or it is not mounted
        pids = []
    if not pids:
        return list(exited.values())
    living, reused = set(), set()
    for pid in pids:
        with suppress(OSError):
            stat = read_stat(pid)
            if stat.group in exited and not stat.has_exited:
                living.add(stat.group)
                # The leaders have exited. If one exists, the kernel has reused its id.
                if pid == stat.group:
                    reused.add(stat.group)
    for group in exited.keys() - living:  # all have exited, but some are not reaped
        exited[group].reap_adopted()
    return [exited[group] for group in sorted(living - reused)]
