"""Properties of the bucket plan."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from .internals import ParameterSpec, plan_buckets

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.complex64]

shapes_ = st.lists(
    st.builds(
        ParameterSpec,
        st.integers(0, 40),
        st.sampled_from(DTYPES),
        st.just(CPU),
        st.booleans(),
        st.booleans(),
    ),
    min_size=1,
    max_size=12,
)
caps_ = st.lists(st.integers(1, 200), min_size=1, max_size=3).map(tuple)


@st.composite
def plans(draw):
    shapes = draw(shapes_)
    order = draw(st.permutations(range(len(shapes))))
    caps = draw(caps_)
    after = draw(st.none() | st.sampled_from(range(len(shapes))))
    return shapes, order, caps, plan_buckets(shapes, order, caps, after=after)


@given(plans())
def test_every_parameter_is_in_exactly_one_bucket(case):
    shapes, _, _, buckets = case
    assert sorted(i for bucket in buckets for i in bucket.members) == list(range(len(shapes)))


@given(plans())
def test_bucket_has_one_dtype_and_sparse_gradients_have_their_own(case):
    shapes, _, _, buckets = case
    for bucket in buckets:
        kinds = {(shapes[i].dtype, shapes[i].is_sparse) for i in bucket.members}
        assert kinds <= {(bucket.dtype, bucket.is_sparse)}
        assert not bucket.is_sparse or len(bucket.members) == 1


@given(plans())
def test_bucket_reaches_its_cap_only_with_its_last_parameter(case):
    shapes, _, caps, buckets = case
    for bucket in buckets:
        if not (bucket.is_sparse or bucket.is_delayed) and bucket.members:
            *most, _ = (shapes[i].numel * bucket.dtype.itemsize for i in bucket.members)
            assert sum(most) < max(caps)


@given(plans())
def test_parameters_and_buckets_follow_the_given_order(case):
    _, order, _, buckets = case
    turns = [[order.index(i) for i in bucket.members] for bucket in buckets]
    assert all(turn == sorted(turn) for turn in turns)
    ends = [turn[-1] for turn, b in zip(turns[:-1], buckets, strict=False) if not b.is_delayed]
    assert ends == sorted(ends)


@given(shapes_, st.data())
def test_delayed_gradients_share_buckets_after_their_trigger(shapes, data):
    order = data.draw(st.permutations(range(len(shapes))))
    after = data.draw(st.none() | st.sampled_from(order))
    buckets = plan_buckets(shapes, order, (1,), after=after)
    delayed = [bucket for bucket in buckets if bucket.is_delayed]
    assert all(shapes[i].is_delayed for bucket in delayed for i in bucket.members)
    assert len({bucket.dtype for bucket in delayed}) == len(delayed)
    turn = len(order) if after is None else order.index(after)
    assert all(bucket.last_position >= turn for bucket in delayed)
    *before, _ = buckets  # the last is the header's, wherever its gradients would have it
    assert [bucket.last_position for bucket in before] == sorted(
        bucket.last_position for bucket in before
    )


@given(plans())
def test_last_bucket_can_carry_the_header(case):
    shapes, _, _, buckets = case
    assert not buckets[-1].is_sparse
    assert buckets[-1].dtype in (torch.float32, torch.float64)
    if any(s.dtype in (torch.float32, torch.float64) and not s.is_sparse for s in shapes):
        assert all(bucket.members for bucket in buckets)


def test_last_cap_applies_to_all_remaining_buckets():
    shapes = [ParameterSpec(1, torch.float32, CPU)] * 10
    order = list(range(10))

    def lengths(caps):
        return [len(plan.members) for plan in plan_buckets(shapes, order, caps)]

    assert lengths((4, 16)) == [1, 4, 4, 1]
    assert lengths((4, 8, 12)) == [1, 2, 3, 3, 1]
    assert lengths((1000,)) == [10]
    assert lengths((1,)) == [1] * 10
