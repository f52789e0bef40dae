"""Shape mismatches: equal element counts in different shapes, and lists of unequal length."""

from datetime import timedelta

import pytest
import torch

from phalanx import native
from phalanx.errors import RankMismatch

pytestmark = pytest.mark.skipif(native.engine is None, reason="the engine was not built")

LONG = timedelta(seconds=60)
SHAPES = [(2, 3), (3, 2)]

CALLS = {
    "allreduce": lambda group, tensor: group.allreduce(tensor),
    "broadcast": lambda group, tensor: group.broadcast(tensor, root=0),
    "reduce": lambda group, tensor: group.reduce(tensor, root=0),
    "coalesced": lambda group, tensor: group.allreduce_coalesced([tensor] * tensor.shape[0]),
}


def call_with_different_shapes(ctx, call):
    group = ctx.group("shm", timeout=LONG)
    with pytest.raises(RankMismatch) as caught:
        CALLS[call](group, torch.ones(SHAPES[ctx.rank])).wait()
    assert all(f"rank {rank} called" in str(caught.value) for rank in (0, 1))


@pytest.mark.parametrize("call", list(CALLS))
def test_a_different_shape_is_a_mismatch_on_every_rank(ranks, call):
    ranks.run(call_with_different_shapes, 2, args=(call,))


def call_with_lists_of_different_lengths(ctx):
    group = ctx.group("shm", timeout=LONG)
    with pytest.raises(RankMismatch):
        group.allreduce_coalesced([torch.ones(2)] * (2 + ctx.rank)).wait()


def test_a_different_list_length_is_a_mismatch(ranks):
    ranks.run(call_with_lists_of_different_lengths, 2)


def use_other_strides(ctx):
    group = ctx.group("shm", timeout=LONG)
    tensor = torch.ones(3, 2).t().contiguous() if ctx.rank else torch.ones(2, 3)
    group.allreduce(tensor).wait()
    assert tensor.unique().tolist() == [2.0]


def test_equal_shapes_match(ranks):
    ranks.run(use_other_strides, 2)
