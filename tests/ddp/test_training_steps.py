"""Plain training steps: gradients match the whole batch."""

import torch

from phalanx.testing import over_groups

from .whole import (
    ROWS,
    assert_same_gradients,
    batch,
    both_ways,
    everywhere,
    mlp,
    share,
    squares,
    wrapped,
)


@over_groups(backends=("local", "gloo", "shm"), sizes=(1, 2, 3, 4), split=True, reuse=True)
def test_gradients_match_the_whole_batch(group):
    ddp, whole = wrapped(mlp, group)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (ddp, whole)]
    for step in range(6):
        rows = batch(step, group.size())
        for optimizer in optimizers:
            optimizer.zero_grad()
        ddp(share(rows, group)).square().mean().backward()
        whole(rows).square().mean().backward()
        assert_same_gradients(ddp.module, whole)
        for optimizer in optimizers:
            optimizer.step()
    ddp.assert_in_sync()


@everywhere
@both_ways
def test_mean_is_summed_in_rank_order_bitwise(group, keeps):
    ddp, whole = wrapped(mlp, group, gradient_as_bucket_view=keeps)
    for step in range(4):
        rows = batch(step, group.size())
        squares(ddp, share(rows, group)).backward()
        total = None
        for part in rows.split(ROWS):
            whole.zero_grad()
            squares(whole, part).backward()
            gradients = [p.grad for p in whole.parameters()]
            total = gradients if total is None else list(map(torch.add, total, gradients))
        for mine, theirs in zip(ddp.parameters(), total, strict=True):
            assert torch.equal(mine.grad, theirs / group.size())
        ddp.zero_grad()
