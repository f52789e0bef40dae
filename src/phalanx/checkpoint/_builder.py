"""Make checkpointers with sensible defaults."""

from __future__ import annotations

import importlib
from typing import Any

import torch.distributed as dist

from ._checkpoint_reader import CheckpointReader
from ._checkpoint_writer import CheckpointWriter, WriterHook
from ._checkpointer import SyncCheckpointer
from ._config import CheckpointerConfig
from ._types import BarrierLike, RankInfo

__all__ = ["default_rank_info", "make_sync_checkpointer"]


def make_sync_checkpointer(
    config: CheckpointerConfig | None = None,
    rank_info: RankInfo | None = None,
    commit_hook: WriterHook | None = None,
) -> SyncCheckpointer:
    """Make a checkpointer that saves while the caller waits.

    Which rank this is, and of how many, is asked of `torch.distributed` if it is initialised;
    otherwise there is one rank.
    """
    config = CheckpointerConfig() if config is None else config
    rank_info = default_rank_info() if rank_info is None else rank_info
    writer = CheckpointWriter(
        config.writer_config, rank_info, _barrier(config.barrier_config), commit_hook
    )
    return SyncCheckpointer(writer, CheckpointReader(rank_info))


def default_rank_info() -> RankInfo:
    """Return this process's place in the default group, if there is one."""
    if dist.is_available() and dist.is_initialized():
        return RankInfo(dist.get_rank(), dist.get_world_size())
    return RankInfo(0, 1)


def _barrier(config: Any) -> BarrierLike | None:
    if config is None or config.barrier_type is None:
        return None
    barriers = importlib.import_module(f"{__package__}.barriers")
    barrier: BarrierLike = barriers.create_barrier_from_config(config)
    return barrier
