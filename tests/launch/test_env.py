import os
import subprocess
import sys
import types

import pytest
from torch import version as torch_version

from phalanx.env import (
    RankEnv,
    find_accelerator,
    job_id,
    launched_rank,
    local_ranks,
    read_rank_env,
    usable_cores,
)
from phalanx.errors import InvalidArgument

from .internals import _quotas

FULL = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RESTART_COUNT": "2",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}


def test_read_rank_env_reads_the_launcher_variables():
    assert read_rank_env(FULL) == RankEnv(
        rank=5,
        world_size=8,
        local_rank=1,
        local_world_size=4,
        node_rank=1,
        master_addr="127.0.0.1",
        master_port=29500,
        restart_count=2,
        agent_store=True,
    )


def test_without_a_launcher_there_is_no_rank():
    assert launched_rank(FULL) == read_rank_env(FULL)
    assert launched_rank({}) is launched_rank({"RANK": "1"}) is None


def test_job_id_comes_from_the_store_address_or_the_scheduler():
    assert job_id(FULL) == "MASTER_ADDR=127.0.0.1 MASTER_PORT=29500"
    assert job_id({"SLURM_JOB_ID": "7"}) == "SLURM_JOB_ID=7"
    assert job_id({}) == ""


def test_local_ranks_come_from_the_launcher():
    assert local_ranks(FULL) == 4
    assert local_ranks({}) is None


def test_rank_and_world_size_are_enough():
    assert read_rank_env({"RANK": "0", "WORLD_SIZE": "1"}) == RankEnv(rank=0, world_size=1)


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE"])
def test_a_missing_variable_is_named_in_the_error(name):
    with pytest.raises(InvalidArgument, match=rf"{name} is not set.*phalanx run"):
        read_rank_env({**FULL, name: ""})


@pytest.mark.parametrize(
    ("name", "value", "bounds"),
    [
        ("RANK", "one", "from 0 to 7"),
        ("RANK", "8", "from 0 to 7"),
        ("RANK", "-1", "from 0 to 7"),
        ("WORLD_SIZE", "0", "of at least 1"),
        ("WORLD_SIZE", "1_0", "of at least 1"),
        ("LOCAL_RANK", "4", "from 0 to 3"),
        ("LOCAL_WORLD_SIZE", "9", "from 1 to 8"),
        ("MASTER_PORT", "70000", "from 0 to 65535"),
    ],
)
def test_an_invalid_value_names_the_variable_and_its_bounds(name, value, bounds):
    with pytest.raises(InvalidArgument) as caught:
        read_rank_env({**FULL, name: value})
    assert f"{name} must be" in str(caught.value)
    assert repr(value) in str(caught.value)
    assert bounds in str(caught.value)


def test_usable_cores_follow_cpu_affinity():
    one = min(os.sched_getaffinity(0))
    code = (
        f"import os; os.sched_setaffinity(0, [{one}]); "
        "from phalanx.env import usable_cores; print(usable_cores())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "1"
    assert 1 <= usable_cores() <= len(os.sched_getaffinity(0))


def test_a_quota_of_an_enclosing_cgroup_applies(tmp_path):
    membership = tmp_path / "membership"
    membership.write_text("1:cpu:/\n0::/jobs/mine\n")
    (tmp_path / "jobs/mine").mkdir(parents=True)
    (tmp_path / "jobs/mine/cpu.max").write_text("max 100000\n")
    (tmp_path / "jobs/cpu.max").write_text("250000 100000\n")
    assert list(_quotas(tmp_path, membership)) == [3]


def test_a_cgroup_v1_quota_applies(tmp_path):
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu/cpu.cfs_quota_us").write_text("400000\n")
    (tmp_path / "cpu/cpu.cfs_period_us").write_text("100000\n")
    assert list(_quotas(tmp_path, tmp_path / "missing")) == [4]


@pytest.mark.parametrize("text", ["-1\n", "", "garbage"])
def test_an_unlimited_or_invalid_quota_is_ignored(tmp_path, text):
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu/cpu.cfs_quota_us").write_text(text)
    (tmp_path / "cpu/cpu.cfs_period_us").write_text("100000\n")
    assert list(_quotas(tmp_path, tmp_path / "missing")) == []


@pytest.mark.parametrize(
    ("build", "device", "environ", "expected"),
    [
        (["cuda"], "nvidiactl", {}, "cuda"),
        (["cuda"], "nvidia0", {"CUDA_VISIBLE_DEVICES": "0,1"}, "cuda"),
        (["cuda"], "nvidia0", {"CUDA_VISIBLE_DEVICES": ""}, None),
        (["cuda"], "nvidia0", {"CUDA_VISIBLE_DEVICES": "-1"}, None),
        (["cuda"], "null", {}, None),
        ([], "nvidia0", {}, None),
        (["hip"], "kfd", {}, "hip"),
        (["hip"], "kfd", {"HIP_VISIBLE_DEVICES": ""}, None),
        (["xpu"], "dri/renderD128", {}, "xpu"),
    ],
)
def test_an_accelerator_is_one_that_torch_was_built_for_and_the_machine_has(
    tmp_path, monkeypatch, build, device, environ, expected
):
    monkeypatch.setattr("phalanx.env._torch_build", lambda: build)
    (tmp_path / device).parent.mkdir(exist_ok=True)
    (tmp_path / device).touch()
    assert find_accelerator(environ, dev=tmp_path) == expected


def test_a_stub_of_a_device_package_is_no_accelerator(monkeypatch, tmp_path):
    monkeypatch.setattr("phalanx.env._torch_build", list)
    monkeypatch.setitem(sys.modules, "torch_xla", types.ModuleType("torch_xla"))
    assert find_accelerator({}, dev=tmp_path) is None


def test_the_build_of_torch_is_known_without_importing_it():
    code = (
        "import sys; from phalanx.env import _torch_build; "
        "print(_torch_build(), 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    version = torch_version.__dict__
    built = [kind for kind in ("cuda", "hip", "xpu") if version[kind]]
    assert done.stdout == f"{built} False\n"


def test_variables_that_a_process_has_changed():
    """Not those that it was started with, nor what torch's compiler sets."""
    program = """if True:
        import os
        from phalanx.env import changed_variables

        assert changed_variables() == []
        os.environ["NEW"], os.environ["KEPT"], os.environ["CHANGED"] = "1", "2", "4"
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.environ["LC_CTYPE"] = "x"
        del os.environ["REMOVED"]
        assert changed_variables() == ["CHANGED", "NEW", "REMOVED"]
        os.environ["TORCHINDUCTOR_FREEZING"] = "1"
        assert changed_variables() == ["CHANGED", "NEW", "REMOVED", "TORCHINDUCTOR_FREEZING"]
        os.environ["PHALANX_ELASTIC"] = "{}"  # as if it was overwritten where the process began
        assert changed_variables() == ["unknown variables"]
    """
    environ = {**os.environ, "KEPT": "2", "CHANGED": "3", "REMOVED": "", "EMPTY": ""}
    subprocess.run([sys.executable, "-c", program], env=environ, check=True)
