"""Runs whose workers die, are stopped or crash: the result has the same bits.

``PHALANX_SOAK=1`` injects more than a thousand failures at random instants (``make soak``).
"""

import os
import signal
import subprocess
import sys
import time

import pytest

from phalanx.errors import InvalidState
from phalanx.testing.faults import (
    Fault,
    FaultPlan,
    PlannedFailure,
    exit_abruptly,
    hold_gil,
    kill,
    kill_supervisor,
    run_elastic,
    segfault,
    stop,
    store_unreachable,
)

from .chaos import (
    MODELS,
    RUNS,
    SCRIPT,
    RandomCase,
    Training,
    differences,
    faults_of_run,
    kill_at_points,
    results_in,
    train,
    undisturbed,
)

SOAK = "PHALANX_SOAK" in os.environ
SOAK_FAILURES = 1200
SOAK_SHARDS = 3
"""Workers that die and start leave the cores idle half of the time, so runs share them."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(480)]


@pytest.mark.parametrize("model", MODELS)
def test_without_failures_the_world_size_does_not_matter(tmp_path, model):
    training = Training(model, steps=23)
    command = [sys.executable, "-m", "phalanx", "run", "-n2", SCRIPT, "--workers=1"]
    command += [f"--directory={tmp_path / 'checkpoints'}", *training.arguments(tmp_path / "result")]
    subprocess.run(command, check=True, timeout=100)
    found = results_in(tmp_path)
    assert found.keys() == {"result", "result.0", "result.1"}
    assert differences(undisturbed(training), found) == {}


@pytest.mark.parametrize("number", range(len(RUNS)))
def test_a_kill_at_any_fault_point_keeps_the_bits(tmp_path, number):
    outcome = kill_at_points(number, tmp_path)
    assert len(outcome.injected) == len(faults_of_run(number))


@pytest.mark.parametrize("seed", range(3))
def test_failures_at_random_instants_keep_the_bits(tmp_path, seed):
    outcome = RandomCase(seed).run(tmp_path)
    assert outcome.injected


@pytest.mark.parametrize(
    "action", [segfault(), exit_abruptly(), stop(resume_after=1.0), hold_gil(1.0)], ids=str
)
def test_crashes_stops_and_a_held_gil_keep_the_bits(tmp_path, action):
    places = [("elastic:backward", 0), ("ddp:reduce_fold", 1), ("elastic:commit", 2)]
    faults = [
        Fault(point, action, rank=rank, nth=5 + 20 * rank, incarnation=None, once=True)
        for point, rank in places
    ]
    train(Training("conv", steps=120), tmp_path, ranks=3, faults=faults, timeout=120)


@pytest.mark.parametrize("model", MODELS)
def test_what_a_rank_had_published_is_not_run_again(tmp_path, model):
    """Rank 0 runs micro-batch 0, whose values some buffers take; another dies a little later."""
    faults = [
        Fault("elastic:published", kill(), rank=0, nth=5),
        Fault("elastic:reduced", kill(), rank=1, nth=5),
        Fault("elastic:commit", kill(), rank=2, nth=12),
    ]
    outcome = train(
        Training(model, steps=30), tmp_path, ranks=3, faults=faults, pace=0.2, timeout=120
    )
    assert "elastic:cover" in outcome.points
    assert "elastic:redo" not in outcome.points


WITHOUT_COLLECTOR = """
import gc, pathlib, sys, time
import torch
from phalanx.elastic import ElasticRun

gc.disable()
net = torch.nn.Linear(32, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
run = ElasticRun(net, optimizer, micro_batches=4)
for step in run.steps(8):
    for micro in step.micro_batches():
        micro.backward(net(torch.randn(8, 32)).square().mean())
    optimizer.step()
    optimizer.zero_grad()
maps = pathlib.Path("/proc/self/maps").read_text().splitlines()
print("regions:", sum("memfd" in line for line in maps), "world size:", run.world_size)
"""


@pytest.mark.parametrize("points", [["elastic:forward"], ["elastic:published", "elastic:regroup"]])
def test_the_memory_of_lost_groups_is_freed_without_a_garbage_collection(tmp_path, points):
    """Rank 2 is lost while it regroups after the loss of rank 1."""
    script = tmp_path / "train.py"
    script.write_text(WITHOUT_COLLECTOR)
    places = [(1, 5), (2, 1)]
    faults = [
        Fault(point, kill(), rank=rank, nth=nth)
        for point, (rank, nth) in zip(points, places, strict=False)
    ]
    outcome = run_elastic(
        script, ranks=1 + len(points), faults=faults, options=["--max-restarts=0"], timeout=60
    )
    assert outcome.exit_code == 0, str(outcome)
    assert "regions: 1 world size: 1" in outcome.output


RESOURCES = """
import os, sys
import torch
from phalanx.elastic import ElasticRun

def note(change):
    memory = next(line for line in open("/proc/self/smaps_rollup") if line.startswith("Pss:"))
    counts = [len(os.listdir(f"/proc/self/{kind}")) for kind in ("fd", "task")]
    maps = sum("memfd" in line or "/dev/shm" in line for line in open("/proc/self/maps"))
    print(change.kind, *counts, maps, int(memory.split()[1]) // 1024, flush=True)

net = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.Linear(512, 1))
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
run = ElasticRun(net, optimizer, micro_batches=4, backend=sys.argv[1], on_change=note)
for step in run.steps(60):
    for micro in step.micro_batches():
        micro.backward(net(torch.randn(8, 512)).square().mean())
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_a_survivor_keeps_nothing_of_lost_ranks(tmp_path, backend):
    """Neither descriptors nor threads, regions or memory, however often the other rank is lost."""
    script, kills = tmp_path / "train.py", 6
    script.write_text(RESOURCES)
    faults = [
        Fault("elastic:backward", kill(), rank=1, nth=5, incarnation=number)
        for number in range(kills)
    ]
    # With two ranks as the minimum, the survivor waits for every replacement.
    outcome = run_elastic(
        script, [backend], ranks=2, min_ranks=2, faults=faults, options=["--standby"], timeout=240
    )
    assert outcome.exit_code == 0, str(outcome)
    assert not outcome.leaks, str(outcome)
    lines = [line.split() for line in outcome.output.splitlines() if "[rank 0] joined" in line]
    found = [[int(word) for word in line[3:]] for line in lines]
    assert len(found) == kills, str(outcome)
    # The first group was formed by another path than the ones that follow.
    early, late = found[1], found[-1]
    assert late[0] <= early[0], found
    # After four more losses. A pool keeps idle threads, and has one more when two jobs overlap.
    assert late[1] <= early[1] + 2, found
    assert late[2] <= early[2], found
    assert late[3] <= early[3] + 16, found  # MiB; a copy of the gradients has 1


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_what_a_rank_had_not_published_is_run_again(tmp_path, backend):
    """Without shared memory nothing is published, and all points come to the same."""
    points = ["elastic:publish"] if backend == "shm" else ["elastic:reduced", "elastic:commit"]
    faults = [
        Fault(point, kill(), rank=rank, nth=5 + 8 * rank)
        for rank, point in enumerate([*points, "elastic:forward"])
    ]
    outcome = train(
        Training("conv", steps=40),
        tmp_path,
        ranks=3,
        backend=backend,
        faults=faults,
        pace=0.2,
        timeout=120,
    )
    assert "elastic:redo" in outcome.points


def test_standbys_take_the_place_of_lost_ranks(tmp_path):
    """Processes that were started before the failures, as often as one was ready."""
    plan = FaultPlan.random(5, mean_time_between_failures=2.5, count=5)
    outcome = train(
        Training("conv", steps=300),
        tmp_path,
        ranks=3,
        workers=1,
        plan=plan,
        options=["--standby"],
        timeout=180,
    )
    assert len(outcome.injected) >= 3
    assert "was a standby: True" in outcome.output


def failures(*actions, at=1.0, gap=1.0):
    planned = [PlannedFailure(at=at + gap * i, action=each) for i, each in enumerate(actions)]
    return FaultPlan(tuple(planned))


def test_a_rank_killed_while_it_leaves(tmp_path):
    """It was asked to leave by SIGTERM, and is replaced."""
    plan = FaultPlan((PlannedFailure(at=1.0, action=kill(signal.SIGTERM), rank=1),))
    faults = [Fault("elastic:leave", kill(), rank=1)]
    outcome = train(
        Training(steps=100), tmp_path, ranks=3, plan=plan, faults=faults, survivors=2, timeout=90
    )
    assert [each.worker for each in outcome.injected] == ["1.0", "1.0"]


def test_a_rank_that_leaves_at_the_minimum_is_replaced(tmp_path):
    plan = FaultPlan((PlannedFailure(at=1.0, action=kill(signal.SIGTERM), rank=1),))
    outcome = train(
        Training(steps=100), tmp_path, ranks=2, min_ranks=2, plan=plan, survivors=1, timeout=90
    )
    assert "the run needs 2 ranks; starting rank 2 in its place" in outcome.output


def test_two_ranks_killed_at_once_are_replaced(tmp_path):
    plan = failures(kill(), kill(), gap=0.0)
    outcome = train(Training(steps=100), tmp_path, ranks=3, plan=plan, timeout=90)
    assert len(outcome.lost) == 2


@pytest.mark.parametrize("saves", [True, False])
def test_a_run_that_loses_all_ranks_starts_over_with_the_same_bits(tmp_path, saves):
    """The run starts over, from the newest checkpoint or from the beginning."""
    plan = failures(kill(), kill(), kill(), at=2.0, gap=0.0)
    outcome = train(Training(steps=100), tmp_path, ranks=3, plan=plan, saves=saves, timeout=120)
    assert {each.partition(".")[0] for each in outcome.lost} == {"0", "1", "2"}


@pytest.mark.parametrize(
    ("point", "starts_over"), [("user:finished", False), ("user:leader_finished", True)]
)
def test_only_the_loss_of_the_leader_after_the_last_step_starts_over(tmp_path, point, starts_over):
    """Only the leader writes the result; without it the run starts over."""
    faults = [Fault(point, kill(), incarnation=None, once=True)]
    outcome = train(Training(steps=25), tmp_path, ranks=2, faults=faults, pace=0, timeout=90)
    assert len(outcome.injected) == 1
    assert (tmp_path / "result").exists()
    assert (
        "restarting all from the newest checkpoint, or from step 0" in outcome.output
    ) == starts_over


def test_losses_while_the_store_is_unreachable_are_survived(tmp_path):
    plan = failures(store_unreachable(3.0), kill(), store_unreachable(1.0), kill(), gap=0.5)
    train(Training(steps=200), tmp_path, ranks=3, plan=plan, timeout=120)


def test_a_killed_supervisor_takes_all_ranks_with_it(tmp_path):
    plan = failures(kill_supervisor())
    arguments = [*Training(steps=10_000).arguments(tmp_path / "result"), "--pace=0.05"]
    outcome = run_elastic(SCRIPT, arguments, ranks=3, plan=plan, timeout=90, options=["--grace=2"])
    assert outcome.exit_code == -9, str(outcome)
    # Its directory is removed by whoever looks for runs next.
    assert [each for each in outcome.leaks if not each.startswith("directory")] == []
    assert results_in(tmp_path) == {}


def test_a_run_with_a_full_shm_survives_losses(tmp_path):
    plan = failures(kill(), kill(), kill(), gap=2.0)
    try:
        train(
            Training("conv", steps=200),
            tmp_path,
            ranks=3,
            workers=1,
            plan=plan,
            shm_limit="1m",
            timeout=120,
        )
    except InvalidState as error:
        pytest.skip(str(error))


@pytest.mark.skipif(not SOAK, reason="PHALANX_SOAK is not set")
@pytest.mark.timeout(4 * 3600)
@pytest.mark.parametrize("shard", range(SOAK_SHARDS))
def test_soak(tmp_path, shard):
    """Failures over models and world sizes; a wrong run does not end the soak."""
    began, cases, injected, lost, wrong = time.monotonic(), [], 0, 0, []
    first = int(os.environ.get("PHALANX_SOAK_SEED", "1000")) + 1000 * shard
    while injected < SOAK_FAILURES / SOAK_SHARDS:
        case = RandomCase(first + len(cases), count=30)
        cases.append(case)
        try:
            outcome = case.run(tmp_path / str(case.seed))
        except AssertionError as error:
            wrong.append(str(error))
            (tmp_path / f"{case.seed}.error").write_text(str(error))
            assert len(wrong) < 10, "too many failures"
            continue
        injected += len(outcome.injected)
        lost += len(outcome.lost)
    minutes = (time.monotonic() - began) / 60
    models = {case.training.model for case in cases}
    print(
        f"soak: {injected} failures, {lost} workers lost in {len(cases)} runs of "
        f"{len(models)} models on 2 to 4 ranks; {len(wrong)} runs wrong; {minutes:.0f} minutes"
    )
    assert not wrong, "\n\n".join(wrong)
