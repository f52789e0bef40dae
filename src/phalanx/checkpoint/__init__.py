"""Checkpoints: barriers that name who is missing."""

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
    "Barrier",
    "BarrierConfig",
    "DistBarrier",
    "GroupBarrier",
    "TCPStoreBarrier",
    "create_barrier_from_config",
    "register_barrier",
]
