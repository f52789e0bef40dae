"""GradBucket: torch's interface, and gradient views that follow the buffer."""

import pytest
import torch
import torch.distributed as dist

from phalanx.errors import InvalidArgument

from ..internals import GradBucket
from .buckets import bucket_of, gradients


def public(kind):
    return {name for name in vars(kind) if not name.startswith("_")}


def test_has_torchs_methods_plus_group_and_names():
    assert public(GradBucket) == public(dist.GradBucket) | {"group", "names"}


def test_buffer_and_gradients_share_memory():
    made = gradients(0)
    bucket = bucket_of(*made, index=3, is_last=False)
    assert (bucket.index(), bucket.is_last(), bucket.group) == (3, False, None)
    assert repr(bucket) == "<GradBucket 3: 3 gradients, float32[61]>"
    for mine, shown, parameter in zip(made, bucket.gradients(), bucket.parameters(), strict=True):
        assert torch.equal(mine, shown)
        assert parameter.shape == shown.shape
    bucket.buffer().zero_()
    assert not any(shown.any() for shown in bucket.gradients())


@pytest.mark.parametrize("room", [0, 5])
def test_gradients_follow_a_new_buffer(room):
    made = gradients(0)
    bucket = bucket_of(*made)
    old = bucket.buffer()
    new = torch.zeros(room + len(old) + room, dtype=torch.float16)[room:]
    new[: len(old)] = old
    bucket.set_buffer(new)
    assert bucket.buffer() is new
    for mine, shown in zip(made, bucket.gradients(), strict=True):
        assert torch.equal(mine.half(), shown)
    bucket.gradients()[1].fill_(2)
    assert new[30:37].eq(2).all()


def test_gradients_keep_the_memory_format_of_their_parameter():
    flat = torch.arange(24.0)
    last = torch.empty(1, 2, 3, 4).contiguous(memory_format=torch.channels_last)
    bucket = GradBucket(0, flat, [flat.as_strided(last.shape, last.stride())], [], True)
    bucket.set_buffer(flat.double())
    (shown,) = bucket.gradients()
    assert shown.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(shown, flat.double().as_strided(last.shape, last.stride()))


def test_arguments_have_names():
    flat = torch.zeros(4)
    bucket = GradBucket(
        index=1,
        buffer=flat,
        gradients=[flat],
        parameters=[],
        is_last=True,
        group=None,
        names=["w"],
    )
    assert (bucket.index(), bucket.is_last(), bucket.names) == (1, True, ["w"])
    assert bucket.buffer() is flat


def test_sparse_gradient_is_the_buffer():
    first, second = (torch.eye(3).mul(n).to_sparse() for n in (1, 2))
    bucket = GradBucket(0, first, [first], [], True)
    bucket.set_buffer(second)
    assert bucket.gradients() == [second]
    with pytest.raises(InvalidArgument, match=r"bucket 0 must be sparse \[3, 3\], got strided"):
        bucket.set_buffer(torch.eye(3))


@pytest.mark.parametrize(
    ("tensor", "told"),
    [
        (torch.zeros(60), r"flat, with at least 61 elements, got strided \[60\]"),
        (torch.zeros(61, 1), r"got strided \[61, 1\]"),
        (torch.zeros(122)[::2], "flat"),
        (torch.zeros(61).to_sparse(), "got sparse_coo"),
    ],
)
def test_unsuitable_buffer_is_rejected(tensor, told):
    bucket = bucket_of(*gradients(0))
    old = bucket.buffer()
    with pytest.raises(ValueError, match=told):
        bucket.set_buffer(tensor)
    assert bucket.buffer() is old


def test_buffer_must_be_a_tensor():
    with pytest.raises(TypeError, match="got list"):
        bucket_of(*gradients(0)).set_buffer([1.0])
