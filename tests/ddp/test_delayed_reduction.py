"""Delayed parameters, whose gradients are reduced together in one collective."""

import copy

import pytest
import torch
from torch import nn

from phalanx import groups
from phalanx.ddp import DDP

from .whole import (
    TINY,
    alone,
    assert_same_gradients,
    batch,
    both,
    compare,
    everywhere,
    inner,
    mlp,
    operations,
    parts,
    seeded,
    share,
    squares,
)

DELAYED = ("0.weight", "0.bias", "2.bias")


def make(group, names=DELAYED, after="0.weight", **options):
    """Wrap a small network with some delayed parameters."""
    module = seeded(mlp, seed=group.rank())
    named = dict(module.named_parameters())
    options = {
        "delay_all_reduce_named_params": [(name, named[name]) for name in names],
        "param_to_hook_all_reduce": named[after],
        "process_group": group,
        "bucket_cap_mb": TINY,  # does not apply to delayed parameters
        **options,
    }
    return DDP(module, **options), seeded(mlp)


def buckets(ddp):
    """Return the parameter names of each bucket, in launch order."""
    return [[ddp.reducer.names[i] for i in bucket.members] for bucket in ddp.reducer.buckets]


@everywhere
@pytest.mark.parametrize("keeps", [True, False])
def test_delayed_parameters_are_broadcast_and_share_a_bucket(group, keeps):
    ddp, whole = make(group, gradient_as_bucket_view=keeps)
    for mine, theirs in zip(ddp.module.parameters(), whole.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    for step in range(4):
        both(ddp, whole, group, step)
        compare(ddp, whole, set_to_none=step % 2 == 0)
    assert [len(names) for names in buckets(ddp)] == [1, 3]
    assert set(buckets(ddp)[1]) == set(DELAYED)


@everywhere
def test_all_parameters_delayed(group):
    ddp, whole = make(group, [name for name, _ in mlp().named_parameters()])
    for step in range(3):
        both(ddp, whole, group, step)
        compare(ddp, whole)
    assert len(buckets(ddp)) == 1


@everywhere
def test_delayed_bucket_follows_its_trigger_parameter(group):
    ddp, whole = make(group, names=("2.weight",), after="2.bias")
    for step in range(3):
        both(ddp, whole, group, step)
        compare(ddp, whole)
    order = [name for names in buckets(ddp) for name in names]
    assert order.index("2.bias") < order.index("2.weight") < order.index("0.weight")
    late, _ = make(group, names=("2.weight",), after="0.weight")
    for step in range(3):
        squares(late, share(batch(step, group.size()), group)).backward()
    assert buckets(late)[-1] == ["2.weight"]


@everywhere
def test_accumulation_with_delayed_parameters(group):
    ddp, whole = make(group)
    for step in range(3):
        rows = batch(step, group.size())
        with ddp.no_sync():
            for n in (1, 2):
                for module, mine in parts(ddp, whole, rows * n, group):
                    squares(module, mine).backward()
        both(ddp, whole, group, step + 10)
        compare(ddp, whole)
    both(ddp, whole, group, 20)  # on top of reduced gradients
    both(ddp, whole, group, 21)
    compare(ddp, whole)


@everywhere
def test_loss_weights_and_unused_delayed_parameters(group):
    ddp, whole = make(group)
    ddp.weight = 1 + group.rank()
    weights = [1 + rank for rank in range(group.size())]
    for step in range(3):
        rows = batch(step, group.size())
        squares(ddp, share(rows, group)).backward()
        for weight, part in zip(weights, rows.split(4), strict=True):
            (squares(whole, part) * weight / sum(weights)).backward()
        compare(ddp, whole)
    ddp.weight = None
    for step in range(3):
        rows = batch(step, group.size())
        for module, mine in parts(ddp, whole, rows, group):
            (inner(module)[2](torch.tanh(mine @ torch.ones(5, 7)))).square().mean().backward()
        assert ddp.module[0].weight.grad is None
        compare(ddp, whole)


class Outer(nn.Module):
    """Uses a parameter that it has not registered."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(5, 3)
        self.borrowed = [nn.Parameter(torch.ones(3))]

    def forward(self, rows):
        return self.layer(rows) * self.borrowed[0]


@everywhere
def test_delayed_parameter_outside_the_module(group):
    module, whole = seeded(Outer), seeded(Outer)
    module.borrowed[0].data.fill_(1.0 + group.rank())
    ddp = DDP(module, process_group=group, param_to_hook_all_reduce=module.layer.weight,
              delay_all_reduce_named_params=[("borrowed", module.borrowed[0])])  # fmt: skip
    assert module.borrowed[0].tolist() == [1.0] * 3
    for step in range(3):
        both(ddp, whole, group, step)
        assert torch.allclose(module.borrowed[0].grad, whole.borrowed[0].grad, rtol=1e-5)
        whole.borrowed[0].grad = module.borrowed[0].grad = None
        compare(ddp, whole)


@everywhere
def test_copied_and_loaded_parameters_stay_delayed(group):
    ddp, whole = make(group)
    ddp.load_state_dict(copy.deepcopy(ddp.state_dict()), assign=True)
    with groups.process_group(group):
        again = copy.deepcopy(ddp)
    for wrapper in (ddp, again):
        for step in range(3):
            both(wrapper, whole, group, step)
            assert_same_gradients(wrapper.module, whole)
            wrapper.zero_grad()
            whole.zero_grad()
        assert set(buckets(wrapper)[-1]) == set(DELAYED)
        assert len(list(wrapper.module.parameters())) == len(wrapper.reducer.parameters)


@everywhere
def test_all_delayed_parameters_take_one_allreduce(group):
    ddp, _ = make(group, [name for name, _ in mlp().named_parameters()])
    rows = share(batch(0, group.size()), group)
    for _ in range(2):
        squares(ddp, rows).backward()
    assert operations(group, lambda: squares(ddp, rows).backward()) == ["allreduce"]


@alone
def test_bad_delayed_parameters_are_rejected(group):
    one, other = mlp(), mlp()
    given = {"delay_all_reduce_named_params": [("0.weight", other[0].weight)]}
    with pytest.raises(ValueError, match="another parameter.*0.weight"):
        DDP(one, process_group=group, param_to_hook_all_reduce=one[0].bias, **given)
    with pytest.raises(TypeError, match="is a parameter"):
        DDP(one, process_group=group, param_to_hook_all_reduce="0.bias", **given)
