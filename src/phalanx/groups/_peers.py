"""The processes behind the ranks of a group, and whether they are alive.

A rank publishes its host, pid and start time when the group forms. On the same machine that is
enough to check at any later time whether the process still exists: a pid together with its start
time is never reused. A process of which nothing can be known counts as alive.
"""

from __future__ import annotations

import os
import signal
import socket
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from .._processes import read_stat


@dataclass(frozen=True)
class PeerProcess:
    """The process behind one rank."""

    host: str
    machine: str  # identifies the machine and pid namespace, within which pids are unique
    pid: int
    started: str  # the start time of the process, by the kernel's clock

    @classmethod
    def current(cls) -> PeerProcess:
        pid = os.getpid()
        return cls(socket.gethostname(), _machine_id(), pid, _process_status(pid)[0])

    @property
    def is_on_this_machine(self) -> bool:
        """Whether the process is on this machine, so that its death can be detected."""
        return self.machine == _machine_id()

    @property
    def is_dead(self) -> bool:
        try:
            return self.is_on_this_machine and not self.has_its_pid()
        except OSError:  # out of descriptors, for example
            return False

    @property
    def is_stopped(self) -> bool:
        try:
            return self.is_on_this_machine and _process_status(self.pid) == (self.started, "T")
        except OSError:
            return False

    def has_its_pid(self) -> bool:
        """Whether the pid on this machine is still this process's; raises if unreadable."""
        return _process_status(self.pid)[0] == self.started

    def kill(self) -> None:
        """Kill the process, if it is on this machine and of this user."""
        if not self.is_on_this_machine:
            return
        with suppress(ProcessLookupError, PermissionError):
            descriptor = os.pidfd_open(self.pid)
            try:
                if self.has_its_pid():  # checked after the open: a pid may have been reused before
                    signal.pidfd_send_signal(descriptor, signal.SIGKILL)
            finally:
                os.close(descriptor)

    def __str__(self) -> str:
        return f"pid {self.pid} on {self.host}"


@dataclass(frozen=True)
class Roster:
    """The processes of a group, by rank, and a unique id of the group."""

    token: str
    processes: tuple[PeerProcess, ...] = ()


@lru_cache(maxsize=1)
def _machine_id() -> str:
    """Identify this boot of this machine and this pid namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()


def process_state(pid: int) -> str:
    """Return ``alive``, ``stopped`` or ``dead`` for a process of this machine."""
    started, state = _process_status(pid)
    return "dead" if not started else "stopped" if state == "T" else "alive"


def _process_status(pid: int) -> tuple[str, str]:
    """Return the start time and state of a process; two empty strings if there is none."""
    try:
        stat = read_stat(pid)
    except (FileNotFoundError, ProcessLookupError):
        if Path("/proc/self").exists():
            return "", ""
        with suppress(PermissionError):
            try:
                os.kill(pid, 0)
            except ProcessLookupError:
                return "", ""
        return "unknown", ""  # without /proc, any process with that pid counts as the same
    return ("", "") if stat.has_exited else (stat.started, stat.state)
