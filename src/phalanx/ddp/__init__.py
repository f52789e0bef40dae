"""Data-parallel training: every rank has a copy of the module and its share of the data.

The names and meanings of ``torch.nn.parallel.DistributedDataParallel``. The layers, from the top:
``module`` wraps, ``reducer`` drives one backward pass after the other, ``buckets`` own storage.
"""

from ._buffer_sync import _BufferCommHook as _BufferCommHook
from ._buffer_sync import _BufferCommHookLocation as _BufferCommHookLocation
from ._comm_hook import GradBucket
from ._data_parallel import DistributedDataParallel
from ._interop import _DDPSink as _DDPSink
from ._interop import _dump_DDP_relevant_env_vars as _dump_DDP_relevant_env_vars
from ._interop import _find_tensors as _find_tensors
from ._interop import _tree_flatten_with_rref as _tree_flatten_with_rref
from ._interop import _tree_unflatten_with_rref as _tree_unflatten_with_rref
from ._join_hook import _DDPJoinHook as _DDPJoinHook
from ._mixed_precision import MixedPrecision
from ._sharded_optimizer import ShardedOptimizer
from ._stats import StepStats
from ._sync_batch_norm import SyncBatchNorm

DDP = DistributedDataParallel
_MixedPrecision = MixedPrecision

__all__ = [
    "DDP",
    "DistributedDataParallel",
    "GradBucket",
    "MixedPrecision",
    "ShardedOptimizer",
    "StepStats",
    "SyncBatchNorm",
]
