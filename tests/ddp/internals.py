"""Private names used by the tests of this package."""

from phalanx.ddp import _DDPJoinHook, _MixedPrecision
from phalanx.ddp._buckets import (
    Bucket,
    BucketOptions,
    DelayedReduction,
    ParameterSpec,
    plan_buckets,
)
from phalanx.ddp._comm_hook import GradBucket
from phalanx.ddp._communicator import Communicator, sum_rows
from phalanx.ddp._gradient_fold import GradientFold
from phalanx.ddp._reducer import Reducer
from phalanx.ddp._sharded_optimizer import BroadcastParameters, SharedParameters, balance_by_size
from phalanx.ddp._summation_tree import (
    LeafBlock,
    SummationPlan,
    add_in_order,
    fold_nodes,
    is_node,
    midpoint,
    ordered_sum,
)
from phalanx.ddp.hooks._power_sgd import orthogonalize
from phalanx.ddp.hooks._sparsification import sample_without_replacement, topk_indices

__all__ = [
    "BroadcastParameters",
    "Bucket",
    "BucketOptions",
    "Communicator",
    "DelayedReduction",
    "GradBucket",
    "GradientFold",
    "LeafBlock",
    "ParameterSpec",
    "Reducer",
    "SharedParameters",
    "SummationPlan",
    "_DDPJoinHook",
    "_MixedPrecision",
    "add_in_order",
    "balance_by_size",
    "fold_nodes",
    "is_node",
    "midpoint",
    "ordered_sum",
    "orthogonalize",
    "plan_buckets",
    "sample_without_replacement",
    "sum_rows",
    "topk_indices",
]
