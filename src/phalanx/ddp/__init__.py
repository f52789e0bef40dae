"""Data-parallel training: every rank has a copy of the module and its share of the data.

The names and meanings of ``torch.nn.parallel.DistributedDataParallel``. The layers, from the top:
``module`` wraps, ``reducer`` drives one backward pass after the other, ``buckets`` own storage.
"""

from ._grad_bucket import GradBucket
from ._module import DistributedDataParallel
from ._precision import MixedPrecision
from ._sharded import ShardedOptimizer
from ._stats import StepStats

DDP = DistributedDataParallel
_MixedPrecision = MixedPrecision

__all__ = [
    "DDP",
    "DistributedDataParallel",
    "GradBucket",
    "MixedPrecision",
    "ShardedOptimizer",
    "StepStats",
]
