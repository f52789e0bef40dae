"""Start the writer process, and talk to it."""

from __future__ import annotations

import json
import mmap
import multiprocessing.spawn
import os
import pickle
import select
import socket
import subprocess
import sys
from collections.abc import Sequence
from multiprocessing.reduction import ForkingPickler
from typing import Any

import msgspec

from .. import errors
from .._signals import signal_name
from ..errors import CheckpointError, InvalidArgument, SaveFailed, SaveTimeout, WriterLost
from ._checkpoint_process_child import Setup
from ._checkpoint_process_link import Done, Exit, Failed, Link, Ready, Refuse, Reply, Request, Write
from ._notes import job_name
from ._progress import Meter

__all__ = ["Child", "Recipe", "RemoteTraceback"]

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
from phalanx.checkpoint._checkpoint_process_child import main
main(int(sys.argv[3]))
"""
_LAST_WORDS = 5.0  # seconds from the end of the socket to that of the process


class RemoteTraceback(Exception):
    """Where in the writer process an error was raised, as text."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return f'\n"""\n{self.text}"""'


class Recipe:
    """All that is needed to start a writer process, once and again."""

    def __init__(self, setup: Setup) -> None:
        try:
            made = bytes(ForkingPickler.dumps(setup))
        except Exception as error:
            raise InvalidArgument(
                f"the functions and arguments for the checkpoint process must be such as can be "
                f"pickled, functions of a module for example: {error}"
            ) from error
        self.message = pickle.dumps((job_name(), _main_module(made), made))
        self._meter_fd = os.memfd_create("phalanx-progress", os.MFD_CLOEXEC)
        os.ftruncate(self._meter_fd, Meter.SIZE)
        self.meter = Meter(mmap.mmap(self._meter_fd, Meter.SIZE))

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


class Child:
    """A writer process. The thread that starts it must outlive it, for it dies with its parent."""

    def __init__(self, recipe: Recipe) -> None:
        ours, theirs = socket.socketpair()
        self._link = Link(ours)
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
        if isinstance(reply, Failed):
            raise _translate(reply, "the checkpoint process could not start: ")
        assert isinstance(reply, Ready)

    def write(self, request: Write, buffer: int) -> Done:
        """Have it write what is in a buffer, whose descriptor it may have already."""
        is_new = request.buffer not in self._buffers
        self._send(request, [buffer] if is_new else [])
        self._buffers.add(request.buffer)
        return self._answer()

    def refuse(self, request: Refuse) -> Done:
        """Have it tell the other ranks that there is nothing to write."""
        self._send(request)
        return self._answer()

    def _send(self, request: Request, fds: Sequence[int] = ()) -> None:
        message = msgspec.json.encode(request)
        try:
            self._link.send(message, fds)
        except ConnectionError:
            raise self._lost() from None

    def _answer(self) -> Done:
        """Wait until it is done, and raise what went wrong."""
        self._is_heard_within(None)
        reply = self._receive()
        if isinstance(reply, Failed):
            raise _translate(reply)
        assert isinstance(reply, Done)
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
            status = self.popen.wait(_LAST_WORDS)
        except subprocess.TimeoutExpired:
            self.popen.kill()
            status = self.popen.wait()
        how = f"was killed by {signal_name(-status)}" if status < 0 else f"ended with {status}"
        return WriterLost(f"the checkpoint process {self.popen.pid} {how}")

    def end(self, timeout: float) -> None:
        """End it, by force if it takes too long."""
        try:
            self._link.send(msgspec.json.encode(Exit()))
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


def _translate(reply: Failed, prefix: str = "") -> CheckpointError:
    """Raise here what was raised there."""
    kind = getattr(errors, reply.kind, SaveFailed)
    if not (isinstance(kind, type) and issubclass(kind, CheckpointError)):
        kind = SaveFailed
    error: CheckpointError = kind(f"{prefix}{reply.message}")
    error.__cause__ = RemoteTraceback(reply.traceback)
    return error
