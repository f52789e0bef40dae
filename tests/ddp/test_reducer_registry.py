"""Two DDP modules on one group."""

from torch import nn

from .whole import ROWS, TINY, assert_same_gradients, batch, everywhere, share, wrapped


def in_turn(first, second, rows, *, swapped):
    """Return a loss through both modules, in either order."""
    pair = (second, first) if swapped else (first, second)
    return pair[1](pair[0](rows).tanh()).square().mean()


@everywhere
def test_ranks_use_two_modules_in_different_order(group):
    """Buckets have equal sizes, so a mix-up would not raise by itself."""
    first, whole_first = wrapped(lambda: nn.Linear(5, 5), group, bucket_cap_mb=TINY)
    second, whole_second = wrapped(lambda: nn.Linear(5, 5), group, bucket_cap_mb=TINY)
    for step in range(6):
        rows = batch(step, group.size())
        alone = step in (2, 3)  # same order on all ranks
        swapped = bool(group.rank() % 2) and not alone
        in_turn(first, second, share(rows, group), swapped=swapped).backward()
        losses = [
            in_turn(whole_first, whole_second, part, swapped=bool(rank % 2) and not alone)
            for rank, part in enumerate(rows.split(ROWS))
        ]
        (sum(losses) / group.size()).backward()
        for ddp, whole in ((first, whole_first), (second, whole_second)):
            assert_same_gradients(ddp.module, whole)
            ddp.zero_grad()
            whole.zero_grad()


@everywhere
def test_modules_share_a_backward_after_separate_ones(group):
    first, whole_first = wrapped(lambda: nn.Linear(5, 5), group, bucket_cap_mb=TINY)
    second, whole_second = wrapped(lambda: nn.Linear(5, 5), group, bucket_cap_mb=TINY)
    pairs = ((first, whole_first), (second, whole_second))
    for step in range(6):
        rows = batch(step, group.size())
        if step < 4:
            for ddp, whole in pairs:
                ddp(share(rows, group)).square().mean().backward()
                whole(rows).square().mean().backward()
        else:
            swapped = bool(group.rank() % 2)
            in_turn(first, second, share(rows, group), swapped=swapped).backward()
            for rank, part in enumerate(rows.split(ROWS)):
                loss = in_turn(whole_first, whole_second, part, swapped=bool(rank % 2))
                (loss / group.size()).backward()
        for ddp, whole in pairs:
            assert_same_gradients(ddp.module, whole)
            ddp.zero_grad()
            whole.zero_grad()


@everywhere
def test_idle_module_does_not_prevent_early_launch(group):
    ddp, _ = wrapped(lambda: nn.Linear(5, 5), group, bucket_cap_mb=TINY)
    idle, _ = wrapped(lambda: nn.Linear(5, 5), group, bucket_cap_mb=TINY)
    rows = share(batch(0, group.size()), group)
    launched = []
    for _ in range(4):
        loss = ddp(rows).square().mean()
        under_way = []
        # The bias gradient is ready first; its bucket is launched before the weight's gradient.
        handle = ddp.module.weight.register_hook(
            lambda _, seen=under_way: seen.append(len(ddp.reducer._in_flight._works))
        )
        loss.backward()
        handle.remove()
        launched += under_way
    assert launched[-1] == 1, launched
    assert idle.module.weight.grad is None
