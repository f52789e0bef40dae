"""Folding into buckets: natively, in torch, and without shared memory, to the same bits."""

import pytest
import torch
from torch.nn import Parameter

from phalanx import native

from .internals import Bucket, add_in_order, fold_nodes, sum_rows

pytestmark = pytest.mark.skipif(native.engine is None, reason="the engine was not built")
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64]


def bits(tensor):
    return tensor.contiguous().view(-1).view(torch.uint8)


def values(shape, dtype):
    """Numbers of many sizes, with zeros of both signs and subnormals."""
    tensor = torch.randn(shape, dtype=dtype) * 2.0 ** torch.randint(-6, 6, shape)
    flat = torch.view_as_real(tensor).view(-1) if tensor.is_complex() else tensor.view(-1)
    flat[::5] = -0.0
    flat[1::7] = 0.0
    flat[2::11] = torch.finfo(flat.dtype).smallest_normal / 4
    return tensor


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("nodes", [0, 1, 3])
def test_a_bucket_folds_to_the_same_bits_natively_and_in_torch(dtype, nodes):
    torch.manual_seed(0)
    parameters = [Parameter(torch.zeros(shape, dtype=dtype)) for shape in ((7, 3), (5,), (), (40,))]
    numel = sum(p.numel() for p in parameters)
    gradients = [values(p.shape, dtype) if p.dim() else None for p in parameters]
    stack = [values((numel,), dtype) for _ in range(nodes)]

    def folded(*, natively):
        bucket = Bucket(0, [0, 1, 2, 3], parameters, torch.zeros(numel, dtype=dtype))
        if not natively:
            bucket._addresses = None
        flats = [bucket.flat_views(flat.clone()) for flat in stack]
        into = flats[0] if flats else bucket.flat_views(bucket.payload)
        bucket.fold(bucket.pieces[0], gradients, flats, into=into)
        return into.flat

    assert torch.equal(bits(folded(natively=True)), bits(folded(natively=False)))


@pytest.mark.parametrize("dtype", [*DTYPES, torch.complex128])
@pytest.mark.parametrize("divisor", [1.0, 8.0, 7.0])
def test_subtrees_add_up_to_the_same_bits_natively_and_in_torch(dtype, divisor, monkeypatch):
    torch.manual_seed(0)
    rows = values((5, 130), dtype)
    _, merges = fold_nodes([(i, i + 1) for i in range(5)], 5)
    natively = sum_rows(rows, merges, divisor, into=torch.empty_like(rows[0]))
    monkeypatch.setattr(native, "engine", None)
    in_torch = sum_rows(rows, merges, divisor, into=torch.empty_like(rows[0]))
    assert torch.equal(bits(natively), bits(in_torch))
    exact = add_in_order(list(rows.to(torch.complex128)), merges, torch.add) / divisor
    torch.testing.assert_close(in_torch.to(torch.complex128), exact, rtol=0.05, atol=0.2)


def test_a_fold_replaces_gradients_that_users_have_pointed_elsewhere():
    parameters = [Parameter(torch.zeros(5)) for _ in range(3)]
    bucket = Bucket(0, [0, 1, 2], parameters, torch.zeros(15))
    into = bucket.flat_views(torch.zeros(15))
    bucket.grads[1].data = torch.ones(5)
    bucket.fold(bucket.pieces[0], [torch.ones(5)] * 3, [], into=into)
    assert all(map(torch.Tensor.is_set_to, bucket.grads, bucket.views))
    assert into.flat.tolist() == [1.0] * 15
    assert not bucket.payload.any()
