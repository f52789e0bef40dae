"""8-bit quantization hooks against their formula and error bound."""

import pytest
import torch

from phalanx.ddp.hooks import quantization_perchannel_hook, quantization_pertensor_hook
from phalanx.errors import InvalidArgument

from .buckets import assert_near, bucket_of, everywhere, flat_gradients, mean_of, on_threads, run


def as_bytes(row):
    """Quantize a row to 256 levels including zero, with torch's fake_quantize."""
    low, high = min(row.min().item(), 0.0), max(row.max().item(), 0.0)
    scale = (high - low) / 255 or 1.0
    zero = round(-low / scale)
    return torch.fake_quantize_per_tensor_affine(row, scale, zero, 0, 255)


def in_rows(flat, length):
    return torch.cat([as_bytes(row) for row in flat.split(length)])


@everywhere
def test_per_tensor_is_the_mean_of_quantized_gradients(group):
    expected = mean_of([as_bytes(each) for each in flat_gradients(group.size())])
    result = run(quantization_pertensor_hook, None, group)
    assert_near(result, expected)


@everywhere
def test_per_channel_has_a_scale_for_each_row(group):
    def rows_of_seven(state, bucket):
        return quantization_perchannel_hook(state, bucket, bucket_size=7)

    everyones = flat_gradients(group.size())
    for hook, length in ((quantization_perchannel_hook, 512), (rows_of_seven, 7)):
        expected = mean_of([in_rows(each, length) for each in everyones])
        result = run(hook, None, group)
        assert_near(result, expected)


@on_threads
def test_error_is_at_most_half_a_level(group):
    everyones = flat_gradients(group.size())
    bound = mean_of([(each.max() - each.min()) / 255 / 2 for each in everyones])
    result = run(quantization_pertensor_hook, None, group)
    assert (result - mean_of(everyones)).abs().max() <= bound * 1.01


@on_threads
def test_zeros_and_dtype_are_preserved(group):
    values = torch.tensor([0.0, 0.5, -3.0, 0.0], dtype=torch.float16)
    result = quantization_pertensor_hook(None, bucket_of(values, group=group)).wait()
    assert result.dtype == torch.float16
    assert result[0] == result[3] == 0
    zeros = bucket_of(torch.zeros(9), group=group)
    assert not quantization_perchannel_hook(None, zeros).wait().any()


@on_threads
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_non_finite_values_propagate(group, value):
    mine = torch.ones(5)
    mine[2] = value if group.rank() == 0 else 1.0
    result = quantization_pertensor_hook(None, bucket_of(mine, group=group)).wait()
    assert not result.isfinite().any()


@on_threads
def test_empty_bucket(group):
    for hook in (quantization_pertensor_hook, quantization_perchannel_hook):
        assert hook(None, bucket_of(torch.zeros(0), group=group)).wait().numel() == 0


def test_bad_input_is_rejected():
    for hook in (quantization_pertensor_hook, quantization_perchannel_hook):
        with pytest.raises(InvalidArgument, match=f"{hook.__name__} compresses .* is complex64"):
            hook(None, bucket_of(torch.zeros(2, dtype=torch.complex64)))
    with pytest.raises(ValueError, match="bucket_size must be an integer of at least 1, got 0"):
        quantization_perchannel_hook(None, bucket_of(torch.zeros(2)), bucket_size=0)
