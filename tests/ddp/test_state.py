"""Saving, loading, copying and pickling."""

import copy
import pickle

import pytest
import torch
from torch import nn

from phalanx import groups
from phalanx.ddp import DDP

from .whole import (
    alone,
    assert_same_gradients,
    batch,
    compare,
    everywhere,
    mlp,
    seeded,
    share,
    squares,
    wrapped,
)


@everywhere
def test_keys_are_the_modules_own(group):
    ddp, _ = wrapped(mlp, group)
    assert list(ddp.state_dict()) == list(ddp.module.state_dict())
    assert ddp.state_dict()["0.weight"].data_ptr() == ddp.module[0].weight.data_ptr()
    outer = nn.Sequential(nn.Linear(5, 5), ddp)
    assert [key for key in outer.state_dict() if "module" in key] == []
    assert "1.0.weight" in outer.state_dict()


@everywhere
@pytest.mark.parametrize("prefix", ["", "module."], ids=["plain", "prefixed"])
def test_both_kinds_of_keys_are_loaded(group, prefix):
    other = seeded(mlp, seed=9)
    ddp, _ = wrapped(mlp, group)
    state = {prefix + key: value for key, value in other.state_dict().items()}
    told = ddp.load_state_dict(state)
    assert not told.missing_keys
    assert not told.unexpected_keys
    assert all(map(torch.equal, ddp.parameters(), other.parameters()))
    assert list(state) == [prefix + key for key in other.state_dict()]


@everywhere
@pytest.mark.parametrize("prefix", ["", "module."], ids=["plain", "prefixed"])
def test_both_kinds_of_keys_are_loaded_into_a_part(group, prefix):
    ddp, _ = wrapped(mlp, group)
    outer = nn.ModuleDict({"head": nn.Linear(2, 2), "body": nn.Sequential(ddp)})
    values = seeded(mlp, seed=9).state_dict()
    state = {f"body.0.{prefix}{key}": value for key, value in values.items()}
    state |= {f"head.{key}": value for key, value in nn.Linear(2, 2).state_dict().items()}
    outer.load_state_dict(state)
    assert all(map(torch.equal, ddp.module.state_dict().values(), values.values()))
    with pytest.raises(RuntimeError, match="missing|Missing"):
        outer.load_state_dict({})
    with pytest.raises(RuntimeError, match="nexpected"):
        outer.load_state_dict(state | {f"body.0.{prefix}more": torch.ones(1)})


@alone
def test_a_part_that_is_called_module_itself(group):
    class Called(nn.Module):
        def __init__(self):
            super().__init__()
            self.module = nn.Linear(2, 2)

    ddp = DDP(Called(), process_group=group)
    assert list(ddp.state_dict()) == ["module.weight", "module.bias"]
    ddp.load_state_dict(ddp.state_dict())
    ddp.load_state_dict({f"module.{key}": value for key, value in ddp.state_dict().items()})


@alone
def test_what_does_not_fit_is_refused_unless_told_otherwise(group):
    ddp = DDP(mlp(), process_group=group)
    with pytest.raises(RuntimeError, match="0.weight"):
        ddp.load_state_dict({})
    told = ddp.load_state_dict({"module.0.weight": torch.ones(7, 5)}, strict=False)
    assert "0.bias" in told.missing_keys
    assert ddp.module[0].weight.eq(1).all()


@everywhere
def test_a_state_of_torchs_is_loaded_while_training(group):
    ddp, whole = wrapped(mlp, group)
    for step in range(3):
        rows = batch(step, group.size())
        state = seeded(mlp, seed=step).state_dict()
        ddp.load_state_dict({f"module.{key}": value for key, value in state.items()})
        whole.load_state_dict(state)
        squares(ddp, share(rows, group)).backward()
        squares(whole, rows).backward()
        compare(ddp, whole)


@everywhere
@pytest.mark.parametrize("prefix", ["", "0."], ids=["alone", "part"])
def test_parameters_that_a_state_replaces_are_found(group, prefix):
    ddp, whole = wrapped(mlp, group)
    squares(ddp, torch.ones(1, 5)).backward()
    state = {prefix + key: value.clone() for key, value in whole.state_dict().items()}
    (nn.Sequential(ddp) if prefix else ddp).load_state_dict(state, assign=True)
    rows = batch(0, group.size())
    for _step in range(2):
        squares(ddp, share(rows, group)).backward()
        squares(whole, rows).backward()
        assert_same_gradients(ddp.module, whole)


# -- copies --------------------------------------------------------------------------------

COPIERS = {"deepcopy": copy.deepcopy, "pickle": lambda ddp: pickle.loads(pickle.dumps(ddp))}


@everywhere
@pytest.mark.parametrize("how", COPIERS)
def test_a_copy_trains_by_itself(group, how):
    ddp, whole = wrapped(mlp, group, gradient_as_bucket_view=False, bucket_cap_mb=1)
    for step in range(3):
        squares(ddp, share(batch(step, group.size()), group)).backward()
        ddp.zero_grad()
    ddp.weight = 3
    with groups.process_group(group):
        other = COPIERS[how](ddp)
    assert other.process_group is group
    assert (other.weight, other.gradient_as_bucket_view) == (3, False)
    for step in range(3):
        rows = batch(step, group.size())
        squares(other, share(rows, group)).backward()
        squares(whole, rows).backward()
        assert_same_gradients(other.module, whole)
        assert all(p.grad is None for p in ddp.parameters())
        other.zero_grad()
        whole.zero_grad()
    outer = nn.Sequential(other)
    outer.load_state_dict({f"0.module.{k}": v for k, v in whole.state_dict().items()})


@everywhere
@pytest.mark.parametrize("how", COPIERS)
def test_a_copy_needs_a_current_group(group, how):
    ddp, _ = wrapped(mlp, group)
    with pytest.raises(RuntimeError, match="enter one first"):
        COPIERS[how](ddp)


@everywhere
def test_a_copy_goes_to_the_group_that_is_current(group):
    ddp, _ = wrapped(mlp, group)
    mine = group.split_group(list(range(group.rank() % 2, group.size(), 2)))
    with groups.process_group(mine):
        other = copy.deepcopy(ddp)
    assert other.process_group is mine
    whole = copy.deepcopy(other.module)
    rows = batch(0, mine.size())
    for _ in range(2):
        squares(other, share(rows, mine)).backward()
        squares(whole, rows).backward()
        assert_same_gradients(other.module, whole)
    mine.shutdown()
