"""Process ranks: results, reuse, and the environment of a body."""

import os
import random
import resource
import sys
import threading
import time
import warnings
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from phalanx.errors import InvalidArgument, InvalidState, InvalidType, RanksFailed
from phalanx.testing import RankFailures, RankPool


def pids(ranks, size=None):
    return ranks.run(report_pid, size)


def wait_until(condition, *, timeout=10.0):
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)


def report_pid(ctx):
    return os.getpid()


def report_place(ctx, *args, **kwargs):
    return ctx.rank, ctx.size, args, kwargs


def test_results_are_ordered_by_rank(ranks):
    given = {"args": (1, "a"), "kwargs": {"k": [2]}}
    assert ranks.run(report_place, 3, **given) == [
        (rank, 3, (1, "a"), {"k": [2]}) for rank in range(3)
    ]


def test_run_uses_all_ranks_by_default(ranks):
    assert len(ranks.run(report_place)) == ranks.size == 4


def test_processes_are_reused(ranks):
    first = pids(ranks)
    assert len({os.getpid(), *first}) == 5
    assert pids(ranks) == first
    assert pids(ranks, 2) == first[:2]


def return_tensor(ctx, tensor):
    return tensor + ctx.rank


def test_tensors_can_be_arguments_and_results(ranks):
    results = ranks.run(return_tensor, 2, args=(torch.ones(2),))
    assert [each.tolist() for each in results] == [[1, 1], [2, 2]]


def exchange(ctx):
    fresh = not ctx.store.check([str(ctx.rank)])
    ctx.store.set(str(ctx.rank), f"from {ctx.rank}")
    return fresh, [ctx.store.get(str(rank)) for rank in range(ctx.size)]


def test_each_run_has_a_new_shared_store(ranks):
    for _ in range(2):
        assert ranks.run(exchange, 2) == [(True, [b"from 0", b"from 1"])] * 2


def allreduce(ctx):
    group = ctx.group()
    tensor = torch.tensor([float(ctx.rank)])
    group.allreduce(tensor).wait()
    return group.backend, tensor.item()


def test_a_context_forms_groups(ranks):
    assert ranks.run(allreduce, 3) == [("gloo", 3.0)] * 3


formed = []


def form_in_a_cycle(ctx):
    group = ctx.group()
    group.itself = group
    formed.append(weakref.ref(group))


def is_freed(ctx):
    return formed.pop()() is None


def test_groups_of_a_body_are_freed_before_the_next(ranks):
    """A group in a reference cycle used to live as long as the process, with Gloo's threads."""
    ranks.run(form_in_a_cycle, 2)
    assert ranks.run(is_freed, 2) == [True, True]


def hold_a_thread_of_gloo(ctx, group, until):
    """Let a thread of rank 0's Gloo wait for an event, then a moment, when it frees a tensor."""
    holds = threading.Event()

    def hold():
        holds.set()
        until.wait()
        time.sleep(0.1)

    gloo = group._get_backend(torch.device("cpu"))
    if ctx.rank == 0:
        tensor = torch.ones(1)
        weakref.finalize(tensor, hold)
        gloo.allreduce([tensor])
        del tensor  # while Gloo waits for the other rank
        ctx.store.set("only Gloo has the tensor", "")
        assert holds.wait(10)
    else:
        ctx.store.wait(["only Gloo has the tensor"])
        gloo.allreduce([torch.ones(1)]).wait()


def leave_torchs_ddp(ctx, closed_by):
    if closed_by == "context":
        group = ctx.group("gloo")
    else:
        dist.init_process_group("gloo", store=ctx.store, rank=ctx.rank, world_size=ctx.size)
        group = dist.group.WORLD
    ddp = DistributedDataParallel(nn.Linear(1, 1), process_group=group)
    ddp.itself = [ddp]
    is_freed = threading.Event()
    weakref.finalize(ddp, is_freed.set)
    hold_a_thread_of_gloo(ctx, group, is_freed)
    if closed_by == "body":
        ctx.keep(group)
        dist.destroy_process_group()


@pytest.mark.parametrize("closed_by", ["body", "pool", "context"])
def test_torchs_ddp_can_outlive_its_group(ranks, closed_by):
    """Its reducer freed the group under the GIL, and Gloo joined a thread that needed the GIL."""
    ranks.run(leave_torchs_ddp, 2, args=(closed_by,), timeout=15)


# -- pickling --------------------------------------------------------------------------------


def test_a_body_must_be_importable(ranks):
    def local(ctx):
        return None

    for body in (local, lambda ctx: ctx):
        with pytest.raises(InvalidArgument, match="ranks cannot import"):
            ranks.run(body, 1)


def test_an_unpicklable_argument_is_rejected(ranks):
    with pytest.raises(InvalidType, match=r"argument .* is not picklable"):
        ranks.run(report_pid, 1, args=(threading.Lock(),))


def return_lock(ctx):
    return threading.Lock()


def test_an_unpicklable_result_fails_the_rank(ranks):
    with pytest.raises(RankFailures, match=r"the result of type lock is not picklable"):
        ranks.run(return_lock, 1)


class Unreadable:
    def __reduce__(self):
        return int, ("not a number",)


def return_unreadable(ctx):
    return Unreadable()


def test_a_result_that_cannot_be_unpickled_fails_the_run(ranks):
    with pytest.raises(RankFailures, match="invalid literal for int"):
        ranks.run(return_unreadable, 1)
    assert ranks.run(report_place, 1)


def test_an_argument_that_cannot_be_unpickled_fails_the_run(ranks):
    with pytest.raises(RankFailures, match="invalid literal for int"):
        ranks.run(report_pid, 1, args=(Unreadable(),))


@pytest.mark.parametrize("size", [0, 5])
def test_a_size_out_of_range_is_rejected(ranks, size):
    with pytest.raises(InvalidArgument, match=f"must be 1 to 4, got {size}"):
        ranks.run(report_pid, size)


# -- process state ---------------------------------------------------------------------------


def look_around(ctx):
    return os.environ.get("PHALANX_PROBE"), os.getcwd(), sys.path


def make_a_mess(ctx):
    os.environ["PHALANX_PROBE"] = "mess"
    os.chdir("/")
    sys.path.clear()
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    torch.set_num_threads(2)
    torch.manual_seed(ctx.rank)
    dist.init_process_group("gloo", store=ctx.store, rank=ctx.rank, world_size=ctx.size)
    dist.barrier()  # torch's group does not stand a rank that leaves while others still enter
    return os.getpid()


def look_for_the_mess(ctx):
    assert os.environ.get("PHALANX_PROBE") is None
    assert torch.get_default_dtype() is torch.float32
    assert torch.is_grad_enabled()
    assert torch.get_num_threads() == 1
    assert not dist.is_initialized()
    return os.getpid(), torch.rand(1).item(), random.random()


def test_a_body_sees_the_callers_environment_and_directory(ranks, monkeypatch, tmp_path):
    monkeypatch.setenv("PHALANX_PROBE", "seen")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert ranks.run(look_around, 1) == [("seen", str(tmp_path), sys.path)]


def test_state_of_an_earlier_body_is_reset(ranks):
    before = ranks.run(make_a_mess, 2)
    after = ranks.run(look_for_the_mess, 2)
    assert [pid for pid, *_ in after] == before
    assert after[0][1:] == after[1][1:]


def warn(ctx):
    warnings.warn("careful", UserWarning, stacklevel=1)
    return "went on"


def test_warning_filters_of_the_caller_apply(ranks):
    with pytest.raises(RankFailures, match="UserWarning: careful"):
        ranks.run(warn, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert ranks.run(warn, 1) == ["went on"]


def print_much(ctx):
    for _ in range(64):
        print("x" * (1 << 20))


def convert_without_descriptors(ctx):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        return float(torch.ones(4).to(torch.float16).sum())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_new_rank_converts_tensors_without_descriptors(ranks):
    """torch detects the CPU once per process; a failure would outlast the body that caused it."""
    (pid,) = pids(ranks, 1)
    os.kill(pid, 9)
    wait_until(lambda: not os.path.exists(f"/proc/{pid}"))
    assert ranks.run(convert_without_descriptors, 1) == [4.0]


def test_large_output_does_not_block_a_rank(ranks, capfd):
    ranks.run(print_much, 2)
    assert capfd.readouterr() == ("", "")


# -- pool lifecycle --------------------------------------------------------------------------


def test_a_rank_that_died_while_idle_is_replaced(ranks):
    first = pids(ranks, 2)
    os.kill(first[1], 9)
    wait_until(lambda: not os.path.exists(f"/proc/{first[1]}"))
    second = pids(ranks, 2)
    assert second[0] == first[0]
    assert second[1] != first[1]


def parent_pid(ctx):
    return os.getppid()


@pytest.mark.slow
def test_a_pool_survives_the_death_of_its_template_process():
    with RankPool(1) as pool:
        pool.start()
        (template,) = pool.run(parent_pid)
        os.kill(template, 9)
        wait_until(lambda: pool_is_broken(pool))
        assert pool.run(parent_pid) != [template]
    with pytest.raises(InvalidState, match="closed"):
        pool.run(parent_pid)


def test_a_failing_preload_is_reported():
    with (
        RankPool(1, preload=["no_such_module"]) as pool,
        pytest.raises(RanksFailed, match=r"pool died:(?s:.*)No module named 'no_such_module'"),
    ):
        pool.run(parent_pid)


def pool_is_broken(pool):
    try:
        pool.run(parent_pid)
    except RanksFailed:
        return True
    return False
