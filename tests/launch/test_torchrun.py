import sys

import pytest

from phalanx.env import usable_cores
from phalanx.errors import InvalidArgument

from .internals import torchrun_command, torchrun_options


@pytest.fixture
def command(script):
    path = str(script("", name="train.py"))

    def build(*args, **given):
        python, *line = torchrun_command(path, args, **given)
        assert python == sys.executable
        assert line[:2] == ["-m", "torch.distributed.run"]
        return [word if word != path else "train.py" for word in line[2:]]

    return build


def test_all_options_are_passed_to_torchrun(command):
    torchrun_args = torchrun_options(
        nnodes="1:4",
        node_rank=1,
        rdzv_endpoint="host0:29400",
        rdzv_backend="etcd",
        rdzv_id="job",
        master_addr="host0",
        master_port=29500,
    )
    assert command(
        "--lr", "1", torchrun_args=torchrun_args, ranks=8, max_restarts=3, grace=5.0
    ) == [
        "--nnodes=1:4",
        "--node-rank=1",
        "--rdzv-endpoint=host0:29400",
        "--rdzv-backend=etcd",
        "--rdzv-id=job",
        "--master-addr=host0",
        "--master-port=29500",
        "--nproc-per-node=8",
        "--max-restarts=3",
        "--shutdown-timeout=5",
        "train.py",
        "--lr",
        "1",
    ]


def test_options_not_given_are_left_to_torchrun(command):
    torchrun_args = torchrun_options(nnodes="2", node_rank=0)
    assert command(torchrun_args=torchrun_args, ranks=1) == [
        "--nnodes=2",
        "--node-rank=0",
        "--nproc-per-node=1",
        "--max-restarts=0",
        "train.py",
    ]


def test_module_option_is_passed_to_torchrun():
    command = torchrun_command(
        "json.tool", ["-x"], torchrun_args=torchrun_options(), ranks=1, module=True
    )
    assert command[-3:] == ["-m", "json.tool", "-x"]


def test_an_endpoint_without_node_rank_selects_the_c10d_backend():
    assert torchrun_options(rdzv_endpoint="h:1") == ["--rdzv-endpoint=h:1", "--rdzv-backend=c10d"]
    assert torchrun_options(rdzv_endpoint="h:1", node_rank=0) == [
        "--node-rank=0",
        "--rdzv-endpoint=h:1",
    ]


def test_a_missing_script_is_reported_before_torchrun_starts(tmp_path):
    with pytest.raises(InvalidArgument, match="not found"):
        torchrun_command(
            tmp_path / "missing.py", torchrun_args=torchrun_options(nnodes="2"), ranks=1
        )


def test_no_multi_node_option_means_no_torchrun_arguments():
    assert not torchrun_options()
    assert torchrun_options(node_rank=0)


@pytest.mark.parametrize(
    ("option", "named"),
    [
        (["--no-prefix"], "--prefix/--no-prefix"),
        (["--linger", "3"], "--linger"),
        (["--full-tracebacks"], "--full-tracebacks"),
    ],
)
def test_options_without_a_torchrun_counterpart_are_rejected(phalanx, script, option, named):
    done = phalanx("run", "-n", 1, "--node-rank", 0, *option, script(""))
    assert done.returncode == 2
    assert f"{named} cannot be used with --node-rank" in done.stderr


@pytest.mark.slow
def test_torchrun_runs_the_ranks(phalanx, script):
    path = script(
        """
        import os, sys
        names = ("RANK", "WORLD_SIZE", "GROUP_RANK", "OMP_NUM_THREADS", "TORCHELASTIC_RUN_ID")
        words = [*(os.environ[name] for name in names), *sys.argv[1:]]
        # In one write: torchrun interleaves the lines of ranks.
        os.write(1, (" ".join(words) + "\\n").encode())
        """
    )
    place = ["--nnodes", 1, "--rdzv-endpoint", "127.0.0.1:0", "--rdzv-id", "job"]
    done = phalanx("run", "-n", 2, *place, path, "--help")
    assert done.returncode == 0, done.stderr
    threads = max(1, usable_cores() // 2)
    assert sorted(done.stdout.splitlines()) == [
        f"{rank} 2 0 {threads} job --help" for rank in range(2)
    ]
