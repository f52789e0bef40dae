"""Passes that do not come to their end, and what comes after them."""

import pytest
import torch
from torch import nn

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
    over_cases,
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
def test_backward_raises_in_the_middle_and_training_goes_on(group, cap):
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
def test_backward_raises_and_is_called_again_without_a_forward(group):
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


# -- what a pass leaves behind -------------------------------------------------------------


def fail_at(parameter, rows, ddp):
    """Have backward raise when it comes to a parameter, and return the pass that it was."""
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
    """Wrap a network and train it until buckets are launched early."""
    ddp, whole = wrapped(mlp, group, bucket_cap_mb=TINY, **options)
    for step in range(3):
        both(ddp, whole, group, step)
        compare(ddp, whole)
    return ddp, whole


@over_cases("local-2", "shm-4", reuse=False)
def test_what_a_failed_pass_has_launched_is_waited_for_before_the_next(group):
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
    ddp(rows)  # nobody may write into what peers are still reducing
    assert all(work.is_completed() for work in failed._works)
    both(ddp, whole, group, 4)
    compare(ddp, whole)


@everywhere
@both_ways
def test_old_gradients_are_gone_when_their_buckets_have_been_reduced(group, keeps):
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
def test_ranks_agree_although_nobody_has_cleared_what_a_failed_pass_left(group, reduce):
    ddp, _ = wrapped(mlp, group, bucket_cap_mb=TINY, reduce=reduce)
    for step in range(6):
        rows = share(batch(step, group.size()), group)
        if step in (0, 3):
            fail_at(ddp.module[0].weight, rows, ddp)
        squares(ddp, rows).backward()
        assert_same_everywhere(ddp)


@several
def test_training_goes_on_after_ranks_were_told_that_they_differ(group):
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
def test_accumulation_begins_anew_after_a_pass_that_raised(group):
    ddp, whole = wrapped(mlp, group, bucket_cap_mb=TINY)
    for step in range(4):
        rows = share(batch(step, group.size()), group)
        with ddp.no_sync():
            squares(ddp, rows).backward()
        fail_at(ddp.module[0].weight, rows, ddp)
        ddp.zero_grad()
        both(ddp, whole, group, step)
        compare(ddp, whole)
