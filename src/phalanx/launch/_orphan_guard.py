"""Ends the ranks if the launcher dies without doing so, for example by SIGKILL.

Run as a script by the launcher, which holds the other end of stdin. The line ``+123`` puts
process group 123 under guard, ``-123`` releases it. End of file means that the launcher is
gone.

A guard process was chosen over PR_SET_PDEATHSIG. That has to be requested in the rank itself
between fork and exec, where a process with threads must not run Python; it would need another
interpreter in front of each rank; and it does not reach what the rank has started.

Started with ``-I -S``: this file must import only the standard library.
"""

from __future__ import annotations

import os
import signal
import sys
import time


def main() -> None:
    """Wait for the launcher's end, then end its process groups."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    groups: set[int] = set()
    for line in sys.stdin:
        change = groups.add if line[0] == "+" else groups.discard
        change(int(line[1:]))
    deadline = time.monotonic() + float(sys.argv[1])
    groups = send(groups, signal.SIGTERM)
    while groups and time.monotonic() < deadline:
        time.sleep(0.02)
        groups = send(groups, 0)
    send(groups, signal.SIGKILL)


def send(groups: set[int], number: int) -> set[int]:
    """Signal these process groups and return those that exist."""
    reached = set()
    for group in groups:
        try:
            os.killpg(group, number)
            reached.add(group)
        except OSError:  # it has ended, or it is not ours
            continue
    return reached


if __name__ == "__main__":
    main()
