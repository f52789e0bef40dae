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
import time
from dataclasses import dataclass
from typing import IO

from ._reports import ReportReader
from ._screen import Screen, Source

__all__ = ["Lines", "Pump"]

LONGEST_LINE = 1 << 16
"""Bytes; a longer line is cut, so that nobody fills our memory."""
_CHUNK = 1 << 16  # bytes that are read at once
# Every control sequence but colours: cursor movement makes no sense behind a label.
_MOVEMENT = re.compile(rb"\x1b\[[0-?]*[ -/]*[@-ln-~]")


class Lines:
    """One stream, cut into lines the way a terminal would show them.

    A carriage return starts the line over, so what counts is the last thing written after one.
    """

    def __init__(self) -> None:
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
        return lines

    def finish(self) -> list[bytes]:
        """Return the line that was never finished, if there is anything in it."""
        line, self._rest = self.unfinished, b""
        return [line] if line.strip() else []


@dataclass(frozen=True)
class _Stream:
    pipe: IO[bytes]
    source: Source
    lines: Lines
    reports: ReportReader | None
    """Where lines pass first, if error reports are to be found among them."""


class Pump:
    """The thread that carries output from processes to the screen."""

    def __init__(self, screen: Screen) -> None:
        self._screen = screen
        self._selector = selectors.DefaultSelector()
        self._holding: dict[ReportReader, Source] = {}
        reader, self._voice = os.pipe()
        self._own = os.fdopen(reader, "rb", buffering=0)
        self.add(self._own, Source("phalanx: ", is_error=True))
        self._thread = threading.Thread(target=self._loop, name="phalanx-output", daemon=True)

    def add(self, pipe: IO[bytes], source: Source, reports: ReportReader | None = None) -> None:
        """Carry this pipe's output too, once started; close it at its end."""
        stream = _Stream(pipe, source, Lines(), reports)
        self._selector.register(pipe, selectors.EVENT_READ, stream)

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
        while True:
            ready = self._selector.select(0 if is_ending else self._patience())
            if is_ending and not ready:
                break
            for key, _ in ready:
                is_open = self._carry(key.data)
                is_ending |= not is_open and key.data.pipe is self._own
            self._show_reports_that_are_due()
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
        self._show(stream, lines.feed(data))
        self._screen.unfinished(stream.source, lines.unfinished, is_progress=lines.is_progress)
        return True

    def _show(self, stream: _Stream, lines: list[bytes]) -> None:
        if lines and self._holding and not stream.source.is_error:
            self._show_what_was_before(stream.source)
        if stream.reports is not None:
            lines = stream.reports.feed(lines, time.monotonic())
            if stream.reports.is_holding:
                self._holding[stream.reports] = stream.source
        self._screen.lines(stream.source, lines)

    def _patience(self) -> float | None:
        """Return how long nothing has to be shown unless something is written."""
        if not self._holding:
            return None
        return max(0.0, min(each.due() for each in self._holding) - time.monotonic())

    def _show_reports_that_are_due(self) -> None:
        now = time.monotonic()
        for reports, source in [*self._holding.items()]:
            if reports.due() <= now:
                self._release(reports, source)

    def _show_what_was_before(self, stdout: Source) -> None:
        """Show the report that the same process has written to stderr, if it is whole."""
        process = stdout.label, stdout.rank
        for reports, source in [*self._holding.items()]:
            if (source.label, source.rank) == process and reports.may_be_complete:
                self._release(reports, source)

    def _release(self, reports: ReportReader, source: Source) -> None:
        self._holding.pop(reports, None)
        self._screen.lines(source, reports.release())

    def _close(self, stream: _Stream) -> None:
        self._selector.unregister(stream.pipe)
        stream.pipe.close()
        self._screen.unfinished(stream.source, b"", is_progress=False)
        self._show(stream, stream.lines.finish())
        if stream.reports is not None:
            self._release(stream.reports, stream.source)


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
