"""Autograd graphs: unused parameters, several passes, penalties, several modules."""

import torch
from torch import nn

from cases import in_turn

from .whole import (
    TINY,
    assert_close,
    assert_same_gradients,
    batch,
    both_caps,
    compare,
    everywhere,
    inner,
    launched,
    mlp,
    parts,
    seeded,
    share,
    squares,
    train,
    whole_loss,
    wrapped,
)


class Choice(nn.Module):
    """A trunk, three branches chosen per call, and one branch that is never used."""

    def __init__(self):
        super().__init__()
        self.trunk = nn.Linear(5, 4)
        self.branches = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.unused = nn.Linear(4, 4)

    def forward(self, rows, *which):
        hidden = self.trunk(rows).tanh()
        return sum(self.branches[i](hidden) for i in which) + hidden


# -- unused --------------------------------------------------------------------------------

CHOICES = {
    "nowhere": lambda *_: (0, 1),
    "here": lambda _, rank: (0,) if rank == 0 else (0, 1, 2),
    "elsewhere": lambda _, rank: (rank % 3,),
    "alternating": lambda step, _: (step % 3,),
    "both": lambda step, rank: ((step + rank) % 3, (step * rank) % 3),
    "growing": lambda step, _: tuple(range(min(step, 3))),
    "none": lambda step, rank: () if step % 2 == rank % 2 else (0, 1, 2),
}


@in_turn("shm-2", "local-4", choose=list(CHOICES))
def test_parameters_used_on_some_ranks_or_steps(group, choose):
    def loss(module, rows, step, rank):
        return module(rows, *CHOICES[choose](step, rank)).square().mean()

    for cap in (TINY, 25):
        ddp, _ = train(Choice, group, loss, steps=5, bucket_cap_mb=cap)
    assert all(p.grad is None for p in ddp.module.unused.parameters())


@everywhere
def test_rank_that_uses_no_parameter(group):
    def loss(module, rows, step, rank):
        if rank == 1:  # its graph contains no parameter
            return module(rows.clone().requires_grad_(), False).mean()
        return module(rows, True).mean()

    class Skipping(nn.Linear):
        def forward(self, rows, used):
            return super().forward(rows) if used else rows * 2

    train(lambda: Skipping(5, 3), group, loss)


# -- several passes ------------------------------------------------------------------------


@everywhere
@both_caps
def test_several_forwards_and_one_backward(group, cap):
    def loss(module, rows, step, rank):
        return sum(squares(module, rows * n) for n in range(1, 2 + (step + rank) % 3))

    train(mlp, group, loss, steps=5, bucket_cap_mb=cap)


@everywhere
@both_caps
def test_two_forwards_then_two_backwards(group, cap):
    ddp, whole = wrapped(mlp, group, bucket_cap_mb=cap)
    for step in range(4):
        rows = batch(step, group.size())
        mine = [squares(ddp, share(rows, group) * n) for n in (1, 2)]
        theirs = [whole_loss(whole, rows * n, group, squares, step) for n in (1, 2)]
        for loss in mine + theirs:
            loss.backward()
        compare(ddp, whole)


@everywhere
@both_caps
def test_one_forward_and_several_backwards(group, cap):
    ddp, whole = wrapped(mlp, group, bucket_cap_mb=cap)
    for step in range(4):
        rows = batch(step, group.size())
        for loss in (squares(ddp, share(rows, group)), squares(whole, rows)):
            for _ in range(2):
                loss.backward(retain_graph=True)
            (loss * 2).backward()
        compare(ddp, whole)


@everywhere
def test_backward_with_inputs_argument(group):
    ddp, whole = wrapped(mlp, group, bucket_cap_mb=TINY)
    for step in range(4):
        rows = batch(step, group.size())
        for module, part in parts(ddp, whole, rows, group):
            squares(module, part).backward(inputs=[inner(module)[2].weight])
        compare(ddp, whole)


@everywhere
def test_forwards_without_backward(group):
    def loss(module, rows, step, rank):
        with torch.no_grad():
            module(rows)
        module.eval()
        module(rows)
        module.train()
        module(rows)  # and no backward
        return squares(module, rows)

    train(mlp, group, loss)


@everywhere
def test_autograd_grad_leaves_grad_unchanged(group):
    def loss(module, rows, step, rank):
        weight = inner(module)[0].weight
        for wanted in ([weight], list(module.parameters())):
            gradients = torch.autograd.grad(squares(module, rows), wanted)
            assert_close(gradients[0], torch.autograd.grad(squares(inner(module), rows), weight)[0])
        assert weight.grad is None
        inputs = rows.clone().requires_grad_()
        torch.autograd.grad(squares(module, inputs), inputs)
        return squares(module, rows)

    train(mlp, group, loss, bucket_cap_mb=TINY)


@everywhere
def test_autograd_grad_with_frozen_parameters(group):
    def loss(module, rows, step, rank):
        layers = inner(module)
        layers[0].requires_grad_(step % 2 == 0)  # the first that is asked for
        inputs = rows.clone().requires_grad_()
        for wanted in (inputs, layers[2].weight):
            (mine,) = torch.autograd.grad(squares(module, inputs), wanted)
            (plain,) = torch.autograd.grad(squares(layers, inputs), wanted)
            assert torch.equal(mine, plain)
        (slope,) = torch.autograd.grad(module(inputs).sum(), inputs, create_graph=True)
        return slope.square().mean() + squares(module, rows)

    train(mlp, group, loss, steps=5, bucket_cap_mb=TINY)


@everywhere
def test_inputs_argument_with_frozen_parameters(group):
    ddp, whole = wrapped(mlp, group, bucket_cap_mb=TINY)
    for step in range(4):
        rows = batch(step, group.size())
        for module, part in parts(ddp, whole, rows, group):
            inner(module)[0].weight.requires_grad_(step % 2 == 1)
            squares(module, part).backward(inputs=[inner(module)[2].weight])
        compare(ddp, whole)


@everywhere
def test_sum_reduction_with_inputs_argument_and_frozen_parameters(group):
    ddp, whole = wrapped(mlp, group, reduce="sum")
    for module in (ddp.module, whole):
        module[0].weight.requires_grad_(False)
    for step in range(4):  # without zero_grad: previous gradients are summed only once
        rows = batch(step, group.size())
        for module, part in parts(ddp, whole, rows, group):
            loss = squares(module, part) * (group.size() if module is whole else 1)
            loss.backward(inputs=[inner(module)[2].weight])
        assert_same_gradients(ddp.module, whole)


@everywhere
def test_bucket_order_is_learned_from_a_backward_at_a_parameter(group):
    ddp, whole = wrapped(mlp, group, bucket_cap_mb=TINY)
    for step in range(4):
        rows = batch(step, group.size())
        for module, part in parts(ddp, whole, rows, group):
            output = module(part)
            (inner(module)[0].weight.square().sum() * part.mean()).backward()
            output.square().mean().backward()
        compare(ddp, whole)
    first = ddp.reducer.buckets[0]
    assert [ddp.reducer.names[i] for i in first.members] == ["0.weight"]


@everywhere
def test_buckets_launch_early_after_repeated_backwards(group):
    ddp, whole = wrapped(mlp, group, bucket_cap_mb=TINY)
    for times in (3, 1, 1):
        rows = batch(times, group.size())
        for module, part in parts(ddp, whole, rows, group):
            loss = squares(module, part)
            for _ in range(times):
                loss.backward(retain_graph=True)
        compare(ddp, whole)
    assert launched(ddp, share(rows, group)) >= 2


@everywhere
@both_caps
def test_gradient_penalty(group, cap):
    def loss(module, rows, step, rank):
        inputs = rows.clone().requires_grad_()
        (slope,) = torch.autograd.grad(module(inputs).sum(), inputs, create_graph=True)
        penalty = (slope.norm(dim=1) - 1).square().mean()
        return penalty if step % 2 else penalty + squares(module, rows)

    train(mlp, group, loss, steps=7, bucket_cap_mb=cap)


class Scaled(nn.Module):
    """Has a parameter used only in the loss."""

    def __init__(self):
        super().__init__()
        self.temperature = nn.Parameter(torch.zeros(()))
        self.layer = nn.Linear(5, 3)

    def forward(self, rows):
        return self.layer(rows)


@everywhere
@both_caps
def test_parameter_used_only_in_the_loss(group, cap):
    def loss(module, rows, step, rank):
        return squares(module, rows) + inner(module).temperature.exp() * (rank + step)

    train(Scaled, group, loss, steps=6, bucket_cap_mb=cap)


@everywhere
def test_penalty_in_a_separate_backward(group):
    ddp, whole = wrapped(mlp, group, bucket_cap_mb=TINY)
    for step in range(6):
        rows = batch(step, group.size())
        for module, part in parts(ddp, whole, rows, group):
            squares(module, part).backward()
            squares(module, part * 2).backward()
            (inner(module)[0].bias.square().sum() * part.mean()).backward()
        compare(ddp, whole)


@everywhere
def test_separate_penalty_backward_that_starts_later(group):
    ddp, whole = wrapped(mlp, group)
    for step in range(6):
        rows = batch(step, group.size())
        for module, part in parts(ddp, whole, rows, group):
            squares(module, part).backward()
            if step > 3:
                (inner(module)[2].bias.square().sum() * part.mean()).backward()
        compare(ddp, whole)


@everywhere
def test_loss_starts_to_use_a_parameter_later(group):
    def loss(module, rows, step, rank):
        plain = squares(module, rows)
        return plain + inner(module).temperature.exp() * (rank + step) if step > 3 else plain

    train(Scaled, group, loss, steps=6)


def regularise(group, reduce):
    """Add a separate penalty backward for one parameter, without zero_grad."""
    ddp, whole = wrapped(mlp, group, reduce=reduce, bucket_cap_mb=TINY)
    factor = group.size() if reduce == "sum" else 1
    for step in range(5):
        rows = batch(step, group.size())
        for module, part in parts(ddp, whole, rows, group):
            times = 1 if module is ddp else factor
            (squares(module, part) * times).backward()
            (inner(module)[2].bias.square().sum() * part.mean() * times).backward()
        assert_same_gradients(ddp.module, whole, rtol=2e-6)


@everywhere
def test_mean_reduction_of_a_separate_penalty_without_zero_grad(group):
    regularise(group, "mean")


@everywhere
def test_sum_reduction_of_a_separate_penalty_without_zero_grad(group):
    regularise(group, "sum")


# -- several modules -----------------------------------------------------------------------


@everywhere
def test_two_wrapped_modules_in_one_loss(group):
    first, whole_first = wrapped(lambda: nn.Linear(5, 4), group, bucket_cap_mb=TINY)
    second, whole_second = wrapped(lambda: nn.Linear(4, 2), group, bucket_cap_mb=TINY)
    for step in range(4):
        rows = batch(step, group.size())
        squares(second, first(share(rows, group)).tanh()).backward()
        squares(whole_second, whole_first(rows).tanh()).backward()
        for ddp, whole in ((first, whole_first), (second, whole_second)):
            assert_same_gradients(ddp.module, whole)
            ddp.zero_grad()
            whole.zero_grad()


@everywhere
def test_ddp_module_inside_another_module(group):
    ddp, whole = wrapped(lambda: nn.Linear(4, 2), group, bucket_cap_mb=TINY)
    first = seeded(lambda: nn.Linear(5, 4))
    models = nn.Sequential(first, ddp), nn.Sequential(first, whole)
    for step in range(4):
        rows = batch(step, group.size())
        for model, part in zip(models, (share(rows, group), rows), strict=True):
            squares(model, part).backward()
        assert_same_gradients(ddp.module, whole)
        models[0].zero_grad()
        models[1].zero_grad()


class Optional(nn.Module):
    """Has a first layer that is used only from some step on."""

    def __init__(self):
        super().__init__()
        self.first, self.body = nn.Linear(5, 5), nn.Linear(5, 2)

    def forward(self, rows, all_of_it):
        return self.body(self.first(rows).tanh() if all_of_it else rows)


@everywhere
def test_first_layer_starts_to_be_used_later(group):
    def loss(module, rows, step, rank):
        return module(rows, step > 3).square().mean()

    train(Optional, group, loss, steps=8)


@everywhere
def test_bucket_order_adapts_to_newly_used_parameters(group):
    class Growing(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = nn.ModuleList(nn.Linear(5, 5) for _ in range(3))
            self.used = 2

        def forward(self, rows):
            for part in self.parts[: self.used]:
                rows = part(rows).tanh()
            return rows

    ddp, whole = wrapped(Growing, group, bucket_cap_mb=TINY)
    for step in range(6):
        ddp.module.used = whole.used = 3 if step > 2 else 2
        rows = batch(step, group.size())
        ddp(share(rows, group)).square().mean().backward()
        whole(rows).square().mean().backward()
        assert_same_gradients(ddp.module, whole)
        ddp.zero_grad()
        whole.zero_grad()
    assert ddp.reducer.graph_ever_changed
    assert not any(ddp.reducer._layout.absent)
