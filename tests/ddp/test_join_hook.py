"""DDP in a join: ranks run out of data at different steps."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join as TorchJoin

from cases import in_turn
from phalanx.ddp import DDP, MixedPrecision, ShardedOptimizer
from phalanx.ddp.hooks import allreduce_hook
from phalanx.errors import InvalidType, UnevenInputs
from phalanx.join import Join
from phalanx.testing import over_groups

from .internals import _DDPJoinHook
from .whole import ROWS, TINY, alone, assert_close, batch, mlp, on_every_backend, seeded, share

LENGTHS = {2: ([4, 2], [0, 2]), 4: ([2, 4, 0, 2], [4, 0, 0, 0])}
PASSES = 2  # per step with accumulation; the first is in no_sync()


class Branching(nn.Module):
    """Has an optional second layer."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(5, 7), nn.Linear(7, 3)

    def forward(self, rows, both=True):
        hidden = self.first(rows).tanh()
        return self.second(hidden) if both else hidden


def make():
    return seeded(lambda: Branching().double())


def loss_of(module, rows, way, step, rank):
    both = way != "unused" or (step + rank) % 2 == 0
    return module(rows, both=both).square().mean()


def step_whole(whole, way, step, having, size):
    """Run backward in one process on the rows of all ranks that still have data."""
    weights = [1.0 + rank if way == "weighted" else 1.0 for rank in range(size)]
    total = {"sum": 1, "weighted": sum(weights[r] for r in having), "active": len(having)}
    for rank in having:
        rows = batch(step, size).double().split(ROWS)[rank]
        loss = loss_of(whole, rows, way, step, rank)
        (loss * weights[rank] / total.get(way, size)).backward()


def train(ddp, group, way, steps, optimizer):
    """Train this rank for some steps."""
    for step in range(steps):
        rows = share(batch(step, group.size()).double(), group)
        if way == "weighted":
            ddp.weight = 1.0 + group.rank()
        if way == "accumulated" and step % PASSES < PASSES - 1:
            with ddp.no_sync():
                loss_of(ddp, rows, way, step, group.rank()).backward()
            continue
        with torch.no_grad():
            ddp(rows)  # a forward without backward must not be waited for
        loss_of(ddp, rows, way, step, group.rank()).backward()
        optimizer.step()
        optimizer.zero_grad()


def compare(ddp, way, lengths):
    whole = make()
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.1)
    for step in range(max(lengths)):
        having = [rank for rank, length in enumerate(lengths) if step < length]
        step_whole(whole, way, step, having, len(lengths))
        if way != "accumulated" or step % PASSES == PASSES - 1:
            optimizer.step()
            optimizer.zero_grad()
    for (name, mine), theirs in zip(
        ddp.module.named_parameters(), whole.named_parameters(), strict=True
    ):
        assert_close(mine, theirs[1], name)


@on_every_backend
@pytest.mark.parametrize("way", ["plain", "hooked"])
def test_ranks_run_out_of_data(group, way):
    """Without a hook they leave the group, with one they shadow the others."""
    run_out_of_data(group, way)


@in_turn(
    "local-4",
    "shm-2",
    "shm-4",
    "gloo-2",
    timeout=60,
    way=["active", "weighted", "accumulated", "unused", "sum", "in backward", "static"],
)
def test_ranks_run_out_of_data_with_other_features(group, way):
    run_out_of_data(group, way)


def run_out_of_data(group, way):
    for lengths in LENGTHS[group.size()]:
        reduce = "sum" if way == "sum" else "mean"
        is_static = way == "static"
        ddp = DDP(
            make(), process_group=group, bucket_cap_mb=TINY, reduce=reduce, static_graph=is_static
        )
        if way == "hooked":
            ddp.register_comm_hook(None, allreduce_hook)
        if way == "in backward":
            ddp._register_fused_optim(torch.optim.SGD, lr=0.1)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        with ddp.join(divide_by_initial_world_size=way != "active"):
            train(ddp, group, way, lengths[group.rank()], optimizer)
        if group.rank() == 0:
            compare(ddp, way, lengths)
        ddp.assert_in_sync()
        train(ddp, group, way, 2, optimizer)  # all ranks again, outside the join
        ddp.assert_in_sync()


@over_groups(backends=("gloo", "shm"), sizes=(2, 4), timeout=30)
def test_ddp_in_torchs_join(group):
    with group_as_default(group):
        for lengths in LENGTHS[group.size()]:
            ddp = DDP(make(), process_group=group, bucket_cap_mb=TINY)
            optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
            with TorchJoin([ddp]):
                train(ddp, group, "plain", lengths[group.rank()], optimizer)
            compare(ddp, "plain", lengths)


class group_as_default:  # noqa: N801 - it reads like a function
    """Make a group torch's default group."""

    def __init__(self, group):
        self.group = group

    def __enter__(self):
        dist.distributed_c10d._update_default_pg(self.group)

    def __exit__(self, *_):
        dist.distributed_c10d._update_default_pg(None)


@on_every_backend
def test_join_with_a_sharded_optimizer(group):
    for lengths in LENGTHS[group.size()]:
        ddp = DDP(make(), process_group=group)
        optimizer = ShardedOptimizer(ddp.parameters(), torch.optim.SGD, lr=0.1, process_group=group)
        with Join([ddp, optimizer]):
            train(ddp, group, "plain", lengths[group.rank()], optimizer)
        compare(ddp, "plain", lengths)


@on_every_backend
def test_buffers_come_from_a_rank_with_data(group):
    """Rank 0 has no data, so its statistics do not change."""
    norm = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4))
    ddp = DDP(norm, process_group=group)
    with ddp.join():
        for step in range(3 * group.rank()):
            ddp(share(batch(step, group.size()), group)).sum().backward()
    assert norm[1].num_batches_tracked.item() == 3 * (group.size() - 1)
    means = [torch.empty(4) for _ in range(group.size())]
    group.allgather([means], [norm[1].running_mean]).wait()
    assert all(torch.equal(mean, means[0]) for mean in means)


@on_every_backend
def test_join_with_mixed_precision(group):
    ddp = DDP(seeded(mlp), process_group=group, mixed_precision=MixedPrecision(torch.bfloat16))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    with ddp.join():
        for step in range(group.rank()):
            ddp(share(batch(step, group.size()), group)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    ddp.assert_in_sync()


@on_every_backend
def test_throw_on_early_termination(group):
    ddp = DDP(seeded(mlp), process_group=group)
    with pytest.raises(UnevenInputs, match="exhausted"), ddp.join(throw_on_early_termination=True):
        for step in range(1 + group.rank()):
            ddp(share(batch(step, group.size()), group)).square().mean().backward()


@alone
def test_join_hook_requires_a_ddp_module(group):
    module = nn.Linear(1, 1)
    optimizer = ShardedOptimizer(module.parameters(), torch.optim.SGD, process_group=group)
    for other in (module, optimizer):
        with pytest.raises(InvalidType, match="for DistributedDataParallel"):
            _DDPJoinHook(other, True)
