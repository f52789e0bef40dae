"""Work that may get stuck, on a borrowed thread, while the caller looks for trouble."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import TypeVar

from ._patient import borrow_thread

__all__ = ["in_background"]

T = TypeVar("T")

LOOK_EVERY = 0.25  # seconds


def in_background(work: Callable[[], T], look: Callable[[], None]) -> T:
    """Run `work` on a borrowed thread and return what it does; `look` may raise meanwhile."""
    done: list[T] = []
    errors: list[BaseException] = []
    ended = threading.Event()
    # Threads inherit the cores that they may run on. Those of an engine that is made here are to
    # have the caller's, not those that the borrowed thread happened to be made with.
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None

    def run() -> None:
        try:
            if cores is not None:
                os.sched_setaffinity(0, cores)
            done.append(work())
        except BaseException as error:  # noqa: BLE001 - raised again by whoever waits
            errors.append(error)
        finally:
            ended.set()

    borrow_thread(run)
    while not ended.wait(LOOK_EVERY):
        look()
    if errors:
        raise errors[0]
    return done[0]
