"""The channel between the supervisor and a worker of an elastic run: a socket with lines of JSON.

A worker sends events. A standby is sent what makes it a worker (`_standby`). The worker's end is in
`elastic._elastic_worker`. One thread reads all channels, so that no worker has to wait for the
supervisor. Before the supervisor classifies an exit it calls `receive` itself: what the process
wrote before it died is in the socket.

The thread alone unregisters and closes sockets. Others call `shut_down`, which looks like an end of
file to the thread.
"""

from __future__ import annotations

import json
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

_MAX_LINE_BYTES = 1 << 16  # what is longer was not written by a worker
_CHUNK = 1 << 16


@dataclass(frozen=True, kw_only=True)
class WorkerMessage:
    """One line from a worker."""

    event: str
    """``created``: it has an `ElasticRun`; ``ready``: it has asked to join; ``member``;
    ``progress``: from the leader, now and then; ``leaving``: it was told to, and does so after its
    step; ``left``; ``saved``: all leave, and there is nothing more to save; ``finished``: it has
    completed all steps; ``continuing``: with more of them; ``short``: the next step waits for the
    minimum of members; ``failed``: it ends because of an uncaught exception, of which the others
    are told next; ``ended``: its interpreter ends. Others are ignored."""
    step: int | None = None
    max_members: int | None = None
    """With ``ready``: how many workers can be members at most."""
    leader: bool = False
    """Whether the worker is the leader of the run."""
    changed_variables: tuple[str, ...] = ()
    """With ``created``: environment variables that its script has changed."""


class WorkerChannel:
    """The supervisor's end of a channel, and the worker's until the worker has started."""

    def __init__(self) -> None:
        self.has_ended = False
        """Whether the worker has sent that its interpreter ends."""
        self.is_silent = True
        """Whether the worker has sent nothing: it has not created an `ElasticRun`."""
        self.failed_at: float | None = None
        """When it was read that the worker has failed, on the monotonic clock."""
        self._socket, self._worker_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.setblocking(False)
        self._lock = threading.Lock()
        self._rest = b""
        self._messages: list[WorkerMessage] = []
        self._is_open = True

    @property
    def worker_fd(self) -> int:
        """The descriptor that the worker inherits."""
        return self._worker_end.fileno()

    def close_worker_end(self) -> None:
        self._worker_end.close()

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, data: bytes) -> None:
        """Send a short message; raise OSError if the worker is gone, or does not take it whole."""
        with self._lock:
            if self._socket.send(data) < len(data):
                raise BlockingIOError("the worker does not read")

    def receive(self) -> list[WorkerMessage]:
        """Return the messages since the last call, up to what the worker has written by now."""
        with self._lock:
            self._read()
            messages, self._messages = self._messages, []
        return messages

    def read(self) -> bool:
        """Keep new messages for `receive`; return False at end of file."""
        with self._lock:
            self._read()
            return self._is_open

    def close(self) -> None:
        with self._lock:
            self._is_open = False
            self._socket.close()

    def shut_down(self) -> None:
        """Make the reader close the socket. Without this a process that a dead worker has started
        could keep it open.
        """
        with self._lock, suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def _read(self) -> None:
        while self._is_open:
            try:
                data = self._socket.recv(_CHUNK)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            self._is_open = bool(data)
            *lines, rest = (self._rest + data).split(b"\n")
            self._rest = rest if len(rest) <= _MAX_LINE_BYTES else b""
            found = [message for line in lines if (message := _parse(line)) is not None]
            self._messages += found
            self.is_silent &= not found
            events = {message.event for message in found}
            self.has_ended |= "ended" in events
            if "failed" in events and self.failed_at is None:
                self.failed_at = time.monotonic()


def _parse(line: bytes) -> WorkerMessage | None:
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(fields, dict) or not isinstance(fields.get("event"), str):
        return None
    step, max_members = fields.get("step"), fields.get("max_members")
    changed = fields.get("changed_variables")
    return WorkerMessage(
        event=fields["event"],
        step=step if type(step) is int else None,
        max_members=max_members if type(max_members) is int else None,
        leader=fields.get("leader") is True,
        changed_variables=tuple(map(str, changed)) if isinstance(changed, list) else (),
    )


class ChannelReader:
    """The thread that reads all channels; it calls `notify` when one has something to receive."""

    def __init__(self, notify: Callable[[WorkerChannel], None]) -> None:
        self._notify = notify
        self._selector = selectors.DefaultSelector()
        self._end = os.eventfd(0)
        self._selector.register(self._end, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._loop, name="phalanx-channels", daemon=True)
        self._thread.start()

    def open(self) -> WorkerChannel:
        channel = WorkerChannel()
        try:
            # While the thread is in select(): epoll allows that.
            self._selector.register(channel, selectors.EVENT_READ, channel)
        except OSError:
            channel.close_worker_end()
            channel.close()
            raise
        return channel

    def close(self) -> None:
        os.eventfd_write(self._end, 1)
        self._thread.join()
        for key in [*self._selector.get_map().values()]:
            if key.data is not None:
                key.data.close()
        self._selector.close()
        os.close(self._end)

    def _loop(self) -> None:
        while True:
            for key, _ in self._selector.select():
                channel: WorkerChannel | None = key.data
                if channel is None:
                    return
                if not channel.read():
                    # Before it is closed: another channel may get its number at once.
                    self._selector.unregister(channel)
                    channel.close()
                self._notify(channel)
