"""NCCL: torch's engine for CUDA devices."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from ...errors import InvalidState, UnknownOption
from .._engine import Engine, Traits


def apply_options(target: object, options: dict[str, object]) -> None:
    """Set options by name; raises for a name that the target does not have."""
    for name, value in options.items():
        if not hasattr(target, name):
            raise UnknownOption(f"nccl has no option {name!r}; see ProcessGroupNCCL.Options")
        setattr(target, name, value)


def check_options(options: dict[str, object]) -> None:
    """Raise for unknown options, and if torch has no NCCL."""
    if not dist.is_nccl_available():
        raise InvalidState(
            "this build of torch has no NCCL. Use backend 'gloo', or install torch with CUDA"
        )
    apply_options(dist.ProcessGroupNCCL.Options(), options)


def make(
    store: Store, rank: int, world_size: int, timeout: timedelta, device: torch.device, **opts: Any
) -> Engine:
    """Connect one device to its peers."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    apply_options(options, opts)
    engine = dist.ProcessGroupNCCL(store, rank, world_size, options)
    engine._set_sequence_number_for_group()
    engine.eager_connect_single_device(device)
    return engine


TRAITS = Traits(
    averages=frozenset({"allreduce", "reduce", "reduce_scatter", "reduce_scatter_single"}),
    averages_all_types=True,
    premultiplies=True,
    alltoall_lists=True,
    waits_on_stream=True,
    check_options=check_options,
)
