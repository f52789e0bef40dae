"""A folder of checkpoints that a training run lives with."""

from __future__ import annotations

import json
import logging
import operator
import os
import weakref
from collections.abc import Iterator
from concurrent.futures import Future, wait
from contextlib import closing, contextmanager
from functools import cached_property
from types import TracebackType
from typing import Any, Self

import torch.distributed as dist

from .. import errors
from ..errors import CheckpointError, CheckpointNotFound, InvalidArgument
from ._checkpoint_reader import CheckpointReader
from ._checkpoint_writer import CheckpointWriter, CheckpointWriterConfig
from ._checkpointer import Checkpointer, SyncCheckpointer
from ._commit import who
from ._company import meet_in
from ._meeting import Alone, AtBarrier, Company
from ._retention import Keep, prune
from ._shelf import shelf_at
from ._types import STATE_DICT, RankInfo

__all__ = ["Folder"]

_log = logging.getLogger(__name__)
_ATTEMPTS = 10
"""How often a load starts again because what it had chosen was removed."""


class Folder:
    """Checkpoints by step in one folder, of which the last and some of the older ones are kept.

    ::

        folder = Folder("run", keep_last=3, keep_every=1000, group=group)
        folder.save(step, {"model": model, "optimizer": optimizer, "rng": RNGState()})

    Every rank makes one, and all call `save`, `load` and `latest` together. The ranks are those of
    `group`, or of the current group, or of torch's default group, or this process alone. The
    `keep_last` greatest steps are kept, and multiples of `keep_every` for good (None: no others).
    What is damaged, being read, or has files that are not ours is never removed. One job at a time
    may save; others may read.

    With a `checkpointer` of your own, an asynchronous one for instance, `save` returns what it
    returns; older checkpoints go when the new one is written.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        keep_last: int = 3,
        keep_every: int | None = 1000,
        *,
        group: dist.ProcessGroup | None = None,
        checkpointer: Checkpointer | None = None,
        timeout_secs: int = 600,
    ) -> None:
        self._shelf = shelf_at(path)
        self._keep = Keep(keep_last, keep_every)
        self._group = group
        self._timeout = timeout_secs
        self._given = checkpointer
        self._is_tidy = False
        self._newest = -1
        """The last step that was given to `save`; it may be under way."""
        self._written: Future[None] | None = None
        # Whoever forgets a folder, because of an error perhaps, may open it again.
        weakref.finalize(self, self._shelf.release)

    @cached_property
    def _seat(self) -> tuple[RankInfo, Any]:
        # On first use, for ranks meet for it; whoever only lists the folder needs nobody.
        return meet_in(self._group, timeout_secs=self._timeout)

    @cached_property
    def _company(self) -> Company:
        rank_info, barrier = self._seat
        return Alone(rank_info) if barrier is None else AtBarrier(rank_info, barrier)

    @cached_property
    def _checkpointer(self) -> Checkpointer:
        if self._given is not None:
            return self._given
        rank_info, barrier = self._seat
        config = CheckpointWriterConfig(write_barrier_timeout_secs=self._timeout)
        writer = CheckpointWriter(config, rank_info, barrier)
        return SyncCheckpointer(writer, CheckpointReader(rank_info))

    def path(self, step: int) -> str:
        """Return where the checkpoint of a step is, or would be."""
        return self._shelf.place(_checked(step))

    def steps(self) -> list[int]:
        """Return the steps that are there, in order, as this rank sees them."""
        return self._shelf.steps()

    def latest(self) -> int | None:
        """Return the newest step that is there, or None; the same on all ranks, which all ask."""
        newest: int | None = self._first_says(self.steps()[-1:] or [None])[0]
        return newest

    def save(
        self, step: int, state: STATE_DICT, **kwargs: Any
    ) -> tuple[Future[None], Future[None]] | None:
        """Save the state of a step, then remove what need not be kept; all ranks call this.

        A step that is there is replaced in one instant. One that lies before the newest is
        refused: nobody would find it again. Further arguments go to the checkpointer.
        """
        step = _checked(step)
        self._company.together("getting ready", lambda: self._get_ready(step))
        futures = self._checkpointer.save(self.path(step), state, **kwargs)
        self._newest = step
        if futures is None:
            self._tidy()
        else:
            self._written = futures[1]
            self._written.add_done_callback(self._tidy_after)
        return futures

    def _get_ready(self, step: int) -> None:
        if self._company.rank != 0:
            return
        self._shelf.take(who(self._company.size))
        if not self._is_tidy:
            self._shelf.clean()
            self._is_tidy = True
        newest = max([self._newest, *self.steps()])
        if step < newest:
            raise InvalidArgument(
                f"{self._shelf.path} has step {newest}, which is after {step}: a load would not "
                f"find {step}. Call rewind({step}) first, which removes later ones, or "
                "use another folder"
            )

    def _tidy_after(self, written: Future[None]) -> None:
        if not written.cancelled() and written.exception() is None:
            self._tidy()

    def _tidy(self) -> None:
        """Have rank 0 remove what need not be kept; the save has succeeded whatever happens."""
        if self._company.rank == 0:
            try:
                prune(self._shelf, self._keep)
            except OSError as error:
                _log.warning("old checkpoints in %s stay: %s", self._shelf.path, error)

    def rewind(self, step: int) -> None:
        """Remove all checkpoints after a step, to go on from there; all ranks call this."""
        step = _checked(step)

        def remove() -> None:
            if self._company.rank == 0:
                self._shelf.take(who(self._company.size))
                for each in self.steps():
                    if each > step and not self._shelf.remove(each):
                        raise CheckpointError(f"{self._shelf.place(each)} is being read")

        self._company.together("removing later steps", remove)
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

        All ranks call this and load the same step, or all raise. With `strict`, all that the state
        asks for must be there. Further arguments go to the checkpointer.
        """
        with self._held(None if step is None else _checked(step)) as chosen:
            error: Exception | None = None
            try:
                loaded = self._checkpointer.load(
                    self.path(chosen),
                    state,
                    default_map_location=map_location,
                    strict=strict,
                    **kwargs,
                )
            except Exception as raised:  # noqa: BLE001 - all ranks shall hear of it
                error = raised
            self._settle(chosen, error)
            return loaded

    @contextmanager
    def _held(self, step: int | None) -> Iterator[int]:
        """Choose a checkpoint with all ranks, and keep it from being removed meanwhile."""
        for _ in range(_ATTEMPTS):
            wanted = self.steps()[-1:] if step is None else [step]
            chosen = next(iter(self._first_says(wanted)), None)
            if chosen is None:
                raise CheckpointNotFound(f"there is no checkpoint in {self._shelf.path}")
            hold = self._shelf.hold(chosen)
            if all(self._all_say(hold is not None)):
                assert hold is not None
                with closing(hold):
                    yield chosen
                return
            if hold is not None:
                hold.close()
            if step is not None:
                break
        there = ", ".join(map(str, self.steps())) or "none"
        raise CheckpointNotFound(f"{self._shelf.path} has no step {chosen}; there are: {there}")

    def _settle(self, step: int, error: Exception | None) -> None:
        """Raise on every rank if one could not load."""
        said = None if error is None else [type(error).__name__, str(error)]
        failed = {rank: each for rank, each in enumerate(self._all_say(said)) if each}
        if error is not None:
            raise error
        if failed:
            rank, (kind, message) = next(iter(failed.items()))
            known = getattr(errors, kind, CheckpointError)
            raised = known if issubclass(known, CheckpointError) else CheckpointError
            raise raised(f"rank {rank} could not load step {step}: {kind}: {message}")

    def _first_says(self, value: Any) -> Any:
        """Return what rank 0 says."""
        return self._all_say(value)[0]

    def _all_say(self, value: Any) -> list[Any]:
        return [json.loads(text) for text in self._company.exchange(json.dumps(value))]

    def close(self) -> None:
        """Wait for what is under way, and let others save here.

        A checkpointer that was given is its owner's to close.
        """
        if self._written is not None:
            wait([self._written])
        if self._given is None and "_checkpointer" in self.__dict__:
            self._checkpointer.close()
        self._shelf.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _checked(step: int) -> int:
    try:
        number = operator.index(step)
    except TypeError:
        raise errors.InvalidType(f"a step is an integer, not {step!r}") from None
    if not 0 <= number < 10**18:
        raise InvalidArgument(f"a step cannot be {step}")
    return number
