"""Output of the ranks: split into lines, labelled, and written to stdout and stderr.

One thread reads every pipe and is the only one that writes to the terminal. The supervisor
never writes: its own messages go through a pipe to that thread, so a paused terminal cannot
keep it from noticing that a rank has died.

On a terminal, unfinished lines (progress bars, prompts) are redrawn in a *live area* below the
output, one row per stream. Elsewhere only finished lines are written, and a progress bar leaves
a line every few seconds, so that a log file is not silent during a long epoch.
"""

from __future__ import annotations

import io
import os
import re
import select
import selectors
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from itertools import groupby
from typing import IO, NamedTuple, TypeAlias

from ._error_reports import ErrorReportFilter

PROGRESS_INTERVAL = 10.0  # seconds between two lines of one progress bar, without a terminal

_COLOURS = (36, 32, 33, 35, 34, 96, 92, 93, 95, 94)  # red is reserved for errors
_DEFAULT_HEIGHT = 24  # rows of a terminal of unknown size
_ERASE_BELOW = b"\x1b[J"
# With wrapping off the terminal truncates long rows. A row stays one row high, and the width of
# characters does not matter.
_NO_WRAP, _WRAP = b"\x1b[?7l", b"\x1b[?7h"


OutputSink: TypeAlias = io.RawIOBase | io.BytesIO
"""An unbuffered binary stream, as `open(fd, "wb", buffering=0)` returns."""


class OutputSource(NamedTuple):
    """One stream of one process."""

    label: str  # prefix of each line
    is_error: bool = False  # whether its lines go to stderr
    rank: int | None = None  # selects the colour, and the order in the live area


class Screen:
    """Writes lines from many sources to stdout and stderr."""

    def __init__(
        self,
        out: OutputSink,
        err: OutputSink,
        *,
        environ: Mapping[str, str] = os.environ,
        progress_interval: float = PROGRESS_INTERVAL,
    ) -> None:
        self._out = _OutputStream(out, environ)
        self._err = _OutputStream(err, environ)
        # Progress bars belong on stderr, so the live area is there if stderr is a terminal.
        self._live_stream = (
            self._err if self._err.is_terminal or not self._out.is_terminal else self._out
        )
        self._queue: list[tuple[_OutputStream, bytes]] = []
        self._live: dict[OutputSource, bytes] = {}
        self._rows = 0
        self._changed = False
        self._interval = progress_interval
        self._progress_at: dict[OutputSource, float] = {}

    def write_lines(self, source: OutputSource, texts: list[bytes]) -> None:
        """Queue finished lines of one source for the next flush."""
        if texts:
            output = self._output(source)
            label = output.label(source)
            self._queue.append((output, b"".join([label + text + b"\n" for text in texts])))

    def show_unfinished(self, source: OutputSource, text: bytes, *, is_progress: bool) -> None:
        """Show the unfinished line of a source; remove it if it is blank."""
        text = text if text.strip() else b""
        if self._output(source).is_terminal:
            if self._live.get(source, b"") != text:
                self._changed = True
                self._live[source] = text
        elif is_progress and text:
            now = time.monotonic()
            # The interval starts when a bar first appears: a short one leaves only its last state.
            if now - self._progress_at.setdefault(source, now) >= self._interval:
                self._progress_at[source] = now
                self.write_lines(source, [text])

    def flush(self) -> None:
        """Write all queued lines and redraw the live area below them."""
        if not self._queue and not self._changed:
            return
        if self._rows:
            up = b"\x1b[%dA" % (self._rows - 1) if self._rows > 1 else b""
            self._live_stream.write(b"\r" + up + _ERASE_BELOW)
        # Neighbouring lines for the same sink are one write.
        for output, lines in groupby(self._queue, key=lambda each: each[0]):
            output.write(b"".join([data for _, data in lines]))
        live = [source for source, text in self._live.items() if text]
        sources = sorted(live, key=lambda source: (source.rank or 0, source.is_error))
        shown = sources[: self._live_stream.max_live_rows()]
        rows = [self._live_stream.label(source) + self._live[source] for source in shown]
        if rows:
            self._live_stream.write(_NO_WRAP + b"\n".join(rows) + _WRAP)
        self._rows = len(rows)
        self._queue.clear()
        self._changed = False

    def _output(self, source: OutputSource) -> _OutputStream:
        return self._err if source.is_error else self._out


class _OutputStream:
    """stdout or stderr of the launcher, and what it can show if it is a terminal."""

    def __init__(self, sink: OutputSink, environ: Mapping[str, str]) -> None:
        self._sink = sink
        self._is_gone = False
        self.is_terminal = sink.isatty() and environ.get("TERM") != "dumb"
        self._has_colour = self.is_terminal and not environ.get("NO_COLOR")

    def label(self, source: OutputSource) -> bytes:
        if source.rank is None or not self._has_colour or not source.label:
            return source.label.encode()
        colour = _COLOURS[source.rank % len(_COLOURS)]
        return f"\x1b[{colour}m{source.label}\x1b[0m".encode()

    def max_live_rows(self) -> int:
        """Return the maximum number of rows of the live area: half of the terminal."""
        try:
            rows = os.get_terminal_size(self._sink.fileno()).lines
        except OSError:
            rows = 0
        return (rows or _DEFAULT_HEIGHT) // 2

    def write(self, data: bytes) -> None:
        # The reader may have closed the pipe (`| head`, a closed terminal). The ranks continue: a
        # training run is worth more than its log.
        while data and not self._is_gone:
            try:
                written = self._sink.write(data)
            except OSError:
                self._is_gone = True
                return
            if written is None:  # another process made this descriptor non-blocking
                select.select([], [self._sink.fileno()], [])
            data = data[written or 0 :]


MAX_LINE_BYTES = 1 << 16  # longer lines are cut, to bound the memory of the launcher
_CHUNK = 1 << 16  # bytes per read
# All control sequences but colours: cursor movement makes no sense after a label.
_CONTROL_SEQUENCE = re.compile(rb"\x1b\[[0-?]*[ -/]*[@-ln-~]")


class LineSplitter:
    """Splits a stream into lines as a terminal shows them.

    A carriage return starts the line over, so the text after the last one counts.
    """

    def __init__(self) -> None:
        self._rest = b""

    @property
    def unfinished(self) -> bytes:
        """The text since the last newline."""
        return _visible_text(self._rest)

    @property
    def is_progress(self) -> bool:
        return b"\r" in self._rest

    def feed(self, data: bytes) -> list[bytes]:
        """Add output and return the lines that it completes."""
        *lines, rest = (self._rest + data).split(b"\n")
        if b"\r" in data or b"\r" in self._rest or b"\x1b" in data:
            lines = [_visible_text(line) for line in lines]
        if b"\r" in rest:
            # Drop what was overwritten, but keep the carriage return on its side: "50%\r" will be
            # overwritten, "\r50%" may continue.
            shown = _last_written(rest)
            rest = shown + b"\r" if rest.endswith(b"\r") else b"\r" + shown
        if len(rest) > MAX_LINE_BYTES:
            lines.append(rest)
            rest = b""
        self._rest = rest
        return lines

    def finish(self) -> list[bytes]:
        """Return the unfinished line, unless it is blank."""
        line, self._rest = self.unfinished, b""
        return [line] if line.strip() else []


class _Stream(NamedTuple):
    pipe: IO[bytes]
    source: OutputSource
    lines: LineSplitter
    reports: ErrorReportFilter | None  # filters the lines, if error reports may be among them
    drain: int  # the number of the first drain that closes it


class _Drain(NamedTuple):
    number: int
    is_done: threading.Event


class OutputPump:
    """The thread that copies output of processes to the screen, in all attempts of a run.

    A paused terminal may block it while ranks are restarted, so it is the only one.
    """

    def __init__(self, screen: Screen) -> None:
        self._screen = screen
        self._selector = selectors.DefaultSelector()
        self._holding: dict[ErrorReportFilter, OutputSource] = {}
        reader, self._message_pipe = os.pipe()
        os.set_blocking(self._message_pipe, False)
        self._own = os.fdopen(reader, "rb", buffering=0)
        source = OutputSource("phalanx: ", is_error=True)
        own = _Stream(self._own, source, LineSplitter(), None, drain=sys.maxsize)
        self._selector.register(self._own, selectors.EVENT_READ, own)
        self._drain = _Drain(0, threading.Event())  # the last one
        self._drain.is_done.set()
        self._is_blocked = False
        self._thread = threading.Thread(target=self._loop, name="phalanx-output", daemon=True)

    def add(
        self, pipe: IO[bytes], source: OutputSource, reports: ErrorReportFilter | None = None
    ) -> None:
        """Copy this pipe's output once started; close it at end of file or in the next drain.

        The thread may be running: epoll allows to add a descriptor while another thread waits.
        """
        drain = self._drain.number + 1
        stream = _Stream(pipe, source, LineSplitter(), reports, drain)
        self._selector.register(pipe, selectors.EVENT_READ, stream)

    def start(self) -> None:
        self._thread.start()

    def write_message(self, text: str) -> None:
        # A terminal that is paused for so long that the pipe is full does not get the message.
        with suppress(BlockingIOError):
            # It may contain the name of a file or variable that is not UTF-8.
            os.write(self._message_pipe, text.encode(errors="backslashreplace") + b"\n")

    def drain(self, *, timeout: float) -> None:
        """Show the remaining output of the processes so far, which have exited; close their pipes.

        A pipe may stay open. A paused terminal may block: this returns after `timeout` seconds, and
        the rest is shown later.
        """
        drain = self._drain = _Drain(self._drain.number + 1, threading.Event())
        with suppress(BlockingIOError):  # then there is something to wake up for
            os.write(self._message_pipe, b"\n")
        self._is_blocked = not drain.is_done.wait(timeout)

    def finish(self, *, timeout: float) -> None:
        """Show the remaining output and stop; what is not shown after `timeout` seconds is dropped.

        Do not wait if the terminal was paused in the last drain.
        """
        os.close(self._message_pipe)
        self._thread.join(0 if self._is_blocked else timeout)

    def _loop(self) -> None:
        is_ending = False
        while True:
            timeout = None
            if self._holding:
                timeout = max(0.0, min(each.due() for each in self._holding) - time.monotonic())
            drain = self._drain
            is_draining = not drain.is_done.is_set()
            ready = self._selector.select(0 if is_ending or is_draining else timeout)
            if is_ending and not ready:
                break
            for key, _ in ready:
                stream: _Stream = key.data
                if data := os.read(stream.pipe.fileno(), _CHUNK):
                    lines = stream.lines
                    self._show(stream, lines.feed(data))
                    self._screen.show_unfinished(
                        stream.source, lines.unfinished, is_progress=lines.is_progress
                    )
                else:
                    self._close(stream)
                    is_ending |= stream.pipe is self._own
            now = time.monotonic()
            for reports, source in [*self._holding.items()]:
                if reports.due() <= now:
                    self._release(reports, source)
            is_drained = is_draining and not any(key.data.drain <= drain.number for key, _ in ready)
            if is_drained:
                self._close_streams(drain.number)
            self._screen.flush()
            if is_drained:
                drain.is_done.set()
        self._close_streams(sys.maxsize)
        self._screen.flush()
        self._selector.close()

    def _close_streams(self, drain: int) -> None:
        for key in list(self._selector.get_map().values()):
            if key.data.drain <= drain:
                self._close(key.data)

    def _show(self, stream: _Stream, lines: list[bytes]) -> None:
        if stream.pipe is self._own:
            lines = [line for line in lines if line]  # the others are for waking up
        if lines and not stream.source.is_error:
            # First show the report that the same process wrote to stderr, if it may be complete.
            process = stream.source.label, stream.source.rank
            for reports, source in [*self._holding.items()]:
                if (source.label, source.rank) == process and reports.may_be_complete:
                    self._release(reports, source)
        if stream.reports is not None:
            lines = stream.reports.feed(lines, time.monotonic())
            if stream.reports.held:
                self._holding[stream.reports] = stream.source
        self._screen.write_lines(stream.source, lines)

    def _release(self, reports: ErrorReportFilter, source: OutputSource) -> None:
        self._holding.pop(reports, None)
        self._screen.write_lines(source, reports.release())

    def _close(self, stream: _Stream) -> None:
        self._selector.unregister(stream.pipe)
        stream.pipe.close()
        self._screen.show_unfinished(stream.source, b"", is_progress=False)
        self._show(stream, stream.lines.finish())
        if stream.reports is not None:
            self._release(stream.reports, stream.source)


def _visible_text(line: bytes) -> bytes:
    return _last_written(_CONTROL_SEQUENCE.sub(b"", line) if b"\x1b" in line else line)


def _last_written(line: bytes) -> bytes:
    return next((part for part in reversed(line.split(b"\r")) if part), b"")
