"""Top-k and random-k, against their formulas."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from phalanx.ddp.hooks import (
    RandomKState,
    TopKState,
    bf16_compress_wrapper,
    chain,
    randomk_hook,
    topk_hook,
)

from ..internals import sample_without_replacement
from ..internals import topk_indices as find_largest
from .buckets import assert_near, bucket_of, everywhere, flat_gradients, mean_of, on_threads, run

KINDS = {TopKState: topk_hook, RandomKState: randomk_hook}


def largest(flat, k):
    """Keep the k largest elements, by sorting them."""
    order = sorted(range(len(flat)), key=lambda place: -abs(flat[place].item()))
    kept = torch.zeros_like(flat)
    kept[order[:k]] = flat[order[:k]]
    return kept


@everywhere
def test_top_k_is_the_mean_of_the_largest_elements(group):
    size, state = group.size(), TopKState(k=9, start_iter=2)
    held = [torch.zeros(61) for _ in range(size)]
    for step in range(5):
        full = [g + h for g, h in zip(flat_gradients(size, step), held, strict=True)]
        sent = [largest(each, 9) if step >= 2 else each for each in full]
        held = [f - s for f, s in zip(full, sent, strict=True)]
        result = run(topk_hook, state, group, step)
        assert_near(result, mean_of(sent))
    assert torch.equal(state.error_dict[0], held[group.rank()])


@everywhere
def test_random_k_is_the_mean_at_indices_shared_by_all_ranks(group):
    size, state = group.size(), RandomKState(k=0.25, start_iter=0)
    held = torch.zeros(61).double()  # the mean residual of all ranks
    drawn = set()
    for step in range(4):
        full = mean_of(flat_gradients(size, step)) + held
        result = run(randomk_hook, state, group, step).double()
        places = result.nonzero().view(-1)
        assert len(places) == 15  # a quarter of 61
        assert_near(result[places], full[places])
        held = full - result
        drawn.add(tuple(places.tolist()))
    assert len(drawn) == 4, "every step draws anew"
    mine = state.error_dict[0].double()
    group.allreduce(mine).wait()
    torch.testing.assert_close(mine / size, held, rtol=1e-5, atol=1e-5)


@on_threads
def test_without_feedback_top_k_drops_and_random_k_rescales(group):
    top = TopKState(k=2, start_iter=0, use_error_feedback=False)
    values = torch.tensor([1.0, -4.0, 2.0, 3.0])
    for _ in range(2):
        assert topk_hook(top, bucket_of(values, group=group)).wait().tolist() == [0, -4.0, 0, 3.0]
    random = RandomKState(k=2, start_iter=0, use_error_feedback=False)
    total = torch.zeros(4)
    for _ in range(200):
        total += randomk_hook(random, bucket_of(values, group=group)).wait()
    torch.testing.assert_close(total / 200, values, rtol=0.3, atol=0)
    assert not top.error_dict
    assert not random.error_dict


@on_threads
def test_large_k_is_the_mean_and_a_fraction_keeps_at_least_one(group):
    size = group.size()
    for kind, hook in KINDS.items():
        result = run(hook, kind(k=1000, start_iter=0), group)
        assert_near(result, mean_of(flat_gradients(size)))
        one = hook(kind(k=0.001, start_iter=0), bucket_of(torch.ones(9), group=group)).wait()
        assert one.count_nonzero() == 1
        assert hook(kind(start_iter=0), bucket_of(torch.ones(0), group=group)).wait().numel() == 0


@on_threads
def test_indices_depend_on_the_seed(group):
    def places(seed):
        state = RandomKState(k=9, start_iter=0, random_seed=seed)
        return run(randomk_hook, state, group).nonzero().view(-1).tolist()

    assert places(0) == places(0) != places(1)


@on_threads
def test_top_k_of_bf16_gradients(group):
    state = TopKState(k=1000, start_iter=0)
    result = run(chain(bf16_compress_wrapper, topk_hook), state, group)
    expected = mean_of(flat_gradients(group.size()))
    torch.testing.assert_close(result.double(), expected, rtol=0.02, atol=0.02)


@given(
    among=st.integers(0, 200) | st.integers(1000, 3000),
    share=st.floats(0, 1),
    seed=st.integers(0, 2**31),
)
def test_sample_has_no_repetitions(among, share, seed):
    count = int(share * among)
    drawn = sample_without_replacement(count, among, torch.Generator().manual_seed(seed)).tolist()
    assert len(set(drawn)) == len(drawn) == count
    assert set(drawn) <= set(range(among))


# Each case exercises a different sampling algorithm.
@pytest.mark.parametrize(("count", "among"), [(2, 200), (15, 20), (100, 1500), (1400, 1500)])
def test_sample_is_uniform(count, among):
    generator, rounds = torch.Generator().manual_seed(0), 3000
    drawn = torch.cat([sample_without_replacement(count, among, generator) for _ in range(rounds)])
    expected = rounds * count / among
    assert (torch.bincount(drawn, minlength=among) - expected).abs().max() < 5 * expected**0.5


MANY = 100_000
TROUBLE = {
    "plain": lambda values: values,
    "zeros": lambda values: values.zero_(),
    "sparse": lambda values: values.mul_(torch.arange(MANY) % 1000 == 7),
    "sorted": lambda values: values.copy_(values.sort().values),
    "hidden": lambda values: values.index_fill_(0, torch.arange(0, MANY, 251), 1e6),
    "ties": lambda values: values.sign_(),
    "infinite": lambda values: values.index_fill_(0, torch.arange(0, MANY, 500), float("-inf")),
    "nan": lambda values: values.index_fill_(0, torch.arange(0, MANY, 500), float("nan")),
    "halves": lambda values: values.bfloat16(),
}


@pytest.mark.parametrize("kind", TROUBLE)
@pytest.mark.parametrize("count", [1, 100, 1000, 20_000, 90_000])
def test_topk_indices_are_exact_for_adversarial_inputs(kind, count):
    values = torch.randn(MANY, generator=torch.Generator().manual_seed(3))
    values = TROUBLE[kind](values)
    places = find_largest(values, count)
    assert len(places.unique()) == count
    found = values[places].abs().sort(descending=True).values
    expected = values.abs().sort(descending=True).values[:count]
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("k", [0, -3, 0.0, 1.0, 1.5, True, "3", float("nan"), None])
def test_k_out_of_range_is_rejected(kind, k):
    with pytest.raises(ValueError, match="k must be an integer of at least 1 or a fraction"):
        kind(k=k)


@pytest.mark.parametrize(("kind", "hook"), KINDS.items())
def test_bad_input_is_rejected(kind, hook):
    with pytest.raises(TypeError, match="process_group must be a ProcessGroup or None, got 1"):
        kind(1)
    with pytest.raises(ValueError, match="start_iter must be an integer of at least 0, got -1"):
        kind(start_iter=-1)
    with pytest.raises(ValueError, match=f"{hook.__name__} compresses .* complex64"):
        hook(kind(), bucket_of(torch.zeros(2, dtype=torch.complex64)))
