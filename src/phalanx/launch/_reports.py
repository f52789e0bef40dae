"""Error reports: tracebacks and usage errors that ranks write to stderr, short and shown once.

When a rank fails, every other rank raises an error about it. Each writes a traceback of some fifty
lines, most of them frames inside phalanx and torch. A `ReportReader` stands between the stderr of a
rank and the screen: it holds a report back until it is complete, leaves out what is internal, and
shows only one line if another rank has reported the same.

Nothing is lost by holding back: a report is shown when the stream ends, when nothing follows it for
`QUIET` seconds, or `LONGEST_HOLD` seconds after it began. Lines that are no report pass at once.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["ReportReader", "SeenReports"]

QUIET = 0.5
"""Seconds without a further line after which a report is taken for complete."""
LONGEST_HOLD = 3.0
"""Seconds after which a report is shown, complete or not."""
MOST_HELD = 5000
"""Lines; a longer report is shown as it is."""
TAIL_LINES = 30
"""How many lines that are no report are kept, to tell how a process explained its end."""
_SHOWN_AGAIN = 20  # lines of frames, and of the message, that are shown again at the end

_HEADER = "Traceback (most recent call last):"
_USAGE = "usage: "
_LINKS = (
    "During handling of the above exception, another exception occurred:",
    "The above exception was the direct cause of the following exception:",
)
_STARTS = (_HEADER.encode(), _USAGE.encode())
_OURS = "phalanx.errors."
_PACKAGE = f"{Path(__file__).resolve().parents[1]}/"
_TORCH = ("/site-packages/torch/", "/dist-packages/torch/")
_FILE = re.compile(r'  File "(?P<path>[^"]*)", line ')
_STATE_OF_RANK = re.compile(r"  rank \d+[: ]")
_LAST_WORDS = (_HEADER, "Fatal Python error")


@dataclass
class _Part:
    """One exception of a chain: its traceback and its message."""

    link: str = ""
    """The sentence that joins it to the exception before it."""
    header: str = _HEADER
    frames: list[list[str]] = field(default_factory=list)
    message: list[str] = field(default_factory=list)
    """The line that names the exception, and those that follow it."""

    @property
    def is_ours(self) -> bool:
        return self.message[0].startswith(_OURS)

    @property
    def is_internal(self) -> bool:
        """Whether no frame of it is the user's."""
        return all(_is_internal(frame) for frame in self.frames)

    def without_internal_frames(self) -> tuple[list[list[str]], int]:
        """Return the frames that are the user's, if any are, and how many others there were."""
        if not self.is_ours or self.is_internal:
            return self.frames, 0
        kept = [frame for frame in self.frames if not _is_internal(frame)]
        return kept, len(self.frames) - len(kept)


@dataclass
class _Report:
    """A chain of exceptions; or a usage error, which is all message."""

    parts: list[_Part]

    @property
    def kind(self) -> str:
        first = self.parts[-1].message[0]
        return "usage error" if first.startswith(_USAGE) else first.partition(":")[0]

    def shortened(self) -> _Report:
        """Leave out what led to an error of ours inside of phalanx, and internal frames."""
        kept: list[_Part] = []
        for part in self.parts:
            if part.is_ours:
                while kept and kept[-1].is_internal:
                    part.link = kept.pop().link
            kept.append(part)
        for part in kept:
            part.frames, hidden = part.without_internal_frames()
            if hidden:
                frames = "1 frame" if hidden == 1 else f"{hidden} frames"
                part.frames.append(
                    [f"  ({frames} inside phalanx and torch; --full-tracebacks shows them)"]
                )
        return _Report(kept)

    def lines(self, *, most: int | None = None) -> list[str]:
        return [line for part in self.parts for line in _lines(part, most)]

    def key(self, rank: int | None) -> tuple[str, ...]:
        """Return what is the same on two ranks that report the same error."""
        frames = [line for part in self.parts for frame in part.frames for line in frame]
        heads = [line for part in self.parts for line in part.message[: 1 if part.header else None]]
        return tuple(_of_any_rank(line, rank) for line in [*frames, *heads])


def _lines(part: _Part, most: int | None) -> Iterator[str]:
    if part.link:
        yield from ("", part.link, "")
    frames = [line for frame in part.frames for line in frame]
    if part.header:
        yield part.header
    if most is not None and len(frames) > most:
        yield f"  ({len(frames) - most} lines not shown)"
        frames = frames[-most:]
    yield from frames
    yield from part.message[:most]
    if most is not None and len(part.message) > most:
        yield f"  ({len(part.message) - most} lines not shown)"


def _is_internal(frame: Sequence[str]) -> bool:
    found = _FILE.match(frame[0])
    if found is None:
        return False
    path = found["path"]
    return path.startswith((_PACKAGE, "<frozen ")) or any(each in path for each in _TORCH)


def _of_any_rank(line: str, rank: int | None) -> str:
    return line if rank is None else re.sub(rf"\brank ?{rank}\b", "rank *", line)


def _parse(lines: Sequence[str]) -> Iterator[_Report | str]:
    """Yield reports, and between them lines that belong to none."""
    place = 0
    while place < len(lines):
        if lines[place].startswith(_USAGE):
            end = _end_of_message(lines, place)
            parts = [_Part(header="", message=[*lines[place:end]])]
        else:
            end, parts = _parse_chain(lines, place)
        if parts:
            yield _Report(parts)
        else:
            end = place + 1
            yield lines[place]
        place = end


def _parse_chain(lines: Sequence[str], place: int) -> tuple[int, list[_Part]]:
    """Return the exceptions that are chained from a line on, and where the last of them ends."""
    parts: list[_Part] = []
    end, link = place, ""
    while place < len(lines) and lines[place] == _HEADER:
        after, part = _parse_traceback(lines, place)
        if part is None:
            break
        part.link, end = link, after
        parts.append(part)
        if end + 3 >= len(lines) or lines[end + 1] not in _LINKS:
            break
        link, place = lines[end + 1], end + 3
    return end, parts


def _parse_traceback(lines: Sequence[str], place: int) -> tuple[int, _Part | None]:
    """Return one exception that begins with a header, and where it ends; None if it is cut off."""
    part = _Part()
    place += 1
    while place < len(lines) and lines[place].startswith(" "):
        if lines[place].startswith("    ") and part.frames:
            part.frames[-1].append(lines[place])
        else:
            part.frames.append([lines[place]])
        place += 1
    if place == len(lines) or not lines[place]:
        return place, None
    end = _end_of_message(lines, place)
    part.message = [*lines[place:end]]
    return end, part


def _end_of_message(lines: Sequence[str], place: int) -> int:
    for end in range(place + 1, len(lines)):
        is_linked = not lines[end] and lines[end + 1 : end + 2] and lines[end + 1] in _LINKS
        if is_linked or lines[end] == _HEADER:
            return end
    return len(lines)


class SeenReports:
    """The reports of all ranks in one attempt."""

    def __init__(self) -> None:
        self._first: dict[tuple[str, ...], tuple[int | None, set[str]]] = {}

    def shown(self, report: _Report, rank: int | None) -> list[str]:
        """Return what to show: all of it, or that another rank has reported the same."""
        message = report.parts[-1].message
        key, said = report.key(rank), {_of_any_rank(line, rank) for line in message}
        first, words = self._first.setdefault(key, (rank, said))
        if first == rank or rank is None:
            return report.lines()
        # What was written after the message may be something else, and is shown.
        new = [
            line
            for line in message[1:]
            if _of_any_rank(line, rank) not in words and not _STATE_OF_RANK.match(line)
        ]
        return [f"(the same {report.kind} as on rank {first})", *new]


class ReportReader:
    """The lines of one process's stderr, on their way to the screen."""

    def __init__(
        self, seen: SeenReports, rank: int | None, *, labelled: bool = True, full: bool = False
    ) -> None:
        self._seen = seen
        self._rank = rank
        self._full = full
        # torch names the rank before each line of a traceback; so do we, and once is enough.
        self._torchs_label = f"[rank{rank}]:"
        self._keeps_label = not labelled
        self._held: list[str] = []
        self._is_complete = False
        """Whether what is held may be all of a report; in the middle of frames it is not."""
        self._has_label = False
        self._began = self._last = 0.0
        self._last_report: list[str] = []
        self._tail: deque[bytes] = deque(maxlen=TAIL_LINES)
        """Lines after the last report."""

    @property
    def is_holding(self) -> bool:
        """Whether lines wait to be shown."""
        return bool(self._held)

    def due(self) -> float:
        """Return when the held lines have to be shown, on the clock that `feed` is told."""
        at_latest = self._began + LONGEST_HOLD
        return min(self._last + QUIET, at_latest) if self._is_complete else at_latest

    def last_words(self) -> list[str]:
        """Return how the process explained its end: the last report, or the last lines."""
        tail = [line.decode(errors="replace") for line in self._tail]
        starts = [place for place, line in enumerate(tail) if line.startswith(_LAST_WORDS)]
        if self._last_report and not starts:
            return [*self._last_report, *tail]
        return tail[starts[-1] if starts else 0 :]

    def feed(self, lines: Sequence[bytes], now: float) -> list[bytes]:
        """Take finished lines and return those that can be shown."""
        shown: list[bytes] = []
        for line in lines:
            text = self._without_torchs_label(line)
            if self._held or (text.startswith(_STARTS) and not self._full):
                self._hold(text, now, is_labelled=text is not line)
                if len(self._held) > MOST_HELD:
                    shown += self.release()
            else:
                self._remember(text)
                shown.append(line if self._keeps_label else text)
        return shown

    def _hold(self, line: bytes, now: float, *, is_labelled: bool) -> None:
        if not self._held:
            self._began, self._has_label = now, is_labelled
        self._last = now
        text = line.decode(errors="surrogateescape")
        if text == _HEADER or text in _LINKS:
            self._is_complete = False
        elif text[:1].strip():
            self._is_complete = True
        self._held.append(text)

    def release(self) -> list[bytes]:
        """Return what is held, shortened."""
        held, self._held = self._held, []
        shown: list[str] = []
        for item in _parse(held):
            if isinstance(item, str):
                self._remember(_bytes(item))
                shown.append(item)
            else:
                short = item.shortened()
                words = short.lines(most=_SHOWN_AGAIN)
                self._last_report = [_bytes(line).decode(errors="replace") for line in words]
                self._tail.clear()
                shown += self._seen.shown(short, self._rank)
        if self._has_label and self._keeps_label:
            shown = [f"{self._torchs_label} {line}" if line else line for line in shown]
        return [*map(_bytes, shown)]

    def _remember(self, line: bytes) -> None:
        if len(self._tail) == TAIL_LINES:
            self._last_report = []  # so much came after it that it was not the end
        self._tail.append(line)

    def _without_torchs_label(self, line: bytes) -> bytes:
        label = self._torchs_label.encode()
        return line[len(label) :].removeprefix(b" ") if line.startswith(label) else line


def _bytes(line: str) -> bytes:
    return line.encode(errors="surrogateescape")
