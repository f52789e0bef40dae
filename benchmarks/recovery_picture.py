"""A picture of recovery: the loss of an elastic run whose ranks are killed, over wall time."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from phalanx._formatting import format_count

from .peers.commit_log import Commit, WorkerLog
from .recovery_jobs import ELASTIC, Job, start_job
from .recovery_times import SECOND, recovery
from .style import BLUE, GREEN, GREY, ORANGE

RANKS = 2
MODEL = "MLP, 1 M"
STEPS = 1500
KILLS = 5
PAUSE = 3.0
"""Seconds of steps by all ranks between a replacement and the next kill."""
TIMEOUT = 600.0
SMOOTH = 15  # steps


@dataclass(frozen=True)
class Curve:
    """The loss of a run, and what happened in it; times in seconds since its first step."""

    times: list[float]
    losses: list[float]
    worlds: list[int]
    kills: list[float]
    joins: list[float]
    digest: str


def record(*, quick: bool, tell: Callable[[str], None]) -> tuple[Curve, Curve]:
    """Train without kills and with some; return both curves."""
    steps, kills = (300, 1) if quick else (STEPS, KILLS)
    tell("without kills")
    undisturbed = _train(steps, 0)
    tell(f"with {kills} kills")
    return undisturbed, _train(steps, kills)


def _train(steps: int, kills: int) -> Curve:
    args = ["--model", MODEL, "--steps", str(steps), "--digits"]
    killed, joined = [], []
    with start_job(ELASTIC, RANKS, args, seed=2) as job:
        for _ in range(kills):
            _settle(job)
            kill = job.kill_one()
            killed.append(kill.time)
            job.await_(
                lambda workers, kill=kill: recovery(workers, kill).is_complete,
                TIMEOUT,
                "step of the replacement",
            )
            took = recovery(job.workers, kill).replacement
            assert took is not None
            joined.append(kill.time + round(took * SECOND))
        job.wait(TIMEOUT)
        return make_curve(job.workers, killed, joined)


def _settle(job: Job) -> None:
    job.await_(lambda workers: job.is_formed(workers, 5), TIMEOUT, "steps of all ranks")
    time.sleep(PAUSE)


def make_curve(workers: Sequence[WorkerLog], kills: Sequence[int], joins: Sequence[int]) -> Curve:
    """Put together what the workers logged; the first to commit a step tells its time."""
    first: dict[int, Commit] = {}
    for commit in (each for worker in workers for each in worker.commits):
        if commit.step not in first or commit.time < first[commit.step].time:
            first[commit.step] = commit
    (digest,) = {worker.digest for worker in workers if worker.digest is not None}
    commits = [first[step] for step in sorted(first)]
    start = commits[0].time
    return Curve(
        [(each.time - start) / SECOND for each in commits],
        [each.loss for each in commits],
        [each.world for each in commits],
        [(each - start) / SECOND for each in kills],
        [(each - start) / SECOND for each in joins],
        digest,
    )


def draw(curves: tuple[Curve, Curve], path: Path) -> None:
    """Draw both curves, and how many ranks each had."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    undisturbed, disturbed = curves
    with rc_context({"svg.hashsalt": "phalanx", "font.size": 11, "font.family": "DejaVu Sans"}):
        figure = Figure(figsize=(8, 4.6), layout="constrained")
        above, below = figure.subplots(2, 1, sharex=True, height_ratios=(5, 1))
        label = f"{'undisturbed':12}{undisturbed.digest}"
        above.plot(
            undisturbed.times, _smooth(undisturbed.losses), color=GREY, linewidth=1.6, label=label
        )
        label = f"{format_count(len(disturbed.kills), 'kill'):12}{disturbed.digest}"
        above.plot(
            disturbed.times, _smooth(disturbed.losses), color=BLUE, linewidth=2.0, label=label
        )
        for axes in (above, below):
            for kill in disturbed.kills:
                axes.axvline(kill, color=ORANGE, linewidth=1.2)
            for join in disturbed.joins:
                axes.axvline(join, color=GREEN, linewidth=1.2, linestyle=(0, (2, 2)))
            axes.spines[["top", "right"]].set_visible(False)
        above.plot([], [], color=ORANGE, linewidth=1.2, label="kill -9 of a rank")
        above.plot(
            [], [], color=GREEN, linewidth=1.2, linestyle=(0, (2, 2)), label="its replacement joins"
        )
        above.set_yscale("log")
        above.set_ylabel("training loss")
        above.grid(axis="y", color="#dddddd", linewidth=0.7)
        above.set_title(
            "Ranks die and are replaced; the result has the same bits",
            loc="left",
            fontsize=12,
            fontweight="bold",
        )
        below.step(disturbed.times, disturbed.worlds, where="post", color=BLUE, linewidth=2.0)
        below.set_ylim(0.5, RANKS + 0.5)
        below.set_yticks(range(1, RANKS + 1))
        below.set_ylabel("ranks")
        below.set_xlabel("wall time since the first step, in seconds")
        figure.legend(
            *above.get_legend_handles_labels(),
            loc="outside lower center",
            ncols=2,
            frameon=False,
            prop={"family": "DejaVu Sans Mono", "size": 8.5},
        )
        metadata = {"Date": None} if path.suffix == ".svg" else None
        figure.savefig(path, dpi=160, metadata=metadata)


def _smooth(losses: Sequence[float]) -> list[float]:
    windows = (losses[max(0, end - SMOOTH) : end] for end in range(1, len(losses) + 1))
    return [sum(window) / len(window) for window in windows]
