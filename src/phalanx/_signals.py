"""Names of signals, and the exit code of preempted ranks. Imports no torch."""

from __future__ import annotations

import signal

STOPPED = 75
"""Exit code of a rank that saved a checkpoint on request; EX_TEMPFAIL: run it again."""
STOPPED_PREFIX = "stopped on request"
"""Start of the last line that such a rank prints."""


def signal_name(number: int) -> str:
    """Return a signal's name: ``SIGTERM``, ``signal 35``."""
    try:
        return signal.Signals(number).name
    except ValueError:  # most real-time signals have no name
        return f"signal {number}"
