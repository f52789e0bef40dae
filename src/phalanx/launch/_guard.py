"""Ends the ranks when the launcher can no longer do it itself: it was killed, say.

Run as a script by the launcher, which holds the other end of our stdin. ``+123`` on it says that
process group 123 is in our care, ``-123`` that it has ended. End of file, unannounced, means that
the launcher is gone.

A watching process was chosen over asking the kernel to signal each rank when its parent dies. That
request has to be made in the rank itself, between fork and exec, where a process with threads may
not run Python; it would need another interpreter in front of each rank; and it reaches the rank
but none of the processes that the rank has started. The guard is started once, in the background,
and costs the ranks nothing.
"""

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
