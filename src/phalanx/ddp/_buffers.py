"""Buffers: every rank has rank 0's before a forward pass."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ._channel import Channel
from ._local_part import local

__all__ = ["broadcast_tensors"]

CHUNK = 250 << 20  # bytes that are sent at once


def broadcast_tensors(
    tensors: Sequence[Tensor], channel: Channel, *, root: int = 0, chunk: int = CHUNK
) -> None:
    """Give every rank the root's values, tensors of one type together.

    A tensor that has them already is not written to: autograd may have saved it for backward, and
    would take any write for a change.
    """
    with torch.no_grad():
        for group in _chunks([local(t).detach() for t in tensors if t.numel()], chunk):
            _broadcast_together(group, channel, root)


def _broadcast_together(tensors: list[Tensor], channel: Channel, root: int) -> None:
    first = tensors[0]
    flat = channel.allocate(sum(t.numel() for t in tensors), first.dtype, first.device)
    parts = torch.split(flat, [t.numel() for t in tensors])
    if channel.rank == root:
        torch._foreach_copy_(list(parts), [t.reshape(-1) for t in tensors])
    channel.broadcast(flat, root).wait()
    if channel.rank != root:
        for tensor, part in zip(tensors, parts, strict=True):
            received = part.view(tensor.shape)
            if not torch.equal(tensor, received):
                tensor.copy_(received)


def _chunks(tensors: Sequence[Tensor], limit: int) -> list[list[Tensor]]:
    """Divide tensors into lists of one type and device, of about so many bytes."""
    chunks: list[list[Tensor]] = []
    filling: dict[tuple[torch.dtype, torch.device], tuple[list[Tensor], int]] = {}
    for tensor in tensors:
        key = tensor.dtype, tensor.device
        chunk, size = filling.get(key, ([], limit))
        if size >= limit:
            chunk, size = [], 0
            chunks.append(chunk)
        chunk.append(tensor)
        filling[key] = chunk, size + tensor.nbytes
    return chunks
