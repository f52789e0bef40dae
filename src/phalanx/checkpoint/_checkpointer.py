"""Checkpointers: save and load states, synchronously or while training goes on.

`SyncCheckpointer` writes in the calling process. `AsyncCheckpointer` copies the state
(`_staging`) and has another process write the copy (`_checkpoint_process`). Names and signatures
are those of ``torch.distributed.checkpoint._experimental``.

Every `save` of an asynchronous checkpointer counts, also one that raises: ranks number their
saves by counting calls, and a rank that left one out would pair its state with another step's.
"""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from ..errors import InvalidArgument, InvalidState, SaveTimeout
from ._barriers import BarrierConfig, create_barrier_from_config, find_ranks
from ._checkpoint_process import CheckpointProcess, CheckpointProcessConfig
from ._progress import SaveProgress, SaveReport, WriteFuture, wrap_future
from ._reader import CheckpointReader
from ._staging import CheckpointStager, CheckpointStagerConfig, DefaultStager
from ._types import STATE_DICT, RankInfo
from ._writer import CheckpointWriter, CheckpointWriterConfig, WriterHook

_log = logging.getLogger(__name__)


@dataclass
class CheckpointerConfig:
    """Options of a checkpointer."""

    writer_config: CheckpointWriterConfig = field(default_factory=CheckpointWriterConfig)
    barrier_config: BarrierConfig = field(default_factory=BarrierConfig)
    """Without a barrier type, ranks exchange messages in the workspace of the save."""
    staging_config: CheckpointStagerConfig = field(default_factory=CheckpointStagerConfig)
    """How an asynchronous checkpointer copies states."""
    process_config: CheckpointProcessConfig = field(default_factory=CheckpointProcessConfig)
    """How an asynchronous checkpointer runs its writer process."""


class Checkpointer(ABC):
    """Save states to storage, and load them again."""

    @abstractmethod
    def save(
        self, path: str, state_dict: STATE_DICT, **kwargs: Any
    ) -> tuple[Future[None], Future[None]] | None:
        """Save a state; an asynchronous checkpointer returns futures of the copy and the write."""

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
        """Load a new state, or the keys of a given one; with `strict`, all of them must exist."""

    @abstractmethod
    def close(self) -> None:
        """Release the resources of the checkpointer."""


class _ReaderCheckpointer(Checkpointer):
    def __init__(self, reader: CheckpointReader) -> None:
        self._reader = reader

    def load(
        self,
        path: str,
        state_dict: STATE_DICT | None = None,
        *,
        default_map_location: Any = None,
        strict: bool = False,
        **kwargs: Any,
    ) -> STATE_DICT:
        loaded, _ = self._reader.read(
            path, state_dict, map_location=default_map_location, strict=strict, **kwargs
        )
        return loaded


class SyncCheckpointer(_ReaderCheckpointer):
    """Save and load while the caller waits."""

    def __init__(self, writer: CheckpointWriter, reader: CheckpointReader) -> None:
        super().__init__(reader)
        self._writer = writer

    def save(self, path: str, state_dict: STATE_DICT, **kwargs: Any) -> None:
        """Save a state, and return when it is durable. Other arguments go to the writer."""
        self._writer.write(path, state_dict, **kwargs)

    def close(self) -> None:
        """Close the writer."""
        self._writer.close()


class AsyncCheckpointer(_ReaderCheckpointer):
    """Copy a state, and let another process write the copy while training continues."""

    def __init__(
        self,
        checkpoint_stager: CheckpointStager,
        checkpoint_process: CheckpointProcess,
        reader: CheckpointReader,
        *,
        warn_after_secs: float = 1.0,
    ) -> None:
        super().__init__(reader)
        self._checkpoint_stager = checkpoint_stager
        self._checkpoint_process = checkpoint_process
        self._warn_after = warn_after_secs  # of waiting for an older save
        self._writes: list[WriteFuture] = []  # pending, or failed without being observed
        self._last: WriteFuture | None = None
        self._is_closed = False
        self._saving = threading.RLock()

    def save(
        self, path: str, state_dict: STATE_DICT, **kwargs: Any
    ) -> tuple[Future[None], WriteFuture]:
        """Copy a state and write it in the background; return futures of the copy and the write.

        Tensors may be changed once the first future is done. If too many saves are pending, this
        waits for the oldest. If an earlier save failed and its future was not observed, this raises
        its error; the state is saved nevertheless, since other ranks may not know of the failure
        yet. Other arguments go to the stager and to the writer.
        """
        if self._is_closed:
            raise InvalidState("the checkpointer is closed")
        with self._saving:
            began = time.perf_counter()
            try:
                self._wait_for_slot(path)
                staged = self._checkpoint_stager.stage(state_dict, **kwargs)
            except BaseException as error:
                self._checkpoint_process.fail_save(path, error, **kwargs)
                raise
            self._last = write = self._checkpoint_process.write(staged, path, **kwargs)
            staging = wrap_future(staged)
            failed = self._failures()
            self._writes.append(write)
            if failed:
                wait([staging])  # the caller gets no future, and may change tensors immediately
            write.began, write.stall_seconds = began, time.perf_counter() - began
            _raise_first(failed, f"the state of this call is still being saved to {path}")
            return staging, write

    def prepare(self, state_dict: STATE_DICT | int) -> Future[None]:
        """Allocate staging memory in the background, for states like this one or of a size.

        The first save is then as fast as later ones. A size is in bytes of this rank's shards.
        There is no need to wait for the future that is returned.
        """
        return self._checkpoint_stager.prepare(state_dict)

    def progress(self) -> SaveProgress | None:
        """Return this rank's progress with the current save, or None."""
        return self._checkpoint_process.progress()

    @property
    def last_report(self) -> SaveReport | None:
        """The cost of the last save, once it succeeded."""
        return None if self._last is None else self._last.report

    @property
    def pending(self) -> list[WriteFuture]:
        """The pending writes, oldest first, including that of a `save` that raised."""
        return [write for write in self._writes if not write.done()]

    def _wait_for_slot(self, path: str) -> None:
        config = self._checkpoint_process.config
        pending = self.pending
        excess = pending[: max(0, len(pending) - config.max_pending_writes + 1)]
        if not excess or not wait(excess, timeout=self._warn_after).not_done:
            return
        _log.warning(
            "the save to %s waits for %d pending saves: %s", path, len(pending), self.progress()
        )
        if wait(excess, timeout=config.pending_timeout_secs).not_done:
            raise SaveTimeout(
                f"the save to {path} waited {config.pending_timeout_secs} s for the save to "
                f"{excess[0].path}: {self.progress()}"
            )

    def _failures(self) -> list[BaseException]:
        """Return the errors that the user has not observed. The next call does not repeat them."""
        finished = [write for write in self._writes if write.done()]
        self._writes = [write for write in self._writes if write not in finished]
        errors = [write.unobserved_error for write in finished]
        return [error for error in errors if error is not None]

    def close(self) -> None:
        """Wait for pending writes, end the process, and free memory.

        Raises the error of a failed save that was not observed.
        """
        self._is_closed = True  # an interrupted close may be repeated
        self._checkpoint_process.close()
        self._checkpoint_stager.close()
        _raise_first(self._failures(), "the checkpointer is closed")


def _raise_first(errors: list[BaseException], note: str) -> None:
    if not errors:
        return
    for other in errors[1:]:
        errors[0].add_note(f"a later save failed too: {other}")
    errors[0].add_note(note)
    raise errors[0]


def default_subprocess_init_fn(*_: Any) -> None:
    """Do nothing when the writer process starts."""


def default_writer_init_fn(
    rank_info: RankInfo,
    writer_config: CheckpointWriterConfig | None = None,
    barrier_config: BarrierConfig | None = None,
) -> CheckpointWriter:
    """Create the writer of the writer process."""
    barrier = create_barrier_from_config(barrier_config or BarrierConfig())
    return CheckpointWriter(writer_config or CheckpointWriterConfig(), rank_info, barrier)


def make_sync_checkpointer(
    config: CheckpointerConfig | None = None,
    rank_info: RankInfo | None = None,
    commit_hook: WriterHook | None = None,
) -> SyncCheckpointer:
    """Create a checkpointer that saves while the caller waits.

    Without a `rank_info`, the rank is that in the barrier's group, else in the current group, else
    in torch's default group, else that of the launcher's environment, else 0 of 1.
    """
    config = config or CheckpointerConfig()
    barrier_config = config.barrier_config
    if rank_info is None:
        group: dist.ProcessGroup | None = None
        if barrier_config.barrier_type == "dist_barrier" and dist.is_initialized():
            group = dist.group.WORLD
        elif barrier_config.barrier_type == "group":
            group = barrier_config.barrier_args.get("group")
        rank_info = find_ranks(group)
    barrier = create_barrier_from_config(barrier_config)
    writer = CheckpointWriter(config.writer_config, rank_info, barrier, commit_hook)
    return SyncCheckpointer(writer, CheckpointReader(rank_info))


def make_async_checkpointer(
    config: CheckpointerConfig | None = None,
    rank_info: RankInfo | None = None,
    subprocess_init_fn: Callable[..., None] = default_subprocess_init_fn,
    subprocess_init_args: tuple[Any, ...] = (),
    checkpoint_writer_init_fn: Callable[..., CheckpointWriter] = default_writer_init_fn,
    checkpoint_writer_init_args: dict[str, Any] | None = None,
) -> AsyncCheckpointer:
    """Create a checkpointer whose saves are written by another process.

    Both functions are called in that process: one to set it up, the other to create the writer,
    with ``rank_info`` and the given arguments. They must be picklable. By default the writer and
    its barrier follow `config`.
    """
    config = config or CheckpointerConfig()
    rank_info = rank_info or find_ranks()
    arguments = dict(checkpoint_writer_init_args or {})
    if checkpoint_writer_init_fn is default_writer_init_fn:
        if config.barrier_config.barrier_type in ("dist_barrier", "group"):
            raise InvalidArgument(
                f"barrier {config.barrier_config.barrier_type!r} needs a process group, and the "
                "writer process has none. Use 'tcp_store', or no barrier"
            )
        arguments.setdefault("writer_config", config.writer_config)
        arguments.setdefault("barrier_config", config.barrier_config)
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
