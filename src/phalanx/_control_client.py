"""Requests to the launcher of an elastic run, through its control socket.

There is one request and one reply per connection, each a line with a JSON object. A reply with
``error`` is a refusal. `launch._control_socket` is the server.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

REQUEST_TIMEOUT = 5.0  # seconds that the server waits for a request, and for the supervisor
_MAX_LINE_BYTES = 1 << 20
_MAX_PATH_BYTES = 107  # of the address of a socket


def send_request(path: Path, **fields: Any) -> dict[str, Any]:
    """Send a request to a run and return the reply; raise OSError if there is none."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(REQUEST_TIMEOUT)
        with socket_address(path) as address:
            connection.connect(address)
        with suppress(BrokenPipeError):  # a refusal comes before the request is read
            connection.sendall(json.dumps(fields).encode() + b"\n")
        try:
            # Longer than the server takes for one, so a request that is carried out has a reply.
            reply = json.loads(read_line(connection, timeout=3 * REQUEST_TIMEOUT))
        except ValueError as error:
            raise ConnectionAbortedError("the run ended before it replied") from error
    assert isinstance(reply, dict)
    return reply


def is_listening(path: Path) -> bool:
    """Return whether a process accepts connections there."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(REQUEST_TIMEOUT)
        try:
            with socket_address(path) as address:
                connection.connect(address)
        except OSError:
            return False
        return True


def read_line(connection: socket.socket, *, timeout: float) -> bytes:
    """Read up to the first newline, or to the end of what the other side sends."""
    data, deadline = b"", time.monotonic() + timeout
    while b"\n" not in data and len(data) < _MAX_LINE_BYTES:
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        chunk = connection.recv(1 << 16)
        if not chunk:
            break
        data += chunk
    return data.partition(b"\n")[0]


@contextmanager
def socket_address(path: Path) -> Iterator[str]:
    """Yield a name of the path that is short enough for a socket."""
    if len(os.fsencode(path)) <= _MAX_PATH_BYTES:
        yield str(path)
        return
    directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{directory}/{path.name}"
    finally:
        os.close(directory)
