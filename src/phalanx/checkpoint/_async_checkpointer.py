"""Save while training goes on."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from concurrent.futures import Future, wait
from typing import Any

from ..errors import InvalidState, SaveTimeout
from ._checkpoint_process import CheckpointProcess
from ._checkpoint_reader import CheckpointReader
from ._checkpointer import ReadingCheckpointer
from ._futures import WriteFuture, wrap_future
from ._progress import SaveProgress, SaveReport
from ._staging import CheckpointStager
from ._types import STATE_DICT

__all__ = ["AsyncCheckpointer"]

logger = logging.getLogger(__name__)

_SILENCE = 1.0  # seconds that a save waits for an older one before it says so


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
            self._make_room(path)
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

    def _make_room(self, path: str) -> None:
        """Wait while too many saves are under way."""
        config = self._checkpoint_process.config
        under_way = self.under_way
        excess = under_way[: max(0, len(under_way) - config.max_pending_writes + 1)]
        if not excess or not wait(excess, timeout=_SILENCE).not_done:
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
