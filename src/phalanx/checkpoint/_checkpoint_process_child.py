"""What runs in the writer process: it writes what the rank has staged, one state after the other.

A write that fails is told, and the next one is awaited. The process ends when it is told to, and
with its rank: the kernel kills it (the command that starts it asks for that), and should that not
be, the socket ends.
"""

from __future__ import annotations

import mmap
import multiprocessing.spawn
import os
import pickle
import queue
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from torch import Tensor

from ..errors import CheckpointError, SaveFailed
from ._checkpoint_process_link import (
    Done,
    Exit,
    Failed,
    Link,
    Ready,
    Refuse,
    Reply,
    Request,
    Write,
    printable,
)
from ._checkpoint_writer import CheckpointWriter
from ._meeting import turn
from ._notes import belong_to
from ._progress import Meter, listening
from ._staging_layout import read, state_of
from ._staging_memory import map_shared
from ._types import RankInfo

__all__ = ["Setup", "main"]


@dataclass
class Setup:
    """What the user wants the process to be; pickled, as these are the user's own functions."""

    rank_info: RankInfo
    init: Callable[..., None]
    init_args: tuple[Any, ...]
    writer_init: Callable[..., CheckpointWriter]
    writer_init_args: dict[str, Any]

    def make_writer(self) -> CheckpointWriter:
        """Call the user's functions."""
        self.init(*self.init_args)
        return self.writer_init(**{"rank_info": self.rank_info, **self.writer_init_args})


def main(control: int) -> None:
    """Serve the rank at the other end of `control`."""
    torch.set_num_threads(1)  # whatever runs in parallel here runs beside the training
    link = Link(socket.socket(fileno=control))
    try:
        writer, meter = _set_up(link)
    except BaseException as error:  # noqa: BLE001 - it is the rank that must hear of it
        _send(link, _failure(error))
    else:
        _send(link, Ready())
        _Server(link, writer, meter).serve()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # nothing is left to do, and to unload torch takes a while


def _set_up(link: Link) -> tuple[CheckpointWriter, Meter]:
    message, (meter_fd,) = link.receive()
    job, main_module, setup = pickle.loads(message)  # noqa: S301 - from the rank, our parent
    belong_to(job)
    if main_module is not None:
        _import_script(main_module)
    made: Setup = pickle.loads(setup)  # noqa: S301
    return made.make_writer(), Meter(mmap.mmap(meter_fd, Meter.SIZE))


def _import_script(told: dict[str, Any]) -> None:
    """Import the script of the rank, which must not start processes meanwhile."""
    me: Any = multiprocessing.current_process()
    me._inheriting = True  # as multiprocessing itself does, and asks where it starts a process
    try:
        multiprocessing.spawn.prepare(told)
    finally:
        del me._inheriting


def _send(link: Link, reply: Reply) -> None:
    link.send(msgspec.json.encode(reply))


def _failure(error: BaseException) -> Failed:
    ours = isinstance(error, CheckpointError)
    message = str(error) if ours else f"{type(error).__name__}: {error}"
    text = "".join(traceback.format_exception(error))
    kind = type(error).__name__ if ours else "SaveFailed"
    return Failed(kind, printable(message), printable(text))


class _Server:
    def __init__(self, link: Link, writer: CheckpointWriter, meter: Meter) -> None:
        self._link = link
        self._writer = writer
        self._meter = meter
        self._fds: dict[int, int] = {}
        self._buffers: dict[int, Tensor] = {}
        self._requests: queue.SimpleQueue[tuple[Request, list[int]]] = queue.SimpleQueue()

    def serve(self) -> None:
        """Do what is asked for until the end is."""
        threading.Thread(target=self._listen, daemon=True).start()
        while True:
            request, fds = self._requests.get()
            if isinstance(request, Exit):
                break
            _send(self._link, self._obey(request, fds))
        self._writer.close()

    def _listen(self) -> None:
        """Hear of the rank's end even in the middle of a write."""
        try:
            while True:
                message, fds = self._link.receive()
                self._requests.put((msgspec.json.decode(message, type=Request), fds))
        except EOFError:
            os._exit(1)

    def _obey(self, request: Write | Refuse, fds: list[int]) -> Reply:
        try:
            with listening(self._meter), turn(request.turn):
                if isinstance(request, Refuse):
                    self._refuse(request)
                else:
                    self._write(request, fds)
            return Done(self._meter.written, self._meter.seconds())
        except BaseException as error:  # noqa: BLE001 - the process survives whatever it is
            return _failure(error)

    def _write(self, request: Write, fds: list[int]) -> None:
        state = state_of(read(request.state, self._buffer(request, fds)))
        pending = self._writer.write(os.fsdecode(request.path), state, **_kwargs(request))
        if pending is not None:
            pending.result()

    def _buffer(self, request: Write, fds: list[int]) -> Tensor:
        number = request.buffer
        if fds:
            (self._fds[number],) = fds
        known = self._buffers.get(number)
        if known is None or len(known) != request.size:
            self._buffers[number] = known = map_shared(self._fds[number], request.size)
        return known

    def _refuse(self, request: Refuse) -> None:
        """Come to the meeting with nothing but the reason, so that nobody waits in vain."""
        if isinstance(self._writer, CheckpointWriter):
            state = {"state": _Unstaged(request.why)}
            self._writer.write(os.fsdecode(request.path), state, **_kwargs(request))
        raise SaveFailed(request.why)


def _kwargs(request: Write | Refuse) -> dict[str, Any]:
    kwargs: dict[str, Any] = state_of(read(request.kwargs, torch.empty(0)))
    return kwargs


class _Unstaged:
    """A state that there is not."""

    def __init__(self, why: str) -> None:
        self._why = why

    def state_dict(self) -> Any:
        raise SaveFailed(self._why)
