"""Buffers of a module in a step of micro-batches.

Every micro-batch starts from the buffers that the step started with, so that results do not depend
on which micro-batches ran earlier on this rank. After the step, a floating-point buffer is the mean
of what the micro-batches left in it, added up in the order of the gradients' tree, and any other
buffer is what micro-batch 0 left. An element that no micro-batch changed keeps its bits.

A module may replace a buffer by another tensor. Afterwards it has the tensor it had before the
step, with the new value. It may not create buffers in a step: on other ranks, micro-batches would
not find them.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from ..ddp._buckets import as_real
from ..ddp._communicator import Communicator, SumSlots, broadcast_coalesced, same_bits
from ..ddp._summation_tree import Node, SummationPlan, add_in_order, push, tree_order
from ..errors import InvalidArgument, InvalidState
from ._cover import Cover, sum_cover

BufferRule = Literal["mean", "first"]
RULES = ("mean", "first")
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


Table = dict[str, Tensor | None]
"""The buffers of one submodule, by name."""


@dataclass
class _BufferEntry:
    """A buffer: its name, and where modules keep it, which may be several places."""

    name: str
    tensor: Tensor
    is_persistent: bool
    places: list[tuple[Table, str]]

    def value(self) -> Tensor:
        """Return the buffer as the last micro-batch left it."""
        found = (table.get(key) for table, key in self.places)
        now = next((each for each in found if each is not self.tensor), self.tensor)
        if now is None or (now.shape, now.dtype) != (self.tensor.shape, self.tensor.dtype):
            got = "None" if now is None else f"{now.dtype}{list(now.shape)}"
            raise InvalidState(
                f"buffer {self.name!r} was {self.tensor.dtype}{list(self.tensor.shape)} when the "
                f"step began and is {got} now. Its shape and dtype must not change"
            )
        return now.detach()

    def put_back(self) -> None:
        """Put the tensor that the modules had in its places."""
        for table, key in self.places:
            table[key] = self.tensor


@dataclass
class _MeanGroup:
    """Buffers of one dtype and device, and the sums of this rank's micro-batches."""

    entries: list[_BufferEntry]
    start: Tensor  # all of them, flat, when the step began
    stack: list[Tensor] = field(default_factory=list)
    is_changed: Tensor | None = None  # elements that a micro-batch has changed

    @classmethod
    def of(cls, entries: list[_BufferEntry]) -> _MeanGroup:
        return cls(entries, _flatten(entries))

    def restore(self) -> None:
        self._store(self.start)

    def fold(self, merges: int) -> None:
        leaf = _flatten(self.entries)
        changed = _bits(leaf) != _bits(self.start)
        self.is_changed = changed if self.is_changed is None else self.is_changed | changed
        push(self.stack, leaf, merges, operator.add)

    def unchanged_sum(self, lo: int, hi: int) -> Tensor:
        """Return the sum over micro-batches that have left the buffers as they were."""
        return add_in_order([self.start] * (hi - lo), tree_order(hi - lo), operator.add)

    def finish(self, comm: Communicator, plan: SummationPlan, memory: SumSlots) -> None:
        """Replace the buffers by the mean over all ranks' micro-batches."""
        assert self.is_changed is not None
        numel = self.start.numel()
        for flat, node in zip(memory.inputs, self.stack, strict=False):
            flat[:numel] = node
        memory.inputs[0, numel : 2 * numel] = self.is_changed
        comm.ordered_sum(memory, plan, plan.leaves).wait()
        means, counts = memory.result[:numel], memory.result[numel : 2 * numel]
        self._store(torch.where(counts != 0, means, self.start))

    def finish_cover(self, comm: Communicator, nodes: list[Tensor], cover: Cover) -> None:
        """Like `finish`, but with the nodes that this rank contributes to a cover."""
        total = sum_cover(comm, nodes or [self.start], cover, cover.leaves)
        is_changed = self.start.new_zeros(self.start.numel())
        if self.is_changed is not None:
            is_changed[:] = self.is_changed
        comm.sum(is_changed).wait()
        self._store(torch.where(is_changed != 0, total, self.start))

    def _store(self, flat: Tensor) -> None:
        targets = [as_real(entry.tensor.data) for entry in self.entries]
        parts = torch.split(flat, [target.numel() for target in targets])
        values = [part.view(target.shape) for part, target in zip(parts, targets, strict=True)]
        torch._foreach_copy_(targets, values)
        for entry in self.entries:
            entry.put_back()


class StagedBuffers(NamedTuple):
    """What the micro-batches of a rank left in the buffers, in shared memory.

    See `BufferAverage.stage`.
    """

    means: list[Tensor]
    """For each kind of buffer a row per node, and one that says which elements have changed. Empty
    if nothing has."""
    firsts: Tensor | None  # the bytes that micro-batch 0 left; None if it changed none
    has_first: bool  # whether the rank has run micro-batch 0


class BufferAverage:
    """The buffers of a module, from the start of a step to its end."""

    def __init__(
        self,
        module: nn.Module,
        rules: Mapping[str, BufferRule],
    ) -> None:
        self._comm: Communicator
        self._plan: SummationPlan
        self._rules = rules
        self._submodules = list(module.named_modules())
        self._tables = [submodule._buffers for _, submodule in self._submodules]
        self._means: list[_MeanGroup] = []
        self._firsts: list[tuple[_BufferEntry, Tensor]] = []
        """Buffers that take micro-batch 0's value, each with its value at the start."""
        self._first_values: list[Tensor] = []
        # Their elements share memory: nothing writes to them.
        self._expanded: list[_BufferEntry] = []
        self._names: list[set[str]] = []  # of the buffers that each submodule had at the start
        self._memory: dict[Any, SumSlots] = {}  # by size, dtype and device
        self._staged: dict[int | str, Tensor] = {}  # the memory of `stage`, by kind
        self.changed_unsaved: dict[str, Tensor] = {}
        """Buffers that steps have changed and the module's state dict lacks, by name."""
        self._check_rules()

    def _check_rules(self) -> None:
        entries = self._find()
        for pattern, rule in self._rules.items():
            if rule not in RULES:
                raise InvalidArgument(
                    f"buffers[{pattern!r}] must be 'mean' or 'first', got {rule!r}"
                )
            matching = [entry for entry in entries if fnmatchcase(entry.name, pattern)]
            if not matching:
                raise InvalidArgument(f"buffers: the module has no buffer {pattern!r}")
            for entry in matching:
                if rule == "mean" and not _has_mean(entry.tensor):
                    raise InvalidArgument(
                        f"buffers: {entry.name!r} is {entry.tensor.dtype}, which has no mean. Use "
                        "'first'"
                    )

    def _find(self) -> list[_BufferEntry]:
        found: dict[int, _BufferEntry] = {}
        for path, submodule in self._submodules:
            table = submodule._buffers
            for key, tensor in table.items():
                if tensor is None:
                    continue
                name = f"{path}.{key}" if path else key
                persistent = key not in submodule._non_persistent_buffers_set
                entry = found.setdefault(id(tensor), _BufferEntry(name, tensor, persistent, []))
                entry.is_persistent |= persistent
                entry.places.append((table, key))
        return list(found.values())

    def named(self) -> list[tuple[str, Tensor]]:
        """List the buffers, each once, by their first name."""
        return [(entry.name, entry.tensor) for entry in self._find()]

    @contextmanager
    def loadable(self) -> Iterator[None]:
        """Have copies in place of expanded buffers, which nothing can be loaded into."""
        expanded = [entry for entry in self._find() if is_expanded(entry.tensor)]
        for entry in expanded:
            for table, key in entry.places:
                table[key] = entry.tensor.contiguous()
        try:
            yield
        finally:
            for entry in expanded:
                entry.put_back()

    def _rule_of(self, entry: _BufferEntry) -> BufferRule:
        for pattern, rule in self._rules.items():
            if fnmatchcase(entry.name, pattern):
                return rule
        is_real = not entry.tensor.is_complex()
        return "mean" if is_real and _has_mean(entry.tensor) else "first"

    def begin(self) -> None:
        """Remember the buffers that every micro-batch of the step starts with."""
        self._means, self._firsts, self._first_values, self._expanded = [], [], [], []
        self._names = [_present(table) for table in self._tables]
        kinds: dict[Any, list[_BufferEntry]] = {}
        for entry in self._find():
            if is_expanded(entry.tensor):
                self._expanded.append(entry)
            elif self._rule_of(entry) == "first":
                self._firsts.append((entry, entry.tensor.detach().clone()))
            elif entry.tensor.numel():
                kinds.setdefault((entry.tensor.dtype, entry.tensor.device), []).append(entry)
        self._means = [_MeanGroup.of(entries) for entries in kinds.values()]

    def attach(self, comm: Communicator, plan: SummationPlan) -> None:
        """Use a group, the first or another one."""
        self._comm, self._plan = comm, plan
        self._memory, self._staged = {}, {}

    @torch.no_grad()
    def restore(self) -> None:
        """Give the module the buffers that the step started with."""
        for mean in self._means:
            mean.restore()
        for entry, start in self._firsts:
            entry.put_back()
            entry.tensor.data.copy_(start)

    @torch.no_grad()
    def collect(self, micro_batch: int, merges: int) -> None:
        """Take what a micro-batch has left in the buffers.

        `merges`: how many nodes of the tree it completes; see `LeafBlock.merges`.
        """
        self._check_names()
        for mean in self._means:
            mean.fold(merges)
        if micro_batch == 0:
            self._first_values = [entry.value().clone() for entry, _ in self._firsts]

    def _check_names(self) -> None:
        for (path, _), table, before in zip(
            self._submodules, self._tables, self._names, strict=True
        ):
            new = sorted(_present(table) - before)
            if new:
                name = f"{path}.{new[0]}" if path else new[0]
                raise InvalidState(
                    f"buffer {name!r} was created in a micro-batch. Create it before the run, so "
                    "that every micro-batch starts with it"
                )
        for entry in self._expanded:
            if (
                entry.value() is not entry.tensor
                and entry.value().data_ptr() != entry.tensor.data_ptr()
            ):
                raise InvalidState(
                    f"buffer {entry.name!r}, an expanded tensor, was replaced in a micro-batch. "
                    "Register a copy of it (contiguous)"
                )

    def changed_kinds(self) -> tuple[bool, bool]:
        """Return (any "mean" buffer changed, any "first" buffer changed) on this rank."""
        means = any(mean.is_changed is not None and mean.is_changed.any() for mean in self._means)
        pairs = zip(self._firsts, self._first_values, strict=False)
        return means, any(not same_bits(start, value) for (_, start), value in pairs)

    @torch.no_grad()
    def finish(self, *, means_changed: bool, firsts_changed: bool) -> None:
        """Set the buffers of all ranks to the result of the step; all ranks call it.

        The arguments say whether `changed_kinds` returned True on any rank.
        """
        self.restore()
        if means_changed:
            for mean in self._means:
                mean.finish(self._comm, self._plan, self._memory_for(mean.start))
        if firsts_changed:
            self._take_first_values(0)
        if means_changed or firsts_changed:
            self._note_unsaved()

    def _take_first_values(self, root: int) -> None:
        """Set "first" buffers to what micro-batch 0 left in them, which rank `root` has run."""
        tensors = [entry.tensor.data for entry, _ in self._firsts]
        for tensor, value in zip(tensors, self._first_values, strict=False):
            tensor.copy_(value)
        if self._comm.size > 1:
            broadcast_coalesced(tensors, self._comm, root=root)

    def _note_unsaved(self) -> None:
        entries = [entry for mean in self._means for entry in mean.entries]
        entries += [entry for entry, _ in self._firsts]
        self.changed_unsaved.update(
            {entry.name: entry.tensor for entry in entries if not entry.is_persistent}
        )

    # -- after a rank was lost ---------------------------------------------------------------

    def nodes(self) -> list[list[Tensor]]:
        """Return the sums so far: for each node of the tree, one tensor per kind of buffer."""
        return [list(each) for each in zip(*(mean.stack for mean in self._means), strict=True)]

    def take_nodes(self) -> list[list[Tensor]]:
        """Return the sums so far, and start again."""
        nodes = self.nodes()
        for mean in self._means:
            mean.stack = []
        return nodes

    @torch.no_grad()
    def stage(self, *, means_changed: bool, firsts_changed: bool) -> StagedBuffers:
        """Copy the sums so far, and the values of micro-batch 0, to shared memory.

        The arguments say what `changed_kinds` returned on this rank. Nothing is copied of what did
        not change: every rank knows the buffers that the step started with.
        """
        means = []
        for i, mean in enumerate(self._means if means_changed else ()):
            assert mean.is_changed is not None
            shape = len(mean.stack) + 1, mean.start.numel()
            memory = self._staging_memory(i, shape, mean.start.dtype)
            for row, node in zip(memory, [*mean.stack, mean.is_changed], strict=True):
                row.copy_(node)
            means.append(memory)
        firsts = None
        if firsts_changed:
            flat = [value.reshape(-1).view(torch.uint8) for value in self._first_values]
            values = torch.cat(flat)
            firsts = self._staging_memory("firsts", tuple(values.shape), torch.uint8).copy_(values)
        return StagedBuffers(means, firsts, has_first=bool(self._first_values))

    def _staging_memory(
        self, kind: int | str, shape: tuple[int, ...], dtype: torch.dtype
    ) -> Tensor:
        known = self._staged.get(kind)
        if known is not None and (known.shape, known.dtype) == (shape, dtype):
            return known
        cpu = torch.device("cpu")
        made = self._comm.allocate(math.prod(shape), dtype, cpu, warns=False).view(shape)
        self._staged[kind] = made
        return made

    @torch.no_grad()
    def adopt(self, staged: StagedBuffers, nodes: Sequence[Node]) -> list[list[Tensor]]:
        """Take over what a lost rank has staged; return its sums as `nodes` does."""
        if staged.has_first and not self._first_values:
            self._first_values = [start for _, start in self._firsts]
            if staged.firsts is not None:
                sizes = [start.nbytes for start in self._first_values]
                parts = torch.split(staged.firsts, sizes)
                self._first_values = [
                    part.clone().view(start.dtype).view(start.shape)
                    for part, start in zip(parts, self._first_values, strict=True)
                ]
        sums: list[list[Tensor]] = [[] for _ in nodes]
        for i, mean in enumerate(self._means):
            if staged.means:
                *rows, changed = staged.means[i]
                is_changed = changed != 0
                mean.is_changed = (
                    is_changed if mean.is_changed is None else mean.is_changed | is_changed
                )
            else:
                rows = [mean.unchanged_sum(lo, hi) for lo, hi in nodes]
            for each, row in zip(sums, rows, strict=True):
                each.append(row)
        return sums

    @property
    def has_first_values(self) -> bool:
        """Whether this rank can give "first" buffers their values: it has run micro-batch 0, or has
        taken them over from a lost rank, or there are no such buffers."""
        return not self._firsts or bool(self._first_values)

    @torch.no_grad()
    def finish_cover(
        self,
        nodes: list[list[Tensor]],
        cover: Cover,
        *,
        means_changed: bool,
        first_rank: int | None,
    ) -> None:
        """Like `finish`, but with the nodes that this rank contributes to a cover.

        `first_rank`: the rank that gives "first" buffers their values; None if none has changed.
        """
        self.restore()
        if means_changed:
            for i, mean in enumerate(self._means):
                mean.finish_cover(self._comm, [each[i] for each in nodes], cover)
        if first_rank is not None:
            self._take_first_values(first_rank)
        if means_changed or first_rank is not None:
            self._note_unsaved()

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


def _flatten(entries: list[_BufferEntry]) -> Tensor:
    return torch.cat([as_real(entry.value()).reshape(-1) for entry in entries])


def _bits(tensor: Tensor) -> Tensor:
    """Return numbers as integers: two may be equal and have different bits."""
    return tensor.view(_BITS[tensor.itemsize])


def _present(table: Table) -> set[str]:
    return {key for key, tensor in table.items() if tensor is not None}


def is_expanded(tensor: Tensor) -> bool:
    """Whether elements of a tensor share memory, so that none can be written to."""
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return any(length > 1 and stride == 0 for length, stride in pairs)
