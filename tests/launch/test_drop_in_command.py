"""`phalanx run --drop-in` and `phalanx doctor --drop-in`."""

import json
import subprocess
import sys

import pytest

from phalanx.env import find_accelerator
from phalanx.errors import InvalidArgument, InvalidState

from .conftest import clean_env
from .internals import analyze_script, default_env, drop_in_env

on_cpus = pytest.mark.skipif(find_accelerator() is not None, reason="replaces on CPUs only")

# torch's DDP keeps the group, and so Gloo's threads, after it is destroyed. A thread that releases
# the last tensor while the interpreter finalizes aborts the process: on a busy machine torch's own
# script does so now and then. It ends without finalizing; ours ends as any script does.
TRAINING = """
    import os
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel as DDP

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DDP(torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(dist.get_rank())
    for _ in range(5):
        inputs = torch.randn(4, 8)
        loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    dist.all_reduce(loss)
    package = DDP.__module__.partition(".")[0]
    if dist.get_rank() == 0:
        print(f"{loss.item():.9g} {package} {dist.get_backend()}", flush=True)
    dist.destroy_process_group()
    if package == "torch":
        os._exit(0)
"""
LINE = "phalanx drop-in: backend gloo -> auto (shm); DistributedDataParallel -> phalanx.DDP"


@on_cpus
@pytest.mark.slow
def test_a_script_for_gloo_trains_unchanged_to_the_same_loss(phalanx, script):
    path = script(TRAINING)
    plain = phalanx("run", "-n", 2, "--no-prefix", path)
    ours = phalanx("run", "-n", 2, "--no-prefix", "--drop-in", path)
    assert plain.returncode == ours.returncode == 0, plain.stderr + ours.stderr
    loss, package, backend = plain.stdout.split()
    assert (package, backend) == ("torch", "gloo")
    assert "drop-in" not in plain.stderr
    assert ours.stdout.split() == [loss, "phalanx", "gloo"]
    assert [each for each in ours.stderr.splitlines() if "drop-in" in each] == [LINE]


@on_cpus
@pytest.mark.slow
def test_the_switch_works_under_torchrun(script, tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", script(TRAINING)],
        capture_output=True,
        text=True,
        timeout=100,
        cwd=tmp_path,
        env=clean_env({"PHALANX_DROP_IN": "1", "OMP_NUM_THREADS": "1"}),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[1:] == ["phalanx", "gloo"]
    assert [each for each in done.stderr.splitlines() if "drop-in" in each] == [LINE]


@pytest.mark.slow
def test_an_invalid_switch_raises_where_the_group_is_created(script, tmp_path):
    path = script("""
        import torch.distributed as dist
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    """)
    env = clean_env({"PHALANX_DROP_IN": "yes"})
    done = subprocess.run(
        [sys.executable, path], capture_output=True, text=True, timeout=100, env=env, check=False
    )
    assert "environment variable PHALANX_DROP_IN must be a number from 0 to 1, got 'yes'" in (
        done.stderr
    )


def test_drop_in_is_refused_where_it_has_no_effect():
    assert drop_in_env({}, drop_in=False) == {}
    assert drop_in_env({"PHALANX_DROP_IN": "1"}, drop_in=False) == {"PHALANX_DROP_IN": "1"}
    assert drop_in_env({"PHALANX_DROP_IN": "0"}, drop_in=True) == {"PHALANX_DROP_IN": "1"}
    with pytest.raises(InvalidState, match="TORCH_DEVICE_BACKEND_AUTOLOAD=0"):
        drop_in_env({"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}, drop_in=True)
    with pytest.raises(InvalidArgument, match="PHALANX_DROP_IN"):
        drop_in_env({"PHALANX_DROP_IN": "on"}, drop_in=False)


def test_an_invalid_switch_is_a_usage_error(cli, script):
    done = cli("run", "-n", 1, script(""), env={"PHALANX_DROP_IN": "on"})
    assert done.returncode == 2
    assert "PHALANX_DROP_IN must be a number from 0 to 1, got 'on'" in done.stderr


@on_cpus
def test_accelerate_is_told_that_there_are_only_cpus(monkeypatch):
    assert default_env(2, {})["ACCELERATE_USE_CPU"] == "true"
    monkeypatch.setattr("phalanx.launch._job.find_accelerator", lambda _: "cuda")
    assert "ACCELERATE_USE_CPU" not in default_env(2, {})


def test_a_users_choice_for_accelerate_is_kept(phalanx, script):
    path = script("import os; print(os.environ['ACCELERATE_USE_CPU'])")
    done = phalanx("run", "-n", 1, "--no-prefix", path, env={"ACCELERATE_USE_CPU": "no"})
    assert done.stdout == "no\n", done.stderr


# -- phalanx doctor --drop-in ------------------------------------------------------------------

SCRIPT = """\
    import torch.distributed as dist
    from torch.distributed import init_process_group as init, Backend
    import torch.nn as nn
    import torch
    from accelerate import Accelerator

    dist.init_process_group("gloo")
    init(Backend.GLOO, rank=0, world_size=1)
    torch.distributed.init_process_group(init_method="env://")
    dist.init_process_group("nccl")
    dist.init_process_group("gloo", pg_options=object())
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    dist.init_process_group(**settings)
    dist.new_group([0, 1])
    dist.new_group(backend="gloo")
    model = nn.parallel.DistributedDataParallel(net)
    other.init_process_group("gloo")
"""


def test_uses_of_what_drop_in_replaces_are_found_in_the_source(script):
    found = [(use.line, use.replaced_by, use.reason[:10]) for use in analyze_script(script(SCRIPT))]
    assert found == [
        (5, "auto and phalanx.DDP", ""),
        (7, "auto", ""),
        (8, "auto", ""),
        (9, "auto", ""),
        (10, "", "backend 'n"),
        (11, "", "pg_options"),
        (12, "", ""),
        (13, "", ""),
        (14, "auto", ""),
        (15, "", "a group be"),
        (16, "phalanx.DDP", ""),
    ]


@on_cpus
def test_doctor_tells_what_would_be_replaced_without_running_the_script(cli, script):
    done = cli("doctor", "--drop-in", script(SCRIPT + "    raise SystemExit('was run')\n"))
    assert done.returncode == 0, done.stdout
    lines = [" ".join(each.split()) for each in done.stdout.splitlines()]
    assert "ok entry point found by torch" in lines
    assert "ok line 7 init_process_group, backend gloo -> auto" in lines
    assert "warning line 10 init_process_group, backend nccl: kept" in lines
    assert "-> backend 'nccl' is not gloo, mpi or omitted" in lines
    assert "ok line 13 init_process_group with computed arguments: decided at run time" in lines
    assert any("was read, not run" in each for each in lines)


def test_doctor_fails_where_torch_does_not_load_phalanx(cli, script):
    env = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "PHALANX_DROP_IN": "maybe"}
    done = cli("doctor", "--json", "--drop-in", script("import torch"), env=env)
    assert done.returncode == 1
    findings = {each["label"]: each for each in json.loads(done.stdout)["findings"]}
    assert not findings["entry point"]["ok"]
    assert not findings["switch"]["ok"]
    assert "'maybe'" in findings["switch"]["detail"]
    assert "no call that drop-in replaces" in findings["script"]["detail"]


def test_doctor_needs_a_python_script(cli, script):
    done = cli("doctor", "--drop-in", script("def"))
    assert done.returncode == 2
    assert "is not a Python script" in done.stderr
