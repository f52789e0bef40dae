"""Where the lines of all ranks end up: two sinks, whole lines only.

On a terminal, lines that are not finished (a progress bar, a prompt) are kept in a *live area*
below everything else, one row per stream, and drawn again whenever they change. Elsewhere a
finished line is all there is to show, except that a progress bar leaves a line every few seconds,
so that a log file of a long epoch is not silent.

One thread writes at a time; there are no locks here.
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

__all__ = ["Screen", "Sink", "Source"]

PROGRESS_INTERVAL = 10.0
"""Seconds between two lines of one progress bar where there is no terminal."""

_COLOURS = (36, 32, 33, 35, 34, 96, 92, 93, 95, 94)  # no red: that is for errors
_USUAL_HEIGHT = 24  # rows of a terminal that does not tell
_ERASE_BELOW = b"\x1b[J"
# The terminal cuts rows that are too long while wrapping is off, so a row is always one row high
# and nobody needs to know how wide a character is.
_NO_WRAP, _WRAP = b"\x1b[?7l", b"\x1b[?7h"


class Sink(Protocol):
    """An unbuffered binary stream, as `open(fd, "wb", buffering=0)` returns."""

    def write(self, data: bytes, /) -> int | None:
        """Write some of `data` and return how much, or None if it would block."""

    def isatty(self) -> bool:
        """Return whether a person is watching."""

    def fileno(self) -> int:
        """Return the file descriptor."""


@dataclass(frozen=True)
class Source:
    """One stream of one process."""

    label: str
    """What stands before each line."""
    is_error: bool = False
    """Whether it belongs on stderr."""
    rank: int | None = None
    """Whose it is: ranks differ in colour and keep their order in the live area."""


class Screen:
    """Two sinks that show lines from many sources."""

    def __init__(
        self,
        out: Sink,
        err: Sink,
        *,
        environ: Mapping[str, str] = os.environ,
        progress_interval: float = PROGRESS_INTERVAL,
    ) -> None:
        self._out = _Output(out, environ)
        self._err = _Output(err, environ)
        # The live area is on stderr, where progress bars belong, if somebody can see it there.
        self._stage = self._err if self._err.is_terminal or not self._out.is_terminal else self._out
        self._queue: list[tuple[_Output, bytes]] = []
        self._live: dict[Source, bytes] = {}
        self._rows = 0
        self._changed = False
        self._interval = progress_interval
        self._progress_at: dict[Source, float] = {}

    def lines(self, source: Source, texts: list[bytes]) -> None:
        """Show finished lines of one source at the next flush."""
        if texts:
            output = self._output(source)
            label = output.label(source)
            self._queue.append((output, b"".join([label + text + b"\n" for text in texts])))

    def unfinished(self, source: Source, text: bytes, *, is_progress: bool) -> None:
        """Show what a source has written after its last line; nothing if it is blank."""
        if self._output(source).is_terminal:
            self._set_live(source, text if text.strip() else b"")
        elif is_progress and text.strip() and self._is_due(source):
            self.lines(source, [text])

    def flush(self) -> None:
        """Write everything that is queued, and the live area below it."""
        if not self._queue and not self._changed:
            return
        self._stage.write(self._erase())
        for output, data in _merged(self._queue):
            output.write(data)
        self._stage.write(self._draw())
        self._queue.clear()
        self._changed = False

    def _output(self, source: Source) -> _Output:
        return self._err if source.is_error else self._out

    def _set_live(self, source: Source, text: bytes) -> None:
        if self._live.get(source, b"") != text:
            self._changed = True
            if text:
                self._live[source] = text
            else:
                del self._live[source]

    def _is_due(self, source: Source) -> bool:
        now = time.monotonic()
        # The first sight of a bar starts the clock, so a short one leaves no trace but its last
        # state.
        due = now - self._progress_at.setdefault(source, now) >= self._interval
        if due:
            self._progress_at[source] = now
        return due

    def _erase(self) -> bytes:
        if not self._rows:
            return b""
        up = b"\x1b[%dA" % (self._rows - 1) if self._rows > 1 else b""
        return b"\r" + up + _ERASE_BELOW

    def _draw(self) -> bytes:
        sources = sorted(self._live, key=lambda source: (source.rank or 0, source.is_error))
        shown = sources[: self._stage.height()]
        rows = [self._stage.label(source) + self._live[source] for source in shown]
        self._rows = len(rows)
        return _NO_WRAP + b"\n".join(rows) + _WRAP if rows else b""


class _Output:
    """A sink, and how much of a terminal it is."""

    def __init__(self, sink: Sink, environ: Mapping[str, str]) -> None:
        self._sink = sink
        self._is_gone = False
        self.is_terminal = sink.isatty() and environ.get("TERM") != "dumb"
        self._has_colour = self.is_terminal and not environ.get("NO_COLOR")

    def label(self, source: Source) -> bytes:
        if source.rank is None or not self._has_colour or not source.label:
            return source.label.encode()
        colour = _COLOURS[source.rank % len(_COLOURS)]
        return f"\x1b[{colour}m{source.label}\x1b[0m".encode()

    def height(self) -> int:
        """Return how many rows the live area may have; the rest of the screen is for lines."""
        try:
            rows = os.get_terminal_size(self._sink.fileno()).lines
        except OSError:
            rows = 0
        return (rows or _USUAL_HEIGHT) // 2

    def write(self, data: bytes) -> None:
        # Whoever read our output may be gone (`| head`, a closed terminal). The ranks are not
        # stopped for that: a training run is worth more than its log.
        while data and not self._is_gone:
            try:
                written = self._sink.write(data)
            except OSError:
                self._is_gone = True
                return
            if written is None:  # another process made this descriptor non-blocking
                select.select([], [self._sink.fileno()], [])
            data = data[written or 0 :]


def _merged(queue: list[tuple[_Output, bytes]]) -> list[tuple[_Output, bytes]]:
    """Join neighbours that go to the same place, so that a burst is one write."""
    merged: list[tuple[_Output, list[bytes]]] = []
    for output, data in queue:
        if merged and merged[-1][0] is output:
            merged[-1][1].append(data)
        else:
            merged.append((output, [data]))
    return [(output, b"".join(parts)) for output, parts in merged]
