"""Copy a state, so that training may go on changing it while the copy is written.

With a rank and a number of ranks, no more is copied of what is marked `Alike` than this rank
writes. What is not a tensor, and tensors that are small, are taken at once, in the call; the others
are copied by the caller or by a thread of the stager's, as the configuration says.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ..errors import InvalidState
from ._alike import own_pieces
from ._futures import wrap_future
from ._staging_copy import Copy, Plan
from ._staging_layout import state_of
from ._staging_memory import Buffer, BufferPool, no_memory
from ._structure import parse
from ._types import STATE_DICT, RankInfo

__all__ = [
    "CheckpointStager",
    "CheckpointStagerConfig",
    "DefaultStager",
    "Staged",
    "check_process",
]


def check_process(pid: int) -> None:
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


class Staged(dict[str, Any]):
    """The copy of a state. Its memory is used again once it was written, or nobody has it."""

    def __init__(self, copy: Copy, give_back: Callable[[Buffer], object]) -> None:
        self._memory, self.release = copy.buffer.lend(give_back)
        """The memory, and how to let it be used for another state."""
        super().__init__(state_of(copy.plan.tree_in(self._memory)))
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
        self._pool = BufferPool()
        self._thread = ThreadPoolExecutor(1, "phalanx-staging")  # starts when it is needed
        self._is_closed = False
        self._pid = os.getpid()

    def stage(self, state_dict: STATE_DICT, **kwargs: Any) -> STATE_DICT | Future[STATE_DICT]:
        """Copy a state; large tensors are copied in the background if the configuration says so."""
        del kwargs  # for writers
        plan = self._plan(state_dict)
        if not self._config.use_shared_memory:
            private: STATE_DICT = state_of(plan.clone())
            return private
        copy = Copy(plan, self._pool.take(plan.room), self._config)
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
        check_process(self._pid)

    def _plan(self, state_dict: STATE_DICT) -> Plan:
        self._check_usable()
        tree = parse(state_dict)
        pieces = own_pieces(tree, self._rank_info) if self._rank_info.global_world_size > 1 else {}
        return Plan(tree, pieces)

    def _hand_over(self, copy: Copy, staged: Future[STATE_DICT]) -> bool:
        try:
            self._thread.submit(self._finish, copy, staged)
        except RuntimeError:  # the interpreter is about to end
            return False
        return True

    def _finish(self, copy: Copy, staged: Future[STATE_DICT]) -> None:
        try:
            with self._returning(copy):
                copy.large()
            made = Staged(copy, self._pool.give_back)
            self._pool.populate(copy.buffer)
        except BaseException as error:  # noqa: BLE001 - it is the future's to raise it
            staged.set_exception(error)
        else:
            staged.set_result(made)

    @contextmanager
    def _returning(self, copy: Copy) -> Iterator[None]:
        """Give the buffer back if it cannot be filled.

        Not so after an interrupt: threads that nobody has waited for may still be filling it.
        """
        try:
            yield
        except Exception as error:
            self._pool.give_back(copy.buffer)
            if isinstance(error, OSError):
                raise no_memory(copy.plan.room, error) from error
            raise

    def close(self) -> None:
        """Wait for copies under way, and free the memory that nobody uses."""
        self._is_closed = True
        self._thread.shutdown(wait=True)
        self._pool.close()
