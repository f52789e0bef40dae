"""All processes of a run, found by a variable of their environment.

The variable is inherited by whatever the run starts, also by processes that have lost their parent
or changed their session, so this finds what a supervisor has overlooked. A process is signalled
through a pidfd that was opened before its environment was read: a pid that was reused meanwhile is
never hit.
"""

from __future__ import annotations

import os
import signal
import time
import uuid
from contextlib import suppress
from pathlib import Path

_VARIABLE = "PHALANX_FAULT_RUN"
_PROC = Path("/proc")
_KILL_POLL_INTERVAL = 0.02  # seconds
_MAX_THREADS = 24  # of a process, in a report


class MarkedProcesses:
    """The processes that were started with the variables of this object, and what they started."""

    def __init__(self) -> None:
        self.variables = {_VARIABLE: uuid.uuid4().hex}
        """What to add to the environment of the first process."""
        self._mark = f"{_VARIABLE}={self.variables[_VARIABLE]}".encode()

    def find(self) -> dict[int, str]:
        """Return the command lines of the living processes by pid."""
        pids = [int(entry.name) for entry in _PROC.iterdir() if entry.name.isdecimal()]
        return {pid: _command_line(pid) for pid in sorted(pids) if self._has(pid)}

    def _has(self, pid: int) -> bool:
        try:
            # A zombie has no environment any more.
            return self._mark in (_PROC / str(pid) / "environ").read_bytes().split(b"\0")
        except OSError:
            return False

    def open(self, pid: int) -> int | None:
        """Return a pidfd, if the process is alive and of this run."""
        try:
            descriptor = os.pidfd_open(pid)
        except OSError:
            return None
        if self._has(pid):
            return descriptor
        os.close(descriptor)
        return None

    def catches(self, pid: int, number: int) -> bool:
        """Return whether a process has a handler for a signal, which may otherwise be fatal."""
        status = _status(_PROC / str(pid))
        return bool(int(status.get("SigCgt", "0"), 16) >> (number - 1) & 1)

    def send(self, pid: int, number: int) -> bool:
        """Send a signal; return whether the process was alive and of this run."""
        descriptor = self.open(pid)
        if descriptor is None:
            return False
        try:
            signal.pidfd_send_signal(descriptor, number)
        except ProcessLookupError:
            return False
        finally:
            os.close(descriptor)
        return True

    def kill_all(self, *, timeout: float) -> None:
        """Kill every process of the run, also those that are being started meanwhile."""
        deadline = time.monotonic() + timeout
        while (found := self.find()) and time.monotonic() < deadline:
            for pid in found:
                self.send(pid, signal.SIGKILL)
            time.sleep(_KILL_POLL_INTERVAL)

    def report(self) -> str:
        """Describe what every thread of the run waits for, as far as the kernel tells."""
        lines: list[str] = []
        for pid, command in self.find().items():
            lines.append(f"process {pid}: {command}")
            threads = sorted((_PROC / str(pid) / "task").glob("[0-9]*"), key=lambda t: int(t.name))
            for thread in threads[:_MAX_THREADS]:
                lines += _describe_thread(thread)
            if len(threads) > _MAX_THREADS:
                lines.append(f"  and {len(threads) - _MAX_THREADS} more threads")
        return "\n".join(lines)


def _describe_thread(thread: Path) -> list[str]:
    status = _status(thread)
    blocked = status.get("SigBlk", "")
    head = f"  thread {thread.name} {status.get('Name', '')}: {status.get('State', 'gone')}"
    waits = _read(thread / "wchan")
    head += f", in {waits}" if waits not in ("", "0") else ""
    head += f", blocks signals {blocked}" if blocked.strip("0") else ""
    # Only root may read the stack.
    return [head, *(f"    {line}" for line in _read(thread / "stack").splitlines())]


def _status(process: Path) -> dict[str, str]:
    pairs = (line.partition(":") for line in _read(process / "status").splitlines())
    return {name: value.strip() for name, _, value in pairs}


def _read(path: Path) -> str:
    with suppress(OSError):
        return path.read_text(errors="replace").strip()
    return ""


def _command_line(pid: int) -> str:
    return _read(_PROC / str(pid) / "cmdline").replace("\0", " ").strip()
