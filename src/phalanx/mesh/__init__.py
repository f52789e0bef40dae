"""Device meshes: ranks with coordinates, and groups along their axes when they are used.

The names and meanings of ``torch.distributed.device_mesh``, and beyond them: a mesh is a layout to
compute with, a group is made on first use by its members only, and meshes stand on any group.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING

from .layout import FlatLayout, MeshLayout, _FlatLayout, _MeshLayout

if TYPE_CHECKING:
    from ._device_mesh import DeviceMesh, init_device_mesh
    from ._mesh_env import _mesh_resources, _MeshEnv

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

# What needs torch is imported when it is asked for: planning a mesh does without.
_LATER = {
    "DeviceMesh": "_device_mesh",
    "_MeshEnv": "_mesh_env",
    "_mesh_resources": "_mesh_env",
    "init_device_mesh": "_device_mesh",
}


def __getattr__(name: str) -> object:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_LATER[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    # What is imported to make this package is no part of it; a module of it is, once it is loaded.
    loaded = [name for name in globals() if f"{__name__}.{name}" in sys.modules]
    return sorted({*__all__, *loaded})
