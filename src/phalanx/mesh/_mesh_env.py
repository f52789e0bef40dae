"""The mesh that a thread has entered, and the devices of this host.

`_mesh_resources` is the stack behind ``with mesh:``, under torch's name. `choose_device` sets this
rank's device before its first group is formed, unless the program has used a device of that type.
"""

from __future__ import annotations

import os
import threading
import warnings
from types import ModuleType
from typing import TYPE_CHECKING

import torch

from ..env import read_rank_env
from ..errors import InvalidMesh, InvalidState
from ..groups._factory import default_group
from ..groups._subgroups import ParentGroup

if TYPE_CHECKING:
    from ._device_mesh import DeviceMesh


class _MeshEnv(threading.local):
    """The meshes that a thread has entered by ``with``."""

    def __init__(self) -> None:
        self.mesh_stack: list[DeviceMesh] = []

    def get_current_mesh(self) -> DeviceMesh:
        """Return the mesh that this thread entered last."""
        if not self.mesh_stack:
            raise InvalidState("this thread has entered no mesh: use `with mesh:`")
        return self.mesh_stack[-1]

    def get_root_mesh(self, device_mesh: DeviceMesh) -> DeviceMesh:
        """Return the mesh that a mesh was derived from."""
        return device_mesh.get_root_mesh()

    def _get_all_submeshes(self, device_mesh: DeviceMesh, mesh_dim_name: str) -> list[DeviceMesh]:
        return device_mesh.get_all_submeshes(mesh_dim_name)

    @staticmethod
    def num_devices_per_host(device_type: str) -> int:
        """Return the number of devices of a type on this machine."""
        module = device_module(device_type)
        if module is None:
            raise InvalidState(f"torch has no devices of type {device_type!r} on this machine")
        count: int = module.device_count()
        return count

    @staticmethod
    def num_hosts(device_type: str) -> int:
        """Return the number of machines, if all have as many devices as this one."""
        group = default_group()
        world_size = read_rank_env().world_size if group is None else group.size()
        return world_size // _MeshEnv.num_devices_per_host(device_type)


_mesh_resources = _MeshEnv()


def device_module(device_type: str) -> ModuleType | None:
    module = getattr(torch, device_type, None)
    return module if hasattr(module, "device_count") else None


def choose_device(device_type: str, base: ParentGroup) -> None:
    """Select the device of this rank, unless the program has used one of that type already.

    It is ``LOCAL_RANK`` if the launcher sets that. Otherwise all machines are assumed to have the
    same number of devices.
    """
    module = device_module(device_type)
    if device_type == "cpu" or module is None or not base.talks or module.is_initialized():
        return
    count = module.device_count()
    if count == 0:
        return
    if "LOCAL_RANK" in os.environ:
        module.set_device(int(os.environ["LOCAL_RANK"]))
        return
    if base.size > count and base.size % count:
        raise InvalidMesh(
            f"cannot choose a device: {base.size} ranks do not divide among machines with {count} "
            f"devices of type {device_type!r}. Hint: set LOCAL_RANK, or choose a device first."
        )
    chosen = base.rank % count
    warnings.warn(
        f"rank {base.rank} has chosen no device and LOCAL_RANK is not set: using "
        f"{device_type}:{chosen}. Choose a device before making a mesh, or use a launcher",
        stacklevel=4,
    )
    module.set_device(chosen)
