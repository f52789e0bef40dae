"""What a rank takes over that was away from its group while others made steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ._buffers import broadcast_tensors

if TYPE_CHECKING:
    from ._reducer import Reducer

__all__ = ["bring_up_to_date"]


def bring_up_to_date(reducer: Reducer, root: int) -> None:
    """Give every rank one rank's order of buckets, number of passes, and gradients."""
    channel = reducer.channel
    gradients = [p.grad for p in reducer.parameters]
    has = [int(g is not None and not g.is_sparse) for g in gradients]
    card = torch.tensor([*has, *reducer.progress()], device=channel.device)
    channel.broadcast(card, root).wait()
    numbers = card.tolist()
    reducer.catch_up(numbers[len(has) :])
    with torch.no_grad():
        for parameter, is_there in zip(reducer.parameters, numbers, strict=False):
            if not is_there:
                parameter.grad = None
            elif parameter.grad is None or parameter.grad.is_sparse:
                parameter.grad = torch.zeros_like(parameter)
    grads = [p.grad for p in reducer.parameters if p.grad is not None]
    broadcast_tensors(grads, channel, root=root)
