"""Results as text: for a terminal of 100 columns, or in Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from .results import CaseResult, EntryResult, Results, Verdict
from .stats import Compare, Spread

__all__ = ["render"]

_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))
BUSY = 0.2
"""How many cores others may use before the reader is warned."""

Row = Sequence[str]


def render(results: Results, *, markdown: bool = False) -> str:
    """Write results down for people."""
    parts = [_head(results)]
    for entry in results.entries:
        rows = [row for result in entry.cases for row in _rows(entry, result)]
        table = _markdown if markdown else _columns
        mark = "### " if markdown else ""
        parts += [f"{mark}{entry.name}: {entry.title}", table(_header(entry), rows), _notes(entry)]
    return "\n\n".join(part for part in parts if part)


def seconds(value: float, *, signed: bool = False) -> str:
    """Write a time with three digits: ``12.3 µs``."""
    sign = "-" if value < 0 else "+" if signed else ""
    size = abs(value)
    scale, unit = next((u for u in _UNITS if size >= u[0]), _UNITS[-1])
    return f"{sign}{_digits(size / scale)} {unit}"


def _digits(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _head(results: Results) -> str:
    machine = results.machine
    busy = " (busy)" if machine.load > machine.cores / 2 else ""
    return (
        f"{machine.cpu}, {machine.cores} cores, {machine.system}, Python {machine.python}, "
        f"torch {machine.torch}\n{machine.date}, load average before: {machine.load:.2f}{busy}"
    )


# -- tables ------------------------------------------------------------------------------------


def _header(entry: EntryResult) -> Row:
    words = {
        Compare.ADDED: f"added to {entry.peer} (95%)",
        Compare.COST: f"x the time of {entry.peer} (95%)",
        Compare.SPEED: f"x the speed of {entry.peer} (95%)",
    }
    labels = list(entry.cases[0].case.labels)
    against = [words[entry.compare]] if entry.peer is not None else []
    return [*labels, "competitor", "per call (middle half)", *against]


def _rows(entry: EntryResult, result: CaseResult) -> list[Row]:
    labels = [str(value) for value in result.case.labels.values()]
    against = result.against(entry.peer, entry.compare)
    rows: list[Row] = []
    for name, time in result.times().items():
        told = f"{seconds(time.median)} ({_between(time)})"
        compared = [_against(entry.compare, against.get(name))] if entry.peer is not None else []
        rows.append([*labels, name, told, *compared])
        labels = [""] * len(labels)  # once for each case is enough
    return rows


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
    notes = [
        f"aim at {_where(result)}: {_judged(entry, verdict)}"
        for result in entry.cases
        for verdict in entry.verdicts(result)
    ]
    rounds = {time.count for result in entry.cases for time in result.times().values()}
    threads = {result.threads for result in entry.cases}
    notes.append(f"rounds: {_each(rounds)}, threads per rank: {_each(threads)}")
    others = [result.others for result in entry.cases if result.others is not None]
    if others:
        warning = ": a busy machine" if max(others) > BUSY else ""
        notes.append(f"cores that others used: {min(others)} to {max(others)}{warning}")
    return "\n".join(f"- {note}" for note in notes)


def _each(numbers: set[int]) -> str:
    return " or ".join(map(str, sorted(numbers)))


def _where(result: CaseResult) -> str:
    return ", ".join(f"{name} {value}" for name, value in result.case.labels.items())


def _judged(entry: EntryResult, verdict: Verdict) -> str:
    aim = verdict.aim
    is_time = entry.peer is None or entry.compare is Compare.ADDED
    write = seconds if is_time else _digits
    bound = (
        f"≤ {write(aim.at_most)}" if aim.at_most is not None else f"≥ {write(aim.at_least or 0)}"
    )
    how = "met" if verdict.met else f"missed by {write(-verdict.slack)}"
    return f"{aim.competitor} {bound}: {how}{'' if verdict.sure else ' (may be chance)'}"
