"""Gradients in eight bits, with a scale for each tensor or for each few hundred elements.

An element x becomes the byte round(x / scale) + zero, where zero stands for 0.0, so that what is
nothing stays nothing. Scale and zero travel with the bytes: one call collects everything, and every
rank adds up the same numbers. What is not finite makes its whole row not a number.
"""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from ._communicate import completed, gather, group_of, when_done
from ._hook import GradBucket, dense_buffer
from ._state import check_count

__all__ = ["quantization_perchannel_hook", "quantization_pertensor_hook"]

LEVELS = 255


def quantization_pertensor_hook(
    process_group: dist.ProcessGroup | None, bucket: GradBucket
) -> Future[Tensor]:
    """Average the gradients as bytes, with one scale for the bucket."""
    buffer = dense_buffer(bucket, "quantization_pertensor_hook")
    return _quantized(process_group, bucket, buffer, row=buffer.numel())


def quantization_perchannel_hook(
    process_group: dist.ProcessGroup | None, bucket: GradBucket, bucket_size: int = 512
) -> Future[Tensor]:
    """Average the gradients as bytes, with a scale for every `bucket_size` of them."""
    buffer = dense_buffer(bucket, "quantization_perchannel_hook")
    check_count("bucket_size", bucket_size, least=1)
    return _quantized(process_group, bucket, buffer, row=min(bucket_size, buffer.numel()))


def _quantized(
    process_group: dist.ProcessGroup | None, bucket: GradBucket, buffer: Tensor, *, row: int
) -> Future[Tensor]:
    group = group_of(process_group, bucket)
    count = buffer.numel()
    if not count:
        return completed(buffer)  # there is no smallest of no elements
    channels = -(-count // row)
    values = buffer.new_zeros(channels, row, dtype=torch.float32)
    values.view(-1)[:count] = buffer
    call, received = gather(group, _encode(values))

    def decode() -> Tensor:
        total = torch.zeros_like(values)
        for message in received:  # in the order of ranks, so that all have the same bits
            total += _decode(message, channels, row)
        return buffer.copy_(total.div_(len(received)).view(-1)[:count])

    return when_done([call], decode, buffer.device)


def _encode(values: Tensor) -> Tensor:
    """Make one message of rows: their scales, their zeros and their elements."""
    low = values.amin(1).clamp_(max=0)
    scale = (values.amax(1).clamp_(min=0) - low) / LEVELS
    scale = torch.where(scale == 0, 1, scale)  # a row of zeros
    zero = torch.round(-low / scale)
    levels = torch.round(values / scale[:, None]).add_(zero[:, None]).clamp_(0, LEVELS)
    # The scale tells what was not finite; a byte cannot.
    zero, levels = (each.nan_to_num_(0, 0, 0).to(torch.uint8) for each in (zero, levels))
    return torch.cat([scale.view(torch.uint8), zero, levels.view(-1)])


def _decode(message: Tensor, channels: int, row: int) -> Tensor:
    """Read rows out of a message."""
    # A copy, for the scales may not lie where numbers of four bytes can be read.
    scale = message[: 4 * channels].clone().view(torch.float32)
    zero = message[4 * channels : 5 * channels].float()
    levels = message[5 * channels :].view(channels, row).float()
    return levels.sub_(zero[:, None]).mul_(scale[:, None])
