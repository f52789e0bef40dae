"""Backward passes that raise, and the passes that follow."""

import pytest
import torch
from torch import nn

from cases import over_cases
from phalanx.errors import RankMismatch

from .whole import (
    TINY,
    assert_same_everywhere,
    assert_same_gradients,
    batch,
    both,
    both_caps,
    both_ways,
    compare,
    everywhere,
    mlp,
    several,
    share,
    squares,
    wrapped,
)


class Broken(torch.autograd.Function):
    @staticmethod
    def forward(_, tensor):
        return tensor.clone()

    @staticmethod
    def backward(*_):
        raise ArithmeticError("broken in the middle")


@everywhere
@both_caps
def test_training_continues_after_backward_raises(group, cap):
    class Breaking(nn.Sequential):
        def forward(self, rows, breaks=False):
            hidden = self[0](rows)
            return self[1](Broken.apply(hidden) if breaks else hidden)

    ddp, whole = wrapped(lambda: Breaking(nn.Linear(5, 500), nn.Linear(500, 2)), group,
                         bucket_cap_mb=cap)  # fmt: skip
    for step in range(8):
        rows = batch(step, group.size())
        if step in (0, 2, 3, 6):
            with pytest.raises(ArithmeticError, match="in the middle"):
                ddp(share(rows, group), breaks=True).square().mean().backward()
            ddp.zero_grad()
        squares(ddp, share(rows, group)).backward()
        squares(whole, rows).backward()
        compare(ddp, whole, rtol=1e-5)


@everywhere
def test_backward_can_be_retried_after_it_raises(group):
    fails = [True]

    def fail_once(gradient):
        if fails:
            fails.pop()
            raise ArithmeticError("once")

    ddp, whole = wrapped(mlp, group, bucket_cap_mb=TINY)
    rows = batch(0, group.size())

    def hook(layer, inputs, output):
        output.register_hook(fail_once)

    ddp.module[0].register_forward_hook(hook)
    loss = squares(ddp, share(rows, group))
    with pytest.raises(ArithmeticError):
        loss.backward(retain_graph=True)
    ddp.zero_grad()
    loss.backward()
    squares(whole, rows).backward()
    assert_same_gradients(ddp.module, whole)


# -- state left by a failed pass -----------------------------------------------------------


def fail_at(parameter, rows, ddp):
    """Make backward raise at a parameter; return the failed pass."""
    passes = []

    def hook(_):
        passes.append(ddp.reducer._in_flight)
        raise ArithmeticError("in the middle")

    handle = parameter.register_hook(hook)
    with pytest.raises(ArithmeticError, match="in the middle"):
        squares(ddp, rows).backward()
    handle.remove()
    (failed,) = passes
    return failed


def warmed_up(group, **options):
    """Wrap a network and train it until buckets launch before backward ends."""
    ddp, whole = wrapped(mlp, group, bucket_cap_mb=TINY, **options)
    for step in range(3):
        both(ddp, whole, group, step)
        compare(ddp, whole)
    return ddp, whole


@over_cases("local-2", "shm-4", reuse=False)
def test_next_forward_waits_for_collectives_of_a_failed_pass(group):
    ddp, whole = warmed_up(group)
    rows = share(batch(3, group.size()), group)
    store, last = group.get_group_store(), group.size() - 1
    if group.rank() == last:  # is late: it launches nothing before the others have failed
        others = [f"failed {rank}" for rank in range(last)]
        waits = [p.register_hook(lambda _: store.wait(others)) for p in ddp.module[2].parameters()]
    failed = fail_at(ddp.module[0].weight, rows, ddp)
    assert len(failed._works) >= 2
    if group.rank() == last:
        for each in waits:
            each.remove()
    else:
        assert not failed._works[0].is_completed()
        store.set(f"failed {group.rank()}", "")
    ddp.zero_grad()
    ddp(rows)  # peers may still be reducing this memory
    assert all(work.is_completed() for work in failed._works)
    both(ddp, whole, group, 4)
    compare(ddp, whole)


@everywhere
@both_ways
def test_failed_pass_clears_previous_grads_of_launched_buckets(group, keeps):
    ddp, whole = warmed_up(group, gradient_as_bucket_view=keeps)
    both(ddp, whole, group, 3)
    rows = share(batch(4, group.size()), group)
    failed = fail_at(ddp.module[0].weight, rows, ddp)
    assert len(failed._works) >= 2
    ddp(rows)
    for parameter in ddp.module[2].parameters():  # old and new in part: of no use to anybody
        assert parameter.grad is None
    ddp.zero_grad()
    whole.zero_grad()
    both(ddp, whole, group, 5)
    compare(ddp, whole)


@everywhere
@pytest.mark.parametrize("reduce", ["mean", "sum"])
def test_ranks_agree_after_a_failed_pass_without_zero_grad(group, reduce):
    ddp, _ = wrapped(mlp, group, bucket_cap_mb=TINY, reduce=reduce)
    for step in range(6):
        rows = share(batch(step, group.size()), group)
        if step in (0, 3):
            fail_at(ddp.module[0].weight, rows, ddp)
        squares(ddp, rows).backward()
        assert_same_everywhere(ddp)


@several
def test_training_continues_after_a_sync_check_mismatch(group):
    ddp, whole = warmed_up(group, check_sync_every=1)
    ddp.weight = 4
    for step in range(3, 6):
        rows = share(batch(step, group.size()), group)
        with torch.no_grad():
            ddp.module[0].bias += group.rank()
        with pytest.raises(RankMismatch, match="'0.bias' differs"):
            squares(ddp, rows).backward()
        with pytest.raises(RuntimeError, match="has not finished"):
            ddp._check_reducer_finalized()  # the next one waits for what it has launched
        ddp.zero_grad()
        ddp.load_state_dict(whole.state_dict())
        both(ddp, whole, group, step)
        compare(ddp, whole)


@everywhere
def test_failed_pass_resets_gradient_accumulation(group):
    ddp, whole = wrapped(mlp, group, bucket_cap_mb=TINY)
    for step in range(4):
        rows = share(batch(step, group.size()), group)
        with ddp.no_sync():
            squares(ddp, rows).backward()
        fail_at(ddp.module[0].weight, rows, ddp)
        ddp.zero_grad()
        both(ddp, whole, group, step)
        compare(ddp, whole)
