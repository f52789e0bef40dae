"""Engines of backends that other packages have registered with torch.

Whatever `dist.Backend.register_backend` knows can be named wherever one of our own backends can.
torch's table is read when a name is looked up, since a package may register late.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed.distributed_c10d as c10d
from torch._C._distributed_c10d import Store, _DistributedBackendOptions

from .._engine import Engine, Traits

OPTIONS = frozenset({"pg_options", "global_ranks"})


def is_plugin(name: object) -> bool:
    return isinstance(name, str) and name.upper() in c10d.Backend._plugins


def make(
    name: str,
    store: Store,
    rank: int,
    world_size: int,
    timeout: timedelta,
    device: torch.device,
    *,
    global_ranks: Sequence[int],
    pg_options: Any = None,
) -> Engine:
    """Call the function that was registered, with the arguments that torch gives it."""
    plugin = c10d.Backend._plugins[name.upper()]
    store = c10d.PrefixStore(f"{device.type}/", store)
    engine: Engine
    if not plugin.extended_api:
        engine = plugin.creator_fn(store, rank, world_size, timeout)
        return engine
    if rank == 0:
        store.set("group_id", uuid.uuid4().hex)
    request = _DistributedBackendOptions()
    request.store = store
    request.group_rank, request.group_size = rank, world_size
    request.timeout = timeout
    request.group_id = c10d.GroupName(store.get("group_id").decode())
    request.global_ranks_in_group = list(global_ranks)
    engine = plugin.creator_fn(request, pg_options)
    return engine


def factory(name: str) -> Any:
    return partial(make, name)


def traits(name: str) -> Traits:
    devices = c10d.Backend.backend_capability.get(name.lower(), ())
    return Traits(devices=frozenset(devices), own_options=OPTIONS)
