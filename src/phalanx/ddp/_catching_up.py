"""What a rank takes over that was away from its group while others made steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ._buffers import broadcast_tensors

if TYPE_CHECKING:
    from ._reducer import Reducer

__all__ = ["share_gradients", "share_progress"]


def share_progress(reducer: Reducer, root: int) -> None:
    """Give every rank what one rank goes on with: what it trains, and how far it is."""
    mine = set(reducer.names)
    trained = [name in mine for name, _ in reducer.named]
    progress = [reducer.weights.unit or 0.0, *reducer.progress()]
    room = [0.0] * (len(trained) - len(mine))  # as long as if all were trained
    numbers = [*trained, *progress, *room]
    card = torch.tensor(numbers, dtype=torch.float64, device=reducer.channel.device)
    reducer.channel.broadcast(card, root).wait()
    numbers = card.tolist()
    unit, *rest = numbers[len(trained) :]
    _train_only(reducer, [bool(flag) for flag in numbers[: len(trained)]])
    reducer.weights.unit = unit or None
    reducer.catch_up(
        [int(number) for number in rest[: len(rest) - len(reducer.named) + len(reducer.names)]]
    )


def _train_only(reducer: Reducer, trained: list[bool]) -> None:
    """Have these parameters need gradients and no others, if that is a change."""
    mine = set(reducer.names)
    changed = False
    for (name, parameter), is_trained in zip(reducer.named, trained, strict=True):
        if is_trained != (name in mine):
            parameter.requires_grad_(is_trained)
            changed = True
    if changed:
        reducer.take_on()


def share_gradients(reducer: Reducer, root: int) -> None:
    """Give every rank the root's gradients, unless they are its own alone, or sparse."""
    gradients = [p.grad for p in reducer.parameters]
    shared = [int(g is not None and not g.is_sparse and not reducer.is_unsynced) for g in gradients]
    card = torch.tensor(shared, device=reducer.channel.device)
    reducer.channel.broadcast(card, root).wait()
    with torch.no_grad():
        for parameter, is_there in zip(reducer.parameters, card.tolist(), strict=True):
            if not is_there:
                parameter.grad = None
            elif parameter.grad is None or parameter.grad.is_sparse:
                parameter.grad = torch.zeros_like(parameter)
    there = [p.grad for p in reducer.parameters if p.grad is not None]
    broadcast_tensors(there, reducer.channel, root=root)
    reducer.forget_local()
