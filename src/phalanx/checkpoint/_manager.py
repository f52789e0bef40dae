"""`CheckpointManager`: the checkpoints of a training run, by step, in one directory.

Every rank has a manager, and all ranks call `save`, `load`, `latest` and `rewind` together;
rank 0 decides and the others learn its choice by an exchange. `_checkpoint_directory` finds, locks
and removes checkpoints; `_retention` decides which ones to remove.

A checkpoint is never removed before a newer one is durable, and never while a rank reads it.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Self, TypeVar

import torch.distributed as dist

from .. import errors
from ._barriers import make_barrier
from ._checkpoint_directory import checkpoint_directory_at
from ._checkpointer import Checkpointer, SyncCheckpointer
from ._commit import lock_owner
from ._coordination import Coordinator, format_by_rank
from ._progress import Phase, WriteFuture, peek_error
from ._reader import CheckpointReader
from ._retention import RetentionPolicy, prune
from ._types import STATE_DICT, RankInfo, check_integer
from ._writer import CheckpointWriter, CheckpointWriterConfig

T = TypeVar("T")

_log = logging.getLogger(__name__)
_LOAD_ATTEMPTS = 10  # how often a load starts again because the checkpoint it chose was removed


class CheckpointManager:
    """The checkpoints of a run, by step, in one directory.

    ::

        checkpoints = CheckpointManager("run", keep_last=3, keep_every=1000, group=group)
        checkpoints.save(step, {"model": model, "optimizer": optimizer, "rng": RNGState()})

    Every rank creates one, and all ranks call `save`, `load`, `latest` and `rewind` together. The
    ranks are those of `group`; the default is the current group, else torch's default group, else
    this process alone. The `keep_last` greatest steps are kept, and all multiples of `keep_every`.
    Damaged checkpoints, those being read, and those with foreign files are never removed. One job
    at a time may save; others may read.

    With a `checkpointer`, an asynchronous one for instance, `save` returns what it returns. Older
    checkpoints are removed when the new one is durable.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        keep_last: int = 3,
        keep_every: int | None = None,
        *,
        group: dist.ProcessGroup | None = None,
        checkpointer: Checkpointer | None = None,
        timeout_secs: int = 600,
    ) -> None:
        self._directory = checkpoint_directory_at(path, absolute=True)
        self._keep = RetentionPolicy(keep_last, keep_every)
        self._group = group
        self._timeout = timeout_secs
        self._ranks: tuple[RankInfo, Any] | None = None
        self._checkpointer = checkpointer
        self._is_external = checkpointer is not None
        self._is_cleaned = False
        self._newest = -1
        """The last step that was given to `save`; it may be pending."""
        self._writes: list[tuple[Future[None], Future[None]]] = []
        """Pending writes, each with the future of the pruning after it."""
        # After an error, the directory can be opened again without a close.
        weakref.finalize(self, self._directory.unlock)

    @property
    def _rank_and_barrier(self) -> tuple[RankInfo, Any]:
        # On first use: creating a barrier is a collective, and listing steps needs none. Not a
        # cached_property, which in Python 3.11 has one lock for all instances, so that ranks that
        # are threads would deadlock.
        if self._ranks is None:
            self._ranks = make_barrier(self._group, timeout_secs=self._timeout)
            reader = getattr(self._checkpointer, "_reader", None)
            if reader is not None and reader.rank_info != self._ranks[0]:
                raise errors.InvalidArgument(
                    f"the checkpointer is {reader.rank_info}, the manager is {self._ranks[0]}. "
                    "Give both the same ranks, by group= and rank_info="
                )
        return self._ranks

    @property
    def _coordinator(self) -> Coordinator:
        return Coordinator(*self._rank_and_barrier)

    def _get_checkpointer(self) -> Checkpointer:
        if self._checkpointer is None:
            rank_info, barrier = self._rank_and_barrier
            config = CheckpointWriterConfig(write_barrier_timeout_secs=self._timeout)
            writer = CheckpointWriter(config, rank_info, barrier)
            self._checkpointer = SyncCheckpointer(writer, CheckpointReader(rank_info))
        return self._checkpointer

    def path(self, step: int) -> str:
        """Return the path of a step's checkpoint, whether it exists or not."""
        return self._directory.path_of(_check_step(step))

    def steps(self) -> list[int]:
        """Return the steps of all checkpoints in order, as this rank sees them."""
        return self._directory.steps()

    def latest(self) -> int | None:
        """Return the newest step or None. All ranks call this, and get the same answer."""
        return self._run_on_all_ranks("asking for the latest step", self._latest_local_step)[0]

    def _latest_local_step(self) -> int | None:
        return next(reversed(self.steps()), None) if self._coordinator.rank == 0 else None

    def save(
        self, step: int, state: STATE_DICT, **kwargs: Any
    ) -> tuple[Future[None], Future[None]] | None:
        """Save the state of a step, then remove old checkpoints. All ranks call this.

        An existing checkpoint of the step is replaced atomically. A step before the newest one
        raises, since a load would not find it. Other arguments go to the checkpointer.
        """
        step = _check_step(step)
        steps = self._coordinator.run_on_all_ranks(
            Phase.PREPARING, lambda: self._prepare_save(step)
        )
        if len({*steps}) > 1:
            raise errors.SaveFailed(f"ranks save different steps: {format_by_rank(steps)}")
        try:
            futures = self._get_checkpointer().save(self.path(step), state, **kwargs)
        except Exception:
            # An asynchronous checkpointer also raises errors of earlier saves; it still saves.
            self._writes = [each for each in self._writes if not each[0].done()]
            for write in getattr(self._checkpointer, "pending", ()):
                if write.path == self.path(step):
                    self._newest = step
                    self._prune_after(write, step)
            raise
        self._newest = step
        if futures is None:
            self._prune(step)
        else:
            self._prune_after(futures[1], step)
        return futures

    def _prepare_save(self, step: int) -> int:
        if self._coordinator.rank == 0:
            self._directory.lock(lock_owner(self._coordinator.size))
            if not self._is_cleaned:
                try:
                    self._directory.clean()
                except OSError as error:  # harmless leftovers, possibly of another user
                    where = self._directory.path
                    _log.warning("cannot remove what dead jobs left in %s: %s", where, error)
                self._is_cleaned = True
            newest = max([self._newest, *self.steps()])
            if step < newest:
                raise errors.InvalidArgument(
                    f"cannot save step {step}: {self._directory.path} already has step {newest}. "
                    f"Call rewind({step}) to remove later steps, or use another directory"
                )
        return step

    def _prune_after(self, written: Future[None], step: int) -> None:
        pruned: Future[None] = Future()

        def prune_if_written(_: Future[None]) -> None:
            try:
                if not written.cancelled() and peek_error(written) is None:
                    self._prune(step)
            finally:
                pruned.set_result(None)

        self._writes = [
            each for each in self._writes if not each[1].done() or _is_unreported(each[0])
        ]
        self._writes.append((written, pruned))
        written.add_done_callback(prune_if_written)

    def _prune(self, step: int) -> None:
        """Remove old checkpoints, on rank 0, after a step was written. Never raises."""
        if self._coordinator.rank != 0:
            return
        try:
            prune(self._directory, self._keep, written=step)
        except Exception as error:  # noqa: BLE001 - object stores raise errors of any class
            message = "cannot remove old checkpoints in %s: %s"
            is_usual = isinstance(error, OSError)
            _log.warning(message, self._directory.path, error, exc_info=not is_usual)

    def rewind(self, step: int) -> None:
        """Remove all checkpoints after a step, to continue from it. All ranks call this.

        Nothing is removed if one of them is a link or has foreign files.
        """
        step = _check_step(step)
        wait([pruned for _, pruned in self._writes])

        def remove_later() -> None:
            if self._coordinator.rank != 0:
                return
            self._directory.lock(lock_owner(self._coordinator.size))
            later = [each for each in self.steps() if each > step]
            for each in later:
                if (obstacle := self._directory.obstacle(each)) is not None:
                    raise errors.CheckpointError(f"{self.path(each)} cannot be removed: {obstacle}")
            for each in reversed(later):  # leaves no gap if it fails
                if not self._directory.remove(each):
                    raise errors.CheckpointError(f"{self.path(each)} is being read")

        self._run_on_all_ranks("removing later steps", remove_later)
        self._newest = -1

    def load(
        self,
        step: int | None = None,
        state: STATE_DICT | None = None,
        *,
        map_location: Any = None,
        strict: bool = True,
        **kwargs: Any,
    ) -> STATE_DICT:
        """Load the newest step, or a given one, into a state or as a new one.

        All ranks call this, and load the same step or all raise. If the newest checkpoint is
        damaged, they raise too; an older one must be chosen explicitly. With `strict`, every key
        of `state` must exist. Other arguments go to the checkpointer.
        """
        loaded: list[STATE_DICT] = []
        with self._locked_step(None if step is None else _check_step(step)) as chosen:

            def load() -> None:
                path, options = self.path(chosen), {"default_map_location": map_location, **kwargs}
                loaded.append(self._get_checkpointer().load(path, state, strict=strict, **options))

            try:
                self._run_on_all_ranks(f"loading step {chosen}", load)
            except errors.DamagedCheckpoint as error:
                older = next((each for each in reversed(self.steps()) if each < chosen), None)
                error.add_note(
                    f"{self._directory.path} has no older checkpoint"
                    if older is None
                    else f"to continue from the one before it: load({older}, ...), then "
                    f"rewind({older}), which removes step {chosen}"
                )
                raise
        return loaded[0]

    @contextmanager
    def _locked_step(self, step: int | None) -> Iterator[int]:
        """Choose a checkpoint with all ranks, and protect it from removal.

        It is the given one, or the newest that rank 0 sees.
        """
        for _ in range(_LOAD_ATTEMPTS if step is None else 1):
            wanted = self._run_on_all_ranks("loading", lambda: [step, self._latest_local_step()])
            if any(each[0] != step for each in wanted):
                steps = format_by_rank(each[0] for each in wanted)
                raise errors.InvalidArgument(f"ranks load different steps: {steps}")
            chosen = wanted[0][1] if step is None else step
            if chosen is None:
                raise errors.CheckpointNotFound(f"there is no checkpoint in {self._directory.path}")
            with ExitStack() as locks:
                try_lock = partial(self._try_lock, chosen, locks)
                if all(self._run_on_all_ranks(f"loading step {chosen}", try_lock)):
                    yield chosen
                    return
        existing = ", ".join(map(str, self.steps())) or "none"
        raise errors.CheckpointNotFound(
            f"{self._directory.path} has no step {chosen}; available steps: {existing}"
        )

    def _try_lock(self, step: int, locks: ExitStack) -> bool:
        """Lock a checkpoint for reading until `locks` is closed; False if there is none."""
        lock = self._directory.lock_for_reading(step)
        if lock is None:
            return False
        locks.enter_context(lock)
        return True

    def _run_on_all_ranks(self, phase: str, action: Callable[[], T]) -> list[T]:
        return self._coordinator.run_on_all_ranks(phase, action, wrap_errors=False)

    def close(self) -> None:
        """Wait for pending saves, and unlock the directory.

        Raises the error of a failed write that was not observed. A checkpointer that was passed
        in is not closed.
        """
        unreported = [written for written, _ in self._writes if _is_unreported(written)]
        try:
            wait([pruned for _, pruned in self._writes])
            if self._checkpointer is not None and not self._is_external:
                self._checkpointer.close()
        finally:
            self._directory.unlock()
        self._writes = []
        for written in unreported:
            written.result()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _check_step(step: int) -> int:
    usage = ": save(step, state), load(step, state) or load(state=state)"
    number = check_integer("step", step, hint=usage)
    if not 0 <= number < 10**18:
        raise errors.InvalidArgument(f"step must be in [0, 10**18), got {step}")
    return number


def _is_unreported(written: Future[None]) -> bool:
    """Whether a write is pending, or has failed and was not observed."""
    if not written.done():
        return True
    return isinstance(written, WriteFuture) and written.unobserved_error is not None
