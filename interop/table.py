"""The tables of programs and modes, in Markdown, and their place in a page."""

from __future__ import annotations

import re
import resource
import time
from collections.abc import Sequence
from importlib.metadata import version
from statistics import median, quantiles
from textwrap import fill

from benchmarks.machine import Machine, busy_seconds

from .catalog import Launcher, Mode
from .runner import Row, Run

FRAMEWORKS = ("torch", "accelerate", "lightning", "transformers")


class Conditions:
    """Where figures come from, and how busy others kept the machine meanwhile."""

    def __init__(self) -> None:
        self._machine = Machine.here()
        self._begin = time.monotonic()
        self._busy = busy_seconds()
        self._own = _own_seconds()

    def describe(self) -> str:
        """Return two sentences, when all is measured."""
        text = _where(self._machine)
        busy = busy_seconds()
        if busy is not None and self._busy is not None:
            others = busy - self._busy - (_own_seconds() - self._own)
            cores = max(0.0, others) / (time.monotonic() - self._begin)
            text += f" Other programs used {cores:.2f} cores meanwhile."
        return fill(text, 118)


def _own_seconds() -> float:
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(each.ru_utime + each.ru_stime for each in used)


def _where(machine: Machine) -> str:
    versions = ", ".join(f"{name} {version(name)}" for name in FRAMEWORKS)
    day = machine.date.partition("T")[0]
    return (
        f"Measured on {day} with {versions}, Python {machine.python}, on {machine.cores} cores of "
        f"{machine.cpu}, one thread per rank."
    )


def reporting_table(rows: Sequence[Row]) -> str:
    """Return the table of programs that report losses and times."""
    columns = (f"{mode}, ms" for mode in Mode)
    head = ["program", "ranks", "launcher", *columns, "speedup", "result"]
    return _markdown(head, [_reporting_row(row) for row in rows])


def _reporting_row(row: Row) -> list[str]:
    times = [_times(row, mode) if mode in row.runs else "-" for mode in Mode]
    return [
        row.case,
        str(row.program.ranks),
        _launcher(row),
        *times,
        _speedup(row),
        _result(row),
    ]


def _launcher(row: Row) -> str:
    launcher = row.program.launcher
    return row.program.framework if launcher is Launcher.SCRIPT else f"`{launcher}`"


def _times(row: Row, mode: Mode) -> str:
    if problem := row.problem(mode):
        return f"**fails**: {problem}"
    steps = [1e3 * each for run in row.step_times(mode) for each in run]
    low, middle, high = quantiles(steps, method="inclusive")
    return f"{middle:.3g} ({low:.3g} to {high:.3g})"


def _speedup(row: Row) -> str:
    found = [] if row.problem(Mode.DROP_IN) else row.speedups(Mode.DROP_IN)
    if not found:
        return "-"
    spread = f" ({min(found):.2f} to {max(found):.2f})" if len(found) > 1 else ""
    return f"{median(found):.2f}{spread}"


def gain(rows: Sequence[Row], framework: str) -> str:
    """Return one sentence about the speedups of a framework's programs, launched by us."""
    mine = [
        f"{row.case} {_speedup(row)}"
        for row in rows
        if row.program.framework == framework and row.program.launcher is Launcher.PHALANX
    ]
    return fill(f"Measured speedup of a step: {'; '.join(mine)}.", 118)


def _result(row: Row) -> str:
    if any(row.problem(mode) for mode in row.runs):
        return "-"
    differences = [mode for mode in row.runs if row.difference(mode)]
    return f"differs with {', '.join(differences)}" if differences else "same bits"


def script_table(rows: Sequence[Row]) -> str:
    """Return the table of scripts that only have an exit status."""
    head = ["script", *(str(mode) for mode in Mode)]
    return _markdown(
        head,
        [[f"`{row.program.title}`", *(_outcome(row.runs[mode]) for mode in Mode)] for row in rows],
    )


def _outcome(runs: Sequence[Run]) -> str:
    failures = [run.failure for run in runs if run.failure]
    if failures:
        return f"fails: {failures[0]}"
    again = ", in the second attempt" if any(run.attempts > 1 for run in runs) else ""
    return f"passes in {median(run.seconds for run in runs):.1f} s{again}"


def _markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def refresh(page: str, name: str, text: str) -> str:
    """Replace what stands between the marks of a name."""
    begin, end = f"<!-- interop: {name} -->", "<!-- end of interop -->"
    place = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
    if not place.search(page):
        raise ValueError(f"the page has no mark {begin}")
    return place.sub(lambda _: f"{begin}\n{text}\n\n{end}", page)
