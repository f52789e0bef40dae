"""Auto: the fastest engine that these ranks can use.

Shared memory if every rank has mapped the same region, which is tried, not guessed; NCCL for
CUDA devices; Gloo otherwise. All ranks come to the same answer.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import torch
from torch._C._distributed_c10d import PrefixStore, Store

from ...errors import RendezvousError, RendezvousTimeout
from .._engine import Engine
from . import gloo, nccl, refuse_options, shm

__all__ = [
    "TRAITS",
    "make",
]


def make(
    store: Store,
    rank: int,
    world_size: int,
    timeout: timedelta,
    device: torch.device,
    **kwargs: object,
) -> Engine:
    """Make the best engine that all ranks agree on."""
    del kwargs
    arguments = (rank, world_size, timeout, device)
    if device.type == "cuda":
        return nccl.make(PrefixStore("nccl", store), *arguments)
    try:
        return shm.make(PrefixStore("shm", store), *arguments)
    except RendezvousTimeout:
        raise
    except RendezvousError:  # on every rank alike: they cannot share memory
        return gloo.make(PrefixStore("gloo", store), *arguments)


def name_of(engine: Engine) -> str:
    """Tell which engine it is."""
    return "shm" if isinstance(engine, shm.ShmEngine) else str(engine.name())


TRAITS = replace(gloo.TRAITS, check_options=refuse_options("auto"), name_of=name_of)
"""What holds while it is being made; then the traits of what was chosen do."""
