"""The public names of `phalanx.checkpoint`, which are loaded when the first of them is used."""

from .._signals import STOPPED
from . import barriers  # noqa: F401 - a public name of the package, as a module of its own
from ._async_checkpointer import AsyncCheckpointer
from ._barrier_kinds import (
    BARRIER_REGISTRY,
    Barrier,
    BarrierConfig,
    DistBarrier,
    GroupBarrier,
    TCPStoreBarrier,
    create_barrier_from_config,
    register_barrier,
)
from ._builder import make_async_checkpointer, make_sync_checkpointer
from ._checkpoint_process import CheckpointProcess, CheckpointProcessConfig
from ._checkpoint_reader import CheckpointReader
from ._checkpoint_writer import CheckpointWriter, CheckpointWriterConfig, WriterHook
from ._checkpointer import Checkpointer, SyncCheckpointer
from ._codecs import register_codec
from ._config import CheckpointerConfig
from ._folder import Folder
from ._futures import WriteFuture, wrap_future
from ._marks import Alike, PerRank
from ._progress import SaveProgress, SaveReport
from ._rng import RNGState
from ._staging import CheckpointStager, CheckpointStagerConfig, DefaultStager
from ._stopping import StopRequest
from ._types import STATE_DICT, RankInfo

__all__ = [
    "BARRIER_REGISTRY",
    "STATE_DICT",
    "STOPPED",
    "Alike",
    "AsyncCheckpointer",
    "Barrier",
    "BarrierConfig",
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
    "Folder",
    "GroupBarrier",
    "PerRank",
    "RNGState",
    "RankInfo",
    "SaveProgress",
    "SaveReport",
    "StopRequest",
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
