"""What the kernel says of a process, in ``/proc/<pid>/stat``."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple


class ProcessStat(NamedTuple):
    """A process of this machine at one instant."""

    state: str
    """``T`` if it is stopped, ``Z`` or ``X`` if it has exited; see proc(5)."""
    group: int
    started: str
    """When it started, by the kernel's clock: with the pid it identifies the process."""

    @property
    def has_exited(self) -> bool:
        """Whether its main thread has ended; others may still be freeing what it has."""
        return self.state in ("Z", "X", "x")


def read_stat(pid: int) -> ProcessStat:
    """Read the state of a process; raises OSError if there is none."""
    stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    # The command is in parentheses and may contain anything, so split after the last one.
    fields = stat.rpartition(")")[2].split()
    return ProcessStat(fields[0], int(fields[2]), fields[19])
