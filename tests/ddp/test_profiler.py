"""The phases of a step in torch's profiler."""

import torch
from torch import nn
from torch.autograd.profiler import profile

from cases import over_cases
from phalanx.ddp import DDP

from .whole import TINY, on_pairs

PREFIX = "DistributedDataParallel."


def make(group):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    return DDP(module, process_group=group, bucket_cap_mb=TINY)


def step(ddp):
    ddp(torch.ones(3, 6)).sum().backward()


def profiled_step(group, ddp):
    """Return the events of a step; where ranks are threads, only one has a profiler."""
    if group.backend == "local" and group.rank() != 0:
        step(ddp)
        return []
    with profile() as profiler:
        step(ddp)
    return list(profiler.function_events)


def parents(event):
    """The names of the ranges that contain an event, innermost first."""
    found = []
    while (event := event.cpu_parent) is not None:
        found.append(event.name)
    return found


@on_pairs
def test_phases_of_a_step_are_ranges_and_contain_the_calls(group):
    ddp = make(group)
    for _ in range(2):  # buckets are arranged
        step(ddp)
    events = profiled_step(group, ddp)
    if not events:
        return
    phases = [event for event in events if event.name.startswith(PREFIX)]
    counts = {}
    for event in phases:
        word = event.name.removeprefix(PREFIX)
        counts[word] = counts.get(word, 0) + 1
    buckets = len(ddp.reducer.buckets)
    assert buckets == 6
    assert counts == {
        "forward": 1,
        "sync_buffers": 1,
        "copy_grads_to_bucket": buckets,
        "finish_backward": 1,
        "wait_for_bucket": buckets,
    }
    assert all(event.is_user_annotation and not event.is_async for event in phases)
    around = {event.name: parents(event) for event in events}
    assert around[f"{PREFIX}forward"] == around[f"{PREFIX}finish_backward"] == []
    assert around[f"{PREFIX}sync_buffers"] == [f"{PREFIX}forward"]
    assert around[f"{group.backend}:broadcast"][0] == f"{PREFIX}sync_buffers"
    assert around[f"{PREFIX}wait_for_bucket"] == [f"{PREFIX}finish_backward"]
    assert around[f"{group.backend}:all_reduce_wait"][0] == f"{PREFIX}wait_for_bucket"
    assert "AccumulateGrad" in around[f"{PREFIX}copy_grads_to_bucket"][0]
    starts = [event for event in events if event.name == f"{group.backend}:all_reduce"]
    assert len(starts) == buckets
    assert [parents(event)[:1] for event in starts[-1:]] == [[f"{PREFIX}finish_backward"]]
    assert all("AccumulateGrad" in parents(event)[0] for event in starts[:-1])


@over_cases("gloo-2")
def test_phases_are_recorded_on_other_engines(group):
    ddp = make(group)
    step(ddp)
    names = [event.name for event in profiled_step(group, ddp)]
    assert names.count(f"{PREFIX}forward") == names.count(f"{PREFIX}finish_backward") == 1
    assert names.count("gloo:all_reduce") == len(ddp.reducer.buckets)


@on_pairs
def test_a_pass_without_reduction_has_no_wait(group):
    ddp = make(group)
    step(ddp)
    with ddp.no_sync():
        names = [event.name for event in profiled_step(group, ddp)]
    if names:
        assert names.count(f"{PREFIX}forward") == 1
        assert f"{PREFIX}wait_for_bucket" not in names
        assert f"{group.backend}:all_reduce" not in names
