"""Tensors shared by all ranks: the same bytes, freed when the last rank drops them."""

import gc
import os
from datetime import timedelta

import pytest
import torch

from phalanx import native
from phalanx.errors import InvalidState, PeerLost
from phalanx.testing import Fault, kill, over_groups

pytestmark = pytest.mark.skipif(native.engine is None, reason="the engine was not built")
shared = over_groups(backends=("shm",), sizes=(1, 2, 4), reuse=True)


def held(group):
    """Return how many shared blocks of this rank's slab are still in use."""
    gc.collect()
    group.barrier().wait()
    group.allocate((1,))
    return len(group._engine._slab._shared)


@shared
def test_a_shared_tensor_has_the_same_bytes_on_all_ranks(group):
    before = held(group)
    tensors = [group._allocate_shared(100 + owner, owner=owner) for owner in range(group.size())]
    for owner, tensor in enumerate(tensors):
        assert tensor.shape == (100 + owner,)
        tensor[group.rank()] = 10 * owner + group.rank()  # each rank its own byte of everybody's
    group.barrier().wait()
    for owner, tensor in enumerate(tensors):
        assert tensor[: group.size()].tolist() == [10 * owner + r for r in range(group.size())]
    group.barrier().wait()
    assert held(group) == before + 1
    del tensors, tensor
    assert held(group) == before


@shared
def test_memory_is_kept_while_any_rank_holds_a_view(group):
    before, last = held(group), group.size() - 1
    tensor = group._allocate_shared(5000, owner=0)
    view = tensor.view(torch.float32)[7:9] if group.rank() == last else None
    if view is not None:
        view.fill_(3.0)
    del tensor
    assert held(group) == before + (group.rank() == 0)
    other = group._allocate_shared(5000, owner=0).zero_()  # elsewhere
    group.barrier().wait()
    assert view is None or view.tolist() == [3.0, 3.0]
    del view, other
    assert held(group) == before


@shared
def test_every_rank_raises_when_there_is_no_room(group):
    with pytest.raises(InvalidState, match="no room|no shared memory"):
        group._allocate_shared(1 << 40, owner=group.size() - 1)


@over_groups(backends=("local",), sizes=(2,))
def test_groups_without_shared_memory_reject_shared_tensors(group):
    with pytest.raises(InvalidState, match="does not share memory"):
        group._allocate_shared(8, owner=0)


@over_groups(backends=("shm",), sizes=(2,), reuse=True)
def test_a_forked_child_does_not_free_shared_tensors(group):
    before = held(group)
    tensor = group._allocate_shared(8, owner=0)
    child = os.fork()
    if child == 0:
        del tensor
        gc.collect()
        os._exit(0)
    os.waitpid(child, 0)
    assert held(group) == before + (group.rank() == 0)
    del tensor
    assert held(group) == before


def outlive_a_holder(ctx):
    group = ctx.group("shm", timeout=timedelta(seconds=60))
    tensor = group._allocate_shared(8, owner=0)
    with pytest.raises(PeerLost) as caught:
        group.barrier().wait()
    group.exclude(caught.value.lost)
    assert len(group._engine._slab._shared) == 1
    del tensor
    group.allocate((1,))
    assert not group._engine._slab._shared


def test_dead_ranks_do_not_keep_shared_tensors_alive(ranks):
    ranks.run(outlive_a_holder, 2, faults=[Fault("barrier:before", kill(), rank=1)])
