"""State dict of the sharded optimizer: complete, and loadable at any world size."""

import copy

import pytest
import torch
from torch import nn

from phalanx.ddp import ShardedOptimizer
from phalanx.testing import over_groups

from .sharded import KINDS, Pair
from .whole import batch, everywhere, on_pairs

on_four = over_groups(backends=("local", "shm"), sizes=(4,), reuse=True)


def assert_same_state(mine, theirs):
    assert mine["param_groups"] == theirs["param_groups"]
    assert mine["state"].keys() == theirs["state"].keys()
    for place, state in theirs["state"].items():
        assert mine["state"][place].keys() == state.keys()
        for name, value in state.items():
            own = mine["state"][place][name]
            assert type(own) is type(value)
            if isinstance(value, torch.Tensor):
                assert torch.equal(own, value)
                assert own.dtype == value.dtype
            else:
                assert own == value


@everywhere
def test_state_dict_matches_the_plain_optimizer(group):
    for kind in KINDS:
        pair = Pair(group, kind)
        pair.step()
        pair.step()
        assert_same_state(pair.sharded.state_dict(), pair.plain.state_dict())


@over_groups(backends=("gloo",), sizes=(2,), reuse=True)
def test_state_dict_over_gloo(group):
    pair = Pair(group)
    pair.step()
    assert_same_state(pair.sharded.state_dict(), pair.plain.state_dict())
    pair.sharded.consolidate_state_dict(to=1)
    if group.rank() == 1:
        assert_same_state(pair.sharded.state_dict(), pair.plain.state_dict())


@on_four
def test_state_dict_loads_at_other_world_sizes(group):
    first = Pair(group)
    first.step()
    saved = copy.deepcopy(first.sharded.state_dict())
    weights = copy.deepcopy(first.module.state_dict())
    first.step()
    for size in (1, 2, 3):
        part = group.split_group(list(range(size))) if group.rank() < size else None
        if part is not None:
            pair = Pair(part)
            pair.module.load_state_dict(weights)
            part.barrier().wait()
            pair.sharded.load_state_dict(saved)
            assert_same_state(pair.sharded.state_dict(), saved)
            grads_of(pair, first)
            pair.sharded.step()
            for mine, theirs in zip(pair.module.parameters(), first.whole.parameters(),
                                    strict=True):  # fmt: skip
                assert torch.equal(mine, theirs)
            part.shutdown()
        group.barrier().wait()


def grads_of(pair, first):
    """Give a module the gradients of the first pair's second step."""
    twin = copy.deepcopy(first.whole)
    twin.load_state_dict(pair.module.state_dict())
    twin(batch(1, first.group.size())).square().mean().backward()
    for mine, theirs in zip(pair.module.parameters(), twin.parameters(), strict=True):
        mine.grad = theirs.grad


@everywhere
def test_state_dicts_are_interchangeable_with_the_plain_optimizer(group):
    for kind in KINDS:
        pair = Pair(group, kind)
        pair.step()
        plain, sharded = pair.plain.state_dict(), pair.sharded.state_dict()
        optimizer_class, defaults = KINDS[kind]
        options = {**defaults, "lr": 0.5}
        pair.sharded = ShardedOptimizer(
            pair.module.parameters(), optimizer_class, process_group=group, **options
        )
        pair.plain = optimizer_class(pair.whole.parameters(), **options)
        pair.sharded.load_state_dict(plain)
        pair.plain.load_state_dict(sharded)
        pair.both = (pair.sharded, pair.plain)
        assert pair.sharded.param_groups[0]["lr"] == defaults["lr"]
        pair.step()
        assert_same_state(pair.sharded.state_dict(), pair.plain.state_dict())


@everywhere
def test_consolidate_state_dict_to_one_rank(group):
    pair = Pair(group)
    pair.step()
    last = group.size() - 1
    pair.sharded.consolidate_state_dict(to=last)
    if group.rank() == last:
        for _ in range(2):
            assert_same_state(pair.sharded.state_dict(), pair.plain.state_dict())
    else:
        with pytest.raises(RuntimeError, match=f"collected on rank {last}"):
            pair.sharded.state_dict()
    pair.step()
    assert_same_state(pair.sharded.state_dict(), pair.plain.state_dict())  # on all ranks again


@on_pairs
def test_state_dict_is_not_changed_by_the_next_step(group):
    pair = Pair(group)
    pair.step()
    saved = pair.sharded.state_dict()
    before = copy.deepcopy(saved)
    pair.step()
    assert_same_state(saved, before)


class Peculiar(torch.optim.SGD):
    """Has state values of several types."""

    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p] = {"note": group["note"](), "list": [1, None, "a"], "bits": p > 0}


@on_pairs
def test_state_values_must_be_tensors_or_plain_data(group):
    module = nn.Linear(3, 3)
    for note, is_good in ((lambda: 1.5, True), (object, False)):
        groups = [{"params": module.parameters(), "note": note}]
        optimizer = ShardedOptimizer(groups, Peculiar, process_group=group)
        optimizer.step()
        if is_good:
            states = optimizer.state_dict()["state"]
            assert states[1]["note"] == 1.5
            assert states[0]["list"] == [1, None, "a"]
            assert torch.equal(states[0]["bits"], module.weight > 0)
        else:
            with pytest.raises(RuntimeError, match=r"state of rank 0 .* 'note' of parameter 0"):
                optimizer.state_dict()
