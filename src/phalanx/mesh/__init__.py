"""Device meshes: ranks with coordinates, and process groups along their axes.

The API of ``torch.distributed.device_mesh``. A mesh is a layout of constant size, may be made on
any group, and forms the group of an axis on first use, by its members only.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING

from .layout import FlatLayout, MeshLayout, _FlatLayout, _MeshLayout

if TYPE_CHECKING:
    from ._device_mesh import DeviceMesh, _mesh_resources, _MeshEnv, init_device_mesh

__all__ = [
    "DeviceMesh",
    "FlatLayout",
    "MeshLayout",
    "_FlatLayout",
    "_MeshEnv",
    "_MeshLayout",
    "_mesh_resources",
    "init_device_mesh",
]

# Imported on access, since they need torch and `phalanx mesh` does not.
_LAZY = ("DeviceMesh", "_MeshEnv", "_mesh_resources", "init_device_mesh")


def __getattr__(name: str) -> object:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module("._device_mesh", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    # Loaded submodules, but not what this file imports.
    loaded = [name for name in globals() if f"{__name__}.{name}" in sys.modules]
    return sorted({*__all__, *loaded})
