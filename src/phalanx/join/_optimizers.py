"""The state of optimizers, of which ranks that ran out of data have made fewer steps.

The model is the same on all ranks after a join, for one rank's is given to all. If the optimizer's
state is not, the next steps take the ranks apart, silently. So it is given to all as well: what is
in it as a line of text, and the tensors of one type together.
"""

from __future__ import annotations

import json
import threading
import warnings
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from ..errors import InvalidState
from ._shadowing import Meeting

__all__ = ["Bystanders", "share_state"]

Slot = tuple[int, str]  # of a parameter by its number among all, and what is kept of it


class Bystanders:
    """Optimizers that step in a block, and that neither it nor a joinable looks after."""

    def __init__(self, known: Iterable[object]) -> None:
        self._known = {
            id(parameter)
            for optimizer in known
            if isinstance(optimizer, Optimizer)
            for group in optimizer.param_groups
            for parameter in group["params"]
        }
        self._seen: dict[int, Optimizer] = {}
        self._handle: RemovableHandle | None = None

    def watch(self) -> None:
        """Take notice of steps from now on."""
        self._thread = threading.get_ident()  # others may be other ranks
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
            first = optimizer.param_groups[0]["params"][0]
            if id(first) not in self._known and any(optimizer.state.values()):
                warnings.warn(
                    "ranks that ran out of data have made fewer steps of "
                    f"{type(optimizer).__name__}, and its state is theirs alone now: pass "
                    "optimizers=[...] to the join if training goes on after it",
                    stacklevel=5,
                )


def share_state(optimizer: Optimizer, meeting: Meeting, *, root: int) -> None:
    """Give every rank one rank's state and settings of an optimizer; all ranks call it."""
    told = _Told(optimizer) if meeting.group.rank() == root else None
    text = _broadcast_text("" if told is None else told.text, meeting, root)
    described = json.loads(text)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    tensors = [] if told is None else told.tensors
    if told is None:
        for group, settings in zip(optimizer.param_groups, described["settings"], strict=True):
            group.update(settings)
        for place, key, value in described["values"]:
            optimizer.state[parameters[place]][key] = value
        for place, key, dtype, shape, device in described["tensors"]:
            tensor = torch.empty(shape, dtype=getattr(torch, dtype), device=device)
            optimizer.state[parameters[place]][key] = tensor
            tensors.append(tensor)
    _broadcast_together(tensors, meeting, root)


class _Told:
    """What there is in an optimizer, in words, and its tensors."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.tensors: list[Tensor] = []
        self._values: list[tuple[int, str, object]] = []
        self._tensors: list[tuple[int, str, str, list[int], str]] = []
        places = (p for group in optimizer.param_groups for p in group["params"])
        for place, parameter in enumerate(places):
            for key, value in optimizer.state.get(parameter, {}).items():
                self._tell((place, key), value)
        settings = [
            {key: value for key, value in group.items() if key != "params" and _is_plain(value)}
            for group in optimizer.param_groups
        ]
        self.text = json.dumps(
            {"settings": settings, "values": self._values, "tensors": self._tensors}
        )

    def _tell(self, slot: Slot, value: Any) -> None:
        if isinstance(value, Tensor) and value.layout is torch.strided:
            dtype = str(value.dtype).removeprefix("torch.")
            self._tensors.append((*slot, dtype, list(value.shape), str(value.device)))
            self.tensors.append(value)
        elif _is_plain(value):
            self._values.append((*slot, value))
        else:
            raise InvalidState(
                f"an optimizer keeps a {type(value).__name__} as {slot[1]!r}, which cannot be "
                "given to other ranks: leave it out of the join's optimizers, and share it yourself"
            )


def _is_plain(value: object) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)


def _broadcast_text(text: str, meeting: Meeting, root: int) -> str:
    data = torch.frombuffer(bytearray(text.encode() or b" "), dtype=torch.uint8)
    length = torch.tensor([len(data)], device=meeting.device)
    meeting.broadcast(length, root)
    card = data.to(meeting.device) if text else torch.empty(
        int(length), dtype=torch.uint8, device=meeting.device
    )  # fmt: skip
    meeting.broadcast(card, root)
    return bytes(card.cpu().tolist()).decode()


def _broadcast_together(tensors: Iterable[Tensor], meeting: Meeting, root: int) -> None:
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
