"""The server of the control socket of an elastic run; `phalanx._control_client` has the protocol.

A thread accepts connections and starts another for each, which passes the request on to the
supervisor and waits for the reply. The supervisor answers requests between other events. A request
is either carried out and answered, or refused.

The socket lies in a directory that only its owner can enter, so requests are not authenticated.
"""

from __future__ import annotations

import json
import select
import socket
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from .._control_client import REQUEST_TIMEOUT, read_line, socket_address
from ..errors import InvalidState

MAX_CLIENTS = 16  # served at the same time; others are refused
ACCEPT_RETRY_INTERVAL = 0.1  # seconds after a connection that could not be accepted


class ControlRequest(NamedTuple):
    """A request of a client, and the future of the reply."""

    fields: Mapping[str, Any]
    reply: Future[Mapping[str, Any]]


class ControlServer:
    """Accepts requests, passes them to `put` and sends the replies.

    All threads are daemons, and `close` waits for none: a client may be silent.
    """

    def __init__(self, path: Path, put: Callable[[ControlRequest], None]) -> None:
        self._put = put
        self._is_closed = False
        self._slots = threading.BoundedSemaphore(MAX_CLIENTS)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        # Renamed, so that nobody finds it before it listens.
        unfinished = path.with_name(f"{path.name}.new")
        try:
            with socket_address(unfinished) as address:
                self._listener.bind(address)
            self._listener.listen()
            unfinished.rename(path)
        except OSError as error:
            self._listener.close()
            raise InvalidState(
                f"cannot create the control socket {path}: {error}. Set XDG_RUNTIME_DIR to a "
                "writable directory of yours with free space"
            ) from error
        self._thread = threading.Thread(target=self._loop, name="phalanx-control", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._is_closed = True
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # accept() in the thread returns
        self._listener.close()

    def _loop(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # such as too many open files
                if self._is_closed:
                    return
                time.sleep(ACCEPT_RETRY_INTERVAL)
                continue
            self._start_serving(connection)

    def _start_serving(self, connection: socket.socket) -> None:
        if not self._slots.acquire(blocking=False):
            # Refused at once. If it waited for its turn, the client could leave before the request
            # is carried out.
            _refuse(connection, f"the run is serving {MAX_CLIENTS} other clients. Try again")
            return
        try:
            threading.Thread(
                target=self._serve, args=(connection,), name="phalanx-control-client", daemon=True
            ).start()
        except RuntimeError as error:  # there is no thread left
            self._slots.release()
            _refuse(connection, f"{error}. Try again")

    def _serve(self, connection: socket.socket) -> None:
        try:
            # A client that leaves or is slow gets no answer.
            with connection, suppress(OSError):
                line = read_line(connection, timeout=REQUEST_TIMEOUT)
                if _has_left(connection):  # while this process was suspended, for example
                    return
                answer = json.dumps(self._answer(line)).encode() + b"\n"
                connection.settimeout(REQUEST_TIMEOUT)
                connection.sendall(answer)
        finally:
            self._slots.release()

    def _answer(self, line: bytes) -> Mapping[str, Any]:
        try:
            fields = json.loads(line)
        except (ValueError, RecursionError):
            fields = None
        if not isinstance(fields, dict):
            return {"error": "a request must be a line with a JSON object"}
        request = ControlRequest(fields, Future())
        self._put(request)
        try:
            return request.reply.result(REQUEST_TIMEOUT)
        except TimeoutError:
            # The supervisor does not act on it later, unless it does just now.
            if not request.reply.cancel():
                return request.reply.result(REQUEST_TIMEOUT)
            return {
                "error": f"the supervisor did not answer within {REQUEST_TIMEOUT:g} s: the run is "
                "starting or ending. Try again"
            }


def _refuse(connection: socket.socket, reason: str) -> None:
    with connection, suppress(OSError):
        connection.setblocking(False)  # a new connection has room for a line
        connection.sendall(json.dumps({"error": reason}).encode() + b"\n")


def _has_left(connection: socket.socket) -> bool:
    """Return whether the client has closed the connection, and not only its sending half."""
    poll = select.poll()
    poll.register(connection, 0)
    return any(events & select.POLLHUP for _, events in poll.poll(0))
