"""User hooks on parameters run before the gradient is reduced, whenever they were registered.

A hook that clamps the local gradient shows that the hook sees the gradient and that its change
is what gets reduced.
"""

import gc
import weakref
from functools import partial

import pytest
import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from cases import in_turn
from phalanx.ddp import DDP

from .whole import (
    CAPS,
    ROWS,
    TINY,
    VIEWS,
    assert_close,
    batch,
    both_caps,
    launched,
    mlp,
    on_pairs,
    seeded,
    several,
    share,
    squares,
)

LIMIT = 1e-3
"""Below the magnitude of most gradient elements."""


def on_tensor(parameter, act):
    """Register a hook that runs when ``.grad`` has been filled."""
    return parameter.register_post_accumulate_grad_hook(act)


def on_node(parameter, act):
    """Register a hook on the node that fills ``.grad``, and do not keep the node."""
    return get_gradient_edge(parameter).node.register_hook(lambda *_: act(parameter))


def clamp(parameter):
    """Clamp a gradient in place."""
    parameter.grad.clamp_(-LIMIT, LIMIT)


def clamp_anew(parameter):
    """Clamp a gradient by replacing it."""
    parameter.grad = parameter.grad.clamp(-LIMIT, LIMIT)


def by(factor, parameter):
    """Scale a gradient."""
    parameter.grad.mul_(factor)


def clamped(rows):
    """Return the mean of the clamped gradients of all ranks."""
    whole = seeded(mlp)
    every = []
    for part in rows.split(ROWS):
        whole.zero_grad()
        squares(whole, part).backward()
        every.append([p.grad.clamp(-LIMIT, LIMIT) for p in whole.parameters()])
    return [sum(gradients) / len(gradients) for gradients in zip(*every, strict=True)]


def step_clamped(ddp, group, step, before=lambda: None):
    """Run and check a step with clamping hooks; call `before` between forward and backward."""
    rows = batch(step, group.size())
    loss = squares(ddp, share(rows, group))
    before()
    loss.backward()
    for (name, p), wanted in zip(ddp.module.named_parameters(), clamped(rows), strict=True):
        assert_close(p.grad, wanted, name)
    ddp.zero_grad()


@in_turn("local-2", "shm-2", steps=[0, 1, 3], kind=[on_tensor, on_node], cap=CAPS, keeps=VIEWS)
def test_hook_registered_after_some_steps(group, steps, kind, cap, keeps):
    ddp = DDP(seeded(mlp), process_group=group, bucket_cap_mb=cap, gradient_as_bucket_view=keeps)
    for step in range(steps):
        squares(ddp, share(batch(step, group.size()), group)).backward()
        ddp.zero_grad()
    for turn, parameter in enumerate(ddp.parameters()):
        kind(parameter, clamp if turn % 2 else clamp_anew)
    for step in range(3):
        step_clamped(ddp, group, step)


@in_turn("local-2", "shm-2", steps=[0, 1, 3], kind=[on_tensor, on_node], cap=CAPS)
def test_hook_registered_between_forward_and_backward(group, steps, kind, cap):
    ddp = DDP(seeded(mlp), process_group=group, bucket_cap_mb=cap)
    for step in range(steps):
        squares(ddp, share(batch(step, group.size()), group)).backward()
        ddp.zero_grad()
    step_clamped(ddp, group, steps, lambda: [kind(p, clamp) for p in ddp.parameters()])
    step_clamped(ddp, group, steps + 1)


@on_pairs
@both_caps
@pytest.mark.parametrize("kind", [on_tensor, on_node])
def test_hook_registered_during_backward(group, kind, cap):
    """Backward has started but has not reached the hooked parameters."""
    ddp = DDP(seeded(mlp), process_group=group, bucket_cap_mb=cap)
    for step in range(3):
        squares(ddp, share(batch(step, group.size()), group)).backward()
        ddp.zero_grad()
    first, last = ddp.module[0], ddp.module[2]
    for parameter in last.parameters():
        kind(parameter, clamp)

    def hook_first(_):
        for parameter in first.parameters():
            kind(parameter, clamp)

    handle = first.register_forward_hook(lambda *args: args[2].register_hook(hook_first) and None)
    step_clamped(ddp, group, 3, handle.remove)
    step_clamped(ddp, group, 4)


@several
def test_hook_registered_before_wrapping(group):
    module = seeded(mlp)
    nodes = [get_gradient_edge(p).node for p in module.parameters()]
    for node, parameter in zip(nodes, module.parameters(), strict=True):
        node.register_hook(lambda *_, parameter=parameter: clamp(parameter))
    ddp = DDP(module, process_group=group, bucket_cap_mb=TINY)
    for step in range(4):
        step_clamped(ddp, group, step)


@several
def test_hooks_on_one_rank_only(group):
    """The launch order of the other ranks does not change."""
    ddp = DDP(seeded(mlp), process_group=group, bucket_cap_mb=TINY)
    seen = []
    for step in range(5):
        if step > 1 and group.rank() == 0:
            kind = on_node if step % 2 else on_tensor
            for parameter in ddp.parameters():
                kind(parameter, lambda p, step=step: seen.append((step, p.grad is not None)))
        rows = share(batch(step, group.size()), group)
        if step < 4:
            squares(ddp, rows).backward()
        else:
            assert launched(ddp, rows) == 3, "hooks keep buckets from being launched early"
        ddp.zero_grad()
    if group.rank() == 0:
        counts = [sum(step == each for each, _ in seen) for step in (2, 3, 4)]
        assert counts == [3 * 4, 2 * 4, 4]
        assert all(has_gradient for _, has_gradient in seen)


@on_pairs
def test_hooks_run_when_backward_starts_at_a_parameter(group):
    ddp = DDP(seeded(mlp), process_group=group, bucket_cap_mb=TINY)
    for step in range(4):
        squares(ddp, share(batch(step, group.size()), group)).backward()
        ddp.zero_grad()
    seen = []
    weight = ddp.module[0].weight
    on_node(weight, lambda p: seen.append(p.grad.clone()))
    on_tensor(weight, partial(by, group.rank()))
    weight.square().sum().backward()
    (grad,) = seen
    torch.testing.assert_close(grad, 2 * weight.detach() * group.rank())
    torch.testing.assert_close(weight.grad, weight.detach())


@on_pairs
def test_hooks_on_checkpointed_layers(group):
    from torch.utils.checkpoint import checkpoint

    class Saved(nn.Sequential):
        def forward(self, rows):
            return checkpoint(super().forward, rows, use_reentrant=True)

    module = Saved(*seeded(mlp))
    ddp = DDP(module, process_group=group, bucket_cap_mb=TINY)
    for step in range(5):
        rows = batch(step, group.size())
        if step == 3:
            for parameter in ddp.parameters():
                on_node(parameter, clamp)
        squares(ddp, share(rows, group).requires_grad_()).backward()
        if step >= 3:
            for p, wanted in zip(ddp.parameters(), clamped(rows), strict=True):
                assert_close(p.grad, wanted)
        ddp.zero_grad()


@on_pairs
def test_hooks_survive_unfreezing_of_parameters(group):
    """Unfreezing rebuilds the reducer."""
    module = seeded(mlp)
    module[2].requires_grad_(False)
    ddp = DDP(module, process_group=group, bucket_cap_mb=TINY)
    for parameter in module[0].parameters():
        on_node(parameter, clamp)
    squares(ddp, share(batch(0, group.size()), group)).backward()
    ddp.zero_grad()
    module[2].requires_grad_(True)
    for parameter in module[2].parameters():
        on_tensor(parameter, clamp)
    for step in range(3):
        step_clamped(ddp, group, step)


@on_pairs
def test_removed_hook_does_not_run(group):
    ddp = DDP(seeded(mlp), process_group=group, bucket_cap_mb=TINY)
    seen = []
    for step in range(5):
        hooks = [on_node(p, seen.append) for p in ddp.parameters()]
        squares(ddp, share(batch(step, group.size()), group)).backward()
        for hook in hooks:
            hook.remove()
        ddp.zero_grad()
    squares(ddp, share(batch(5, group.size()), group)).backward()
    assert len(seen) == 5 * 4


@on_pairs
def test_autograd_nodes_do_not_keep_the_reducer_alive(group):
    module = seeded(mlp)
    nodes = [get_gradient_edge(p).node for p in module.parameters()]
    ddp = DDP(module, process_group=group, bucket_cap_mb=TINY)
    for step in range(3):
        squares(ddp, share(batch(step, group.size()), group)).backward()
    reducer = weakref.ref(ddp.reducer)
    del ddp
    gc.collect()
    assert reducer() is None
    assert len(nodes) == 4
    squares(module, share(batch(0, group.size()), group)).backward()
