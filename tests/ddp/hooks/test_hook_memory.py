"""What hooks remember stays with its parameters, whatever buckets those come in."""

import copy
import pickle

import pytest
import torch
from torch import nn

from phalanx.ddp import DDP
from phalanx.ddp.hooks import (
    PowerSGDState,
    RandomKState,
    TopKState,
    batched_powerSGD_hook,
    powerSGD_hook,
    randomk_hook,
    topk_hook,
)

from ..internals import GradBucket
from ..whole import TINY
from .buckets import assert_near, bucket_of, everywhere, gradients, on_threads

SHAPES = {"a": (6, 5), "b": (5, 6), "c": (4, 3), "d": (7,)}
"""The first two have as many elements."""
PLANS = {
    "as it was": [["a", "b"], ["c", "d"]],
    "reversed": [["d", "c"], ["b", "a"]],
    "one": [["b", "d", "a", "c"]],
    "many": [["c"], ["b"], ["d"], ["a"]],
}
HOOKS = {
    "powerSGD": (powerSGD_hook, lambda: PowerSGDState(None, 2, 2, min_compression_rate=0)),
    "cold": (
        powerSGD_hook,
        lambda: PowerSGDState(None, 1, 2, min_compression_rate=0, warm_start=False),
    ),
    "batched": (batched_powerSGD_hook, lambda: PowerSGDState(None, 1, 2)),
    "topk": (topk_hook, lambda: TopKState(k=3)),
    "randomk": (randomk_hook, lambda: RandomKState(k=3)),
}


def step_of(hook, state, group, number, plan):
    """Run a hook on the buckets of a plan; returns the result for each parameter."""
    values = gradients(group.rank(), number, shapes=SHAPES.values())
    mine = dict(zip(SHAPES, values, strict=True))
    results = {}
    for index, names in enumerate(plan):
        bucket = bucket_of(
            *(mine[name] for name in names),
            index=index,
            is_last=index == len(plan) - 1,
            group=group,
            names=names,
        )
        hook(state, bucket).wait()
        results |= zip(names, bucket.gradients(), strict=True)
    return mine, {name: result.clone() for name, result in results.items()}


@on_threads
@pytest.mark.parametrize("name", HOOKS)
def test_everything_is_sent_once_to_its_own_parameter_under_any_plan(group, name):
    hook, make = HOOKS[name]
    state = make()
    total = {each: torch.zeros(shape).double() for each, shape in SHAPES.items()}
    for number, plan in enumerate([*PLANS.values(), *PLANS.values()]):
        mine, sent = step_of(hook, state, group, number, plan)
        for each in SHAPES:
            total[each] += mine[each] - sent[each]
    assert any(error.any() for error in state.error_dict.values())
    for each, left in total.items():
        held = state.error_dict[each].double() if each in state.error_dict else left * 0
        both = torch.stack([left, held.reshape(left.shape)])
        group.allreduce(both).wait()
        torch.testing.assert_close(both[0], both[1], rtol=1e-4, atol=1e-4)


@everywhere
def test_power_sgd_goes_on_under_another_plan_with_the_same_numbers(group):
    for name in ("powerSGD", "cold"):
        hook, make = HOOKS[name]
        state, other = make(), make()
        for number in range(4):
            step_of(hook, state, group, number, PLANS["as it was"])
        other.load_state_dict(state.state_dict())
        for number, plan in enumerate(PLANS.values(), start=4):
            _, expected = step_of(hook, state, group, number, PLANS["as it was"])
            _, results = step_of(hook, other, group, number, plan)
            for each in SHAPES:  # where a matrix begins in memory may change its product's bits
                assert_near(results[each], expected[each])


class Product(nn.Module):
    """Its second parameter never gets any gradient, as the first is zero."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.ones(4))

    def forward(self, rows):
        return ((rows * self.second) * 1.0 * self.first).sum()


@everywhere
def test_training_goes_on_from_a_checkpoint_in_a_module_that_has_yet_to_plan(group):
    rows = torch.tensor([1.0, 2.0, 3.0, 4.0])
    for cap in (25, TINY):

        def make():
            ddp, state = DDP(Product(), process_group=group, bucket_cap_mb=cap), TopKState(k=1)  # noqa: B023
            ddp.register_comm_hook(state, topk_hook)
            return ddp, state

        def step(ddp):
            ddp.zero_grad()
            ddp(rows).backward()
            return [parameter.grad.tolist() for parameter in ddp.module.parameters()]

        ddp, state = make()
        for _ in range(4):
            step(ddp)
        other, loaded = make()
        loaded.load_state_dict(state.state_dict())
        for _ in range(6):
            expected = step(ddp)
            assert step(other) == expected
            assert not any(expected[1])


@on_threads
def test_what_is_frozen_is_forgotten_and_what_thaws_begins_anew(group):
    state = TopKState(k=1, start_iter=0)
    step_of(topk_hook, state, group, 0, PLANS["as it was"])
    assert set(state.error_dict) == set(SHAPES)
    kept = state.error_dict["a"].clone()
    step_of(topk_hook, state, group, 1, [["b"], ["d"]])
    assert set(state.error_dict) == {"b", "d"}
    step_of(topk_hook, state, group, 2, PLANS["reversed"])
    fresh = gradients(group.rank(), 2, shapes=SHAPES.values())[0]
    off = (state.error_dict["a"] - fresh).count_nonzero()
    assert off <= 1, "but for what was sent it is this step's gradient"
    assert kept.any()


@on_threads
def test_a_parameter_may_be_laid_out_in_another_way_when_it_comes_again(group):
    state = TopKState(k=1, start_iter=0)
    values = torch.arange(1.0, 49.0).view(4, 3, 2, 2)
    for layout in (torch.contiguous_format, torch.channels_last):
        laid = values.contiguous(memory_format=layout)
        storage = laid.as_strided((48,), (1,)).clone()
        view = storage.as_strided(laid.shape, laid.stride())
        topk_hook(state, GradBucket(0, storage, [view], [], True, group=group, names=["w"])).wait()
    expected = 2 * values
    expected.view(-1)[-1] = values.max()
    expected.view(-1)[-2] = 0  # 94 is the largest then
    assert torch.equal(state.error_dict["w"], expected)


@on_threads
def test_a_state_without_names_loads_and_gives_nothing_to_parameters_with_names(group):
    state = TopKState(k=1, start_iter=0)
    topk_hook(state, bucket_of(torch.arange(4.0), group=group)).wait()
    saved = state.state_dict()
    for names, expected in ((None, [0.0, 2.0, 0.0, 3.0]), (["w"], [0.0, 1.0, 2.0, 0.0])):
        loaded = TopKState(k=1, start_iter=0)
        loaded.load_state_dict(saved)
        topk_hook(loaded, bucket_of(torch.arange(4.0), group=group, names=names)).wait()
        (held,) = loaded.error_dict.values()
        assert held.tolist() == expected


@on_threads
def test_a_parameter_may_be_called_by_a_number(group):
    state = TopKState(k=1, start_iter=0)
    bucket = bucket_of(torch.arange(4.0), torch.zeros(2), group=group, names=["0", "1"])
    topk_hook(state, bucket).wait()
    again = TopKState(k=1, start_iter=0)
    again.load_state_dict(state.state_dict())
    assert set(again.error_dict) == {"0", "1"}


@on_threads
def test_parts_of_a_bucket_are_saved_without_the_whole(group):
    names = [f"layer{i}" for i in range(50)]
    state = TopKState(k=1, start_iter=0)
    values = [torch.ones(1000) for _ in names]
    topk_hook(state, bucket_of(*values, group=group, names=names)).wait()
    pickled = pickle.dumps(state)
    assert len(pickled) < 2 * 50 * 1000 * 4
    for same in (pickle.loads(pickled), copy.deepcopy(state)):
        assert all(torch.equal(same.error_dict[each], state.error_dict[each]) for each in names)
