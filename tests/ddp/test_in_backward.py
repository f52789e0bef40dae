"""Optimizers in backward."""

import copy

import pytest
import torch
from torch.nn.utils import clip_grad_value_

from cases import in_turn
from phalanx.ddp import DDP
from phalanx.ddp.hooks import allreduce_hook
from phalanx.errors import InvalidArgument, InvalidState, InvalidType

from .whole import TINY, assert_close, batch, mlp, seeded, several, share, squares


def fused(make, group, kind, **options):
    module = seeded(make)
    ddp = DDP(module, process_group=group, bucket_cap_mb=TINY)
    return ddp, [ddp._register_fused_optim(kind, **options)]


def applied(make, group, kind, **options):
    from torch.distributed.optim import _apply_optimizer_in_backward  # takes seconds

    module = seeded(make)
    _apply_optimizer_in_backward(kind, module.parameters(), options)
    ddp = DDP(module, process_group=group, bucket_cap_mb=TINY)
    return ddp, [each for p in module.parameters() for each in p._in_backward_optimizers]


KINDS = [
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
    (torch.optim.Adam, {"lr": 0.01}),
]


WAYS = ["plain", "accumulated", "hooked", "clipped"]


@in_turn("local-2", "shm-4", way=WAYS, how=[fused, applied])
def test_same_result_as_a_step_after_backward(group, way, how):
    turn = WAYS.index(way) + (how is fused)  # alternate optimizers over the cases
    optimizer_class, options = KINDS[turn % 2]
    ddp, optimizers = how(lambda: mlp().double(), group, optimizer_class, **options)
    whole = seeded(lambda: mlp().double())
    after = optimizer_class(whole.parameters(), **options)
    if way == "hooked":
        ddp.register_comm_hook(None, allreduce_hook)
    if way == "clipped":
        for optimizer in optimizers:
            clips = [p for each in optimizer.param_groups for p in each["params"]]
            optimizer.register_step_pre_hook(lambda *_, clips=clips: clip_grad_value_(clips, 0.01))
    for step in range(3):
        rows = batch(step, group.size()).double()
        if way == "accumulated":
            with ddp.no_sync():
                squares(ddp, share(rows, group)).backward()
            assert all(p.grad is not None for p in ddp.parameters())
            squares(whole, rows).backward()
        squares(ddp, share(rows, group)).backward()
        squares(whole, rows).backward()
        if way == "clipped":
            clip_grad_value_(whole.parameters(), 0.01)
        after.step()
        after.zero_grad()
        assert all(p.grad is None for p in ddp.parameters())
        for (name, mine), theirs in zip(
            ddp.module.named_parameters(), whole.parameters(), strict=True
        ):
            assert_close(mine, theirs, name)


@several
def test_unused_parameter_is_not_stepped(group):
    ddp, _ = fused(mlp, group, torch.optim.SGD, lr=0.1, weight_decay=0.5)
    before = [p.detach().clone() for p in ddp.module[2].parameters()]
    for step in range(3):
        ddp.module[0](share(batch(step, group.size()), group)).sum().backward()
    assert all(map(torch.equal, before, ddp.module[2].parameters()))


@several
def test_optimizer_for_some_parameters_only(group):
    ddp = DDP(seeded(mlp), process_group=group)
    ddp._register_fused_optim(torch.optim.SGD, 0.1, optim_params=ddp.module[0].parameters())
    squares(ddp, share(batch(0, group.size()), group)).backward()
    assert all(p.grad is None for p in ddp.module[0].parameters())
    assert all(p.grad is not None for p in ddp.module[2].parameters())


@several
def test_optimizer_survives_a_group_replacement(group):
    ddp, _ = fused(mlp, group, torch.optim.SGD, lr=0.1)
    ddp._update_process_group(group)
    squares(ddp, share(batch(0, group.size()), group)).backward()
    assert all(p.grad is None for p in ddp.parameters())


@several
def test_bad_optimizers_are_rejected(group):
    from torch.distributed.optim import _apply_optimizer_in_backward

    ddp, _ = fused(mlp, group, torch.optim.SGD, lr=0.1)
    with pytest.raises(InvalidState, match="applied twice"):
        ddp._register_fused_optim(torch.optim.SGD, lr=0.1)
    ddp, _ = applied(mlp, group, torch.optim.SGD, lr=0.1)
    with pytest.raises(InvalidState, match="applied twice"):
        ddp._register_fused_optim(torch.optim.SGD, lr=0.1)
    ddp = DDP(seeded(mlp), process_group=group)
    with pytest.raises(InvalidType, match="a subclass of torch.optim.Optimizer"):
        ddp._register_fused_optim(mlp)
    with pytest.raises(InvalidArgument, match="wrapped module"):
        ddp._register_fused_optim(torch.optim.SGD, 0.1, optim_params=mlp().parameters())
    _apply_optimizer_in_backward(torch.optim.SGD, ddp.parameters(), {"lr": 0.1})
    with pytest.raises(InvalidState, match=r"'0\.weight' after the module was wrapped"):
        ddp(share(batch(0, group.size()), group))


@several
def test_deepcopy_and_assign_are_rejected(group):
    ddp, _ = fused(mlp, group, torch.optim.SGD, lr=0.1)
    with pytest.raises(InvalidState, match="optimizers in backward"):
        copy.deepcopy(ddp)
    with pytest.raises(InvalidState, match="optimizers in backward"):
        ddp.load_state_dict(seeded(mlp, seed=3).state_dict(), assign=True)


@several
def test_optimizer_applied_after_wrapping_is_rejected(group):
    from torch.distributed.optim import _apply_optimizer_in_backward

    ddp = DDP(seeded(mlp), process_group=group)
    rows = share(batch(0, group.size()), group)
    for _ in range(3):
        squares(ddp, rows).backward()
    _apply_optimizer_in_backward(torch.optim.SGD, ddp.parameters(), {"lr": 0.1})
    with pytest.raises(InvalidState, match="after the module was wrapped"):
        squares(ddp, rows).backward()
    ddp.assert_in_sync()
