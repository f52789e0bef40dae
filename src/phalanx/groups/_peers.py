"""The processes behind the ranks of a group, and whether they are alive.

A rank publishes its host, pid and start time when the group forms. On the same machine that is
enough to tell at any later time, without asking it, whether the process still exists: a pid
together with its start time is never reused. Where nothing can be known, a process counts as
alive.
"""

from __future__ import annotations

import os
import socket
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Member:
    """The process behind one rank."""

    host: str
    machine: str
    """Tells machines (and pid namespaces) apart; pids mean something only within one."""
    pid: int
    started: str
    """When the process started, in the kernel's own clock."""

    @classmethod
    def here(cls) -> Member:
        """Describe the calling process."""
        pid = os.getpid()
        return cls(
            host=socket.gethostname(),
            machine=_machine_id(),
            pid=pid,
            started=_process_status(pid)[0],
        )

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Member:
        """Read what `to_json` wrote."""
        return cls(**data)

    def to_json(self) -> dict[str, Any]:
        """Write it down as plain data."""
        return asdict(self)

    @property
    def is_here(self) -> bool:
        """Whether the process is on this machine, so that its death can be seen."""
        return self.machine == _machine_id()

    @property
    def is_dead(self) -> bool:
        """Tell whether the process is provably gone; False where nobody here can know."""
        if self.machine != _machine_id():
            return False
        try:
            return not self.has_its_pid()
        except OSError:  # out of descriptors, say
            return False

    @property
    def is_stopped(self) -> bool:
        """Tell whether the process is stopped by a signal; False where nobody here can know."""
        try:
            return self.machine == _machine_id() and _process_status(self.pid) == (
                self.started,
                "T",
            )
        except OSError:
            return False

    def has_its_pid(self) -> bool:
        """Tell whether the pid, on this machine, still is this process's; raises if unreadable."""
        return _process_status(self.pid)[0] == self.started

    def __str__(self) -> str:
        return f"pid {self.pid} on {self.host}"


@dataclass(frozen=True)
class Roster:
    """The members of a group, by rank."""

    token: str
    """Unique to this group, for ever."""
    members: tuple[Member, ...] = ()

    def dead(self) -> list[int]:
        """List the ranks whose process is provably gone."""
        return [rank for rank, member in enumerate(self.members) if member.is_dead]

    def stopped(self) -> list[int]:
        """List the ranks whose process is stopped by a signal."""
        return [rank for rank, member in enumerate(self.members) if member.is_stopped]


@lru_cache(maxsize=1)
def _machine_id() -> str:
    """Name this boot of this machine and this pid namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()


def process_state(pid: int) -> str:
    """Tell in a word how a process of this machine is: ``alive``, ``stopped`` or ``dead``."""
    started, state = _process_status(pid)
    if not started:
        return "dead"
    return "stopped" if state == "T" else "alive"


def _process_status(pid: int) -> tuple[str, str]:
    """Tell when a process started and its state; two empty strings if there is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return ("", "") if Path("/proc/self").exists() else _process_status_without_proc(pid)
    # The command's name stands in parentheses and may hold anything; what follows it does not.
    fields = stat.rpartition(")")[2].split()
    state, started = fields[0], fields[19]
    return ("", "") if state in "ZX" else (started, state)  # a zombie has ended


def _process_status_without_proc(pid: int) -> tuple[str, str]:
    """Do without /proc: a pid that answers is taken for the same process."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return "", ""
    except PermissionError:
        pass
    return "unknown", ""
