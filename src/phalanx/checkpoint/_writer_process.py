"""The program of the writer process, and the messages that it exchanges with its rank.

Messages are JSON over a socket pair. Tensors are never sent: they are in shared memory, whose
descriptor is sent once. A write that fails is reported, and the process serves the next request.
It exits on request and with its rank: the kernel kills it, or else the socket closes.

The set-up message is pickled, since it contains the user's functions. It comes from the parent
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
from ._coordination import adopt_job_name
from ._progress import ProgressMeter
from ._staging_buffer import BranchLayout, Layout, map_shared, state_from_tree, tree_from_layout
from ._types import RankInfo
from ._writer import CheckpointWriter

_LENGTH = struct.Struct("<Q")
_MAX_FDS = 1


class WriteRequest(msgspec.Struct, tag="write"):
    """Write the state in a buffer."""

    save_number: int
    """Not counted by the process, which may be a restarted one."""
    path: bytes
    """File system encoding: not every path is valid Unicode."""
    buffer: int
    """The number of the buffer; its descriptor comes with its first request."""
    size: int
    """Length of the buffer in bytes."""
    state: Layout
    kwargs: BranchLayout


class RefuseRequest(msgspec.Struct, tag="refuse"):
    """Notify the other ranks that this one has nothing to write."""

    save_number: int
    path: bytes
    reason: str
    kwargs: BranchLayout


class ExitRequest(msgspec.Struct, tag="exit"):
    """Exit."""


class ReadyReply(msgspec.Struct, tag="ready"):
    """The process has started."""


class DoneReply(msgspec.Struct, tag="done"):
    """The checkpoint is committed."""

    written: int
    phases: dict[str, float]


class FailedReply(msgspec.Struct, tag="failed"):
    """The write, or the start of the process, failed."""

    kind: str
    message: str
    traceback: str


Request: TypeAlias = WriteRequest | RefuseRequest | ExitRequest
Reply: TypeAlias = ReadyReply | DoneReply | FailedReply


def printable(text: str) -> str:
    """Escape surrogates, as in paths that are not valid Unicode, so that a text can be sent."""
    return text.encode(errors="backslashreplace").decode()


class ControlSocket:
    """One end of the socket pair; carries messages and descriptors."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end

    def fileno(self) -> int:
        """Return the descriptor to poll for a message or the end of the peer."""
        return self._socket.fileno()

    def send(self, message: bytes, fds: Sequence[int] = ()) -> None:
        """Send a message, and descriptors with it."""
        header = _LENGTH.pack(len(message))
        sent = socket.send_fds(self._socket, [header], fds)
        self._socket.sendall(header[sent:] + message)

    def receive(self) -> tuple[bytes, list[int]]:
        """Wait for a message and its descriptors; raise `EOFError` if the peer is gone."""
        try:
            begun, fds, _, _ = socket.recv_fds(self._socket, _LENGTH.size, _MAX_FDS)
            if not begun:
                raise EOFError
            (length,) = _LENGTH.unpack(begun + self._read(_LENGTH.size - len(begun)))
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
        """Close this end."""
        self._socket.close()


@dataclass
class WriterSetup:
    """The functions with which the user configures the process, and their arguments."""

    rank_info: RankInfo
    init: Callable[..., None]
    init_args: tuple[Any, ...]
    writer_init: Callable[..., CheckpointWriter]
    writer_init_args: dict[str, Any]

    def make_writer(self) -> CheckpointWriter:
        """Call the user's functions."""
        self.init(*self.init_args)
        return self.writer_init(**{"rank_info": self.rank_info, **self.writer_init_args})


def main(control_fd: int) -> None:
    """Serve the rank at the other end of a socket."""
    torch.set_num_threads(1)  # leave the cores to training
    control = ControlSocket(socket.socket(fileno=control_fd))
    try:
        writer, meter = _set_up(control)
    except BaseException as error:  # noqa: BLE001 - the rank raises it
        _send(control, _failure(error))
    else:
        _send(control, ReadyReply())
        _Server(control, writer, meter).serve()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # unloading torch takes a while


def _set_up(control: ControlSocket) -> tuple[CheckpointWriter, ProgressMeter]:
    message, (meter_fd,) = control.receive()
    job, main_module, pickled = pickle.loads(message)  # noqa: S301 - from the rank, our parent
    adopt_job_name(job)
    if main_module is not None:
        _import_script(main_module)
    setup: WriterSetup = pickle.loads(pickled)  # noqa: S301
    return setup.make_writer(), ProgressMeter(mmap.mmap(meter_fd, ProgressMeter.SIZE))


def _import_script(preparation: dict[str, Any]) -> None:
    """Import the script of the rank, which must not start processes meanwhile."""
    current: Any = multiprocessing.current_process()
    current._inheriting = True  # the mark by which multiprocessing refuses to start processes
    try:
        multiprocessing.spawn.prepare(preparation)
    finally:
        del current._inheriting


def _send(control: ControlSocket, reply: Reply) -> None:
    control.send(msgspec.json.encode(reply))


def _failure(error: BaseException) -> FailedReply:
    is_ours = isinstance(error, CheckpointError)
    message = str(error) if is_ours else f"{type(error).__name__}: {error}"
    text = "".join(traceback.format_exception(error))
    kind = type(error).__name__ if is_ours else "SaveFailed"
    return FailedReply(kind, printable(message), printable(text))


class _Server:
    """Serves the requests of the rank, one at a time."""

    def __init__(
        self, control: ControlSocket, writer: CheckpointWriter, meter: ProgressMeter
    ) -> None:
        self._control = control
        self._writer = writer
        self._meter = meter
        self._fds: dict[int, int] = {}
        self._buffers: dict[int, Tensor] = {}
        self._requests: queue.SimpleQueue[tuple[Request, list[int]]] = queue.SimpleQueue()

    def serve(self) -> None:
        threading.Thread(target=self._listen, daemon=True).start()
        while True:
            request, fds = self._requests.get()
            if isinstance(request, ExitRequest):
                break
            _send(self._control, self._handle(request, fds))
        self._writer.close()

    def _listen(self) -> None:
        """Queue requests, and exit with the rank even in the middle of a write."""
        try:
            while True:
                message, fds = self._control.receive()
                self._requests.put((msgspec.json.decode(message, type=Request), fds))
        except EOFError:
            os._exit(1)

    def _handle(self, request: WriteRequest | RefuseRequest, fds: list[int]) -> Reply:
        try:
            self._meter.restart()
            if isinstance(request, RefuseRequest):
                self._refuse(request)
            else:
                self._write(request, fds)
            return DoneReply(self._meter.written, self._meter.seconds())
        except BaseException as error:  # noqa: BLE001 - the process survives whatever it is
            return _failure(error)

    def _write(self, request: WriteRequest, fds: list[int]) -> None:
        state = state_from_tree(tree_from_layout(request.state, self._map_buffer(request, fds)))
        pending = self._writer.write(
            os.fsdecode(request.path), state, **self._write_arguments(request)
        )
        if pending is not None:
            pending.result()

    def _refuse(self, request: RefuseRequest) -> None:
        """Take part in the save with nothing but the reason, so that no rank waits in vain."""
        if isinstance(self._writer, CheckpointWriter):
            state = {"state": _MissingState(request.reason)}
            self._writer.write(os.fsdecode(request.path), state, **self._write_arguments(request))
        raise SaveFailed(request.reason)

    def _map_buffer(self, request: WriteRequest, fds: list[int]) -> Tensor:
        number = request.buffer
        if fds:
            (self._fds[number],) = fds
        known = self._buffers.get(number)
        if known is None or len(known) != request.size:
            self._buffers[number] = known = map_shared(self._fds[number], request.size)
        return known

    def _write_arguments(self, request: WriteRequest | RefuseRequest) -> dict[str, Any]:
        kwargs: dict[str, Any] = state_from_tree(tree_from_layout(request.kwargs, torch.empty(0)))
        if isinstance(self._writer, CheckpointWriter):
            kwargs |= {"save_number": request.save_number, "progress_meter": self._meter}
        return kwargs


class _MissingState:
    def __init__(self, reason: str) -> None:
        self._reason = reason

    def state_dict(self) -> Any:
        raise SaveFailed(self._reason)
