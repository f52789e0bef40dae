"""How a rank and its writer process talk: small messages in JSON over a pair of sockets.

The data of a state is never sent: it lies in shared memory, whose descriptor is sent once.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Sequence
from typing import TypeAlias

import msgspec

from ._staging_layout import BranchNote, Note

__all__ = [
    "Done",
    "Exit",
    "Failed",
    "Link",
    "Ready",
    "Refuse",
    "Reply",
    "Request",
    "Write",
    "printable",
]

_LENGTH = struct.Struct("<Q")
_MOST_FDS = 1


class Write(msgspec.Struct, tag="write"):
    """Write the state that is in a buffer."""

    turn: int
    """The number of the save, which a process that died may have been at before."""
    path: bytes
    """As the file system has it: not every path is valid Unicode."""
    buffer: int
    """The number of the buffer; its descriptor comes along if the process lacks it."""
    size: int
    """How long the buffer is."""
    state: Note
    kwargs: BranchNote


class Refuse(msgspec.Struct, tag="refuse"):
    """Tell the other ranks that this one has nothing to write, and why."""

    turn: int
    path: bytes
    why: str
    kwargs: BranchNote


class Exit(msgspec.Struct, tag="exit"):
    """End the process."""


class Ready(msgspec.Struct, tag="ready"):
    """The process has started."""


class Done(msgspec.Struct, tag="done"):
    """The checkpoint is in place."""

    written: int
    phases: dict[str, float]


class Failed(msgspec.Struct, tag="failed"):
    """It is not, or the process cannot start."""

    kind: str
    message: str
    traceback: str


Request: TypeAlias = Write | Refuse | Exit
Reply: TypeAlias = Ready | Done | Failed


def printable(text: str) -> str:
    """Return a text that can be sent, also if it quotes a path that is not valid Unicode."""
    return text.encode(errors="backslashreplace").decode()


class Link:
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
            begun, fds, _, _ = socket.recv_fds(self._socket, _LENGTH.size, _MOST_FDS)
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
