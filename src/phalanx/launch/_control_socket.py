"""The control socket of an elastic run: one request and one reply per connection, a line of JSON.

A thread accepts connections and passes requests on to the supervisor, which answers them between
other events. The socket lies in a directory that only its owner can enter, so requests are not
authenticated.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

REQUEST_TIMEOUT = 5.0  # seconds that the server waits for a request, and for the supervisor
ACCEPT_RETRY_INTERVAL = 0.1  # seconds after a connection that could not be accepted
_MAX_LINE_BYTES = 1 << 20
_MAX_PATH_BYTES = 107  # of the address of a socket


class ControlRequest(NamedTuple):
    """A request of a client, and the future of the reply."""

    fields: Mapping[str, Any]
    reply: Future[Mapping[str, Any]]


class ControlServer:
    """The thread that accepts requests; it passes them to `put` and waits for the reply."""

    def __init__(self, path: Path, put: Callable[[ControlRequest], None]) -> None:
        self._put = put
        self._is_closed = False
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        # Renamed, so that nobody finds it before it listens.
        unfinished = path.with_name(f"{path.name}.new")
        with _address(unfinished) as address:
            self._listener.bind(address)
        self._listener.listen()
        unfinished.rename(path)
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
            # Clients are served one at a time. One that leaves or is slow gets no answer.
            with connection, suppress(OSError):
                line = _read_line(connection, timeout=REQUEST_TIMEOUT)
                answer = json.dumps(self._answer(line)).encode() + b"\n"
                connection.settimeout(REQUEST_TIMEOUT)
                connection.sendall(answer)

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


def send_request(path: Path, **fields: Any) -> dict[str, Any]:
    """Send a request to a run and return the reply; raise OSError if there is none."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(REQUEST_TIMEOUT)
        with _address(path) as address:
            connection.connect(address)
        connection.sendall(json.dumps(fields).encode() + b"\n")
        try:
            # Longer than the server takes for one, so a request that is carried out has a reply.
            reply = json.loads(_read_line(connection, timeout=3 * REQUEST_TIMEOUT))
        except ValueError as error:
            raise ConnectionAbortedError("the run ended before it replied") from error
    assert isinstance(reply, dict)
    return reply


def is_listening(path: Path) -> bool:
    """Return whether a process accepts connections there."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(REQUEST_TIMEOUT)
        try:
            with _address(path) as address:
                connection.connect(address)
        except OSError:
            return False
        return True


def _read_line(connection: socket.socket, *, timeout: float) -> bytes:
    data, deadline = b"", time.monotonic() + timeout
    while b"\n" not in data and len(data) < _MAX_LINE_BYTES:
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        chunk = connection.recv(1 << 16)
        if not chunk:
            break
        data += chunk
    return data.partition(b"\n")[0]


@contextmanager
def _address(path: Path) -> Iterator[str]:
    """Yield a name of the path that is short enough for a socket."""
    if len(os.fsencode(path)) <= _MAX_PATH_BYTES:
        yield str(path)
        return
    directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{directory}/{path.name}"
    finally:
        os.close(directory)
