"""Data-parallel training: every rank has a replica of the module and its share of the data.

Names and semantics are those of ``torch.nn.parallel.DistributedDataParallel``. A gradient passes
through `_data_parallel`, `_autograd_hooks`, `_reducer` and `_backward_pass`, `_buckets`,
`_communicator` and the process group.
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
