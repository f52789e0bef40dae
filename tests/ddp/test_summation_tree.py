"""The summation tree: one order of additions, however the leaves are divided among ranks."""

import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from .internals import (
    LeafBlock,
    SummationPlan,
    add_in_order,
    fold_nodes,
    is_node,
    midpoint,
    ordered_sum,
)

LEAVES = st.integers(1, 40)


def recursive_sum(values, lo, hi):
    """The definition of the order of additions."""
    if hi - lo == 1:
        return values[lo]
    power = 1
    while 2 * power < hi - lo:
        power *= 2
    left, right = recursive_sum(values, lo, lo + power), recursive_sum(values, lo + power, hi)
    return f"({left}+{right})" if isinstance(left, str) else left + right


def names(leaves):
    return [str(i) for i in range(leaves)]


def add_texts(left, right):
    return f"({left}+{right})"


def nodes_below(lo, hi):
    yield lo, hi
    if hi - lo > 1:
        mid = midpoint(lo, hi)
        yield from nodes_below(lo, mid)
        yield from nodes_below(mid, hi)


def test_the_order_of_eight_and_of_six_leaves():
    for leaves, order in (
        (8, "(((0+1)+(2+3))+((4+5)+(6+7)))"),
        (6, "(((0+1)+(2+3))+(4+5))"),
        (3, "((0+1)+2)"),
        (1, "0"),
    ):
        assert recursive_sum(names(leaves), 0, leaves) == order


@given(LEAVES)
def test_is_node_knows_exactly_the_nodes(leaves):
    nodes = set(nodes_below(0, leaves))
    pairs = [(lo, hi) for hi in range(1, leaves + 1) for lo in range(hi)]
    assert {pair for pair in pairs if is_node(*pair, leaves)} == nodes


@given(LEAVES, st.data())
def test_any_division_among_ranks_gives_the_recursive_order(leaves, data):
    ranks = data.draw(st.integers(1, leaves))
    plan = SummationPlan(0, ranks, leaves)
    blocks = plan.blocks
    assert [leaf for block in blocks for leaf in range(block.lo, block.hi)] == [*range(leaves)]
    assert max(map(len, blocks)) - min(map(len, blocks)) <= 1
    subtrees = []
    for block in blocks:
        stack = []
        for leaf, merges in zip(range(block.lo, block.hi), block.merges, strict=True):
            stack.append(str(leaf))
            for _ in range(merges):
                right = stack.pop()
                stack[-1] = add_texts(stack[-1], right)
            assert len(stack) <= block.depth
        assert len(stack) == len(block.nodes)
        subtrees += stack
    assert plan.counts == [len(block.nodes) for block in blocks]
    total = add_in_order(subtrees, plan.merges, add_texts)
    assert total == recursive_sum(names(leaves), 0, leaves)


@given(LEAVES, st.data())
def test_a_block_has_at_most_two_subtrees_per_level(leaves, data):
    lo = data.draw(st.integers(0, leaves - 1))
    block = LeafBlock(lo, data.draw(st.integers(lo + 1, leaves)), leaves)
    assert [leaf for node in block.nodes for leaf in range(*node)] == [*range(block.lo, block.hi)]
    assert all(is_node(*node, leaves) for node in block.nodes)
    sizes = [hi - lo for lo, hi in block.nodes]
    assert all(sizes.count(size) <= 2 for size in sizes)
    assert block.depth <= 2 * math.ceil(math.log2(leaves) + 1)


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=40))
def test_the_sum_of_numbers_follows_the_tree_and_is_close_to_the_exact_sum(values):
    total = ordered_sum(values)
    assert total == recursive_sum(values, 0, len(values))
    exact = sum(map(Fraction, values))
    error = abs(Fraction(total) - exact)
    bound = (
        Fraction(2) ** -52 * (len(values).bit_length() + 1) * sum(abs(Fraction(v)) for v in values)
    )
    assert error <= bound


def test_the_sum_of_nothing_is_zero():
    assert ordered_sum([]) == 0


def test_nodes_with_a_gap_are_a_bug():
    with pytest.raises(AssertionError, match="gap"):
        fold_nodes([(0, 2), (3, 4)], 4)


def test_a_binary_counter_needs_a_stack_of_logarithmic_depth():
    assert [LeafBlock(0, leaves, leaves).depth for leaves in (1, 2, 4, 8, 16)] == [
        1,
        1,
        2,
        3,
        4,
    ]
    assert fold_nodes([(0, 1), (1, 2), (2, 3), (3, 4)], 4) == ([(0, 4)], [0, 1, 0, 2])
