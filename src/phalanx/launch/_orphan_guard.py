"""Kills the ranks if the launcher dies, for example by SIGKILL.

Run as a script by the launcher, which holds the other end of stdin. The line ``+123`` adds
process group 123, ``-123`` removes it. End of file means that the launcher is dead. It may have
died between starting a process and adding it, so processes with the job's mark in their environment
are looked for as well.

PR_SET_PDEATHSIG is not sufficient: a rank would have to request it between fork and exec, where a
process with threads must not run Python, and it does not reach processes that a rank starts.

Started with ``-I -S``: this file must import only the standard library.
"""

from __future__ import annotations

import os
import signal
import sys
import time

POLL_INTERVAL = 0.02  # seconds


def main() -> None:
    """Wait until the launcher dies, then terminate its process groups."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    groups: set[int] = set()
    for line in sys.stdin:
        change = groups.add if line[0] == "+" else groups.discard
        change(int(line[1:]))
    deadline = time.monotonic() + float(sys.argv[1])
    groups = signal_groups(groups | marked_groups(sys.argv[2]), signal.SIGTERM)
    while groups and time.monotonic() < deadline:
        time.sleep(POLL_INTERVAL)
        groups = signal_groups(groups, 0)
    # Again: one that was about to start has its own environment by now.
    signal_groups(groups | marked_groups(sys.argv[2]), signal.SIGKILL)


def marked_groups(mark: str) -> set[int]:
    """Return the process groups of processes whose environment has a variable of this value."""
    found = set()
    for name in os.listdir("/proc") if os.path.isdir("/proc") else ():
        try:
            with open(f"/proc/{name}/environ", "rb") as environ:
                if name.isdecimal() and mark.encode() in environ.read().split(b"\0"):
                    found.add(os.getpgid(int(name)))
        except OSError:  # not a process, not ours, or gone
            continue
    return found - {os.getpgid(0)}


def signal_groups(groups: set[int], number: int) -> set[int]:
    """Signal process groups and return those that exist."""
    reached = set()
    for group in groups:
        try:
            os.killpg(group, number)
            reached.add(group)
        except OSError:  # it is empty, or not ours
            continue
    return reached


if __name__ == "__main__":
    main()
