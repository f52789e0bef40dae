"""Named points in the library at which a test may make a rank fail.

This module is at the bottom of the layers so that every layer can mark points; what happens
there is decided by `phalanx.testing.faults`. A marked point reads::

    if _faultpoints.armed:
        _faultpoints.reach(f"{operation}:before")

so a program that injects no faults pays one load and one branch, and formats no string.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

FaultHandler = Callable[[str], None]

armed: tuple[FaultHandler, ...] = ()
"""What is called with the name of every point reached; replaced, never changed in place."""

_lock = threading.Lock()


def reach(name: str) -> None:
    """Let the armed handlers act on the point `name`."""
    for handler in armed:
        handler(name)


def arm(handler: FaultHandler) -> None:
    """Call `handler` at every point from now on."""
    global armed  # noqa: PLW0603 - one global is the whole cost of a point
    with _lock:
        armed = (*armed, handler)


def disarm(handler: FaultHandler) -> None:
    """Stop calling `handler`."""
    global armed  # noqa: PLW0603
    with _lock:
        armed = tuple(each for each in armed if each is not handler)
