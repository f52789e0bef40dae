"""Error feedback: conservation of gradients, and state dicts of the hooks."""

import copy
import json
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.ddp.hooks import (
    PostLocalSGDState,
    PowerSGDState,
    RandomKState,
    TopKState,
    batched_powerSGD_hook,
    post_localSGD_hook,
    powerSGD_hook,
    randomk_hook,
    topk_hook,
)
from phalanx.errors import InvalidArgument
from phalanx.testing import ThreadRanks

from .buckets import bucket_of, everywhere, gradients, on_threads, run

LOSSY = {
    "powerSGD": (powerSGD_hook, lambda: PowerSGDState(None, 1, 2, min_compression_rate=0)),
    "batched": (batched_powerSGD_hook, lambda: PowerSGDState(None, 1, 2)),
    "topk": (topk_hook, lambda: TopKState(k=2)),
    "randomk": (randomk_hook, lambda: RandomKState(k=2)),
}
STATEFUL = {
    **LOSSY,
    "cold": (
        powerSGD_hook,
        lambda: PowerSGDState(None, 2, 2, warm_start=False, min_compression_rate=1),
    ),
    "post_local": (post_localSGD_hook, lambda: PostLocalSGDState(None, None, 4, False)),
}

NUMBERS = st.floats(-100, 100, width=32)
two = ThreadRanks(2)


@pytest.mark.parametrize("name", LOSSY)
@settings(max_examples=15, deadline=None)
@given(
    steps=st.lists(
        st.lists(st.lists(NUMBERS, min_size=6, max_size=6), min_size=2, max_size=2),
        min_size=1,
        max_size=4,
    )
)
def test_sent_plus_residual_equals_the_gradients(name, steps):
    hook, make = LOSSY[name]

    def body(context):
        group, state = context.group(), make()
        state.iter = 2
        sent = torch.zeros(6).double()
        for step in steps:
            mine = torch.tensor(step[context.rank]).view(2, 3)
            sent += hook(state, bucket_of(mine, group=group)).wait().double()
        return sent, state.error_dict[0][:6].double()

    (sent, first), (other, second) = two.run(body, 2)
    assert torch.equal(sent, other)
    total = torch.tensor(steps).double().sum(0).mean(0)
    scale = max(torch.tensor(steps).abs().max().item(), 1e-3) * len(steps)
    assert (sent + (first + second) / 2 - total).abs().max() <= 1e-5 * scale


@on_threads
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_non_finite_values_affect_only_their_own_step(group, value):
    for name, (hook, make) in LOSSY.items():
        state = make()
        state.iter = 2
        run(hook, state, group, 0)
        held = state.error_dict[0].clone()
        bucket = bucket_of(*gradients(group.rank(), 1), group=group)
        if group.rank() == 0:
            bucket.buffer().fill_(value)
        result = hook(state, bucket).wait()
        # random-k shows only the sampled indices.
        assert not result[result != 0].isfinite().all(), name
        assert group.rank() or torch.equal(state.error_dict[0], held), name
        assert state.error_dict[0].isfinite().all(), name
        assert run(hook, state, group, 2).isfinite().all(), name


def tensors_to_lists(value):
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {name: tensors_to_lists(each) for name, each in value.items()}
    return value


WAYS = {
    "state_dict": lambda state, fresh: (fresh.load_state_dict(state.state_dict()), fresh)[1],
    "pickle": lambda state, _: pickle.loads(pickle.dumps(state)),
    "copy": lambda state, _: copy.deepcopy(state),
}


@everywhere
def test_resume_from_a_checkpoint_is_bitwise_exact(group):
    for name, (hook, make) in STATEFUL.items():
        for way, save in WAYS.items():
            state = make()
            for step in range(4):
                run(hook, state, group, step)
            # A group cannot be saved; the bucket's group is used instead.
            loaded = save(state, make())
            assert loaded.process_group is None
            for step in range(4, 7):
                expected = run(hook, state, group, step).clone()
                assert torch.equal(run(hook, loaded, group, step), expected), (name, way, step)


@pytest.mark.parametrize("name", STATEFUL)
def test_state_dict_is_plain_data_and_a_copy(name, threads):
    hook, make = STATEFUL[name]

    def body(context):
        group, state = context.group(), make()
        for step in range(4):
            run(hook, state, group, step)
        saved = state.state_dict()
        before = json.dumps(tensors_to_lists(saved))
        run(hook, state, group, 4)
        assert json.dumps(tensors_to_lists(saved)) == before
        assert saved["iter"] == 4

    threads.run(body, 2)


def test_state_dict_of_another_hook_is_rejected():
    saved = TopKState().state_dict()
    with pytest.raises(InvalidArgument, match=r"PowerSGDState must have \['error_dict', .* got"):
        PowerSGDState(None).load_state_dict(saved)


@pytest.mark.parametrize("name", STATEFUL)
def test_wrong_hook_state_names_the_expected_class(name):
    hook, make = STATEFUL[name]
    needed = type(make()).__name__
    for wrong in (None, 3, object()):
        with pytest.raises(
            TypeError, match=f"the state of {hook.__name__} must be a {needed}, got"
        ):
            hook(wrong, bucket_of(torch.ones(2)))
