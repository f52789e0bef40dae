"""Copy a state, so that training may go on changing it while the copy is written.

With a rank and a number of ranks, no more is copied of what is marked `Alike` than this rank
writes. What is not a tensor, and tensors that are small, are taken at once, in the call; the others
are copied by the caller or by a thread of the stager's, as the configuration says.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ..errors import InvalidState, SaveFailed
from ._alike import own_pieces
from ._futures import wrap_future
from ._staging_copy import Copy, Plan
from ._staging_layout import Note, state_of
from ._staging_memory import Buffer, BufferPool
from ._structure import parse
from ._types import STATE_DICT, RankInfo

__all__ = ["CheckpointStager", "CheckpointStagerConfig", "DefaultStager", "Staged"]


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


class Staged(dict[str, Any]):
    """The copy of a state. Its memory is used again once it is released, or nobody has it."""

    def __init__(self, state: STATE_DICT, buffer: Buffer, note: Note, size: int) -> None:
        super().__init__(state)
        self.buffer = buffer
        self.note = note
        """The state in words, with places in the buffer."""
        self.size = size
        """Bytes of tensors that were copied."""
        self.seconds = 0.0
        """How long that took."""
        self.release: Callable[[], object] = lambda: None
        """Let the memory be used for another state."""


class DefaultStager(CheckpointStager):
    """Copy states into memory that is kept from save to save, and shared with the writer."""

    def __init__(
        self, config: CheckpointStagerConfig | None = None, *, rank_info: RankInfo | None = None
    ) -> None:
        self._config = CheckpointStagerConfig() if config is None else config
        self._rank_info = RankInfo(0, 1) if rank_info is None else rank_info
        self._pool = BufferPool()
        self._thread = ThreadPoolExecutor(1, "phalanx-staging")  # starts when it is needed
        self._is_closed = False

    def stage(self, state_dict: STATE_DICT, **kwargs: Any) -> STATE_DICT | Future[STATE_DICT]:
        """Copy a state; large tensors are copied in the background if the configuration says so."""
        del kwargs  # for writers
        plan = self._plan(state_dict)
        if not self._config.use_shared_memory:
            private: STATE_DICT = state_of(plan.clone())
            return private
        copy = Copy(plan, self._pool.take(plan.size), self._config)
        # At once: a forward pass may change small tensors, such as the statistics of a norm.
        with self._returning(copy):
            copy.small()
        if self._config.use_async_staging:
            return self._thread.submit(self._finish, copy)
        return self._finish(copy)

    def prepare(self, state_dict: STATE_DICT | int) -> Future[None]:
        """Make room in the background for states like this one, or of so many bytes.

        The first save of a training is then as fast as those that follow. Bytes are those of this
        rank's own part. The future that is returned need not be waited for.
        """
        size = state_dict if isinstance(state_dict, int) else self._plan(state_dict).size
        if self._config.use_shared_memory:
            return self._pool.prepare(size)
        return wrap_future(None)

    def _plan(self, state_dict: STATE_DICT) -> Plan:
        if self._is_closed:
            raise InvalidState("the stager was closed")
        tree = parse(state_dict)
        pieces = own_pieces(tree, self._rank_info) if self._rank_info.global_world_size > 1 else {}
        return Plan(tree, pieces)

    def _finish(self, copy: Copy) -> STATE_DICT:
        with self._returning(copy):
            copy.large()
        plan, buffer = copy.plan, copy.buffer
        staged = Staged(state_of(plan.tree_in(buffer)), buffer, plan.note(), plan.size)
        staged.release = weakref.finalize(staged, self._pool.give_back, buffer)
        self._pool.populate(buffer)
        staged.seconds = copy.seconds
        return staged

    @contextmanager
    def _returning(self, copy: Copy) -> Iterator[None]:
        """Give the buffer back if it cannot be filled."""
        try:
            yield
        except BaseException as error:
            self._pool.give_back(copy.buffer)
            if isinstance(error, OSError):
                size = copy.plan.size
                raise SaveFailed(f"no memory for a copy of {size} bytes: {error}") from error
            raise

    def close(self) -> None:
        """Wait for copies under way, and free the memory that nobody uses."""
        self._is_closed = True
        self._thread.shutdown(wait=True)
        self._pool.close()
