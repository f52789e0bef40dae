"""Chooses this rank's device before its first group is made."""

from __future__ import annotations

import os
import warnings

from ..errors import InvalidMesh
from ..groups._subgroups import ParentGroup
from ._current_mesh import device_module

__all__ = ["choose_device"]


def choose_device(device_type: str, base: ParentGroup) -> None:
    """Select the device of this rank, unless the program has used one of that type already.

    The launcher's ``LOCAL_RANK`` says which. Without it, ranks are taken to be dealt out to
    machines with equally many devices.
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
            f"{base.size} ranks cannot be dealt out evenly to machines with {count} devices of "
            f"type {device_type!r}: choose a device before making a mesh, or set LOCAL_RANK"
        )
    chosen = base.rank % count
    warnings.warn(
        f"no device was chosen for rank {base.rank} and there is no LOCAL_RANK: taking "
        f"{device_type}:{chosen}. Choose it before making a mesh, or start with a launcher",
        stacklevel=4,
    )
    module.set_device(chosen)
