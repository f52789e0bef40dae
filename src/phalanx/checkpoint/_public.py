"""The public names of `phalanx.checkpoint`, imported when the first of them is used."""

from __future__ import annotations

from .._signals import STOPPED
from ._barriers import (
    BARRIER_REGISTRY,
    Barrier,
    BarrierConfig,
    DistBarrier,
    GroupBarrier,
    TCPStoreBarrier,
    create_barrier_from_config,
    register_barrier,
)
from ._checkpoint_process import CheckpointProcess, CheckpointProcessConfig
from ._checkpointer import (
    AsyncCheckpointer,
    Checkpointer,
    CheckpointerConfig,
    SyncCheckpointer,
    make_async_checkpointer,
    make_sync_checkpointer,
)
from ._manager import CheckpointManager
from ._preemption import PreemptionGuard
from ._progress import SaveProgress, SaveReport, WriteFuture, wrap_future
from ._reader import CheckpointReader
from ._rng import RNGState
from ._staging import CheckpointStager, CheckpointStagerConfig, DefaultStager
from ._state_tree import PerRank, Replicated, register_codec
from ._types import STATE_DICT, RankInfo
from ._writer import CheckpointWriter, CheckpointWriterConfig, WriterHook

__all__ = [
    "BARRIER_REGISTRY",
    "STATE_DICT",
    "STOPPED",
    "AsyncCheckpointer",
    "Barrier",
    "BarrierConfig",
    "CheckpointManager",
    "CheckpointProcess",
    "CheckpointProcessConfig",
    "CheckpointReader",
    "CheckpointStager",
    "CheckpointStagerConfig",
    "CheckpointWriter",
    "CheckpointWriterConfig",
    "Checkpointer",
    "CheckpointerConfig",
    "DefaultStager",
    "DistBarrier",
    "GroupBarrier",
    "PerRank",
    "PreemptionGuard",
    "RNGState",
    "RankInfo",
    "Replicated",
    "SaveProgress",
    "SaveReport",
    "SyncCheckpointer",
    "TCPStoreBarrier",
    "WriteFuture",
    "WriterHook",
    "create_barrier_from_config",
    "make_async_checkpointer",
    "make_sync_checkpointer",
    "register_barrier",
    "register_codec",
    "wrap_future",
]
