"""The components of a checkpointer, to assemble one or to replace a part.

The names of ``torch.distributed.checkpoint._experimental``, and `SaveProgress`, `SaveReport` and
`WriteFuture`, which an `AsyncCheckpointer` returns. Barriers are in `phalanx.checkpoint.barriers`.
"""

from __future__ import annotations

from ._checkpoint_process import CheckpointProcess, CheckpointProcessConfig
from ._checkpointer import AsyncCheckpointer, Checkpointer, SyncCheckpointer
from ._progress import SaveProgress, SaveReport, WriteFuture, wrap_future
from ._reader import CheckpointReader
from ._staging import CheckpointStager, CheckpointStagerConfig, DefaultStager
from ._types import STATE_DICT, RankInfo
from ._writer import CheckpointWriter, CheckpointWriterConfig, WriterHook

__all__ = [
    "STATE_DICT",
    "AsyncCheckpointer",
    "CheckpointProcess",
    "CheckpointProcessConfig",
    "CheckpointReader",
    "CheckpointStager",
    "CheckpointStagerConfig",
    "CheckpointWriter",
    "CheckpointWriterConfig",
    "Checkpointer",
    "DefaultStager",
    "RankInfo",
    "SaveProgress",
    "SaveReport",
    "SyncCheckpointer",
    "WriteFuture",
    "WriterHook",
    "wrap_future",
]
