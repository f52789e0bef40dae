"""Sees to it that no engine is destroyed while a call of its is under way.

Gloo cannot be interrupted: destroying it blocks the whole interpreter until its last call times
out. So the engine of a group that ends early is put aside here and let go when its calls have
ended; and what is busy when the interpreter exits is left to the operating system.
"""

from __future__ import annotations

import atexit
import ctypes
import threading
import weakref

from ._engine import Engine
from ._health import Health

__all__ = ["guard", "retire"]

_lock = threading.Lock()
_guarded: weakref.WeakKeyDictionary[Health, Engine] = weakref.WeakKeyDictionary()
_retired: list[tuple[Health, Engine]] = []


def guard(health: Health, engine: Engine) -> None:
    """Do not let the exit of the interpreter wait for calls of this engine."""
    with _lock:
        if not _guarded:
            atexit.unregister(_abandon_busy)
            atexit.register(_abandon_busy)
        _guarded[health] = engine
    if hasattr(engine, "rest"):
        # The group keeps the memory of calls that nobody waits for; before it goes, at the exit of
        # the interpreter too, nobody may be working on that any more.
        weakref.finalize(health, _rest, weakref.ref(engine))


def _rest(engine: weakref.ref[Engine]) -> None:
    alive = engine()
    if alive is not None:
        alive.rest()


def retire(health: Health, engine: Engine) -> None:
    """Let go of an engine as soon as its calls have ended."""
    with _lock:
        _guarded.pop(health, None)
        _retired[:] = [(old, kept) for old, kept in _retired if old.is_busy()]
        if health.is_busy():
            _retired.append((health, engine))
        else:
            # torch holds on to groups that have ended; the memory of their engines is not to stay.
            health.let_go()


def _abandon_busy() -> None:
    with _lock:
        for health, engine in [*_guarded.items(), *_retired]:
            if health.is_busy():
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(engine))
