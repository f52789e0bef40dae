"""The mesh that a thread works in, and what it can tell of the machines."""

from __future__ import annotations

import threading
from types import ModuleType
from typing import TYPE_CHECKING

import torch

from ..env import read_rank_env
from ..errors import InvalidState
from ..groups._factory import default_group

if TYPE_CHECKING:
    from ._device_mesh import DeviceMesh

__all__ = ["_MeshEnv", "_mesh_resources", "device_module"]


class _MeshEnv(threading.local):
    """The meshes that a thread has entered by ``with``."""

    def __init__(self) -> None:
        self.mesh_stack: list[DeviceMesh] = []

    def get_current_mesh(self) -> DeviceMesh:
        """Return the mesh that this thread entered last."""
        if not self.mesh_stack:
            raise InvalidState("this thread is in no mesh: enter one by `with mesh:`")
        return self.mesh_stack[-1]

    def get_root_mesh(self, device_mesh: DeviceMesh) -> DeviceMesh:
        """Return the mesh that a mesh was derived from."""
        return device_mesh.get_root_mesh()

    def _get_all_submeshes(self, device_mesh: DeviceMesh, mesh_dim_name: str) -> list[DeviceMesh]:
        return device_mesh.get_all_submeshes(mesh_dim_name)

    @staticmethod
    def num_devices_per_host(device_type: str) -> int:
        """Return how many devices of a type this machine has."""
        module = device_module(device_type)
        if module is None:
            raise InvalidState(f"torch knows no devices of type {device_type!r} on this machine")
        count: int = module.device_count()
        return count

    @staticmethod
    def num_hosts(device_type: str) -> int:
        """Return how many machines there are, if all have as many devices as this one."""
        return _world_size() // _MeshEnv.num_devices_per_host(device_type)


_mesh_resources = _MeshEnv()


def device_module(device_type: str) -> ModuleType | None:
    """Return torch's module for a type of device, if there is one."""
    module = getattr(torch, device_type, None)
    return module if hasattr(module, "device_count") else None


def _world_size() -> int:
    group = default_group()
    return read_rank_env().world_size if group is None else group.size()
