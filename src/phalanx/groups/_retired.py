"""Engines whose group is gone while a call of theirs is still under way.

Gloo cannot be interrupted: destroying it blocks the whole interpreter until its last call times
out. So an engine with calls under way is put aside here and let go when they have ended.
"""

from __future__ import annotations

import atexit
import ctypes
import threading
from typing import Any

from ._work import Work

__all__ = ["retire"]

_lock = threading.Lock()
_retired: list[tuple[Any, list[Any]]] = []


def retire(engine: Any, works: list[object]) -> None:
    """Let go of an engine as soon as its calls have ended."""
    raws = [work._raw for work in works if isinstance(work, Work)]
    with _lock:
        _retired[:] = [entry for entry in _retired if _is_busy(entry[1])]
        if _is_busy(raws):
            if not _retired:
                atexit.register(_abandon)
            _retired.append((engine, raws))


def _is_busy(raws: list[Any]) -> bool:
    return not all(raw.is_completed() for raw in raws)


def _abandon() -> None:
    """Leave to the operating system, at exit, what would make the exit hang."""
    with _lock:
        for engine, raws in _retired:
            if _is_busy(raws):
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(engine))
