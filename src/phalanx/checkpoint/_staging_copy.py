"""Plan where the tensors of a state go in a buffer, and copy them there."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..errors import SaveFailed
from ._marks import Piece
from ._staging_layout import Note, describe
from ._staging_memory import ALIGNMENT, Buffer, run_beside
from ._structure import Branch, Node, TensorLeaf, leaves
from ._tensors import nbytes

if TYPE_CHECKING:
    from ._staging import CheckpointStagerConfig

__all__ = ["Copy", "Plan"]

_MOST_THREADS = 4  # that copy; more do not make memory any faster
_WORTH_A_THREAD = 16 << 20  # bytes
_SMALL = 256 << 10  # bytes of a tensor that is copied at once
_DISTANCE = 64 << 10  # bytes from one sample of a tensor to the next
_SAMPLE = 16  # bytes
_LOT = 8 << 20  # bytes that a thread copies before it looks for more


@dataclass(frozen=True, slots=True)
class _Slot:
    """A tensor that is to be copied, and where to."""

    name: str
    source: Tensor
    offset: int
    size: int
    version: int | None
    """Counts the changes of the tensor that are over, if torch does."""


class Plan:
    """A state whose values are known, and whose tensors are about to be copied."""

    def __init__(self, tree: Node, pieces: Mapping[str, Piece]) -> None:
        self._tree = _with_pieces(tree, pieces) if pieces else tree
        self.slots: dict[str, _Slot] = {}
        """By name, so that tensors that are the same memory are copied once."""
        self.size = 0
        """Bytes of tensors."""
        self.room = 0
        """Bytes that the copy needs."""
        for leaf in leaves(self._tree):
            source = leaf.data.data if isinstance(leaf.data, Piece) else leaf.data
            if source is not None and leaf.name not in self.slots:
                size = nbytes(source.dtype, source.shape)
                slot = _Slot(leaf.name, source.detach(), self.room, size, _version(source))
                self.slots[leaf.name] = slot
                self.size += size
                self.room += size + -size % ALIGNMENT

    def note(self) -> Note:
        """Put the state into words."""
        return describe(self._tree, self._offset)

    def _offset(self, leaf: TensorLeaf) -> int:
        slot = self.slots.get(leaf.name)
        return -1 if slot is None else slot.offset

    def tree_in(self, memory: Tensor) -> Node:
        """Return the tree of the copy that lies in some memory."""
        copies = {name: _place(slot, memory) for name, slot in self.slots.items()}
        return _replace_tensors(self._tree, copies)

    def clone(self) -> Node:
        """Return the tree with copies in memory of this process's own."""
        copies = {name: slot.source.to("cpu", copy=True) for name, slot in self.slots.items()}
        return _replace_tensors(self._tree, copies)


def _place(slot: _Slot, memory: Tensor) -> Tensor:
    data = memory[slot.offset : slot.offset + slot.size]
    return data.view(slot.source.dtype).view(slot.source.shape)


def _check_there(slots: Iterable[_Slot]) -> None:
    """Raise if a tensor has lost its memory: to read it would be the end of the process."""
    for slot in slots:
        source = slot.source
        lengths = zip(source.shape, source.stride(), strict=True)
        last = source.storage_offset() + sum((size - 1) * stride for size, stride in lengths)
        has = source.untyped_storage().nbytes()
        if slot.size and has < (last + 1) * source.dtype.itemsize:
            raise SaveFailed(
                f"{slot.name} has no values to be copied: its storage was resized to {has} bytes"
            )


def _check_unchanged(slots: Iterable[_Slot], before: Mapping[str, Tensor]) -> None:
    """Raise if a tensor was changed between plan and copy: the copy is of no use then.

    Torch counts a change when it is over, and one may be under way: that is seen by samples.
    """
    for slot in slots:
        was_changed = slot.version is not None and slot.source._version != slot.version
        sample = before.get(slot.name)
        if was_changed or not (sample is None or torch.equal(sample, _sample(slot.source))):
            raise SaveFailed(
                f"{slot.name} was changed while it was copied: wait for the first of the two "
                "futures that save returns before the next step of the optimizer, or have the "
                "tensors copied within save (CheckpointStagerConfig(use_async_staging=False))"
            )


def _sample(tensor: Tensor) -> Tensor:
    """Copy some bytes of a tensor, from its start on at even distances."""
    data = tensor.view(-1).view(torch.uint8)
    return data.as_strided((len(data) // _DISTANCE, _SAMPLE), (_DISTANCE, 1)).clone()


def _version(tensor: Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version


def _with_pieces(node: Node, pieces: Mapping[str, Piece]) -> Node:
    if isinstance(node, Branch):
        children = {key: _with_pieces(each, pieces) for key, each in node.children.items()}
        return Branch(node.kind, children, node.mark)
    if isinstance(node, TensorLeaf):
        return replace(node, data=pieces.get(node.name, node.data))
    return node


def _replace_tensors(node: Node, copies: Mapping[str, Tensor]) -> Node:
    if isinstance(node, Branch):
        children = {key: _replace_tensors(each, copies) for key, each in node.children.items()}
        return Branch(node.kind, children, node.mark)
    if isinstance(node, TensorLeaf):
        copy = copies.get(node.name)
        is_piece = isinstance(node.data, Piece)
        return replace(node, data=replace(node.data, data=copy) if is_piece else copy)
    return node


class Copy:
    """The copying of one plan into one buffer, first of its small tensors, then of the others."""

    def __init__(self, plan: Plan, buffer: Buffer, config: CheckpointStagerConfig) -> None:
        self.plan = plan
        self.buffer = buffer
        self.seconds = 0.0
        """How long it has taken until now."""
        self._config = config
        self._large = [slot for slot in plan.slots.values() if _can_wait(slot)]
        self._before: dict[str, Tensor] = {}

    def small(self) -> None:
        """Copy the tensors that are hardly worth a thread, and take samples of the others."""
        self._copy([slot for slot in self.plan.slots.values() if not _can_wait(slot)])
        if self._config.use_async_staging:
            _check_there(self._large)
            simple = (slot for slot in self._large if _is_simple(slot.source))
            self._before = {slot.name: _sample(slot.source) for slot in simple}

    def large(self) -> None:
        """Copy the others, and make sure that nobody has changed one of them meanwhile."""
        self._copy(self._large)
        _check_there(self._large)
        _check_unchanged(self._large, self._before)

    def _copy(self, slots: Sequence[_Slot]) -> None:
        began = time.perf_counter()
        _check_there(slots)
        simple = [slot for slot in slots if _is_simple(slot.source)]
        others = [slot for slot in slots if not _is_simple(slot.source)]
        self._copy_by_torch(others)
        self._copy_bytes(list(_lots(simple)), sum(slot.size for slot in simple))
        if others and torch.accelerator.is_available():
            torch.accelerator.synchronize()
        self.seconds += time.perf_counter() - began

    def _copy_bytes(self, lots: list[tuple[Tensor, int]], size: int) -> None:
        threads = min(torch.get_num_threads(), _MOST_THREADS, size // _WORTH_A_THREAD)
        rest, errors = deque(lots), []

        def copy_some() -> None:
            try:
                while (lot := _next(rest)) is not None:
                    source, offset = lot
                    self.buffer.put(offset, source)
            except BaseException as error:  # noqa: BLE001 - raised below
                errors.append(error)
                rest.clear()

        others = [run_beside(copy_some, "phalanx-staging-copy") for _ in range(threads - 1)]
        copy_some()
        for other in others:
            if other is not None:
                other.join()
        if errors:
            raise errors[0]

    def _copy_by_torch(self, slots: Iterable[_Slot]) -> None:
        for slot in slots:
            place = _place(slot, self.buffer.bytes)
            place.copy_(slot.source, non_blocking=self._config.use_non_blocking_copy)


def _can_wait(slot: _Slot) -> bool:
    """Tell whether a tensor is worth a thread, and a change of it would be noticed meanwhile.

    Of one on an accelerator there is none: copies and changes have their turns in its queue.
    """
    return slot.size > _SMALL and (slot.source.device.type != "cpu" or _is_simple(slot.source))


def _next(lots: deque[tuple[Tensor, int]]) -> tuple[Tensor, int] | None:
    try:
        return lots.popleft()
    except IndexError:
        return None


def _is_simple(tensor: Tensor) -> bool:
    """Tell whether a tensor is plain bytes in main memory."""
    is_lazy = tensor.is_conj() or tensor.is_neg()
    return tensor.device.type == "cpu" and tensor.is_contiguous() and not is_lazy


def _lots(slots: Iterable[_Slot]) -> Iterable[tuple[Tensor, int]]:
    """Cut large tensors, so that threads have even work."""
    for slot in slots:
        if slot.size <= _LOT:
            yield slot.source, slot.offset
            continue
        flat = slot.source.view(-1)
        count = _LOT // flat.dtype.itemsize
        for start in range(0, len(flat), count):
            yield flat[start : start + count], slot.offset + start * flat.dtype.itemsize
