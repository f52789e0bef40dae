"""Whether drop-in is as fast as an edited script: the same steps in several jobs, in turn.

All jobs are up at the same time. One at a time runs a few steps, while the others wait in a read.
What else the machine does slows all of them equally. Where a process finds its memory can cost it
some per cent for as long as it lives, so two launches of the same script differ by more than the
question is about. A launch therefore counts as one sample, however many rounds it has, and starts
two copies of each script that is compared. Two copies of the edited script are compared with each
other, too: that ratio is 1, and its interval shows what such a measurement can tell.
"""

from __future__ import annotations

import json
import os
import random
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any, TextIO

from benchmarks.stats import Compare, Spread, compare_pairs, sure_median

from .catalog import PROGRAMS, Mode, Program, command, environment

ROOT = Path(__file__).parents[1]
EDITED = "edited"
SCRIPTS = (*(str(mode) for mode in Mode), EDITED)
COPY = " (copy)"
JOBS = (*SCRIPTS, Mode.DROP_IN + COPY, EDITED + COPY)
RANKS = 2
CHUNK = 0.06
"""Seconds of steps at a time."""
AIM = 1.02
"""What drop-in may cost, as a multiple of the edited script."""
ROUNDS = 4
"""Turns of every job in a launch."""
_PATIENCE = 120.0


@dataclass
class Speed:
    """The seconds per step of one model, of the slowest rank: by job, one sample per launch."""

    model: str
    samples: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in JOBS})

    def of_script(self, script: str) -> list[float]:
        """Return the samples of a script, those of its copies averaged launch by launch."""
        copies = [self.samples[name] for name in JOBS if name.removesuffix(COPY) == script]
        return [geometric_mean(each) for each in zip(*copies, strict=True)]


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
def jobs(order: Sequence[str]) -> Iterator[dict[str, Job]]:
    """Launch all jobs, in some order, and end them."""
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="interop-"))
        listener = stack.enter_context(socket.socket(socket.AF_UNIX))
        address = os.path.join(folder, "turns")
        listener.bind(address)
        listener.listen()
        listener.settimeout(_PATIENCE)
        processes = [stack.enter_context(_launch(name, address)) for name in order]
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
    script = name.removesuffix(COPY)
    mode = Mode.RUN if script == EDITED else Mode(script)
    edited = ("--edited",) if script == EDITED else ()
    program = Program("", (str(PROGRAMS / "speed_steps.py"), address, name, *edited), ranks=RANKS)
    environ = {**environment(program, mode), "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command(program, mode), env=environ, stdout=sys.stderr)
    try:
        yield process
    except BaseException:
        process.terminate()
        raise


def measure(launches: int, tell: Callable[[str], None]) -> list[Speed]:
    """Measure all models."""
    rng = random.Random(0)
    found: dict[str, Speed] = {}
    for launch in range(launches):
        tell(f"speed: launch {launch + 1} of {launches}")
        with jobs(rng.sample(JOBS, len(JOBS))) as running:
            models = running[EDITED].models
            for model in rng.sample(models, len(models)):
                speed = found.setdefault(model, Speed(model))
                for name, seconds in _measure_model(model, running, rng).items():
                    speed.samples[name].append(seconds)
    return [found[model] for model in models]


def _measure_model(model: str, running: dict[str, Job], rng: random.Random) -> dict[str, float]:
    """Return the seconds per step of each job in this launch."""
    steps = {}
    for name, job in running.items():
        wrappers = {answer["ddp"] for answer in job.ask(model=model)}
        script = name.removesuffix(COPY)
        expected = {"phalanx"} if script in (EDITED, Mode.DROP_IN) else {"torch"}
        assert wrappers == expected, f"{name}: DDP of {wrappers}, not {expected}"
        job.run(3)
        steps[name] = max(1, round(CHUNK / job.run(2)))
    samples: dict[str, list[float]] = {name: [] for name in JOBS}
    for _ in range(ROUNDS):
        for name in rng.sample(JOBS, len(JOBS)):
            running[name].run(1)  # brings its memory back into the cache
            samples[name].append(running[name].run(steps[name]))
    return {name: median(each) for name, each in samples.items()}


def table(found: Sequence[Speed]) -> str:
    """Return the figures in Markdown."""
    head = ["model", *(f"{name}, ms" for name in SCRIPTS), "drop-in vs. Gloo", "drop-in / edited"]
    head += ["edited / edited", "within 2%"]
    lines = [head, ["---"] * len(head)]
    for speed in found:
        own, edited = speed.of_script(Mode.DROP_IN), speed.of_script(EDITED)
        gain = compare_pairs(Compare.SPEED, own, speed.of_script(Mode.GLOO))
        cost = compare_pairs(Compare.COST, own, edited)
        noise = compare_pairs(Compare.COST, speed.samples[EDITED], speed.samples[EDITED + COPY])
        lines.append(
            [
                speed.model,
                *(f"{1e3 * median(speed.of_script(name)):.3g}" for name in SCRIPTS),
                f"{gain.median:.2f} ({gain.low:.2f} to {gain.high:.2f})",
                _ratio(cost),
                _ratio(noise),
                "yes" if cost.high <= AIM else "no" if cost.low > AIM else "not sure",
            ]
        )
    if len(found) > 1:
        ratios = (
            [
                a / b
                for a, b in zip(each.of_script(Mode.DROP_IN), each.of_script(EDITED), strict=True)
            ]
            for each in found
        )
        overall = sure_median([geometric_mean(each) for each in zip(*ratios, strict=True)])
        lines.append(["all models", *[""] * (len(SCRIPTS) + 1), _ratio(overall), "", ""])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _ratio(spread: Spread) -> str:
    return f"{spread.median:.3f} ({spread.low:.3f} to {spread.high:.3f})"
