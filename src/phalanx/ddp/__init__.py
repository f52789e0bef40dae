"""Data-parallel training: every rank has a copy of the module and its share of the data.

The names and meanings of ``torch.nn.parallel.DistributedDataParallel``. The layers, from the top:
``module`` wraps, ``reducer`` drives one backward pass after the other, ``buckets`` own storage.
"""

from ._buffer_hook import _BufferCommHook as _BufferCommHook
from ._buffer_hook import _BufferCommHookLocation as _BufferCommHookLocation
from ._grad_bucket import GradBucket
from ._joining import _DDPJoinHook as _DDPJoinHook
from ._module import DistributedDataParallel
from ._precision import MixedPrecision
from ._sharded import ShardedOptimizer
from ._stats import StepStats
from ._sync_batch_norm import SyncBatchNorm
from ._torch_names import _DDPSink as _DDPSink
from ._torch_names import _dump_DDP_relevant_env_vars as _dump_DDP_relevant_env_vars
from ._torch_names import _find_tensors as _find_tensors
from ._torch_names import _tree_flatten_with_rref as _tree_flatten_with_rref
from ._torch_names import _tree_unflatten_with_rref as _tree_unflatten_with_rref

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
