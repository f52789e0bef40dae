"""Data-parallel training for PyTorch.

The layers, from the top; each imports only from those below it::

    launch      starts ranks: phalanx run, phalanx doctor
    testing     ranks for tests, and faults for them
    ddp         data-parallel modules: wrapper, reducer, buckets
    checkpoint  barriers, saves that are all or nothing, a folder of them
    join        uneven inputs: ranks out of data leave, or keep others company
    mesh        device meshes: layouts, and groups when they are used
    groups      process groups as objects; one file per backend
    native      the shared-memory engine, where it could be built
    errors, env what goes wrong, and what the launcher says
"""

import sys
from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from . import errors
from ._backend_registration import register_with_torch as _register_with_torch

if TYPE_CHECKING:
    from .ddp import DDP, DistributedDataParallel
    from .join import gather_uneven, uneven

__all__ = ["DDP", "DistributedDataParallel", "__version__", "errors", "gather_uneven", "uneven"]

__version__ = version("phalanx")

_register_with_torch()


_homes = {
    "DDP": "ddp",
    "DistributedDataParallel": "ddp",
    "gather_uneven": "join",
    "uneven": "join",
}


def __getattr__(name: str) -> Any:
    # On first use: the launcher imports this package too, and has no need of torch.
    if name in _homes:
        return getattr(import_module(f".{_homes[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    # What is imported to make this package is no part of it; a module of it is, once it is loaded.
    loaded = [name for name in globals() if f"{__name__}.{name}" in sys.modules]
    return sorted({*__all__, *loaded})
