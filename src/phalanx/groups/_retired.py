"""Sees to it that no engine is destroyed while a call of its is under way.

Gloo cannot be interrupted: destroying it blocks the whole interpreter until its last call times
out. So the engine of a group that ends early is put aside here and let go when its calls have
ended; and what is busy when the interpreter exits is left to the operating system, together with
the threads that wait for it.
"""

from __future__ import annotations

import atexit
import ctypes
import threading
import weakref

from .. import native
from ._engine import Engine
from ._health import Health

__all__ = ["guard", "release", "retire"]

_lock = threading.Lock()
_guarded: weakref.WeakKeyDictionary[Health, list[Engine]] = weakref.WeakKeyDictionary()
_retired: list[tuple[Health, list[Engine]]] = []


def guard(health: Health, engine: Engine) -> None:
    """Do not let the exit of the interpreter wait for calls of this engine, one of the group's."""
    with _lock:
        if not _guarded:
            atexit.unregister(_abandon_busy)
            atexit.register(_abandon_busy)
        _guarded.setdefault(health, []).append(engine)
    if hasattr(engine, "rest"):
        # The group keeps the memory of calls that nobody waits for; before it goes, at the exit of
        # the interpreter too, nobody may be working on that any more.
        weakref.finalize(health, _rest, weakref.ref(engine))


def _rest(engine: weakref.ref[Engine]) -> None:
    alive = engine()
    if alive is not None:
        alive.rest()


def release(health: Health, engine: Engine) -> None:
    """Let go of one of a group's engines; nothing of its is under way."""
    with _lock:
        kept = _guarded.get(health, [])
        kept[:] = [other for other in kept if other is not engine]


def retire(health: Health) -> None:
    """Let go of a group's engines as soon as their calls have ended."""
    with _lock:
        engines = _guarded.pop(health, [])
        _retired[:] = [(old, kept) for old, kept in _retired if old.is_busy()]
        if health.is_busy():
            _retired.append((health, engines))
        else:
            # torch holds on to groups that have ended; the memory of their engines is not to stay.
            health.let_go()


def _abandon_busy() -> None:
    # Some thread may wait for a call when the interpreter goes away, in torch's C++ or ours, and
    # come back to an interpreter that is no more. It must not take the process with it.
    if native.engine is not None:
        native.engine.park_dying_threads()
    with _lock:
        for health, engines in [*_guarded.items(), *_retired]:
            if health.is_busy():
                for engine in engines:
                    ctypes.pythonapi.Py_IncRef(ctypes.py_object(engine))
