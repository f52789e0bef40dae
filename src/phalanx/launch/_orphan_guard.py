"""Kills the ranks if the launcher dies, for example by SIGKILL.

Run as a script by the launcher, which holds the other end of stdin. The line ``+123`` adds
process group 123, ``-123`` removes it. End of file means that the launcher is dead.

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
    groups = signal_groups(groups, signal.SIGTERM)
    while groups and time.monotonic() < deadline:
        time.sleep(POLL_INTERVAL)
        groups = signal_groups(groups, 0)
    signal_groups(groups, signal.SIGKILL)


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
