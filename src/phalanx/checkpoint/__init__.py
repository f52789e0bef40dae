"""Checkpoints that are all or nothing: durable, verified, and of any number of ranks.

::

    checkpointer = make_sync_checkpointer()
    checkpointer.save("run/step-1000", {"model": model, "optimizer": optimizer, "step": 1000})
    checkpointer.load("run/step-1000", {"model": model, "optimizer": optimizer})

The names are those of `torch.distributed.checkpoint._experimental`. The parts, from the top::

    _builder, _config           make them
    _checkpointer               save and load
    _async_checkpointer         save while training goes on: _staging copies, and
    _checkpoint_process         another process writes; _progress: how far it is
    barriers                    where ranks wait for each other (_barrier_*)
    _checkpoint_writer, _reader with all ranks; _fitting: into a state that is there
    _upkeep                     verify, and remove what dead saves have left
    _commit                     the protocol; _meeting, _notes, _board: how ranks hear of each other
    _alike, _digests            what ranks hold alike, and who writes which bytes of it
    _storage, _files, _remote   where it goes; _locks: whose turn it is
    _manifest, _tensors         what is in the files
    _structure, _encoding       a state as a tree, and the tree as JSON
"""

from ._async_checkpointer import AsyncCheckpointer
from ._builder import make_async_checkpointer, make_sync_checkpointer
from ._checkpoint_process import CheckpointProcess, CheckpointProcessConfig
from ._checkpoint_reader import CheckpointReader
from ._checkpoint_writer import CheckpointWriter, CheckpointWriterConfig, WriterHook
from ._checkpointer import Checkpointer, SyncCheckpointer
from ._codecs import register_codec
from ._config import CheckpointerConfig
from ._futures import WriteFuture, wrap_future
from ._marks import Alike, PerRank
from ._progress import SaveProgress, SaveReport
from ._rng import RNGState
from ._staging import CheckpointStager, CheckpointStagerConfig, DefaultStager
from ._types import STATE_DICT, RankInfo
from .barriers import (
    BARRIER_REGISTRY,
    Barrier,
    BarrierConfig,
    DistBarrier,
    GroupBarrier,
    TCPStoreBarrier,
    create_barrier_from_config,
    register_barrier,
)

__all__ = [
    "BARRIER_REGISTRY",
    "STATE_DICT",
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
    "GroupBarrier",
    "PerRank",
    "RNGState",
    "RankInfo",
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
