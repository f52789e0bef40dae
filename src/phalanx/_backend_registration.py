"""Registers the backend ``shm`` with ``torch.distributed``, in either order of import.

This module imports no torch, because the launcher imports this package too. If torch is not
loaded yet, it puts an import finder first on ``sys.meta_path``. The finder reacts only to torch's
backend registry, delegates to the other finders, registers the backend when that module has been
loaded, and removes itself.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
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
        # import_module waits if another thread is importing it.
        _register_backend(importlib.import_module(REGISTRY_MODULE))
    elif not any(isinstance(finder, _RegistryFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _RegistryFinder())


def _register_backend(registry: ModuleType) -> None:
    if BACKEND not in registry.Backend.backend_list:  # do not replace another backend
        registry.Backend.register_backend(BACKEND, _make_group, extended_api=True, devices=["cpu"])


def _make_group(request: Any, options: Any) -> ProcessGroup:
    from .groups._factory import make_for_torch

    return make_for_torch(BACKEND, request, options)


class _RegistryFinder:
    """Finds torch's backend registry through the other finders, and runs code after it."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != REGISTRY_MODULE:
            return None
        others = [f for f in sys.meta_path if f is not self and hasattr(f, "find_spec")]
        found = (finder.find_spec(fullname, path, target) for finder in others)
        spec = next((each for each in found if each is not None), None)
        loader: Any = spec and spec.loader
        if loader is not None:
            exec_module = loader.exec_module

            def exec_and_register(module: ModuleType) -> None:
                if module.__name__ == fullname:  # some loaders serve many modules
                    del loader.exec_module  # the module must look as if loaded without us
                exec_module(module)
                if module.__name__ == fullname:
                    _register_backend(module)
                    with suppress(ValueError):
                        sys.meta_path.remove(self)

            loader.exec_module = exec_and_register
        return spec
