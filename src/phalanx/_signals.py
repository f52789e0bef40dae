"""Names of signals, and the exit status of a rank that stopped on request.

The launcher reads both without importing torch.
"""

from __future__ import annotations

import signal

STOPPED = 75
"""Exit code of a rank that was asked to stop and has saved its work; EX_TEMPFAIL: try again."""
STOPPED_PREFIX = "stopped on request"
"""How such a rank's last words begin."""


def signal_name(number: int) -> str:
    """Return what people call a signal."""
    try:
        return signal.Signals(number).name
    except ValueError:  # most real-time signals have no name
        return f"signal {number}"
