"""The hook that does what no hook does, and the hook that does nothing."""

# Not `from __future__ import annotations`, here and in the other files with hooks: torch's DDP
# compares the annotations themselves, not their names.
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from ._communicate import average, completed, group_of
from ._hook import GradBucket

__all__ = ["allreduce_hook", "noop_hook"]


def allreduce_hook(process_group: dist.ProcessGroup | None, bucket: GradBucket) -> Future[Tensor]:
    """Average the gradients, all bits of them."""
    return average(group_of(process_group, bucket), bucket.buffer())


def noop_hook(_: Any, bucket: GradBucket) -> Future[Tensor]:
    """Leave every rank its own gradients: for local SGD, and to see what communication costs."""
    return completed(bucket.buffer())
