"""Durable, verified, all-or-nothing checkpoints, of any number of ranks.

::

    checkpoints = CheckpointManager("run", keep_last=3, keep_every=1000)
    checkpoints.save(1000, {"model": model, "optimizer": optimizer})
    checkpoints.load(state={"model": model, "optimizer": optimizer})

`phalanx.checkpoint.components` has the parts of a checkpointer, `phalanx.checkpoint.barriers` the
barriers; both under the names of `torch.distributed.checkpoint._experimental`.

``docs/design.md`` lists the modules.
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ._checkpointer import CheckpointerConfig, make_async_checkpointer, make_sync_checkpointer
    from ._manager import CheckpointManager
    from ._preemption import PreemptionGuard
    from ._rng import RNGState
    from ._state_tree import PerRank, Replicated, register_codec

__all__ = [
    "CheckpointManager",
    "CheckpointerConfig",
    "PerRank",
    "PreemptionGuard",
    "RNGState",
    "Replicated",
    "make_async_checkpointer",
    "make_sync_checkpointer",
    "register_codec",
]

_MODULES = {
    "_checkpointer": ["CheckpointerConfig", "make_async_checkpointer", "make_sync_checkpointer"],
    "_manager": ["CheckpointManager"],
    "_preemption": ["PreemptionGuard"],
    "_rng": ["RNGState"],
    "_state_tree": ["PerRank", "Replicated", "register_codec"],
    # Upstream has these in its package, so that scripts need to change one import line.
    "barriers": ["Barrier", "BarrierConfig", "TCPStoreBarrier", "create_barrier_from_config"],
    "components": [
        *["AsyncCheckpointer", "Checkpointer", "SyncCheckpointer", "wrap_future"],
        *["CheckpointStager", "CheckpointStagerConfig", "DefaultStager", "CheckpointReader"],
        *["CheckpointWriter", "CheckpointWriterConfig", "WriterHook", "RankInfo", "STATE_DICT"],
    ],
}


def __getattr__(name: str) -> Any:
    # On first use: the command line lists and verifies checkpoints without torch.
    if name in ("barriers", "components"):
        return import_module(f"{__name__}.{name}")
    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    loaded = [name for name in globals() if f"{__name__}.{name}" in sys.modules]
    return sorted({*__all__, *loaded})
