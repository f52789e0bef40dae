"""Assignment of parameters to buckets, and when buckets are rebuilt."""

import gc
import warnings
import weakref

import pytest
import torch
from torch import nn
from torch.distributed import HashStore

from cases import over_cases
from phalanx.ddp import DDP
from phalanx.groups import new_group

from .whole import TINY, batch, everywhere, launched, mlp, share, squares, train

MIB = 1 << 20


class Reversed(nn.Module):
    """Uses its layers in another order than it registers them."""

    def __init__(self):
        super().__init__()
        self.last, self.first, self.middle = nn.Linear(6, 3), nn.Linear(5, 6), nn.Linear(6, 6)

    def forward(self, rows):
        return self.last(self.middle(self.first(rows).tanh()).tanh())


def names(ddp):
    return [[ddp.reducer.names[i] for i in bucket.members] for bucket in ddp.reducer.buckets]


@everywhere
def test_bucket_order_is_reverse_registration_then_arrival_on_rank_0(group):
    before = []

    def loss(module, rows, step, rank):
        if isinstance(module, DDP):
            before.append(names(module))
        return squares(module, rows)

    ddp, _ = train(Reversed, group, loss, bucket_cap_mb=TINY)
    registered = [[name] for name, _ in Reversed().named_parameters()]
    assert before[0] == registered[::-1]
    layers = [name.split(".")[0] for (name,) in names(ddp)]
    assert before[2:] == [names(ddp)] * 2, "they are arranged once, in the second forward"
    assert layers == ["last"] * 2 + ["middle"] * 2 + ["first"] * 2
    assert not ddp.reducer.graph_ever_changed


@everywhere
def test_bucket_order_is_the_same_on_all_ranks_despite_arrival_order(group):
    def loss(module, rows, step, rank):
        layers = module.module if isinstance(module, DDP) else module
        first, second = layers if rank == 0 else reversed(layers)
        return module(rows).mean() * 0 + second(first(rows).tanh()).square().mean()

    def make():
        return nn.Sequential(nn.Linear(5, 5, bias=False), nn.Linear(5, 5, bias=False))

    ddp, _ = train(make, group, loss, bucket_cap_mb=TINY)
    orders = ddp._comm.exchange(str(names(ddp)))
    assert len(set(orders)) == 1


@everywhere
def test_bucket_sizes_follow_the_caps(group):
    def buckets_of(**options):
        module = nn.Sequential(*(nn.Linear(256, 1024, bias=False) for _ in range(6)))  # 1 MiB each
        module.append(nn.Linear(1024, 256, bias=False))
        ddp = DDP(module, process_group=group, init_sync=False, **options)
        return [sum(ddp.reducer.parameters[i].nbytes for i in b.members) / MIB
                for b in ddp.reducer.buckets]  # fmt: skip

    assert buckets_of() == ([4, 3] if group.shares_memory else [1, 6])
    assert buckets_of(bucket_cap_mb=2) == [2, 2, 2, 1]
    assert buckets_of(bucket_cap_mb=float("inf")) == [7]
    assert buckets_of(bucket_cap_mb_list=[1, 3]) == [1, 3, 3]
    assert buckets_of(bucket_cap_mb_list=[2, float("inf")]) == [2, 5]
    assert buckets_of(bucket_cap_mb=5, bucket_cap_mb_list=[2, 1]) == [2, 1, 1, 1, 1, 1]


@everywhere
def test_bucket_bytes_cap_is_the_last_cap(group):
    for options in ({"bucket_cap_mb": 3}, {"bucket_cap_mb_list": [1, 3]}):
        ddp = DDP(mlp(), process_group=group, **options)
        assert ddp.bucket_bytes_cap == 3 * MIB


@everywhere
def test_results_do_not_depend_on_bucket_size(group):
    results = []
    for options in ({}, {"bucket_cap_mb": TINY}, {"bucket_cap_mb_list": [TINY, 1]}):
        ddp, _ = train(mlp, group, squares, **options)
        results.append([p.detach().clone() for p in ddp.parameters()])
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))


@everywhere
def test_buckets_are_launched_before_backward_ends(group):
    ddp, _ = train(mlp, group, squares, bucket_cap_mb=TINY)
    assert launched(ddp, share(batch(0, group.size()), group).double()) >= 2
    (*_, last) = ddp.stats()
    arrivals = last.arrivals[group.rank()]
    assert list(arrivals) == sorted(arrivals)


class Optional(nn.Module):
    """Has an optional layer."""

    def __init__(self):
        super().__init__()
        self.always, self.sometimes = nn.Linear(5, 3), nn.Linear(5, 3)

    def forward(self, rows, both=True):
        return self.always(rows) + (self.sometimes(rows) if both else 0)


@over_cases("local-1", "shm-2", "gloo-2", "local-4")
@pytest.mark.parametrize("skips", [(), (1,), (0, 1, 2, 3)], ids=["used", "somewhere", "nowhere"])
def test_step_makes_one_collective_per_bucket(group, skips):
    calls = []

    def loss(module, rows, step, rank):
        if isinstance(module, DDP):
            calls.append(group.records()[-1].sequence)
        return module(rows, both=rank not in skips).square().mean()

    ddp, _ = train(Optional, group, loss, steps=5, bucket_cap_mb=TINY)
    assert len(ddp.reducer.buckets) == 4
    *_, before, after = calls
    assert after - before == 4 + 1  # and with which the ranks have compared gradients here


def test_rebuild_frees_the_first_buckets_at_once():
    group = new_group("local", rank=0, world_size=1, store=HashStore())
    ddp = DDP(mlp(), process_group=group)
    rows = batch(0, 1)
    gc.collect()
    gc.disable()  # a reference cycle would keep the bucket alive
    try:
        first = weakref.ref(ddp.reducer.buckets[0])
        ddp(rows).sum().backward()
        ddp.zero_grad()
        ddp(rows)
        assert first() is None
    finally:
        gc.enable()
        group.shutdown()


def rebuild_in_the_memory_of_the_first_buckets(ctx):
    group = ctx.group("shm")
    ddp = DDP(nn.Sequential(nn.Linear(128, 512), nn.Linear(512, 128)), process_group=group)
    rows = torch.ones(2, 128)
    ddp(rows).sum().backward()
    ddp.zero_grad()
    group._engine._slab._free.clear()  # there is no memory but that of the first buckets
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # DDP would warn that gradients are in ordinary memory
        ddp(rows).sum().backward()
    assert all(group._is_shared(bucket.buffer) for bucket in ddp.reducer.buckets)


def test_rebuild_needs_no_more_memory_than_the_first_buckets(ranks):
    """Otherwise the second step would be the peak of a training."""
    ranks.run(rebuild_in_the_memory_of_the_first_buckets, 2)
