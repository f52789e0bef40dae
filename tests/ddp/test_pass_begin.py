"""A backward pass may begin anywhere: at outputs nobody can find, or at a parameter itself."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import phalanx
from phalanx.testing import over_groups

from .whole import TINY, assert_close, assert_same_gradients, batch, several, share, wrapped


class Plain:
    """An object with a dictionary."""

    def __init__(self, y):
        self.y = y


class Slotted:
    """An object without one, whose base has slots, too."""

    __slots__ = ("_y", "unset")

    def __init__(self, y):
        self._y = y


class Inherited(Slotted):
    __slots__ = ()


class Vocabulary:
    """An object with so much in it that its output is not looked for to the end."""

    def __init__(self, y):
        self.y = Plain(y)
        self.words = [[word] for word in range(20_000)]


KINDS = {
    "plain": (Plain, lambda out: out.y),
    "nested": (lambda y: [Plain({"a": (Plain(y),)})], lambda out: out[0].y["a"][0].y),
    "slotted": (Inherited, lambda out: out._y),
    "distribution": (
        lambda y: torch.distributions.Normal(y, 1.0, validate_args=False),
        lambda out: out.mean,
    ),
    "vocabulary": (Vocabulary, lambda out: out.y.y),
    "hidden": (lambda y: lambda: y, lambda out: out()),
}
of_every_kind = pytest.mark.parametrize("kind", KINDS)
on_two = over_groups(backends=("local", "shm"), sizes=(2,), timeout=20, reuse=True)


class Net(nn.Module):
    """Layers, some of them checkpointed, and an output in a wrapping."""

    def __init__(self, kind="plain"):
        super().__init__()
        self.pack = KINDS[kind][0]
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(4))

    def forward(self, rows, checkpointed=True):
        for i, layer in enumerate(self.layers):
            rows = (
                checkpoint(layer, rows, use_reentrant=True) if i and checkpointed else layer(rows)
            )
            rows = rows.tanh()
        return self.pack(rows)


def loss_of(module, kind, *inputs):
    return KINDS[kind][1](module(*inputs)).square().mean()


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("vocabulary", "hidden")])
def test_tensors_are_found_in_objects(kind):
    y = torch.ones(2, requires_grad=True) * 2
    assert any(found is y for found in phalanx.ddp._find_tensors(KINDS[kind][0](y)))


def test_a_search_ends_in_circles_and_large_objects():
    circle = Plain(None)
    circle.y = [circle, {"self": circle}]
    assert phalanx.ddp._find_tensors(circle) == []
    far = Plain([[number] for number in range(50_000)] + [torch.ones(1)])
    assert phalanx.ddp._find_tensors(far) == []


@on_two
@of_every_kind
def test_one_backward_is_one_pass(group, kind):
    """With weights, accumulation, and reentrant checkpoints, which run autograd within autograd."""
    ddp, whole = wrapped(lambda: Net(kind), group, bucket_cap_mb=TINY)
    for step in range(3):
        weights = [[1.0 + rank + turn for turn in range(2)] for rank in range(2)]
        total = sum(map(sum, weights))
        for turn in range(2):
            rows = batch(2 * step + turn, 2)
            ddp.weight = weights[group.rank()][turn]
            with ddp.no_sync() if turn == 0 else nullcontext():
                loss_of(ddp, kind, share(rows, group)).backward()
            for rank, part in enumerate(rows.split(len(rows) // 2)):
                (loss_of(whole, kind, part) * weights[rank][turn] / total).backward()
        assert_same_gradients(ddp.module, whole, rtol=2e-6)
        assert len(ddp.stats()) == step + 1
        ddp.zero_grad()
        whole.zero_grad()


@on_two
@pytest.mark.parametrize("kind", ["plain", "hidden"])
@pytest.mark.parametrize("static", [True, False], ids=["static", "changing"])
def test_optimizers_in_backward_step_once(group, kind, static):
    ddp, whole = wrapped(lambda: Net(kind), group, bucket_cap_mb=TINY, static_graph=static)
    ddp._register_fused_optim(torch.optim.Adam, lr=0.05)
    adam = torch.optim.Adam(whole.parameters(), lr=0.05)
    for step in range(6):
        rows = batch(step, 2)
        with ddp.no_sync() if step % 2 == 0 else nullcontext():
            loss_of(ddp, kind, share(rows, group)).backward()
        for part in rows.split(len(rows) // 2):
            (loss_of(whole, kind, part) / 2).backward()
        if step % 2:
            adam.step()
            adam.zero_grad()
    for mine, theirs in zip(ddp.module.parameters(), whole.parameters(), strict=True):
        assert_close(mine.detach(), theirs.detach(), rtol=1e-4)


@several
@pytest.mark.parametrize("kind", ["plain", "hidden"])
def test_one_rank_checkpoints_and_others_do_not(group, kind):
    ddp, whole = wrapped(lambda: Net(kind), group, bucket_cap_mb=TINY)
    for step in range(3):
        rows = batch(step, group.size())
        loss_of(ddp, kind, share(rows, group), group.rank() == 0).backward()
        for part in rows.split(len(rows) // group.size()):
            (loss_of(whole, kind, part) / group.size()).backward()
        assert_same_gradients(ddp.module, whole, rtol=2e-6)
        ddp.zero_grad()
        whole.zero_grad()


@on_two
def test_a_pass_within_a_checkpoint_that_raises_is_forgotten(group):
    ddp, whole = wrapped(lambda: Net("hidden"), group)

    def fail(gradient):
        raise ArithmeticError("in the middle")

    rows = batch(0, 2)
    for raises in (False, True, False):
        hook = ddp.module.layers[1].weight.register_hook(fail) if raises else None
        loss = loss_of(ddp, "hidden", share(rows, group))
        if hook is None:
            loss.backward()
        else:
            with pytest.raises(ArithmeticError):
                loss.backward()
            hook.remove()
            ddp.zero_grad()
            continue
        for part in rows.split(len(rows) // 2):
            (loss_of(whole, "hidden", part) / 2).backward()
        assert_same_gradients(ddp.module, whole, rtol=2e-6)
        ddp.zero_grad()
        whole.zero_grad()


class Branches(nn.Module):
    """Two branches, of which a call takes one."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(5, 1), nn.Linear(5, 1)

    def forward(self, rows, branch):
        return self.b(rows) if branch else self.a(rows)


@on_two
@pytest.mark.parametrize("sums", [False, True], ids=["weight", "sum"])
def test_a_penalty_reaches_parameters_that_forward_did_not_use(group, sums):
    """Autograd comes to the penalty's parameters before it comes to any output."""
    ddp, whole = wrapped(Branches, group, reduce="sum" if sums else "mean")
    weights = [[1.0, 3.0], [2.0, 2.0]]
    total = 1.0 if sums else 8.0

    def loss(module, call, rows, branch):
        penalty = sum(p.square().sum() for p in module.parameters())
        return call(rows, branch).square().mean() + 0.1 * penalty

    for step in range(2):
        for turn in range(2):
            rows = batch(2 * step + turn, 2)
            weight = None if sums else weights[group.rank()][turn]
            with ddp.no_sync() if turn == 0 else nullcontext():
                ddp.backward(loss(ddp.module, ddp, share(rows, group), turn), weight=weight)
            for rank, part in enumerate(rows.split(len(rows) // 2)):
                scale = 1.0 if sums else weights[rank][turn] / total
                (loss(whole, whole, part, turn) * scale).backward()
        assert_same_gradients(ddp.module, whole, rtol=2e-6)  # and nobody zeroes them


@on_two
def test_gradients_that_go_elsewhere_begin_no_pass(group):
    """`autograd.grad` runs hooks on parameters, but leaves ``.grad`` alone."""
    ddp, _ = wrapped(lambda: Net("hidden"), group)
    loss = KINDS["hidden"][1](ddp(share(batch(0, 2), group), False)).square().mean()
    found = torch.autograd.grad(loss, list(ddp.module.parameters()))
    assert all(gradient.any() for gradient in found)
    assert ddp.stats() == []
    assert not ddp.reducer.is_under_way


@over_groups(backends=("local", "shm"), sizes=(2,), timeout=20)
@pytest.mark.parametrize("by_all", [True, False], ids=["by all", "by those with data"])
@pytest.mark.parametrize("kind", ["plain", "hidden"])
def test_uneven_data_and_gradients_that_nobody_zeroes(group, by_all, kind):
    class One(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(5, 1)

        def forward(self, rows):
            return KINDS[kind][0](self.layer(rows))

    ddp, _ = wrapped(One, group)
    seen = []
    steps = range([2, 4][group.rank()])
    for _ in phalanx.uneven(steps, ddp, divide_by_initial_world_size=by_all):
        KINDS[kind][1](ddp(torch.ones(3, 5))).mean().backward()
        seen.append(ddp.module.layer.bias.grad.item())
    expected = [1.0, 2.0, 2.5, 3.0] if by_all else [1.0, 2.0, 3.0, 4.0]
    assert seen == expected[: len(seen)]


@over_groups(backends=("local", "shm"), sizes=(2,), timeout=20)
def test_uneven_data_and_local_passes_on_reduced_gradients(group):
    """A rank that leaves takes no share of reduced gradients with it."""
    ddp, _ = wrapped(lambda: nn.Linear(5, 1), group)
    seen = []
    for step in phalanx.uneven(range([2, 4][group.rank()]), ddp):
        with ddp.no_sync() if step == 2 else nullcontext():
            ddp(torch.ones(3, 5)).mean().backward()
        seen.append(ddp.module.bias.grad.item())
    assert seen == [1.0, 2.0, 3.0, 3.0][: len(seen)]  # in the last step two count half each


@on_two
@pytest.mark.parametrize("reduce", ["mean", "sum"])
def test_the_module_itself_is_used_before_the_wrapper(group, reduce):
    """A backward pass that has nothing to do with the wrapper leaves this rank's gradients."""
    ddp, _ = wrapped(lambda: nn.Linear(5, 1), group, reduce=reduce)
    (ddp.module(torch.ones(2, 5)).mean() * (1 + group.rank())).backward()
    assert ddp.module.bias.grad.item() == 1 + group.rank()
