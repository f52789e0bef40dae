"""`phalanx doctor`: look at this machine, let two ranks add numbers, and say what is wrong."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import click

from . import run
from ._checks import CHECKS, Finding, look
from ._outcome import Outcome, describe

__all__ = ["Examination", "examine", "render", "render_json"]

DEADLINE = 60.0
"""Seconds that the self-test may take."""
_OK, _NOTE, _WRONG = (
    click.style(f"{word:<5}", fg=colour)
    for word, colour in (("ok", "green"), ("note", "yellow"), ("WRONG", "red"))
)
_HEADINGS = ("backend", "ranks", "latency", "bandwidth at 4 MiB")


@dataclass(frozen=True)
class Measurement:
    """How fast one backend is between two ranks."""

    backend: str
    ranks: str
    latency_us: float
    bandwidth_gb_per_s: float


@dataclass(frozen=True)
class Examination:
    """Everything that was found."""

    findings: Sequence[Finding]
    measurements: Sequence[Measurement]

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return all(finding.ok for finding in self.findings)


def examine(*, deadline: float = DEADLINE) -> Examination:
    """Run all checks, then the self-test."""
    findings = [look(check) for check in CHECKS]
    verdict, measurements = self_test(deadline=deadline)
    return Examination([*findings, verdict], measurements)


def self_test(*, deadline: float) -> tuple[Finding, list[Measurement]]:
    """Start two ranks, as any script's are, and collect what they measure."""
    out, err = io.BytesIO(), io.BytesIO()
    outcome = run(
        "phalanx.launch._selftest",
        [str(deadline)],
        ranks=2,
        module=True,
        prefix=False,
        stdout=out,
        stderr=err,
        check=False,
    )
    if outcome.signal is not None:
        raise KeyboardInterrupt
    lines = [line for line in out.getvalue().splitlines() if line.startswith(b"{")]
    measurements = [Measurement(**json.loads(line)) for line in lines]
    return _verdict(outcome), measurements


def render(examination: Examination) -> str:
    """Return an examination for people to read."""
    width = max(len(finding.label) for finding in examination.findings)
    lines = [_line(finding, width) for finding in examination.findings]
    if examination.measurements:
        lines += ["", *_table(examination.measurements)]
    wrong = sum(not finding.ok for finding in examination.findings)
    verdict = (
        f"{wrong} of {len(examination.findings)} findings need care" if wrong else "all is well"
    )
    return "\n".join([*lines, "", verdict])


def render_json(examination: Examination) -> str:
    """Return an examination for programs to read."""
    return json.dumps({"ok": examination.ok, **asdict(examination)}, indent=2)


def _verdict(outcome: Outcome) -> Finding:
    if outcome.exit_code == 0:
        return Finding(True, "self-test", "two ranks met, agreed on a sum, and ended")
    advice = "correct what is wrong above, then see what the traceback says"
    return Finding(False, "self-test", describe(outcome), advice)


def _line(finding: Finding, width: int) -> str:
    mark = _NOTE if finding.ok and finding.advice else _OK if finding.ok else _WRONG
    margin = " " * (width + 9)
    detail = finding.detail.replace("\n", "\n" + margin)
    line = f"{mark}  {finding.label:<{width}}  {detail}"
    return f"{line}\n{margin}-> {finding.advice}" if finding.advice else line


def _table(measurements: Sequence[Measurement]) -> list[str]:
    rows = [_HEADINGS] + [
        (each.backend, each.ranks, f"{each.latency_us:g} us", f"{each.bandwidth_gb_per_s:g} GB/s")
        for each in measurements
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
