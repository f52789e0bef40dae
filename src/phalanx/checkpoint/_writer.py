"""`CheckpointWriter`: write a state with all other ranks, all or nothing.

The writer chooses how the ranks coordinate, numbers the save, and repeats it for as long as
restarted peers are still at an older one. The protocol itself is `_commit`.
"""

from __future__ import annotations

import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from ._commit import commit_checkpoint
from ._coordination import (
    BarrierCoordinator,
    Coordinator,
    PeersBehind,
    SingleRankCoordinator,
    StorageCoordinator,
    current_save_number,
)
from ._storage import storage_at
from ._types import STATE_DICT, BarrierLike, RankInfo


class WriterHook(ABC):
    """Do something of your own before and after a checkpoint becomes visible, on every rank."""

    @abstractmethod
    def pre_commit(self, path: str, **kwargs: Any) -> None:
        """Act when this rank has written its part; an error here prevents the commit."""

    @abstractmethod
    def post_commit(self, path: str, **kwargs: Any) -> None:
        """Act when the checkpoint is in place; files of the one it replaces may be there yet."""


@dataclass
class CheckpointWriterConfig:
    """Say how a writer shall behave."""

    write_barrier_timeout_secs: int = 600
    """How long ranks wait for each other where they meet without a barrier."""


class CheckpointWriter:
    """Write states to storage with all other ranks: all of it becomes visible, or nothing."""

    def __init__(
        self,
        config: CheckpointWriterConfig,
        rank_info: RankInfo,
        barrier: BarrierLike | None = None,
        commit_hook: WriterHook | None = None,
    ) -> None:
        self._config = config
        self._rank_info = rank_info
        self._barrier = barrier
        self._commit_hook = commit_hook
        self._writes = 0
        self._removal: threading.Thread | None = None

    def write(
        self, path: str | os.PathLike[str], state_dict: STATE_DICT, **kwargs: Any
    ) -> Future[None] | None:
        """Write a state to `path`, replacing what is there; returns when it is durable.

        Every rank calls this with its own state. If it fails anywhere, all ranks raise
        `SaveFailed`, and what was at `path` is as before. Further arguments go to the hook.
        """
        path = os.fsdecode(path)

        def before_commit() -> None:
            if self._commit_hook is not None:
                self._commit_hook.pre_commit(path, **kwargs)

        self._finish_removal()
        self._writes += 1
        self._begin_removal(self._commit(path, state_dict, before_commit))
        if self._commit_hook is not None:
            self._commit_hook.post_commit(path, **kwargs)
        return None

    def _commit(
        self, path: str, state_dict: STATE_DICT, before_commit: Callable[[], None]
    ) -> Callable[[], None] | None:
        """Save together with all ranks, as soon as they are all there; return what is left."""
        while True:
            company = self._company(path)
            company.turn = current_save_number() or self._writes
            with suppress(PeersBehind):
                return commit_checkpoint(
                    partial(storage_at, path),
                    state_dict,
                    company=company,
                    before_commit=before_commit,
                )

    def _begin_removal(self, remove: Callable[[], None] | None) -> None:
        """Have old files removed: the disk takes a while, for which nobody should have to wait."""
        if remove is None:
            return
        thread = threading.Thread(target=remove, name="phalanx checkpoint removal")
        try:
            thread.start()
        except RuntimeError:  # there are no threads any more when the interpreter ends
            remove()
        else:
            self._removal = thread

    def _finish_removal(self) -> None:
        """Wait for the files of the last save but one to be gone: the next one needs the room."""
        if self._removal is not None:
            self._removal.join()
            self._removal = None

    def _company(self, path: str) -> Coordinator:
        if self._rank_info.global_world_size == 1:
            return SingleRankCoordinator(self._rank_info)
        if hasattr(self._barrier, "exchange"):
            return BarrierCoordinator(self._rank_info, self._barrier)
        timeout = self._config.write_barrier_timeout_secs
        board = storage_at(path).board()
        return StorageCoordinator(self._rank_info, board, timeout=timeout, barrier=self._barrier)

    def close(self) -> None:
        """Wait until the files of a checkpoint that was replaced are gone."""
        self._finish_removal()
