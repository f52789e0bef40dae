"""Runs programs in all modes, and judges what came of it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from .catalog import Launcher, Mode, Program, command, environment, in_rotation
from .programs.record import MARK

TIMEOUT = 180.0
WARM_UP = 3
"""Steps at the beginning whose times say nothing."""
_RAISED = re.compile(
    r"^(?:\[rank ?\d+\]:? ?)?(phalanx\.errors\.\w+|(?:\w+\.)*\w+(?:Error|Exception))(?::|$)",
    re.MULTILINE,
)


@dataclass
class Run:
    """What came of one launch."""

    status: int | None
    """The exit status; None after a timeout."""
    seconds: float
    records: dict[tuple[str, int], dict[str, Any]] = field(default_factory=dict)
    """By case and rank."""
    output: str = ""
    attempts: int = 1

    @property
    def failure(self) -> str:
        """How it failed, in a word or two; empty if it did not."""
        if self.status == 0:
            return ""
        if self.status is None:
            return f"no end after {TIMEOUT:.0f} s"
        names = [each for each in _RAISED.findall(self.output) if "ChildFailed" not in each]
        raised = names[-1].rpartition(".")[2] if names else ""
        if "SIGABRT" in self.output or self.status == -signal.SIGABRT:
            return "aborted"
        return raised or f"exit status {self.status}"


@dataclass
class Row:
    """A case of a program, in all its modes and rounds."""

    program: Program
    case: str
    runs: dict[Mode, list[Run]]

    def problem(self, mode: Mode) -> str:
        """Say what is wrong in a mode; empty if nothing is."""
        for run in self.runs[mode]:
            if self.case and self.case in {case for case, _ in run.records}:
                found = self._problem_of_case(mode, run)
            else:
                found = run.failure or ("" if not self.case else "reported nothing")
            if found:
                return found
        return ""

    def _problem_of_case(self, mode: Mode, run: Run) -> str:
        """A launch may fail after this case; its own record says whether the case is whole."""
        mine = [record for (case, _), record in sorted(run.records.items()) if case == self.case]
        if len(mine) != self.program.ranks or mine[0]["world"] != self.program.ranks:
            return f"{len(mine)} of {self.program.ranks} ranks, world size {mine[0]['world']}"
        if mine[0]["replicated"] and len({record["digest"] for record in mine}) > 1:
            return "ranks differ"
        if mode is Mode.DROP_IN:
            if mine[0]["group"] != "phalanx":
                return "backend not replaced"
            if self.program.has_ddp and mine[0]["ddp"] != "phalanx":
                return "DDP not replaced"
        if self.case == self.program.cases[-1]:
            return run.failure
        return ""

    def results(self, mode: Mode) -> list[dict[int, tuple[str, str]]]:
        """Return loss and digest by rank, of each run."""
        return [
            {
                rank: (record["loss"], record["digest"])
                for (case, rank), record in run.records.items()
                if case == self.case
            }
            for run in self.runs[mode]
        ]

    def difference(self, mode: Mode) -> str:
        """Say how results differ from those of torchrun and Gloo; empty if no bit does."""
        if not self.case or self.problem(mode) or self.problem(Mode.GLOO):
            return ""
        expected = self.results(Mode.GLOO)[0]
        for got in (*self.results(Mode.GLOO), *self.results(mode)):
            if got != expected:
                first = min(rank for rank in expected if got.get(rank) != expected[rank])
                losses = (float.fromhex(each[first][0]) for each in (expected, got))
                return "loss {:.9g} and {:.9g}, or parameters".format(*losses)
        return ""

    def step_times(self, mode: Mode) -> list[list[float]]:
        """Return the times of rank 0's steps, by run."""
        return [
            run.records[self.case, 0]["seconds"][WARM_UP:]
            for run in self.runs[mode]
            if (self.case, 0) in run.records
        ]

    def speedups(self, mode: Mode) -> list[float]:
        """Return how much faster steps are than with torchrun and Gloo, by round."""
        pairs = zip(self.step_times(Mode.GLOO), self.step_times(mode), strict=False)
        return [median(theirs) / median(ours) for theirs, ours in pairs]


def launch(program: Program, mode: Mode) -> Run:
    """Run a program once, in a folder of its own."""
    with tempfile.TemporaryDirectory(prefix="interop-") as folder:
        begin = time.monotonic()
        process = subprocess.Popen(
            command(program, mode),
            cwd=folder,
            env=environment(program, mode),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=TIMEOUT)
            status: int | None = process.returncode
        except subprocess.TimeoutExpired:
            status = None
            output = _end(process)
        run = Run(status, time.monotonic() - begin, output=output)
    for text in re.findall(f"{MARK}(\\{{.*\\}})", output):
        record = json.loads(text)
        run.records[record["case"], record["rank"]] = record
    return run


def _end(process: subprocess.Popen[str]) -> str:
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            return process.communicate(timeout=15)[0]
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue
    return ""


def attempt(program: Program, mode: Mode) -> Run:
    """Run a program; on Gloo, again if it was aborted.

    Gloo's threads now and then abort a process that is about to exit. That is not a result of
    the program, and a comparison needs one. With drop-in there is no second attempt.
    """
    run = launch(program, mode)
    if run.failure == "aborted" and mode is not Mode.DROP_IN:
        run = launch(program, mode)
        run.attempts = 2
    return run


def measure(programs: Sequence[Program], rounds: int, tell: Callable[[str], None]) -> Iterator[Row]:
    """Run programs in all their modes, in turn, and yield their cases."""
    for number, program in enumerate(programs):
        modes = program.launcher.modes
        runs: dict[Mode, list[Run]] = {mode: [] for mode in modes}
        for turn in range(rounds):
            for mode in in_rotation(modes, number + turn):
                tell(f"{describe(program)}: {mode}")
                runs[mode].append(attempt(program, mode))
        for case in program.cases or ("",):
            yield Row(program, case, runs)


def describe(program: Program) -> str:
    """Name a program and its launcher."""
    if program.launcher is Launcher.PHALANX:
        return program.title
    return f"{program.title}, launched by {program.launcher}"


def verdicts(rows: Sequence[Row]) -> Iterator[str]:
    """Yield what makes the whole run fail: a row that is worse than torch, or different.

    Where torch itself fails there is nothing to compare with; the table shows how each fails.
    """
    for row in rows:
        name = f"{describe(row.program)}: {row.case}" if row.case else describe(row.program)
        if row.case and (problem := row.problem(Mode.GLOO)):
            yield f"{name}: fails with torch itself: {problem}"
            continue
        if row.problem(Mode.GLOO):
            continue
        for mode in row.runs:
            if problem := row.problem(mode):
                yield f"{name}: fails with {mode}: {problem}"
            elif different := row.difference(mode):
                yield f"{name}: {mode} differs from torch: {different}"
