"""What runs in the writer process, and the messages it exchanges with its rank.

Messages are JSON over a socket pair. Tensors are never sent: they lie in shared memory, whose
descriptor is sent once. A write that fails is reported, and the next request is awaited. The
process exits on request and with its rank: the kernel kills it, and if not, the socket closes.

The set-up message is pickled, since it holds the user's own functions. It comes from the parent
over an inherited socket, and is the only thing that checkpointing unpickles.
"""

from __future__ import annotations

import mmap
import multiprocessing.spawn
import os
import pickle
import queue
import socket
import struct
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgspec
import torch
from torch import Tensor

from ..errors import CheckpointError, SaveFailed
from ._coordination import adopt_job_name, numbered_save
from ._progress import ProgressMeter, metered
from ._staging_buffer import BranchLayout, Layout, map_shared, state_from_tree, tree_from_layout
from ._types import RankInfo
from ._writer import CheckpointWriter

_LENGTH = struct.Struct("<Q")
_MAX_FDS = 1


class WriteRequest(msgspec.Struct, tag="write"):
    """Write the state that is in a buffer."""

    turn: int
    """The number of the save, which a process that died may have been at before."""
    path: bytes
    """As the file system has it: not every path is valid Unicode."""
    buffer: int
    """The number of the buffer; its descriptor comes along if the process lacks it."""
    size: int
    """How long the buffer is."""
    state: Layout
    kwargs: BranchLayout


class RefuseRequest(msgspec.Struct, tag="refuse"):
    """Tell the other ranks that this one has nothing to write, and why."""

    turn: int
    path: bytes
    why: str
    kwargs: BranchLayout


class ExitRequest(msgspec.Struct, tag="exit"):
    """End the process."""


class ReadyReply(msgspec.Struct, tag="ready"):
    """The process has started."""


class DoneReply(msgspec.Struct, tag="done"):
    """The checkpoint is in place."""

    written: int
    phases: dict[str, float]


class FailedReply(msgspec.Struct, tag="failed"):
    """It is not, or the process cannot start."""

    kind: str
    message: str
    traceback: str


Request: TypeAlias = WriteRequest | RefuseRequest | ExitRequest
Reply: TypeAlias = ReadyReply | DoneReply | FailedReply


def printable(text: str) -> str:
    """Return a text that can be sent, also if it quotes a path that is not valid Unicode."""
    return text.encode(errors="backslashreplace").decode()


class ControlSocket:
    """One end of the pair."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end

    def fileno(self) -> int:
        """Name what is readable when there is a message, or the other end is gone."""
        return self._socket.fileno()

    def send(self, message: bytes, fds: Sequence[int] = ()) -> None:
        """Send a message, and descriptors with it."""
        header = _LENGTH.pack(len(message))
        sent = socket.send_fds(self._socket, [header], fds)
        self._socket.sendall(header[sent:] + message)

    def receive(self) -> tuple[bytes, list[int]]:
        """Wait for a message; raises `EOFError` if none will come."""
        try:
            begun, fds, _, _ = socket.recv_fds(self._socket, _LENGTH.size, _MAX_FDS)
            header = begun + self._read(_LENGTH.size - len(begun)) if begun else b""
            if not header:
                raise EOFError
            (length,) = _LENGTH.unpack(header)
            return self._read(length), fds
        except ConnectionError:
            raise EOFError from None

    def _read(self, length: int) -> bytes:
        data = bytearray(length)
        rest = memoryview(data)
        while rest:
            count = self._socket.recv_into(rest)
            if count == 0:
                raise EOFError
            rest = rest[count:]
        return bytes(data)

    def close(self) -> None:
        """Hang up."""
        self._socket.close()


@dataclass
class WriterSetup:
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
    link = ControlSocket(socket.socket(fileno=control))
    try:
        writer, meter = _set_up(link)
    except BaseException as error:  # noqa: BLE001 - it is the rank that must hear of it
        _send(link, _failure(error))
    else:
        _send(link, ReadyReply())
        _Server(link, writer, meter).serve()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # nothing is left to do, and to unload torch takes a while


def _set_up(link: ControlSocket) -> tuple[CheckpointWriter, ProgressMeter]:
    message, (meter_fd,) = link.receive()
    job, main_module, setup = pickle.loads(message)  # noqa: S301 - from the rank, our parent
    adopt_job_name(job)
    if main_module is not None:
        _import_script(main_module)
    made: WriterSetup = pickle.loads(setup)  # noqa: S301
    return made.make_writer(), ProgressMeter(mmap.mmap(meter_fd, ProgressMeter.SIZE))


def _import_script(told: dict[str, Any]) -> None:
    """Import the script of the rank, which must not start processes meanwhile."""
    me: Any = multiprocessing.current_process()
    me._inheriting = True  # as multiprocessing itself does, and asks where it starts a process
    try:
        multiprocessing.spawn.prepare(told)
    finally:
        del me._inheriting


def _send(link: ControlSocket, reply: Reply) -> None:
    link.send(msgspec.json.encode(reply))


def _failure(error: BaseException) -> FailedReply:
    ours = isinstance(error, CheckpointError)
    message = str(error) if ours else f"{type(error).__name__}: {error}"
    text = "".join(traceback.format_exception(error))
    kind = type(error).__name__ if ours else "SaveFailed"
    return FailedReply(kind, printable(message), printable(text))


class _Server:
    def __init__(self, link: ControlSocket, writer: CheckpointWriter, meter: ProgressMeter) -> None:
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
            if isinstance(request, ExitRequest):
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

    def _obey(self, request: WriteRequest | RefuseRequest, fds: list[int]) -> Reply:
        try:
            with metered(self._meter), numbered_save(request.turn):
                if isinstance(request, RefuseRequest):
                    self._refuse(request)
                else:
                    self._write(request, fds)
            return DoneReply(self._meter.written, self._meter.seconds())
        except BaseException as error:  # noqa: BLE001 - the process survives whatever it is
            return _failure(error)

    def _write(self, request: WriteRequest, fds: list[int]) -> None:
        state = state_from_tree(tree_from_layout(request.state, self._buffer(request, fds)))
        pending = self._writer.write(os.fsdecode(request.path), state, **_decode_kwargs(request))
        if pending is not None:
            pending.result()

    def _buffer(self, request: WriteRequest, fds: list[int]) -> Tensor:
        number = request.buffer
        if fds:
            (self._fds[number],) = fds
        known = self._buffers.get(number)
        if known is None or len(known) != request.size:
            self._buffers[number] = known = map_shared(self._fds[number], request.size)
        return known

    def _refuse(self, request: RefuseRequest) -> None:
        """Come to the meeting with nothing but the reason, so that nobody waits in vain."""
        if isinstance(self._writer, CheckpointWriter):
            state = {"state": _MissingState(request.why)}
            self._writer.write(os.fsdecode(request.path), state, **_decode_kwargs(request))
        raise SaveFailed(request.why)


def _decode_kwargs(request: WriteRequest | RefuseRequest) -> dict[str, Any]:
    kwargs: dict[str, Any] = state_from_tree(tree_from_layout(request.kwargs, torch.empty(0)))
    return kwargs


class _MissingState:
    """A state that there is not."""

    def __init__(self, why: str) -> None:
        self._why = why

    def state_dict(self) -> Any:
        raise SaveFailed(self._why)
