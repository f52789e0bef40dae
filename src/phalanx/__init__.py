"""Data-parallel training for PyTorch.

The layers, from the top; each imports only from the layers below it::

    launch             command line, supervisor of the ranks
    testing            rank pools and fault injection for tests
    ddp, checkpoint    data-parallel modules; checkpoints
    join, mesh         uneven inputs; device meshes
    groups             process groups, rendezvous, failure detector, backends
    native             shared-memory engine in C++, if it was built
    errors, env        exceptions; the environment of a rank
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from . import errors
from ._backend_registration import register_with_torch as _register_with_torch

if TYPE_CHECKING:
    from .ddp import DDP, DistributedDataParallel
    from .join import gather_uneven, uneven

    __version__: str

__all__ = ["DDP", "DistributedDataParallel", "__version__", "errors", "gather_uneven", "uneven"]

_register_with_torch()

_MODULES = {
    "DDP": "ddp",
    "DistributedDataParallel": "ddp",
    "gather_uneven": "join",
    "uneven": "join",
}


def __getattr__(name: str) -> Any:
    # On first use: the launcher imports this package too and must not import torch. Reading the
    # version takes a third of the launcher's start.
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
