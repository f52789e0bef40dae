"""Kills the ranks if the launcher dies, for example by SIGKILL.

Run as a script by the launcher, which holds the other end of stdin. The line ``+123`` adds
process group 123, ``=123`` adds the store, which ignores SIGTERM and is killed when the others have
ended, ``-123`` removes either. End of file means that the launcher is dead. It may have died
between starting a process and adding it, so its children are also looked for: leaders of
sessions that have the job's mark in their environment, while their parent does not. What they have
started themselves inherits the mark from them.

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
    stores: set[int] = set()
    for line in sys.stdin:
        group = int(line[1:])
        if line[0] == "-":
            groups.discard(group)
            stores.discard(group)
        else:
            (stores if line[0] == "=" else groups).add(group)
    deadline = time.monotonic() + float(sys.argv[1])
    time.sleep(2 * POLL_INTERVAL)  # one that was being started has its own environment by then
    groups = signal_groups((groups | find_children(sys.argv[2])) - stores, signal.SIGTERM)
    while groups and time.monotonic() < deadline:
        time.sleep(POLL_INTERVAL)
        groups = signal_groups(groups, 0)
    signal_groups(groups | stores, signal.SIGKILL)


def find_children(mark: str) -> set[int]:
    """Return the processes that a launcher with this mark has started."""
    names = os.listdir("/proc") if os.path.isdir("/proc") else []
    marked = {int(name) for name in names if name.isdecimal() and has_mark(int(name), mark)}
    found = set()
    for pid in marked:
        try:
            with open(f"/proc/{pid}/stat", "rb") as stat:
                # The command name before this is in parentheses and may contain anything.
                _, parent, _, session = stat.read().rpartition(b")")[2].split()[:4]
        except OSError:  # it is gone
            continue
        if int(session) == pid and int(parent) not in marked:
            found.add(pid)
    return found


def has_mark(pid: int, mark: str) -> bool:
    """Return whether the environment of a process has a variable of this value."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as environ:
            return mark.encode() in environ.read().split(b"\0")
    except OSError:  # not ours, or gone
        return False


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
