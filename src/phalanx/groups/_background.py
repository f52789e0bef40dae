"""Work that may get stuck, on a borrowed thread, while the caller looks for trouble."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import TypeVar

from ._patient import borrow_thread

__all__ = ["in_background", "is_given_up"]

T = TypeVar("T")

LOOK_EVERY = 0.25  # seconds


class _Job(threading.local):
    """What the calling thread does for another."""

    given_up: threading.Event | None = None


_job = _Job()


def is_given_up() -> bool:
    """Whether this thread works for a caller that waits no longer; to be asked between waits."""
    return _job.given_up is not None and _job.given_up.is_set()


def in_background(work: Callable[[], T], look: Callable[[], None]) -> T:
    """Run `work` on a borrowed thread and return what it does; `look` may raise meanwhile."""
    given_up = threading.Event()
    done: list[T] = []
    errors: list[BaseException] = []
    ended = threading.Event()
    # Threads inherit the cores that they may run on. Those of an engine that is made here are to
    # have the caller's, not those that the borrowed thread happened to be made with.
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None

    def run() -> None:
        _job.given_up = given_up
        try:
            if cores is not None:
                os.sched_setaffinity(0, cores)
            done.append(work())
        except BaseException as error:  # noqa: BLE001 - raised again by whoever waits
            errors.append(error)
        finally:
            _job.given_up = None
            ended.set()

    borrow_thread(run)
    try:
        while not ended.wait(LOOK_EVERY):
            look()
    except BaseException:
        given_up.set()
        raise
    if errors:
        raise errors[0]
    return done[0]
