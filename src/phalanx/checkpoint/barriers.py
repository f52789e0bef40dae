"""Barriers: every rank waits until all have come, and learns who has not.

The names of ``torch.distributed.checkpoint._experimental.barriers``, and `GroupBarrier`. All of
these also have `exchange`, a barrier that brings what every rank says to all.
"""

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
