"""Buffers of a module in a step of micro-batches.

Every micro-batch starts from the buffers that the step started with, so that results do not depend
on which micro-batches ran earlier on this rank. After the step, a floating-point buffer is the mean
of what the micro-batches left in it, added up in the order of the gradients' tree, and any other
buffer is what micro-batch 0 left. An element that no micro-batch changed keeps its bits.

A module may replace a buffer by another tensor. Afterwards it has the tensor it had before the
step, with the new value.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..ddp._buckets import as_real
from ..ddp._communicator import Communicator, SumSlots, broadcast_coalesced
from ..ddp._summation_tree import SummationPlan, push
from ..errors import InvalidArgument, InvalidState

BufferRule = Literal["mean", "first"]
RULES = ("mean", "first")
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass
class _BufferSlot:
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

    def set(self, value: Tensor) -> None:
        """Show the tensor that the module had, with a value."""
        self.table[self.key] = self.tensor
        self.tensor.data.copy_(value)


@dataclass
class _MeanGroup:
    """Buffers of one dtype and device, and the sums of this rank's micro-batches."""

    slots: list[_BufferSlot]
    start: Tensor  # all of them, flat, when the step began
    stack: list[Tensor] = field(default_factory=list)
    is_changed: Tensor | None = None  # elements that a micro-batch has changed

    @classmethod
    def of(cls, slots: list[_BufferSlot]) -> _MeanGroup:
        return cls(slots, _flatten(slots))

    def restore(self) -> None:
        self._store(self.start)

    def fold(self, merges: int) -> None:
        leaf = _flatten(self.slots)
        changed = _bits(leaf) != _bits(self.start)
        self.is_changed = changed if self.is_changed is None else self.is_changed | changed
        push(self.stack, leaf, merges, operator.add)

    def finish(self, comm: Communicator, plan: SummationPlan, memory: SumSlots) -> None:
        """Replace the buffers by the mean over all ranks' micro-batches."""
        assert self.is_changed is not None
        numel = self.start.numel()
        for slot, node in zip(memory.tensor, self.stack, strict=False):
            slot[:numel] = node
        first = memory.tensor[0]
        first[numel : 2 * numel] = self.is_changed
        comm.ordered_sum(memory, plan, plan.leaves).wait()
        self._store(torch.where(first[numel : 2 * numel] != 0, first[:numel], self.start))

    def _store(self, flat: Tensor) -> None:
        targets = [as_real(slot.tensor.data) for slot in self.slots]
        parts = torch.split(flat, [target.numel() for target in targets])
        values = [part.view(target.shape) for part, target in zip(parts, targets, strict=True)]
        torch._foreach_copy_(targets, values)
        for slot in self.slots:
            slot.table[slot.key] = slot.tensor


class BufferAverage:
    """The buffers of a module, from the start of a step to its end."""

    def __init__(
        self,
        module: nn.Module,
        comm: Communicator,
        plan: SummationPlan,
        rules: Mapping[str, BufferRule],
    ) -> None:
        self._comm = comm
        self._plan = plan
        self._rules = rules
        self._submodules = list(module.named_modules())
        self._means: list[_MeanGroup] = []
        self._firsts: list[tuple[_BufferSlot, Tensor, int]] = []
        """Buffers that take micro-batch 0's value, each with its value and version at the start."""
        self._first_values: list[Tensor] = []
        self._memory: dict[Any, SumSlots] = {}  # by size, dtype and device
        self._check_rules()

    def _check_rules(self) -> None:
        slots = self._find()
        for pattern, rule in self._rules.items():
            if rule not in RULES:
                raise InvalidArgument(
                    f"buffers[{pattern!r}] must be 'mean' or 'first', got {rule!r}"
                )
            matching = [slot for slot in slots if fnmatchcase(slot.name, pattern)]
            if not matching:
                raise InvalidArgument(f"buffers: the module has no buffer {pattern!r}")
            for slot in matching:
                if rule == "mean" and not _has_mean(slot.tensor):
                    raise InvalidArgument(
                        f"buffers: {slot.name!r} is {slot.tensor.dtype}, which has no mean. Use "
                        "'first'"
                    )

    def _find(self) -> list[_BufferSlot]:
        found: dict[int, _BufferSlot] = {}
        for path, submodule in self._submodules:
            for key, tensor in submodule._buffers.items():
                if tensor is not None:
                    name = f"{path}.{key}" if path else key
                    found.setdefault(id(tensor), _BufferSlot(name, submodule._buffers, key, tensor))
        return list(found.values())

    def _rule_of(self, slot: _BufferSlot) -> BufferRule:
        for pattern, rule in self._rules.items():
            if fnmatchcase(slot.name, pattern):
                return rule
        is_real = not slot.tensor.is_complex()
        return "mean" if is_real and _has_mean(slot.tensor) else "first"

    def begin(self) -> None:
        """Remember the buffers that every micro-batch of the step starts with."""
        self._means, self._firsts, self._first_values = [], [], []
        kinds: dict[Any, list[_BufferSlot]] = {}
        for slot in self._find():
            if self._rule_of(slot) == "first":
                value = slot.tensor.detach().clone()
                self._firsts.append((slot, value, slot.tensor._version))
            elif slot.tensor.numel():
                kinds.setdefault((slot.tensor.dtype, slot.tensor.device), []).append(slot)
        self._means = [_MeanGroup.of(slots) for slots in kinds.values()]

    @torch.no_grad()
    def restore(self) -> None:
        """Give the next micro-batch the buffers that the step started with."""
        for mean in self._means:
            mean.restore()
        for slot, start, version in self._firsts:
            if slot.table.get(slot.key) is not slot.tensor or slot.tensor._version != version:
                slot.set(start)

    @torch.no_grad()
    def collect(self, micro_batch: int) -> None:
        """Take what a micro-batch has left in the buffers."""
        block = self._plan.block
        for mean in self._means:
            mean.fold(block.merges[micro_batch - block.lo])
        if micro_batch == 0:
            self._first_values = [slot.value().clone() for slot, _, _ in self._firsts]

    def changes(self) -> tuple[bool, bool]:
        """Return (any "mean" buffer changed, any "first" buffer changed) on this rank."""
        means = any(mean.is_changed is not None and mean.is_changed.any() for mean in self._means)
        pairs = zip(self._firsts, self._first_values, strict=False)
        return means, any(not _same_bits(start, value) for (_, start, _), value in pairs)

    @torch.no_grad()
    def finish(self, *, means_changed: bool, firsts_changed: bool) -> None:
        """Set the buffers of all ranks to the result of the step; all ranks call it.

        The arguments say whether `changes` returned True on any rank.
        """
        for mean in self._means:
            if means_changed:
                mean.finish(self._comm, self._plan, self._memory_for(mean.start))
            else:
                mean.restore()
        for slot, start, _ in self._firsts:
            slot.set(start)
        if firsts_changed:
            tensors = [slot.tensor.data for slot, _, _ in self._firsts]
            for tensor, value in zip(tensors, self._first_values, strict=False):
                tensor.copy_(value)
            if self._comm.size > 1:
                broadcast_coalesced(tensors, self._comm, root=0)

    def _memory_for(self, flat: Tensor) -> SumSlots:
        """Return memory for the sums and for the flags of what has changed."""
        key = flat.numel(), flat.dtype, flat.device
        if key not in self._memory:
            numel = 2 * flat.numel()
            made = self._comm.allocate_slots(self._plan.slots, numel, flat.dtype, flat.device)
            self._memory[key] = made
        return self._memory[key]


def _has_mean(tensor: Tensor) -> bool:
    return tensor.is_complex() or (tensor.is_floating_point() and tensor.itemsize > 1)


def _flatten(slots: list[_BufferSlot]) -> Tensor:
    return torch.cat([as_real(slot.value()).reshape(-1) for slot in slots])


def _bits(tensor: Tensor) -> Tensor:
    """Return numbers as integers: two may be equal and have different bits."""
    return tensor.view(_BITS[tensor.itemsize])


def _same_bits(one: Tensor, other: Tensor) -> bool:
    flat = [tensor.contiguous().view(-1).view(torch.uint8) for tensor in (one, other)]
    return torch.equal(*flat)
