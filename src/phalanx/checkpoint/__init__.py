"""Durable, verified, all-or-nothing checkpoints, of any number of ranks.

::

    checkpoints = CheckpointManager("run", keep_last=3, keep_every=1000)
    checkpoints.save(1000, {"model": model, "optimizer": optimizer})
    checkpoints.load(state={"model": model, "optimizer": optimizer})

`phalanx.checkpoint.components` has the parts of a checkpointer, `phalanx.checkpoint.barriers` the
barriers; both under the names of `torch.distributed.checkpoint._experimental`.

The modules, from the top::

    _manager, _preemption       what a training loop uses; _step_directory
    _checkpointer               save and load, synchronously or in the background
    _checkpoint_process         the process that writes in the background: _writer_process,
                                _staging; _progress
    _writer                     writes with all ranks: _commit is the protocol, _coordination
                                how ranks exchange results, _replication who writes which bytes
    _reader                     reads into new or existing state; _verify
    _barriers                   _store_barrier, _store_connection
    _storage                    the interface to _local_storage and _remote_storage
    _manifest, _tensor_file     what is in the files
    _state_tree                 a state as a tree, and as JSON: _state_encoding
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
}


def __getattr__(name: str) -> Any:
    # On first use: the command line lists and verifies checkpoints without torch.
    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    loaded = [name for name in globals() if f"{__name__}.{name}" in sys.modules]
    return sorted({*__all__, *loaded})
