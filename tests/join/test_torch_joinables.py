"""torch's joinables in our Join, and ours in torch's."""

import sys
import warnings
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms import join as upstream
from torch.nn.parallel import DistributedDataParallel

from phalanx.join import Join, Joinable, JoinHook, gather_uneven

from .counting import Counter, take


@contextmanager
def world(ctx, backend):
    hook = sys.excepthook  # torch wraps it again on every init
    dist.init_process_group(backend, store=ctx.store, rank=ctx.rank, world_size=ctx.size)
    try:
        yield
        ctx.store.set(f"done {ctx.rank}", "")
        ctx.store.wait([f"done {rank}" for rank in range(ctx.size)])
    finally:
        sys.excepthook = hook
        ctx.keep(dist.group.WORLD)
        dist.destroy_process_group()


def zero_redundancy_optimizer():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's module warns on import
        from torch.distributed.optim import ZeroRedundancyOptimizer
    return ZeroRedundancyOptimizer


def train(join, rank):
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(3, 2))
    optimizer = zero_redundancy_optimizer()(model.parameters(), torch.optim.Adam, lr=0.1)
    counter = Counter(dist.group.WORLD)
    with join([model, optimizer, counter]):
        for step in range(2 + 2 * rank):
            optimizer.zero_grad()
            model(torch.full((1, 3), float(step))).sum().backward()
            optimizer.step()
            counter.step()
    assert counter.counts == [2, 2, 1, 1][: 2 + 2 * rank]
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def theirs_in_ours(ctx, backend):
    with world(ctx, backend):
        ours, theirs = train(Join, ctx.rank), train(upstream.Join, ctx.rank)
        assert torch.equal(ours, theirs)
        everybodys = [torch.empty_like(ours) for _ in range(2)]
        dist.all_gather(everybodys, ours)
        assert torch.equal(*everybodys)


@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_torchs_joinables_in_our_join(ranks, backend):
    ranks.run(theirs_in_ours, 2, args=(backend,), timeout=30)


def ours_in_theirs(ctx, backend):
    with world(ctx, backend):
        counter = Counter(dist.group.WORLD)
        with upstream.Join([counter]):
            take([counter], 1 + 2 * ctx.rank)
        assert counter.counts == [2, 1, 1][: 1 + 2 * ctx.rank]
        assert counter.was_last is (ctx.rank == 1)
        default = Counter(None)  # torch's default group
        default.group = dist.group.WORLD
        with (
            pytest.raises(RuntimeError, match="exhausted"),
            upstream.Join([default], throw_on_early_termination=True),
        ):
            take([default], 1 + ctx.rank)


@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_our_joinables_in_torchs_join(ranks, backend):
    ranks.run(ours_in_theirs, 2, args=(backend,), timeout=30)


def torchs_early_termination(ctx, is_wrapped):
    with world(ctx, "shm"):
        model = DistributedDataParallel(torch.nn.Linear(3, 2))
        with (
            pytest.raises(RuntimeError, match="exhausted"),
            Join([model], throw_on_early_termination=True),
        ):
            for step in range(1 + ctx.rank):
                try:
                    model(torch.ones(1, 3)).sum().backward()
                except RuntimeError as error:
                    if is_wrapped:
                        raise RuntimeError(f"step {step}: {error}") from error
                    raise
        dist.barrier()  # the group still works


@pytest.mark.parametrize("is_wrapped", [False, True], ids=["plain", "wrapped"])
def test_early_termination_of_torchs_joinables_keeps_the_group_usable(ranks, is_wrapped):
    ranks.run(torchs_early_termination, 2, args=(is_wrapped,), timeout=30)


def test_joinable_and_hook_subclass_torchs():
    assert issubclass(Joinable, upstream.Joinable)
    assert issubclass(JoinHook, upstream.JoinHook)


def gather_over_torchs_default_group(ctx, backend):
    with world(ctx, backend):
        rows = torch.arange(2 * ctx.rank + 1)
        assert gather_uneven(rows).tolist() == [0, 0, 1, 2]
        result = gather_uneven(rows if ctx.rank else None, dst=1)
        assert (result is None) if ctx.rank == 0 else (result.tolist() == [0, 1, 2])


@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_gather_uneven_over_torchs_default_group(ranks, backend):
    ranks.run(gather_over_torchs_default_group, 2, args=(backend,))
