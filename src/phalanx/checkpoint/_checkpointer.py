"""Checkpointers: save and load states, synchronously or while training goes on.

`SyncCheckpointer` writes in the calling process. `AsyncCheckpointer` copies the state
(`_staging`) and has another process write the copy (`_checkpoint_process`). Both load through a
`CheckpointReader`. `make_sync_checkpointer` and `make_async_checkpointer` assemble them from a
`CheckpointerConfig`. Names and signatures are those of
``torch.distributed.checkpoint._experimental``.

Every `save` of an asynchronous checkpointer counts, also one that raises: ranks number their
saves by counting calls, and a rank that left one out would pair its state with another step's.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from ..env import read_rank_env
from ..errors import InvalidArgument, InvalidState, SaveTimeout
from ..groups._factory import default_group
from ._barriers import BarrierConfig, create_barrier_from_config
from ._checkpoint_process import CheckpointProcess, CheckpointProcessConfig
from ._progress import SaveProgress, SaveReport, WriteFuture, wrap_future
from ._reader import CheckpointReader
from ._staging import CheckpointStager, CheckpointStagerConfig, DefaultStager
from ._types import STATE_DICT, RankInfo
from ._writer import CheckpointWriter, CheckpointWriterConfig, WriterHook


@dataclass
class CheckpointerConfig:
    """Say how the parts of a checkpointer shall behave."""

    writer_config: CheckpointWriterConfig = field(default_factory=CheckpointWriterConfig)
    barrier_config: BarrierConfig = field(default_factory=BarrierConfig)
    """Without a type, ranks meet by notes in the folder that they save to."""
    staging_config: CheckpointStagerConfig = field(default_factory=CheckpointStagerConfig)
    """How an asynchronous checkpointer copies states."""
    process_config: CheckpointProcessConfig = field(default_factory=CheckpointProcessConfig)
    """How it deals with the process that writes them."""


class Checkpointer(ABC):
    """Save states to storage, and load them again."""

    @abstractmethod
    def save(
        self, path: str, state_dict: STATE_DICT, **kwargs: Any
    ) -> tuple[Future[None], Future[None]] | None:
        """Save a state; an asynchronous one returns futures of the copy and of the write."""

    @abstractmethod
    def load(
        self,
        path: str,
        state_dict: STATE_DICT | None = None,
        *,
        default_map_location: Any = None,
        strict: bool = False,
        **kwargs: Any,
    ) -> STATE_DICT:
        """Load a state, or what a given one asks for; strict, it must all be there."""

    @abstractmethod
    def close(self) -> None:
        """Release what the checkpointer holds."""


class ReadingCheckpointer(Checkpointer):
    """Loads by a reader, while the caller waits; how it saves is left open."""

    _reader: CheckpointReader

    def load(
        self,
        path: str,
        state_dict: STATE_DICT | None = None,
        *,
        default_map_location: Any = None,
        strict: bool = False,
        **kwargs: Any,
    ) -> STATE_DICT:
        """Load a state, or what a given one asks for; strict, it must all be there."""
        loaded, _ = self._reader.read(
            path, state_dict, map_location=default_map_location, strict=strict, **kwargs
        )
        return loaded


class SyncCheckpointer(ReadingCheckpointer):
    """Save and load while the caller waits."""

    def __init__(self, writer: CheckpointWriter, reader: CheckpointReader) -> None:
        self._writer = writer
        self._reader = reader

    def save(self, path: str, state_dict: STATE_DICT, **kwargs: Any) -> None:
        """Save a state, and return when it is durable; further arguments go to the writer."""
        self._writer.write(path, state_dict, **kwargs)

    def close(self) -> None:
        """Close the writer."""
        self._writer.close()


logger = logging.getLogger(__name__)

_WARN_AFTER = 1.0  # seconds that a save waits for an older one before it says so


class AsyncCheckpointer(ReadingCheckpointer):
    """Copy a state, and have a process write the copy while training goes on."""

    def __init__(
        self,
        checkpoint_stager: CheckpointStager,
        checkpoint_process: CheckpointProcess,
        reader: CheckpointReader,
    ) -> None:
        self._checkpoint_stager = checkpoint_stager
        self._checkpoint_process = checkpoint_process
        self._reader = reader
        self._writes: deque[WriteFuture] = deque()
        """Saves that are under way, or that failed without anybody knowing."""
        self._last: WriteFuture | None = None
        self._is_closed = False
        self._saving = threading.RLock()  # one at a time, whichever thread it is on

    def save(
        self, path: str, state_dict: STATE_DICT, **kwargs: Any
    ) -> tuple[Future[None], WriteFuture]:
        """Copy a state and have it written; returns the futures of the copy and of the write.

        Once the first is done, tensors may be changed. If too many saves are under way, this waits
        for the oldest. If an earlier one has failed and nobody has asked its future, this raises
        its error; what this call was to save is written nevertheless, for other ranks may not have
        heard of the failure yet. Further arguments go to the stager and to the writer.
        """
        if self._is_closed:
            raise InvalidState("the checkpointer was closed")
        with self._saving:
            return self._save(path, state_dict, kwargs)

    def _save(
        self, path: str, state_dict: STATE_DICT, kwargs: dict[str, Any]
    ) -> tuple[Future[None], WriteFuture]:
        began = time.perf_counter()
        try:
            self._wait_for_slot(path)
            staged = self._checkpoint_stager.stage(state_dict, **kwargs)
        except BaseException as error:
            self._checkpoint_process.refuse(path, error, **kwargs)
            raise
        write = self._checkpoint_process.write(staged, path, **kwargs)
        staging = wrap_future(staged)
        failed = self._failures()
        self._last = write
        self._writes.append(write)
        if failed:
            wait([staging])  # who gets no future must be free to change tensors
        write.began, write.stall_seconds = began, time.perf_counter() - began
        _raise_first(failed, f"the state of this call is being saved to {path} nevertheless")
        return staging, write

    def prepare(self, state_dict: STATE_DICT | int) -> Future[None]:
        """Make room in the background for states like this one, or of so many bytes.

        The first save is then as fast as those that follow. Bytes are those of this rank's part.
        The future that is returned need not be waited for.
        """
        prepare = getattr(self._checkpoint_stager, "prepare", wrap_future)
        room: Future[None] = prepare(state_dict)
        return room

    def progress(self) -> SaveProgress | None:
        """Tell how far this rank is with the save that is under way, if one is."""
        return self._checkpoint_process.progress()

    @property
    def last_report(self) -> SaveReport | None:
        """What the last save took, once it has succeeded."""
        return None if self._last is None else self._last.report

    @property
    def under_way(self) -> list[WriteFuture]:
        """The writes that are, oldest first: also that of a `save` which raised an older error."""
        return [write for write in self._writes if not write.done()]

    def _wait_for_slot(self, path: str) -> None:
        """Wait while too many saves are under way."""
        config = self._checkpoint_process.config
        under_way = self.under_way
        excess = under_way[: max(0, len(under_way) - config.max_pending_writes + 1)]
        if not excess or not wait(excess, timeout=_WARN_AFTER).not_done:
            return
        logger.warning(
            "the save to %s waits, for %d earlier ones are under way: %s",
            path,
            len(under_way),
            self.progress(),
        )
        if wait(excess, timeout=config.pending_timeout_secs).not_done:
            raise SaveTimeout(
                f"the save to {path} has waited {config.pending_timeout_secs} s for the one to "
                f"{excess[0].path}: {self.progress()}"
            )

    def _failures(self) -> list[BaseException]:
        """Return what has gone wrong since somebody was told."""
        under_way: deque[WriteFuture] = deque()
        failed = []
        for write in self._writes:
            if not write.done():
                under_way.append(write)
            elif not write.was_asked and (error := write.failure()) is not None:
                failed.append(error)
        self._writes = under_way
        return failed

    def close(self) -> None:
        """Wait for the writes under way, end the process, and free memory.

        Raises the error of a save that has failed without anybody having been told.
        """
        self._is_closed = True  # whoever was interrupted here may close once more
        self._checkpoint_process.close()
        self._checkpoint_stager.close()
        _raise_first(self._failures(), "the checkpointer is closed now")


def _raise_first(errors: list[BaseException], note: str) -> None:
    if not errors:
        return
    for other in errors[1:]:
        errors[0].add_note(f"and a later save failed, too: {other}")
    errors[0].add_note(note)
    raise errors[0]


def default_subprocess_init_fn(*_: Any) -> None:
    """Do nothing when the checkpoint process starts."""


def default_writer_init_fn(
    rank_info: RankInfo,
    writer_config: CheckpointWriterConfig | None = None,
    barrier_config: BarrierConfig | None = None,
) -> CheckpointWriter:
    """Make the writer of the checkpoint process."""
    config = CheckpointWriterConfig() if writer_config is None else writer_config
    barrier = create_barrier_from_config(barrier_config or BarrierConfig())
    return CheckpointWriter(config, rank_info, barrier)


def make_sync_checkpointer(
    config: CheckpointerConfig | None = None,
    rank_info: RankInfo | None = None,
    commit_hook: WriterHook | None = None,
) -> SyncCheckpointer:
    """Make a checkpointer that saves while the caller waits.

    Without a `rank_info`, this is the rank that it is in the barrier's group; else in the thread's
    current group; else in torch's default group; else as the launcher says; else the only one.
    """
    config = CheckpointerConfig() if config is None else config
    if rank_info is None:
        rank_info = default_rank_info(_barrier_group(config.barrier_config))
    writer = CheckpointWriter(
        config.writer_config,
        rank_info,
        create_barrier_from_config(config.barrier_config),
        commit_hook,
    )
    return SyncCheckpointer(writer, CheckpointReader(rank_info))


def make_async_checkpointer(
    config: CheckpointerConfig | None = None,
    rank_info: RankInfo | None = None,
    subprocess_init_fn: Callable[..., None] = default_subprocess_init_fn,
    subprocess_init_args: tuple[Any, ...] = (),
    checkpoint_writer_init_fn: Callable[..., CheckpointWriter] = default_writer_init_fn,
    checkpoint_writer_init_args: dict[str, Any] | None = None,
) -> AsyncCheckpointer:
    """Make a checkpointer whose saves are written by a process beside the caller's.

    The functions are called in that process: one for whatever is to be set up there, the other to
    make the writer, with ``rank_info`` and the given arguments. They must be functions of a module.
    By default the writer and its barrier are as `config` says.
    """
    config = CheckpointerConfig() if config is None else config
    rank_info = default_rank_info() if rank_info is None else rank_info
    arguments = dict(checkpoint_writer_init_args or {})
    if checkpoint_writer_init_fn is default_writer_init_fn:
        _check_barrier(config.barrier_config)
        said = {"writer_config": config.writer_config, "barrier_config": config.barrier_config}
        arguments = {**said, **arguments}
    process = CheckpointProcess(
        rank_info,
        config.process_config,
        subprocess_init_fn,
        subprocess_init_args,
        checkpoint_writer_init_fn,
        arguments,
    )
    stager = DefaultStager(config.staging_config, rank_info=rank_info)
    return AsyncCheckpointer(stager, process, CheckpointReader(rank_info))


def _check_barrier(config: BarrierConfig) -> None:
    if config.barrier_type in ("dist_barrier", "group"):
        raise InvalidArgument(
            f"a {config.barrier_type!r} needs a group, and the process that writes checkpoints "
            "belongs to none: take 'tcp_store', or no barrier at all, and ranks meet by notes in "
            "the folder that they save to"
        )


def _barrier_group(config: BarrierConfig) -> dist.ProcessGroup | None:
    """Return the group that a configured barrier is on, if it is on one that it names."""
    if config.barrier_type == "dist_barrier" and dist.is_initialized():
        return dist.group.WORLD
    if config.barrier_type == "group":
        named: dist.ProcessGroup | None = config.barrier_args.get("group")
        return named
    return None


def default_rank_info(group: dist.ProcessGroup | None = None) -> RankInfo:
    """Return this process's place: in a group, by default the default group, or as launched."""
    group = default_group() if group is None else group
    if group is not None:
        return RankInfo(group.rank(), group.size())
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        # Else every rank of a job without a default group would take itself for the only one.
        launched = read_rank_env()
        return RankInfo(launched.rank, launched.world_size)
    return RankInfo(0, 1)
