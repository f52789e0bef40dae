"""Results as text: for a terminal of 100 columns, or in Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from .entry import Aim
from .machine import Machine
from .results import CaseResult, EntryResult, Results, Verdict
from .stats import Compare, Spread

__all__ = ["BUSY", "entry_text", "machine_line", "render", "seconds", "size", "table", "volume"]

_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))
BUSY = 0.2
"""How many cores others may use before the reader is warned."""

_AGAINST = {
    Compare.ADDED: "added to {}",
    Compare.COST: "x the time of {}",
    Compare.SPEED: "x the speed of {}",
}

Row = Sequence[str]


def render(results: Results, *, markdown: bool = False) -> str:
    """Write results down for people."""
    parts = [machine_line(results.machine)]
    for entry in results.entries:
        mark = "### " if markdown else ""
        parts += [f"{mark}{entry.name}: {entry.title}", entry_text(entry, markdown=markdown)]
    return "\n\n".join(parts)


def entry_text(entry: EntryResult, *, markdown: bool = False) -> str:
    """Write down what one entry has found: the times, the aims, what to know about them."""
    times = [row for result in entry.cases for row in _rows(entry, result)]
    parts = [table(_header(entry), times, markdown=markdown)]
    if aims := [row for result in entry.cases for row in _aim_rows(entry, result)]:
        header = [*_labels(entry), "aim", "found (95%)", "verdict"]
        parts.append(table(header, aims, markdown=markdown))
    return "\n\n".join([*parts, _notes(entry)])


def seconds(value: float, *, signed: bool = False) -> str:
    """Write a time with three digits: ``12.3 µs``."""
    sign = "-" if value < 0 else "+" if signed else ""
    size = abs(value)
    scale, unit = next((u for u in _UNITS if size >= u[0]), _UNITS[-1])
    return f"{sign}{_digits(size / scale)} {unit}"


def _digits(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def size(count: int) -> str:
    """Write a number of bytes as people say it: ``25 MiB``."""
    for scale, unit in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if count and count % scale == 0:
            return f"{count // scale} {unit}"
    return f"{count} B"


def volume(count: int) -> str:
    """Write a number of bytes with three digits: ``96.1 MiB``."""
    for scale, unit in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if count >= scale:
            return f"{_digits(count / scale)} {unit}"
    return f"{count} B"


def machine_line(machine: Machine) -> str:
    """Write down where and when it was measured."""
    busy = " (busy)" if machine.load > machine.cores / 2 else ""
    return (
        f"{machine.cpu}, {machine.cores} cores, {machine.system}, Python {machine.python}, "
        f"torch {machine.torch}\n{machine.date}, load average before: {machine.load:.2f}{busy}"
    )


# -- tables ------------------------------------------------------------------------------------


def _header(entry: EntryResult) -> Row:
    against = (
        [f"{_AGAINST[entry.compare].format(entry.peer)} (95%)"] if entry.peer is not None else []
    )
    sent = ["sent"] if _counts(entry) else []
    return [*_labels(entry), "competitor", "per call (middle half)", *against, *sent]


def _counts(entry: EntryResult) -> bool:
    """Tell whether bytes were counted."""
    return any(result.sent for result in entry.cases)


def _labels(entry: EntryResult) -> list[str]:
    return list(entry.cases[0].case.labels)


def _label_cells(result: CaseResult, rows: int) -> list[Row]:
    """Write down the parameters once for each case, which is enough."""
    labels = [
        size(value) if name == "bytes" and isinstance(value, int) else str(value)
        for name, value in result.case.labels.items()
    ]
    return [labels, *([""] * len(labels) for _ in range(rows - 1))]


def _rows(entry: EntryResult, result: CaseResult) -> list[Row]:
    against = result.against(entry.peer, entry.compare)
    times = result.times()
    rows: list[Row] = []
    for labels, (name, time) in zip(_label_cells(result, len(times)), times.items(), strict=True):
        told = f"{seconds(time.median)} ({_between(time)})"
        compared = [_against(entry.compare, against.get(name))] if entry.peer is not None else []
        sent = [_sent(result, name)] if _counts(entry) else []
        rows.append([*labels, name, told, *compared, *sent])
    return rows


def _sent(result: CaseResult, name: str) -> str:
    return volume(result.sent[name]) if name in result.sent else ""


def _aim_rows(entry: EntryResult, result: CaseResult) -> list[Row]:
    judged = [_judged(verdict) for verdict in entry.verdicts(result)]
    for aim in entry.unjudged(result):
        missing = sorted(entry.concerned(aim) - result.samples.keys())
        peer, how = aim.against or entry.peer, aim.compare or entry.compare
        judged.append([_bound(aim, peer, how), "", f"no {' and no '.join(missing)} here"])
    if not judged:
        return []
    cells = _label_cells(result, len(judged))
    return [[*labels, *rest] for labels, rest in zip(cells, judged, strict=True)]


def _judged(verdict: Verdict) -> Row:
    if verdict.peer is None:
        found = f"{seconds(verdict.found.median)} ({_between(verdict.found)})"
    else:
        found = _against(verdict.compare, verdict.found)
    how = "met" if verdict.met else "missed"
    sure = "" if verdict.sure else ", not sure"
    return [_bound(verdict.aim, verdict.peer, verdict.compare), found, f"{how}{sure}"]


def _bound(aim: Aim, peer: str | None, how: Compare) -> str:
    is_time = peer is None or how is Compare.ADDED
    write = seconds if is_time else _digits
    bound = (
        f"≤ {write(aim.at_most)}" if aim.at_most is not None else f"≥ {write(aim.at_least or 0)}"
    )
    if peer is None:
        return f"{aim.competitor} {bound}"
    return f"{aim.competitor} {bound} {_AGAINST[how].format(peer)}"


def _between(spread: Spread, *, signed: bool = False) -> str:
    low, high = seconds(spread.low, signed=signed), seconds(spread.high, signed=signed)
    same_unit = low.split()[1] == high.split()[1]
    return f"{low.split()[0] if same_unit else low} to {high}"


def _against(how: Compare, spread: Spread | None) -> str:
    if spread is None:
        return ""
    if how is Compare.ADDED:
        return f"{seconds(spread.median, signed=True)} ({_between(spread, signed=True)})"
    return f"{_digits(spread.median)} ({_digits(spread.low)} to {_digits(spread.high)})"


def table(header: Row, rows: Sequence[Row], *, markdown: bool = False) -> str:
    """Write rows under a header."""
    return _markdown(header, rows) if markdown else _columns(header, rows)


def _columns(header: Row, rows: Sequence[Row]) -> str:
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    rule = ["-" * width for width in widths]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in (header, rule, *rows)
    ]
    return "\n".join(lines)


def _markdown(header: Row, rows: Sequence[Row]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in (header, ["---"] * len(header), *rows))


# -- what to know about them -------------------------------------------------------------------


def _notes(entry: EntryResult) -> str:
    rounds = {time.count for result in entry.cases for time in result.times().values()}
    threads = {result.threads for result in entry.cases}
    notes = [f"rounds: {_each(rounds)}, threads per rank: {_each(threads)}"]
    others = [result.others for result in entry.cases if result.others is not None]
    if others:
        warning = ": a busy machine" if max(others) > BUSY else ""
        notes.append(f"cores that others used: {min(others)} to {max(others)}{warning}")
    if _counts(entry):
        notes.append("sent: bytes per call over TCP, counted, by the rank that sends most")
    absent = {name: why for result in entry.cases for name, why in result.absent.items()}
    notes += [f"{name} did not take part: {why}" for name, why in absent.items()]
    return "\n".join(f"- {note}" for note in notes)


def _each(numbers: set[int]) -> str:
    return " or ".join(map(str, sorted(numbers)))
