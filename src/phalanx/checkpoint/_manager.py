"""`CheckpointManager`: the checkpoints of a training run, by step, in one directory.

Every rank has a manager, and all ranks call `save`, `load`, `latest` and `rewind` together;
rank 0 decides and the others learn its choice by an exchange. Where the directory is and what
can be locked there is left to `_step_directory`, which checkpoints are removed to `_retention`.

A checkpoint is never removed before a newer one is durable, and never while a rank reads it.
"""

from __future__ import annotations

import logging
import operator
import os
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar

import torch.distributed as dist

from .. import errors
from ..errors import (
    CheckpointError,
    CheckpointNotFound,
    DamagedCheckpoint,
    InvalidArgument,
    SaveFailed,
)
from ._checkpointer import Checkpointer, SyncCheckpointer
from ._commit import lock_owner
from ._coordination import (
    BarrierCoordinator,
    Coordinator,
    SingleRankCoordinator,
    format_by_rank,
    rank_and_barrier,
    run_on_all_ranks,
)
from ._reader import CheckpointReader
from ._retention import RetentionPolicy, prune
from ._step_directory import step_directory_at
from ._storage import strip_file_scheme
from ._types import STATE_DICT, RankInfo
from ._writer import CheckpointWriter, CheckpointWriterConfig

T = TypeVar("T")

_log = logging.getLogger(__name__)
_LOAD_ATTEMPTS = 10
"""How often a load starts again because what it had chosen was removed."""


class CheckpointManager:
    """Checkpoints by step in one folder, of which the last are kept, and older ones on request.

    ::

        folder = CheckpointManager("run", keep_last=3, keep_every=1000, group=group)
        folder.save(step, {"model": model, "optimizer": optimizer, "rng": RNGState()})

    Every rank makes one, and all call `save`, `load` and `latest` together. The ranks are those of
    `group`, or of the current group, or of torch's default group, or this process alone. The
    `keep_last` greatest steps are kept, and, if given, multiples of `keep_every` for good.
    What is damaged, being read, or has files that are not ours is never removed. One job at a time
    may save; others may read.

    With a `checkpointer` of your own, an asynchronous one for instance, `save` returns what it
    returns; older checkpoints go when the new one is written.
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
        self._directory = step_directory_at(_absolute_path(path))
        self._keep = RetentionPolicy(keep_last, keep_every)
        self._group = group
        self._timeout = timeout_secs
        self._place: tuple[RankInfo, Any] | None = None
        self._checkpointer = checkpointer
        self._is_external = checkpointer is not None
        self._is_cleaned = False
        self._newest = -1
        """The last step that was given to `save`; it may be under way."""
        self._writes: list[tuple[Future[None], Future[None]]] = []
        """Writes that were under way when last seen, each with the end of tidying up after it."""
        # Whoever forgets a folder, because of an error perhaps, may open it again.
        weakref.finalize(self, self._directory.release)

    @property
    def _rank_and_barrier(self) -> tuple[RankInfo, Any]:
        # On first use, for ranks meet for it; whoever only lists the folder needs nobody. By hand,
        # as a cached_property of Python 3.11 has one lock for the folders of all threads, at
        # which ranks that are threads would wait for each other.
        if self._place is None:
            self._place = rank_and_barrier(self._group, timeout_secs=self._timeout)
        return self._place

    @property
    def _company(self) -> Coordinator:
        rank_info, barrier = self._rank_and_barrier
        return (
            SingleRankCoordinator(rank_info)
            if barrier is None
            else BarrierCoordinator(rank_info, barrier)
        )

    @property
    def _is_rank_zero(self) -> bool:
        return self._company.rank == 0

    def _own_checkpointer(self) -> Checkpointer:
        if self._checkpointer is None:
            rank_info, barrier = self._rank_and_barrier
            config = CheckpointWriterConfig(write_barrier_timeout_secs=self._timeout)
            writer = CheckpointWriter(config, rank_info, barrier)
            self._checkpointer = SyncCheckpointer(writer, CheckpointReader(rank_info))
        return self._checkpointer

    def path(self, step: int) -> str:
        """Return where the checkpoint of a step is, or would be."""
        return self._directory.place(_check_step(step))

    def steps(self) -> list[int]:
        """Return the steps that are there, in order, as this rank sees them."""
        return self._directory.steps()

    def latest(self) -> int | None:
        """Return the newest step that is there, or None; the same on all ranks, which all ask."""
        return self._together("asking for the latest step", self._latest_local_step)[0]

    def _latest_local_step(self) -> int | None:
        return next(reversed(self.steps()), None) if self._is_rank_zero else None

    def save(
        self, step: int, state: STATE_DICT, **kwargs: Any
    ) -> tuple[Future[None], Future[None]] | None:
        """Save the state of a step, then remove what need not be kept; all ranks call this.

        A step that is there is replaced in one instant. One that lies before the newest is
        refused: nobody would find it again. Further arguments go to the checkpointer.
        """
        step = _check_step(step)
        steps = self._company.together("getting ready", lambda: self._prepare_save(step))
        if len({*steps}) > 1:
            raise SaveFailed(f"ranks would save different steps: {format_by_rank(steps)}")
        try:
            futures = self._own_checkpointer().save(self.path(step), state, **kwargs)
        except Exception:
            # An asynchronous one tells of earlier failures so, too, and saves nevertheless.
            self._writes = [each for each in self._writes if not each[0].done()]
            for write in getattr(self._checkpointer, "under_way", ()):
                if write.path == self.path(step):
                    self._newest = step
                    self._prune_after(write, step)
            raise
        self._newest = step
        if futures is None:
            self._tidy(step)
        else:
            self._prune_after(futures[1], step)
        return futures

    def _prepare_save(self, step: int) -> int:
        if self._is_rank_zero:
            self._directory.take(lock_owner(self._company.size))
            if not self._is_cleaned:
                self._clean()
            newest = max([self._newest, *self.steps()])
            if step < newest:
                raise InvalidArgument(
                    f"{self._directory.path} has step {newest}, which is after {step}: a load would "
                    f"not find {step}. Call rewind({step}) first, which removes later ones, or "
                    "use another folder"
                )
        return step

    def _clean(self) -> None:
        try:
            self._directory.clean()
        except OSError as error:  # somebody else's perhaps; it is in nobody's way
            _log.warning("what dead jobs have left in %s stays: %s", self._directory.path, error)
        self._is_cleaned = True

    def _prune_after(self, written: Future[None], step: int) -> None:
        tidied: Future[None] = Future()

        def tidy(_: Future[None]) -> None:
            try:
                if not written.cancelled() and _write_error(written) is None:
                    self._tidy(step)
            finally:
                tidied.set_result(None)

        self._writes = [
            each for each in self._writes if not each[1].done() or _is_unreported(each[0])
        ]
        self._writes.append((written, tidied))
        written.add_done_callback(tidy)

    def _tidy(self, step: int) -> None:
        """Have rank 0 remove what need not be kept, as a step is written, whatever happens here."""
        if self._is_rank_zero:
            try:
                prune(self._directory, self._keep, written=step)
            except Exception as error:  # noqa: BLE001 - an object store has errors of its own
                is_known = isinstance(error, OSError)
                about = (self._directory.path, error)
                _log.warning("old checkpoints in %s stay: %s", *about, exc_info=not is_known)

    def rewind(self, step: int) -> None:
        """Remove all checkpoints after a step, to go on from there; all ranks call this.

        Nothing is removed if one of them is a link, or has files in it that are not ours.
        """
        step = _check_step(step)
        self._wait()
        self._together("removing later steps", lambda: self._remove_after(step))
        self._newest = -1

    def _remove_after(self, step: int) -> None:
        if not self._is_rank_zero:
            return
        self._directory.take(lock_owner(self._company.size))
        later = [each for each in self.steps() if each > step]
        for each in later:
            if (obstacle := self._directory.obstacle(each)) is not None:
                raise CheckpointError(f"{self._directory.place(each)} is not removed: {obstacle}")
        for each in reversed(later):  # so that those that are left have no gap, whatever happens
            if not self._directory.remove(each):
                raise CheckpointError(f"{self._directory.place(each)} is being read")

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

        All ranks call this and load the same step, or all raise: also if the newest one is
        damaged, for an older one is for you to choose. With `strict`, all that the state asks for
        must be there. Further arguments go to the checkpointer.
        """
        loaded: list[STATE_DICT] = []
        with self._held(None if step is None else _check_step(step)) as chosen:

            def load() -> None:
                path, options = self.path(chosen), {"default_map_location": map_location, **kwargs}
                loaded.append(self._own_checkpointer().load(path, state, strict=strict, **options))

            try:
                self._together(f"loading step {chosen}", load)
            except DamagedCheckpoint as error:
                error.add_note(self._recovery_hint(chosen))
                raise
        return loaded[0]

    def _recovery_hint(self, step: int) -> str:
        older = [each for each in self.steps() if each < step]
        if not older:
            return f"{self._directory.path} has no older checkpoint"
        return (
            f"to go on from the one before it: load({older[-1]}, ...), then rewind({older[-1]}), "
            f"which removes step {step}"
        )

    @contextmanager
    def _held(self, step: int | None) -> Iterator[int]:
        """Choose a checkpoint with all ranks, and keep it from being removed meanwhile."""
        for _ in range(_LOAD_ATTEMPTS if step is None else 1):
            chosen = self._choose(step)
            with ExitStack() as holds:
                hold = partial(self._hold, chosen, holds)
                if all(self._together(f"loading step {chosen}", hold)):
                    yield chosen
                    return
        there = ", ".join(map(str, self.steps())) or "none"
        raise CheckpointNotFound(f"{self._directory.path} has no step {chosen}; there are: {there}")

    def _hold(self, step: int, holds: ExitStack) -> bool:
        held = self._directory.hold(step)
        return held is not None and bool(holds.enter_context(closing(held)))

    def _choose(self, step: int | None) -> int:
        """Return the step that all ranks shall load: the given one, or what rank 0 finds."""
        wanted = self._together("loading", lambda: [step, self._latest_local_step()])
        if any(each[0] != step for each in wanted):
            steps = format_by_rank(each[0] for each in wanted)
            raise InvalidArgument(f"ranks load different steps: {steps}")
        chosen = wanted[0][1] if step is None else step
        if chosen is None:
            raise CheckpointNotFound(f"there is no checkpoint in {self._directory.path}")
        return chosen

    def _together(self, doing: str, action: Callable[[], T]) -> list[T]:
        return run_on_all_ranks(self._company, doing, action)

    def close(self) -> None:
        """Wait for what is under way, and let others save here.

        Raises the error of a write that nobody has been told about. A checkpointer that was given
        is its owner's to close.
        """
        news = [written for written, _ in self._writes if _is_unreported(written)]
        try:
            self._wait()
            if self._checkpointer is not None and not self._is_external:
                self._checkpointer.close()
        finally:
            self._directory.release()
        self._writes = []
        for written in news:
            written.result()

    def _wait(self) -> None:
        wait([tidied for _, tidied in self._writes])

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _check_step(step: int) -> int:
    try:
        number = operator.index(step)
    except TypeError:
        # Not its value: it may be a state, which a reader expects to come first.
        kind = type(step).__name__
        raise errors.InvalidType(
            f"a step is an integer, not a {kind}: save(step, state), load(step, state) or "
            "load(state=state)"
        ) from None
    if not 0 <= number < 10**18:
        raise InvalidArgument(f"a step cannot be {step}")
    return number


def _absolute_path(path: str | os.PathLike[str]) -> str:
    """Return a path that means the same wherever the process goes; a URL as it is."""
    path = os.fspath(path)
    if not isinstance(path, str) or not path or "://" in (path := strip_file_scheme(path)):
        return path  # the shelf knows what to say
    return os.path.abspath(os.path.expanduser(path))


def _write_error(written: Future[None]) -> BaseException | None:
    # By the method of the base, for to ask a write by its own one is to be told: then its
    # checkpointer would never raise what went wrong.
    return Future.exception(written)


def _is_unreported(written: Future[None]) -> bool:
    """Tell whether a write is under way, or has failed and is known to have told nobody."""
    if not written.done():
        return True
    was_asked = getattr(written, "was_asked", True)
    return not was_asked and not written.cancelled() and _write_error(written) is not None
