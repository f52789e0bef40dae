"""Gradients in eight bits, with one scale per tensor or per few hundred elements.

An element x becomes the byte round(x / scale) + zero, where zero stands for 0.0, so that zeros
stay exact. Scale and zero travel with the bytes: one call collects everything, and every rank
adds the same numbers in rank order. A value that is not finite makes its whole row NaN.
"""

import torch
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future

from . import _base as base

LEVELS = 255


def quantization_pertensor_hook(
    process_group: base.OptionalGroup, bucket: GradBucket
) -> Future[Tensor]:
    """Average the gradients as bytes, with one scale for the bucket."""
    buffer = base.dense_buffer(bucket, "quantization_pertensor_hook")
    return _quantized(process_group, bucket, buffer, row=buffer.numel())


def quantization_perchannel_hook(
    process_group: base.OptionalGroup, bucket: GradBucket, bucket_size: int = 512
) -> Future[Tensor]:
    """Average the gradients as bytes, with one scale per `bucket_size` elements."""
    buffer = base.dense_buffer(bucket, "quantization_perchannel_hook")
    base.check_count("bucket_size", bucket_size, least=1)
    return _quantized(process_group, bucket, buffer, row=min(bucket_size, buffer.numel()))


def _quantized(
    process_group: base.OptionalGroup, bucket: GradBucket, buffer: Tensor, *, row: int
) -> Future[Tensor]:
    group = base.hook_group(process_group, bucket)
    count = buffer.numel()
    if not count:
        return base.completed(buffer)  # no elements have no minimum
    channels = -(-count // row)
    values = buffer.new_zeros(channels, row, dtype=torch.float32)
    values.view(-1)[:count] = buffer
    call, received = base.start_gather(group, _encode(values))

    def decode() -> Tensor:
        total, theirs = values.zero_(), torch.empty_like(values)
        for message in received:  # in rank order, so that all ranks get the same bits
            # A copy, since the scales may not be aligned to four bytes.
            scale = message[: 4 * channels].clone().view(torch.float32)
            zero = message[4 * channels : 5 * channels].float()
            levels = theirs.copy_(message[5 * channels :].view(theirs.shape))
            total += levels.sub_(zero[:, None]).mul_(scale[:, None])
        return buffer.copy_(total.div_(len(received)).view(-1)[:count])

    return base.when_done([call], decode, buffer.device)


def _encode(values: Tensor) -> Tensor:
    """Return scales, zeros and elements of the rows as one message; overwrites `values`."""
    low = values.amin(1).clamp_(max=0)
    scale = (values.amax(1).clamp_(min=0) - low) / LEVELS
    scale = torch.where(scale == 0, 1, scale)  # a row of zeros
    zero = torch.round(-low / scale)
    # In place, since allocating costs more than the arithmetic.
    levels = values.div_(scale[:, None]).round_().add_(zero[:, None]).clamp_(0, LEVELS)
    # Only the scale can represent a value that is not finite.
    for each in (zero, levels):
        each.nan_to_num_(0, 0, 0)
    channels = len(values)
    message = values.new_empty(5 * channels + values.numel(), dtype=torch.uint8)
    message[: 4 * channels] = scale.view(torch.uint8)
    message[4 * channels : 5 * channels] = zero
    message[5 * channels :] = levels.view(-1)
    return message
