"""Staging: copy a state so that training may change it while the copy is written.

Of state that is marked `Replicated`, only the bytes that this rank writes are copied. Values
that are not tensors and small tensors are copied in the call; large tensors by the caller or by
a thread, as the configuration says. A tensor that was modified before its copy was complete
fails the save: version counters and sampled bytes are compared before and after.
"""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..errors import InvalidState, SaveFailed
from ._progress import wrap_future
from ._replication import replicated_shards
from ._staging_buffer import (
    ALIGNMENT,
    Layout,
    StagingBuffer,
    StagingBufferPool,
    layout_of_tree,
    out_of_memory,
    start_daemon_thread,
    state_from_tree,
)
from ._state_tree import Branch, Node, ReplicatedShard, TensorLeaf, leaves, parse_state
from ._tensor_file import nbytes
from ._types import STATE_DICT, RankInfo

_MAX_COPY_THREADS = 4  # that copy; more do not make memory any faster
_BYTES_PER_THREAD = 16 << 20  # bytes
_SMALL_BYTES = 256 << 10  # bytes of a tensor that is copied at once
_SAMPLE_DISTANCE = 64 << 10  # bytes from one sample of a tensor to the next
_SAMPLE_BYTES = 16  # bytes
_COPY_BYTES = 8 << 20  # bytes that a thread copies before it looks for more


@dataclass(frozen=True, slots=True)
class _Slot:
    """A tensor that is to be copied, and where to."""

    name: str
    source: Tensor
    offset: int
    size: int
    version: int | None
    """Counts the changes of the tensor that are over, if torch does."""


class StagingPlan:
    """A state whose values are known, and whose tensors are about to be copied."""

    def __init__(self, tree: Node, pieces: Mapping[str, ReplicatedShard]) -> None:
        self._tree = _with_pieces(tree, pieces) if pieces else tree
        self.slots: dict[str, _Slot] = {}
        """By name, so that tensors that are the same memory are copied once."""
        self.size = 0
        """Bytes of tensors."""
        self.room = 0
        """Bytes that the copy needs."""
        for leaf in leaves(self._tree):
            source = leaf.data.data if isinstance(leaf.data, ReplicatedShard) else leaf.data
            if source is not None and leaf.name not in self.slots:
                size = nbytes(source.dtype, source.shape)
                slot = _Slot(leaf.name, source.detach(), self.room, size, _version(source))
                self.slots[leaf.name] = slot
                self.size += size
                self.room += size + -size % ALIGNMENT

    def note(self) -> Layout:
        """Put the state into words."""
        return layout_of_tree(self._tree, self._offset)

    def _offset(self, leaf: TensorLeaf) -> int:
        slot = self.slots.get(leaf.name)
        return -1 if slot is None else slot.offset

    def tree_in(self, memory: Tensor) -> Node:
        """Return the tree of the copy that lies in some memory."""
        copies = {name: _view_in(slot, memory) for name, slot in self.slots.items()}
        return _replace_tensors(self._tree, copies)

    def clone(self) -> Node:
        """Return the tree with copies in memory of this process's own."""
        copies = {name: slot.source.to("cpu", copy=True) for name, slot in self.slots.items()}
        return _replace_tensors(self._tree, copies)


def _view_in(slot: _Slot, memory: Tensor) -> Tensor:
    data = memory[slot.offset : slot.offset + slot.size]
    return data.view(slot.source.dtype).view(slot.source.shape)


def _check_allocated(slots: Iterable[_Slot]) -> None:
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
    return data.as_strided(
        (len(data) // _SAMPLE_DISTANCE, _SAMPLE_BYTES), (_SAMPLE_DISTANCE, 1)
    ).clone()


def _version(tensor: Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version


def _with_pieces(node: Node, pieces: Mapping[str, ReplicatedShard]) -> Node:
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
        is_piece = isinstance(node.data, ReplicatedShard)
        return replace(node, data=replace(node.data, data=copy) if is_piece else copy)
    return node


class StagingCopy:
    """The copying of one plan into one buffer, first of its small tensors, then of the others."""

    def __init__(
        self, plan: StagingPlan, buffer: StagingBuffer, config: CheckpointStagerConfig
    ) -> None:
        self.plan = plan
        self.buffer = buffer
        self.seconds = 0.0
        """How long it has taken until now."""
        self._config = config
        self._large = [slot for slot in plan.slots.values() if _is_deferrable(slot)]
        self._before: dict[str, Tensor] = {}

    def small(self) -> None:
        """Copy the tensors that are hardly worth a thread, and take samples of the others."""
        self._copy([slot for slot in self.plan.slots.values() if not _is_deferrable(slot)])
        if self._config.use_async_staging:
            _check_allocated(self._large)
            simple = (slot for slot in self._large if _is_simple(slot.source))
            self._before = {slot.name: _sample(slot.source) for slot in simple}

    def large(self) -> None:
        """Copy the others, and make sure that nobody has changed one of them meanwhile."""
        self._copy(self._large)
        _check_allocated(self._large)
        _check_unchanged(self._large, self._before)

    def _copy(self, slots: Sequence[_Slot]) -> None:
        began = time.perf_counter()
        _check_allocated(slots)
        simple = [slot for slot in slots if _is_simple(slot.source)]
        others = [slot for slot in slots if not _is_simple(slot.source)]
        self._copy_by_torch(others)
        self._copy_bytes(list(_copy_pieces(simple)), sum(slot.size for slot in simple))
        if others and torch.accelerator.is_available():
            torch.accelerator.synchronize()
        self.seconds += time.perf_counter() - began

    def _copy_bytes(self, lots: list[tuple[Tensor, int]], size: int) -> None:
        threads = min(torch.get_num_threads(), _MAX_COPY_THREADS, size // _BYTES_PER_THREAD)
        rest, errors = deque(lots), []

        def copy_some() -> None:
            try:
                while (lot := _pop_or_none(rest)) is not None:
                    source, offset = lot
                    self.buffer.put(offset, source)
            except BaseException as error:  # noqa: BLE001 - raised below
                errors.append(error)
                rest.clear()

        others = [
            start_daemon_thread(copy_some, "phalanx-staging-copy") for _ in range(threads - 1)
        ]
        copy_some()
        for other in others:
            if other is not None:
                other.join()
        if errors:
            raise errors[0]

    def _copy_by_torch(self, slots: Iterable[_Slot]) -> None:
        for slot in slots:
            place = _view_in(slot, self.buffer.bytes)
            place.copy_(slot.source, non_blocking=self._config.use_non_blocking_copy)


def _is_deferrable(slot: _Slot) -> bool:
    """Tell whether a tensor is worth a thread, and a change of it would be noticed meanwhile.

    Of one on an accelerator there is none: copies and changes have their turns in its queue.
    """
    return slot.size > _SMALL_BYTES and (
        slot.source.device.type != "cpu" or _is_simple(slot.source)
    )


def _pop_or_none(lots: deque[tuple[Tensor, int]]) -> tuple[Tensor, int] | None:
    try:
        return lots.popleft()
    except IndexError:
        return None


def _is_simple(tensor: Tensor) -> bool:
    """Tell whether a tensor is plain bytes in main memory."""
    is_lazy = tensor.is_conj() or tensor.is_neg()
    return tensor.device.type == "cpu" and tensor.is_contiguous() and not is_lazy


def _copy_pieces(slots: Iterable[_Slot]) -> Iterable[tuple[Tensor, int]]:
    """Cut large tensors, so that threads have even work."""
    for slot in slots:
        if slot.size <= _COPY_BYTES:
            yield slot.source, slot.offset
            continue
        flat = slot.source.view(-1)
        count = _COPY_BYTES // flat.dtype.itemsize
        for start in range(0, len(flat), count):
            yield flat[start : start + count], slot.offset + start * flat.dtype.itemsize


def check_not_forked(pid: int) -> None:
    """Raise in a fork of the process in which something was made: it lacks the threads."""
    if pid != os.getpid():
        raise InvalidState(
            f"this was made in process {pid}, of which {os.getpid()} is a fork: make one here"
        )


class CheckpointStager(ABC):
    """Copy states to where a writer can take its time over them."""

    @abstractmethod
    def stage(self, state_dict: STATE_DICT, **kwargs: Any) -> STATE_DICT | Future[STATE_DICT]:
        """Copy a state, and return the copy or the future of it."""

    @abstractmethod
    def close(self) -> None:
        """Release what the stager holds."""


@dataclass
class CheckpointStagerConfig:
    """Say how states are copied; what needs an accelerator is left out where there is none."""

    use_pinned_memory: bool = True
    """Upstream's; it changes nothing, for memory that is shared with a process is not pinned."""
    use_shared_memory: bool = True
    """Copy into memory that the writer process shares; else it is copied there once more."""
    use_async_staging: bool = True
    """Return from `stage` before large tensors are copied. They must not be changed until the
    future is done; if one is, the save fails and says so."""
    use_non_blocking_copy: bool = True
    """Have an accelerator copy all tensors before any of them is waited for."""


class StagedState(dict[str, Any]):
    """The copy of a state. Its memory is used again once it was written, or nobody has it."""

    def __init__(self, copy: StagingCopy, give_back: Callable[[StagingBuffer], object]) -> None:
        self._memory, self.release = copy.buffer.lend(give_back)
        """The memory, and how to let it be used for another state."""
        super().__init__(state_from_tree(copy.plan.tree_in(self._memory)))
        self.buffer = copy.buffer
        self.note = copy.plan.note()
        """The state in words, with places in the buffer."""
        self.size = copy.plan.size
        """Bytes of tensors that were copied."""
        self.seconds = copy.seconds
        """How long that took."""

    @property
    def is_released(self) -> bool:
        """Tell whether the memory may be another state's by now."""
        return not self.release.alive


class DefaultStager(CheckpointStager):
    """Copy states into memory that is kept from save to save, and shared with the writer."""

    def __init__(
        self, config: CheckpointStagerConfig | None = None, *, rank_info: RankInfo | None = None
    ) -> None:
        self._config = CheckpointStagerConfig() if config is None else config
        self._rank_info = RankInfo(0, 1) if rank_info is None else rank_info
        self._pool = StagingBufferPool()
        self._thread = ThreadPoolExecutor(1, "phalanx-staging")  # starts when it is needed
        self._is_closed = False
        self._pid = os.getpid()

    def stage(self, state_dict: STATE_DICT, **kwargs: Any) -> STATE_DICT | Future[STATE_DICT]:
        """Copy a state; large tensors are copied in the background if the configuration says so."""
        del kwargs  # for writers
        plan = self._plan(state_dict)
        if not self._config.use_shared_memory:
            private: STATE_DICT = state_from_tree(plan.clone())
            return private
        copy = StagingCopy(plan, self._pool.take(plan.room), self._config)
        staged: Future[STATE_DICT] = Future()
        staged.set_running_or_notify_cancel()  # it cannot be cancelled
        # At once: a forward pass may change small tensors, such as the statistics of a norm.
        with self._returning(copy):
            copy.small()
        if self._config.use_async_staging and self._hand_over(copy, staged):
            return staged
        self._finish(copy, staged)
        return staged.result()

    def prepare(self, state_dict: STATE_DICT | int) -> Future[None]:
        """Make room in the background for states like this one, or of so many bytes.

        The first save of a training is then as fast as those that follow. Bytes are those of this
        rank's own part. The future that is returned need not be waited for.
        """
        self._check_usable()
        size = state_dict if isinstance(state_dict, int) else self._plan(state_dict).room
        if self._config.use_shared_memory:
            return self._pool.prepare(size)
        return wrap_future(None)

    def _check_usable(self) -> None:
        if self._is_closed:
            raise InvalidState("the stager was closed")
        check_not_forked(self._pid)

    def _plan(self, state_dict: STATE_DICT) -> StagingPlan:
        self._check_usable()
        tree = parse_state(state_dict)
        pieces = (
            replicated_shards(tree, self._rank_info)
            if self._rank_info.global_world_size > 1
            else {}
        )
        return StagingPlan(tree, pieces)

    def _hand_over(self, copy: StagingCopy, staged: Future[STATE_DICT]) -> bool:
        try:
            self._thread.submit(self._finish, copy, staged)
        except RuntimeError:  # the interpreter is about to end
            return False
        return True

    def _finish(self, copy: StagingCopy, staged: Future[STATE_DICT]) -> None:
        try:
            with self._returning(copy):
                copy.large()
            made = StagedState(copy, self._pool.give_back)
            self._pool.populate(copy.buffer)
        except BaseException as error:  # noqa: BLE001 - it is the future's to raise it
            staged.set_exception(error)
        else:
            staged.set_result(made)

    @contextmanager
    def _returning(self, copy: StagingCopy) -> Iterator[None]:
        """Give the buffer back if it cannot be filled.

        Not so after an interrupt: threads that nobody has waited for may still be filling it.
        """
        try:
            yield
        except Exception as error:
            self._pool.give_back(copy.buffer)
            if isinstance(error, OSError):
                raise out_of_memory(copy.plan.room, error) from error
            raise

    def close(self) -> None:
        """Wait for copies under way, and free the memory that nobody uses."""
        self._is_closed = True
        self._thread.shutdown(wait=True)
        self._pool.close()
