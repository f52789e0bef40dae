"""What signals are called, and how a rank says that it left because of one."""

from __future__ import annotations

import signal

__all__ = ["STOPPED", "STOP_WORDS", "signal_name"]

STOPPED = 75
"""Exit code of a rank that was asked to stop and has saved its work; EX_TEMPFAIL: try again."""
STOP_WORDS = "stopped on request"
"""How such a rank's last words begin."""


def signal_name(number: int) -> str:
    """Return what people call a signal."""
    try:
        return signal.Signals(number).name
    except ValueError:  # most real-time signals have no name
        return f"signal {number}"
