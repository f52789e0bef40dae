"""Gradients in half the bits on their way."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from ._allreduce import allreduce_hook
from ._communicate import then
from ._hook import GradBucket, Hook, dense_buffer, name_of

__all__ = [
    "bf16_compress_hook",
    "bf16_compress_wrapper",
    "fp16_compress_hook",
    "fp16_compress_wrapper",
]


def fp16_compress_hook(
    process_group: dist.ProcessGroup | None, bucket: GradBucket
) -> Future[Tensor]:
    """Average the gradients as float16: eleven bits, and nothing above 65504."""
    return fp16_compress_wrapper(allreduce_hook)(process_group, bucket)


def bf16_compress_hook(
    process_group: dist.ProcessGroup | None, bucket: GradBucket
) -> Future[Tensor]:
    """Average the gradients as bfloat16: eight bits, and the range of float32."""
    return bf16_compress_wrapper(allreduce_hook)(process_group, bucket)


def fp16_compress_wrapper(hook: Hook) -> Hook:
    """Have a hook see the gradients as float16; what comes of it is of the type they had."""
    return _casting(hook, torch.float16)


def bf16_compress_wrapper(hook: Hook) -> Hook:
    """Have a hook see the gradients as bfloat16; what comes of it is of the type they had."""
    return _casting(hook, torch.bfloat16)


def _casting(hook: Hook, dtype: torch.dtype) -> Hook:
    def compressed(state: Any, bucket: GradBucket) -> Future[Tensor]:
        full = dense_buffer(bucket, name)
        bucket.set_buffer(full.to(dtype))

        def decompress(ended: Future[Tensor]) -> Tensor:
            result = ended.wait()
            bucket.set_buffer(full)  # whoever wrapped this looks at the gradients again
            return full.copy_(result)

        return then(hook(state, bucket), decompress, full.device)

    kind = {torch.float16: "fp16", torch.bfloat16: "bf16"}[dtype]
    name = f"{kind}_compress_wrapper({name_of(hook)})"
    compressed.__name__ = compressed.__qualname__ = name
    return compressed
