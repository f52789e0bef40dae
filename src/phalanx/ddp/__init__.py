"""Data-parallel training: every rank has a copy of the module and its share of the data.

The names and meanings of ``torch.nn.parallel.DistributedDataParallel``. The layers, from the top:
``module`` wraps, ``reducer`` drives one backward pass after the other, ``buckets`` own storage.
"""

from ._module import DistributedDataParallel
from ._sharded import ShardedOptimizer
from ._stats import StepStats

DDP = DistributedDataParallel

__all__ = ["DDP", "DistributedDataParallel", "ShardedOptimizer", "StepStats"]
