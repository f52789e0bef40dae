"""Loss weights: gradients match the whole batch, however unevenly it is split."""

import math
from contextlib import nullcontext
from functools import partial

import pytest
import torch

from cases import over_cases
from phalanx.ddp import MixedPrecision
from phalanx.errors import InvalidArgument, InvalidState, RankMismatch
from phalanx.testing import over_groups

from .models import Waves, Words
from .whole import (
    ROWS,
    TINY,
    assert_same_gradients,
    batch,
    both,
    compare,
    copy_of,
    everywhere,
    mlp,
    on_pairs,
    several,
    share,
    squares,
    wrapped,
)

SHARES = {
    "uneven": lambda _, rank: rank + 1,
    "changing": lambda step, rank: 1 + (step * 3 + rank) % 5,
    "empty": lambda step, rank: 0 if rank == step % 2 + 1 else 3,
}


def fail(gradient):
    raise ArithmeticError("in the middle")


def cut(rows, counts, rank):
    start = sum(counts[:rank])
    return rows[start : start + counts[rank]]


def mean(module, rows):
    """Return the mean loss of some rows, possibly none."""
    return module(rows).square().sum(dim=1).mean() if len(rows) else module(rows).sum()


def plan(shares, step, size):
    counts = [SHARES[shares](step, rank) for rank in range(size)]
    generator = torch.Generator().manual_seed(step)
    return counts, torch.randn(sum(counts), 5, generator=generator)


@over_cases("local-1", "shm-2", "gloo-2", "local-4")
@pytest.mark.parametrize("shares", SHARES)
def test_uneven_local_batches(group, shares):
    ddp, whole = wrapped(mlp, group, bucket_cap_mb=TINY)
    for step in range(4):
        counts, rows = plan(shares, step, group.size())
        mine = cut(rows, counts, group.rank())
        if step % 2:
            ddp.weight = len(mine)
            mean(ddp, mine).backward()
            ddp.weight = None
        else:
            ddp.backward(mean(ddp, mine), weight=len(mine))
            assert ddp.weight is None
        mean(whole, rows).backward()
        compare(ddp, whole, rtol=2e-6)


@everywhere
@pytest.mark.parametrize("keeps", [True, False], ids=["views", "own"])
def test_accumulation_with_changing_weights(group, keeps):
    ddp, whole = wrapped(mlp, group, gradient_as_bucket_view=keeps)
    for step in range(3):
        everything = []
        for turn in range(3):
            counts, rows = plan("changing", step + turn, group.size())
            everything.append(rows)
            loss = mean(ddp, cut(rows, counts, group.rank()))
            ddp.weight = counts[group.rank()]
            if turn < 2:
                with ddp.no_sync():
                    loss.backward()
            else:
                loss.backward()
        mean(whole, torch.cat(everything)).backward()
        compare(ddp, whole, rtol=2e-6)


@everywhere
def test_weighted_gradients_accumulate_without_zero_grad(group):
    ddp, whole = wrapped(mlp, group)
    for step in range(4):
        counts, rows = plan("uneven", step, group.size())
        ddp.weight = counts[group.rank()]
        mean(ddp, cut(rows, counts, group.rank())).backward()
        mean(whole, rows).backward()
        assert_same_gradients(ddp.module, whole, rtol=2e-6)


@everywhere
def test_zero_weight_rank_may_have_nan_gradients(group):
    ddp, whole = wrapped(mlp, group)
    counts = [0 if rank == 1 else 2 for rank in range(group.size())]
    rows = batch(0, group.size())[: sum(counts)]
    mine = cut(rows, counts, group.rank())
    loss = mean(ddp, mine) if len(mine) else ddp(mine).mean()  # NaN
    ddp.backward(loss, weight=len(mine))
    mean(whole, rows).backward()
    assert_same_gradients(ddp.module, whole)


@everywhere
def test_all_weights_zero_gives_zero_gradients(group):
    ddp, _ = wrapped(mlp, group)
    ddp.backward(squares(ddp, torch.ones(2, 5)), weight=0)
    assert all(not p.grad.any() for p in ddp.parameters())


@everywhere
def test_backward_uses_the_weight_attribute(group):
    ddp, whole = wrapped(mlp, group)
    counts, rows = plan("uneven", 0, group.size())
    ddp.weight = counts[group.rank()]
    ddp.backward(mean(ddp, cut(rows, counts, group.rank())))
    mean(whole, rows).backward()
    assert_same_gradients(ddp.module, whole, rtol=2e-6)
    assert ddp.weight == counts[group.rank()]


@everywhere
def test_large_weights_with_float16_parameters(group):
    ddp, _ = wrapped(lambda: torch.nn.Linear(5, 2).to(torch.float16), group)
    for tokens in (100_000.0, 3e6):  # more than float16 holds
        ddp.weight = tokens
        ddp(torch.ones(1, 5, dtype=torch.float16)).sum().backward()
        assert ddp.module.weight.grad.tolist() == [[1.0] * 5] * 2
        ddp.zero_grad()


WEIGHTS = [
    [(1e5, 3e4)],
    [(1.0, 0.0)],
    [(3.0, 1.0), (2.0, 5.0)],
    [(6e4, 1.0), (9e4, 2e4), (1.0, 1.0)],
]


@over_groups(backends=("local", "shm", "gloo"), sizes=(2,), reuse=True)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_changing_weights_with_low_precision_reduction(group, dtype):
    """The scale is not fixed by the first step or by the last pass of a step."""
    ddp, whole = wrapped(mlp, group, mixed_precision=MixedPrecision(reduce_dtype=dtype))
    for step, passes in enumerate(WEIGHTS):
        total = sum(map(sum, passes))
        for turn, weights in enumerate(passes):
            rows = batch(10 * step + turn, group.size())
            with nullcontext() if turn == len(passes) - 1 else ddp.no_sync():
                ddp.backward(squares(ddp, share(rows, group)), weight=weights[group.rank()])
            for part, weight in zip(rows.split(ROWS), weights, strict=True):
                (squares(whole, part) * (weight / total)).backward()
        compare(ddp, whole, rtol=4 * torch.finfo(dtype).eps)


@everywhere
@pytest.mark.parametrize("raises", [False, True], ids=["cleared", "raised"])
def test_no_sync_passes_cleared_by_zero_grad_do_not_count(group, raises):
    ddp, whole = wrapped(mlp, group)
    ddp.weight = 4
    rows = share(batch(0, group.size()), group)
    with ddp.no_sync():
        squares(ddp, rows).backward()
    if raises:
        hook = ddp.module[0].weight.register_hook(fail)
        with pytest.raises(ArithmeticError, match="in the middle"):
            squares(ddp, rows).backward()
        hook.remove()
    ddp.zero_grad()
    both(ddp, whole, group, 1)
    compare(ddp, whole)


@everywhere
def test_complex_and_sparse_gradients(group):
    for make in (Waves, partial(Words, sparse=True)):
        ddp, whole = wrapped(make, group)
        for step in range(3):
            counts, rows = plan("uneven", step, group.size())
            ddp.weight = counts[group.rank()]
            mean(ddp, cut(rows, counts, group.rank())).backward()
            mean(whole, rows).backward()
            compare(ddp, whole, rtol=2e-6)


@everywhere
def test_weights_in_some_steps_only(group):
    ddp, whole = wrapped(mlp, group)
    for step in range(6):
        ddp.weight = 4 if step % 2 else None
        both(ddp, whole, group, step)
        compare(ddp, whole)


@over_cases("local-2", "shm-4", "gloo-2", timeout=20, reuse=False)
def test_weight_on_one_rank_only_is_rejected(group):
    ddp, _ = wrapped(mlp, group)
    ddp.weight = 3 if group.rank() == 1 else None
    with pytest.raises(RankMismatch, match="rank") as caught:
        squares(ddp, torch.ones(2, 5)).backward()
    assert "ddp.weight" in "\n".join([str(caught.value), *getattr(caught.value, "__notes__", ())])


@over_groups(backends=("local",), sizes=(1,))
@pytest.mark.parametrize("weight", [-1, float("nan"), float("inf"), 1e300, 1e-300])
def test_bad_weight_is_rejected(group, weight):
    ddp, _ = wrapped(mlp, group)
    with pytest.raises(InvalidArgument, match="weight"):
        ddp.weight = weight


@several
@pytest.mark.parametrize("place", [0, 1, 2])
def test_zero_weight_pass_adds_nothing(group, place):
    """At any position of an accumulation, even if its gradients are NaN."""
    ddp, whole = wrapped(mlp, group)
    for step in range(2):
        weights = [[1.0 + rank + turn for turn in range(3)] for rank in range(group.size())]
        weights[1][place] = 0.0
        total = sum(map(sum, weights))
        for turn in range(3):
            rows = batch(3 * step + turn, group.size())
            weight = weights[group.rank()][turn]
            loss = squares(ddp, share(rows, group)) * (1.0 if weight else math.nan)
            with ddp.no_sync() if turn < 2 else nullcontext():
                ddp.backward(loss, weight=weight)
            for rank, part in enumerate(rows.split(ROWS)):
                if weights[rank][turn]:
                    (squares(whole, part) * weights[rank][turn] / total).backward()
        assert_same_gradients(ddp.module, whole, rtol=4e-6)  # and they are never zeroed


@on_pairs
def test_zero_weight_pass_keeps_previous_grads(group):
    ddp, _ = wrapped(lambda: torch.nn.Linear(5, 1), group)
    ddp.backward(ddp(torch.ones(2, 5)).mean(), weight=1)
    ddp.backward(ddp(torch.ones(2, 5)).mean(), weight=0)
    assert ddp.module.bias.grad.item() == 1.0


@on_pairs
@pytest.mark.parametrize("is_local", [True, False], ids=["local", "reduced"])
def test_zero_weight_rank_after_a_failed_pass(group, is_local):
    ddp, _ = wrapped(lambda: torch.nn.Linear(5, 1), group)
    ddp.weight = 3
    hook = ddp.module.bias.register_hook(fail)
    with pytest.raises(ArithmeticError), ddp.no_sync() if is_local else nullcontext():
        ddp(torch.ones(2, 5)).mean().backward()
    hook.remove()
    ddp.zero_grad()
    ddp.weight = 3 * group.rank()
    ddp(torch.ones(2, 5)).mean().backward()
    assert ddp.module.bias.grad.item() == 1.0


@everywhere
def test_failed_pass_does_not_count(group):
    ddp, whole = wrapped(mlp, group)
    ddp.weight = 4
    for step in range(4):
        rows = batch(step, group.size())
        if step in (1, 2):
            hook = ddp.module[0].weight.register_hook(fail)
            with pytest.raises(ArithmeticError, match="in the middle"):
                ddp(share(rows, group)).sum().backward()
            hook.remove()
            ddp.zero_grad()
        squares(ddp, share(rows, group)).backward()
        squares(whole, rows).backward()
        compare(ddp, whole)


class Failing(torch.nn.Module):
    """Optionally fails in backward before any parameter has a gradient."""

    fails = False

    def __init__(self):
        super().__init__()
        self.net = mlp()

    def forward(self, rows):
        hidden = self.net(rows)
        if self.fails:
            hidden.register_hook(fail)
        return hidden * 1


@everywhere
@pytest.mark.parametrize("is_local", [True, False], ids=["local", "reduced"])
def test_failed_pass_keeps_the_weights_of_other_passes(group, is_local):
    """A failed no_sync() pass keeps earlier gradients; a failed reduced pass discards them."""
    ddp, whole = wrapped(Failing, group)
    first, second = batch(0, group.size()), batch(1, group.size())
    with ddp.no_sync():
        ddp.weight = 1.0 + group.rank()
        squares(ddp, share(first, group)).backward()
    with ddp.no_sync() if is_local else nullcontext():
        ddp.weight = 6.0
        ddp.module.fails = True
        with pytest.raises(ArithmeticError, match="in the middle"):
            squares(ddp, share(second, group)).backward()
        ddp.module.fails = False
    ddp.weight = 2.0
    squares(ddp, share(second, group)).backward()
    weights = [1.0 + rank if is_local else 0.0 for rank in range(group.size())]
    total = sum(weights) + 2.0 * group.size()
    for rank, weight in enumerate(weights):
        early, late = (rows.split(ROWS)[rank] for rows in (first, second))
        loss = squares(whole, early) * weight + squares(whole, late) * 2.0
        (loss / total).backward()
    compare(ddp, whole, rtol=2e-6)


# -- weights and accumulated gradients ---------------------------------------------------------


class Skipping(torch.nn.Module):
    """Has an optional layer."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(5, 1)

    def forward(self, rows, use=True):
        return self.layer(rows) if use else rows.sum(dim=1, keepdim=True)


@several
def test_micro_batch_that_reaches_no_parameter_keeps_its_weight(group):
    ddp, _ = wrapped(Skipping, group)
    ddp.weight = 3
    for _ in range(2):
        with ddp.no_sync():
            ddp(torch.ones(2, 5, requires_grad=True), group.rank() != 1).mean().backward()
        ddp(torch.ones(2, 5)).mean().backward()
        micro_batches = 2 * group.size()
        expected = (micro_batches - 1) / micro_batches
        assert ddp.module.layer.bias.grad.item() == pytest.approx(expected)
        ddp.zero_grad()


DROPS = {
    "module, None": lambda ddp, _: ddp.zero_grad(),
    "module, zero": lambda ddp, _: ddp.zero_grad(set_to_none=False),
    "optimizer, None": lambda _, optimizer: optimizer.zero_grad(),
    "optimizer, zero": lambda _, optimizer: optimizer.zero_grad(set_to_none=False),
}


@on_pairs
@pytest.mark.parametrize("drop", DROPS)
def test_zero_grad_drops_the_weight_of_accumulated_gradients(group, drop):
    ddp, whole = wrapped(mlp, group)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    ddp.weight = 3
    for step in range(3):  # a bad batch that is dropped
        with ddp.no_sync():
            squares(ddp, share(batch(9, group.size()), group)).backward()
        DROPS[drop](ddp, optimizer)
        both(ddp, whole, group, step)
        assert_same_gradients(ddp.module, whole, rtol=2e-6)
        DROPS[drop](ddp, optimizer)
        whole.zero_grad()


@several
def test_gradients_that_happen_to_be_zero_keep_their_weight(group):
    ddp, _ = wrapped(lambda: torch.nn.Linear(5, 1), group)
    ddp.weight = 1
    with ddp.no_sync():
        (ddp(torch.ones(2, 5)) * 0).mean().backward()
    torch.nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)
    ddp(torch.ones(2, 5)).mean().backward()
    assert ddp.module.bias.grad.item() == pytest.approx(0.5)


@several
@pytest.mark.parametrize(
    ("make", "shares"),
    [(mlp, "uneven"), (mlp, "changing"), (partial(Words, sparse=True), "changing")],
    ids=["uneven", "changing", "sparse"],
)
def test_no_sync_passes_on_top_of_reduced_gradients(group, make, shares):
    """Without zero_grad, the mean of accumulated passes is added to reduced gradients."""
    ddp, whole = wrapped(make, group)
    for step in range(3):
        everything = []
        for turn in range(3):
            counts, rows = plan(shares, 3 * step + turn, group.size())
            everything.append(rows)
            loss = mean(ddp, cut(rows, counts, group.rank()))
            with ddp.no_sync() if turn < 2 else nullcontext():
                ddp.backward(loss, weight=counts[group.rank()])
        mean(whole, torch.cat(everything)).backward()
        assert_same_gradients(ddp.module, whole, rtol=4e-6)


@over_groups(backends=("local",), sizes=(2,), timeout=20)
def test_clipping_after_a_no_sync_pass_on_reduced_gradients_is_rejected(group):
    """The reduced part of the gradients is no longer known."""
    ddp, _ = wrapped(mlp, group)
    ddp.weight = 3
    rows = share(batch(0, group.size()), group)
    squares(ddp, rows).backward()
    with ddp.no_sync():
        squares(ddp, rows).backward()
    torch.nn.utils.clip_grad_norm_(ddp.parameters(), 1e-3)
    with pytest.raises(InvalidState, match="zero_grad"):
        squares(ddp, rows).backward()
    ddp.zero_grad()
    whole = copy_of(ddp.module)
    both(ddp, whole, group, 1)
    compare(ddp, whole)


@on_pairs
@pytest.mark.parametrize("drop", DROPS)
def test_zero_grad_after_a_failed_no_sync_pass_on_reduced_gradients(group, drop):
    ddp, _ = wrapped(lambda: torch.nn.Linear(5, 1), group)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    ddp.weight = 3
    (10 * ddp(torch.ones(2, 5))).mean().backward()
    hook = ddp.module.bias.register_hook(fail)
    with pytest.raises(ArithmeticError), ddp.no_sync():
        ddp(torch.ones(2, 5)).mean().backward()
    hook.remove()
    DROPS[drop](ddp, optimizer)
    with ddp.no_sync():
        ddp(torch.ones(2, 5)).mean().backward()
    ddp(torch.ones(2, 5)).mean().backward()
    assert ddp.module.bias.grad.item() == 1.0


@on_pairs
@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_of_one_of_two_optimizers(group, set_to_none):
    """Gradients of the other optimizer's parameters still count."""
    ddp, _ = wrapped(lambda: torch.nn.Linear(5, 1), group)
    optimizer = torch.optim.SGD([ddp.module.weight], lr=0.1)
    ddp.weight = 3
    (10 * ddp(torch.ones(2, 5))).mean().backward()
    with ddp.no_sync():
        ddp(torch.ones(2, 5)).mean().backward()
    optimizer.zero_grad(set_to_none=set_to_none)
    ddp(torch.ones(2, 5)).mean().backward()
    assert ddp.module.bias.grad.item() == 11.0
    assert ddp.module.weight.grad[0, 0].item() == 0.5  # the mean over both micro-batches


EDITS = {
    "zero_": lambda grad: grad.zero_(),
    "data": lambda grad: grad.data.zero_(),
    "detached": lambda grad: grad.detach().zero_(),
}


@on_pairs
@pytest.mark.parametrize("edit", EDITS)
def test_gradients_zeroed_by_hand(group, edit):
    ddp, _ = wrapped(lambda: torch.nn.Linear(5, 1), group)
    ddp.weight = 1
    with ddp.no_sync():
        ddp(torch.ones(2, 5)).mean().backward()
    for parameter in ddp.parameters():
        EDITS[edit](parameter.grad)
    ddp(torch.ones(2, 5)).mean().backward()
    assert ddp.module.bias.grad.item() == 1.0
