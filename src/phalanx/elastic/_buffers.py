"""Buffers of a module in a step of micro-batches.

Every micro-batch starts from the buffers that the step started with, since which micro-batches ran
before it on the same rank must leave no trace. After the step, a floating-point buffer is the mean
of what the micro-batches left in it, added up in the order of the gradients' tree, and any other
buffer is what micro-batch 0 left. An element that no micro-batch changed keeps its bits.

A module may replace a buffer by another tensor. Afterwards it has the tensor it had before the
step, with the new value.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..ddp._communicator import Communicator, broadcast_coalesced
from ..ddp._summation_tree import Combination, MicroBatchBlock
from ..errors import InvalidArgument, InvalidState

BufferRule = Literal["mean", "first"]
RULES = ("mean", "first")
SLICE_GRAIN = 64
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass
class _BufferPlace:
    """A buffer: its name, and where its module keeps it."""

    name: str
    table: dict[str, Tensor | None]
    key: str
    tensor: Tensor

    def value(self) -> Tensor:
        """Return the buffer as the last micro-batch left it."""
        now = self.table.get(self.key)
        if now is None or (now.shape, now.dtype) != (self.tensor.shape, self.tensor.dtype):
            got = "None" if now is None else f"{now.dtype}{list(now.shape)}"
            raise InvalidState(
                f"buffer {self.name!r} was {self.tensor.dtype}{list(self.tensor.shape)} when the "
                f"step began and is {got} now. Its shape and dtype must not change"
            )
        return now.detach()


@dataclass
class _MeanOfBuffers:
    """Floating-point buffers of one dtype and device, and the sums of this rank's micro-batches."""

    places: list[_BufferPlace]
    start: Tensor  # all of them, flat, when the step began
    views: list[Tensor]  # of `start`, with the shapes of the buffers
    stack: list[Tensor] = field(default_factory=list)
    is_changed: Tensor | None = None  # elements that a micro-batch has changed

    def restore(self) -> None:
        for place in self.places:
            place.table[place.key] = place.tensor
        torch._foreach_copy_([place.tensor.data for place in self.places], self.views)

    def fold(self, merges: int) -> None:
        leaf = torch.cat([place.value().reshape(-1) for place in self.places])
        changed = _bits(leaf) != _bits(self.start)
        self.is_changed = changed if self.is_changed is None else self.is_changed | changed
        self.stack.append(leaf)
        for _ in range(merges):
            right = self.stack.pop()
            self.stack[-1] = self.stack[-1] + right

    def finish(self, comm: Communicator, combination: Combination, leaves: int) -> None:
        """Replace the buffers by the mean over all ranks' micro-batches."""
        assert self.is_changed is not None
        numel = self.start.numel()
        changed = self.is_changed.to(self.start.dtype)
        if comm.size > 1:
            grain = comm.size * SLICE_GRAIN
            stride = -(-2 * numel // grain) * grain
            slots = comm.allocate(combination.slots * stride, self.start.dtype, self.start.device)
            slots = slots.zero_().view(combination.slots, stride)
            for slot, node in zip(slots, self.stack, strict=False):
                slot[:numel] = node
            slots[0, numel : 2 * numel] = changed
            shares = comm.shares_memory and comm.can_sum_trees_in_place(slots)
            shares = all(each for (each,) in comm.gather_numbers([int(shares)]))
            comm.sum_trees(slots, combination, leaves, in_place=shares).wait()
            mean, changed = slots[0, :numel], slots[0, numel : 2 * numel]
        else:
            mean = self.stack[0] / leaves
        flat = torch.where(changed != 0, mean, self.start)
        for place, part in zip(self.places, self._split(flat), strict=True):
            place.table[place.key] = place.tensor
            place.tensor.data.copy_(part)

    def _split(self, flat: Tensor) -> list[Tensor]:
        parts = torch.split(flat, [place.tensor.numel() for place in self.places])
        return [p.view(place.tensor.shape) for p, place in zip(parts, self.places, strict=True)]


class BufferAverage:
    """The buffers of a module, from the start of a step to its end."""

    def __init__(
        self,
        module: nn.Module,
        comm: Communicator,
        block: MicroBatchBlock,
        combination: Combination,
        rules: Mapping[str, BufferRule],
    ) -> None:
        self._module = module
        self._comm = comm
        self._block = block
        self._combination = combination
        self._rules = rules
        self._means: list[_MeanOfBuffers] = []
        self._firsts: list[tuple[_BufferPlace, Tensor, int]] = []
        """Buffers of which micro-batch 0 decides, each with its value and version at the start."""
        self._first_values: list[Tensor] = []
        names = [place.name for place in self._places()]
        for pattern, rule in rules.items():
            if rule not in RULES:
                raise InvalidArgument(
                    f"buffers[{pattern!r}] must be 'mean' or 'first', got {rule!r}"
                )
            if not any(fnmatchcase(name, pattern) for name in names):
                raise InvalidArgument(f"buffers: the module has no buffer {pattern!r}")

    def _places(self) -> list[_BufferPlace]:
        found: dict[int, _BufferPlace] = {}
        for path, submodule in self._module.named_modules():
            for key, tensor in submodule._buffers.items():
                if tensor is not None:
                    name = f"{path}.{key}" if path else key
                    place = _BufferPlace(name, submodule._buffers, key, tensor)
                    found.setdefault(id(tensor), place)
        return list(found.values())

    def _rule_of(self, place: _BufferPlace) -> BufferRule:
        for pattern, rule in self._rules.items():
            if fnmatchcase(place.name, pattern):
                return rule
        return "mean" if place.tensor.is_floating_point() else "first"

    def begin(self) -> None:
        """Remember the buffers that every micro-batch of the step starts with."""
        self._means, self._firsts, self._first_values = [], [], []
        kinds: dict[Any, list[_BufferPlace]] = {}
        for place in self._places():
            if self._rule_of(place) == "first":
                value = place.tensor.detach().clone()
                self._firsts.append((place, value, place.tensor._version))
            elif place.tensor.numel():
                kinds.setdefault((place.tensor.dtype, place.tensor.device), []).append(place)
        for places in kinds.values():
            start = torch.cat([place.tensor.detach().reshape(-1) for place in places])
            mean = _MeanOfBuffers(places, start, [])
            mean.views = mean._split(start)
            self._means.append(mean)

    @torch.no_grad()
    def restore(self) -> None:
        """Give the next micro-batch the buffers that the step started with."""
        for mean in self._means:
            mean.restore()
        for place, start, version in self._firsts:
            if place.table.get(place.key) is not place.tensor or place.tensor._version != version:
                place.table[place.key] = place.tensor
                place.tensor.data.copy_(start)

    @torch.no_grad()
    def collect(self, micro_batch: int) -> None:
        """Take what a micro-batch has left in the buffers."""
        for mean in self._means:
            mean.fold(self._block.merges[micro_batch - self._block.lo])
        if micro_batch == 0:
            self._first_values = [place.value().clone() for place, _, _ in self._firsts]

    def changes(self) -> tuple[bool, bool]:
        """Return whether a mean has changed here, and whether micro-batch 0 ran here and changed a
        buffer of which it decides."""
        means = any(mean.is_changed is not None and mean.is_changed.any() for mean in self._means)
        pairs = zip(self._firsts, self._first_values, strict=False)
        return means, any(not _same_bits(start, value) for (_, start, _), value in pairs)

    @torch.no_grad()
    def finish(self, *, means_changed: bool, firsts_changed: bool) -> None:
        """Set the buffers of all ranks to the result of the step; all ranks call it.

        The arguments say whether `changes` returned True on any rank.
        """
        if means_changed:
            for mean in self._means:
                mean.finish(self._comm, self._combination, self._block.leaves)
        else:
            for mean in self._means:
                mean.restore()
        for place, start, _ in self._firsts:
            place.table[place.key] = place.tensor
            place.tensor.data.copy_(start)
        if firsts_changed:
            tensors = [place.tensor.data for place, _, _ in self._firsts]
            for tensor, value in zip(tensors, self._first_values, strict=False):
                tensor.copy_(value)
            if self._comm.size > 1:
                broadcast_coalesced(tensors, self._comm, root=0)


def _bits(tensor: Tensor) -> Tensor:
    """Return a flat tensor as integers: two numbers may be equal and have different bits."""
    return tensor.view(_BITS[tensor.itemsize]) if tensor.itemsize in _BITS else tensor


def _same_bits(one: Tensor, other: Tensor) -> bool:
    flat = [tensor.contiguous().view(-1).view(torch.uint8) for tensor in (one, other)]
    return torch.equal(*flat)
