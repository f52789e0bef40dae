"""The thread of a rank that has the writer process write one state after the other.

It starts the process, and another one if that dies; it waits for what is still being staged, asks,
waits for the answer, and settles the future. Whatever happens, every future is settled.
"""

from __future__ import annotations

import atexit
import logging
import os
import queue
import threading
from collections import deque
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeAlias

from ..errors import InvalidState, SaveFailed, SaveTimeout
from ._checkpoint_process_link import Done, Refuse, Write, printable
from ._checkpoint_process_start import Child, Recipe
from ._futures import Outcome, WriteFuture
from ._progress import SaveProgress
from ._staging import CheckpointStagerConfig, DefaultStager, Staged
from ._staging_layout import BranchNote
from ._types import STATE_DICT, RankInfo

__all__ = ["Job", "Scribe"]

logger = logging.getLogger(__name__)

_GRACE = 5.0  # seconds from a kill to the end of the thread

State: TypeAlias = STATE_DICT | Future[STATE_DICT]


@dataclass
class Job:
    """A state that is to be written."""

    turn: int
    """The number of the save."""
    path: str
    state: State | BaseException
    """The state, or why there is none."""
    kwargs: BranchNote
    future: WriteFuture
    phase: str = "staging"
    """What it is doing, as long as that is nothing that the process tells."""

    def take_state(self) -> State | BaseException:
        """Hand out the state, which may be large, and hold it no longer."""
        state, self.state = self.state, {}
        return state


class Scribe:
    """The thread, its process, and the jobs that wait."""

    def __init__(
        self, recipe: Recipe, rank_info: RankInfo, *, start_timeout: float, end_timeout: float
    ) -> None:
        self._recipe = recipe
        self._rank_info = rank_info
        self._start_timeout = start_timeout
        self._end_timeout = end_timeout
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._unfinished: deque[Job] = deque()
        self._given_up = ""
        self._copier: DefaultStager | None = None
        self.child: Child | None = None
        self.created: Future[None] = Future()
        """Done when the first process has started."""
        self.created.set_running_or_notify_cancel()  # it cannot be cancelled
        self.pid = os.getpid()
        # Not by the thread's join: who is interrupted there finds the thread ended the next time.
        self._ended = threading.Event()
        threading.Thread(target=self._run, name="phalanx-checkpoint-scribe", daemon=True).start()
        _remember(self)

    def submit(self, job: Job) -> None:
        """Have something written after all that was submitted before."""
        self._unfinished.append(job)
        self._jobs.put(job)

    def progress(self) -> SaveProgress | None:
        """Tell how far the save is that is under way, if one is."""
        try:
            job = self._unfinished[0]
        except IndexError:
            return None
        meter = self._recipe.meter
        told = not job.phase
        return job.future.progress(
            phase=meter.phase if told else job.phase,
            written=meter.written if told else 0,
            total=meter.total if told else 0,
            speed=meter.bytes_per_second if told else 0.0,
        )

    def _run(self) -> None:
        try:
            self._work()
        finally:
            _scribes.discard(self)
            self._ended.set()

    def _work(self) -> None:
        try:
            self._living_child()
            self.created.set_result(None)
        except BaseException as error:  # noqa: BLE001 - the first save tries again, and will tell
            self.created.set_exception(error)
        while self._settle(self._jobs.get()):
            pass
        if self.child is not None:
            self.child.end(self._end_timeout)

    def _settle(self, job: Job | None) -> bool:
        """Do a job, unless it is the end."""
        if job is None:
            return False
        try:
            outcome = self._write(job)
        except BaseException as error:  # noqa: BLE001 - it is the future's to raise it
            self._unfinished.popleft()
            self._fail(job, error)
        else:
            self._unfinished.popleft()
            with suppress(InvalidStateError):  # it was given up already
                job.future.succeed(outcome)
        return True

    def _fail(self, job: Job, error: BaseException) -> None:
        if job.future.done():
            return  # it was given up already
        if self._given_up:
            error = SaveTimeout(f"the save to {job.path} was given up: {self._given_up}")
        # Also in words, for its future may never be asked.
        path, rank = printable(job.path), self._rank_info.global_rank
        logger.error("rank %d, save to %s: %s", rank, path, printable(str(error)))
        with suppress(InvalidStateError):  # just now
            job.future.set_exception(error)

    def _write(self, job: Job) -> Outcome:
        try:
            staged = self._staged(job.take_state())
        except BaseException as error:
            self._tell_others(job, error)
            raise
        try:
            done = self._ask_for(staged, job)
        finally:
            staged.release()
        return Outcome(staged.size, staged.seconds, done.written, done.phases)

    def _staged(self, state: State | BaseException) -> Staged:
        if isinstance(state, BaseException):
            raise state
        if isinstance(state, Future):
            state = state.result()
        if isinstance(state, Staged):
            if state.is_released:
                raise InvalidState("this copy was written before, and its memory is in use again")
            return state
        # Of a stager that does not know of shared memory: it is a copy, so there is time.
        if self._copier is None:
            config = CheckpointStagerConfig(use_async_staging=False)
            self._copier = DefaultStager(config, rank_info=self._rank_info)
        staged = self._copier.stage(state)
        assert isinstance(staged, Staged)
        return staged

    def _ask_for(self, staged: Staged, job: Job) -> Done:
        job.phase = "starting the writer process"
        child, buffer, path = self._living_child(), staged.buffer, os.fsencode(job.path)
        request = Write(job.turn, path, buffer.number, buffer.capacity, staged.note, job.kwargs)
        self._recipe.meter.restart()
        job.phase = ""
        return child.write(request, buffer.fd)

    def _tell_others(self, job: Job, error: BaseException) -> None:
        """Let the other ranks know that this one has no state, so that they do not wait for it."""
        if self._rank_info.global_world_size > 1:
            why = printable(f"{type(error).__name__}: {error}")
            request = Refuse(job.turn, os.fsencode(job.path), why, job.kwargs)
            with suppress(Exception):  # as it must; what counts is why there is no state
                self._living_child().refuse(request)

    def _living_child(self) -> Child:
        child = self.child
        if child is not None and not child.is_alive:
            child.kill()
            child = self.child = None
        if child is None and not self._given_up:
            child = self._start()
        if self._given_up or child is None:  # after the start: who gives up kills whom it finds
            raise SaveTimeout(self._given_up)
        return child

    def _start(self) -> Child:
        try:
            self.child = child = Child(self._recipe)
        except OSError as error:
            raise SaveFailed(f"the checkpoint process could not be started: {error}") from error
        try:
            child.set_up(self._start_timeout)
        except BaseException:
            self.child = None
            child.kill()
            raise
        return child

    def stop(self) -> None:
        """End when all that was submitted is done."""
        self._jobs.put(None)

    def close(self) -> None:
        """Wait for what was submitted, within limits; what is not done then has failed."""
        if not self.created.done() and not self._unfinished:
            self._kill_child()  # it has not even started, and nobody wants it to
        self.stop()
        if not self._given_up:
            self._ended.wait(self._end_timeout)
        if not self._ended.is_set():
            self._given_up = f"it was not done within {self._end_timeout} s of the end"
            self._kill_child()
            self._ended.wait(_GRACE)
            for job in list(self._unfinished):  # of a stager that never comes to an end
                self._fail(job, SaveTimeout())

    def _kill_child(self) -> None:
        child = self.child
        if child is not None:
            child.popen.kill()


_scribes: set[Scribe] = set()
"""Those that are at work: a write that is under way outlives who asked for it."""
_is_registered = False


def _remember(scribe: Scribe) -> None:
    global _is_registered  # noqa: PLW0603 - once in a process, and not on import
    if not _is_registered:
        atexit.register(_finish)
        _is_registered = True
    _scribes.add(scribe)


def _finish() -> None:
    """Do not let the interpreter end before all is written, or said to be lost."""
    for scribe in list(_scribes):
        if scribe.pid == os.getpid():
            scribe.close()
