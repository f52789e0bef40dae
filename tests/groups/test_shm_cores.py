"""The number of cores that the ranks share, which decides how they wait."""

import os

import pytest

from phalanx import native

from .internals import share_region, shared_core_count

pytestmark = pytest.mark.skipif(native.engine is None, reason="the engine was not built")


def keep_to_one_core(ctx, choose):
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[choose[ctx.rank]]})
    try:
        return share_region(ctx.store, ctx.rank, ctx.size).cores
    finally:
        os.sched_setaffinity(0, cores)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
@pytest.mark.parametrize(("choose", "between_them"), [((0, 1), 2), ((1, 1), 1)])
def test_shared_core_count_follows_the_affinity_of_the_ranks(ranks, choose, between_them):
    assert ranks.run(keep_to_one_core, 2, args=(choose,)) == [between_them] * 2


def split_with_one_core(ctx, choose):
    cores = sorted(os.sched_getaffinity(0))
    group = ctx.group("shm")
    os.sched_setaffinity(0, {cores[choose[ctx.rank]]})
    try:
        found = ctx.closing(group.split_group([1, 0]))._engine._native.cores
        group.barrier().wait()  # who is done early must not be seen with all cores again
        return found
    finally:
        os.sched_setaffinity(0, cores)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
@pytest.mark.parametrize(("choose", "between_them"), [((0, 1), 2), ((1, 1), 1)])
def test_a_split_recounts_cores_from_the_current_affinity(ranks, choose, between_them):
    assert ranks.run(split_with_one_core, 2, args=(choose,)) == [between_them] * 2


@pytest.mark.parametrize(
    ("limits", "count"),
    [
        ([([0], 8), ([1], 8)], 2),
        ([([0, 1, 2], 8), ([1, 2, 3], 8)], 4),
        ([([0, 1, 2], 2), ([1, 2, 3], 8)], 2),  # a quota of two
    ],
)
def test_core_count_is_the_union_limited_by_the_smallest_quota(limits, count):
    assert shared_core_count(limits) == count
