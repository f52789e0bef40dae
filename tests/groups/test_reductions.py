"""Every reduce operation for every element type that has it, in every collective that reduces."""

import math
import operator
from functools import reduce

import pytest
import torch
from torch._C import _distributed_c10d as c10d
from torch.distributed import ReduceOp, _make_nccl_premul_sum

from phalanx.errors import InvalidArgument
from phalanx.testing import over_groups

SUM, AVG, PRODUCT = ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PRODUCT
MIN, MAX = ReduceOp.MIN, ReduceOp.MAX
BAND, BOR, BXOR = ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
SIGNED = [torch.int8, torch.int16, torch.int32, torch.int64]
INTEGERS = [*SIGNED, torch.uint8]
COMPLEX = [torch.complex64, torch.complex128]
NOT_ON_GLOO = [torch.int16]

SIZE = 3
over_three = over_groups(sizes=(SIZE,), reuse=True)


# -- inputs and expected results in plain Python ---------------------------------------------

# Rank by rank; small enough for the product to fit eight bits, and for halves to be exact.
NUMBERS = [[1, 5, 2, 4], [3, 4, 1, 5], [2, 5, 3, 6]]
MIXED = [[1, -5, 2, -4], [3, -4, -1, 5], [-3, 1, 3, -2]]
TRUTHS = [[1, 1, 0, 0], [1, 0, 0, 1], [1, 1, 0, 0]]
PAIRS = [[1 + 2j, -1j], [2 - 1j, 3 + 0j], [0.5 + 1j, 1 + 1j]]

FOLDS = {
    SUM: operator.add,
    PRODUCT: operator.mul,
    MIN: min,
    MAX: max,
    BAND: operator.and_,
    BOR: operator.or_,
    BXOR: operator.xor,
}


def combined(op, rows):
    """Reduce rows of Python numbers in rank order; an integer average truncates."""
    if op == AVG:
        sums = combined(SUM, rows)
        whole = all(isinstance(value, int) for value in sums)
        return [math.trunc(value / len(rows)) if whole else value / len(rows) for value in sums]
    return [reduce(FOLDS[op], column) for column in zip(*rows, strict=True)]


def each_way(group, op, rows, dtype):
    """Run every collective that reduces; yields (collective, got, expected rows)."""
    rank, size = group.rank(), group.size()
    mine = torch.tensor(rows[rank], dtype=dtype)

    def fresh():
        return mine.clone()

    expected = combined(op, rows)
    tensor = fresh()
    group.allreduce(tensor, op).wait()
    yield "allreduce", tensor, expected
    tensors = [fresh(), fresh()[:2]]
    group.allreduce_coalesced(tensors, op).wait()
    yield "allreduce_coalesced", torch.cat(tensors), expected + expected[:2]
    tensor = fresh()
    group.reduce(tensor, 1, op).wait()
    yield "reduce", tensor, expected if rank == 1 else rows[rank]
    tensor = torch.zeros_like(mine)
    group.reduce_scatter(tensor, [fresh() for _ in range(size)], op).wait()
    yield "reduce_scatter", tensor, expected
    tensor = torch.zeros_like(mine)
    group.reduce_scatter_single(tensor, torch.cat([mine] * size), op=op).wait()
    yield "reduce_scatter_single", tensor, expected
    tensors = [torch.zeros_like(mine), torch.zeros_like(mine[:2])]
    opts = c10d.ReduceScatterOptions()
    opts.reduceOp = op
    wholes = [torch.cat([mine] * size), torch.cat([mine[:2]] * size)]
    group.reduce_scatter_single_coalesced(tensors, wholes, opts).wait()
    yield "reduce_scatter_single_coalesced", torch.cat(tensors), expected + expected[:2]


def check_each_way(group, op, rows, dtype):
    for how, got, expected in each_way(group, op, rows, dtype):
        assert got.dtype is dtype
        assert torch.equal(got, torch.tensor(expected, dtype=dtype)), (how, op, got, expected)


# -- every operation, every type -----------------------------------------------------------


@over_three
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_operations_on_floats(group, dtype):
    for op in (SUM, PRODUCT, MIN, MAX):
        check_each_way(group, op, NUMBERS, dtype)
        check_each_way(group, op, MIXED, dtype)
    halves = [[value * SIZE / 2 for value in row] for row in MIXED]
    check_each_way(group, AVG, halves, dtype)


@over_three
@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_operations_on_integers(group, dtype):
    if group.backend == "gloo" and dtype in NOT_ON_GLOO:
        with pytest.raises(InvalidArgument, match="int16.*convert"):
            group.allreduce(torch.ones(2, dtype=dtype))
        return
    for op in (SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR, BXOR):
        check_each_way(group, op, NUMBERS, dtype)
        if dtype in SIGNED:
            check_each_way(group, op, MIXED, dtype)


@over_three
def test_operations_on_bools(group):
    for op in (PRODUCT, MIN, MAX, BAND, BOR, BXOR):
        check_each_way(group, op, TRUTHS, torch.bool)


@over_three
def test_a_sum_of_bools_is_logical_or(group):
    """The bytes of a bool tensor stay 0 or 1, never a count."""
    truths = torch.tensor(TRUTHS[group.rank()], dtype=torch.bool)
    group.allreduce(truths).wait()
    assert truths.view(torch.uint8).tolist() == combined(MAX, TRUTHS)


@over_three
@pytest.mark.parametrize("dtype", COMPLEX, ids=str)
def test_operations_on_complex_numbers(group, dtype):
    for op in (SUM, AVG, PRODUCT):
        if group.backend == "gloo" and op == PRODUCT:
            with pytest.raises(InvalidArgument, match=r"PRODUCT.*complex.*convert"):
                group.allreduce(torch.ones(2, dtype=dtype), op)
            continue
        for how, got, expected in each_way(group, op, PAIRS, dtype):
            assert torch.allclose(got, torch.tensor(expected, dtype=dtype)), (how, op)


@over_groups(sizes=(1, 2, 4), reuse=True)
def test_an_integer_average_truncates_towards_zero(group):
    total = 7 * group.size() - 1  # the mean is 7 less a bit
    mine = total if group.rank() == 0 else 0
    tensor = torch.tensor([mine, -mine])
    group.allreduce(tensor, AVG).wait()
    assert tensor.tolist() == [6, -6]


@over_three
def test_a_sum_of_integers_wraps_around(group):
    tensor = torch.tensor([100], dtype=torch.uint8)
    group.allreduce(tensor).wait()
    assert tensor.tolist() == [300 % 256]


@over_groups(backends=("local",), sizes=(SIZE,), reuse=True)
def test_the_local_backend_sums_half_precision_in_float32(group):
    """A float16 sum of 65504, the largest float16, would overflow to infinity."""
    tensor = torch.full((5,), 65504.0, dtype=torch.float16)
    group.allreduce(tensor, AVG).wait()
    assert tensor.tolist() == [65504.0] * 5


# -- premultiplied sums --------------------------------------------------------------------


@over_three
@pytest.mark.parametrize("dtype", [*FLOATS, *COMPLEX], ids=str)
def test_premultiplied_sum_of_floats(group, dtype):
    rows = [[0.5 * value for value in row] for row in MIXED]
    for factor in (0.5, torch.tensor([0.5], dtype=dtype)):
        op = _make_nccl_premul_sum(factor)
        tensor = torch.tensor(MIXED[group.rank()], dtype=dtype)
        group.allreduce(tensor, op).wait()
        assert tensor.tolist() == combined(SUM, rows)


@over_three
def test_premultiplied_sum_does_not_modify_inputs(group):
    op = _make_nccl_premul_sum(3.0)
    mine = torch.tensor(NUMBERS[group.rank()], dtype=torch.float32)
    expected = [3.0 * value for value in combined(SUM, NUMBERS)]

    tensor = mine.clone()
    group.reduce(tensor, 2, op).wait()
    assert tensor.tolist() == (expected if group.rank() == 2 else NUMBERS[group.rank()])

    inputs, output = [mine.clone() for _ in range(SIZE)], torch.zeros(4)
    group.reduce_scatter(output, inputs, op).wait()
    assert output.tolist() == expected
    assert all(torch.equal(tensor, mine) for tensor in inputs)

    whole = torch.cat(inputs)
    group.reduce_scatter_single(output, whole, op=op).wait()
    assert output.tolist() == expected
    assert torch.equal(whole, torch.cat([mine] * SIZE))


@over_three
def test_premultiplied_sum_rejects_integers(group):
    tensor = torch.ones(2, dtype=torch.int64)
    with pytest.raises(InvalidArgument, match="PREMUL_SUM"):
        group.allreduce(tensor, _make_nccl_premul_sum(0.5))
    group.allreduce(tensor).wait()
    assert tensor.tolist() == [SIZE, SIZE]


@over_three
def test_premultiplied_sum_rejects_bools(group):
    """Even with a factor that is a bool: Gloo would sum the bytes and store a 3."""
    tensor = torch.ones(2, dtype=torch.bool)
    for factor in (0.5, torch.tensor([True])):
        with pytest.raises(InvalidArgument, match="PREMUL_SUM needs a tensor of numbers, got bool"):
            group.allreduce(tensor, _make_nccl_premul_sum(factor))


# -- unsupported operations ----------------------------------------------------------------


@over_three
def test_unsupported_operations_are_rejected_and_the_group_stays_usable(group):
    refused = [
        *(
            (dtype, op, "needs an integer or bool tensor")
            for dtype in FLOATS + COMPLEX
            for op in (BAND, BOR, BXOR)
        ),
        *((dtype, op, "is not defined for complex") for dtype in COMPLEX for op in (MIN, MAX)),
        (torch.bool, AVG, "got bool"),
        (torch.float8_e4m3fn, SUM, "float8_e4m3fn"),
        *([] if group.backend == "shm" else [(torch.uint16, SUM, "uint16")]),
    ]
    for dtype, op, telling in refused:
        tensor = torch.ones(SIZE, dtype=torch.uint8).to(dtype)
        with pytest.raises(InvalidArgument, match=telling):
            group.allreduce(tensor, op)
        with pytest.raises(InvalidArgument, match=telling):
            group.reduce_scatter_single(torch.ones(1).to(dtype), tensor, op=op)
    tensor = torch.ones(1)
    group.allreduce(tensor).wait()
    assert tensor.item() == SIZE


# -- shapes, views and sparse tensors ------------------------------------------------------


@over_three
def test_tensors_of_any_shape_can_be_reduced(group):
    for op, expected in ((SUM, 6.0), (AVG, 2.0), (MAX, 3.0)):
        for shape in [(), (0,), (2, 0), (3, 1, 2), (1 << 18,)]:
            tensor = torch.full(shape, float(group.rank() + 1))
            group.allreduce(tensor, op).wait()
            assert torch.equal(tensor, torch.full(shape, expected)), (op, shape)
    group.allreduce_coalesced([torch.ones(0), torch.ones(())]).wait()
    group.allreduce_coalesced([]).wait()


@over_three
def test_parameters_and_views_can_be_reduced(group):
    parameter = torch.nn.Parameter(torch.full((2, 3), float(group.rank())))
    around = torch.full((5, 4), float(group.rank()))
    for op in (SUM, AVG):
        group.allreduce(parameter, op).wait()
        group.allreduce(around[2], op).wait()
    assert parameter.requires_grad
    assert parameter.grad_fn is None
    assert torch.equal(parameter, torch.full((2, 3), 3.0))
    outside = torch.cat([around[:2], around[3:]])
    assert torch.equal(around[2], torch.full((4,), 3.0))
    assert torch.equal(outside, torch.full((4, 4), float(group.rank())))


@over_groups(sizes=(SIZE,), reuse=True)
def test_sparse_tensors_can_be_summed(group):
    rank = group.rank()
    dense = torch.zeros(4, 2)
    dense[rank] = rank + 1.0
    dense[3] = 1.0
    tensor = dense.to_sparse_coo()
    work = group.allreduce(tensor)
    work.wait()
    expected = torch.tensor([[1.0, 1.0], [2.0, 2.0], [3.0, 3.0], [3.0, 3.0]])
    assert torch.equal(work.result()[0].to_dense(), expected)
