"""Differences between ranks raise on every rank and name the parameters."""

from datetime import timedelta

import pytest
import torch
from torch import nn

from cases import over_cases
from phalanx.ddp import DDP
from phalanx.errors import CollectiveTimeout, GroupError, RankMismatch
from phalanx.testing import over_groups

from .whole import (
    ROWS,
    assert_same_gradients,
    batch,
    both,
    compare,
    everywhere,
    mlp,
    operations,
    several,
    share,
    squares,
    wrapped,
)


def frozen():
    module = mlp()
    module[0].weight.requires_grad_(False)
    return module


def renamed():
    module = nn.Sequential(nn.Linear(5, 7), nn.Tanh())
    module.add_module("head", nn.Linear(7, 3))
    return module


def transposed():
    module = mlp()
    module[0].weight = nn.Parameter(torch.empty(5, 7).t())
    return module


OTHERS = {
    "shape": (lambda: nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 4)), "2.weight"),
    "dtype": (lambda: mlp().to(torch.bfloat16), "0.weight"),
    "name": (renamed, "2.weight.*head.weight"),
    "frozen": (frozen, "0.weight.*frozen"),
    "more": (lambda: mlp().append(nn.Linear(3, 3)), "only rank 1 has '3.weight"),
    "fewer": (lambda: nn.Sequential(nn.Linear(5, 7)), "only rank 0 has '2.weight"),
    "strides": (transposed, r"0.weight.*strides \[1, 7\]"),
    "order": (lambda: nn.ModuleDict({"2": nn.Linear(7, 3), "0": nn.Linear(5, 7)}), "0.weight"),
}


@several
@pytest.mark.parametrize("other", OTHERS)
def test_different_modules_are_rejected(group, other):
    make, told = OTHERS[other]
    module = make() if group.rank() == 1 else mlp()
    with pytest.raises(RankMismatch, match=told) as caught:
        DDP(module, process_group=group)
    assert "rank 1" in str(caught.value)


@over_cases("local-2", "shm-4", timeout=20, reuse=False)
def test_parameter_unfrozen_on_one_rank_only(group):
    ddp, _ = wrapped(frozen, group)
    rows = share(batch(0, group.size()), group)
    squares(ddp, rows).backward()
    if group.rank() == 1:
        ddp.module[0].weight.requires_grad_(True)
    with pytest.raises(RankMismatch):
        for _ in range(3):
            squares(ddp, rows).backward()


@several
def test_ranks_unfreeze_different_parameters(group):
    def make():
        module = mlp()
        module[0].requires_grad_(False)
        return module

    ddp, _ = wrapped(make, group)
    rows = share(batch(0, group.size()), group)
    squares(ddp, rows).backward()
    getattr(ddp.module[0], "weight" if group.rank() == 1 else "bias").requires_grad_(True)
    with pytest.raises(RankMismatch, match=r"'0.weight.*frozen' on rank 0 and '0.weight.*rank 1"):
        ddp(rows)


@everywhere
def test_parameters_are_verified_once_when_one_is_unfrozen(group):
    ddp, whole = wrapped(frozen, group)
    rows = batch(0, group.size())
    for step in range(4):
        if step == 2:
            for module in (ddp.module, whole):
                module[0].weight.requires_grad_(True)
        told = operations(group, lambda: ddp(share(rows, group)))
        assert told == (["allgather"] if step == 2 else [])
        both(ddp, whole, group, step)
        compare(ddp, whole)


@over_cases("local-2", "shm-4", "gloo-2", timeout=20, reuse=False)
def test_rank_that_skips_backward_is_named_at_the_timeout(group):
    ddp, _ = wrapped(mlp, group)
    rows = share(batch(0, group.size()), group)
    for _ in range(2):
        squares(ddp, rows).backward()
    group.set_timeout(timedelta(seconds=0.5))
    store = group.get_group_store()
    if group.rank() == 1:
        ddp(rows)
        store.wait([f"timed out {r}" for r in range(group.size()) if r != 1], timedelta(seconds=15))
        return
    try:
        with pytest.raises(CollectiveTimeout, match=r"rank 1") as caught:
            squares(ddp, rows).backward()
        (note,) = caught.value.__notes__
        assert "0.weight" in note
        assert "backward pass 3" in note
    finally:
        store.set(f"timed out {group.rank()}", "")


@over_groups(backends=("shm",), sizes=(2, 4), timeout=20)
def test_rank_that_shuts_down_before_backward_is_named(group):
    ddp, _ = wrapped(mlp, group)
    rows = share(batch(0, group.size()), group)
    squares(ddp, rows).backward()
    if group.rank() == 1:
        group.shutdown()
        return
    with pytest.raises(GroupError, match="rank 1"):
        squares(ddp, rows).backward()


@over_cases("local-2", "shm-4", timeout=20, reuse=False)
def test_mean_is_over_the_remaining_ranks_after_a_leave(group):
    ddp, whole = wrapped(mlp, group)
    rows = batch(0, group.size())
    squares(ddp, share(rows, group)).backward()
    ddp.zero_grad()
    if group.rank() == 1:
        group.leave()
        return
    squares(ddp, share(rows, group)).backward()
    parts = [part for rank, part in enumerate(rows.split(ROWS)) if rank != 1]
    sum(squares(whole, part) for part in parts).div(len(parts)).backward()
    assert_same_gradients(ddp.module, whole)


@over_groups(backends=("gloo", "shm", "local"), sizes=(2,), timeout=20)
def test_unrelated_allreduce_of_the_same_size_is_detected(group):
    ddp, _ = wrapped(mlp, group)
    rows = share(batch(0, group.size()), group)
    for _ in range(2):
        squares(ddp, rows).backward()
    if group.rank() == 1:
        other = torch.zeros_like(ddp.reducer.buckets[0].payload)
        ddp.reducer.scaling.scale([], may_overflow=False).start(other).wait()
        return
    with pytest.raises(RankMismatch):
        squares(ddp, rows).backward()


@everywhere
def test_module_frozen_on_one_rank_is_rejected_on_all(group):
    module = nn.Linear(5, 5)
    if group.rank() == group.size() - 1:
        module.requires_grad_(False)
    with pytest.raises(RuntimeError, match="frozen" if group.size() > 1 else "requires"):
        DDP(module, process_group=group)
