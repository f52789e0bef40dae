"""Write checkpoints."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from ._commit import commit_together
from ._meeting import Alone, AtBarrier, Company, OthersAreBehind, current_turn
from ._notes import ByNotes
from ._storage import Storage, storage_at
from ._types import STATE_DICT, BarrierLike, RankInfo

__all__ = ["CheckpointWriter", "CheckpointWriterConfig", "WriterHook"]


class WriterHook(ABC):
    """Do something of your own before and after a checkpoint becomes visible, on every rank."""

    @abstractmethod
    def pre_commit(self, path: str, **kwargs: Any) -> None:
        """Act when this rank has written its part; an error here prevents the commit."""

    @abstractmethod
    def post_commit(self, path: str, **kwargs: Any) -> None:
        """Act when the checkpoint is in place."""


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

    def write(
        self, path: str | os.PathLike[str], state_dict: STATE_DICT, **kwargs: Any
    ) -> Future[None] | None:
        """Write a state to `path`, replacing what is there; returns when it is durable.

        Every rank calls this with its own state. If it fails anywhere, all ranks raise
        `SaveFailed`, and what was at `path` is as before. Further arguments go to the hook.
        """
        path = os.fspath(path)
        storage = storage_at(path)

        def before_commit() -> None:
            if self._commit_hook is not None:
                self._commit_hook.pre_commit(path, **kwargs)

        self._writes += 1
        while not self._commit(storage, state_dict, before_commit):
            pass
        if self._commit_hook is not None:
            self._commit_hook.post_commit(path, **kwargs)
        return None

    def _commit(
        self, storage: Storage, state_dict: STATE_DICT, before_commit: Callable[[], None]
    ) -> bool:
        """Save together with all ranks, or find that they are not all there yet."""
        company = self._company(storage)
        company.turn = current_turn() or self._writes
        try:
            commit_together(storage, state_dict, company=company, before_commit=before_commit)
        except OthersAreBehind:
            return False
        return True

    def _company(self, storage: Storage) -> Company:
        if self._rank_info.global_world_size == 1:
            return Alone(self._rank_info)
        if hasattr(self._barrier, "exchange"):
            return AtBarrier(self._rank_info, self._barrier)
        timeout = self._config.write_barrier_timeout_secs
        return ByNotes(self._rank_info, storage.board(), timeout=timeout, barrier=self._barrier)

    def close(self) -> None:
        """Release what the writer holds, which is nothing between two writes."""
