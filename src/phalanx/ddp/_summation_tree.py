"""The order in which a step adds the gradients of its micro-batches: one fixed binary tree.

Floating-point addition is not associative, so a sum has the same bits at every world size only if
it is evaluated in the same order. The leaves of the tree are the micro-batches of a step. Node
[lo, hi) is the sum of its left child [lo, mid) and its right child [mid, hi), where mid - lo is the
greatest power of two below hi - lo. Which rank evaluates a node makes no difference.

A rank that runs the leaves [lo, hi) in order adds them like a binary counter: it pushes a leaf on a
stack and, while the two topmost nodes are siblings, replaces them by their sum. At the end the
stack has the maximal subtrees in [lo, hi), at most two per level; `LeafBlock` says which. The
ranks' stacks, one behind the other, are combined by the same rule.

The identity of the sum is negative zero: x + -0.0 has the bits of x for every x. x + 0.0 does not,
if x is -0.0.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import TypeVar

T = TypeVar("T")
Node = tuple[int, int]


def midpoint(lo: int, hi: int) -> int:
    """Return where a node of at least two leaves is divided."""
    return lo + (1 << (hi - lo - 1).bit_length() - 1)


def is_node(lo: int, hi: int, leaves: int) -> bool:
    """Whether the tree over `leaves` has a node [lo, hi)."""
    low, high = 0, leaves
    while high - low > hi - lo:
        mid = midpoint(low, high)
        low, high = (low, mid) if hi <= mid else (mid, high)
    return (low, high) == (lo, hi)


def fold_nodes(nodes: Iterable[Node], leaves: int) -> tuple[list[Node], list[int]]:
    """Push adjacent nodes on a stack and merge siblings.

    Returns the stack, and how many merges follow each node.
    """
    stack: list[Node] = []
    merges: list[int] = []
    for node in nodes:
        stack.append(node)
        merges.append(0)
        while len(stack) > 1 and is_node(stack[-2][0], stack[-1][1], leaves):
            mid, hi = stack.pop()
            assert stack[-1][1] == mid, "the nodes have a gap"
            stack[-1] = stack[-1][0], hi
            merges[-1] += 1
    return stack, merges


def push(stack: list[T], value: T, merges: int, add: Callable[[T, T], T]) -> None:
    """Push a value on a stack and add up the topmost ones, as often as `fold_nodes` says."""
    stack.append(value)
    for _ in range(merges):
        right = stack.pop()
        stack[-1] = add(stack[-1], right)


def add_in_order(values: Sequence[T], merges: Sequence[int], add: Callable[[T, T], T]) -> T:
    """Add values in the order that `fold_nodes` has found, which must leave one."""
    stack: list[T] = []
    for value, count in zip(values, merges, strict=True):
        push(stack, value, count, add)
    (total,) = stack
    return total


def tree_order(leaves: int) -> list[int]:
    """Return how many additions follow each leaf of a whole tree."""
    return fold_nodes(((i, i + 1) for i in range(leaves)), leaves)[1]


def ordered_sum(values: Sequence[float]) -> float:
    """Add numbers in the order of the tree over all of them."""
    return add_in_order(values, tree_order(len(values)), operator.add) if values else 0.0


@dataclass(frozen=True)
class LeafBlock:
    """The leaves [lo, hi) of one rank, of `leaves` in all."""

    lo: int
    hi: int
    leaves: int

    @classmethod
    def of_rank(cls, rank: int, ranks: int, leaves: int) -> LeafBlock:
        """Return the block of a rank; blocks differ in length by at most one."""
        return cls(rank * leaves // ranks, (rank + 1) * leaves // ranks, leaves)

    def __len__(self) -> int:
        return self.hi - self.lo

    @cached_property
    def nodes(self) -> list[Node]:
        """The maximal subtrees in the block, in order."""
        return fold_nodes(self._leaves(), self.leaves)[0]

    @cached_property
    def merges(self) -> list[int]:
        """How many nodes of the stack each leaf is added to, in the order of the leaves."""
        return fold_nodes(self._leaves(), self.leaves)[1]

    @cached_property
    def depth(self) -> int:
        """The greatest number of nodes that are on the stack between two leaves."""
        height = depth = 0
        for count in self.merges:
            height += 1 - count
            depth = max(depth, height)
        return depth

    def _leaves(self) -> Iterable[Node]:
        return ((leaf, leaf + 1) for leaf in range(self.lo, self.hi))


class SummationPlan:
    """Which leaves each rank adds up, and how the subtrees of all ranks become one sum."""

    def __init__(
        self, rank: int, ranks: int, leaves: int, shares: Sequence[int] | None = None
    ) -> None:
        """`shares`: how many leaves each rank has, at least one; equally many by default."""
        self.leaves = leaves
        self.blocks = [LeafBlock.of_rank(each, ranks, leaves) for each in range(ranks)]
        if shares is not None:
            bounds = list(accumulate(shares, initial=0))
            self.blocks = [LeafBlock(lo, hi, leaves) for lo, hi in pairwise(bounds)]
        self.block = self.blocks[rank]
        """The leaves of this rank."""
        self.counts = [len(block.nodes) for block in self.blocks]
        """How many subtrees each rank has."""
        nodes = [node for block in self.blocks for node in block.nodes]
        stack, self.merges = fold_nodes(nodes, leaves)
        """How many additions follow each subtree, in the order of ranks and subtrees."""
        assert stack == [(0, leaves)], f"the blocks do not cover all leaves: {stack}"

    @property
    def slots(self) -> int:
        """The greatest number of subtrees of a rank."""
        return max(self.counts)


def max_subtrees(leaves: int, ranks: int) -> int:
    """Return how many subtrees a rank has at most, however the leaves are divided."""
    longest = leaves - ranks + 1  # every rank has at least one leaf
    return min(longest, max(1, 2 * (leaves - 1).bit_length()))
