"""Whether drop-in is as fast as an edited script: the same steps in four jobs, in turn.

All jobs are up at the same time. One at a time runs a few steps, while the others wait in a read.
What else the machine does slows all of them alike, and each round gives one ratio per pair. Where
a process finds its memory can cost it some per cent for as long as it lives, so the rounds are
divided between several launches.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from benchmarks.stats import Compare, compare_pairs, quartiles

from .catalog import PROGRAMS, Mode, Program, command, environment

ROOT = Path(__file__).parents[1]
EDITED = "edited"
JOBS = (*(str(mode) for mode in Mode), EDITED)
RANKS = 2
CHUNK = 0.06
"""Seconds of steps at a time."""
AIM = 1.02
"""What drop-in may cost, as a multiple of the edited script."""
LAUNCHES = 6
_PATIENCE = 120.0


@dataclass
class Speed:
    """The samples of one model, by job: seconds per step, of the slowest rank."""

    model: str
    samples: dict[str, list[float]] = field(default_factory=dict)


class Job:
    """The ranks of one job."""

    def __init__(self, streams: Sequence[TextIO], models: list[str]) -> None:
        self._streams = streams
        self.models = models

    def ask(self, **order: Any) -> list[dict[str, Any]]:
        """Give all ranks an order and return their answers."""
        for stream in self._streams:
            stream.write(json.dumps(order) + "\n")
            stream.flush()
        return [json.loads(stream.readline()) for stream in self._streams]

    def run(self, steps: int) -> float:
        """Return the seconds per step."""
        return max(answer["seconds"] for answer in self.ask(steps=steps))


@contextmanager
def jobs() -> Iterator[dict[str, Job]]:
    """Launch all jobs and end them."""
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="interop-"))
        listener = stack.enter_context(socket.socket(socket.AF_UNIX))
        address = os.path.join(folder, "turns")
        listener.bind(address)
        listener.listen()
        listener.settimeout(_PATIENCE)
        processes = [stack.enter_context(_launch(name, address)) for name in JOBS]
        streams: dict[str, list[TextIO]] = {name: [] for name in JOBS}
        models: list[str] = []
        for _ in range(RANKS * len(JOBS)):
            link, _ = listener.accept()
            link.settimeout(_PATIENCE)
            stack.callback(link.close)
            stream = stack.enter_context(link.makefile("rw"))
            hello = json.loads(stream.readline())
            streams[hello["job"]].append(stream)
            models = hello["models"]
        yield {name: Job(streams[name], models) for name in JOBS}
        stack.pop_all().close()
        for process in processes:
            process.wait(timeout=_PATIENCE)


@contextmanager
def _launch(name: str, address: str) -> Iterator[subprocess.Popen[bytes]]:
    mode = Mode.RUN if name == EDITED else Mode(name)
    edited = ("--edited",) if name == EDITED else ()
    program = Program("", (str(PROGRAMS / "speed_steps.py"), address, name, *edited), ranks=RANKS)
    environ = {**environment(program, mode), "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command(program, mode), env=environ, stdout=sys.stderr)
    try:
        yield process
    except BaseException:
        process.terminate()
        raise


def measure(rounds: int, tell: Callable[[str], None]) -> list[Speed]:
    """Measure all models."""
    found: dict[str, Speed] = {}
    for launch in range(LAUNCHES):
        with jobs() as running:
            for model in running[EDITED].models:
                tell(f"speed: {model}, launch {launch + 1} of {LAUNCHES}")
                speed = found.setdefault(model, Speed(model, {name: [] for name in JOBS}))
                _measure_model(speed, running, -(-rounds // LAUNCHES))
    return list(found.values())


def _measure_model(speed: Speed, running: dict[str, Job], rounds: int) -> None:
    steps = {}
    for name, job in running.items():
        wrappers = {answer["ddp"] for answer in job.ask(model=speed.model)}
        expected = {"phalanx"} if name in (EDITED, Mode.DROP_IN) else {"torch"}
        assert wrappers == expected, f"{name}: DDP of {wrappers}, not {expected}"
        job.run(3)
        steps[name] = max(1, round(CHUNK / job.run(5)))
    for turn in range(rounds):
        for place in range(len(JOBS)):
            name = JOBS[(turn + place) % len(JOBS)]
            speed.samples[name].append(running[name].run(steps[name]))


def table(found: Sequence[Speed]) -> str:
    """Return the figures in Markdown."""
    head = ["model", *(f"{name}, ms" for name in JOBS), "drop-in vs. Gloo", "drop-in / edited"]
    head.append("within 2%")
    lines = [head, ["---"] * len(head)]
    for speed in found:
        own = speed.samples[Mode.DROP_IN]
        gain = compare_pairs(Compare.SPEED, own, speed.samples[Mode.GLOO])
        cost = compare_pairs(Compare.COST, own, speed.samples[EDITED])
        lines.append(
            [
                speed.model,
                *(f"{1e3 * quartiles(speed.samples[name]).median:.3g}" for name in JOBS),
                f"{gain.median:.2f} ({gain.low:.2f} to {gain.high:.2f})",
                f"{cost.median:.3f} ({cost.low:.3f} to {cost.high:.3f})",
                "yes" if cost.high <= AIM else "no" if cost.low > AIM else "not sure",
            ]
        )
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
