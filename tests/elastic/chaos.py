"""Elastic runs with injected failures, compared bit for bit with an undisturbed process.

A failing run is repeated with::

    cd tests && python -m elastic.chaos --seed 7       # failures at random instants
    cd tests && python -m elastic.chaos --points 2     # kills at fault points
"""

import argparse
import functools
import json
import os
import random
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from phalanx.testing.faults import (
    Fault,
    FaultPlan,
    kill,
    run_elastic,
    segfault,
    stop,
    store_unreachable,
)

SCRIPT = Path(__file__).with_name("chaos_training.py")
MODELS = ("mlp", "conv", "transformer")
PACE = 0.05  # seconds that a step takes at least, while there are failures to come


def _points(prefix, *names):
    return tuple(f"{prefix}:{name}" for name in names)


JOINING = _points("elastic", "join", "planned", "forming", "formed", "transfer", "member")
LOOP = (
    *_points("elastic", "forward", "backward", "folded"),
    "ddp:reduce_fold",
    *_points("elastic", "publish", "published", "reduced", "recorded", "commit", "committed"),
    *_points("elastic", "before_optimizer", "after_optimizer"),
)
OTHER = _points("elastic", "save", "saved", "evaluate")
RECOVERY = _points("elastic", "cover", "redo", "regroup", "regrouped")
CHECKPOINT = (
    *_points("checkpoint", "begin", "locked", "tensor", "flush", "written"),
    *_points("checkpoint", "publish", "published", "committed"),
    *_points("checkpoint", "moved", "replace", "replaced", "discard", "renamed"),
)
USER = _points("user", "forward", "optimizer", "zero_grad")
POINTS = (*JOINING, *LOOP, *OTHER, *RECOVERY, *CHECKPOINT, *USER)
TESTED_ELSEWHERE = {"elastic:leave"}
"""Points that a run reaches only on request; a separate test kills there."""


@dataclass(frozen=True)
class Training:
    """What is trained; the result depends on nothing else."""

    model: str = "mlp"
    steps: int = 60
    micro_batches: int = 8

    def arguments(self, result):
        return [
            f"--model={self.model}",
            f"--steps={self.steps}",
            f"--micro-batches={self.micro_batches}",
            f"--result={result}",
        ]


@functools.cache
def undisturbed(training):
    """Return the result of a training in a single process."""
    with tempfile.TemporaryDirectory() as directory:
        result = Path(directory, "result")
        command = [sys.executable, SCRIPT, *training.arguments(result)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr
        return json.loads(result.read_text())["result"]


def results_in(directory):
    """Return what each process that finished has found, by the name of its file."""
    found = [path for path in Path(directory).glob("result*") if path.suffix != ".part"]
    return {path.name: json.loads(path.read_text())["result"] for path in found}


def differences(expected, found):
    """Return the names of what differs, and from which step on the losses do."""
    return {
        file: [
            _describe_difference(name, expected[name], result.get(name))
            for name in expected
            if result.get(name) != expected[name]
        ]
        for file, result in found.items()
        if result != expected
    }


def _describe_difference(name, expected, found):
    if not isinstance(expected, list):
        return name
    pairs = zip(expected, found, strict=False)
    same = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(expected), len(found)))
    return f"{name} after {same} of {len(expected)} (found {len(found)})"


def train(
    training,
    directory,
    *,
    ranks,
    workers=0,
    pace=PACE,
    timeout,
    saves=True,
    backend="auto",
    **options,
):
    """Run a training with failures; fail unless it ends with the bits of an undisturbed one."""
    directory = Path(directory)
    directory.mkdir(exist_ok=True)
    arguments = [*training.arguments(directory / "result"), f"--pace={pace}"]
    arguments += [f"--workers={workers}", f"--backend={backend}"]
    arguments += [f"--directory={directory / 'checkpoints'}"] if saves else []
    outcome = run_elastic(SCRIPT, arguments, ranks=ranks, timeout=timeout, **options)
    check(training, outcome, directory)
    return outcome


def check(training, outcome, directory):
    """Fail unless a run has ended well, left nothing behind and has the right result."""
    assert outcome.exit_code == 0, str(outcome)
    assert not outcome.missed, f"faults did not fire\n{outcome}"
    assert not outcome.leaks, f"the run left something behind\n{outcome}"
    found = results_in(directory)
    assert found, f"no process has written a result\n{outcome}"
    wrong = differences(undisturbed(training), found)
    assert not wrong, f"the result differs: {wrong}\n{outcome}"


# -- faults at every point -----------------------------------------------------------------


def faults_at_points():
    """Return pairs of a point and the (rank, nth) to kill at; None is the first rank there.

    A point added in the middle moves all later ones to other runs, which may fail for that reason.
    """
    pairs = [(point, (None, 1)) for point in POINTS]
    # Again where most of the time goes, on given ranks, and later.
    places = [(0, 3), (1, 11), (2, 2), (0, 20)]
    again = [*LOOP, *USER]
    pairs += [(point, places[i % len(places)]) for i, point in enumerate(again)]
    more = ["checkpoint:tensor", "checkpoint:written", "elastic:save", "elastic:saved"]
    more += ["elastic:cover", "elastic:regroup", "elastic:regrouped", "elastic:redo"]
    more += ["elastic:forming", "elastic:evaluate"]
    pairs += [(point, (None, 2)) for point in more]
    return pairs


def fault(point, rank, nth):
    """Return a kill of whoever gets to a point first, or of the first worker of a rank."""
    # One that joins may be killed at any time. Of the others, somebody survives with the state.
    # Some wait for two survivors, so that one of these can be killed while they recover.
    survivors = 0 if point in JOINING else 1 if rank is None else 2
    return Fault(
        point, kill(), rank=rank, nth=nth, incarnation=None, once=True, survivors=survivors
    )


RUNS = [("mlp", 3, 0), ("conv", 3, 1), ("transformer", 3, 0), ("mlp", 4, 1)]
"""Model, ranks and loader workers of the runs among which the faults at points are divided."""


def faults_of_run(number):
    """Return the faults of a run; neighbours in the list are in different runs."""
    return [fault(point, *place) for point, place in faults_at_points()[number :: len(RUNS)]]


def kill_at_points(number, directory):
    """Make one of the runs that together have a kill at every point."""
    model, ranks, workers = RUNS[number]
    return train(
        Training(model, steps=350),
        directory,
        ranks=ranks,
        workers=workers,
        pace=0.15,
        faults=faults_of_run(number),
        timeout=420,
    )


# -- failures at random instants -----------------------------------------------------------


@dataclass(frozen=True)
class RandomCase:
    """A training with failures at random instants; everything follows from the seed."""

    seed: int
    count: int = 12
    mean_time_between_failures: float = 1.0
    training: Training = field(init=False)
    ranks: int = field(init=False)
    workers: int = field(init=False)
    survivors: int = field(init=False)
    plan: FaultPlan = field(init=False)
    options: list[str] = field(init=False)

    def __post_init__(self):
        draw = random.Random(self.seed)
        seconds = self.count * self.mean_time_between_failures
        training = Training(draw.choice(MODELS), steps=int(2 * seconds / PACE))
        chosen = {
            "training": training,
            "ranks": draw.randint(2, 4),
            "workers": draw.choice([0, 0, 1]),
            # Sometimes all members are lost, and the run goes on from a checkpoint.
            "survivors": draw.choice([1, 1, 1, 0]),
            "plan": FaultPlan.random(
                self.seed,
                mean_time_between_failures=self.mean_time_between_failures,
                count=self.count,
                actions={
                    kill(): 12.0,
                    segfault(): 2.0,
                    stop(resume_after=0.5): 2.0,
                    store_unreachable(0.5): 1.0,
                },
            ),
            "options": draw.choice([[], [], ["--standby"]]),
        }
        for name, value in chosen.items():
            object.__setattr__(self, name, value)

    @property
    def command(self):
        """The command that repeats it."""
        return (
            f"cd tests && {sys.executable} -m elastic.chaos --seed {self.seed} --count {self.count}"
        )

    def __str__(self):
        return (
            f"seed {self.seed}: {self.training.model}, {self.ranks} ranks, {self.workers} loader "
            f"workers, at least {self.survivors} survivors {' '.join(self.options)}".rstrip()
        )

    def run(self, directory):
        try:
            return train(
                self.training,
                directory,
                ranks=self.ranks,
                workers=self.workers,
                plan=self.plan,
                survivors=self.survivors,
                options=self.options,
                timeout=180 + 6 * self.count * self.mean_time_between_failures,
            )
        except AssertionError as error:
            raise AssertionError(f"{self}\nto repeat it: {self.command}\n{error}") from None


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--seed", type=int, help="Of failures at random instants.")
    which.add_argument("--points", type=int, choices=range(len(RUNS)), help="Kills at points.")
    parser.add_argument("--count", type=int, default=RandomCase.count, help="Of random failures.")
    parser.add_argument("--directory", help="For results and checkpoints, which are kept.")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        directory = options.directory or temporary
        if options.points is not None:
            print(kill_at_points(options.points, directory))
        else:
            case = RandomCase(options.seed, options.count)
            print(case)
            print(case.run(directory))


if __name__ == "__main__":
    os.environ.setdefault("RES_OPTIONS", "attempts:0")  # as in conftest.py
    main()
