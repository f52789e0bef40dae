"""What survivors hold after a rank was lost, what they miss, and the sum of it."""

import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from phalanx.ddp._communicator import Communicator
from phalanx.ddp._summation_tree import LeafBlock, is_node
from phalanx.elastic._contributions import LoopFlags
from phalanx.elastic._cover import Cover, sum_cover
from phalanx.elastic._recovery import SurvivorReport
from phalanx.groups._store import from_json, to_json
from phalanx.testing import ThreadRanks


@st.composite
def holdings(draw):
    """Blocks of a tree that ranks have run: they may overlap, and leave gaps."""
    leaves = draw(st.integers(1, 20))
    ranks = draw(st.integers(1, 4))
    held = []
    for _ in range(ranks):
        nodes = []
        for _ in range(draw(st.integers(0, 3))):
            lo = draw(st.integers(0, leaves - 1))
            hi = draw(st.integers(lo + 1, leaves))
            nodes += LeafBlock(lo, hi, leaves).nodes
        held.append(nodes)
    return leaves, held


@given(holdings())
def test_a_cover_and_what_it_misses_are_all_leaves_once(case):
    leaves, held = case
    cover = Cover(held, leaves)
    contributed = [node for rank in range(len(held)) for node in cover.nodes_of(rank)]
    found = [leaf for lo, hi in contributed for leaf in range(lo, hi)]
    assert sorted([*found, *cover.missing]) == list(range(leaves))
    for rank, nodes in enumerate(held):
        assert set(cover.nodes_of(rank)) <= set(nodes)
    assert all(is_node(lo, hi, leaves) for lo, hi in contributed)
    redone = [each for rank in range(len(held)) for each in cover.to_redo(rank)]
    assert [leaf for each in redone for leaf in each] == cover.missing


@given(holdings())
def test_a_missing_leaf_is_one_that_no_rank_has(case):
    leaves, held = case
    had = {leaf for nodes in held for lo, hi in nodes for leaf in range(lo, hi)}
    assert Cover(held, leaves).missing == sorted(set(range(leaves)) - had)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_sum_of_a_cover_has_the_bits_of_the_whole_tree(ranks):
    """However the nodes are divided, interleaved and held twice."""
    leaves, numel = 11, 150
    values = torch.randn(leaves, numel, generator=torch.Generator().manual_seed(ranks))
    blocks = [[(0, 3), (7, 9)], [(3, 7), (5, 7)], [(9, 11), (0, 2)]][:ranks]
    if ranks < 3:
        blocks[0] = [*blocks[0], (9, 11)]
    if ranks < 2:
        blocks[0] = [*blocks[0], (3, 7)]
    held = [
        [node for lo, hi in each for node in LeafBlock(lo, hi, leaves).nodes] for each in blocks
    ]
    cover = Cover(held, leaves)
    assert not cover.missing

    def sum_of(lo, hi):
        if hi - lo == 1:
            return values[lo]
        mid = lo + (1 << (hi - lo - 1).bit_length() - 1)
        return sum_of(lo, mid) + sum_of(mid, hi)

    def body(context):
        group = context.group()
        rows = [sum_of(lo, hi) for lo, hi in cover.nodes_of(group.rank())]
        comm = Communicator(group, torch.device("cpu"))
        return sum_cover(comm, rows or [torch.empty(numel)], cover, leaves)

    whole = sum_of(0, leaves) / leaves
    for result in ThreadRanks(ranks).run(body):
        assert result.numpy().tobytes() == whole.numpy().tobytes()


def test_what_a_survivor_tells_keeps_its_bits():
    """A training loss may be any number."""
    values = [float("nan"), float("inf"), -0.0, 5e-324, 0.1 + 0.2]
    results = [(number, value, value) for number, value in enumerate(values)]
    mine = SurvivorReport([(0, 4), (4, 5)], results, [1.0], ["a"], True, LoopFlags(1.0, 0.0, 2.0))
    back = from_json(to_json(mine).encode(), SurvivorReport)
    assert back.nodes == mine.nodes
    assert back.flags == mine.flags
    for (_, loss, weight), value in zip(back.results, values, strict=True):
        assert struct.pack("dd", loss, weight) == struct.pack("dd", value, value)
