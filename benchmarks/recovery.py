"""Recovery from a killed worker, side by side: ``python -m benchmarks.recovery``.

A job of each system trains the same model on the same batches; a random worker is killed with
SIGKILL at a random time, several times. Workers log what they commit, with the wall clock
(`peers.commit_log`); `recovery_times` derives the figures from it. Systems take turns, in an order
drawn for every round. A job that hangs or ends is a failure and counts as such.

``phalanx, elastic`` is ``phalanx run --elastic``, and ``phalanx, standby`` the same with
``--standby``. ``phalanx, restart`` (``--max-restarts``) and ``torchrun`` restart all workers from a
checkpoint that is saved every 10 steps. ``torchft`` goes on without the lost worker; the seconds in
its name are the heartbeat timeout of its lighthouse.

A step has the same samples everywhere, but not the same work: `ElasticRun` makes a pass for each of
8 micro-batches, the others one pass per rank. So their steps without faults are not comparable.

The overhead of elastic runs while nothing fails is measured by ``python -m benchmarks
elastic_overhead`` and ``python -m benchmarks.memory``.
"""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import click

from .machine import Machine
from .page import replace_figures
from .peers.commit_log import WorkerLog
from .peers.settings import BATCH, MICRO_BATCHES, SAVE_INTERVAL, WIDTHS
from .recovery_jobs import ELASTIC, LAUNCHES, Failure, Job, System, find_systems, start_job
from .recovery_times import (
    Kill,
    Recovery,
    SampleCount,
    count_samples,
    recovery,
    step_times,
)
from .stats import percentile
from .table import machine_line, seconds, table

TITLE = "Recovery from a killed worker"
FORMAT = 1
START_TIMEOUT = 120.0
"""Until all ranks train."""
KILL_TIMEOUT = 90.0
"""Until a job has recovered from a kill and replaced the worker."""
SETTLED = 20
"""Steps that all ranks make before the next kill."""
QUIET = (3.0, 4.0)
"""Seconds between that and a kill: steps without faults are timed meanwhile. A standby takes about
as long until it is ready again."""


@dataclass(frozen=True)
class Run:
    """What one job has shown."""

    number: int
    round: int
    system: str
    model: str
    ranks: int
    recoveries: list[Recovery] = field(default_factory=list)
    """From each kill."""
    step: float | None = None
    """The median of a step without faults, in seconds."""
    samples: SampleCount | None = None
    failure: str | None = None


@dataclass(frozen=True)
class RecoveryResults:
    """All that one measurement has found."""

    machine: Machine
    runs: list[Run]
    micro_batch: dict[str, float]
    """Seconds of a micro-batch on a rank that is alone, without faults, by model."""
    absent: dict[str, str]
    """Which systems could not be measured, and why."""

    def to_json(self) -> str:
        """Return the results as JSON."""
        return json.dumps({"format": FORMAT, "name": "recovery", **asdict(self)}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> RecoveryResults:
        """Read what `to_json` wrote."""
        told = json.loads(text)
        if (told.get("format"), told.get("name")) != (FORMAT, "recovery"):
            raise click.UsageError(f"this is not a file of recovery times in format {FORMAT}")
        return cls(
            Machine(**told["machine"]),
            [_read_run(run) for run in told["runs"]],
            told["micro_batch"],
            told["absent"],
        )


def _read_run(told: dict[str, Any]) -> Run:
    recoveries = [Recovery(**each) for each in told.pop("recoveries")]
    samples = told.pop("samples")
    found = None if samples is None else SampleCount(**samples)
    return Run(**told, recoveries=recoveries, samples=found)


# -- measuring ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """What to measure."""

    systems: Sequence[System]
    models: Sequence[str]
    ranks: Sequence[int]
    rounds: int
    kills: int
    """For each job."""
    keep: Path | None = None
    """Where the logs of jobs that failed go."""

    def cases(self) -> Iterator[tuple[int, System, str, int]]:
        """Yield round, system, model and ranks: all systems in every round, in random order."""
        draw = random.Random(0)
        for turn in range(1, self.rounds + 1):
            for ranks in self.ranks:
                for model in self.models:
                    there = [each for each in self.systems if each.absent is None]
                    for system in draw.sample(there, len(there)):
                        yield turn, system, model, ranks


def measure(
    plan: Plan, tell: Callable[[str], None], save: Callable[[RecoveryResults], None]
) -> RecoveryResults:
    """Run all jobs of a plan; save what there is after each."""
    absent = {each.name: each.absent for each in plan.systems if each.absent is not None}
    results = RecoveryResults(Machine.here(), [], {}, absent)
    for model in plan.models:
        try:
            results.micro_batch[model] = time_micro_batch(model)
        except Failure as failure:
            tell(f"a rank alone, {model}, failed: {failure}")
    for number, (turn, system, model, ranks) in enumerate(plan.cases(), 1):
        tell(f"run {number}, round {turn}: {system.name}, {model}, {ranks} ranks")
        keep = None if plan.keep is None else plan.keep / str(number)
        run = measure_run(system, model, ranks, plan.kills, number=number, turn=turn, keep=keep)
        if run.failure is not None:
            tell(f"run {number} failed: {run.failure}")
        results.runs.append(run)
        save(results)
    return results


def measure_run(
    system: System,
    model: str,
    ranks: int,
    kills: int,
    *,
    number: int,
    turn: int,
    keep: Path | None = None,
) -> Run:
    """Start a job, kill one of its workers after the other, and stop it."""
    done: list[Kill] = []
    draw = random.Random(number)
    failure, job = None, None
    try:
        with start_job(system, ranks, ["--model", model], seed=number, keep=keep) as job:
            for _ in range(kills):
                _settle(job)
                time.sleep(draw.uniform(*QUIET))
                done.append(job.kill_one())
                _await_recovery(job, done[-1])
            _settle(job)
    except Failure as caught:
        failure = f"kill {len(done)}: {caught}"
    workers = [] if job is None else job.workers
    quiet = step_times(workers, ranks)
    return Run(
        number,
        turn,
        system.name,
        model,
        ranks,
        recoveries=[recovery(workers, kill) for kill in done],
        step=median(quiet) if quiet else None,
        samples=count_samples(workers, BATCH, ranks) if workers else None,
        failure=failure,
    )


def _settle(job: Job) -> None:
    job.await_(lambda workers: job.is_formed(workers, SETTLED), START_TIMEOUT, "steps of all ranks")


def _await_recovery(job: Job, kill: Kill) -> None:
    def has_step(workers: list[WorkerLog]) -> bool:
        return recovery(workers, kill).next_step is not None

    def is_complete(workers: list[WorkerLog]) -> bool:
        return recovery(workers, kill).is_complete

    job.await_(has_step, KILL_TIMEOUT, "next step")
    job.await_(is_complete, KILL_TIMEOUT, "step of the replacement")


def time_micro_batch(model: str, *, steps: int = 100) -> float:
    """Return the seconds of a micro-batch: a step of a rank that is alone, divided by their number.

    The optimizer is in it, so it is a little too long.
    """
    with start_job(ELASTIC, 1, ["--model", model, "--steps", str(steps)]) as job:
        job.wait(START_TIMEOUT)
        return median(step_times(job.workers, 1)) / MICRO_BATCHES


# -- tables ------------------------------------------------------------------------------------


def render(results: RecoveryResults, *, markdown: bool = False) -> str:
    """Return the tables and notes as text."""
    cases = _group(results.runs)
    times = ["next step", "99%", "worst", "replaced", "99%", "worst", "import"]
    keys = ["ranks", "model", "system"]
    return "\n\n".join(
        [
            table(
                [*keys, "kills", *times],
                [[*_key(key), *_time_cells(runs)] for key, runs in cases.items()],
                markdown=markdown,
            ),
            table(
                [*keys, "a step", "steps redone", "samples lost", "repeated", "failures"],
                [[*_key(key), *_loss_cells(runs)] for key, runs in cases.items()],
                markdown=markdown,
            ),
            _notes(results),
        ]
    )


Key = tuple[int, str, str]


def _group(runs: Sequence[Run]) -> dict[Key, list[Run]]:
    """Put the runs of a case together, systems in their usual order."""
    order = list(LAUNCHES)
    found: dict[Key, list[Run]] = {}
    for run in sorted(runs, key=lambda run: (run.ranks, run.model, order.index(run.system))):
        found.setdefault((run.ranks, run.model, run.system), []).append(run)
    return found


def _key(key: Key) -> list[str]:
    return [str(part) for part in key]


def _time_cells(runs: Sequence[Run]) -> list[str]:
    found = [each for run in runs for each in run.recoveries]
    steps = [each.next_step for each in found if each.next_step is not None]
    joins = [each.replacement for each in found if each.replacement is not None]
    imports = [each.import_torch for each in found if each.import_torch is not None]
    return [
        str(len(found)),
        *_spread_cells(steps),
        *_spread_cells(joins),
        seconds(median(imports)) if imports else "",
    ]


def _spread_cells(times: Sequence[float]) -> list[str]:
    if not times:
        return ["", "", ""]
    return [seconds(median(times)), seconds(percentile(times, 99)), seconds(max(times))]


def _loss_cells(runs: Sequence[Run]) -> list[str]:
    kills = sum(len(run.recoveries) for run in runs)
    counts = [run.samples for run in runs if run.samples is not None]
    steps = [run.step for run in runs if run.step is not None]
    failures = sum(run.failure is not None for run in runs)
    return [
        seconds(median(steps)) if steps else "",
        _per_kill(sum(each.steps_redone for each in counts), kills),
        _per_kill(sum(each.lost for each in counts), kills),
        _per_kill(sum(each.repeated for each in counts), kills),
        f"{failures} of {len(runs)} runs",
    ]


def _per_kill(total: int, kills: int) -> str:
    return "" if not kills else "0" if not total else f"{total / kills:.3g}"


def _notes(results: RecoveryResults) -> str:
    rounds = {run.round for run in results.runs}
    saves = f"checkpoints every {SAVE_INTERVAL} steps where there are any"
    notes = [
        f"rounds: {len(rounds)}; a step is {BATCH} samples; {saves}",
        "next step: from SIGKILL to the first step that is committed without the victim",
        "replaced: to the first step of the worker in its place, which imports torch before that",
        f"a step: phalanx makes {MICRO_BATCHES} passes, the others one per rank; not comparable",
        "steps redone, samples lost and repeated: per kill, in the steps that count in the end",
    ]
    for ranks in sorted({run.ranks for run in results.runs}):
        share = math.ceil(MICRO_BATCHES / ranks)
        for model, one in results.micro_batch.items():
            notes.append(
                f"{model}, {ranks} ranks: {share} micro-batches, what a rank loses at most, take "
                f"{seconds(share * one)} on one rank"
            )
    failed = [run for run in results.runs if run.failure is not None]
    notes += [f"run {run.number} ({run.system}) failed, {run.failure}" for run in failed]
    notes += [f"{name} was not measured: {why}" for name, why in results.absent.items()]
    return "\n".join(f"- {note}" for note in notes)


# -- the command line --------------------------------------------------------------------------


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Keep every time.")
@click.option("--quick", is_flag=True, help="See that it works; the figures mean nothing.")
@click.option("--rounds", default=10, type=click.IntRange(min=1), help="How many.")
@click.option("--kills", default=10, type=click.IntRange(min=1), help="In every run of a round.")
@click.option("--ranks", default=[2], multiple=True, type=click.IntRange(2, MICRO_BATCHES))
@click.option("--system", "systems", multiple=True, help="Only systems whose name contains this.")
@click.option("--model", "models", multiple=True, type=click.Choice(list(WIDTHS)))
@click.option("--keep", type=click.Path(path_type=Path), help="Keep the logs of runs that fail.")
@click.option("--markdown", is_flag=True, help="Write Markdown, to paste into a page.")
@click.option(
    "--docs",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="PAGE",
    help="Bring the figures of this page up to date.",
)
@click.option(
    "--show",
    type=click.Path(exists=True, path_type=Path),
    help="Show what --json kept, without measuring.",
)
@click.option(
    "--picture",
    type=click.Path(path_type=Path),
    metavar="SVG",
    help="Draw the loss of a run with kills, and measure nothing else.",
)
def main(
    *,
    json_path: Path | None,
    quick: bool,
    rounds: int,
    kills: int,
    ranks: tuple[int, ...],
    systems: tuple[str, ...],
    models: tuple[str, ...],
    keep: Path | None,
    markdown: bool,
    docs: Path | None,
    show: Path | None,
    picture: Path | None,
) -> None:
    """Kill workers of training jobs, and measure how the jobs recover."""
    if picture is not None:
        from .recovery_picture import draw, record

        try:
            draw(record(quick=quick, tell=_tell), picture)
        except Failure as failure:
            raise click.ClickException(str(failure)) from failure
        return
    if docs is not None and quick:
        raise click.UsageError("the figures of a quick run mean nothing: keep them out of the docs")
    if show is not None:
        results = RecoveryResults.from_json(show.read_text())
    else:
        found = find_systems(*systems)
        if not found:
            names = "; ".join(LAUNCHES)
            raise click.UsageError(f"no system has that in its name; there are: {names}")
        for each in found:
            if each.absent is not None:
                _tell(f"{each.name} is not measured: {each.absent}")
        if quick:
            rounds, kills = 1, 1
        models = models or tuple(list(WIDTHS)[:1] if quick else WIDTHS)

        def save(results: RecoveryResults) -> None:
            if json_path is not None:
                json_path.parent.mkdir(parents=True, exist_ok=True)
                json_path.write_text(results.to_json())

        results = measure(Plan(found, models, ranks, rounds, kills, keep), _tell, save)
    where = machine_line(results.machine)
    click.echo(f"{where}\n\n{render(results, markdown=markdown)}")
    if docs is not None:
        text = f"{where}\n\n{render(results, markdown=True)}"
        docs.write_text(replace_figures(docs.read_text(), "recovery", TITLE, text))


def _tell(text: str) -> None:
    click.echo(text, err=True)


if __name__ == "__main__":
    main(prog_name="python -m benchmarks.recovery")
