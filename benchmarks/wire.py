"""How many bytes this process sends, counted where they leave it.

The kernel keeps count for every TCP connection. Adding up over those of this process gives what a
rank really sends, whatever algorithm the engine chose and whatever headers it adds; a formula would
repeat what we believe, and the counters of the loopback interface have everybody's bytes in them.
What TCP adds itself (its headers, acknowledgements, what it sends again) is not counted.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import struct
from collections.abc import Mapping
from pathlib import Path

__all__ = ["Counts", "counts", "sent_since"]

# Offsets in Linux's `struct tcp_info`, which only ever grows at its end.
_NOT_YET_SENT = struct.Struct("@144xI")
_SENT_AND_AGAIN = struct.Struct("@200xQQ")


Counts = Mapping[int, int]


def counts() -> Counts | None:
    """Tell what was sent over every connection of this process; None where nobody counts."""
    if not hasattr(socket, "TCP_INFO"):
        return None
    try:
        descriptors = [int(path.name) for path in Path("/proc/self/fd").iterdir()]
    except OSError:
        return None
    found: dict[int, int] = {}
    for descriptor in descriptors:
        with contextlib.suppress(OSError):  # not TCP, or closed meanwhile
            status = os.fstat(descriptor)
            if stat.S_ISSOCK(status.st_mode):
                told = _tcp_info(descriptor)
                if len(told) < _SENT_AND_AGAIN.size:
                    return None  # older than Linux 4.19
                found[status.st_ino] = _written(told)
    return found


def sent_since(before: Counts | None) -> int | None:
    """Tell how many bytes were sent since then, over connections that are still there."""
    now = counts()
    if before is None or now is None:
        return None
    return sum(count - before.get(connection, 0) for connection, count in now.items())


def _tcp_info(descriptor: int) -> bytes:
    # A copy of the descriptor, for closing this object must not close the engine's.
    with socket.socket(fileno=os.dup(descriptor)) as connection:
        return connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)


def _written(told: bytes) -> int:
    """Tell how many bytes a program has written: sent once, or waiting for it."""
    (waiting,) = _NOT_YET_SENT.unpack_from(told)
    sent, again = _SENT_AND_AGAIN.unpack_from(told)
    return int(sent - again + waiting)
