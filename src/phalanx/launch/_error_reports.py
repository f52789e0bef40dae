"""Error reports of the ranks: tracebacks and usage errors on stderr, shortened and shown once.

When a rank fails, every other rank raises an error about it, each with a traceback of some
fifty lines, mostly frames inside phalanx and torch. An `ErrorReportFilter` sits between a
rank's stderr and the output: it holds a report until it is complete, drops internal frames, and
prints one line if another rank has reported the same.

Nothing is lost by holding: a report is released when the stream ends, after `QUIET_PERIOD`
seconds without another line, when the process writes to stdout, or `MAX_HOLD` seconds after it
began. Lines that belong to no report pass at once.

A traceback need not end a rank: it may be logged, with other lines after it, which cannot be
told from a message of several lines. So where a report repeats that of another rank, only lines
up to the one that names the exception are dropped. Only phalanx errors have known lines after
that: what each rank was doing.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from .._formatting import PACKAGE_ROOT, mask_rank
from ..errors import _STATE_TEXTS

QUIET_PERIOD = 0.5
"""Seconds without a further line after which a report counts as complete."""
MAX_HOLD = 3.0
"""Seconds after which a report is shown, complete or not."""
MAX_HELD_LINES = 5000
"""A report of more lines is shown unchanged."""
TAIL_LINES = 30
"""How many lines outside of reports are kept as the final output of a process."""
_MAX_SUMMARY_LINES = 20  # lines of frames and of the message that the final report repeats

_HEADER = "Traceback (most recent call last):"
_USAGE = "usage: "
_LINKS = (
    "During handling of the above exception, another exception occurred:",
    "The above exception was the direct cause of the following exception:",
)
_STARTS = (_HEADER.encode(), _USAGE.encode())
_ERROR_PREFIX = "phalanx.errors."
_TORCH_PATHS = ("/site-packages/torch/", "/dist-packages/torch/")
_FILE = re.compile(r'  File "(?P<path>[^"]*)", line ')
_USAGE_ERROR = re.compile(r"\S.*: error: ")
_EXCEPTION = re.compile(r"[^\s:]+(:|$)")
_RANK_STATE_LINE = re.compile(
    rf"  rank \d+(: ({'|'.join(map(re.escape, _STATE_TEXTS.values()))})(,|$)| never arrived$"
    r"| arrived at use \d)"
)
_FINAL_REPORT_STARTS = (_HEADER, "Fatal Python error")


@dataclass
class _ChainedException:
    """One exception of a chain: its traceback and its message."""

    link: str = ""
    """The sentence between it and the exception before it."""
    header: str = _HEADER
    frames: list[list[str]] = field(default_factory=list)
    message: list[str] = field(default_factory=list)
    """The line that names the exception, and the lines after it."""

    @property
    def is_ours(self) -> bool:
        return self.message[0].startswith(_ERROR_PREFIX)

    @property
    def length(self) -> int:
        """The number of lines that certainly belong to the message."""
        if not self.header:
            return len(self.message)
        place = 1
        while self.is_ours and self.message[place:] and _RANK_STATE_LINE.match(self.message[place]):
            place += 1
        return place

    @property
    def is_internal(self) -> bool:
        """Whether no frame is user code."""
        return all(_is_internal(frame) for frame in self.frames)

    def without_internal_frames(self) -> tuple[list[list[str]], int]:
        """Return the frames to show and the number of hidden ones."""
        if not self.is_ours or self.is_internal:
            return self.frames, 0
        kept = [frame for frame in self.frames if not _is_internal(frame)]
        return kept, len(self.frames) - len(kept)


@dataclass
class _ErrorReport:
    """A chain of exceptions, or a usage error, which has a message only."""

    parts: list[_ChainedException]

    @property
    def is_whole(self) -> bool:
        """Whether each part ends in an exception line; another thread may have interleaved."""
        return all(not part.header or _EXCEPTION.match(part.message[0]) for part in self.parts)

    @property
    def kind(self) -> str:
        first = self.parts[-1].message[0]
        return "usage error" if first.startswith(_USAGE) else first.partition(":")[0]

    def shortened(self) -> _ErrorReport:
        """Drop internal frames, and internal exceptions that led to a phalanx error."""
        kept: list[_ChainedException] = []
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
        return _ErrorReport(kept)

    def lines(self, *, most: int | None = None) -> list[str]:
        return [line for part in self.parts for line in _exception_lines(part, most)]

    def trailing_lines(self) -> list[str]:
        """Return the lines after the report; some may belong to its message."""
        last = self.parts[-1]
        return last.message[last.length :]

    def identity(self, rank: int | None) -> tuple[str, ...]:
        """Return the lines that are equal on two ranks that report the same error.

        For phalanx errors these exclude the states of the ranks and, with a `rank`, the number of
        the rank that reports the error.
        """
        *before, last = self.parts
        lines = [line for part in before for line in _exception_identity(part, part.message, rank)]
        return (*lines, *_exception_identity(last, last.message[: last.length], rank))


def _exception_identity(
    part: _ChainedException, message: Sequence[str], rank: int | None
) -> Iterator[str]:
    yield part.link
    for frame in part.frames:
        yield from frame
    if part.is_ours:
        message = [mask_rank(each, rank) for each in message if not _RANK_STATE_LINE.match(each)]
    yield from message


def _exception_lines(part: _ChainedException, most: int | None) -> Iterator[str]:
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
    return path.startswith((PACKAGE_ROOT, "<frozen ")) or any(each in path for each in _TORCH_PATHS)


def _parse(lines: Sequence[str]) -> Iterator[_ErrorReport | str]:
    """Yield reports, and the lines between them."""
    place = 0
    while place < len(lines):
        if lines[place].startswith(_USAGE):
            end = _end_of_usage(lines, place)
            parts = [_ChainedException(header="", message=[*lines[place:end]])] if end else []
        else:
            end, parts = _parse_chain(lines, place)
        if parts:
            yield _ErrorReport(parts)
        else:
            end = place + 1
            yield lines[place]
        place = end


def _parse_chain(lines: Sequence[str], place: int) -> tuple[int, list[_ChainedException]]:
    """Return where a chain of exceptions that starts at a line ends, and its exceptions."""
    parts: list[_ChainedException] = []
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


def _parse_traceback(lines: Sequence[str], place: int) -> tuple[int, _ChainedException | None]:
    """Return where a traceback ends, and its exception; None if it is cut off."""
    part = _ChainedException()
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


def _end_of_usage(lines: Sequence[str], place: int) -> int:
    """Return where a usage error that starts at a line ends; 0 if there is none."""
    for end in range(place + 1, len(lines)):
        if _USAGE_ERROR.match(lines[end]):
            return end + 1
        if not _continues_usage(lines[end]):
            break
    return 0


def _continues_usage(line: str) -> bool:
    return not line[:1].strip()


class SeenErrorReports:
    """The error reports of all ranks in one attempt."""

    def __init__(self) -> None:
        self._first: dict[tuple[str, ...], int | None] = {}

    def shown(self, report: _ErrorReport, rank: int | None) -> list[str]:
        """Return the whole report, or one line if another rank has reported the same."""
        if rank is None or not report.is_whole:
            return report.lines()
        # Most errors name the rank they are on; errors that list all ranks are equal everywhere.
        keys = report.identity(None), report.identity(rank)
        first = next((self._first[key] for key in keys if key in self._first), rank)
        for key in keys:
            self._first.setdefault(key, rank)
        if first == rank:
            return report.lines()
        return [f"(the same {report.kind} as on rank {first})", *report.trailing_lines()]


class ErrorReportFilter:
    """Holds, shortens and deduplicates the error reports on one process's stderr."""

    def __init__(
        self,
        seen: SeenErrorReports,
        rank: int | None,
        *,
        labelled: bool = True,
        full: bool = False,
        quiet_period: float = QUIET_PERIOD,
        max_hold: float = MAX_HOLD,
    ) -> None:
        self._seen = seen
        self._rank = rank
        self._full = full
        self._quiet_period = quiet_period
        self._max_hold = max_hold
        # torch prefixes each line of a traceback with the rank, as the launcher does.
        self._torch_label = f"[rank{rank}]:"
        self._keeps_label = not labelled
        self._held: list[str] = []
        self._is_complete = False
        self._has_label = False
        self._began = self._last = 0.0
        self._last_report: list[str] = []
        self._tail: deque[bytes] = deque(maxlen=TAIL_LINES)
        """The lines after the last report."""

    @property
    def is_holding(self) -> bool:
        return bool(self._held)

    @property
    def may_be_complete(self) -> bool:
        """Whether the held lines may be a complete report, not one cut off between frames."""
        return self._is_complete

    def due(self) -> float:
        """Return when the held lines must be shown, on the clock of `feed`."""
        at_latest = self._began + self._max_hold
        return min(self._last + self._quiet_period, at_latest) if self._is_complete else at_latest

    def final_output(self) -> list[str]:
        """Return the last report and the lines after it, or the last lines."""
        tail = [line.decode(errors="replace") for line in self._tail]
        starts = [place for place, line in enumerate(tail) if line.startswith(_FINAL_REPORT_STARTS)]
        if self._last_report and not starts:
            return [*self._last_report, *tail]
        return tail[starts[-1] if starts else 0 :]

    def feed(self, lines: Sequence[bytes], now: float) -> list[bytes]:
        """Add finished lines and return those that can be shown now."""
        shown: list[bytes] = []
        for line in lines:
            text = self._strip_torch_label(line)
            is_labelled = text is not line
            if self._held and not self._continues(text, is_labelled=is_labelled):
                shown += self.release()
            if self._held or (text.startswith(_STARTS) and not self._full):
                self._hold(text, now, is_labelled=is_labelled)
                if len(self._held) > MAX_HELD_LINES or self._is_whole_usage():
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

    def _continues(self, line: bytes, *, is_labelled: bool) -> bool:
        if line.strip() and is_labelled != self._has_label:
            return False
        text = line.decode(errors="surrogateescape")
        return (
            not self._held[0].startswith(_USAGE)
            or _continues_usage(text)
            or _USAGE_ERROR.match(text) is not None
        )

    def _is_whole_usage(self) -> bool:
        return self._held[0].startswith(_USAGE) and bool(_end_of_usage(self._held, 0))

    def release(self) -> list[bytes]:
        """Return the held lines, shortened."""
        held, self._held = self._held, []
        shown: list[str] = []
        for item in _parse(held):
            if isinstance(item, str):
                self._remember(_bytes(item))
                shown.append(item)
            else:
                short = item.shortened()
                words = short.lines(most=_MAX_SUMMARY_LINES)
                self._last_report = [_bytes(line).decode(errors="replace") for line in words]
                self._tail.clear()
                shown += self._seen.shown(short, self._rank)
        if self._has_label and self._keeps_label:
            shown = [f"{self._torch_label} {line}" if line else line for line in shown]
        return [*map(_bytes, shown)]

    def _remember(self, line: bytes) -> None:
        if len(self._tail) == TAIL_LINES:
            self._last_report = []  # too many lines after it: it did not end the process
        self._tail.append(line)

    def _strip_torch_label(self, line: bytes) -> bytes:
        label = self._torch_label.encode()
        return line[len(label) :].removeprefix(b" ") if line.startswith(label) else line


def _bytes(line: str) -> bytes:
    return line.encode(errors="surrogateescape")
