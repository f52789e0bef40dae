"""All that can be said about a checkpointer when it is made."""

from __future__ import annotations

from dataclasses import dataclass, field

from ._barrier_kinds import BarrierConfig
from ._checkpoint_process import CheckpointProcessConfig
from ._checkpoint_writer import CheckpointWriterConfig
from ._staging import CheckpointStagerConfig

__all__ = ["CheckpointerConfig"]


@dataclass
class CheckpointerConfig:
    """Say how the parts of a checkpointer shall behave."""

    writer_config: CheckpointWriterConfig = field(default_factory=CheckpointWriterConfig)
    barrier_config: BarrierConfig = field(default_factory=BarrierConfig)
    """Without a type, ranks meet by notes in the folder that they save to."""
    staging_config: CheckpointStagerConfig = field(default_factory=CheckpointStagerConfig)
    """How an asynchronous checkpointer copies states."""
    process_config: CheckpointProcessConfig = field(default_factory=CheckpointProcessConfig)
    """How it deals with the process that writes them."""
