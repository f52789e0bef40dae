"""What a hook is, and what hooks refuse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future

from ...errors import InvalidArgument

__all__ = ["GradBucket", "Hook", "Wrapper", "dense_buffer", "name_of"]

Hook = Callable[[Any, Any], Future[Tensor]]
"""Called with its state and a bucket; returns a future of the bucket's mean.

Hooks say that a bucket is torch's `GradBucket`, for torch's DDP insists on it; ours has the same
methods.
"""
Wrapper = Callable[[Hook], Hook]
"""Makes of a hook another one, which does something before and after it."""


def dense_buffer(bucket: GradBucket, hook: str) -> Tensor:
    """Return the buffer of a bucket that can be compressed; refuse sparse and complex ones."""
    buffer = bucket.buffer()
    if buffer.is_sparse or not buffer.is_floating_point():
        kind = str(buffer.dtype).removeprefix("torch.")
        told = f"sparse {kind}" if buffer.is_sparse else kind
        raise InvalidArgument(
            f"{hook} compresses dense gradients of real numbers, and bucket {bucket.index()} "
            f"is {told}: use allreduce_hook for a module with such parameters"
        )
    return buffer


def name_of(hook: Any) -> str:
    """Tell what a hook is called."""
    return str(getattr(hook, "__name__", None) or repr(hook))
