"""What the logs of a job say about the kills in it: times, steps and samples. Pure functions.

A step counts as the *next step* after a kill if it has a higher number than all steps to which the
victim contributed, and was committed by a group without it: a survivor that has the last gradients
of the victim commits one more step before it notices anything.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from .peers.commit_log import Commit, Ids, WorkerLog

SECOND = 1e9
"""In the unit of logs."""


@dataclass(frozen=True)
class Kill:
    """A worker that was killed."""

    slot: int
    pid: int
    time: int


@dataclass(frozen=True)
class Recovery:
    """How a job recovered from one kill, in seconds after it; None if it did not."""

    next_step: float | None = None
    replacement: float | None = None
    """When the replacement of the victim committed its first step."""
    import_torch: float | None = None
    """How long that took the replacement."""

    @property
    def is_complete(self) -> bool:
        """Whether the job is as before the kill."""
        return self.next_step is not None and self.replacement is not None


@dataclass(frozen=True)
class SampleCount:
    """What became of the samples of a run, and of its steps."""

    steps_redone: int
    """Steps that were committed and undone by a restart."""
    lost: int
    """Samples of committed steps that are in no gradient."""
    repeated: int
    """Samples that are in more than one."""


def recovery(workers: Sequence[WorkerLog], kill: Kill) -> Recovery:
    """Find how a job recovered from a kill, as far as the logs go."""
    following = next_step(workers, kill)
    replaced = replacement(workers, kill)
    if replaced is None:
        return Recovery(None if following is None else _since(kill, following.time))
    worker, first = replaced
    took = None if worker.imported is None else (worker.imported - worker.started) / SECOND
    return Recovery(
        None if following is None else _since(kill, following.time),
        _since(kill, first.time),
        took,
    )


def next_step(workers: Sequence[WorkerLog], kill: Kill) -> Commit | None:
    """Return the first commit of the next step after a kill; None if there is none yet."""
    with_victim: list[Commit] = []
    without: list[Commit] = []
    for worker in workers:
        if worker.started > kill.time:
            without += worker.commits
            continue
        place = bisect_right(worker.commits, kill.time, key=lambda commit: commit.time)
        before, after = worker.commits[:place], worker.commits[place:]
        if worker.pid == kill.pid:
            with_victim += worker.commits
            continue
        if not before:
            without += after
            continue
        old = before[-1].generation
        with_victim.append(before[-1])
        for commit in after:
            (with_victim if commit.generation == old else without).append(commit)
    last = max((commit.step for commit in with_victim), default=0)
    found = [commit for commit in without if commit.step > last]
    return min(found, key=lambda commit: commit.time, default=None)


def replacement(workers: Sequence[WorkerLog], kill: Kill) -> tuple[WorkerLog, Commit] | None:
    """Return the worker that took the place of the victim and its first commit, if any."""
    for worker in workers:
        if worker.slot == kill.slot and worker.started > kill.time and worker.commits:
            return worker, worker.commits[0]
    return None


def step_times(workers: Sequence[WorkerLog], world: int, *, skip: int = 5) -> list[float]:
    """Return the seconds of the steps without faults: all workers there, before and after.

    The first steps of a worker, and those after a change, do not count.
    """
    return [
        (after.time - before.time) / SECOND
        for worker in workers
        for run in _quiet_runs(worker.commits, world)
        for before, after in list(pairwise(run))[skip:]
    ]


def _quiet_runs(commits: Sequence[Commit], world: int) -> Iterator[list[Commit]]:
    """Cut commits where the group changes or lacks somebody. The step that noticed is not quiet."""
    run: list[Commit] = []
    for commit in commits:
        if run and commit.generation != run[-1].generation:
            yield run
            run = []
        if commit.world == world:
            run.append(commit)
    yield run


def count_samples(workers: Sequence[WorkerLog], batch: int, world: int) -> SampleCount:
    """Compare the samples of the steps that count with those that should be in them.

    Step `s` should have samples ``(s - 1) * batch`` to ``s * batch``. If it was committed, undone
    and committed again, the last time counts. Steps before the first with all workers are ignored:
    a system that begins with those that are there loses samples of the others, but not by a kill.
    So is the last step, which may not be in all logs.
    """
    formed = [c.step for worker in workers for c in worker.commits if c.world == world]
    first = min(formed, default=1)
    commits = [{commit.step: commit for commit in worker.commits} for worker in workers]
    attempts: dict[int, set[int]] = {}
    for worker, by_step in zip(workers, commits, strict=True):
        for step in by_step:
            attempts.setdefault(step, set()).add(worker.attempt)
    last = max(attempts, default=1) - 1
    uses = torch.zeros((last + 1) * batch, dtype=torch.int32)
    for step in range(first, last + 1):
        involved = [
            (worker.ran[step], by_step.get(step))
            for worker, by_step in zip(workers, commits, strict=True)
            if step in worker.ran and worker.attempt == max(attempts.get(step, {-1}))
        ]
        _count_step(uses, involved)
    return SampleCount(
        steps_redone=sum(len(each) - 1 for each in attempts.values()),
        lost=int((uses[(first - 1) * batch : last * batch] == 0).sum()),
        repeated=int((uses - 1).clamp(min=0).sum()),
    )


def _count_step(uses: torch.Tensor, involved: Sequence[tuple[Ids, Commit | None]]) -> None:
    """Count the samples in the gradients of a step, given who ran what and who committed."""
    committed = [(ids, commit) for ids, commit in involved if commit is not None]
    for ids, _ in committed:
        for start, stop, stride in ids:
            uses[start:stop:stride] += 1
    contributed = max((commit.world for _, commit in committed), default=0)
    samples = max((commit.samples or 0 for _, commit in committed), default=0)
    counted = sum(len(range(*each)) for ids, _ in committed for each in ids)
    # A worker was killed after it contributed, before it logged that.
    if contributed > len(committed) or samples > counted:
        for ids, commit in involved:
            for start, stop, stride in ids if commit is None else ():
                uses[start:stop:stride].clamp_(min=1)


def _since(kill: Kill, time: int) -> float:
    return (time - kill.time) / SECOND
