"""over_groups: one test body on many kinds of group."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from phalanx.testing import over_groups


@over_groups(split=True)
def test_a_body_runs_over_every_group(group):
    tensor = torch.full((3,), float(group.rank()))
    group.allreduce(tensor).wait()
    assert tensor.tolist() == [sum(range(group.size()))] * 3


@over_groups(backends=("local",), sizes=(), split=True)
def test_the_halves_of_a_split_are_separate_groups(group, ctx):
    tensor = torch.tensor([ctx.rank])
    group.allreduce(tensor).wait()
    assert tensor.item() == (2 if ctx.rank % 2 == 0 else 4)
    assert (ctx.size, group.size()) == (4, 2)


@over_groups(sizes=(2,))
@pytest.mark.parametrize("value", [1, 2])
def test_other_parameters_reach_the_ranks(group, ctx, value, tmp_path):
    (tmp_path / f"{ctx.rank}").write_text(str(value))
    group.barrier().wait()
    assert [each.read_text() for each in tmp_path.iterdir()] == [str(value)] * 2


@over_groups(backends=("gloo",), sizes=(1,), name="of my own")
def test_options_reach_the_group(group):
    assert group.label == "of my own"


seen = []


@over_groups(backends=("gloo",), sizes=(2,), split=True, reuse=True)
def use(group):
    tensor = torch.ones(1)
    group.allreduce(tensor).wait()
    assert tensor.item() == 2
    seen.append(group)


@pytest.fixture
def used_before(ranks, threads, group_case):
    for _ in range(2):
        use(ranks=ranks, threads=threads, group_case=group_case)


@over_groups(backends=("gloo",), sizes=(2,), split=True, reuse=True)
def test_a_group_is_reused_between_tests(group, used_before):
    use.body(group)
    assert seen[-3:] == [group] * 3


@pytest.fixture(params=[False, True])
def replaced(ranks, request):
    if request.param:
        ranks.run(die_on_rank_1, 2, expect_dead={1})


def die_on_rank_1(ctx):
    if ctx.rank == 1:
        os._exit(0)


@over_groups(backends=("gloo",), sizes=(2,), reuse=True)
def test_a_group_is_not_reused_after_a_rank_was_replaced(group, replaced):
    group.barrier().wait()


FAILING = """
import pytest
from phalanx.testing import over_groups
from phalanx.testing.pytest_plugin import ranks, threads

@over_groups(backends=("local", "gloo"), sizes=(2,))
def test_fails(group):
    group.barrier().wait()
    assert group.rank() == 3 * group.size()

def body(ctx):
    assert ctx.size == 3

def test_also(ranks):
    ranks.run(body, 2)
"""


@pytest.mark.slow
def test_a_failure_is_reported_once(tmp_path):
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "test_failing.py").write_text(FAILING)
    # This suite itself runs in the other import mode.
    pytest_command = str(Path(sys.executable).with_name("pytest"))
    done = subprocess.run(
        [pytest_command, "-q", "-p", "no:cacheprovider", "--import-mode=importlib", "inner"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    report, _, summary = done.stdout.partition("short test summary")
    assert report.count("AssertionError: assert 0 == (3 * 2)") == 2, done.stdout
    assert report.count("AssertionError: assert 1 == (3 * 2)") == 2
    assert report.count("AssertionError: assert 2 == 3") == 1
    assert str(Path("phalanx", "testing")) not in report, done.stdout
    assert "3 failed" in summary
