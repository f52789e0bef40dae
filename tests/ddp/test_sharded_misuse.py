"""Errors of the sharded optimizer."""

import copy
import pickle
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn

from phalanx import errors
from phalanx.ddp import ShardedOptimizer
from phalanx.testing import Fault, kill, over_groups

from .sharded import Pair
from .whole import on_pairs

SGD = torch.optim.SGD


@on_pairs
def test_bad_arguments_are_rejected(group):
    module = nn.Linear(3, 2)
    for params, kind, told in (
        ([], errors.InvalidArgument, "empty parameter list"),
        ([{"params": []}], errors.InvalidArgument, "empty parameter list"),
        ([module.weight, module.bias, module.weight], ValueError, "0 and 2 of a group"),
        ([{"params": [module.weight]}] * 2, ValueError, "more than one parameter group"),
        ([torch.ones(2)[1:] * module.weight], ValueError, "non-leaf"),
        (module.weight, TypeError, "iterable"),
        ([1.0], TypeError, "Tensor"),
    ):
        with pytest.raises(kind, match=told):
            ShardedOptimizer(params, SGD, process_group=group)
    with pytest.raises(errors.InvalidState, match="no shape yet"):
        ShardedOptimizer(nn.LazyLinear(2).parameters(), SGD, process_group=group)
    with pytest.raises(errors.InvalidState, match="no values"):
        ShardedOptimizer(nn.Linear(2, 2, device="meta").parameters(), SGD, process_group=group)
    with pytest.raises(errors.InvalidType, match="got .*Linear"):
        ShardedOptimizer(module.parameters(), nn.Linear, process_group=group)
    with pytest.raises(errors.InvalidType, match="got SGD"):
        ShardedOptimizer(module.parameters(), SGD(module.parameters()), process_group=group)
    for refused in (torch.optim.LBFGS, ShardedOptimizer):
        with pytest.raises(errors.InvalidArgument, match="cannot shard"):
            ShardedOptimizer(module.parameters(), refused, process_group=group)
    with pytest.raises(ValueError, match="learning rate"):
        ShardedOptimizer(module.parameters(), SGD, process_group=group, lr=-1.0)
    with pytest.raises(TypeError, match="speed"):
        ShardedOptimizer(module.parameters(), SGD, process_group=group, speed=1.0)


@on_pairs
def test_bad_groups_are_rejected(group):
    module = nn.Linear(3, 2)
    with pytest.raises(errors.InvalidArgument, match="this rank is not in the process group"):
        ShardedOptimizer(module.parameters(), SGD, process_group=dist.GroupMember.NON_GROUP_MEMBER)
    with pytest.raises(errors.InvalidType, match="got str"):
        ShardedOptimizer(module.parameters(), SGD, process_group="world")
    with pytest.raises(errors.InvalidArgument, match="no group"):
        ShardedOptimizer(module.parameters(), SGD)


@on_pairs
def test_a_group_that_is_refused_leaves_nothing_behind(group):
    weight = nn.Parameter(torch.ones(3))
    optimizer = ShardedOptimizer([weight], SGD, process_group=group, lr=0.1)
    refused = nn.Parameter(torch.empty(2, device="meta"))
    for params in (refused, [refused], [("name", refused)], [torch.ones(1), torch.ones(1), weight]):
        with pytest.raises((errors.InvalidState, ValueError)):
            optimizer.add_param_group({"params": params})
    assert len(optimizer.param_groups) == 1
    weight.grad = torch.ones(3)
    optimizer.step()
    assert torch.allclose(weight, torch.tensor(0.9))


@over_groups(backends=("local", "shm", "gloo"), sizes=(2,), reuse=True)
def test_parameter_mismatch_between_ranks_is_named(group):
    wide = 3 + group.rank()
    for params, told in (
        (nn.Linear(wide, 2).parameters(), r"'0 of group 0: float32\[2, 3\]'"),
        (nn.Linear(wide, 2).named_parameters(), r"'weight of group 0: float32\[2, 4\]'"),
        (nn.Linear(3, 2, bias=group.rank() == 0).parameters(), "rank 0 has 2 parameters"),
    ):
        with pytest.raises(errors.RankMismatch, match=told):
            ShardedOptimizer(params, SGD, process_group=group)
    optimizer = ShardedOptimizer(nn.Linear(3, 2).parameters(), SGD, process_group=group)
    with pytest.raises(errors.RankMismatch, match="0 of group 1"):
        optimizer.add_param_group({"params": nn.Linear(wide, 2).parameters()})


@on_pairs
def test_different_aliasing_between_ranks_is_rejected(group):
    memory = torch.zeros(8)
    first, second = memory[:4], memory[4:].clone()
    if group.rank():
        second = memory[2:6]
    with pytest.raises(errors.RankMismatch, match="divide the parameters differently"):
        ShardedOptimizer([first, second], SGD, process_group=group)


@on_pairs
def test_bad_state_dicts_are_rejected(group):
    pair = Pair(group)
    for state, told in (
        ({}, "'state' and 'param_groups'"),
        (SGD(nn.Linear(2, 2).parameters()).state_dict(), "doesn't match the size"),
        (SGD([{"params": [p]} for p in pair.whole.parameters()]).state_dict(), "number of"),
    ):
        with pytest.raises(ValueError, match=told):
            pair.sharded.load_state_dict(state)
    with pytest.raises(errors.InvalidArgument, match="0 to 1.*got 2"):
        pair.sharded.consolidate_state_dict(to=2)
    for copied in (copy.deepcopy, pickle.dumps):
        with pytest.raises(errors.InvalidState, match="cannot be copied"):
            copied(pair.sharded)
    pair.step()


@over_groups(backends=("local", "shm"), sizes=(3,))
def test_departed_shard_owner_is_named(group):
    pair = Pair(group)
    pair.step()
    if group.rank() == 2:
        group.leave()
        return
    with pytest.raises(errors.InvalidState, match="rank 2 left the group"):
        for _ in range(1000):  # until the departure is known here
            group.barrier().wait()
            pair.sharded._check_members()


class Fragile(SGD):
    """Raises where weight_decay is set."""

    def step(self):
        if self.param_groups[0]["weight_decay"]:
            raise ValueError("out of luck")
        super().step()


@over_groups(backends=("local", "shm", "gloo"), sizes=(2, 4), timeout=30)
def test_step_failure_on_one_rank_is_raised_on_all(group):
    module = nn.Linear(8, 8)
    sharded = ShardedOptimizer(module.parameters(), Fragile, process_group=group, lr=0.1)
    module(torch.ones(1, 8)).sum().backward()
    sharded.step()
    sharded.param_groups[0]["weight_decay"] = 0.1 if group.rank() == 1 else 0.0
    began = time.monotonic()
    expected = ValueError if group.rank() == 1 else errors.GroupAborted
    with pytest.raises(expected, match="out of luck") as caught:
        sharded.step()
    assert time.monotonic() - began < 10, "not at the deadline"
    if group.rank() != 1:
        assert "rank 1" in str(caught.value)
        assert "the step of its shard raised ValueError" in str(caught.value)


def lose_an_owner(ctx, backend):
    """Lose rank 1, then continue on the remaining ranks from a saved state."""
    group = ctx.group(backend, timeout=timedelta(seconds=60))
    pair = Pair(group)
    pair.step()
    saved, weights = pair.sharded.state_dict(), copy.deepcopy(pair.module.state_dict())
    group.allreduce(torch.ones(1)).wait()
    pair.backward()
    began = time.monotonic()
    with pytest.raises(errors.PeerLost) as caught:
        pair.sharded.step()
        group.allreduce(torch.ones(1)).wait()
    assert time.monotonic() - began < 5
    assert caught.value.lost == (1,)
    group.abort()
    rest = ctx.closing(group.split_group([0, 2]))
    other = Pair(rest)
    other.module.load_state_dict(weights)
    other.whole.load_state_dict(weights)
    other.sharded.load_state_dict(saved)
    other.plain.load_state_dict(copy.deepcopy(saved))
    rest.barrier().wait()
    other.step()


DEATHS = {
    "shm": Fault("barrier:before", kill(), rank=1, nth=6),  # stepped, barrier not reached
    "gloo": Fault("broadcast:issued", kill(), rank=1, nth=11),  # 6 for steps, 3 for the state
}


@pytest.mark.parametrize("backend", DEATHS)
def test_dead_shard_owner_is_named_and_the_rest_recover(ranks, backend):
    ranks.run(lose_an_owner, 3, args=(backend,), faults=[DEATHS[backend]], timeout=60)
