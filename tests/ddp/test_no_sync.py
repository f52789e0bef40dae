"""Gradient accumulation with no_sync()."""

from datetime import timedelta

import pytest

from cases import over_cases
from phalanx.errors import GroupError, RankMismatch
from phalanx.testing import over_groups

from .whole import (
    TINY,
    assert_same_gradients,
    batch,
    both_ways,
    compare,
    everywhere,
    mlp,
    share,
    squares,
    wrapped,
)


@over_cases("local-1", "shm-2", "gloo-2", "local-4")
@both_ways
def test_first_pass_after_no_sync_reduces_the_sum(group, keeps):
    ddp, whole = wrapped(mlp, group, gradient_as_bucket_view=keeps, bucket_cap_mb=TINY)
    for step in range(6):
        with ddp.no_sync():
            for turn in range(step % 3):
                squares(ddp, share(batch(10 * step + turn, group.size()), group)).backward()
        squares(ddp, share(batch(step, group.size()), group)).backward()
        for seed in [*(10 * step + turn for turn in range(step % 3)), step]:
            squares(whole, batch(seed, group.size())).backward()
        assert_same_gradients(ddp.module, whole)
        ddp.zero_grad(set_to_none=step % 2 == 0)
        whole.zero_grad(set_to_none=step % 2 == 0)


@everywhere
def test_gradients_stay_local_in_no_sync(group):
    ddp, whole = wrapped(mlp, group)
    for step in range(3):
        rows = share(batch(step, group.size()), group)
        with ddp.no_sync():
            assert not ddp.require_backward_grad_sync
            squares(ddp, rows).backward()
        assert ddp.require_backward_grad_sync
        squares(whole, rows).backward()
        assert_same_gradients(ddp.module, whole)
    squares(ddp, rows).backward()


@everywhere
def test_no_sync_applies_to_backward_not_forward(group):
    ddp, whole = wrapped(mlp, group)
    rows = batch(0, group.size())
    with ddp.no_sync():
        loss = squares(ddp, share(rows, group))
    loss.backward()
    squares(whole, rows).backward()
    assert_same_gradients(ddp.module, whole)

    loss = squares(ddp, share(rows, group))
    ddp.zero_grad()
    whole.zero_grad()
    with ddp.no_sync():
        loss.backward()
    squares(whole, share(rows, group)).backward()
    assert_same_gradients(ddp.module, whole)
    squares(ddp, share(rows, group)).backward()


@everywhere
def test_no_sync_nests_and_is_restored_after_an_error(group):
    ddp, _ = wrapped(mlp, group)
    with pytest.raises(ZeroDivisionError), ddp.no_sync():
        with ddp.no_sync():
            pass
        assert not ddp.require_backward_grad_sync
        raise ZeroDivisionError
    assert ddp.require_backward_grad_sync


@everywhere
@both_ways
def test_parameter_used_only_in_no_sync_passes(group, keeps):
    ddp, whole = wrapped(mlp, group, gradient_as_bucket_view=keeps)
    for step in range(3):
        rows = batch(step, group.size())
        with ddp.no_sync():
            squares(ddp, share(rows, group)).backward()
        ddp(share(rows, group)).mean().backward(inputs=[ddp.module[2].weight])
        squares(whole, rows).backward()
        whole(rows).mean().backward(inputs=[whole[2].weight])
        compare(ddp, whole)


@everywhere
@both_ways
def test_sum_reduction_with_no_sync(group, keeps):
    ddp, whole = wrapped(mlp, group, gradient_as_bucket_view=keeps, reduce="sum")
    for step in range(8):
        rows = batch(step, group.size())
        if step % 3 == 1:
            with ddp.no_sync():
                squares(ddp, share(rows, group)).backward()
            squares(ddp, share(rows, group)).backward()
        else:
            squares(ddp, share(rows, group)).backward()
        for _ in range(1 + (step % 3 == 1)):
            (squares(whole, rows) * group.size()).backward()
        assert_same_gradients(ddp.module, whole)
        if step % 4 == 3:  # otherwise they add up
            ddp.zero_grad()
            whole.zero_grad()


@everywhere
def test_two_backwards_of_one_forward_inside_and_after_no_sync(group):
    ddp, whole = wrapped(mlp, group, bucket_cap_mb=TINY)
    for step in range(4):
        rows = batch(step, group.size())
        mine, theirs = squares(ddp, share(rows, group)), squares(whole, rows)
        with ddp.no_sync():
            mine.backward(retain_graph=True)
        mine.backward()
        (2 * theirs).backward()
        compare(ddp, whole)


# -- ranks that disagree -------------------------------------------------------------------


def disagree(ddp, rows, rank):
    """Run a pass in no_sync() on rank 0 that the other ranks reduce."""
    for _ in range(3):
        if rank == 0:
            with ddp.no_sync():
                squares(ddp, rows).backward()
        squares(ddp, rows).backward()


@over_cases("local-2", "shm-4", timeout=20, reuse=False)
@pytest.mark.parametrize("warm", [0, 2])
def test_no_sync_mismatch_is_raised_at_once(group, warm):
    ddp, _ = wrapped(mlp, group, bucket_cap_mb=TINY)
    rows = share(batch(0, group.size()), group)
    for _ in range(warm):
        squares(ddp, rows).backward()
    with pytest.raises(
        RankMismatch, match=r"ranks disagree: rank 0 called .* rank \d called"
    ) as it:
        disagree(ddp, rows, group.rank())
    assert it.value.__notes__[-1].startswith("Hint: call no_sync() around the same passes")


@over_groups(backends=("gloo",), sizes=(2, 4), timeout=20)
@pytest.mark.parametrize("warm", [0, 2])
def test_no_sync_mismatch_on_gloo_is_raised_by_the_next_pass(group, warm):
    ddp, _ = wrapped(mlp, group)
    rows = share(batch(0, group.size()), group)
    for _ in range(warm):
        squares(ddp, rows).backward()
    with pytest.raises(RankMismatch, match=r"different backward passes.*rank 0: "):
        disagree(ddp, rows, group.rank())


@over_groups(backends=("gloo",), sizes=(2,), timeout=20)
def test_rank_that_never_syncs_is_named_at_the_timeout_on_gloo(group):
    ddp, _ = wrapped(mlp, group)
    rows = share(batch(0, group.size()), group)
    squares(ddp, rows).backward()
    squares(ddp, rows).backward()
    group.set_timeout(timedelta(seconds=1))
    if group.rank() == 0:
        with ddp.no_sync():
            squares(ddp, rows).backward()
        return
    with pytest.raises(GroupError, match="rank 0") as caught:
        squares(ddp, rows).backward()
    assert "0.weight" in "".join(caught.value.__notes__)
