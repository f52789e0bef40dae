"""DDP on torch's own groups, compared with torch's DDP."""

import copy
import sys
import warnings
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from phalanx.ddp import DDP, ShardedOptimizer, SyncBatchNorm

from .models import Images, Words, encoder
from .whole import ROWS, assert_close, batch, mlp, seeded


@contextmanager
def world(ctx, backend="gloo"):
    """Initialize torch.distributed as a script does, and clean up."""
    hook = sys.excepthook  # torch wraps it again on every init
    dist.init_process_group(backend, store=ctx.store, rank=ctx.rank, world_size=ctx.size)
    try:
        yield
        # Destroying Gloo while a peer still uses it makes the peer hang.
        ctx.store.set(f"done {ctx.rank}", "")
        ctx.store.wait([f"done {rank}" for rank in range(ctx.size)])
    finally:
        sys.excepthook = hook
        ctx.keep(dist.group.WORLD)
        dist.destroy_process_group()


MODELS = {"mlp": (mlp, 5), "conv": (Images, 36), "encoder": (encoder, 24), "words": (Words, 4)}


def train(make, width, group):
    """Train with both classes and compare gradients, buffers and weights.

    Values are float64, since Gloo's order of summation depends on bucket boundaries.
    """
    module = seeded(lambda: make().double(), seed=dist.get_rank())
    theirs = TorchDDP(copy.deepcopy(module), gradient_as_bucket_view=True)
    ours = DDP(module, process_group=group)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9) for m in (ours, theirs)]
    for step in range(4):
        rows = batch(step, dist.get_world_size(), width).double()[dist.get_rank() * ROWS :][:ROWS]
        for ddp in (ours, theirs):
            ddp(rows).square().mean().backward()
        for (name, mine), other in zip(
            ours.module.named_parameters(), theirs.parameters(), strict=True
        ):
            assert_close(mine.grad, other.grad, name)
        for mine, other in zip(ours.module.buffers(), theirs.module.buffers(), strict=True):
            assert torch.allclose(mine, other, atol=1e-6)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    ours.assert_in_sync()


def all_models(ctx):
    with world(ctx):
        for make, width in MODELS.values():
            train(make, width, group=None)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_same_as_torchs_ddp_on_the_default_group(ranks, size):
    ranks.run(all_models, size, timeout=30)


def groups_of_torchs(ctx):
    with world(ctx):
        for group in (dist.group.WORLD, dist.new_group()):
            train(mlp, 5, group)
        mesh = init_device_mesh("cpu", (ctx.size,))
        ddp = DDP(seeded(mlp), device_mesh=mesh)
        assert ddp.process_group is mesh.get_group()
        ddp(torch.ones(2, 5)).sum().backward()
        sparse = DDP(seeded(lambda: nn.Embedding(5, 3, sparse=True)))
        for _ in range(3):
            sparse(torch.tensor([ctx.rank])).sum().backward()
            assert sparse.module.weight.grad.to_dense()[:, 0].tolist()[: ctx.size] == [0.5, 0.5]
            sparse.zero_grad()
        sums = DDP(seeded(mlp), reduce="sum")
        sums.module.zero_grad()
        sums(torch.ones(2, 5)).sum().backward()
        for mine, other in zip(sums.parameters(), ddp.parameters(), strict=True):
            assert_close(mine.grad, other.grad * 2)


def test_torchs_groups_and_meshes(ranks):
    ranks.run(groups_of_torchs, 2, timeout=30)


def over_torchs_shm(ctx):
    with world(ctx, "shm"):
        train(mlp, 5, None)


def test_shm_backend_as_torchs_default_group(ranks):
    ranks.run(over_torchs_shm, 2, timeout=30)


def sharded_three_ways(ctx, backend):
    """Step with ZeroRedundancyOptimizer, ShardedOptimizer and a plain optimizer."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's module warns on import
        from torch.distributed.optim import ZeroRedundancyOptimizer
    with world(ctx, backend):
        makers = (
            lambda p: torch.optim.Adam(p, lr=0.1),
            lambda p: ZeroRedundancyOptimizer(p, torch.optim.Adam, lr=0.1),
            lambda p: ShardedOptimizer(p, torch.optim.Adam, lr=0.1),
        )
        models = [DDP(seeded(mlp)) for _ in makers]
        optimizers = [make(m.parameters()) for make, m in zip(makers, models, strict=True)]
        for step in range(3):
            rows = batch(step, ctx.size)[ctx.rank * ROWS :][:ROWS]
            for model, optimizer in zip(models, optimizers, strict=True):
                optimizer.zero_grad()
                model(rows).square().mean().backward()
                optimizer.step()
            for parameters in zip(*(model.parameters() for model in models), strict=True):
                assert all(torch.equal(parameters[0], other) for other in parameters)
            dist.barrier()
        optimizers[1].consolidate_state_dict(to=0)
        ours = optimizers[2].state_dict()["state"]
        if ctx.rank == 0:
            theirs = optimizers[1].state_dict()["state"]
            assert all(torch.equal(ours[i][k], v) for i, s in theirs.items() for k, v in s.items())
        with Join([optimizers[2]]):  # torch's: a rank that is out of data steps too
            for _ in range(ctx.rank):
                optimizers[2].step()
        for _ in range(ctx.size - 1):
            optimizers[0].step()
        for plain, sharded in zip(models[0].parameters(), models[2].parameters(), strict=True):
            assert torch.equal(plain, sharded)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_same_steps_as_torchs_zero_redundancy_optimizer(ranks, backend, size):
    ranks.run(sharded_three_ways, size, args=(backend,), timeout=60)


def normalise_over_torchs_default_group(ctx):
    with world(ctx):
        layer = SyncBatchNorm(5).double()  # no group given
        plain = nn.BatchNorm1d(5).double()
        rows = batch(0, ctx.size).double()
        mine, whole = rows[ctx.rank * ROWS :][:ROWS].clone().requires_grad_(), rows.requires_grad_()
        layer(mine).pow(3).sum().backward()
        plain(whole).pow(3).sum().backward()
        assert_close(mine.grad, whole.grad[ctx.rank * ROWS :][:ROWS])
        assert_close(layer.running_var, plain.running_var)


def test_sync_batch_norm_over_torchs_default_group(ranks):
    ranks.run(normalise_over_torchs_default_group, 2)
