"""Scripts that do more than train between steps, while ranks are lost and join: the same result."""

import os
import re
import subprocess
import sys
from textwrap import dedent

import pytest

from phalanx.checkpoint import CheckpointManager
from phalanx.testing.faults import Fault, kill, run_elastic, stop

PROLOGUE = """
import time
from datetime import timedelta

import torch
from torch import nn
from torch.utils.data import TensorDataset

from phalanx.elastic import ElasticRun

RANKS = 3
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
inputs = torch.randn(100, 8)


def make(**options):
    run = ElasticRun(model, optimizer, micro_batches=6, **options)
    dataset = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    return run, run.loader(dataset, batch_size=4)


def train(step):
    for micro in step.micro_batches(loader):
        micro.backward(nn.functional.mse_loss(model(micro.inputs), micro.targets))


def wait_for_replacements(run, is_alone):
    if not is_alone and run.world_size < RANKS:
        time.sleep(0.5)  # in every step, until they have started: the machine may be busy
"""
TIMEOUT = 90.0

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


def outcome_of(tmp_path, body, *faults, ranks=3):
    """Return what a single process prints, and the outcome of an elastic run of the script."""
    script = tmp_path / "train.py"
    script.write_text(PROLOGUE + dedent(body))
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    alone = subprocess.run(
        [sys.executable, script],
        env=environ,
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=True,
    )
    outcome = run_elastic(script, ranks=ranks, faults=faults, timeout=TIMEOUT)
    assert outcome.exit_code == 0, outcome
    assert not outcome.missed, outcome
    return _results(alone.stdout), outcome


def _results(output):
    return set(re.findall(r"result: (.*)", output))


@pytest.mark.parametrize("point", ["reduced", "recorded", "commit"])
def test_gradients_of_a_torn_loop_are_not_added_to(tmp_path, point):
    body = """
    run, loader = make(rebalance=True)
    for step in run.steps(12):
        train(step)
        optimizer.step()
        optimizer.zero_grad()
    print("result:", run.hash())
    """
    expected, outcome = outcome_of(tmp_path, body, Fault(f"elastic:{point}", kill(), rank=2, nth=5))
    assert _results(outcome.output) == expected, outcome


def test_a_worker_that_is_stopped_while_it_regroups_is_killed(tmp_path):
    body = """
    run, loader = make(timeout=timedelta(seconds=2))
    for step in run.steps(8):
        train(step)
        optimizer.step()
        optimizer.zero_grad()
    print("result:", run.hash())
    """
    faults = [
        Fault("elastic:forward", kill(), rank=2, nth=5),
        Fault("form:requested", stop(), rank=1, nth=2),
    ]
    expected, outcome = outcome_of(tmp_path, body, *faults)
    assert _results(outcome.output) == expected, outcome


def test_a_replacement_joins_a_script_that_evaluates_accumulates_and_freezes(tmp_path):
    body = """
    import os

    is_alone = "PHALANX_ELASTIC" not in os.environ
    run, loader = make()
    model[0].weight.requires_grad_(False)
    measure = lambda batch: nn.functional.mse_loss(model(batch[0]), batch[1])
    results = [run.evaluate(measure, loader)]
    for end in (20, 120):
        for step in run.steps(end):
            train(step)
            if step.number % 3 == 0:
                optimizer.step()
                optimizer.zero_grad()
            if step.number == 5:
                model[0].weight.requires_grad_(True)
            if step.number > 20:
                wait_for_replacements(run, is_alone)
        results.append(run.evaluate(measure, loader))
    print("result:", run.hash(), results)
    """
    expected, outcome = outcome_of(
        tmp_path, body, Fault("elastic:before_optimizer", kill(), rank=2, nth=8)
    )
    assert "2.1" not in outcome.lost, outcome
    assert outcome.output.count("result:") == 3, outcome
    assert _results(outcome.output) == expected, outcome


def test_all_ranks_raise_the_exception_of_one(tmp_path):
    script = tmp_path / "train.py"
    body = """
    run, loader = make()
    for step in run.steps(100):
        if step.number == 4 and run.world_size == 3 and not run.is_leader:
            try:
                train(step)
            except Exception as error:
                print("raised:", type(error).__name__, error)
                raise
        elif step.number == 4:
            raise ValueError("no such sample")
        else:
            train(step)
        optimizer.step()
        optimizer.zero_grad()
    """
    script.write_text(PROLOGUE + dedent(body))
    outcome = run_elastic(script, ranks=3, timeout=TIMEOUT)
    assert outcome.exit_code == 1
    assert "failed first: exit code 1" in outcome.output
    raised = re.findall(r"raised: (.*)", outcome.output)
    assert len(raised) == 2, outcome
    assert all("ValueError: no such sample" in each for each in raised), outcome


def test_a_group_of_the_scripts_own_is_refused(tmp_path):
    """A replacement would wait in it for ranks that have passed it."""
    uses = {
        "dist.init_process_group('gloo')": "init_process_group()",
        "phalanx.groups.new_group()": "new_group()",
        "phalanx.DDP(model)": "DistributedDataParallel",
        "ShardedOptimizer(model.parameters(), torch.optim.SGD, lr=1.0)": "ShardedOptimizer",
        "phalanx.gather_uneven(inputs)": "gather_uneven()",
        "form_a_group(); make()": "a process group of 2 ranks",
    }
    body = f"""
    import os
    import phalanx
    import phalanx.groups
    import torch.distributed as dist
    from phalanx.ddp import ShardedOptimizer
    from phalanx.errors import InvalidState

    def form_a_group():
        store = dist.FileStore(__file__ + ".store", 2)
        dist.init_process_group("gloo", store=store, rank=int(os.environ["RANK"]), world_size=2)

    for use in {list(uses)!r}:
        try:
            exec(use)
        except InvalidState as error:
            print("refused:", error)
    """
    script = tmp_path / "train.py"
    script.write_text(PROLOGUE + dedent(body))
    outcome = run_elastic(script, ranks=2, timeout=TIMEOUT)
    for named in uses.values():
        message = f"refused: {named} is not available under `phalanx run --elastic`"
        assert outcome.output.count(message) == 2, (named, outcome)
    assert "use run.evaluate(), step.loss" in outcome.output


def test_a_sharded_optimizer_is_refused(tmp_path):
    body = """
    from phalanx.ddp import ShardedOptimizer
    from phalanx.groups import new_group
    from torch.distributed import HashStore

    alone = new_group("local", store=HashStore(), rank=0, world_size=1)
    optimizer = ShardedOptimizer(model.parameters(), torch.optim.SGD, process_group=alone, lr=1.0)
    make()
    """
    script = tmp_path / "train.py"
    script.write_text(PROLOGUE + dedent(body))
    outcome = run_elastic(script, ranks=1, timeout=TIMEOUT)
    assert outcome.exit_code == 1, outcome
    assert "Use a plain optimizer, or run without --elastic" in outcome.output, outcome


@pytest.mark.parametrize("end", ["break", "raise SystemExit(0)", "run.close(); raise SystemExit"])
def test_a_rank_that_ends_early_does_not_keep_the_others_waiting(tmp_path, end):
    """The run needs two ranks and has one; the launcher says so, and ends it."""
    body = f"""
    run, loader = make()
    for step in run.steps(100):
        train(step)
        optimizer.step()
        optimizer.zero_grad()
        if step.number == 4 and run.is_leader:
            {end}
    """
    script = tmp_path / "train.py"
    script.write_text(PROLOGUE + dedent(body))
    outcome = run_elastic(script, ranks=2, min_ranks=2, timeout=TIMEOUT)
    assert outcome.exit_code == 1, outcome
    assert "exited with 0 and the others have more steps to do; fewer than 2" in outcome.output


def test_one_rank_is_the_leader_before_the_first_step_of_every_attempt(tmp_path):
    body = """
    import os
    run, loader = make()
    if run.is_leader:
        print("leader:", os.getpid())
    for step in run.steps(60):
        train(step)
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.05)
    """
    script = tmp_path / "train.py"
    script.write_text(PROLOGUE + dedent(body))
    faults = [Fault("elastic:forward", kill(), rank=rank, nth=9) for rank in range(2)]
    outcome = run_elastic(script, ranks=2, faults=faults, timeout=TIMEOUT)
    assert outcome.exit_code == 0, outcome
    attempts = 1 + outcome.output.count("restarting all from the newest checkpoint")
    assert outcome.output.count("leader:") == attempts, outcome


@pytest.mark.parametrize("name", ["frozen", "nadam", "groups"])
def test_state_that_a_script_changes_on_its_way_survives_losses(tmp_path, name):
    """Parameters that are frozen, optimizer state of another dtype, parameter groups."""
    nadam = "optimizer = torch.optim.NAdam(model.parameters(), lr=1e-2)"
    changes = {
        "frozen": ("", "model[0].requires_grad_(step.number < 3)"),
        "nadam": (f"model, inputs = model.bfloat16(), inputs.bfloat16(); {nadam}", "pass"),
        "groups": (
            "optimizer = torch.optim.AdamW(model[0].parameters(), lr=1e-2)",
            "step.number == 3 and optimizer.add_param_group({'params': model[3].parameters()})",
        ),
    }
    before, within = changes[name]
    body = f"""
    import os
    {before}
    run, loader = make()
    is_alone = "PHALANX_ELASTIC" not in os.environ
    for step in run.steps(60):
        {within}
        train(step)
        optimizer.step()
        optimizer.zero_grad()
        if step.number > 5:
            wait_for_replacements(run, is_alone)
    print("result:", run.hash())
    """
    faults = [
        Fault("elastic:forward", kill(), rank=1, nth=9),
        Fault("elastic:commit", kill(), rank=2, nth=5),
    ]
    expected, outcome = outcome_of(tmp_path, body, *faults)
    assert _results(outcome.output) == expected, outcome
    assert outcome.output.count("result:") == 3, "replacements have it, too"


def test_a_kill_changes_no_bit_of_a_head_that_some_micro_batches_freeze(tmp_path):
    body = """
    import os

    run, loader = make()
    is_alone = "PHALANX_ELASTIC" not in os.environ
    for step in run.steps(60):
        for micro in step.micro_batches(loader):
            model[3].requires_grad_(micro.number in (0, 5))
            micro.backward(nn.functional.mse_loss(model(micro.inputs), micro.targets))
        optimizer.step()
        optimizer.zero_grad()
        if step.number > 5:
            wait_for_replacements(run, is_alone)
    print("result:", run.hash())
    """
    faults = [
        Fault("elastic:published", kill(), rank=1, nth=5),
        Fault("elastic:forward", kill(), rank=2, nth=20),
    ]
    expected, outcome = outcome_of(tmp_path, body, *faults)
    assert _results(outcome.output) == expected, outcome
    assert outcome.output.count("result:") == 3, "replacements have it, too"


def test_progress_is_the_number_of_the_step_in_each_of_its_loops(tmp_path):
    script = tmp_path / "train.py"
    body = """
    from phalanx.elastic import _elastic_worker

    tell = _elastic_worker.SupervisorChannel.tell_progress

    def print_progress(self, step):
        print("progress:", step)
        tell(self, step)

    _elastic_worker.SupervisorChannel.tell_progress = print_progress
    run, loader = make()
    for step in run.steps(3):
        for _ in range(2):
            train(step)
            optimizer.step()
            optimizer.zero_grad()
    """
    script.write_text(PROLOGUE + dedent(body))
    outcome = run_elastic(script, ranks=1, timeout=TIMEOUT)
    assert re.findall(r"progress: (\d)", outcome.output) == ["1", "1", "2", "2", "3", "3"], outcome


def test_a_replacement_does_not_need_the_step_that_the_run_was_restored_from(tmp_path):
    body = f"""
    import os

    def make_steps(total):
        for step in run.steps(total):
            train(step)
            optimizer.step()
            optimizer.zero_grad()
            run.save_every(3)
            if step.number > 9:
                wait_for_replacements(run, is_alone)

    run, loader = make()
    is_alone = "PHALANX_ELASTIC" not in os.environ
    places = [os.path.join({str(tmp_path)!r}, name) for name in ("elastic", "alone")]
    if is_alone:
        for place in places:
            run.restore(place)
        make_steps(6)  # saved in the second place
        run.save(places[0])
    run.restore(places[is_alone], step=3 if is_alone else 6, rewind=True, keep_last=1)
    make_steps(60)
    print("result:", run.hash())
    """
    fault = Fault("elastic:forward", kill(), rank=2, nth=11)
    expected, outcome = outcome_of(tmp_path, body, fault)
    assert _results(outcome.output) == expected, outcome
    assert not (tmp_path / "elastic" / "step-00000006").exists(), "it is pruned long before"


def test_a_worker_that_has_just_joined_may_be_the_only_survivor(tmp_path):
    """It knows what the others reduced, also of parameters that their last micro-batch froze."""
    body = """
    import json, os, signal

    is_alone = "PHALANX_ELASTIC" not in os.environ
    worker = "" if is_alone else json.loads(os.environ["PHALANX_ELASTIC"])["worker"]

    def end_rank_0(change):
        if worker == "0.0" and change.kind == "joined":
            os.kill(os.getpid(), signal.SIGKILL)

    run, loader = make(on_change=end_rank_0)
    for step in run.steps(40):
        if worker == "1.0" and step.number == 4:
            os.kill(os.getpid(), signal.SIGKILL)
        for micro in step.micro_batches(loader):
            model[0].weight.requires_grad_(micro.number % 2 == 0)
            micro.backward(nn.functional.mse_loss(model(micro.inputs), micro.targets))
        optimizer.step()
        optimizer.zero_grad()
        if worker == "0.0" and step.number > 5:
            time.sleep(0.5)  # until the replacement joins
    print("result:", run.hash())
    """
    expected, outcome = outcome_of(tmp_path, body, ranks=2)
    assert _results(outcome.output) == expected, outcome
    assert "0.0" in outcome.lost, outcome


def test_a_rank_that_has_left_is_not_waited_for(tmp_path):
    """Another dies while the smaller group forms, so that the old generation goes on."""
    body = """
    import json, os, signal

    is_alone = "PHALANX_ELASTIC" not in os.environ
    worker = "" if is_alone else json.loads(os.environ["PHALANX_ELASTIC"])["worker"]
    run, loader = make(timeout=timedelta(seconds=8))
    try:
        for step in run.steps(30):
            if worker == "2.0" and step.number == 10:
                os.kill(os.getpid(), signal.SIGTERM)
            train(step)
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(0 if is_alone else 0.05)
    finally:
        if worker == "2.0":
            time.sleep(15)  # it cleans up
            print("rank 2 has cleaned up")
    print("result:", run.hash())
    """
    fault = Fault("elastic:forming", kill(), rank=1, nth=2)
    expected, outcome = outcome_of(tmp_path, body, fault)
    assert _results(outcome.output) == expected, outcome
    assert "killing it" not in outcome.output, outcome
    assert "rank 2 has cleaned up" in outcome.output, outcome


@pytest.mark.parametrize("point", ["checkpoint:begin", "checkpoint:written"])
def test_another_rank_saves_if_the_one_that_was_to_is_lost(tmp_path, point):
    body = f"""
    import os, signal

    run, loader = make()
    run.restore({str(tmp_path / "checkpoints")!r})
    for step in run.steps(1000):
        train(step)
        optimizer.step()
        optimizer.zero_grad()
        if step.number == 10 and run.is_leader:
            os.kill(os.getppid(), signal.SIGTERM)
    """
    script = tmp_path / "train.py"
    script.write_text(PROLOGUE + dedent(body))
    fault = Fault(point, kill(), once=True)  # only one rank saves
    outcome = run_elastic(script, ranks=3, faults=[fault], timeout=TIMEOUT)
    assert outcome.exit_code == 75, outcome
    assert not outcome.missed, outcome
    assert re.search(r"saving step \d+", outcome.output), outcome
    assert CheckpointManager(tmp_path / "checkpoints").latest() is not None, outcome


def test_a_worker_joins_though_the_author_of_its_plan_is_lost(tmp_path):
    """The author leaves and is no member of the plan, so that its death does not abandon it."""
    body = """
    import json, os, signal
    from phalanx import _faultpoints

    is_alone = "PHALANX_ELASTIC" not in os.environ
    worker = "" if is_alone else json.loads(os.environ["PHALANX_ELASTIC"])["worker"]
    run, loader = make(timeout=timedelta(seconds=60))
    is_first = worker.endswith(".0")
    leaves = False

    def end_author(point):
        if point == "elastic:planned" and leaves:
            print("the author of the plan ends")
            os.kill(os.getpid(), signal.SIGKILL)

    if not is_alone:
        _faultpoints.arm(end_author)
    ended = None
    for step in run.steps(200):
        if ended is not None:
            print("waited:", time.monotonic() - ended)
        if worker == "1.0" and step.number == 8:
            os.kill(os.getpid(), signal.SIGKILL)
        if is_first and step.number == 12 and run.is_leader:
            known = run._worker.known_requests
            while run._worker.known_requests == known:  # a replacement asks to join
                time.sleep(0.01)
            leaves = True
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.5)  # until it can be known
        train(step)
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0 if is_alone else 0.02)
        ended = time.monotonic()
    print("result:", run.hash())
    """
    expected, outcome = outcome_of(tmp_path, body, ranks=3)
    assert _results(outcome.output) == expected, outcome
    assert "the author of the plan ends" in outcome.output, outcome
    assert max(map(float, re.findall("waited: (.*)", outcome.output))) < 20, outcome


EPOCHS = """
import os, sys
import numpy

class Best:
    value = float("inf")

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]

is_alone = "PHALANX_ELASTIC" not in os.environ
scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
best, group = Best(), optimizer.param_groups[0]
base, late = model, nn.Linear(8, 1)
model = nn.ModuleList([base, late])
run, loader = make(state={"scheduler": scheduler, "best": best})
measure = lambda batch: nn.functional.mse_loss(base(batch[0]), batch[1])

def train_epochs(in_step, after_epoch=lambda: None):
    for epoch in range(5):
        for step in run.steps((epoch + 1) * 12):
            for micro in step.micro_batches(loader):
                predicted = base(micro.inputs) + late(micro.inputs)
                micro.backward(nn.functional.mse_loss(predicted, micro.targets))
            group["weight_decay"] = step.number / 1000  # of the group that the optimizer steps
            optimizer.step()
            model.zero_grad()
            best.value = numpy.minimum(best.value, step.loss)  # a number of NumPy's
            in_step(step)
        scheduler.step(epoch + run.evaluate(measure, loader))
        if epoch == 0:
            optimizer.add_param_group({"params": list(late.parameters())})
        after_epoch()
    print("result:", run.hash(), best.value)
"""


def test_a_replacement_does_not_count_again_what_happens_between_calls_of_steps(tmp_path):
    body = """
def in_step(step):
    if step.number == 14:
        base[1].eval()
    if step.number > 40:
        wait_for_replacements(run, is_alone)

train_epochs(in_step)
"""
    fault = Fault("elastic:before_optimizer", kill(), rank=2, nth=27)
    expected, outcome = outcome_of(tmp_path, EPOCHS + body, fault)
    assert outcome.output.count("result:") == 3, outcome
    assert _results(outcome.output) == expected, outcome


@pytest.mark.parametrize("saves", ["in", "after"])
def test_a_run_that_starts_over_does_not_count_again_what_happens_between_calls(tmp_path, saves):
    """From a checkpoint that was saved in an epoch, or after one."""
    body = f"""
is_in = {saves == "in"}
run.restore({str(tmp_path)!r} + ("/alone" if is_alone else "/elastic"))
train_epochs(
    lambda step: is_in and run.save_every(10), lambda: is_in or run.save()
)
"""
    # Rank 0 is the leader. All are lost in the same step.
    faults = [
        Fault("elastic:before_optimizer", kill(), rank=rank, nth=45, survivors=0)
        for rank in range(3)
    ]
    expected, outcome = outcome_of(tmp_path, EPOCHS + body, *faults)
    assert "restarting all from the newest checkpoint" in outcome.output, outcome
    assert _results(outcome.output) == expected, outcome


def test_a_leader_that_leaves_slowly_does_not_keep_the_next_one_from_saving(tmp_path):
    body = f"""
import os, signal

is_alone = "PHALANX_ELASTIC" not in os.environ
run, loader = make()
run.restore({str(tmp_path)!r} + ("/alone" if is_alone else "/elastic"))
try:
    for step in run.steps(20):
        train(step)
        optimizer.step()
        optimizer.zero_grad()
        run.save_every(1)
        if not is_alone and run.is_leader and step.number == 8:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.5)  # so that it leaves after this step
finally:
    time.sleep(0 if is_alone else 1)
print("result:", run.hash())
"""
    expected, outcome = outcome_of(tmp_path, body)
    assert _results(outcome.output) == expected, outcome


def test_a_script_that_breaks_out_and_keeps_the_iterator_ends(tmp_path):
    body = """
run, loader = make()
steps = run.steps(60)
for step in steps:
    train(step)
    optimizer.step()
    optimizer.zero_grad()
    if step.number == 12:
        break
print("result:", run.hash())
"""
    expected, outcome = outcome_of(tmp_path, body)
    assert _results(outcome.output) == expected, outcome
    assert outcome.duration < TIMEOUT / 2, outcome


def test_a_dataset_that_needs_worker_init_fn_survives_a_loss(tmp_path):
    body = """
handle = None

class Lazy(torch.utils.data.Dataset):
    def __len__(self):
        return 100

    def __getitem__(self, index):
        return handle[index], handle[index].sum(0, keepdim=True)

def open_handle(worker):
    global handle
    handle = inputs

run = ElasticRun(model, optimizer, micro_batches=6)
loader = run.loader(Lazy(), batch_size=4, num_workers=1, worker_init_fn=open_handle)
for step in run.steps(8):
    train(step)
    optimizer.step()
    optimizer.zero_grad()
print("result:", run.hash())
"""
    fault = Fault("elastic:forward", kill(), rank=0, nth=5)
    expected, outcome = outcome_of(tmp_path, body, fault)
    assert _results(outcome.output) == expected, outcome


def test_on_change_must_not_evaluate(tmp_path):
    script = tmp_path / "train.py"
    body = """
def on_change(change):
    run.evaluate(lambda batch: 0.0, loader)

run, loader = make(on_change=on_change)
for step in run.steps(100):
    train(step)
    optimizer.step()
    optimizer.zero_grad()
"""
    script.write_text(PROLOGUE + body)
    fault = Fault("elastic:forward", kill(), rank=2, nth=5)
    outcome = run_elastic(script, ranks=3, faults=[fault], timeout=TIMEOUT)
    assert outcome.exit_code == 1, outcome
    assert "on_change= must not call run.evaluate()" in outcome.output, outcome


def test_a_state_that_cannot_be_sent_is_refused_before_a_rank_is_lost(tmp_path):
    script = tmp_path / "train.py"
    body = """
class Seen:
    value = None

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]

seen = Seen()
run, loader = make(state={"seen": seen})
for step in run.steps(100):
    train(step)
    seen.value = {step.number}  # a set
"""
    script.write_text(PROLOGUE + body)
    outcome = run_elastic(script, ranks=2, timeout=TIMEOUT)
    assert outcome.exit_code == 1, outcome
    assert "seen.value has unsupported type set" in outcome.output, outcome
    assert "A worker that joins an elastic run gets this state" in outcome.output, outcome
