"""Auto: the fastest engine that these ranks can use.

NCCL for CUDA devices; shared memory if all ranks can map the same region, which is tried, not
guessed; Gloo otherwise. All ranks choose the same.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import torch
from torch._C._distributed_c10d import PrefixStore, Store

from ...errors import RendezvousError, RendezvousTimeout
from .._engine import Engine
from . import gloo, nccl, refuse_options, shm


def make(
    store: Store, rank: int, world_size: int, timeout: timedelta, device: torch.device, **_: object
) -> Engine:
    """Create the fastest engine that all ranks can use."""
    arguments = (rank, world_size, timeout, device)
    if device.type == "cuda":
        return nccl.make(PrefixStore("nccl", store), *arguments)
    try:
        return shm.make(PrefixStore("shm", store), *arguments)
    except RendezvousTimeout:
        raise
    except RendezvousError:  # raised on every rank: they cannot share memory
        return gloo.make(PrefixStore("gloo", store), *arguments)


def name_of(engine: Engine) -> str:
    return "shm" if isinstance(engine, shm.ShmEngine) else str(engine.name())


TRAITS = replace(
    gloo.TRAITS, check_options=refuse_options("auto"), name_of=name_of, offer=shm.offer_region
)
"""Used until an engine is chosen; then the traits of that engine are."""
