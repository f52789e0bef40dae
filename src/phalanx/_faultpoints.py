"""Fault points: named points in the library at which a test can make a rank fail.

This module is at the bottom of the layers, so every layer can have fault points;
`phalanx.testing.faults` decides what happens there. A fault point reads::

    if _faultpoints.armed:
        _faultpoints.reach(f"{operation}:before")

so without faults it costs one load and one branch, and no string is formatted.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

FaultHandler = Callable[[str], None]

armed: tuple[FaultHandler, ...] = ()
"""Handlers that are called with the name of each point; replaced, never modified in place."""

_lock = threading.Lock()


def reach(name: str) -> None:
    """Call the armed handlers with the point `name`."""
    for handler in armed:
        handler(name)


def arm(handler: FaultHandler) -> None:
    """Call `handler` at every point from now on."""
    global armed  # noqa: PLW0603 - one global read is the whole cost
    with _lock:
        armed = (*armed, handler)


def disarm(handler: FaultHandler) -> None:
    """Stop calling `handler`."""
    global armed  # noqa: PLW0603
    with _lock:
        armed = tuple(each for each in armed if each is not handler)
