"""Private names used by the tests of this package."""

from phalanx.ddp import _DDPJoinHook, _MixedPrecision
from phalanx.ddp._buckets import ParameterSpec, plan_buckets
from phalanx.ddp._comm_hook import GradBucket
from phalanx.ddp._reducer import Reducer
from phalanx.ddp._sharded_optimizer import BroadcastParameters, SharedParameters, balance_by_size
from phalanx.ddp.hooks._power_sgd import orthogonalize
from phalanx.ddp.hooks._sparsification import sample_without_replacement, topk_indices

__all__ = [
    "BroadcastParameters",
    "GradBucket",
    "ParameterSpec",
    "Reducer",
    "SharedParameters",
    "_DDPJoinHook",
    "_MixedPrecision",
    "balance_by_size",
    "orthogonalize",
    "plan_buckets",
    "sample_without_replacement",
    "topk_indices",
]
