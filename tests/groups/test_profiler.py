"""Calls in torch's profiler: their names, ranges and nesting, and nothing while none runs.

`torch.profiler` is a schedule around the profiler used here, and takes a second to import.
"""

import json

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.autograd.profiler import profile

from phalanx import native
from phalanx.groups import new_group
from phalanx.testing import over_groups

needs_engine = pytest.mark.skipif(native.engine is None, reason="the engine was not built")
OURS = ["local", *(["shm"] if native.engine is not None else [])]


def profiled(body, *, is_observed=True, **options):
    """Run `body` under a profiler and return it; None if the rank has none."""
    if not is_observed:
        body()
        return None
    with profile(**options) as profiler:
        body()
    return profiler


def observes(group):
    """Whether this rank has a profiler: a process can have one, on one of its threads."""
    return group.backend != "local" or group.rank() == 0


def ranges(profiler, prefix):
    return [event for event in profiler.function_events if event.name.startswith(prefix)]


def names(profiler, prefix):
    return [event.name for event in ranges(profiler, prefix)]


def assert_nested(profiler, path):
    """Raise if two ranges of a thread overlap and neither contains the other."""
    profiler.export_chrome_trace(str(path))
    by_thread = {}
    for event in json.loads(path.read_text())["traceEvents"]:
        if event["ph"] == "X" and event.get("cat") in ("cpu_op", "user_annotation"):
            by_thread.setdefault(event["tid"], []).append(event)
    assert by_thread
    for events in by_thread.values():
        ends = []
        for event in sorted(events, key=lambda each: (each["ts"], -each["dur"])):
            end = event["ts"] + event["dur"]
            while ends and ends[-1] <= event["ts"]:
                ends.pop()
            assert not ends or end <= ends[-1] + 0.01, event["name"]  # rounded to nanoseconds
            ends.append(end)


@over_groups(backends=OURS, sizes=(2,), reuse=True)
def test_functions_of_torch_have_one_range_in_the_words_of_torch_engines(group):
    rank, size = group.rank(), group.size()
    one, whole = torch.ones(3, 2), torch.ones(3 * size, 2)
    many = [torch.ones(3, 2) for _ in range(size)]
    lists = {"group": group, "group_dst": 0}, {"group": group, "group_src": 0}

    def call_everything():
        dist.all_reduce(one, group=group)
        dist.all_reduce(one.to_sparse(), group=group)
        dist.broadcast(one, group_src=0, group=group)
        dist.reduce(one, group_dst=0, group=group)
        dist.all_gather(many, one, group=group)
        dist.all_gather_single(whole, one, group=group)
        dist.gather(one, many if rank == 0 else None, **lists[0])
        dist.scatter(one, many if rank == 0 else None, **lists[1])
        dist.reduce_scatter(one, many, group=group)
        dist.reduce_scatter_single(one, whole, group=group)
        dist.all_to_all(many, [one] * size, group=group)
        dist.all_to_all_single(whole, torch.ones_like(whole), group=group)
        dist.barrier(group=group)

    profiler = profiled(call_everything, is_observed=observes(group))
    if profiler is None:
        return
    words = [name.removeprefix(f"{group.backend}:") for name in names(profiler, group.backend)]
    assert words == [
        "all_reduce", "sparse_all_reduce", "broadcast", "reduce", "all_gather", "all_gather",
        "gather", "scatter", "reduce_scatter", "reduce_scatter", "all_to_all", "all_to_all",
        "barrier",
    ]  # fmt: skip
    assert not any(event.is_async for event in ranges(profiler, group.backend))


@over_groups(backends=OURS, sizes=(2,), reuse=True)
def test_a_call_that_is_waited_for_later_has_two_ranges(group, tmp_path):
    rank, backend = group.rank(), group.backend
    tensors = [torch.ones(4), torch.ones(5)]

    def overlap():
        works = [group.allreduce(tensor) for tensor in tensors]
        torch.mm(torch.ones(2, 2), torch.ones(2, 2))
        for work in works:
            work.wait()
            work.wait()
        if rank == 0:
            group.send(tensors[0], 1).wait()
        else:
            group.recv_anysource(tensors[0]).wait()

    profiler = profiled(overlap, is_observed=observes(group), record_shapes=True)
    if profiler is None:
        return
    transfer = "send" if rank == 0 else "recvAnySource"
    words = ["all_reduce"] * 2 + ["all_reduce_wait"] * 2 + [transfer, f"{transfer}_wait"]
    found = ranges(profiler, f"{backend}:")
    assert [event.name for event in found] == [f"{backend}:{word}" for word in words]
    assert [event.input_shapes for event in found[:3]] == [[[4]], [[5]], []]
    assert all(event.cpu_parent is None and event.is_user_annotation for event in found)
    assert_nested(profiler, tmp_path / f"{rank}.json")


@over_groups(backends=OURS, sizes=(2,), reuse=True)
def test_functional_collectives_contain_the_ranges_of_the_group(group, tmp_path):
    def reduce():
        functional.wait_tensor(functional.all_reduce(torch.ones(3), "sum", group))

    profiler = profiled(reduce, is_observed=observes(group))
    if profiler is None:
        return
    parents = {event.name: event.cpu_parent.name for event in ranges(profiler, group.backend)}
    assert parents == {
        f"{group.backend}:all_reduce": "_c10d_functional::all_reduce",
        f"{group.backend}:all_reduce_wait": "_c10d_functional::wait_tensor",
    }
    assert_nested(profiler, tmp_path / f"{group.rank()}.json")


@over_groups(backends=["gloo"], sizes=(2,), reuse=True)
def test_gloo_records_its_calls_itself(group):
    tensor = torch.ones(3)
    profiler = profiled(lambda: [group.allreduce(tensor).wait() for _ in range(3)])
    assert names(profiler, "gloo") == ["gloo:all_reduce"] * 3
    assert all(event.is_async for event in ranges(profiler, "gloo"))


@needs_engine
@over_groups(backends=["shm"], sizes=(1, 2), reuse=True)
def test_the_fast_path_is_taken_again_when_the_profiler_has_stopped(group):
    tensor = torch.ones(3)

    def kinds():
        works = [group.allreduce(tensor), group.allreduce(tensor, op=dist.ReduceOp.AVG)]
        works.append(group.barrier())
        for work in works:
            work.wait()
        return [type(work).__name__ for work in works]

    found = []
    assert kinds() == ["FastPathWork"] * 3
    profiler = profiled(lambda: found.extend(kinds()))
    assert kinds() == ["FastPathWork"] * 3
    assert found == ["Work"] * 3
    starts = ["shm:all_reduce", "shm:all_reduce", "shm:barrier"]
    assert names(profiler, "shm") == starts + [f"{name}_wait" for name in starts]


@needs_engine
def test_nothing_is_recorded_of_calls_before_and_after():
    group = new_group("shm", rank=0, world_size=1, store=dist.HashStore())
    before = group.broadcast(torch.ones(3))
    with profile() as profiler:
        before.wait()
        during = group.broadcast(torch.ones(3))
    during.wait()
    assert before.profiler_range is None
    assert names(profiler, "shm") == ["shm:broadcast"]


@needs_engine
def test_the_range_of_a_call_that_fails_ends():
    group = new_group("shm", rank=0, world_size=1, store=dist.HashStore())
    options = dist.AllreduceOptions()
    options.asyncOp = False  # as torch's functions do, which wait themselves

    def fail():
        raise KeyboardInterrupt

    with profile() as profiler:
        with pytest.raises(KeyboardInterrupt) as caught:
            group._issue("allreduce", [torch.ones(3)], fail, (), options)
        torch.mm(torch.ones(2, 2), torch.ones(2, 2))
    assert caught.value
    (product,) = (event for event in profiler.function_events if event.name == "aten::mm")
    assert product.cpu_parent is None
    assert names(profiler, "shm") == ["shm:all_reduce"]


@needs_engine
def test_key_averages_of_the_schedule_have_the_names(tmp_path):
    group = new_group("shm", rank=0, world_size=1, store=dist.HashStore())
    schedule = torch.profiler.schedule(wait=1, warmup=1, active=2)
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, schedule=schedule) as profiler:
        for _ in range(4):
            dist.all_reduce(torch.ones(3), group=group)
            profiler.step()
    counts = {event.key: event.count for event in profiler.key_averages()}
    assert counts["shm:all_reduce"] == 2
    assert_nested(profiler, tmp_path / "trace.json")


@over_groups(sizes=(2,), reuse=True)
def test_torch_knows_the_backend_of_a_group_by_device(group):
    """torch's profiler asks every group for it when torch.distributed is initialized."""
    config = dist.get_backend_config(group)
    assert f"cpu:{group.backend}" in config.split(",")
    assert dist.distributed_c10d._get_pg_config(group)["backend_config"] == config
