"""`CheckpointWriter`: write a state with all other ranks, all or nothing.

The writer chooses how the ranks coordinate, numbers the save, and repeats it for as long as
restarted peers are still at an older one. The protocol itself is `_commit`.
"""

from __future__ import annotations

import os
import threading
from abc import ABC, abstractmethod
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, cast

from ._commit import commit_checkpoint
from ._coordination import Coordinator, PeersBehind, StorageExchange, TextExchange
from ._progress import ProgressMeter
from ._storage import storage_at
from ._types import STATE_DICT, BarrierLike, RankInfo


class WriterHook(ABC):
    """Callbacks before and after a checkpoint becomes visible, on every rank."""

    @abstractmethod
    def pre_commit(self, path: str, **kwargs: Any) -> None:
        """Called when this rank has written its shards. An error here prevents the commit."""

    @abstractmethod
    def post_commit(self, path: str, **kwargs: Any) -> None:
        """Called after the commit. Files of the replaced checkpoint may still exist."""


@dataclass
class CheckpointWriterConfig:
    """Options of a writer."""

    write_barrier_timeout_secs: int = 600
    """How long ranks wait for each other if their barrier cannot carry results. Barriers have
    timeouts of their own."""


class SaveContext(NamedTuple):
    """Which save of its rank the next one is, and where to report its progress."""

    number: int
    meter: ProgressMeter


class CheckpointWriter:
    """Write states to storage with all other ranks, all or nothing."""

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
        self._context: SaveContext | None = None  # set by a process that may have restarted
        self._removal: threading.Thread | None = None

    def write(
        self, path: str | os.PathLike[str], state_dict: STATE_DICT, **kwargs: Any
    ) -> Future[None] | None:
        """Write a state to `path`, replacing what is there, and return when it is durable.

        Every rank calls this with its state. If it fails on one, all ranks raise `SaveFailed`,
        and what was at `path` is unchanged. Other arguments go to the hook.
        """
        path = os.fsdecode(path)
        hook = self._commit_hook
        before_commit = (lambda: None) if hook is None else partial(hook.pre_commit, path, **kwargs)
        self._join_removal()  # this save needs the space of what the last one replaced
        self._writes += 1
        number, meter = self._context or SaveContext(self._writes, ProgressMeter())
        while True:
            exchange = self._text_exchange(path)
            coordinator = Coordinator(self._rank_info, exchange, save_number=number, meter=meter)
            with suppress(PeersBehind):  # then once more
                remove = commit_checkpoint(path, state_dict, coordinator, meter, before_commit)
                break
        if remove is not None:
            thread = threading.Thread(target=remove, name="phalanx checkpoint removal")
            try:
                thread.start()
                self._removal = thread
            except RuntimeError:  # the interpreter is shutting down
                remove()
        if hook is not None:
            hook.post_commit(path, **kwargs)
        return None

    def _text_exchange(self, path: str) -> TextExchange | None:
        if self._rank_info.global_world_size == 1:
            return None
        if hasattr(self._barrier, "exchange"):
            return cast("TextExchange", self._barrier)
        timeout = self._config.write_barrier_timeout_secs
        messages = storage_at(path).message_store()
        return StorageExchange(self._rank_info, messages, timeout=timeout, barrier=self._barrier)

    def close(self) -> None:
        """Wait until the files of a replaced checkpoint are removed."""
        self._join_removal()

    def _join_removal(self) -> None:
        if self._removal is not None:
            self._removal.join()
            self._removal = None
