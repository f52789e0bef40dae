"""Sums in the order of a binary tree: in the engine, and of gradients on one rank."""

import random
from datetime import timedelta

import pytest
import torch

from phalanx import native
from phalanx.errors import PeerLeft
from phalanx.groups.backends.shm import DTYPES, ShmEngine

from .internals import CallFailed, EngineMismatch, configure_fast_path, share_region

engine = native.engine
FLOATS = [torch.float32, torch.bfloat16, torch.float64]
ALL_TYPES = [*FLOATS, torch.float16, torch.complex64, torch.complex128]
SOON = timedelta(seconds=20)


# -- an oracle -----------------------------------------------------------------------------


def balanced(first, last):
    """The tree over leaves [first, last): a leaf, or two subtrees, the left one a power of two."""
    if last - first == 1:
        return first
    half = 1 << (last - first - 1).bit_length() - 1
    return balanced(first, first + half), balanced(first + half, last)


def random_tree(first, last, rng):
    if last - first == 1:
        return first
    middle = rng.randint(first + 1, last - 1)
    return random_tree(first, middle, rng), random_tree(middle, last, rng)


def leaves(tree):
    return leaves(tree[0]) + leaves(tree[1]) if isinstance(tree, tuple) else [tree]


def reals(tensor):
    """The parts of complex numbers: torch's own sums and quotients change the sign of zeros."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def add(a, b):
    """Torch rounds a sum to the dtype."""
    return torch.add(reals(a), reals(b)).view(a.dtype).view_as(a)


def divide(a, divisor):
    return (reals(a) / divisor).view(a.dtype).view_as(a)


def evaluate(tree, inputs):
    if not isinstance(tree, tuple):
        return inputs[tree]
    return add(evaluate(tree[0], inputs), evaluate(tree[1], inputs))


def subtrees(tree, first, last):
    """The maximal subtrees whose leaves are in [first, last)."""
    found = leaves(tree)
    if found[-1] < first or found[0] >= last:
        return []
    if first <= found[0] and found[-1] < last:
        return [tree]
    return subtrees(tree[0], first, last) + subtrees(tree[1], first, last)


def merges_of(tree):
    """How many pairs of sums are merged after each leaf."""
    if not isinstance(tree, tuple):
        return [0]
    left, right = merges_of(tree[0]), merges_of(tree[1])
    return [*left, *right[:-1], right[-1] + 1]


def merges_over(tree, parts):
    """The same where subtrees are inputs."""
    if tree in parts:
        return [0]
    left, right = merges_over(tree[0], parts), merges_over(tree[1], parts)
    return [*left, *right[:-1], right[-1] + 1]


def values(count, dtype, seed):
    made = torch.Generator().manual_seed(seed)
    parts = torch.randn(2, count, generator=made, dtype=torch.float64)
    if dtype.is_complex:
        return torch.complex(parts[0], parts[1]).to(dtype)
    return parts[0].to(dtype)


def same_bits(a, b):
    bits = [tensor.contiguous().view(torch.uint8) for tensor in (a, b)]
    return a.dtype == b.dtype and torch.equal(*bits)


# -- the engine ----------------------------------------------------------------------------


def make_engine(ctx):
    return ShmEngine(share_region(ctx.store, ctx.rank, ctx.size), ctx.rank, ctx.size)


def reduce_micro_batches(ctx, tree, count, dtype, divisor):
    """Sum one tensor per leaf, of which each rank has a block; return the sum of all."""
    made = make_engine(ctx)
    total = len(leaves(tree))
    cuts = [total * rank // ctx.size for rank in range(ctx.size + 1)]
    per_rank = [subtrees(tree, *cuts[rank : rank + 2]) for rank in range(ctx.size)]
    rows = max(len(parts) for parts in per_rank)
    nodes = made.allocate((1 + rows, count + 5), dtype).fill_(float("nan"))
    inputs = [values(count, dtype, leaf) for leaf in range(total)]
    for row, part in enumerate(per_rank[ctx.rank], 1):
        nodes[row, :count] = evaluate(part, inputs)
    before = nodes[1:].clone()
    tree_inputs = [len(parts) for parts in per_rank]
    merges = merges_over(tree, [part for parts in per_rank for part in parts])
    made.ordered_allreduce(nodes, count, tree_inputs, merges, divisor).wait(SOON)
    assert nodes[:, count:].isnan().all(), "the rest of a row is not touched"
    assert same_bits(nodes[0, :count], divide(evaluate(tree, inputs), divisor))
    assert same_bits(nodes[1:], before), "inputs are not written to"


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("count", [37, 50_001])
def test_the_bits_do_not_depend_on_the_number_of_ranks(ranks, count, dtype):
    for size in (1, 2, 3, 4):
        ranks.run(reduce_micro_batches, size, args=(balanced(0, 7), count, dtype, 7.0))


def test_any_tree_can_be_split_between_ranks(ranks):
    rng = random.Random(1)
    for size in (2, 3, 4):
        tree = random_tree(0, 11, rng)
        ranks.run(reduce_micro_batches, size, args=(tree, 9_000, torch.float16, 8.0))


def need_shared_memory(ctx):
    made = make_engine(ctx)
    ordinary = torch.ones(2, 10_000)
    with pytest.raises(ValueError, match="shared memory"):
        made.ordered_allreduce(ordinary, 10_000, [1, 1], [0, 1], 1.0)
    assert not made.started_works
    small = torch.ones(2, 1_000)
    made.ordered_allreduce(small, 1_000, [1, 1], [0, 1], 1.0).wait(SOON)
    assert small[0].unique().tolist() == [2.0]
    assert small[1].unique().tolist() == [1.0]
    shared = made.allocate((3, 10_000), torch.float32).fill_(3.0)
    made.ordered_allreduce(shared, 10_000, [2, 1], [0, 1, 1], 1.0).wait(SOON)
    assert shared[0].unique().tolist() == [9.0]
    assert shared[1:].unique().tolist() == [3.0]


def test_large_inputs_must_be_in_shared_memory(ranks):
    ranks.run(need_shared_memory, 2)


def give_wrong_arguments(ctx):
    made = make_engine(ctx)
    nodes = made.allocate((3, 8), torch.float32).fill_(1.0)
    for match, arguments in {
        "one number per rank": (8, [1, 1], [0, 1], 1.0),
        "one number per input": (8, [2], [0], 1.0),
        "one sum": (8, [2], [0, 0], 1.0),
        "out of range": (8, [2], [0, -1], 1.0),
        "as many as any rank": (8, [3], [0, 1, 1], 1.0),
        "fit into a slot": (9, [2], [0, 1], 1.0),
        "divisor": (8, [2], [0, 1], 0.0),
    }.items():
        with pytest.raises(ValueError, match=match):
            made.ordered_allreduce(nodes, *arguments)
    with pytest.raises(ValueError, match="element type"):
        made.ordered_allreduce(nodes.view(torch.int32), 8, [2], [0, 1], 1.0)
    made.ordered_allreduce(nodes, 8, [2], [0, 1], 4.0).wait(SOON)
    assert nodes[0].unique().tolist() == [0.5]


def test_wrong_arguments_are_refused(ranks):
    ranks.run(give_wrong_arguments, 1)


def disagree(ctx, count, orders):
    made = make_engine(ctx)
    nodes = made.allocate((3, count), torch.float32).fill_(1.0)
    with pytest.raises(EngineMismatch):
        made.ordered_allreduce(nodes, count, *orders[ctx.rank]).wait(SOON)


@pytest.mark.parametrize(
    "other", [([2, 1], [0, 0, 2], 2.0), ([1, 2], [0, 1, 1], 2.0), ([2, 1], [0, 1, 1], 3.0)]
)
def test_different_trees_and_divisors_are_a_mismatch(ranks, other):
    ranks.run(disagree, 2, args=(5_000, [([2, 1], [0, 1, 1], 2.0), other]))


def go_on_without_a_rank(ctx):
    made = make_engine(ctx)
    if ctx.rank == 1:
        assert made.leave() == ""
        return
    for count in (10, 5_000):
        nodes = made.allocate((2, count), torch.float32).fill_(ctx.rank)
        with pytest.raises(CallFailed, match=r"^rank 1 has left the group") as caught:
            made.ordered_allreduce(nodes, count, [1, 1, 1], [0, 1, 1], 1.0).wait(SOON)
        assert caught.value.kind is PeerLeft
        assert nodes.unique().tolist() == [ctx.rank]


def test_a_tree_needs_every_rank(ranks):
    ranks.run(go_on_without_a_rank, 3)


# -- sums on one rank ----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ALL_TYPES)
def test_sum_tree_has_the_bits_of_a_recursive_sum(dtype):
    rng = random.Random(2)
    for total in (1, 2, 3, 8, 21):
        tree = random_tree(0, total, rng)
        inputs = [values(1_003, dtype, leaf) for leaf in range(total)]
        addresses = [each.data_ptr() for each in inputs]
        out = torch.empty_like(inputs[0])
        expected = evaluate(tree, inputs)
        for divisor in (1.0, 4.0, 3.0):
            arguments = addresses, merges_of(tree), DTYPES[dtype], 1_003, divisor
            engine.sum_tree(out.data_ptr(), *arguments)
            assert same_bits(out, divide(expected, divisor))
        engine.sum_tree(addresses[-1], addresses, merges_of(tree), DTYPES[dtype], 1_003, 1.0)
        assert same_bits(inputs[-1], expected)


@pytest.mark.parametrize(
    ("merges", "dtype", "divisor", "match"),
    [
        ([0, 0], torch.float32, 1.0, "one sum"),
        ([0, 2], torch.float32, 1.0, "one sum"),
        ([1, 0], torch.float32, 1.0, "one sum"),
        ([0, 300], torch.float32, 1.0, "out of range"),
        ([0, 1, 1], torch.float32, 1.0, "one number per input"),
        ([0, 1], torch.int32, 1.0, "element type"),
        ([0, 1], torch.float32, float("nan"), "divisor"),
    ],
)
def test_sum_tree_refuses_what_is_no_tree(merges, dtype, divisor, match):
    data = torch.zeros(4, dtype=dtype)
    with pytest.raises(ValueError, match=match):
        engine.sum_tree(data.data_ptr(), [data.data_ptr()] * 2, merges, DTYPES[dtype], 4, divisor)
    assert not data.any()


class Bucket:
    """Flat buffers, gradients of several sizes, and their views of the first buffer."""

    def __init__(self, nodes, dtype, sizes=(1, 100, 0, 7)):
        assert configure_fast_path()
        self.sizes = list(sizes)
        self.flat = [values(sum(sizes), dtype, n) for n in range(max(nodes, 1))]
        self.nodes = self.flat[:nodes]
        self.grads = [values(size, dtype, 10 + i) for i, size in enumerate(sizes)]
        self.views = list(self.flat[0].split(self.sizes))
        self.dtype = dtype

    def fold(self, grads, views=None, dtype=None, views_at=None):
        dtype = dtype or self.dtype
        return engine.fold(
            self.flat[0].data_ptr(),
            [node.data_ptr() for node in self.nodes],
            grads,
            self.views if views is None else views,
            self.flat[0].data_ptr() if views_at is None else views_at,
            [size * self.dtype.itemsize for size in self.sizes],
            DTYPES[dtype],
        )

    def expected(self, grads):
        total = torch.cat(grads)
        for node in reversed(self.nodes):
            total = add(node, total)
        return total


@pytest.mark.parametrize("dtype", ALL_TYPES)
@pytest.mark.parametrize("nodes", [0, 1, 2, 3])
def test_fold_adds_gradients_to_sums_from_the_right(nodes, dtype):
    for with_views in (True, False):
        bucket = Bucket(nodes, dtype)
        expected = bucket.expected(bucket.grads)
        others = [node.clone() for node in bucket.nodes[1:]]
        assert bucket.fold(bucket.grads, bucket.views if with_views else [])
        assert same_bits(bucket.flat[0], expected)
        assert all(map(same_bits, bucket.nodes[1:], others))


@pytest.mark.parametrize("dtype", ALL_TYPES)
@pytest.mark.parametrize("nodes", [0, 1, 2, 3])
def test_a_missing_gradient_is_the_identity_of_addition(nodes, dtype):
    bucket = Bucket(nodes, dtype)
    for node in bucket.flat:
        reals(node)[10:60] = -0.0
        reals(node)[20:30] = torch.finfo(dtype).smallest_normal / 4  # subnormal
    identity = torch.empty(100, dtype=dtype)
    reals(identity).fill_(-0.0)
    expected = bucket.expected([bucket.grads[0], identity, *bucket.grads[2:]])
    assert bucket.fold([bucket.grads[0], None, *bucket.grads[2:]])
    assert same_bits(bucket.flat[0], expected)
    assert reals(bucket.flat[0])[30:60].signbit().all()


def test_large_gradients_are_copied():
    bucket = Bucket(0, torch.float32, (3, (4 << 20) // 4 + 5, 2_000))
    assert bucket.fold(bucket.grads)
    assert same_bits(bucket.flat[0], torch.cat(bucket.grads))
    assert bucket.fold([None, None, None])
    assert same_bits(bucket.flat[0], torch.full_like(bucket.flat[0], -0.0))


def test_a_gradient_that_is_its_view_is_kept_by_a_copy_and_refused_by_a_sum():
    for nodes in (0, 1):
        bucket = Bucket(nodes, torch.float32)
        before = bucket.flat[0].clone()
        assert bucket.fold(bucket.views) is (nodes == 0)
        assert same_bits(bucket.flat[0], before)


@pytest.mark.parametrize(
    "change",
    [
        lambda grad: grad.double(),
        lambda grad: grad.repeat_interleave(2)[::2],
        lambda grad: grad[:-1],
        lambda grad: grad.to_sparse(),
        torch._neg_view,
        str,
    ],
)
def test_fold_refuses_gradients_that_it_cannot_read(change):
    bucket = Bucket(2, torch.float32)
    before = bucket.flat[0].clone()
    bucket.grads[1] = change(bucket.grads[1])
    assert not bucket.fold(bucket.grads)
    assert same_bits(bucket.flat[0], before)


def test_fold_refuses_conjugated_gradients():
    bucket = Bucket(1, torch.complex64)
    assert not bucket.fold([grad.conj() for grad in bucket.grads])


def test_fold_refuses_moved_views_and_other_types():
    bucket = Bucket(1, torch.float32)
    before = bucket.flat[0].clone()
    moved = [*bucket.views[:3], torch.zeros(7)]
    assert not bucket.fold(bucket.grads, moved)
    assert not bucket.fold(bucket.grads, bucket.views[:3])
    assert not bucket.fold([None] * 4, dtype=torch.int32)
    other = torch.zeros_like(before)
    assert not bucket.fold(bucket.grads, views_at=other.data_ptr())
    assert same_bits(bucket.flat[0], before)
    assert bucket.fold(bucket.grads, list(other.split(bucket.sizes)), views_at=other.data_ptr())
    assert not other.any()
