"""Registration of groups in torch's tables, so that torch's APIs accept them.

torch finds a group by name in C++ (functional collectives) and by object in Python (the rank
translation of `dist.broadcast(src=...)`). Both tables are torch's; a group is added when it is
created and removed when it ends. A name that is taken gets a numeric suffix, the same on all
ranks.

The end of the module handles DTensors. torch's module for them is never imported here, only
looked up if something else has imported it.
"""

from __future__ import annotations

import inspect
import sys
import threading
import weakref
from contextlib import suppress
from itertools import count
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeGuard, cast

import torch
import torch.distributed.distributed_c10d as c10d
from torch import Tensor
from torch._C import _distributed_c10d as c10d_ext

from ._engine import Engine

if TYPE_CHECKING:
    from ._process_group import ProcessGroup


_numbers_lock = threading.Lock()
_numbers: dict[str, set[int]] = {}
"""By requested name: the suffixes that groups of this process use."""
_engine_owners: weakref.WeakSet[ProcessGroup] = weakref.WeakSet()
"""Groups whose C++ object has the engine, which torch cannot take from it when they close."""


def register_group(group: ProcessGroup, engine: Engine) -> c10d.GroupName:
    """Add a group to torch; returns its name there, unique in this process."""
    if isinstance(engine, c10d_ext.Backend):
        # Give torch's C++ code the engine, for calls that bypass the Python object.
        types = c10d_ext.ProcessGroup.BackendType
        kind = getattr(types, group.backend.upper(), types.CUSTOM)
        group._set_default_backend(kind)
        for device in sorted(group.devices):
            group._register_backend(torch.device(device), kind, engine)
        _engine_owners.add(group)
    return add_to_torch_tables(group)


def engines_owned_by_torch() -> list[Engine]:
    return [group._get_backend(torch.device(min(group.devices))) for group in _engine_owners]


def add_to_torch_tables(group: ProcessGroup) -> c10d.GroupName:
    """Add a group to torch's tables; returns its name there."""
    requested = group._given_name or group.label
    with _numbers_lock:
        # The ranks agreed on the first suffix; where they are threads, it is free only for one.
        for number in count(group._name_suffix):
            name = _numbered(requested, number)
            with suppress(RuntimeError):  # the name is taken
                c10d_ext._register_process_group(name, group)
                break
        _numbers.setdefault(requested, set()).add(number)
    c10d._world.pg_names[group] = name
    c10d._world.pg_map[group] = (group.backend, cast("c10d_ext.Store", group.get_group_store()))
    # torch's profiler asks for it when it starts.
    c10d._world.pg_backend_config[group] = ",".join(
        f"{device}:{group.backend}" for device in sorted(group.devices)
    )
    c10d._world.pg_group_ranks[group] = {
        global_rank: rank for rank, global_rank in enumerate(group.global_ranks)
    }
    tag = f"ptd:{name}"  # by which functional collectives find a group of given ranks
    c10d._world.pg_to_tag[group] = tag
    c10d._world.tags_to_pg[tag] = [group]
    return name


def next_free_suffix(requested: str) -> int:
    """Return a suffix from which on a name is free in this process.

    The greatest that any rank returns is thus free on all of them.
    """
    with _numbers_lock:
        number = max(_numbers.get(requested, ()), default=-1) + 1
        while True:
            try:
                c10d_ext._resolve_process_group(_numbered(requested, number))
            except RuntimeError:  # not even one of torch's own groups has the name
                return number
            number += 1


def _numbered(requested: str, number: int) -> c10d.GroupName:
    return c10d.GroupName(f"{requested}~{number}" if number else requested)


def unregister_group(group: ProcessGroup) -> None:
    if group not in c10d._world.pg_names:
        return
    requested = group._given_name or group.label
    with _numbers_lock:
        used = _numbers.pop(requested, set())
        used = {number for number in used if _numbered(requested, number) != group.group_name}
        if used:
            _numbers[requested] = used
    if _is_torch_destroying():
        return  # torch removes the group from its tables, and raises if they do not have it
    c10d_ext._unregister_process_group(c10d.GroupName(group.group_name))
    world = c10d._world
    world.tags_to_pg.pop(world.pg_to_tag.get(group, ""), None)
    names, configs = world.pg_names, world.pg_backend_config
    for table in (names, configs, world.pg_map, world.pg_group_ranks, world.pg_to_tag):
        table.pop(group, None)


def _is_torch_destroying() -> bool:
    """Whether ``dist.destroy_process_group`` is the caller."""
    destroy = inspect.unwrap(c10d.destroy_process_group).__code__
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not destroy:
        frame = frame.f_back
    return frame is not None


def is_dtensor(tensor: object) -> TypeGuard[Any]:
    module: Any = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def to_local(dtensor: Any) -> Tensor:
    part = dtensor.to_local()
    return cast("Tensor", part.wait() if hasattr(part, "wait") else part)  # it may be async


def from_local(part: Tensor, like: Any) -> Tensor:
    """Return the DTensor with this local tensor and the placements and shape of another."""
    layout = {"shape": like.shape, "stride": like.stride(), "run_check": False}
    whole = type(like).from_local(part, like.device_mesh, like.placements, **layout)
    return cast("Tensor", whole)
