"""Covers: which ranks contribute which sums of a step after a rank was lost.

A rank has the sums of the micro-batches that it has run: nodes of the step's tree
(`phalanx.ddp._summation_tree`). A *cover* is a set of disjoint nodes that together have every leaf.
`Cover` finds the micro-batches that no rank has, which are run again, and which rank contributes
which nodes. A micro-batch that two ranks have run has the same bits on both.

The sum is that of `phalanx.ddp` with another division of the tree. Nodes are not changed, so a sum
that fails is repeated.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from ..ddp._communicator import SLICE_GRAIN, Communicator, OrderedSum, SumOrder
from ..ddp._summation_tree import Node, fold_nodes
from ._division import share_of


class Cover:
    """Which ranks have which nodes of a tree, and which leaves none has."""

    def __init__(self, held: Sequence[Iterable[Node]], leaves: int) -> None:
        self._size = len(held)
        holders: dict[Node, int] = {}
        for rank in reversed(range(self._size)):  # the first rank that has a node contributes it
            for node in held[rank]:
                holders[node] = rank
        # Sorted by end, so the longest node that begins at a leaf remains.
        longest: dict[int, Node] = {}
        for node in sorted(holders, key=lambda each: each[1]):
            longest[node[0]] = node
        self.missing: list[int] = []
        self._nodes: list[tuple[Node, int]] = []
        position = 0
        # Two nodes of a tree are disjoint, or one contains the other.
        while position < leaves:
            found = longest.get(position)
            if found is None:
                self.missing.append(position)
                position += 1
                continue
            self._nodes.append((found, holders[found]))
            position = found[1]
        self.leaves = leaves

    def to_redo(self, rank: int) -> list[range]:
        """Return the missing leaves that a rank runs again, as ranges."""
        return share_of(self.missing, rank, self._size)

    def nodes_of(self, rank: int) -> list[Node]:
        """Return the nodes that a rank contributes, in tree order."""
        return [node for node, holder in self._nodes if holder == rank]

    def order(self) -> SumOrder:
        stack, merges = fold_nodes((node for node, _ in self._nodes), self.leaves)
        assert stack == [(0, self.leaves)], f"leaves {self.missing} are missing"
        counts = [len(self.nodes_of(rank)) for rank in range(self._size)]
        by_rank = sorted(range(len(self._nodes)), key=lambda place: self._nodes[place][1])
        rows = [by_rank.index(place) for place in range(len(self._nodes))]
        return SumOrder(counts, merges, rows)


def sum_cover(comm: Communicator, rows: Sequence[Tensor], cover: Cover, divisor: float) -> Tensor:
    """Sum the nodes of a cover over all ranks.

    All ranks call it with flat tensors of the same length, dtype and device: one per node they
    contribute, or one placeholder, which is ignored, if they contribute none.
    """
    order, numel = cover.order(), rows[0].numel()
    grain = comm.size * SLICE_GRAIN
    padded = -(-numel // grain) * grain
    mine = rows[0].new_zeros(order.counts[comm.rank], padded)
    for row, values in zip(mine, rows, strict=False):  # a placeholder has no row
        row[:numel] = values
    result = mine.new_empty(padded)
    OrderedSum(comm.group, mine, result, order, divisor).wait()
    return result[:numel]
