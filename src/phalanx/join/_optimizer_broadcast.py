"""Broadcast of optimizer state after uneven steps.

After a join all ranks hold one rank's model. If their optimizer states differ, the next steps
make the models diverge without an error. So the state is broadcast too: its structure as JSON,
then its tensors, one call per dtype. Optimizers that stepped in the block and were not passed
cause a warning.
"""

from __future__ import annotations

import json
import threading
import warnings
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from ..errors import InvalidState
from ._protocol import JoinCollectives


class UntrackedOptimizers:
    """Optimizers of what is joined that step in a block, and that nobody looks after."""

    def __init__(self, joinables: Iterable[object], known: Iterable[object]) -> None:
        modules = (each for each in joinables if isinstance(each, nn.Module))
        self._joined = {id(parameter) for module in modules for parameter in module.parameters()}
        for optimizer in known:
            if isinstance(optimizer, Optimizer):
                self._joined -= _parameters_of(optimizer)
        self._seen: dict[int, Optimizer] = {}
        self._handle: RemovableHandle | None = None

    def watch(self) -> None:
        """Take notice of steps from now on."""
        self._thread = threading.get_ident()  # others may be other ranks
        self._seen.clear()
        self._handle = register_optimizer_step_post_hook(self._note)

    def stop(self) -> None:
        """Take no notice any more."""
        if self._handle is not None:
            self._handle.remove()

    def _note(self, optimizer: Optimizer, *_: object) -> None:
        if threading.get_ident() == self._thread:
            self._seen[id(optimizer)] = optimizer

    def warn(self) -> None:
        """Tell of those whose state is not the same on all ranks now."""
        for optimizer in self._seen.values():
            if any(optimizer.state.values()) and _parameters_of(optimizer) & self._joined:
                warnings.warn(
                    "ranks that ran out of data have made fewer steps of "
                    f"{type(optimizer).__name__}, and its state is theirs alone now: pass "
                    "optimizers=[...] to the join if training goes on after it",
                    stacklevel=5,
                )


def _parameters_of(optimizer: Optimizer) -> set[int]:
    return {id(p) for group in optimizer.param_groups for p in group["params"]}


def broadcast_optimizer_state(optimizer: Optimizer, meeting: JoinCollectives, *, root: int) -> None:
    """Give every rank one rank's state and settings of an optimizer; all ranks call it."""
    if meeting.group.rank() == root:
        told = _StateDescription(optimizer)
        _broadcast_text(told.text, meeting, root)
        _broadcast_coalesced(told.tensors, meeting, root)
    else:
        described = json.loads(_broadcast_text(None, meeting, root))
        _broadcast_coalesced(_allocate_state(optimizer, described), meeting, root)


def _allocate_state(optimizer: Optimizer, described: dict[str, Any]) -> list[Tensor]:
    """Take over settings and numbers, and make the tensors that there are to be."""
    for group, settings in zip(optimizer.param_groups, described["settings"], strict=True):
        for key, value in settings.items():
            group[key] = tuple(value) if isinstance(group.get(key), tuple) else value
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for place, key, value in described["values"]:
        optimizer.state[parameters[place]][key] = value
    tensors = []
    for place, key, dtype, shape, is_beside in described["tensors"]:
        device = parameters[place].device if is_beside else "cpu"
        tensor = torch.empty(shape, dtype=getattr(torch, dtype), device=device)
        optimizer.state[parameters[place]][key] = tensor
        tensors.append(tensor)
    return tensors


class _StateDescription:
    """What there is in an optimizer, in words, and its tensors."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.tensors: list[Tensor] = []
        self._values: list[tuple[int, str, object]] = []
        self._kinds: list[tuple[int, str, str, list[int], bool]] = []  # of the tensors
        places = (p for group in optimizer.param_groups for p in group["params"])
        for place, parameter in enumerate(places):
            for key, value in optimizer.state.get(parameter, {}).items():
                self._tell(place, key, value, parameter)
        settings = [
            {key: value for key, value in group.items() if key != "params" and _is_plain(value)}
            for group in optimizer.param_groups
        ]
        self.text = json.dumps(
            {"settings": settings, "values": self._values, "tensors": self._kinds}
        )

    def _tell(self, place: int, key: str, value: Any, parameter: Tensor) -> None:
        if isinstance(value, Tensor) and value.layout is torch.strided:
            dtype = str(value.dtype).removeprefix("torch.")
            is_beside = value.device == parameter.device  # whose number may be another elsewhere
            self._kinds.append((place, key, dtype, list(value.shape), is_beside))
            self.tensors.append(value)
        elif _is_plain(value):
            self._values.append((place, key, value))
        else:
            raise InvalidState(
                f"an optimizer keeps a {type(value).__name__} as {key!r}, which cannot be given to "
                "other ranks: leave it out of the join's optimizers, and share it yourself"
            )


def _is_plain(value: object) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)


def _broadcast_text(text: str | None, meeting: JoinCollectives, root: int) -> str:
    """Give every rank the root's text; the others have None."""
    data = b"" if text is None else text.encode()
    length = torch.tensor([len(data)], device=meeting.device)
    meeting.broadcast(length, root)
    card = torch.tensor(list(data or bytes(int(length))), dtype=torch.uint8, device=meeting.device)
    meeting.broadcast(card, root)
    return bytes(card.tolist()).decode()


def _broadcast_coalesced(tensors: Iterable[Tensor], meeting: JoinCollectives, root: int) -> None:
    """Give every rank the root's tensors, those of one type in one call."""
    kinds: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault(tensor.dtype, []).append(tensor)
    for same in kinds.values():
        flat = torch.cat([tensor.detach().reshape(-1).to(meeting.device) for tensor in same])
        meeting.broadcast(flat, root)
        parts = torch.split(flat, [tensor.numel() for tensor in same])
        for tensor, part in zip(same, parts, strict=True):
            tensor.detach().copy_(part.view(tensor.shape))
