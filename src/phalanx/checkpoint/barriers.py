"""Barriers: every rank waits until all ranks arrive, and learns which ones did not.

The names of ``torch.distributed.checkpoint._experimental.barriers``, and `GroupBarrier`. The three
barrier classes also have `exchange`, a barrier that returns a text from every rank.
"""

from __future__ import annotations

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

__all__ = [
    "BARRIER_REGISTRY",
    "Barrier",
    "BarrierConfig",
    "DistBarrier",
    "GroupBarrier",
    "TCPStoreBarrier",
    "create_barrier_from_config",
    "register_barrier",
]
