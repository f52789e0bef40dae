"""What a training loop may do to ``.grad``."""

import pytest
import torch
from torch import nn

from cases import in_turn
from phalanx.ddp import DDP

from .whole import (
    TINY,
    VIEWS,
    assert_same_gradients,
    batch,
    both,
    both_ways,
    compare,
    everywhere,
    inner,
    mlp,
    on_pairs,
    share,
    squares,
    train,
    whole_loss,
    wrapped,
)


@everywhere
@both_ways
@pytest.mark.parametrize("set_to_none", [True, False], ids=["none", "zero"])
def test_zero_grad(group, keeps, set_to_none):
    train(mlp, group, squares, steps=5, set_to_none=set_to_none,
          gradient_as_bucket_view=keeps, bucket_cap_mb=TINY)  # fmt: skip


@everywhere
@both_ways
def test_gradient_is_a_bucket_view_only_if_asked_for(group, keeps):
    ddp, whole = wrapped(mlp, group, gradient_as_bucket_view=keeps)
    for step in range(3):
        both(ddp, whole, group, step)
        flats = {b.payload.untyped_storage().data_ptr() for b in ddp.reducer.buckets}
        for parameter in ddp.parameters():
            assert (parameter.grad.untyped_storage().data_ptr() in flats) is keeps
        ddp.zero_grad()
        whole.zero_grad()


@everywhere
@both_ways
def test_gradients_accumulate_without_zero_grad(group, keeps):
    ddp, whole = wrapped(mlp, group, gradient_as_bucket_view=keeps, bucket_cap_mb=TINY)
    for step in range(5):
        both(ddp, whole, group, step)
        assert_same_gradients(ddp.module, whole)


@everywhere
@both_ways
def test_clipping_and_in_place_edits(group, keeps):
    ddp, whole = wrapped(mlp, group, gradient_as_bucket_view=keeps)
    for step in range(4):
        both(ddp, whole, group, step)
        for module in (ddp.module, whole):
            nn.utils.clip_grad_norm_(module.parameters(), 0.1)
            nn.utils.clip_grad_value_(module.parameters(), 0.05)
            module[0].weight.grad[0] += 1
            module[2].bias.grad.mul_(0.5)
        assert_same_gradients(ddp.module, whole)


@everywhere
@both_ways
def test_grad_scaler(group, keeps):
    ddp, whole = wrapped(mlp, group, gradient_as_bucket_view=keeps)
    pairs = [
        (torch.optim.SGD(m.parameters(), lr=0.1), torch.amp.GradScaler("cpu", init_scale=64.0))
        for m in (ddp, whole)
    ]
    for step in range(5):
        rows = batch(step, group.size())
        if step == 2:
            rows[0] = float("inf")  # on one rank only; all of them skip the step
        losses = squares(ddp, share(rows, group)), whole_loss(whole, rows, group, squares, step)
        for (optimizer, scaler), loss in zip(pairs, losses, strict=True):
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
        if step != 2:
            assert_same_gradients(ddp.module, whole)
        for optimizer, scaler in pairs:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert pairs[0][1].get_scale() == pairs[1][1].get_scale() == 32.0
    ddp.assert_in_sync()
    for mine, theirs in zip(ddp.parameters(), whole.parameters(), strict=True):
        assert torch.allclose(mine, theirs, atol=1e-6)


@everywhere
@both_ways
def test_kept_grad_reference_sees_the_next_gradient(group, keeps):
    ddp, whole = wrapped(mlp, group, gradient_as_bucket_view=keeps)
    for step in range(2):  # the second pass uses the rebuilt buckets
        both(ddp, whole, group, step)
        ddp.zero_grad(set_to_none=False)
        whole.zero_grad(set_to_none=False)
    kept = [p.grad for p in ddp.parameters()]
    for step in range(2, 5):
        both(ddp, whole, group, step)
        for mine, theirs in zip(kept, whole.parameters(), strict=True):
            assert torch.allclose(mine, theirs.grad, atol=1e-6)
        for gradient in kept:
            gradient.zero_()
        whole.zero_grad(set_to_none=False)


@everywhere
@both_ways
def test_gradients_set_to_none_or_replaced_by_the_user(group, keeps):
    ddp, whole = wrapped(mlp, group, gradient_as_bucket_view=keeps, bucket_cap_mb=TINY)
    for step in range(6):
        both(ddp, whole, group, step)
        assert_same_gradients(ddp.module, whole)
        for module in (ddp.module, whole):
            module[0].weight.grad = None
            module[2].weight.grad = torch.full_like(module[2].weight, step)


@everywhere
@both_ways
def test_gradients_from_before_wrapping_are_averaged(group, keeps):
    module, whole = mlp(), mlp()
    whole.load_state_dict({k: torch.full_like(v, 0.1) for k, v in whole.state_dict().items()})
    module.load_state_dict(whole.state_dict())
    for parameter in module.parameters():
        parameter.grad = torch.full_like(parameter, group.rank())
    for parameter in whole.parameters():
        parameter.grad = torch.full_like(parameter, (group.size() - 1) / 2)
    ddp = DDP(module, process_group=group, gradient_as_bucket_view=keeps)
    both(ddp, whole, group, 0)
    assert_same_gradients(module, whole)


class Half(nn.Module):
    """Uses one of its two layers."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(5, 3), nn.Linear(5, 3)])

    def forward(self, rows, which):
        return self.layers[which](rows)


@everywhere
@both_ways
def test_unused_parameter_keeps_its_gradient_bitwise(group, keeps):
    ddp, _ = wrapped(Half, group, gradient_as_bucket_view=keeps)
    unused = ddp.module.layers[1].weight
    rows = share(batch(0, group.size()), group)
    for given in (None, torch.rand(3, 5, generator=torch.Generator().manual_seed(3))):
        unused.grad = given
        for _ in range(3):
            before = None if given is None else given.clone()
            ddp(rows, 0).sum().backward()
            assert unused.grad is given
            assert given is None or torch.equal(given, before)


@everywhere
@both_ways
def test_reduced_gradient_of_an_unused_parameter_is_kept_bitwise(group, keeps):
    ddp, _ = wrapped(Half, group, gradient_as_bucket_view=keeps)
    for step in range(4):
        rows = share(batch(step, group.size()), group)
        ddp(rows, 1).square().sum().backward()
        before = ddp.module.layers[1].weight.grad.clone()
        ddp(rows, 0).sum().backward()
        assert torch.equal(ddp.module.layers[1].weight.grad, before)
        ddp.zero_grad()


@everywhere
@both_ways
@pytest.mark.parametrize("set_to_none", [True, False], ids=["none", "zero"])
def test_gradients_whose_data_is_replaced(group, keeps, set_to_none):
    """Assigning to ``.grad.data`` points the tensor elsewhere; the next pass must not miss it."""
    ddp, whole = wrapped(mlp, group, gradient_as_bucket_view=keeps, bucket_cap_mb=TINY)
    for step in range(5):
        both(ddp, whole, group, step)
        both(ddp, whole, group, step + 10)  # adds to what the first pass has left
        assert_same_gradients(ddp.module, whole)
        for parameter in (*ddp.parameters(), *whole.parameters()):
            parameter.grad.data = parameter.grad.data.clamp(-0.1, 0.1)
        if step % 2:
            ddp.zero_grad(set_to_none)
            whole.zero_grad(set_to_none)


@everywhere
def test_gradients_whose_data_is_replaced_by_a_hook(group):
    """In the middle of a pass, while ``.grad`` is a view that the pass before has left."""
    ddp, whole = wrapped(mlp, group)

    def replace(parameter):
        parameter.grad.data = parameter.grad.data.clone()

    ddp.module[0].weight.register_post_accumulate_grad_hook(replace)
    for step in range(4):
        both(ddp, whole, group, step)
        assert_same_gradients(ddp.module, whole)
        ddp.zero_grad(set_to_none=False)
        whole.zero_grad(set_to_none=False)


CONVERSIONS = {
    "double": lambda module: module.double(),
    "a part": lambda module: inner(module)[0].double(),
    "channels last": lambda module: module.to(memory_format=torch.channels_last),
    "copies": lambda module: module._apply(torch.clone),
    "shared memory": lambda module: module.share_memory(),
}


class Convolution(nn.Sequential):
    """A network whose layers may have different dtypes."""

    def __init__(self):
        super().__init__(nn.Conv2d(1, 3, 2, bias=False), nn.Flatten(), nn.Linear(12, 3))

    def forward(self, rows):
        """Run it on squares of nine numbers."""
        for layer in self:
            parameters = [*layer.parameters()]
            rows = rows.to(parameters[0].dtype) if parameters else rows
            rows = layer(rows.reshape(-1, 1, 3, 3) if isinstance(layer, nn.Conv2d) else rows)
        return rows


@in_turn(
    "local-2",
    "shm-2",
    conversion=list(CONVERSIONS),
    is_clear={"clear": True, "kept": False},
    keeps=VIEWS,
)
def test_a_module_that_is_converted_between_steps(group, keeps, is_clear, conversion):
    """A conversion replaces the data of parameters, and of the gradients that they have."""
    ddp, whole = wrapped(Convolution, group, gradient_as_bucket_view=keeps)
    for step in range(8):
        if step in (3, 5):  # buckets are in their final order; then with a forward pass at once
            for module in (ddp, whole):
                CONVERSIONS[conversion](module)
        rows = batch(step, group.size(), width=9)
        squares(ddp, share(rows, group)).backward()
        whole_loss(whole, rows, group, squares, step).backward()
        assert_same_gradients(ddp.module, whole)
        for mine, theirs in zip(ddp.parameters(), whole.parameters(), strict=True):
            assert mine.grad.dtype == theirs.grad.dtype == mine.dtype
        if is_clear or step != 2:
            ddp.zero_grad()
            whole.zero_grad()


@on_pairs
def test_gradients_of_a_converted_module_are_exact(group):
    """Buckets follow a change of dtype, so that nothing is rounded."""
    ddp, whole = wrapped(mlp, group)
    for step in range(6):
        rows = batch(step, group.size())
        if step >= 3:
            ddp.module.double()
            whole.double()
            rows = rows.double()
        squares(ddp, share(rows, group)).backward()
        whole_loss(whole, rows, group, squares, step).backward()
        compare(ddp, whole, rtol=1e-6 if step < 3 else 1e-13)
    assert {bucket.payload.dtype for bucket in ddp.reducer.buckets} == {torch.float64}
