"""From the pipes of many processes to one screen: cut into lines, labelled, never mixed.

A single thread reads every pipe and is the only one that writes to the screen. The supervisor
never writes itself, so a terminal that is paused cannot keep it from noticing that a rank has
died: what it has to say goes through a pipe of its own.
"""

from __future__ import annotations

import os
import re
import selectors
import threading
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import IO

from ._screen import Screen, Source

__all__ = ["Lines", "Pump", "last_words"]

TAIL_LINES = 30
"""How many finished lines of a stream are kept, to tell how a process explained its end."""
LONGEST_LINE = 1 << 16
"""Bytes; a longer line is cut, so that nobody fills our memory."""
_CHUNK = 1 << 16  # bytes that are read at once
# Every control sequence but colours: cursor movement makes no sense behind a label.
_MOVEMENT = re.compile(rb"\x1b\[[0-?]*[ -/]*[@-ln-~]")
_REPORT_START = ("Traceback (most recent call last)", "Fatal Python error")


class Lines:
    """One stream, cut into lines the way a terminal would show them.

    A carriage return starts the line over, so what counts is the last thing written after one.
    """

    def __init__(self) -> None:
        self.tail: deque[bytes] = deque(maxlen=TAIL_LINES)
        """The last finished lines."""
        self._rest = b""

    @property
    def unfinished(self) -> bytes:
        """What has been written since the last line ended."""
        return _visible(self._rest)

    @property
    def is_progress(self) -> bool:
        """Whether the unfinished line is one that is written over and over."""
        return b"\r" in self._rest

    def feed(self, data: bytes) -> list[bytes]:
        """Take what was written and return the lines that it finishes."""
        *lines, rest = (self._rest + data).split(b"\n")
        if b"\r" in data or b"\r" in self._rest or b"\x1b" in data:
            lines = [_visible(line) for line in lines]
        self._rest = _last_state(rest)
        if len(self._rest) > LONGEST_LINE:
            lines.append(self._rest)
            self._rest = b""
        self.tail.extend(lines[-TAIL_LINES:])
        return lines

    def finish(self) -> list[bytes]:
        """Return the line that was never finished, if there is anything in it."""
        line, self._rest = self.unfinished, b""
        if not line.strip():
            return []
        self.tail.append(line)
        return [line]


@dataclass(frozen=True)
class _Stream:
    pipe: IO[bytes]
    source: Source
    lines: Lines


class Pump:
    """The thread that carries output from processes to the screen."""

    def __init__(self, screen: Screen) -> None:
        self._screen = screen
        self._selector = selectors.DefaultSelector()
        reader, self._voice = os.pipe()
        self._own = self.add(
            os.fdopen(reader, "rb", buffering=0), Source("phalanx: ", is_error=True)
        )
        self._thread = threading.Thread(target=self._loop, name="phalanx-output", daemon=True)

    def add(self, pipe: IO[bytes], source: Source) -> Lines:
        """Carry this pipe's output too, once started; close it at its end."""
        stream = _Stream(pipe, source, Lines())
        self._selector.register(pipe, selectors.EVENT_READ, stream)
        return stream.lines

    def start(self) -> None:
        """Begin to carry output."""
        self._thread.start()

    def say(self, text: str) -> None:
        """Show a line of our own."""
        os.write(self._voice, text.encode() + b"\n")

    def finish(self, *, timeout: float) -> None:
        """Show what the processes, which have ended, have written, and stop.

        A pipe may stay open for ever and a paused terminal take nothing: after `timeout` seconds
        what is left is not shown.
        """
        os.close(self._voice)
        if self._thread.ident is None:
            self._thread.start()
        self._thread.join(timeout)

    def _loop(self) -> None:
        is_ending = False
        while ready := self._selector.select(0 if is_ending else None):
            for key, _ in ready:
                is_open = self._carry(key.data)
                is_ending |= not is_open and key.data.lines is self._own
            self._screen.flush()
        for key in list(self._selector.get_map().values()):
            self._close(key.data)
        self._screen.flush()
        self._selector.close()

    def _carry(self, stream: _Stream) -> bool:
        data = os.read(stream.pipe.fileno(), _CHUNK)
        if not data:
            self._close(stream)
            return False
        lines = stream.lines
        self._screen.lines(stream.source, lines.feed(data))
        self._screen.unfinished(stream.source, lines.unfinished, is_progress=lines.is_progress)
        return True

    def _close(self, stream: _Stream) -> None:
        self._selector.unregister(stream.pipe)
        stream.pipe.close()
        self._screen.unfinished(stream.source, b"", is_progress=False)
        self._screen.lines(stream.source, stream.lines.finish())


def last_words(tail: Iterable[bytes]) -> list[str]:
    """Return a process's last traceback, or all of the tail: it may be a long one's end."""
    lines = [line.decode(errors="replace") for line in tail]
    starts = [i for i, line in enumerate(lines) if line.startswith(_REPORT_START)]
    return lines[starts[-1] :] if starts else lines


def _visible(line: bytes) -> bytes:
    """Return what a terminal shows of a line."""
    if b"\x1b" in line:
        line = _MOVEMENT.sub(b"", line)
    return _last_written(line)


def _last_written(line: bytes) -> bytes:
    if b"\r" not in line:
        return line
    return next((part for part in reversed(line.split(b"\r")) if part), b"")


def _last_state(rest: bytes) -> bytes:
    """Return the shortest text that will be shown as `rest` would, whatever follows it."""
    if b"\r" not in rest:
        return rest
    # The mark stays on the side where it was: "50%\r" is over, "\r50%" may go on.
    shown = _last_written(rest)
    return shown + b"\r" if rest.endswith(b"\r") else b"\r" + shown
