"""The state of all shares, collected: what it is made of as JSON, and tensors as bytes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..errors import InvalidState
from ._channel import Channel

__all__ = ["States", "collect"]

States = dict[int, dict[str, Any]]
"""By the place of the parameter among all."""


def collect(mine: States, channel: Channel, *, to: int | None) -> States | None:
    """Bring the states of all ranks to one of them, or to all; the others get None."""
    told = [json.loads(text) for text in channel.exchange(json.dumps(_describe(mine)))]
    for rank, each in enumerate(told):
        if "refused" in each:
            raise InvalidState(
                f"the state of rank {rank}'s share cannot be sent: {each['refused']}"
            )
    whole: States = {}
    for owner, each in enumerate(told):
        for place, fields in each["states"]:
            own = mine[place] if owner == channel.rank else {}
            state = {
                name: _move(own.get(name), kind, what, owner, channel, to)
                for name, kind, what in fields
            }
            whole[place] = state
    return {place: whole[place] for place in sorted(whole)} if to in (None, channel.rank) else None


def _describe(states: States) -> dict[str, Any]:
    described = []
    for place, state in states.items():
        fields = []
        for name, value in state.items():
            if isinstance(value, Tensor) and value.layout is torch.strided:
                dtype = str(value.dtype).removeprefix("torch.")
                fields.append((name, "tensor", (dtype, [*value.shape], value.device.type)))
            elif _is_plain(value):
                fields.append((name, "value", value))
            else:
                return {"refused": f"{name!r} of parameter {place} is a {type(value).__name__}"}
        described.append((place, fields))
    return {"states": described}


def _is_plain(value: object) -> bool:
    if isinstance(value, list):
        return all(map(_is_plain, value))
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and _is_plain(each) for key, each in value.items())
    return value is None or isinstance(value, (bool, int, float, str))


def _move(value: Any, kind: str, what: Any, owner: int, channel: Channel, to: int | None) -> Any:
    """Bring one value from its owner to where it is wanted."""
    if kind == "value":
        return what
    is_mine, is_wanted = owner == channel.rank, to in (None, channel.rank)
    dtype, shape, device = getattr(torch, what[0]), what[1], what[2]
    if is_mine:
        # A copy, since what the other ranks sent does not change with the next step either.
        tensor = value.detach().to(channel.device, copy=True).contiguous()
    elif is_wanted:
        tensor = torch.empty(shape, dtype=dtype, device=channel.device)
    else:
        return None
    if tensor.numel():
        _send(tensor.view(-1).view(torch.uint8), owner, channel, to)
    return tensor.to(device)


def _send(data: Tensor, owner: int, channel: Channel, to: int | None) -> None:
    if to is None:
        channel.broadcast(data, owner).wait()
    elif to != owner and channel.rank == owner:
        channel.group.send([data], to, 0).wait()
    elif to != owner:
        channel.group.recv([data], owner, 0).wait()
