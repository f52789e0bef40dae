"""`CheckpointProcess`: the rank's side of the process that writes its checkpoints.

A `WriterThread` starts the process, restarts it if it dies, sends it one staged state after the
other and completes the future of each, whatever happens. The kernel kills the process with the
thread that started it (PR_SET_PDEATHSIG), so that thread must outlive it.

The process runs `_writer_main`; state travels through shared memory (`_staging`).
"""

from __future__ import annotations

import atexit
import json
import logging
import mmap
import multiprocessing
import multiprocessing.connection
import multiprocessing.spawn
import os
import pickle
import queue
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from typing import Any

import msgspec

from .._signals import signal_name
from ..errors import (
    InvalidArgument,
    InvalidState,
    InvalidType,
    PhalanxError,
    SaveFailed,
    SaveTimeout,
    WriterLost,
)
from ._progress import Phase, ProgressMeter, SaveProgress, WriteFuture
from ._staging import CheckpointStagerConfig, DefaultStager, StagedState
from ._state_tree import Node, leaves, parse_state
from ._storage import is_remote, job_name, strip_file_scheme
from ._types import STATE_DICT, RankInfo, check_not_forked, error_class
from ._writer import CheckpointWriter
from ._writer_main import Reply, WriteRequest, escape_surrogates

logger = logging.getLogger(__name__)

# Before torch is imported, which takes seconds: die with the rank, and ignore signals that are sent
# to the whole job, since the rank may want to save once more.
_COMMAND = """
import ctypes, json, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
if os.getppid() != int(sys.argv[1]):
    sys.exit()
signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
sys.path[:] = json.loads(sys.argv[2])
from phalanx.checkpoint._writer_main import main
main(int(sys.argv[3]))
"""


@dataclass
class CheckpointProcessConfig:
    """Timeouts of the writer process, and how many saves may wait for it."""

    subprocess_init_timeout_secs: int = 30
    """How long the process may take to start; `save` does not wait for it, its future does."""
    subprocess_shutdown_timeout_secs: int = 60
    """How long `close` waits for pending writes; those that are not done then fail."""
    max_pending_writes: int = 2
    """How many saves may be pending; one more waits for the oldest. Each needs a buffer."""
    pending_timeout_secs: float = 1800
    """How long a save waits for an older one before it fails."""
    subprocess_kill_grace_secs: float = 5.0
    """How long to wait for a process that closed its socket or was killed."""


class RemoteTraceback(Exception):
    """The traceback of an error in the writer process, as text."""


class WriterProcess:
    """A writer process. The thread that starts it must outlive it."""

    def __init__(self, config: CheckpointProcessConfig) -> None:
        self._config = config
        self._sent_buffers: set[int] = set()
        self._control, theirs = multiprocessing.Pipe()
        with theirs:
            path = json.dumps([*map(str, sys.path)])
            arguments = [str(os.getpid()), path, str(theirs.fileno())]
            self.popen = subprocess.Popen(
                [sys.executable, "-c", _COMMAND, *arguments],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )
        # Other children may inherit the socket, so its end does not show that the process ended.
        self._pidfd = os.pidfd_open(self.popen.pid)

    def write(self, request: WriteRequest, buffer_fd: int | None = None) -> Reply:
        """Write the state in a buffer; send the buffer's descriptor the first time."""
        request.brings_buffer = buffer_fd is not None and request.buffer not in self._sent_buffers
        self._sent_buffers.add(request.buffer)
        return self.call(pickle.dumps(request), buffer_fd if request.brings_buffer else None)

    def call(
        self, message: bytes, fd: int | None, *, timeout: float | None = None, prefix: str = ""
    ) -> Reply:
        received = b""
        try:
            self._control.send_bytes(message)
            if fd is not None:
                _send_descriptor(self._control, fd)
            ready = multiprocessing.connection.wait([self._control, self._pidfd], timeout)
            if self._control in ready:
                received = self._control.recv_bytes()
        except (EOFError, ConnectionError):
            raise self._reap_and_describe() from None
        except OSError as error:
            self.popen.kill()  # it may wait for the rest of a message
            self.popen.wait()
            raise SaveFailed(f"{prefix}cannot reach the writer process: {error}") from error
        if not ready:
            raise SaveTimeout(f"the writer process was not ready within {timeout} s")
        if not received:
            raise self._reap_and_describe()
        reply = msgspec.json.decode(received, type=Reply)
        if reply.error:
            cause = RemoteTraceback(f'\n"""\n{reply.traceback}"""')
            raise error_class(reply.error, PhalanxError)(f"{prefix}{reply.message}") from cause
        return reply

    def _reap_and_describe(self) -> WriterLost:
        try:
            status = self.popen.wait(self._config.subprocess_kill_grace_secs)
        except subprocess.TimeoutExpired:
            self.popen.kill()
            status = self.popen.wait()
        killed = f"was killed by {signal_name(-status)}" if status < 0 else ""
        how = killed or f"exited with code {status}"
        return WriterLost(f"the writer process {self.popen.pid} {how}")

    def end(self) -> None:
        """Ask it to exit, and kill it if that takes too long."""
        with suppress(OSError, subprocess.TimeoutExpired):
            self._control.send_bytes(pickle.dumps(None))
            self.popen.wait(self._config.subprocess_shutdown_timeout_secs)
        self.kill()

    def kill(self) -> None:
        self.popen.kill()
        self.popen.wait()
        self._control.close()
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1


def _send_descriptor(control: Connection, fd: int) -> None:
    # Like multiprocessing's send_handle, which needs a free descriptor itself.
    sock = socket.socket(fileno=control.fileno())
    try:
        sock.settimeout(None)  # creating it has set the default timeout
        socket.send_fds(sock, [b"\1"], [fd])
    finally:
        sock.detach()


@dataclass
class WriteJob:
    request: WriteRequest
    state: STATE_DICT | Future[STATE_DICT] | BaseException  # the state, or why there is none
    future: WriteFuture
    phase: Phase | None = Phase.STAGING  # what the save is doing; None while the process reports it


class WriterThread:
    """The thread that writes states through a process, and its queue of jobs.

    `setup` has what the process calls first: a function and its arguments, and a function that
    makes the writer and its keyword arguments.
    """

    def __init__(
        self, setup: tuple[Any, ...], rank_info: RankInfo, config: CheckpointProcessConfig
    ) -> None:
        try:
            pickled = bytes(ForkingPickler.dumps(setup))
        except Exception as error:
            raise InvalidArgument(
                "the functions and arguments for the writer process must be picklable, such "
                f"as functions of a module: {error}"
            ) from error
        main_module = None
        if b"__main__" in pickled:  # else scripts need no ``if __name__ == "__main__"``
            main_module = multiprocessing.spawn.get_preparation_data("phalanx-checkpoint-writer")
            main_module.pop("authkey")
        self._setup = pickle.dumps((job_name(), main_module, pickled))
        self._rank_info = rank_info
        self._config = config
        self._jobs: queue.SimpleQueue[WriteJob | None] = queue.SimpleQueue()
        self._unfinished: deque[WriteJob] = deque()
        self._given_up = ""
        self._stager: DefaultStager | None = None
        self.process: WriterProcess | None = None
        self.created: Future[None] = Future()  # done when the first process has started
        self.created.set_running_or_notify_cancel()  # it cannot be cancelled
        self.pid = os.getpid()
        self._meter_fd = os.memfd_create("phalanx-progress", os.MFD_CLOEXEC)
        os.ftruncate(self._meter_fd, ProgressMeter.SIZE)
        self.meter = ProgressMeter(mmap.mmap(self._meter_fd, ProgressMeter.SIZE))
        # Not Thread.join: once a join was interrupted, the next one returns immediately.
        self._ended = threading.Event()
        threading.Thread(target=self._run, name="phalanx-checkpoint-writer", daemon=True).start()
        # A pending write outlives the `CheckpointProcess` that submitted it.
        atexit.register(self.close)

    def submit(self, job: WriteJob) -> None:
        self._unfinished.append(job)
        self._jobs.put(job)

    def progress(self) -> SaveProgress | None:
        try:
            job = self._unfinished[0]
        except IndexError:
            return None
        path, began = job.request.path, job.future.began
        if job.phase is not None:
            return SaveProgress(path, job.phase, 0, 0, time.perf_counter() - began, 0.0)
        return self.meter.progress(path, began)

    def _run(self) -> None:
        try:
            try:
                self._live_process()
                self.created.set_result(None)
            except BaseException as error:  # noqa: BLE001 - the first save starts it again
                self.created.set_exception(error)
            while (job := self._jobs.get()) is not None:
                self._do(job)
                del job  # may hold a large state
            if self.process is not None:
                self.process.end()
        finally:
            os.close(self._meter_fd)
            atexit.unregister(self.close)
            self._ended.set()

    def _do(self, job: WriteJob) -> None:
        try:
            costs = self._write(job)
        except BaseException as error:  # noqa: BLE001 - the future raises it
            self._unfinished.popleft()
            self._fail(job, error)
        else:
            self._unfinished.popleft()
            with suppress(InvalidStateError):  # `close` has given it up
                job.future.succeed(**costs)

    def _fail(self, job: WriteJob, error: BaseException) -> None:
        if job.future.done():
            return  # `close` has given it up
        if self._given_up:
            error = SaveTimeout(f"the save to {job.request.path} was abandoned: {self._given_up}")
        # Also in the log: the user may never look at the future.
        path, rank = escape_surrogates(job.request.path), self._rank_info.global_rank
        logger.error("rank %d, save to %s: %s", rank, path, escape_surrogates(str(error)))
        with suppress(InvalidStateError):  # just now
            job.future.set_exception(error)

    def _write(self, job: WriteJob) -> dict[str, Any]:
        """Stage and write a state; return what `WriteFuture.succeed` takes."""
        request = job.request
        try:
            staged = self._stage(job)
        except BaseException as error:
            # Notify the other ranks, so that they do not wait for this one.
            if self._rank_info.global_world_size > 1:
                request.reason = escape_surrogates(f"{type(error).__name__}: {error}")
                with suppress(Exception):  # the reply is always an error; this raises the cause
                    self._live_process().write(request)
            raise
        try:
            job.phase = Phase.STARTING
            process, buffer = self._live_process(), staged.buffer
            request.buffer, request.size = buffer.number, buffer.capacity
            request.state, request.places = staged.tree, staged.places
            self.meter.restart()
            job.phase = None
            done = process.write(request, buffer.fd)
        finally:
            staged.release()
        return {
            "bytes_staged": staged.size,
            "staging_seconds": staged.seconds,
            "bytes_written": done.written,
            "phases": done.phases,
        }

    def _stage(self, job: WriteJob) -> StagedState:
        state, job.state = job.state, {}  # which may be large: do not hold it any longer
        if isinstance(state, BaseException):
            raise state
        if isinstance(state, Future):
            state = state.result()
        if isinstance(state, StagedState):
            if not state.release.alive:
                raise InvalidState("this staged state was already written, and its memory reused")
            return state
        # A copy by the user's own stager, in private memory.
        if self._stager is None:
            config = CheckpointStagerConfig(use_async_staging=False)
            self._stager = DefaultStager(config, rank_info=self._rank_info)
        staged = self._stager.stage(state)
        assert isinstance(staged, StagedState)
        return staged

    def _live_process(self) -> WriterProcess:
        process = self.process
        if process is not None and process.popen.poll() is not None:
            process.kill()
            process = self.process = None
        if process is None and not self._given_up:
            try:
                self.process = process = WriterProcess(self._config)
            except OSError as error:
                raise SaveFailed(f"the writer process could not start: {error}") from error
            try:
                timeout = self._config.subprocess_init_timeout_secs
                prefix = "the writer process could not start: "
                process.call(self._setup, self._meter_fd, timeout=timeout, prefix=prefix)
            except BaseException:
                self.process = None
                process.kill()
                raise
        # After the start: `close` sets `_given_up`, then kills the process that it finds.
        if self._given_up or process is None:
            raise SaveTimeout(self._given_up)
        return process

    def stop(self) -> None:
        """End when all submitted jobs are done."""
        self._jobs.put(None)

    def close(self) -> None:
        """Wait for the submitted jobs until the timeout; then fail those that are not done."""
        if self.pid != os.getpid():
            return  # a fork lacks the thread
        if not self.created.done() and not self._unfinished:
            self._kill_process()  # it is still starting, and not needed
        self.stop()
        timeout = self._config.subprocess_shutdown_timeout_secs
        if not self._given_up:
            self._ended.wait(timeout)
        if not self._ended.is_set():
            self._given_up = f"still pending {timeout} s after close()"
            self._kill_process()
            self._ended.wait(self._config.subprocess_kill_grace_secs)
            for job in list(self._unfinished):  # such as one whose stager never finishes
                self._fail(job, SaveTimeout())

    def _kill_process(self) -> None:
        process = self.process
        if process is not None:
            process.popen.kill()


class CheckpointProcess:
    """Write states in another process.

    The process is started in the background. It survives failed writes and dies with the calling
    process. If it dies first, the pending write fails immediately, and the next one starts a new
    process.
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
        if getattr(multiprocessing.current_process(), "_inheriting", False):
            raise InvalidState(
                "this script is being imported by its own writer process, which needs a "
                "function or class of it. Put what the script does under "
                'if __name__ == "__main__":, or that function into another module'
            )
        self.config = config
        self._rank_info = rank_info
        writer_args = {"rank_info": rank_info, **checkpoint_writer_init_args}
        setup = (subprocess_init_fn, subprocess_init_args, checkpoint_writer_init_fn, writer_args)
        self._writer_thread = WriterThread(setup, rank_info, config)
        self.process_creation_future = self._writer_thread.created
        """Done when the process has started for the first time."""
        self._lock = threading.RLock()  # saves are submitted in the order of their numbers
        self._save_number = 0
        self._is_closed = False
        # If it is garbage collected instead of closed, the thread ends after the last write.
        self._finalizer = weakref.finalize(self, self._writer_thread.stop)
        self._finalizer.atexit = False

    @property
    def process(self) -> subprocess.Popen[bytes] | None:
        """The current process, if there is one."""
        process = self._writer_thread.process
        return None if process is None else process.popen

    def write(
        self, state_dict: STATE_DICT | Future[STATE_DICT], path: str, **kwargs: Any
    ) -> WriteFuture:
        """Write a state once it is staged; further arguments go to the writer.

        They must be values that a state may hold, but no tensors.
        """
        try:
            where, parsed = _absolute_path(path), _parse_kwargs(kwargs)
        except BaseException as error:
            self.fail_save(path, error, **kwargs)
            raise
        return self._submit(where, state_dict, parsed)

    def fail_save(self, path: str, error: BaseException, **kwargs: Any) -> None:
        """Notify the other ranks, which may be about to save, that this one cannot.

        This counts as a save, whatever the arguments are. Otherwise later saves would have
        different numbers on different ranks, and states of different steps would be combined.
        """
        has_peers = self._rank_info.global_world_size > 1
        if self._is_closed or not has_peers or self._writer_thread.pid != os.getpid():
            return
        try:
            where = _absolute_path(path)
        except Exception:  # noqa: BLE001 - without a path there is no way to notify them
            with self._lock:
                self._save_number += 1
            return
        usable = {}
        for key, value in kwargs.items():
            with suppress(Exception):  # the error may be about this argument
                _parse_kwargs({key: value})
                usable[key] = value
        self._submit(where, error, _parse_kwargs(usable))

    def _submit(
        self, path: str, state: STATE_DICT | Future[STATE_DICT] | BaseException, kwargs: Node
    ) -> WriteFuture:
        check_not_forked(self._writer_thread.pid, "checkpointer")
        future = WriteFuture(path)
        with self._lock:
            if self._is_closed:
                raise InvalidState("the writer process was closed")
            self._save_number += 1
            request = WriteRequest(self._save_number, path, kwargs)
            self._writer_thread.submit(WriteJob(request, state, future))
        return future

    def progress(self) -> SaveProgress | None:
        """Return the progress of the current save, if there is one."""
        return self._writer_thread.progress()

    def close(self) -> None:
        """Wait for pending writes until the configured timeout, and end the process.

        Does nothing in a fork of the process that created this.
        """
        with self._lock:
            self._is_closed = True
        self._finalizer.detach()
        self._writer_thread.close()


def _absolute_path(path: str | os.PathLike[str]) -> str:
    path = os.fspath(path)
    if not isinstance(path, str):
        raise InvalidType(f"path must be a str or pathlib.Path, got {path!r}")
    return path if is_remote(path) else os.path.join(os.getcwd(), strip_file_scheme(path))


def _parse_kwargs(kwargs: dict[str, Any]) -> Node:
    tree = parse_state(kwargs)
    if (tensor := next(leaves(tree), None)) is not None:
        raise InvalidArgument(
            f"{tensor.name} is a tensor. Arguments for the writer must be plain values; tensors "
            "belong in the state"
        )
    return tree
