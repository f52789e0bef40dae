"""All that can be said about a checkpointer when it is made."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ._checkpoint_writer import CheckpointWriterConfig

__all__ = ["CheckpointerConfig"]


@dataclass
class CheckpointerConfig:
    """Say how the parts of a checkpointer shall behave."""

    writer_config: CheckpointWriterConfig = field(default_factory=CheckpointWriterConfig)
    barrier_config: Any = None
    """A `BarrierConfig`; without one, ranks meet by notes in the folder that they save to."""
