"""The native engine: shared memory for ranks on one machine.

The C++ sources are in ``native/`` at the top of the project. Without a compiler the package
installs without the engine; then `engine` is None and `why_missing` has the reason.
"""

from __future__ import annotations

from types import ModuleType

__all__ = ["engine", "why_missing"]

engine: ModuleType | None
why_missing: str

try:
    from . import _engine

    engine, why_missing = _engine, ""
except ImportError as error:
    engine, why_missing = None, f"the native engine was not built ({error})"
