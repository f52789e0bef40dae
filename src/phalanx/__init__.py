"""Data-parallel training for PyTorch.

The layers, from the top; each imports only from the layers below it::

    launch             command line, supervisor of the ranks
    testing            rank pools and fault injection for tests
    elastic            steps of micro-batches, with the same bits at any world size
    ddp, checkpoint    data-parallel modules; checkpoints
    join, mesh         uneven inputs; device meshes
    groups             process groups, rendezvous, failure detector, backends
    native             shared-memory engine in C++, if it was built
    errors, env        exceptions; the environment of a rank

``import torch`` registers the backend ``shm`` with ``torch.distributed`` (see `phalanx_autoload`).
Where torch's autoload is off, importing this package does, now or as soon as torch is imported. It
does not import torch, because the launcher imports it too.
"""

import sys
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any

import phalanx_autoload

from . import errors

if TYPE_CHECKING:
    from .ddp import DDP, DistributedDataParallel
    from .join import gather_uneven, uneven
    from .launch._spawn import spawn

    __version__: str

__all__ = [
    "DDP",
    "DistributedDataParallel",
    "__version__",
    "errors",
    "gather_uneven",
    "spawn",
    "uneven",
]

_MODULES = {
    "DDP": "ddp",
    "DistributedDataParallel": "ddp",
    "gather_uneven": "join",
    "spawn": "launch._spawn",
    "uneven": "join",
}
_REGISTRY_MODULE = phalanx_autoload.REGISTRY_MODULE


def __getattr__(name: str) -> Any:
    # On first use, since that imports torch. Reading the version takes a third of the launcher's
    # start.
    if name == "__version__":
        from importlib.metadata import version

        return version("phalanx")
    if name in _MODULES:
        return getattr(import_module(f".{_MODULES[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    # Only public names and loaded submodules, not what this module imports.
    loaded = [name for name in globals() if f"{__name__}.{name}" in sys.modules]
    return sorted({*__all__, *loaded})


class _RegistryFinder:
    """Registers the backend when torch's backend registry has been imported, then removes itself.

    It is first on ``sys.meta_path``, and finds that one module through the other finders.
    """

    def find_spec(self, fullname: str, *path_and_target: Any) -> ModuleSpec | None:
        if fullname != _REGISTRY_MODULE:
            return None
        others = [f for f in sys.meta_path if f is not self and hasattr(f, "find_spec")]
        found = (finder.find_spec(fullname, *path_and_target) for finder in others)
        spec = next((each for each in found if each is not None), None)
        if spec is not None and hasattr(spec.loader, "exec_module"):
            spec.loader = _RegistryLoader(spec.loader)  # type: ignore[assignment]
        return spec


class _RegistryLoader:
    """Loads a module by its own loader, which may be shared or immutable, then registers."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        phalanx_autoload.register(module)
        sys.meta_path[:] = [each for each in sys.meta_path if not isinstance(each, _RegistryFinder)]


def _register_with_torch() -> None:
    if _REGISTRY_MODULE in sys.modules:
        # import_module waits if another thread is importing it.
        phalanx_autoload.register(import_module(_REGISTRY_MODULE))
    elif not any(isinstance(finder, _RegistryFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _RegistryFinder())


_register_with_torch()
