"""Consistency checks of parameters across ranks, and step statistics."""

import pytest
import torch

from cases import over_cases
from phalanx.ddp import DDP, StepStats
from phalanx.errors import RankMismatch
from phalanx.testing import over_groups

from .test_parameter_kinds import Mixed
from .whole import TINY, batch, everywhere, mlp, on_every_backend, share, squares, wrapped


def spoil(module, rank):
    """Flip one bit of a parameter on rank 1."""
    with torch.no_grad():
        module[2].weight.view(torch.int32).view(-1)[-1 if rank == 1 else 0] ^= rank == 1


@everywhere
def test_assert_in_sync_passes_when_ranks_agree(group):
    ddp, _ = wrapped(mlp, group)
    ddp.assert_in_sync()
    DDP(Mixed(), process_group=group).assert_in_sync()


@on_every_backend
def test_first_differing_parameter_is_named(group):
    ddp, _ = wrapped(mlp, group)
    spoil(ddp.module, group.rank())
    with pytest.raises(RankMismatch, match=r"'2.weight' differs: rank 1 and rank 0 have"):
        ddp.assert_in_sync()
    with torch.no_grad():
        ddp.module[0].bias += group.rank()
    with pytest.raises(RankMismatch, match=r"'0.bias' differs.*1 more"):
        ddp.assert_in_sync()


@on_every_backend
@pytest.mark.parametrize("local", [0, 1], ids=["plain", "accumulating"])
def test_check_sync_every_compares_at_that_interval(group, local):
    ddp, _ = wrapped(mlp, group, check_sync_every=2)
    rows = share(batch(0, group.size()), group)

    def step():
        with ddp.no_sync():
            for _ in range(local):
                squares(ddp, rows).backward()
        squares(ddp, rows).backward()
        ddp.zero_grad()

    for _ in range(4):
        step()
    spoil(ddp.module, group.rank())
    step()  # the fifth step is not checked
    with pytest.raises(RankMismatch, match="'2.weight' differs: rank 1 and rank 0 have"):
        step()


@everywhere
def test_sync_check_adds_no_collective_while_ranks_agree(group):
    ddp, _ = wrapped(mlp, group, check_sync_every=1)
    rows = share(batch(0, group.size()), group)
    for _ in range(3):
        squares(ddp, rows).backward()
        last = group.records()[-1].sequence
    squares(ddp, rows).backward()
    assert group.records()[-1].sequence == last + len(ddp.reducer.buckets)


# -- stats ---------------------------------------------------------------------------------


@over_cases("local-1", "shm-2", "gloo-2", "local-4")
def test_step_stats(group):
    ddp, _ = wrapped(mlp, group, bucket_cap_mb=TINY)
    assert ddp.stats() == []
    for step in range(5):
        squares(ddp, share(batch(step, group.size()), group)).backward()
    steps = ddp.stats()
    assert len(steps) == 5
    for step in steps:
        assert isinstance(step, StepStats)
        assert step.forward > 0
        assert 0 < step.exposed <= step.backward
        assert step.nbytes >= sum(p.nbytes for p in ddp.parameters())
        assert len(step.forwards) == len(step.backwards) == len(step.arrivals) == group.size()
        assert {len(arrivals) for arrivals in step.arrivals} == {4}
        assert step.slowest in range(group.size())
        assert step.forwards[group.rank()] == pytest.approx(step.forward, rel=1e-3)


@over_groups(backends=("local", "shm"), sizes=(2,), reuse=True)
def test_slowest_rank_is_reported(group):
    import time

    ddp, _ = wrapped(mlp, group)
    rows = share(batch(0, group.size()), group)
    for _ in range(2):
        squares(ddp, rows).backward()

    def slowly(gradient):
        if group.rank() == 1:
            began = time.perf_counter()
            while time.perf_counter() < began + 0.2:
                pass

    output = ddp(rows)
    output.register_hook(slowly)
    output.sum().backward()
    (*_, last) = ddp.stats()
    assert last.slowest == 1
    assert last.arrivals[1][-1] > last.arrivals[0][-1] + 0.1


@over_groups(backends=("local",), sizes=(1,), reuse=True)
def test_stats_keep_the_last_128_steps(group):
    ddp, _ = wrapped(mlp, group)
    for _ in range(140):
        squares(ddp, torch.ones(1, 5)).backward()
    assert len(ddp.stats()) == 128
