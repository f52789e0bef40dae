"""Staging: copy a state so that training may change it while the copy is written.

Of state that is marked `Replicated`, only the bytes that this rank writes are copied. Plain values
and small tensors are copied in the call; large tensors by the caller or by a thread, as configured.
A tensor that was modified before its copy was complete fails the save: version counters and sampled
bytes are compared before and after.
"""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..errors import InvalidState, SaveFailed
from ._progress import wrap_future
from ._replication import replicated_shards
from ._staging_buffer import (
    ALIGNMENT,
    Place,
    StagingBuffer,
    StagingBufferPool,
    out_of_memory,
    start_daemon_thread,
    state_from_tree,
    with_tensors,
)
from ._state_tree import Node, ReplicatedShard, leaves, map_leaves, parse_state
from ._tensor_file import nbytes
from ._types import STATE_DICT, RankInfo, check_not_forked

_MAX_COPY_THREADS = 4  # more do not make memory any faster
_BYTES_PER_THREAD = 16 << 20
_SMALL_BYTES = 256 << 10  # tensors up to this size are copied in the call
_SAMPLE_DISTANCE = 64 << 10  # bytes from one sample of a tensor to the next
_SAMPLE_BYTES = 16
_CHUNK_BYTES = 8 << 20  # that a thread copies at a time


@dataclass(frozen=True, slots=True)
class _Slot:
    """A tensor to copy, and its place in the buffer."""

    name: str
    source: Tensor
    offset: int
    size: int
    version: int | None
    """torch's count of completed changes; None for an inference tensor."""

    @property
    def place(self) -> Place:
        return Place(self.offset, self.size, self.source.dtype, tuple(self.source.shape))

    @property
    def is_plain(self) -> bool:
        """Whether the tensor is contiguous bytes in main memory."""
        source = self.source
        is_lazy = source.is_conj() or source.is_neg()
        return source.device.type == "cpu" and source.is_contiguous() and not is_lazy

    @property
    def is_deferrable(self) -> bool:
        """Whether the tensor is worth a thread, and a change before its copy is detectable.

        On an accelerator changes need no detection: the device queue orders them after the copy.
        """
        return self.size > _SMALL_BYTES and (self.source.device.type != "cpu" or self.is_plain)

    def sample(self) -> Tensor:
        """Copy some bytes at regular distances."""
        data = self.source.view(-1).view(torch.uint8)
        shape = (len(data) // _SAMPLE_DISTANCE, _SAMPLE_BYTES)
        return data.as_strided(shape, (_SAMPLE_DISTANCE, 1)).clone()

    def check_allocated(self) -> None:
        """Raise if the tensor has lost its memory: reading it would crash the process."""
        source = self.source
        lengths = zip(source.shape, source.stride(), strict=True)
        last = source.storage_offset() + sum((size - 1) * stride for size, stride in lengths)
        allocated = source.untyped_storage().nbytes()
        if self.size and allocated < (last + 1) * source.dtype.itemsize:
            raise SaveFailed(
                f"{self.name} has no values to copy: its storage was resized to {allocated} bytes."
            )

    def check_unchanged(self, before: Tensor | None) -> None:
        """Raise if the tensor has changed since it was planned and sampled.

        torch counts a change when it is complete; samples show one that is under way.
        """
        is_changed = self.version is not None and self.source._version != self.version
        if is_changed or not (before is None or torch.equal(before, self.sample())):
            raise SaveFailed(
                f"{self.name} was changed while it was copied. Wait for the first of the two "
                "futures that save returns before the optimizer steps, or copy within save "
                "(CheckpointStagerConfig(use_async_staging=False))."
            )

    def chunks(self) -> Iterator[tuple[int, Tensor]]:
        """Split the tensor into parts with their offsets, so that threads get even work."""
        if self.size <= _CHUNK_BYTES:
            yield self.offset, self.source
            return
        flat = self.source.view(-1)
        count = _CHUNK_BYTES // flat.dtype.itemsize
        for start in range(0, len(flat), count):
            yield self.offset + start * flat.dtype.itemsize, flat[start : start + count]


class StagingCopy:
    """A parsed state, and the copy of its tensors into one buffer, the small ones first."""

    buffer: StagingBuffer

    def __init__(
        self, state_dict: STATE_DICT, rank_info: RankInfo, config: CheckpointStagerConfig
    ) -> None:
        self._config = config
        self._tree = parse_state(state_dict)
        if rank_info.global_world_size > 1:
            shards = replicated_shards(self._tree, rank_info)
            self._tree = map_leaves(
                self._tree, lambda leaf: replace(leaf, data=shards.get(leaf.name, leaf.data))
            )
        self._slots: dict[str, _Slot] = {}
        """By name: tensors that share memory have one name, and are copied once."""
        self.size = 0
        """Bytes of tensors."""
        self.buffer_size = 0
        """Bytes of buffer, with alignment."""
        self.seconds = 0.0
        """Time spent copying so far."""
        for leaf in leaves(self._tree):
            source = leaf.data.data if isinstance(leaf.data, ReplicatedShard) else leaf.data
            if source is not None and leaf.name not in self._slots:
                size = nbytes(source.dtype, source.shape)
                version = None if source.is_inference() else source._version
                slot = _Slot(leaf.name, source.detach(), self.buffer_size, size, version)
                self._slots[leaf.name] = slot
                self.size += size
                self.buffer_size += size + -size % ALIGNMENT
        self._large = [slot for slot in self._slots.values() if slot.is_deferrable]
        self._before: dict[str, Tensor] = {}

    def describe(self) -> tuple[Node, dict[str, Place]]:
        """Return the state for the writer process: its tree without tensors, and their places."""
        places = {name: slot.place for name, slot in self._slots.items()}
        return with_tensors(self._tree, {}), places

    def state_with(self, copy: Callable[[_Slot], Tensor]) -> STATE_DICT:
        """Return the state with other tensors, made by `copy`."""
        copies = {name: copy(slot) for name, slot in self._slots.items()}
        state: STATE_DICT = state_from_tree(with_tensors(self._tree, copies))
        return state

    def small(self) -> None:
        """Copy the tensors that are not worth a thread, and sample the others."""
        self._copy([slot for slot in self._slots.values() if not slot.is_deferrable])
        if self._config.use_async_staging:
            for slot in self._large:
                slot.check_allocated()
                if slot.is_plain:
                    self._before[slot.name] = slot.sample()

    def large(self) -> None:
        """Copy the other tensors, and raise if one has changed meanwhile."""
        self._copy(self._large)
        for slot in self._large:
            slot.check_allocated()
            slot.check_unchanged(self._before.get(slot.name))

    def _copy(self, slots: Sequence[_Slot]) -> None:
        began = time.perf_counter()
        for slot in slots:
            slot.check_allocated()
        others = [slot for slot in slots if not slot.is_plain]
        for slot in others:
            target = slot.place.view_in(self.buffer.bytes)
            target.copy_(slot.source, non_blocking=self._config.use_non_blocking_copy)
        self._copy_plain([slot for slot in slots if slot.is_plain])
        if others and torch.accelerator.is_available():
            torch.accelerator.synchronize()
        self.seconds += time.perf_counter() - began

    def _copy_plain(self, slots: Sequence[_Slot]) -> None:
        size = sum(slot.size for slot in slots)
        threads = min(torch.get_num_threads(), _MAX_COPY_THREADS, size // _BYTES_PER_THREAD)
        chunks = iter([chunk for slot in slots for chunk in slot.chunks()])  # shared by all threads
        errors: list[BaseException] = []

        def copy_chunks() -> None:
            try:
                while not errors and (chunk := next(chunks, None)) is not None:
                    self.buffer.put(*chunk)
            except BaseException as error:  # noqa: BLE001 - raised below
                errors.append(error)

        helpers = [
            start_daemon_thread(copy_chunks, "phalanx-staging-copy") for _ in range(threads - 1)
        ]
        copy_chunks()
        for helper in helpers:
            if helper is not None:
                helper.join()
        if errors:
            raise errors[0]


class CheckpointStager(ABC):
    """Copies states for a writer."""

    @abstractmethod
    def stage(self, state_dict: STATE_DICT, **kwargs: Any) -> STATE_DICT | Future[STATE_DICT]:
        """Copy a state, and return the copy or its future."""

    @abstractmethod
    def close(self) -> None:
        """Release the resources of the stager."""


@dataclass
class CheckpointStagerConfig:
    """How states are copied. Options for accelerators have no effect without one."""

    use_pinned_memory: bool = True
    """Ignored: memory that is shared with a process is not pinned. Upstream has it."""
    use_shared_memory: bool = True
    """Copy into memory that is shared with the writer process; otherwise it copies once more."""
    use_async_staging: bool = True
    """Return from `stage` before large tensors are copied. They must not be changed until the
    future is done; if one is, the save fails and names it."""
    use_non_blocking_copy: bool = True
    """Start the copies of all tensors on an accelerator before waiting for any of them."""


class StagedState(dict[str, Any]):
    """The copy of a state. Its memory is reused once it was written or garbage collected."""

    def __init__(self, copy: StagingCopy, give_back: Callable[[StagingBuffer], object]) -> None:
        self._memory, self.release = copy.buffer.export(give_back)
        super().__init__(copy.state_with(lambda slot: slot.place.view_in(self._memory)))
        self.buffer = copy.buffer
        self.tree, self.places = copy.describe()
        self.size = copy.size
        """Bytes of tensors that were copied."""
        self.seconds = copy.seconds
        """Time that took."""

    @property
    def is_released(self) -> bool:
        """Whether another state may use the memory."""
        return not self.release.alive


class DefaultStager(CheckpointStager):
    """Copy states into memory that is kept from save to save, and shared with the writer."""

    def __init__(
        self, config: CheckpointStagerConfig | None = None, *, rank_info: RankInfo | None = None
    ) -> None:
        self._config = config or CheckpointStagerConfig()
        self._rank_info = rank_info or RankInfo(0, 1)
        self._pool = StagingBufferPool()
        self._thread = ThreadPoolExecutor(1, "phalanx-staging")  # starts when needed
        self._is_closed = False
        self._pid = os.getpid()

    def stage(self, state_dict: STATE_DICT, **kwargs: Any) -> STATE_DICT | Future[STATE_DICT]:
        """Copy a state; large tensors in the background, if so configured."""
        del kwargs  # for writers
        self._check_usable()
        copy = StagingCopy(state_dict, self._rank_info, self._config)
        if not self._config.use_shared_memory:
            return copy.state_with(lambda slot: slot.source.to("cpu", copy=True))
        copy.buffer = self._pool.take(copy.buffer_size)
        staged: Future[STATE_DICT] = Future()
        staged.set_running_or_notify_cancel()  # it cannot be cancelled
        # In the call: a forward pass may change small tensors, such as the statistics of a norm.
        with self._returning(copy):
            copy.small()
        if self._config.use_async_staging:
            with suppress(RuntimeError):  # the interpreter is shutting down
                self._thread.submit(self._finish, copy, staged)
                return staged
        self._finish(copy, staged)
        return staged.result()

    def prepare(self, state_dict: STATE_DICT | int) -> Future[None]:
        """Allocate memory in the background for states like this one, or of so many bytes.

        The first save of a training is then as fast as later ones. Bytes are those of this rank's
        shards. There is no need to wait for the future.
        """
        self._check_usable()
        if not self._config.use_shared_memory:
            return wrap_future(None)
        if isinstance(state_dict, int):
            return self._pool.prepare(state_dict)
        copy = StagingCopy(state_dict, self._rank_info, self._config)
        return self._pool.prepare(copy.buffer_size)

    def _check_usable(self) -> None:
        if self._is_closed:
            raise InvalidState("the stager was closed.")
        check_not_forked(self._pid, "stager")

    def _finish(self, copy: StagingCopy, staged: Future[STATE_DICT]) -> None:
        try:
            with self._returning(copy):
                copy.large()
            result = StagedState(copy, self._pool.give_back)
            self._pool.populate(copy.buffer)
        except BaseException as error:  # noqa: BLE001 - the future raises it
            staged.set_exception(error)
        else:
            staged.set_result(result)

    @contextmanager
    def _returning(self, copy: StagingCopy) -> Iterator[None]:
        """Give the buffer back on an error.

        Not on an interrupt: threads that were not joined may still be filling it.
        """
        try:
            yield
        except Exception as error:
            self._pool.give_back(copy.buffer)
            if isinstance(error, OSError):
                raise out_of_memory(copy.buffer_size, error) from error
            raise

    def close(self) -> None:
        """Wait for pending copies, and free unused memory."""
        self._is_closed = True
        self._thread.shutdown(wait=True)
        self._pool.close()
