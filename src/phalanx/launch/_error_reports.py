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
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain

from .._formatting import PACKAGE_ROOT, format_count, mask_rank
from ..errors import RANK_STATE_TEXTS

QUIET_PERIOD = 0.5  # seconds without a further line after which a report counts as complete
MAX_HOLD = 3.0  # seconds after which a report is shown, complete or not
MAX_HELD_LINES = 5000  # a report of more lines is shown unchanged
TAIL_LINES = 30  # lines outside of reports that are kept as the final output of a process
_MAX_SUMMARY_LINES = 20  # lines of frames and of the message that the final report repeats

_HEADER = "Traceback (most recent call last):"
_USAGE = "usage: "
_LINKS = {
    "During handling of the above exception, another exception occurred:",
    "The above exception was the direct cause of the following exception:",
}
_STARTS = (_HEADER.encode(), _USAGE.encode())
_ERROR_PREFIX = "phalanx.errors."
_TORCH_PATHS = ("/site-packages/torch/", "/dist-packages/torch/")
_FILE = re.compile(r'  File "(?P<path>[^"]*)", line ')
_USAGE_ERROR = re.compile(r"\S.*: error: ")
_EXCEPTION = re.compile(r"[^\s:]+(:|$)")
_RANK_STATE_LINE = re.compile(
    rf"  rank \d+(: ({'|'.join(map(re.escape, RANK_STATE_TEXTS.values()))})"
    r"(: | in | at | \(last call: |$)| never arrived$| arrived at use \d)"
)
_FINAL_REPORT_STARTS = (_HEADER, "Fatal Python error")


@dataclass
class _ChainedException:
    """One exception of a chain: its traceback and its message."""

    link: str = ""  # the sentence between it and the exception before it
    header: str = _HEADER
    frames: list[list[str]] = field(default_factory=list)
    # The line that names the exception, and the lines after it.
    message: list[str] = field(default_factory=list)

    @property
    def is_ours(self) -> bool:
        return self.message[0].startswith(_ERROR_PREFIX)

    @property
    def is_internal(self) -> bool:
        """Whether no frame is user code."""
        return all(map(_is_internal, self.frames))

    @property
    def length(self) -> int:
        """The number of lines that certainly belong to the message."""
        if not self.header:
            return len(self.message)
        index = 1
        while self.is_ours and self.message[index:] and _RANK_STATE_LINE.match(self.message[index]):
            index += 1
        return index


def _is_internal(frame: Sequence[str]) -> bool:
    found = _FILE.match(frame[0])
    path = found["path"] if found else ""
    return path.startswith((PACKAGE_ROOT, "<frozen ")) or any(each in path for each in _TORCH_PATHS)


class _ErrorReport:
    """A chain of exceptions, or a usage error, which has a message only.

    Internal frames are dropped, and internal exceptions that led to a phalanx error.
    """

    def __init__(self, chained: Sequence[_ChainedException]) -> None:
        self.parts: list[_ChainedException] = []
        for part in chained:
            if part.is_ours:
                while self.parts and self.parts[-1].is_internal:
                    part.link = self.parts.pop().link
            self.parts.append(part)
        for part in self.parts:
            if part.is_ours and not part.is_internal:
                kept = [frame for frame in part.frames if not _is_internal(frame)]
                if hidden := len(part.frames) - len(kept):
                    frames = format_count(hidden, "frame")
                    note = f"  ({frames} inside phalanx and torch; --full-tracebacks shows them)"
                    part.frames = [*kept, [note]]

    def lines(self, *, limit: int = sys.maxsize) -> list[str]:
        """Return the report, with at most `limit` lines of frames and of a message per part."""
        lines = []
        for part in self.parts:
            frames = [*chain(*part.frames)]
            lines += ["", part.link, ""] if part.link else []
            lines += [part.header] if part.header else []
            if len(frames) > limit:
                lines.append(f"  ({len(frames) - limit} lines not shown)")
            lines += [*frames[-limit:], *part.message[:limit]]
            if len(part.message) > limit:
                lines.append(f"  ({len(part.message) - limit} lines not shown)")
        return lines

    def identity(self, rank: int | None) -> tuple[str, ...]:
        """Return the lines that are equal on two ranks that report the same error.

        For phalanx errors these exclude the states of the ranks and, with a `rank`, the number of
        the rank that reports the error.
        """
        lines: list[str] = []
        for part in self.parts:
            message = part.message[: part.length] if part is self.parts[-1] else part.message
            if part.is_ours:
                message = [mask_rank(m, rank) for m in message if not _RANK_STATE_LINE.match(m)]
            lines += [part.link, *chain(*part.frames), *message]
        return tuple(lines)


def _parse(lines: Sequence[str]) -> Iterator[_ErrorReport | str]:
    """Yield reports, and the lines between them."""
    index = 0
    while index < len(lines):
        if lines[index].startswith(_USAGE):
            end = _end_of_usage(lines, index)
            parts = [_ChainedException(header="", message=[*lines[index:end]])] if end else []
        else:
            end, parts = _parse_chain(lines, index)
        yield _ErrorReport(parts) if parts else lines[index]
        index = end if parts else index + 1


def _parse_chain(lines: Sequence[str], index: int) -> tuple[int, list[_ChainedException]]:
    """Return where a chain of exceptions that starts at a line ends, and its exceptions."""
    parts: list[_ChainedException] = []
    end, link = index, ""
    while index < len(lines) and lines[index] == _HEADER:
        part = _ChainedException(link=link)
        index += 1
        while index < len(lines) and lines[index].startswith(" "):
            if lines[index].startswith("    ") and part.frames:
                part.frames[-1].append(lines[index])
            else:
                part.frames.append([lines[index]])
            index += 1
        if index == len(lines) or not lines[index]:
            break  # the traceback is cut off
        end = index + 1
        while end < len(lines) and lines[end] != _HEADER:
            if not lines[end] and not _LINKS.isdisjoint(lines[end + 1 : end + 2]):
                break
            end += 1
        part.message = [*lines[index:end]]
        parts.append(part)
        if end + 3 >= len(lines) or lines[end + 1] not in _LINKS:
            break
        link, index = lines[end + 1], end + 3
    return end, parts


def _end_of_usage(lines: Sequence[str], index: int) -> int:
    """Return where a usage error that starts at a line ends; 0 if there is none."""
    for end in range(index + 1, len(lines)):
        if _USAGE_ERROR.match(lines[end]):
            return end + 1
        if lines[end][:1].strip():
            break
    return 0


class ErrorReportFilter:
    """Holds, shortens and deduplicates the error reports on one process's stderr.

    `seen` has the first rank to report each error; the filters of one attempt share it.
    """

    def __init__(
        self,
        seen: dict[tuple[str, ...], int],
        rank: int | None,
        *,
        labelled: bool = True,
        full: bool = False,
        quiet_period: float = QUIET_PERIOD,
        max_hold: float = MAX_HOLD,
    ) -> None:
        self.held: list[str] = []
        self.may_be_complete = False
        """Whether the held lines may be a complete report, not one cut off between frames."""
        self._seen = seen
        self._rank = rank
        self._labelled = labelled
        self._full = full
        self._quiet_period = quiet_period
        self._max_hold = max_hold
        # torch prefixes each line of a traceback with the rank, as the launcher does.
        self._torch_label = f"[rank{rank}]:".encode()
        self._has_label = False
        self._began = 0.0
        self._last = 0.0
        self._last_report: list[str] = []
        self._tail: deque[bytes] = deque(maxlen=TAIL_LINES)  # the lines after the last report

    def due(self) -> float:
        """Return when the held lines must be shown, on the clock of `feed`."""
        at_latest = self._began + self._max_hold
        return (
            min(self._last + self._quiet_period, at_latest) if self.may_be_complete else at_latest
        )

    def final_output(self) -> list[str]:
        """Return the last report and the lines after it, or the last lines."""
        tail = [line.decode(errors="replace") for line in self._tail]
        starts = [index for index, line in enumerate(tail) if line.startswith(_FINAL_REPORT_STARTS)]
        if self._last_report and not starts:
            return [*self._last_report, *tail]
        return tail[starts[-1] if starts else 0 :]

    def feed(self, lines: Sequence[bytes], now: float) -> list[bytes]:
        """Add finished lines and return those that can be shown now."""
        shown: list[bytes] = []
        for line in lines:
            is_labelled = line.startswith(self._torch_label)
            data = line[len(self._torch_label) :].removeprefix(b" ") if is_labelled else line
            if self.held and not self._continues(data, is_labelled=is_labelled):
                shown += self.release()
            if not self.held:
                if self._full or not data.startswith(_STARTS):
                    self._remember(data)
                    shown.append(data if self._labelled else line)
                    continue
                self._began, self._has_label = now, is_labelled
            self._last = now
            text = data.decode(errors="surrogateescape")
            self.held.append(text)
            if text[:1].strip():
                self.may_be_complete = text != _HEADER and text not in _LINKS
            # The lines before this one are not a complete usage error: it would be released.
            is_usage = len(self.held) > 1 and self.held[0].startswith(_USAGE)
            ends_usage = is_usage and _USAGE_ERROR.match(text) is not None
            if ends_usage or len(self.held) > MAX_HELD_LINES:
                shown += self.release()
        return shown

    def _continues(self, line: bytes, *, is_labelled: bool) -> bool:
        if line.strip() and is_labelled != self._has_label:
            return False
        text = line.decode(errors="surrogateescape")
        is_usage = self.held[0].startswith(_USAGE)
        return not is_usage or not text[:1].strip() or _USAGE_ERROR.match(text) is not None

    def release(self) -> list[bytes]:
        """Return the held lines, shortened."""
        held, self.held = self.held, []
        shown: list[str] = []
        for item in _parse(held):
            if isinstance(item, str):
                self._remember(_bytes(item))
                shown.append(item)
            else:
                lines = item.lines(limit=_MAX_SUMMARY_LINES)
                self._last_report = [_bytes(line).decode(errors="replace") for line in lines]
                self._tail.clear()
                shown += self._deduplicated(item)
        if self._has_label and not self._labelled:
            label = self._torch_label.decode()
            shown = [f"{label} {line}" if line else line for line in shown]
        return [*map(_bytes, shown)]

    def _deduplicated(self, report: _ErrorReport) -> list[str]:
        """Return the whole report, or one line if another rank has reported the same."""
        rank = self._rank
        # Without an exception line another thread has written in between.
        is_whole = all(
            not part.header or _EXCEPTION.match(part.message[0]) for part in report.parts
        )
        if rank is None or not is_whole:
            return report.lines()
        # Most errors name the rank they are on; errors that list all ranks are equal everywhere.
        keys = report.identity(None), report.identity(rank)
        first = next((self._seen[key] for key in keys if key in self._seen), rank)
        for key in keys:
            self._seen.setdefault(key, rank)
        if first == rank:
            return report.lines()
        last = report.parts[-1]
        kind = last.message[0].partition(":")[0] if last.header else "usage error"
        return [f"(the same {kind} as on rank {first})", *last.message[last.length :]]

    def _remember(self, line: bytes) -> None:
        if len(self._tail) == TAIL_LINES:
            self._last_report = []  # too many lines after it: it did not end the process
        self._tail.append(line)


def _bytes(line: str) -> bytes:
    return line.encode(errors="surrogateescape")
