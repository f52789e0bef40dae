"""Make checkpointers with sensible defaults."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from ..env import read_rank_env
from ..errors import InvalidArgument
from ..groups._factory import default_group
from ._async_checkpointer import AsyncCheckpointer
from ._barrier_kinds import BarrierConfig, create_barrier_from_config
from ._checkpoint_process import CheckpointProcess
from ._checkpoint_reader import CheckpointReader
from ._checkpoint_writer import CheckpointWriter, CheckpointWriterConfig, WriterHook
from ._checkpointer import SyncCheckpointer
from ._config import CheckpointerConfig
from ._staging import DefaultStager
from ._types import RankInfo

__all__ = [
    "default_rank_info",
    "default_subprocess_init_fn",
    "default_writer_init_fn",
    "make_async_checkpointer",
    "make_sync_checkpointer",
]


def default_subprocess_init_fn(*_: Any) -> None:
    """Do nothing when the checkpoint process starts."""


def default_writer_init_fn(
    rank_info: RankInfo,
    writer_config: CheckpointWriterConfig | None = None,
    barrier_config: BarrierConfig | None = None,
) -> CheckpointWriter:
    """Make the writer of the checkpoint process."""
    config = CheckpointWriterConfig() if writer_config is None else writer_config
    barrier = create_barrier_from_config(barrier_config or BarrierConfig())
    return CheckpointWriter(config, rank_info, barrier)


def make_sync_checkpointer(
    config: CheckpointerConfig | None = None,
    rank_info: RankInfo | None = None,
    commit_hook: WriterHook | None = None,
) -> SyncCheckpointer:
    """Make a checkpointer that saves while the caller waits.

    Without a `rank_info`, this is the rank that it is in the barrier's group; else in the thread's
    current group; else in torch's default group; else as the launcher says; else the only one.
    """
    config = CheckpointerConfig() if config is None else config
    if rank_info is None:
        rank_info = default_rank_info(_barrier_group(config.barrier_config))
    writer = CheckpointWriter(
        config.writer_config,
        rank_info,
        create_barrier_from_config(config.barrier_config),
        commit_hook,
    )
    return SyncCheckpointer(writer, CheckpointReader(rank_info))


def make_async_checkpointer(
    config: CheckpointerConfig | None = None,
    rank_info: RankInfo | None = None,
    subprocess_init_fn: Callable[..., None] = default_subprocess_init_fn,
    subprocess_init_args: tuple[Any, ...] = (),
    checkpoint_writer_init_fn: Callable[..., CheckpointWriter] = default_writer_init_fn,
    checkpoint_writer_init_args: dict[str, Any] | None = None,
) -> AsyncCheckpointer:
    """Make a checkpointer whose saves are written by a process beside the caller's.

    The functions are called in that process: one for whatever is to be set up there, the other to
    make the writer, with ``rank_info`` and the given arguments. They must be functions of a module.
    By default the writer and its barrier are as `config` says.
    """
    config = CheckpointerConfig() if config is None else config
    rank_info = default_rank_info() if rank_info is None else rank_info
    arguments = dict(checkpoint_writer_init_args or {})
    if checkpoint_writer_init_fn is default_writer_init_fn:
        _check_barrier(config.barrier_config)
        said = {"writer_config": config.writer_config, "barrier_config": config.barrier_config}
        arguments = {**said, **arguments}
    process = CheckpointProcess(
        rank_info,
        config.process_config,
        subprocess_init_fn,
        subprocess_init_args,
        checkpoint_writer_init_fn,
        arguments,
    )
    stager = DefaultStager(config.staging_config, rank_info=rank_info)
    return AsyncCheckpointer(stager, process, CheckpointReader(rank_info))


def _check_barrier(config: BarrierConfig) -> None:
    if config.barrier_type in ("dist_barrier", "group"):
        raise InvalidArgument(
            f"a {config.barrier_type!r} needs a group, and the process that writes checkpoints "
            "belongs to none: take 'tcp_store', or no barrier at all, and ranks meet by notes in "
            "the folder that they save to"
        )


def _barrier_group(config: BarrierConfig) -> dist.ProcessGroup | None:
    """Return the group that a configured barrier is on, if it is on one that it names."""
    if config.barrier_type == "dist_barrier" and dist.is_initialized():
        return dist.group.WORLD
    if config.barrier_type == "group":
        named: dist.ProcessGroup | None = config.barrier_args.get("group")
        return named
    return None


def default_rank_info(group: dist.ProcessGroup | None = None) -> RankInfo:
    """Return this process's place: in a group, by default the default group, or as launched."""
    group = default_group() if group is None else group
    if group is not None:
        return RankInfo(group.rank(), group.size())
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        # Else every rank of a job without a default group would take itself for the only one.
        launched = read_rank_env()
        return RankInfo(launched.rank, launched.world_size)
    return RankInfo(0, 1)
