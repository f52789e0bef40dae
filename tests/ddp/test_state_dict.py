"""Saving, loading, copying and pickling."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from phalanx import groups
from phalanx.ddp import DDP

from .models import Images
from .whole import (
    alone,
    assert_same_gradients,
    batch,
    compare,
    everywhere,
    mlp,
    on_pairs,
    seeded,
    share,
    squares,
    wrapped,
)


@everywhere
def test_keys_match_torchs_ddp(group):
    ddp, whole = wrapped(mlp, group)
    theirs = TorchDDP(whole, process_group=group)
    assert list(ddp.state_dict()) == list(theirs.state_dict())
    assert list(ddp.state_dict()) == [name for name, _ in ddp.named_parameters()]
    assert ddp.state_dict()["module.0.weight"].data_ptr() == ddp.module[0].weight.data_ptr()
    outer = nn.Sequential(nn.Linear(5, 5), ddp)
    assert "1.module.0.weight" in outer.state_dict()


@on_pairs
def test_functional_call_with_a_state_dict(group):
    ddp, whole = wrapped(mlp, group)
    rows = share(batch(0, group.size()), group)
    state = {name: value * 2 for name, value in ddp.state_dict().items()}
    with torch.no_grad():
        for parameter in whole.parameters():
            parameter.mul_(2)
    torch.testing.assert_close(torch.func.functional_call(ddp, state, (rows,)), whole(rows))


@on_pairs
def test_torchs_get_state_dict_functions(group):
    from torch.distributed.checkpoint import state_dict as functions

    states = []
    for kind in (DDP, TorchDDP):
        ddp = kind(seeded(Images), process_group=group)
        assert isinstance(ddp, TorchDDP)
        optimizer = torch.optim.AdamW(ddp.parameters())
        ddp(share(batch(0, group.size(), 36), group)).sum().backward()
        optimizer.step()
        model, state = functions.get_state_dict(ddp, optimizer)
        assert list(functions.get_model_state_dict(ddp)) == list(model)
        only = functions.get_optimizer_state_dict(ddp, optimizer)
        assert list(only["state"]) == list(state["state"])
        states.append((model, state))
    (model, state), (others, theirs) = states
    assert list(model) == list(others) == list(ddp.module.state_dict())
    assert all(map(torch.equal, model.values(), others.values()))
    assert state["param_groups"] == theirs["param_groups"]
    torch.testing.assert_close(dict(state["state"]), dict(theirs["state"]))


@on_pairs
def test_torchs_set_state_dict_functions(group):
    from torch.distributed.checkpoint import state_dict as functions

    def train(ddp, optimizer, steps):
        for step in range(steps):
            optimizer.zero_grad()
            ddp(share(batch(step, group.size(), 36), group)).square().sum().backward()
            optimizer.step()

    ddp = DDP(seeded(Images), process_group=group)
    optimizer = torch.optim.AdamW(ddp.parameters())
    train(ddp, optimizer, 2)
    model, state = copy.deepcopy(functions.get_state_dict(ddp, optimizer))
    train(ddp, optimizer, 2)
    other = DDP(seeded(Images, seed=5), process_group=group)
    others = torch.optim.AdamW(other.parameters())
    functions.set_model_state_dict(other, dict(model))
    functions.set_optimizer_state_dict(other, others, copy.deepcopy(state))
    train(other, others, 2)
    assert all(map(torch.equal, other.state_dict().values(), ddp.state_dict().values()))
    functions.set_state_dict(other, others, model_state_dict=model, optim_state_dict=state)
    train(other, others, 2)
    assert all(map(torch.equal, other.state_dict().values(), ddp.state_dict().values()))


@alone
@pytest.mark.parametrize("prefix", ["", "module."], ids=["plain", "prefixed"])
def test_module_versions_reach_the_loader(group, prefix):
    """Modules convert the state of older versions by that number."""
    told = []

    class Versioned(nn.Linear):
        _version = 7

        def _load_from_state_dict(self, state_dict, prefix, local_metadata, *args):
            told.append(local_metadata.get("version"))
            super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)

    ddp = DDP(nn.Sequential(Versioned(2, 2)), process_group=group)
    ddp.load_state_dict((ddp if prefix else ddp.module).state_dict())
    assert told == [7]


@everywhere
@pytest.mark.parametrize("prefix", ["", "module."], ids=["plain", "prefixed"])
def test_keys_load_with_and_without_the_module_prefix(group, prefix):
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
def test_nested_keys_load_with_and_without_the_prefix(group, prefix):
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
@pytest.mark.parametrize("prefix", ["", "module."], ids=["plain", "prefixed"])
@pytest.mark.parametrize("nested", [False, True], ids=["alone", "part"])
def test_extra_entry_does_not_change_prefix_detection(group, prefix, nested):
    ddp = DDP(mlp(), process_group=group)
    values = seeded(mlp, seed=9).state_dict()
    outer, path = (nn.Sequential(ddp), "0.") if nested else (ddp, "")
    state = {path + prefix + key: value for key, value in values.items()}
    told = outer.load_state_dict(state | {f"{path}epoch": torch.tensor(3)}, strict=False)
    assert not told.missing_keys
    assert [name.removesuffix("epoch") for name in told.unexpected_keys] in (
        [path],
        [path + "module."],
    )
    assert all(map(torch.equal, ddp.module.state_dict().values(), values.values()))


class WithMore(DDP):
    """A subclass with its own state."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.register_buffer("steps", torch.zeros(()))
        self.norm = nn.BatchNorm1d(2)
        self.extra = 0

    def get_extra_state(self):
        return self.extra

    def set_extra_state(self, state):
        self.extra = state


@alone
@pytest.mark.parametrize("nested", [False, True], ids=["alone", "part"])
def test_subclass_loads_its_own_state(group, nested):
    def made(extra):
        ddp = WithMore(seeded(mlp, seed=extra), process_group=group)
        ddp.extra = extra
        ddp.steps.fill_(extra)
        return (nn.Sequential(ddp), ddp) if nested else (ddp, ddp)

    (outer, ddp), (other, its) = made(1), made(2)
    outer.load_state_dict(other.state_dict())
    assert (ddp.extra, ddp.steps.item()) == (2, 2)
    assert all(map(torch.equal, ddp.parameters(), its.parameters()))
    ddp.load_state_dict(seeded(mlp, seed=5).state_dict() | {"steps": torch.tensor(7)}, strict=False)
    assert ddp.steps.item() == 7
    assert all(map(torch.equal, ddp.module.parameters(), seeded(mlp, seed=5).parameters()))


@alone
def test_old_keys_reach_the_submodule_that_converts_them(group):
    """Only the submodule knows its old keys."""
    normed = torch.nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))
    ddp = DDP(normed, process_group=group)
    old = {"weight_g": torch.ones(2, 1), "weight_v": torch.eye(2), "bias": torch.ones(2)}
    assert not any(ddp.load_state_dict(old))
    assert torch.equal(normed.weight, torch.eye(2))


@alone
def test_submodule_named_module(group):
    class Called(nn.Module):
        def __init__(self):
            super().__init__()
            self.module = nn.Linear(2, 2)

            self.weight = nn.Parameter(torch.zeros(2, 2))

    ddp = DDP(Called(), process_group=group)
    values = {
        "weight": torch.ones(2, 2),
        "module.weight": torch.eye(2),
        "module.bias": torch.ones(2),
    }
    for prefix in ("", "module."):
        with torch.no_grad():
            for parameter in ddp.parameters():
                parameter.zero_()
        ddp.load_state_dict({prefix + key: value for key, value in values.items()})
        assert all(torch.equal(ddp.module.state_dict()[key], values[key]) for key in values)


@alone
def test_mismatched_state_is_rejected_unless_strict_is_false(group):
    ddp = DDP(mlp(), process_group=group)
    with pytest.raises(RuntimeError, match="0.weight"):
        ddp.load_state_dict({})
    told = ddp.load_state_dict({"module.0.weight": torch.ones(7, 5)}, strict=False)
    assert "module.0.bias" in told.missing_keys
    assert ddp.module[0].weight.eq(1).all()


@everywhere
def test_load_state_dict_between_steps(group):
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
def test_load_state_dict_with_assign(group, prefix):
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
def test_copy_trains_independently(group, how):
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
def test_copy_needs_a_current_group(group, how):
    ddp, _ = wrapped(mlp, group)
    with pytest.raises(RuntimeError, match="Enter one first"):
        COPIERS[how](ddp)


@everywhere
def test_copy_uses_the_current_group(group):
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
