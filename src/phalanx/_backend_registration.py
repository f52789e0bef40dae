"""Registers the backend ``shm`` with ``torch.distributed``, whichever is imported first.

Nothing here imports torch, because the launcher imports this package too. If torch is not
loaded yet, an import finder is put first on ``sys.meta_path``. It reacts only to the torch
module that keeps the backend registry, delegates finding and loading to the other finders,
registers the backend once that module is loaded, and removes itself.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .groups import ProcessGroup


BACKEND = "shm"
REGISTRY_MODULE = "torch.distributed.distributed_c10d"


def register_with_torch() -> None:
    """Register the backend, now or as soon as torch is imported."""
    if REGISTRY_MODULE in sys.modules:
        # Which waits, should another thread be in the middle of it.
        _register_backend(importlib.import_module(REGISTRY_MODULE))
    elif not any(isinstance(finder, _RegistryFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _RegistryFinder())


def _register_backend(registry: ModuleType) -> None:
    if BACKEND not in registry.Backend.backend_list:  # somebody else's of that name stays
        registry.Backend.register_backend(BACKEND, _make_group, extended_api=True, devices=["cpu"])


def _make_group(asked: Any, options: Any) -> ProcessGroup:
    """Make a group for torch; what that takes is not imported before."""
    from .groups._factory import make_for_torch

    return make_for_torch(BACKEND, asked, options)


class _RegistryFinder:
    """Finds the module of torch that keeps the backends, as the other finders do."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Have others find the module, and see to it that we hear when it is there."""
        if fullname != REGISTRY_MODULE:
            return None
        others = [f for f in sys.meta_path if f is not self and hasattr(f, "find_spec")]
        found = (finder.find_spec(fullname, path, target) for finder in others)
        spec = next((each for each in found if each is not None), None)
        if spec is not None and spec.loader is not None:
            spec.loader = _NotifyingLoader(spec.loader, self._loaded)  # type: ignore[assignment]
        return spec

    def _loaded(self, registry: ModuleType) -> None:
        _register_backend(registry)
        with suppress(ValueError):
            sys.meta_path.remove(self)


class _NotifyingLoader:
    """Loads a module as its own loader does, and tells when that is done."""

    def __init__(self, own: Any, tell: Callable[[ModuleType], None]) -> None:
        self._own = own
        self._tell = tell

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)

    def exec_module(self, module: ModuleType) -> None:
        """Run the module's code."""
        # From here on nobody can tell that the module was not loaded in the ordinary way.
        module.__loader__ = self._own
        if module.__spec__ is not None:
            module.__spec__.loader = self._own
        self._own.exec_module(module)
        self._tell(module)
