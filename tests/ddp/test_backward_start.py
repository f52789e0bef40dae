"""Backward may start anywhere: at outputs DDP cannot find, or at a parameter itself."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import phalanx
from phalanx.testing import over_groups

from .whole import (
    TINY,
    assert_close,
    assert_same_gradients,
    batch,
    both,
    compare,
    several,
    share,
    wrapped,
)


class Plain:
    """An object with a __dict__."""

    def __init__(self, y):
        self.y = y


class Slotted:
    """An object with __slots__ only."""

    __slots__ = ("_y", "unset")

    def __init__(self, y):
        self._y = y


class Inherited(Slotted):
    __slots__ = ()


class Vocabulary:
    """An object so large that the search for tensors gives up."""

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
    """Layers, some of them checkpointed, with the output wrapped in an object."""

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
def test_find_tensors_looks_into_objects(kind):
    y = torch.ones(2, requires_grad=True) * 2
    assert any(found is y for found in phalanx.ddp._find_tensors(KINDS[kind][0](y)))


def test_find_tensors_stops_at_cycles_and_large_objects():
    circle = Plain(None)
    circle.y = [circle, {"self": circle}]
    assert phalanx.ddp._find_tensors(circle) == []
    far = Plain([[number] for number in range(50_000)] + [torch.ones(1)])
    assert phalanx.ddp._find_tensors(far) == []


@on_two
@of_every_kind
def test_each_backward_counts_as_one_pass(group, kind):
    """With weights, accumulation and reentrant checkpoints, which run autograd inside autograd."""
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
def test_optimizer_in_backward_steps_once_per_pass(group, kind, static):
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
def test_checkpointing_on_one_rank_only(group, kind):
    ddp, whole = wrapped(lambda: Net(kind), group, bucket_cap_mb=TINY)
    for step in range(3):
        rows = batch(step, group.size())
        loss_of(ddp, kind, share(rows, group), group.rank() == 0).backward()
        for part in rows.split(len(rows) // group.size()):
            (loss_of(whole, kind, part) / group.size()).backward()
        assert_same_gradients(ddp.module, whole, rtol=2e-6)
        ddp.zero_grad()
        whole.zero_grad()


def fail(gradient):
    raise ArithmeticError("in the middle")


class Failing(nn.Module):
    """A checkpointed layer between two others; backward raises where `fails` says."""

    def __init__(self):
        super().__init__()
        self.first, self.layer, self.last = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 2)

    def forward(self, rows, fails=""):
        hidden = self.first(rows)
        if fails == "between":
            hidden.register_hook(fail)

        def layer(rows):
            out = self.layer(rows)
            if fails == "inside" and out.requires_grad:
                out.register_hook(fail)
            if fails == "inside, late" and out.requires_grad:
                rows.register_hook(fail)
            return out

        output = checkpoint(layer, hidden, use_reentrant=True)
        return lambda: output


@on_two
@pytest.mark.parametrize("fails", ["inside", "inside, late", "between"])
def test_pass_that_raised_in_or_after_a_checkpoint_is_discarded(group, fails):
    """Also when the next backward uses a graph from before the failure."""
    ddp, whole = wrapped(Failing, group)
    for step in range(4):
        rows = batch(step, 2)
        loss = ddp(share(rows, group))().square().mean()
        if step in (1, 2):
            with pytest.raises(ArithmeticError):
                ddp(share(rows, group), fails)().square().mean().backward()
            ddp.zero_grad()
        if step == 2:
            loss = ddp(share(rows, group))().square().mean()
        loss.backward()
        for part in rows.split(len(rows) // 2):
            (whole(part)().square().mean() / 2).backward()
        assert_same_gradients(ddp.module, whole, rtol=2e-6)
        assert len(ddp.stats()) == step + 1
        ddp.zero_grad()
        whole.zero_grad()


@on_two
@pytest.mark.parametrize("where", ["both", "one rank"])
def test_ddp_module_checkpointed_twice_in_one_loss(group, where):
    ddp, whole = wrapped(lambda: nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 1)), group)
    ddp._register_fused_optim(torch.optim.SGD, lr=0.5)
    rows = batch(0, 2)
    mine = [share(rows, group).clone().requires_grad_() for _ in range(2)]
    if where == "both" or group.rank() == 0:
        outputs = [checkpoint(ddp, part, use_reentrant=True) for part in mine]
    else:
        outputs = [ddp(part) for part in mine]
    sum(output.square().mean() for output in outputs).backward()
    for part in rows.split(len(rows) // 2):
        (2 * whole(part).square().mean() / 2).backward()
    torch.optim.SGD(whole.parameters(), lr=0.5).step()
    assert len(ddp.stats()) == 1
    for mine, theirs in zip(ddp.module.parameters(), whole.parameters(), strict=True):
        assert_close(mine.detach(), theirs.detach(), rtol=2e-6)


class Reversible(torch.autograd.Function):
    """Runs autograd in backward, as reversible layers do."""

    @staticmethod
    def forward(ctx, rows, layer):
        ctx.layer = layer
        ctx.save_for_backward(rows)
        return layer(rows).detach()

    @staticmethod
    def backward(ctx, gradient):
        rows = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            output = ctx.layer(rows)
        torch.autograd.backward(output, gradient)
        return rows.grad, None


RUNS = {
    "backward": lambda loss, _: loss.backward(),
    "backward to inputs": lambda loss, rows: loss.backward(inputs=[rows]),
    "grad": torch.autograd.grad,
}


@on_two
@pytest.mark.parametrize("run", RUNS)
def test_custom_function_that_runs_autograd_in_backward(group, run):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(5, 5)

        def forward(self, rows):
            output = Reversible.apply(rows, self.layer)
            return lambda: output

    ddp, whole = wrapped(Net, group)
    for step in range(2):
        rows = batch(step, 2).requires_grad_()
        RUNS[run](ddp(mine := share(rows.detach(), group).requires_grad_())().square().mean(), mine)
        whole.layer(rows).square().mean().backward()
        assert_same_gradients(ddp.module, whole, rtol=2e-6)
        ddp.zero_grad()
        whole.zero_grad()


@on_two
@pytest.mark.parametrize("kind", ["plain", "hidden"])
def test_parameter_cast_to_another_dtype_and_back(group, kind):
    """A cast gives the parameter a new AccumulateGrad node."""
    ddp, whole = wrapped(lambda: Net(kind), group)
    for step in range(3):
        rows = batch(step, 2)
        parameters = list(ddp.module.parameters())
        loss_of(ddp, kind, share(rows, group), False).backward(inputs=parameters)
        for part in rows.split(len(rows) // 2):
            (loss_of(whole, kind, part, False) / 2).backward()
        assert_same_gradients(ddp.module, whole, rtol=2e-6)
        for module in (ddp, whole):
            module.zero_grad()
        ddp.double().float()


@on_two
def test_parameter_frozen_before_the_first_forward(group):
    ddp, whole = wrapped(lambda: nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 1)), group)
    for module in (ddp.module, whole):
        module[0].weight.requires_grad_(False)
    for step in range(2):
        both(ddp, whole, group, step)
        compare(ddp, whole)


class Branches(nn.Module):
    """Two branches; a call uses one of them."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(5, 1), nn.Linear(5, 1)

    def forward(self, rows, branch):
        return self.b(rows) if branch else self.a(rows)


@on_two
@pytest.mark.parametrize("sums", [False, True], ids=["weight", "sum"])
def test_penalty_term_reaches_parameters_unused_in_forward(group, sums):
    """Autograd reaches the penalty's parameters before any output."""
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
        assert_same_gradients(ddp.module, whole, rtol=2e-6)  # and they are never zeroed


@on_two
def test_autograd_grad_does_not_start_a_pass(group):
    """`autograd.grad` runs parameter hooks but does not touch ``.grad``."""
    ddp, _ = wrapped(lambda: Net("hidden"), group)
    loss = KINDS["hidden"][1](ddp(share(batch(0, 2), group), False)).square().mean()
    found = torch.autograd.grad(loss, list(ddp.module.parameters()))
    assert all(gradient.any() for gradient in found)
    assert ddp.stats() == []
    assert not ddp.reducer.is_running


@over_groups(backends=("local", "shm"), sizes=(2,), timeout=20)
@pytest.mark.parametrize("by_all", [True, False], ids=["by all", "by those with data"])
@pytest.mark.parametrize("kind", ["plain", "hidden"])
def test_uneven_inputs_without_zero_grad(group, by_all, kind):
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
def test_uneven_inputs_with_no_sync_on_reduced_gradients(group):
    """Gradients reduced before a rank leaves keep their value."""
    ddp, _ = wrapped(lambda: nn.Linear(5, 1), group)
    seen = []
    for step in phalanx.uneven(range([2, 4][group.rank()]), ddp):
        with ddp.no_sync() if step == 2 else nullcontext():
            ddp(torch.ones(3, 5)).mean().backward()
        seen.append(ddp.module.bias.grad.item())
    assert seen == [1.0, 2.0, 3.0, 3.0][: len(seen)]  # in the last step two count half each


@on_two
@pytest.mark.parametrize("reduce", ["mean", "sum"])
def test_backward_through_the_bare_module_stays_local(group, reduce):
    """A backward pass that does not go through the DDP module is not reduced."""
    ddp, _ = wrapped(lambda: nn.Linear(5, 1), group, reduce=reduce)
    (ddp.module(torch.ones(2, 5)).mean() * (1 + group.rank())).backward()
    assert ddp.module.bias.grad.item() == 1 + group.rank()


@over_groups(backends=("local", "shm"), sizes=(2,), timeout=20)
@pytest.mark.parametrize("reduce", ["mean", "sum", "weight"])
def test_shadow_strategy_without_zero_grad(group, reduce):
    """With a communication hook a rank without data shadows the others' collectives."""
    ddp, _ = wrapped(lambda: nn.Linear(5, 1), group, reduce="sum" if reduce == "sum" else "mean")
    ddp.register_comm_hook(None, phalanx.ddp.hooks.allreduce_hook)
    if reduce == "weight":
        ddp.weight = 2.0
    seen = []
    with ddp.join():
        for _ in range([2, 4][group.rank()]):
            ddp(torch.ones(3, 5)).mean().backward()
            seen.append(ddp.module.bias.grad.item())
    expected = {"mean": [1, 2, 2.5, 3], "sum": [2, 4, 5, 6], "weight": [1, 2, 3, 4]}[reduce]
    assert seen == expected[: len(seen)]
    assert ddp.module.bias.grad.item() == expected[-1]


@over_groups(backends=("local", "shm"), sizes=(4,), timeout=20)
def test_sum_reduction_without_zero_grad_after_a_rank_left(group):
    ddp, _ = wrapped(lambda: nn.Linear(5, 1), group, reduce="sum")
    for step in range(3):
        if step == 1 and group.rank() == 3:
            group.leave()
            break
        ddp(torch.ones(3, 5)).mean().backward()
        assert ddp.module.bias.grad.item() == [4, 7, 10][step]
