"""Parameter placement of a sharded optimizer: shared memory, or one copy per rank."""

import gc
import warnings

import pytest
import torch
from torch import nn

from phalanx.ddp import DDP, ShardedOptimizer
from phalanx.testing import over_groups

from .internals import BroadcastParameters, SharedParameters
from .sharded import Pair, wide
from .whole import batch, on_pairs, seeded


@over_groups(backends=("shm",), sizes=(2, 4), reuse=True)
def test_shared_memory_holds_one_copy_and_needs_no_broadcast(group):
    pair = Pair(group)
    assert [type(each) for each in pair.sharded._exchanges] == [SharedParameters]
    before, _ = last_call(group)
    pair.backward()
    for optimizer in pair.both:
        optimizer.step()
    made = [record.operation for record in group.records() if record.sequence > before]
    assert made == ["barrier"] * 2
    pair.assert_same()
    if group.rank() == 0:
        with torch.no_grad():
            pair.module[0].weight.fill_(7.0)
    group.barrier().wait()
    assert (pair.module[0].weight == 7).all()
    group.barrier().wait()


def last_call(group):
    return group.records()[-1].sequence, group.records()[-1].operation


class Witness(torch.optim.SGD):
    """Records the last collective before it writes."""

    def step(self):
        group = self.param_groups[0]["witness"]
        self.param_groups[0]["seen"] = last_call(group)
        super().step()


@over_groups(backends=("shm",), sizes=(2,), reuse=True)
def test_barriers_before_and_after_parameters_are_written(group):
    module = seeded(wide)
    groups = [{"params": module.parameters(), "witness": group}]
    optimizer = ShardedOptimizer(groups, Witness, process_group=group, lr=0.1)
    module(torch.ones(2, 5)).square().sum().backward()
    before, _ = last_call(group)
    optimizer.step()
    assert optimizer.param_groups[0]["seen"] == (before + 1, "barrier")
    assert last_call(group) == (before + 2, "barrier")


@over_groups(backends=("shm",), sizes=(2,), reuse=True)
def test_writes_by_other_ranks_bump_the_version_counter(group):
    module = seeded(wide)
    optimizer = ShardedOptimizer(module.parameters(), torch.optim.SGD, process_group=group, lr=0.1)
    loss = module(torch.ones(2, 5)).square().sum()
    loss.backward(retain_graph=True)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    assert all(p._version for p in module.parameters())


@over_groups(backends=("shm",), sizes=(2,), reuse=True)
def test_shared_memory_is_freed(group):
    slab = group._engine._slab
    module = seeded(lambda: nn.Linear(1000, 100))
    pair = [ShardedOptimizer(module.parameters(), torch.optim.SGD, process_group=group)]
    kept = module.weight.data  # outlives the module and the optimizer
    kept.fill_(3.0)
    held = [len(slab._shared)]
    del module, pair
    gc.collect()
    group.barrier().wait()
    group.allocate((1,))
    held.append(len(slab._shared))
    assert (kept == 3).all()
    group.barrier().wait()
    del kept
    group.barrier().wait()
    group.allocate((1,))
    held.append(len(slab._shared))
    assert held[0] == 1
    assert sum(held) in (1, 2)
    assert held[2] == 0


@on_pairs
def test_parameters_with_new_storage_are_tracked(group):
    pair = Pair(group)
    pair.step()
    for module in (pair.module, pair.whole):
        module.double()
    for state in (pair.sharded.state, pair.plain.state):
        for each in state.values():
            each.update({k: v.double() for k, v in each.items() if k != "step"})
    for _ in range(2):
        for optimizer in pair.both:
            optimizer.zero_grad()
        pair.module(batch(0, 2).double()).sum().backward()
        for mine, theirs in zip(pair.module.parameters(), pair.whole.parameters(), strict=True):
            theirs.grad = mine.grad.clone()
        for optimizer in pair.both:
            optimizer.step()
        pair.assert_same()


@on_pairs
def test_aliased_storage_is_not_moved(group):
    def tied():
        module = nn.Linear(4, 4, bias=False)
        module.twin = nn.Parameter(module.weight.data)
        module.register_buffer("flat", torch.zeros(6))
        module.part = nn.Parameter(module.flat[:4])
        return module

    module, whole = seeded(tied), seeded(tied)
    sharded = ShardedOptimizer(module.parameters(), torch.optim.SGD, process_group=group, lr=1.0)
    plain = torch.optim.SGD(whole.parameters(), lr=1.0)
    for optimizer in (sharded, plain):
        for number, parameter in enumerate(optimizer.param_groups[0]["params"]):
            parameter.grad = torch.full_like(parameter, number + 1.0)
        optimizer.step()
    assert module.twin.data_ptr() == module.weight.data_ptr()
    assert torch.equal(module.weight, whole.weight)  # stepped twice, by the same rank
    assert torch.equal(module.flat, whole.flat)
    assert module.flat.any()


@on_pairs
def test_storage_that_one_rank_cannot_move_stays_on_all(group):
    module, whole = seeded(wide), seeded(wide)
    if group.rank() == 1:  # a view of a larger storage
        module[0].weight.data = torch.zeros(100)[:80].view(16, 5)
    optimizer = ShardedOptimizer(module.parameters(), torch.optim.SGD, process_group=group, lr=0.1)
    plain = torch.optim.SGD(whole.parameters(), lr=0.1)
    for step, each in ((module, optimizer), (whole, plain)):
        step(torch.ones(2, 5)).sum().backward()
        each.step()
    for mine, theirs in zip(module.parameters(), whole.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    group.barrier().wait()


@on_pairs
def test_parameters_are_private_again_after_the_optimizer_is_deleted(group):
    pair = Pair(group)
    pair.step()
    del pair.sharded, pair.both
    gc.collect()
    group.barrier().wait()
    with torch.no_grad():
        for parameter in (*pair.module.parameters(), *pair.whole.parameters()):
            parameter.mul_(0.5)  # on every rank
    pair.assert_same()


@over_groups(backends=("shm",), sizes=(2,))
def test_parameters_outlive_the_group(group):
    pair = Pair(group)
    pair.step()
    group.shutdown()
    for mine, theirs in zip(pair.module.parameters(), pair.whole.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    del pair.sharded, pair.both
    gc.collect()
    assert pair.module(torch.ones(1, 5)).isfinite().all()


@on_pairs
def test_module_can_be_wrapped_after_the_optimizer_is_made(group):
    pair = Pair(group)
    pair.model = DDP(pair.module, process_group=group)
    for _ in range(2):
        pair.step()


@over_groups(backends=("shm",), sizes=(2,), reuse=True)
def test_falls_back_to_broadcast_without_shared_memory(group):
    slab = group._engine._slab
    free = slab._free
    slab._collect()
    if group.rank() == 1:
        free, slab._free = slab._free, []
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            pair = Pair(group)
        assert "its own copy of the parameters" in str(caught[0].message)
        assert [type(each) for each in pair.sharded._exchanges] == [BroadcastParameters]
        pair.step()
    finally:
        if group.rank() == 1:
            slab._free = free
