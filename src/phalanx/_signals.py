"""Names of signals, and exit codes. Imports no torch."""

from __future__ import annotations

import signal

PREEMPTED_EXIT_CODE = 75
"""Exit code of a rank that stopped on request, after saving if it has a directory for that;
EX_TEMPFAIL: run it again."""
PREEMPTED_MESSAGE = "stopped on request"  # start of the last line that such a rank prints


def signal_name(number: int) -> str:
    """Return a signal's name: ``SIGTERM``, ``signal 35``."""
    try:
        return signal.Signals(number).name
    except ValueError:  # most real-time signals have no name
        return f"signal {number}"


def describe_exit(code: int) -> str:
    """Describe how a process ended: ``exit code 3``, or ``SIGKILL`` for -9."""
    return f"exit code {code}" if code >= 0 else signal_name(-code)
