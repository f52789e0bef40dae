"""`CheckpointProcess`: the rank's side of the process that writes its checkpoints.

A `WriterThread` starts the process, and another one if it dies, hands it one staged state after
the other and settles the future of each. Every future is settled, whatever happens. The process
is killed with the thread that started it (PR_SET_PDEATHSIG), so that thread must outlive it.

The other side is `_writer_process`; state travels through shared memory (`_staging_buffer`).
"""

from __future__ import annotations

import atexit
import json
import logging
import mmap
import multiprocessing
import multiprocessing.spawn
import os
import pickle
import queue
import select
import socket
import subprocess
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from typing import Any, TypeAlias

import msgspec

from .. import errors
from .._signals import signal_name
from ..errors import (
    CheckpointError,
    InvalidArgument,
    InvalidState,
    InvalidType,
    SaveFailed,
    SaveTimeout,
    WriterLost,
)
from ._coordination import job_name
from ._progress import ProgressMeter, SaveProgress, WriteFuture, WriteResult
from ._staging import CheckpointStagerConfig, DefaultStager, StagedState, check_not_forked
from ._staging_buffer import BranchLayout, layout_of_tree
from ._state_tree import leaves, parse_state
from ._types import STATE_DICT, RankInfo
from ._writer import CheckpointWriter
from ._writer_process import (
    ControlSocket,
    DoneReply,
    ExitRequest,
    FailedReply,
    ReadyReply,
    RefuseRequest,
    Reply,
    Request,
    WriteRequest,
    WriterSetup,
    printable,
)

# Before torch is imported, which takes seconds: die with the rank, and leave it to the rank to obey
# signals that the whole job is sent, for it may want to save once more.
_COMMAND = """
import ctypes, json, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
if os.getppid() != int(sys.argv[1]):
    sys.exit()
signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
sys.path[:] = json.loads(sys.argv[2])
from phalanx.checkpoint._writer_process import main
main(int(sys.argv[3]))
"""
_EXIT_GRACE = 5.0  # seconds from the end of the socket to that of the process


class RemoteTraceback(Exception):
    """Where in the writer process an error was raised, as text."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return f'\n"""\n{self.text}"""'


class WriterProcessSpec:
    """All that is needed to start a writer process, once and again."""

    def __init__(self, setup: WriterSetup) -> None:
        try:
            made = bytes(ForkingPickler.dumps(setup))
        except Exception as error:
            raise InvalidArgument(
                f"the functions and arguments for the checkpoint process must be such as can be "
                f"pickled, functions of a module for example: {error}"
            ) from error
        self.message = pickle.dumps((job_name(), _main_module(made), made))
        self._meter_fd = os.memfd_create("phalanx-progress", os.MFD_CLOEXEC)
        os.ftruncate(self._meter_fd, ProgressMeter.SIZE)
        self.meter = ProgressMeter(mmap.mmap(self._meter_fd, ProgressMeter.SIZE))

    def fileno(self) -> int:
        """Name the memory of the meter."""
        return self._meter_fd

    def __del__(self) -> None:
        if hasattr(self, "_meter_fd"):
            os.close(self._meter_fd)


def _main_module(setup: bytes) -> dict[str, Any] | None:
    """Tell how to import the user's script, if something in it is needed, and not otherwise.

    So a script needs no ``if __name__ == "__main__"`` for our sake.
    """
    if b"__main__" not in setup:
        return None
    told = multiprocessing.spawn.get_preparation_data("phalanx-checkpoint-writer")
    told.pop("authkey")
    return told


class WriterProcess:
    """A writer process. The thread that starts it must outlive it, for it dies with its parent."""

    def __init__(self, recipe: WriterProcessSpec) -> None:
        ours, theirs = socket.socketpair()
        self._link = ControlSocket(ours)
        self._buffers: set[int] = set()
        """The numbers of the buffers that it knows."""
        with theirs:
            path = json.dumps([*map(str, sys.path)])
            arguments = [str(os.getpid()), path, str(theirs.fileno())]
            self.popen = subprocess.Popen(
                [sys.executable, "-c", _COMMAND, *arguments],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )
        # Others may have inherited the sockets, so that their ends do not tell of its end.
        self._pidfd = os.pidfd_open(self.popen.pid)
        self._recipe = recipe

    def set_up(self, timeout: float) -> None:
        """Wait until it is ready to write."""
        try:
            self._link.send(self._recipe.message, [self._recipe.fileno()])
        except ConnectionError:
            raise self._lost() from None
        if not self._is_heard_within(timeout):
            raise SaveTimeout(f"the checkpoint process was not ready within {timeout} s")
        reply = self._receive()
        if isinstance(reply, FailedReply):
            raise _error_from_reply(reply, "the checkpoint process could not start: ")
        assert isinstance(reply, ReadyReply)

    def write(self, request: WriteRequest, buffer: int) -> DoneReply:
        """Have it write what is in a buffer, whose descriptor it may have already."""
        is_new = request.buffer not in self._buffers
        self._send(request, [buffer] if is_new else [])
        self._buffers.add(request.buffer)
        return self._answer()

    def refuse(self, request: RefuseRequest) -> DoneReply:
        """Have it tell the other ranks that there is nothing to write."""
        self._send(request)
        return self._answer()

    def _send(self, request: Request, fds: Sequence[int] = ()) -> None:
        message = msgspec.json.encode(request)
        try:
            self._link.send(message, fds)
        except ConnectionError:
            raise self._lost() from None

    def _answer(self) -> DoneReply:
        """Wait until it is done, and raise what went wrong."""
        self._is_heard_within(None)
        reply = self._receive()
        if isinstance(reply, FailedReply):
            raise _error_from_reply(reply)
        assert isinstance(reply, DoneReply)
        return reply

    @property
    def is_alive(self) -> bool:
        """Tell whether it is there."""
        return self.popen.poll() is None

    def _is_heard_within(self, timeout: float | None) -> bool:
        poll = select.poll()
        poll.register(self._link, select.POLLIN)
        poll.register(self._pidfd, select.POLLIN)
        return bool(poll.poll(None if timeout is None else timeout * 1000))

    def _receive(self) -> Reply:
        poll = select.poll()
        poll.register(self._link, select.POLLIN)
        if not poll.poll(0):  # it was its end that was heard
            raise self._lost()
        try:
            message, _ = self._link.receive()
        except EOFError:
            raise self._lost() from None
        reply: Reply = msgspec.json.decode(message, type=Reply)
        return reply

    def _lost(self) -> WriterLost:
        try:
            status = self.popen.wait(_EXIT_GRACE)
        except subprocess.TimeoutExpired:
            self.popen.kill()
            status = self.popen.wait()
        how = f"was killed by {signal_name(-status)}" if status < 0 else f"ended with {status}"
        return WriterLost(f"the checkpoint process {self.popen.pid} {how}")

    def end(self, timeout: float) -> None:
        """End it, by force if it takes too long."""
        try:
            self._link.send(msgspec.json.encode(ExitRequest()))
            self.popen.wait(timeout)
        except (ConnectionError, subprocess.TimeoutExpired):
            pass
        self.kill()

    def kill(self) -> None:
        """End it by force, and let go of it."""
        self.popen.kill()
        self.popen.wait()
        self._link.close()
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1


def _error_from_reply(reply: FailedReply, prefix: str = "") -> CheckpointError:
    """Raise here what was raised there."""
    kind = getattr(errors, reply.kind, SaveFailed)
    if not (isinstance(kind, type) and issubclass(kind, CheckpointError)):
        kind = SaveFailed
    error: CheckpointError = kind(f"{prefix}{reply.message}")
    error.__cause__ = RemoteTraceback(reply.traceback)
    return error


logger = logging.getLogger(__name__)

_KILL_GRACE = 5.0  # seconds from a kill to the end of the thread

StateOrFuture: TypeAlias = STATE_DICT | Future[STATE_DICT]


@dataclass
class WriteJob:
    """A state that is to be written."""

    turn: int
    """The number of the save."""
    path: str
    state: StateOrFuture | BaseException
    """The state, or why there is none."""
    kwargs: BranchLayout
    future: WriteFuture
    phase: str = "staging"
    """What it is doing, as long as that is nothing that the process tells."""

    def take_state(self) -> StateOrFuture | BaseException:
        """Hand out the state, which may be large, and hold it no longer."""
        state, self.state = self.state, {}
        return state


class WriterThread:
    """The thread, its process, and the jobs that wait."""

    def __init__(
        self,
        recipe: WriterProcessSpec,
        rank_info: RankInfo,
        *,
        start_timeout: float,
        end_timeout: float,
    ) -> None:
        self._recipe = recipe
        self._rank_info = rank_info
        self._start_timeout = start_timeout
        self._end_timeout = end_timeout
        self._jobs: queue.SimpleQueue[WriteJob | None] = queue.SimpleQueue()
        self._unfinished: deque[WriteJob] = deque()
        self._given_up = ""
        self._copier: DefaultStager | None = None
        self.child: WriterProcess | None = None
        self.created: Future[None] = Future()
        """Done when the first process has started."""
        self.created.set_running_or_notify_cancel()  # it cannot be cancelled
        self.pid = os.getpid()
        # Not by the thread's join: who is interrupted there finds the thread ended the next time.
        self._ended = threading.Event()
        threading.Thread(target=self._run, name="phalanx-checkpoint-scribe", daemon=True).start()
        _close_at_exit(self)

    def submit(self, job: WriteJob) -> None:
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
            _writer_threads.discard(self)
            self._ended.set()

    def _work(self) -> None:
        try:
            self._live_process()
            self.created.set_result(None)
        except BaseException as error:  # noqa: BLE001 - the first save tries again, and will tell
            self.created.set_exception(error)
        while self._settle(self._jobs.get()):
            pass
        if self.child is not None:
            self.child.end(self._end_timeout)

    def _settle(self, job: WriteJob | None) -> bool:
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

    def _fail(self, job: WriteJob, error: BaseException) -> None:
        if job.future.done():
            return  # it was given up already
        if self._given_up:
            error = SaveTimeout(f"the save to {job.path} was given up: {self._given_up}")
        # Also in words, for its future may never be asked.
        path, rank = printable(job.path), self._rank_info.global_rank
        logger.error("rank %d, save to %s: %s", rank, path, printable(str(error)))
        with suppress(InvalidStateError):  # just now
            job.future.set_exception(error)

    def _write(self, job: WriteJob) -> WriteResult:
        try:
            staged = self._staged(job.take_state())
        except BaseException as error:
            self._notify_peers(job, error)
            raise
        try:
            done = self._request_write(staged, job)
        finally:
            staged.release()
        return WriteResult(staged.size, staged.seconds, done.written, done.phases)

    def _staged(self, state: StateOrFuture | BaseException) -> StagedState:
        if isinstance(state, BaseException):
            raise state
        if isinstance(state, Future):
            state = state.result()
        if isinstance(state, StagedState):
            if state.is_released:
                raise InvalidState("this copy was written before, and its memory is in use again")
            return state
        # Of a stager that does not know of shared memory: it is a copy, so there is time.
        if self._copier is None:
            config = CheckpointStagerConfig(use_async_staging=False)
            self._copier = DefaultStager(config, rank_info=self._rank_info)
        staged = self._copier.stage(state)
        assert isinstance(staged, StagedState)
        return staged

    def _request_write(self, staged: StagedState, job: WriteJob) -> DoneReply:
        job.phase = "starting the writer process"
        child, buffer, path = self._live_process(), staged.buffer, os.fsencode(job.path)
        request = WriteRequest(
            job.turn, path, buffer.number, buffer.capacity, staged.note, job.kwargs
        )
        self._recipe.meter.restart()
        job.phase = ""
        return child.write(request, buffer.fd)

    def _notify_peers(self, job: WriteJob, error: BaseException) -> None:
        """Let the other ranks know that this one has no state, so that they do not wait for it."""
        if self._rank_info.global_world_size > 1:
            why = printable(f"{type(error).__name__}: {error}")
            request = RefuseRequest(job.turn, os.fsencode(job.path), why, job.kwargs)
            with suppress(Exception):  # as it must; what counts is why there is no state
                self._live_process().refuse(request)

    def _live_process(self) -> WriterProcess:
        child = self.child
        if child is not None and not child.is_alive:
            child.kill()
            child = self.child = None
        if child is None and not self._given_up:
            child = self._start()
        if self._given_up or child is None:  # after the start: who gives up kills whom it finds
            raise SaveTimeout(self._given_up)
        return child

    def _start(self) -> WriterProcess:
        try:
            self.child = child = WriterProcess(self._recipe)
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
            self._ended.wait(_KILL_GRACE)
            for job in list(self._unfinished):  # of a stager that never comes to an end
                self._fail(job, SaveTimeout())

    def _kill_child(self) -> None:
        child = self.child
        if child is not None:
            child.popen.kill()


_writer_threads: set[WriterThread] = set()
"""Those that are at work: a write that is under way outlives who asked for it."""
_is_registered = False


def _close_at_exit(scribe: WriterThread) -> None:
    global _is_registered  # noqa: PLW0603 - once in a process, and not on import
    if not _is_registered:
        atexit.register(_close_all)
        _is_registered = True
    _writer_threads.add(scribe)


def _close_all() -> None:
    """Do not let the interpreter end before all is written, or said to be lost."""
    for scribe in list(_writer_threads):
        if scribe.pid == os.getpid():
            scribe.close()


@dataclass
class CheckpointProcessConfig:
    """Say how long to wait for the writer process, and how many saves may wait for it."""

    subprocess_init_timeout_secs: int = 30
    """How long it may take to start; a save does not wait for it, but its end does."""
    subprocess_shutdown_timeout_secs: int = 60
    """How long `close` waits for the writes under way; what is not done then has failed."""
    max_pending_writes: int = 2
    """How many saves may be under way; one more waits for the oldest. Each needs a buffer."""
    pending_timeout_secs: float = 1800
    """How long a save waits for an older one before it fails."""


class CheckpointProcess:
    """Have states written by another process. It survives writes that fail; if it dies, the write
    fails at once, and the next one gets a new process.

    The process is started when this is made, in the background. It dies with the calling process.
    """

    def __init__(
        self,
        rank_info: RankInfo,
        config: CheckpointProcessConfig,
        subprocess_init_fn: Callable[..., None],
        subprocess_init_args: tuple[Any, ...],
        checkpoint_writer_init_fn: Callable[..., CheckpointWriter],
        checkpoint_writer_init_args: dict[str, Any],
    ) -> None:
        _refuse_reimport()
        self.config = config
        self._rank_info = rank_info
        setup = WriterSetup(
            rank_info,
            subprocess_init_fn,
            subprocess_init_args,
            checkpoint_writer_init_fn,
            checkpoint_writer_init_args,
        )
        self._writer_thread = WriterThread(
            WriterProcessSpec(setup),
            rank_info,
            start_timeout=config.subprocess_init_timeout_secs,
            end_timeout=config.subprocess_shutdown_timeout_secs,
        )
        self._lock = threading.RLock()  # saves are numbered in the order in which they are written
        self._turns = 0
        self._is_closed = False
        # Forgotten without a close, it ends when all is written.
        self._forget = weakref.finalize(self, self._writer_thread.stop)
        self._forget.atexit = False

    @property
    def process_creation_future(self) -> Future[None]:
        """Done when the process has started for the first time."""
        return self._writer_thread.created

    @property
    def process(self) -> subprocess.Popen[bytes] | None:
        """The process, if there is one now."""
        child = self._writer_thread.child
        return None if child is None else child.popen

    def write(
        self, state_dict: STATE_DICT | Future[STATE_DICT], path: str, **kwargs: Any
    ) -> WriteFuture:
        """Have a state written once it is staged; further arguments go to the writer.

        They must be values like those that a state may hold.
        """
        try:
            where, words = _absolute_path(path), _encode_kwargs(kwargs)
        except BaseException as error:
            self.refuse(path, error, **kwargs)
            raise
        return self._submit(where, state_dict, words)

    def refuse(self, path: str, error: BaseException, **kwargs: Any) -> None:
        """Tell the other ranks, which may be about to save, that this one cannot.

        Whatever the arguments are, this counts as a save. Else the numbers of the saves that follow
        would not be the same on all ranks, and states of different steps would be put together.
        """
        is_wanted = self._rank_info.global_world_size > 1 and self._writer_thread.pid == os.getpid()
        if self._is_closed or not is_wanted:
            return
        try:
            where = _absolute_path(path)
        except Exception:  # noqa: BLE001 - then there is no place to tell them
            with self._lock:
                self._turns += 1
            return
        usable = {key: value for key, value in kwargs.items() if _is_encodable(value)}
        self._submit(where, error, _encode_kwargs(usable))

    def _submit(
        self,
        path: str,
        state: STATE_DICT | Future[STATE_DICT] | BaseException,
        kwargs: BranchLayout,
    ) -> WriteFuture:
        check_not_forked(self._writer_thread.pid)
        future = WriteFuture(path)
        with self._lock:
            if self._is_closed:
                raise InvalidState("the checkpoint process was closed")
            self._turns += 1
            self._writer_thread.submit(WriteJob(self._turns, path, state, kwargs, future))
        return future

    def progress(self) -> SaveProgress | None:
        """Tell how far the save is that is under way, if one is."""
        return self._writer_thread.progress()

    def close(self) -> None:
        """Wait for the writes under way as long as the configuration says, and end the process.

        In a fork of the process in which this was made, there is nothing to end.
        """
        with self._lock:
            self._is_closed = True
        self._forget.detach()
        if self._writer_thread.pid == os.getpid():
            self._writer_thread.close()


def _refuse_reimport() -> None:
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise InvalidState(
            "a process that was started by this script is importing it, for a function or a class "
            "that is in it. What the script does must be kept from being done there again: "
            'put it under if __name__ == "__main__":, or that function into a module of its own'
        )


def _absolute_path(path: str | os.PathLike[str]) -> str:
    """Return a path that means the same in another process, wherever that works."""
    path = os.fspath(path)
    if not isinstance(path, str):
        raise InvalidType(f"a path is a str or a pathlib.Path, and {path!r} is neither")
    return path if "://" in path else os.path.join(os.getcwd(), path)


def _is_encodable(value: Any) -> bool:
    try:
        _encode_kwargs({"": value})
    except Exception:  # noqa: BLE001 - whatever it is
        return False
    return True


def _encode_kwargs(kwargs: dict[str, Any]) -> BranchLayout:
    tree = parse_state(kwargs)
    for leaf in leaves(tree):
        raise InvalidArgument(
            f"{leaf.name} is a tensor: arguments for the writer are plain values; "
            "what is to be saved belongs in the state"
        )
    note = layout_of_tree(tree, lambda _: 0)
    assert isinstance(note, BranchLayout)
    return note
