"""The main program of the writer process, and the messages that it exchanges with its rank.

Messages go over a socket pair. Tensors are never sent: they are in shared memory, whose descriptor
is sent once. A write that fails is reported, and the process serves the next request. It exits on
request (None) and with its rank: the kernel kills it, or else the socket closes.

Requests are pickled: the first contains the user's functions. They come from the parent over an
inherited socket, and are the only thing that checkpointing unpickles. Replies are JSON.
"""

from __future__ import annotations

import mmap
import multiprocessing.spawn
import os
import pickle
import queue
import sys
import threading
import traceback
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from typing import Any

import msgspec
import torch
from torch import Tensor

from ..errors import CheckpointError, MisuseError, SaveFailed
from ._progress import ProgressMeter
from ._staging import Place, state_from_tree, with_tensors
from ._state_tree import Node
from ._storage import adopt_job_name
from ._types import error_name
from ._writer import CheckpointWriter, SaveContext


@dataclass
class WriteRequest:
    """Write the state in a buffer; or notify the other ranks that this one has no state."""

    save_number: int  # not counted by the process, which may be a restarted one
    path: str
    kwargs: Node
    reason: str = ""  # why there is no state
    state: Node | None = None  # without tensors
    places: dict[str, Place] = field(default_factory=dict)  # of its tensors in the buffer, by name
    buffer: int = -1  # its number
    size: int = 0  # its length in bytes
    brings_buffer: bool = False  # whether its descriptor follows, as after its first request


class Reply(msgspec.Struct):
    """The process is ready, the checkpoint is committed, or an error."""

    written: int = 0
    phases: dict[str, float] = {}
    error: str = ""  # the class of an error; empty if there is none
    message: str = ""
    traceback: str = ""


def escape_surrogates(text: str) -> str:
    """Escape surrogates, as in paths that are not valid Unicode, so that a text can be sent."""
    return text.encode(errors="backslashreplace").decode()


def main(control_fd: int) -> None:
    torch.set_num_threads(1)  # leave the cores to training
    control = Connection(control_fd)
    try:
        server = _set_up(control)
    except BaseException as error:  # noqa: BLE001 - the rank raises it
        control.send_bytes(msgspec.json.encode(_failure(error)))
    else:
        control.send_bytes(msgspec.json.encode(Reply()))
        server.serve()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # unloading torch takes a while


def _set_up(control: Connection) -> _Server:
    job, main_module, pickled = pickle.loads(control.recv_bytes())  # noqa: S301 - from our parent
    meter = ProgressMeter(mmap.mmap(recv_handle(control), ProgressMeter.SIZE))
    adopt_job_name(job)
    if main_module is not None:  # the script of the rank, which must not start processes meanwhile
        current: Any = multiprocessing.current_process()
        current._inheriting = True  # the mark by which multiprocessing refuses to start processes
        try:
            multiprocessing.spawn.prepare(main_module)
        finally:
            del current._inheriting
    init, init_args, writer_init, writer_init_args = pickle.loads(pickled)  # noqa: S301
    init(*init_args)
    return _Server(control, writer_init(**writer_init_args), meter)


def _failure(error: BaseException) -> Reply:
    is_ours = isinstance(error, CheckpointError | MisuseError)
    message = str(error) if is_ours else f"{type(error).__name__}: {error}"
    text = "".join(traceback.format_exception(error))
    kind = error_name(error) if is_ours else "SaveFailed"
    return Reply(error=kind, message=escape_surrogates(message), traceback=escape_surrogates(text))


class _Server:
    def __init__(self, control: Connection, writer: CheckpointWriter, meter: ProgressMeter) -> None:
        self._control = control
        self._writer = writer
        self._meter = meter
        self._fds: dict[int, int] = {}
        self._buffers: dict[int, Tensor] = {}
        self._requests: queue.SimpleQueue[WriteRequest | None] = queue.SimpleQueue()

    def serve(self) -> None:
        threading.Thread(target=self._listen, daemon=True).start()
        while (request := self._requests.get()) is not None:
            self._control.send_bytes(msgspec.json.encode(self._handle(request)))
        self._writer.close()

    def _listen(self) -> None:
        """Queue requests, and exit with the rank even in the middle of a write."""
        try:
            while True:
                message = self._control.recv_bytes()
                request = pickle.loads(message)  # noqa: S301 - from our parent
                if request is not None and request.brings_buffer:
                    self._fds[request.buffer] = recv_handle(self._control)
                self._requests.put(request)
        except (EOFError, ConnectionError):
            pass  # the rank is gone
        except BaseException:  # noqa: BLE001 - the rank must not wait for a thread that ended
            traceback.print_exc()
            sys.stderr.flush()
        os._exit(1)

    def _handle(self, request: WriteRequest) -> Reply:
        is_ours = isinstance(self._writer, CheckpointWriter)
        try:
            self._meter.restart()
            if is_ours:
                self._writer._context = SaveContext(request.save_number, self._meter)
            kwargs = state_from_tree(request.kwargs)
            if request.state is not None:
                memory = self._buffers.get(request.buffer)
                if memory is None or len(memory) != request.size:
                    mapping = mmap.mmap(self._fds[request.buffer], request.size)
                    memory = torch.frombuffer(mapping, dtype=torch.uint8)
                    self._buffers[request.buffer] = memory
                tensors = {name: place.view_in(memory) for name, place in request.places.items()}
                state = state_from_tree(with_tensors(request.state, tensors))
            elif is_ours:  # take part in the save with the reason, so that no rank waits in vain
                state = {"state": _MissingState(request.reason)}
            else:
                raise SaveFailed(request.reason)
            pending = self._writer.write(request.path, state, **kwargs)
            if pending is not None:
                pending.result()
            return Reply(self._meter.written, self._meter.seconds())
        except BaseException as error:  # noqa: BLE001 - the process survives whatever it is
            return _failure(error)


class _MissingState:
    def __init__(self, reason: str) -> None:
        self._reason = reason

    def state_dict(self) -> Any:
        raise SaveFailed(self._reason)
