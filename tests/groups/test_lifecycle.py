"""Splitting and merging groups, the current group of a thread, and shutdown."""

import gc
import threading
import weakref
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from phalanx.errors import GroupAborted, InvalidArgument, RendezvousTimeout
from phalanx.groups import current_process_group, new_group, process_group
from phalanx.testing import over_groups


def total(group):
    tensor = torch.tensor([float(group.rank() + 1)])
    group.allreduce(tensor).wait()
    return tensor.item()


# -- splitting -----------------------------------------------------------------------------


@over_groups(sizes=(4,), split=True)
def test_a_split_numbers_its_ranks_in_the_order_given(group, ctx):
    order = list(reversed(range(group.size())))
    turned = ctx.closing(group.split_group(order))
    assert turned.rank() == group.size() - 1 - group.rank()
    assert turned.global_ranks == tuple(reversed(group.global_ranks))
    assert total(turned) == sum(range(1, group.size() + 1))


@over_groups(sizes=(3,))
def test_only_members_need_to_call_split_group(group, ctx):
    if group.rank() != 1:
        pair = ctx.closing(group.split_group([0, 2]))
        assert total(pair) == 3
        again = ctx.closing(group.split_group([0, 2]))
        assert total(again) == 3
    assert total(group) == 6


@over_groups(sizes=(3,))
def test_split_group_returns_none_on_nonmembers(group, ctx):
    half = group.split_group([1])
    assert (half is None) == (group.rank() != 1)
    if half is not None:
        assert total(ctx.closing(half)) == 1


@over_groups(sizes=(4,))
def test_splits_nest_and_use_local_ranks(group, ctx):
    if group.rank() in (1, 2, 3):
        three = ctx.closing(group.split_group([3, 2, 1]))
        if three.rank() in (0, 2):
            pair = ctx.closing(three.split_group([2, 0]))
            assert pair.global_ranks == (1, 3)
            assert total(pair) == 3


@over_groups(sizes=(4,))
def test_every_pair_of_ranks_can_split_concurrently(group, ctx):
    for left in range(4):
        for right in range(left + 1, 4):
            if group.rank() in (left, right):
                pair = group.split_group([left, right], group_name=f"{left}+{right}")
                assert total(pair) == 3
                pair.shutdown()


def name_splits_alike(ctx):
    first, second = ctx.group("gloo"), ctx.group("gloo")
    parts = [
        ctx.closing(parent.split_group([0, 1], group_name="x", group_desc=desc))
        for parent, desc in ((first, "mine"), (second, None))
    ]
    assert [part.group_name for part in parts] == ["x", "x~1"]
    assert [part.group_desc for part in parts] == ["mine", "gloo group of 2"]
    assert len({part.label for part in parts}) == 2
    assert [total(part) for part in parts] == [3, 3]
    stores = [part.get_group_store() for part in parts]
    stores[0].set(f"of the first, by {ctx.rank}", "")
    assert not stores[1].check([f"of the first, by {ctx.rank}"]), "keys stay apart"


def test_a_split_uses_the_given_name_and_description(ranks):
    """As upstream; a name that is taken gets a suffix, since names are unique in torch."""
    ranks.run(name_splits_alike, 2)


def name_where_it_is_taken(ctx):
    world = ctx.group("gloo")
    alone = world.split_group([1], group_name="tp")  # None on rank 0
    first, second = (world.split_group([0, 1], group_name="tp") for _ in range(2))
    if ctx.rank == 0:
        first.shutdown()
    third = world.split_group([0, 1], group_name="tp")
    names = [group.group_name for group in (first, second, third)]
    assert [total(group) for group in (second, third)] == [3, 3]
    for group in (alone, first, second, third):
        if group is not None:
            group.shutdown()
    again = ctx.closing(world.split_group([0, 1], group_name="tp"))
    return [*names, again.group_name]


def test_group_name_is_equal_on_all_ranks_even_if_taken_on_some(ranks):
    """Each rank used to take its own first free name, which broke functional collectives."""
    names = ranks.run(name_where_it_is_taken, 2)
    assert names == [["tp~1", "tp~2", "tp~3", "tp"]] * 2


def test_a_merged_group_uses_the_given_name_and_description(tmp_path):
    group = new_group("gloo", store=f"file://{tmp_path}/a", rank=0, world_size=1)
    store = dist.FileStore(f"{tmp_path}/b", 1)
    merged = group.merge_remote_group(store, 1, group_name="m", group_desc="all")
    assert (merged.group_name, merged.group_desc) == ("m", "all")
    merged.shutdown()
    group.shutdown()


@pytest.mark.parametrize("ranks_given", [[], [0, 0], [2], [-1, 0], ["0"]])
def test_split_group_rejects_invalid_rank_lists(ranks_given):
    group = new_group("fake", rank=0, world_size=2)
    with pytest.raises(InvalidArgument, match="rank"):
        group.split_group(ranks_given)


def test_a_split_inherits_backend_and_timeout():
    group = new_group("fake", timedelta(seconds=7), rank=3, world_size=8)
    odd = group.split_group([1, 3, 5, 7])
    assert (odd.backend, odd.timeout, odd.rank()) == ("fake", timedelta(seconds=7), 1)
    assert group.split_group([3], timeout=timedelta(seconds=2)).timeout == timedelta(seconds=2)


# -- merging -------------------------------------------------------------------------------


def merge_halves(ctx):
    world = ctx.group()
    half = [0, 2] if ctx.rank % 2 == 0 else [1, 3]
    mine = ctx.closing(world.split_group(half))
    meeting = dist.PrefixStore("bridge", ctx.store)
    whole = ctx.closing(mine.merge_remote_group(meeting, 4, timedelta(seconds=10)))
    assert whole.global_ranks == (0, 2, 1, 3)
    assert whole.rank() == [0, 2, 1, 3][ctx.rank]
    assert total(whole) == 10
    assert total(mine) == 3  # it goes on beside the new one


def test_groups_merge_into_one(threads, ranks):
    threads.run(merge_halves, 4)
    ranks.run(merge_halves, 4)


def merge_with_nobody(ctx):
    group = ctx.group()
    meeting = dist.PrefixStore("bridge", ctx.store)
    with pytest.raises(RendezvousTimeout, match="2 of 3 ranks joined"):
        group.merge_remote_group(meeting, 3, timedelta(seconds=1))


def test_a_merge_times_out_if_the_other_group_does_not_join(threads):
    threads.run(merge_with_nobody, 2)


def merge_too_many(ctx):
    world = ctx.group()
    mine = ctx.closing(world.split_group([ctx.rank]))
    with pytest.raises(InvalidArgument, match="size is 1"):
        world.merge_remote_group(dist.PrefixStore("bridge", ctx.store), 1, timedelta(seconds=1))
    assert total(mine) == 1


def test_a_merge_size_smaller_than_the_group_is_rejected(threads):
    threads.run(merge_too_many, 2)


# -- the current group ---------------------------------------------------------------------


def test_the_current_group_nests_and_is_restored():
    outer, inner = (new_group("fake", rank=0, world_size=2) for _ in range(2))
    assert current_process_group() is None
    with process_group(outer):
        assert current_process_group() is outer
        with pytest.raises(KeyError), process_group(inner):
            assert current_process_group() is inner
            raise KeyError
        assert current_process_group() is outer
    assert current_process_group() is None


def test_the_current_group_is_thread_local():
    group = new_group("fake", rank=0, world_size=2)
    seen = []
    with process_group(group):
        other = threading.Thread(target=lambda: seen.append(current_process_group()))
        other.start()
        other.join()
    assert seen == [None]


# -- shutdown and abort --------------------------------------------------------------------


def test_a_group_is_garbage_collected_after_shutdown():
    group = new_group("fake", rank=0, world_size=2)
    seen = weakref.ref(group)
    group.shutdown()
    del group
    gc.collect()
    assert seen() is None


def test_group_names_are_unique_in_torch():
    groups = [new_group("fake", rank=0, world_size=2, name="twin") for _ in range(3)]
    assert {group.label for group in groups} == {"twin"}
    assert len({group.group_name for group in groups}) == 3
    for group in groups:
        assert torch._C._distributed_c10d._resolve_process_group(group.group_name) is group
        group.shutdown()


def test_repr_shows_name_rank_size_and_backend():
    group = new_group("fake", rank=3, world_size=100_000, name="planet")
    assert repr(group) == "<ProcessGroup 'planet': rank 3 of 100000 on fake>"
    assert isinstance(group, dist.ProcessGroup)
    assert (group.rank(), group.size(), group.name()) == (3, 100_000, "fake")
    group.shutdown()
    assert "shut the group down" in repr(group)


@over_groups(backends=("local", "shm", "gloo"), sizes=(2,), timeout=20)
def test_the_abort_reason_is_reported_on_every_rank(group):
    assert group.failure() is None
    group.barrier().wait()
    if group.rank() == 1:
        group.abort("it rained")
    else:
        with pytest.raises(GroupAborted, match=r"rank 1 aborted .* because it rained"):
            group.barrier().wait()
    assert "because it rained" in str(group.failure())
