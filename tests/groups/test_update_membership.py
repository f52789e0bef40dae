"""update_membership(): ranks leave at an agreed point, on every backend, and rejoin."""

import os
import signal
import threading
import time
import weakref
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed import ReduceOp

from phalanx.errors import (
    CollectiveTimeout,
    GroupAborted,
    InvalidState,
    PeerLeft,
    PeerLost,
    RankMismatch,
)
from phalanx.groups import new_group
from phalanx.testing import Fault, kill, stop

from .internals import _membership

LONG = timedelta(seconds=60)
BACKENDS = ["local", "shm", "gloo"]


@pytest.fixture
def crew(threads, ranks):
    """The ranks for each backend: threads for `local`, processes for the others."""
    return {"local": threads, "shm": ranks, "gloo": ranks}


def total(group, value=1.0):
    tensor = torch.full((3,), value)
    group.allreduce(tensor).wait()
    return tensor[0].item()


# -- remaining members ---------------------------------------------------------------------


def go_one_by_one(ctx, backend, order):
    group = ctx.group(backend, timeout=LONG)
    assert group.can_leave_alone == (backend != "gloo")
    everybody = there = tuple(range(ctx.size))
    assert group.update_membership() == there
    assert total(group, 2.0**ctx.rank) == 2**ctx.size - 1
    for leavers in order:
        there = tuple(rank for rank in there if rank not in leavers)
        assert group.update_membership(ctx.rank not in leavers) == there
        if ctx.rank in leavers:
            break
        assert group.members == there
        assert total(group, 2.0**ctx.rank) == sum(2**rank for rank in there)
        mean = torch.tensor([float(ctx.rank)])
        group.allreduce(mean, op=ReduceOp.AVG).wait()
        assert mean.item() == pytest.approx(sum(there) / len(there))
    group.rejoin()
    assert group.members == everybody
    assert total(group, 2.0**ctx.rank) == 2**ctx.size - 1


ORDERS = {
    2: [[{0}, {1}], [{1}], [{0, 1}]],
    4: [[{2}, {0}, {3}], [{0, 3}, {1}], [{0, 1, 2}], [{3}, {0, 1, 2}]],
}


@pytest.mark.parametrize(("size", "order"), [(n, o) for n in ORDERS for o in ORDERS[n]], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_remaining_ranks_continue_after_others_leave(crew, backend, size, order):
    crew[backend].run(go_one_by_one, size, args=(backend, order))


@st.composite
def schedules(draw):
    """Draw rounds: the number of steps that each rank makes in each round."""
    size = draw(st.integers(2, 4))
    counts = st.lists(st.integers(0, 3), min_size=size, max_size=size)
    return size, draw(st.lists(counts, min_size=1, max_size=5))


def follow(ctx, backend, rounds):
    group = ctx.group(backend, timeout=LONG)
    made = 0
    for counts in rounds:
        for step in range(max(counts) + 1):
            there = tuple(rank for rank in range(ctx.size) if counts[rank] > step)
            assert group.update_membership(ctx.rank in there) == there
            if ctx.rank not in there:
                break
            assert total(group, 2.0**ctx.rank) == sum(2**rank for rank in there)
            assert group.records()[-1].sequence == made + 2 * step + 2
        group.rejoin()
        made += 2 * max(counts) + 2
        last = group.records()[-1]
        assert (last.operation, last.sequence) == ("rejoin", made)
        assert "test_update_membership.py:" in last.site
    assert total(group) == ctx.size


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))
@given(schedule=schedules())
def test_collectives_cover_exactly_the_current_members(crew, backend, schedule):
    size, rounds = schedule
    crew[backend].run(follow, size, args=(backend, rounds))


def plan_departures(ctx):
    group = new_group("fake", rank=1, world_size=4)
    assert group.update_membership() == (0, 1, 2, 3)
    assert group.update_membership(stays=False) == ()
    with pytest.raises(GroupAborted, match="this rank left the group at"):
        group.barrier()
    group.rejoin()
    assert group.members == (0, 1, 2, 3)
    group.barrier().wait()


def test_fake_ranks_follow_the_choice_of_this_rank(threads):
    threads.run(plan_departures, 1)


# -- cost and cleanup ----------------------------------------------------------------------


def stay_together(ctx):
    group = ctx.group("gloo", timeout=LONG)
    group.barrier().wait()
    engine, keys = group._engine, set(group.get_group_store().list_keys())
    group.update_membership()
    assert group._engine is engine
    assert set(group.get_group_store().list_keys()) == keys
    call = group.records()[-1]
    assert (call.operation, call.shape, call.dtype) == ("update_membership", (1,), "uint8")
    total(group)


def test_update_membership_is_one_small_collective_if_all_stay(ranks):
    ranks.run(stay_together, 3)


def come_and_go(ctx):
    group = ctx.group("gloo", timeout=LONG)
    keys, opened = [], []
    for turn in range(12):
        # Different ranks leave each time, and later the same ranks each time.
        leavers = {turn % 4, (turn + 1) % 4} if turn < 8 else {2, 3}
        group.update_membership(ctx.rank not in leavers)
        group.rejoin()
        keys.append(len(group.get_group_store().list_keys()))
        opened.append(len(os.listdir("/proc/self/fd")))
    assert opened[7] == opened[3]  # that of two departures, which have come again
    assert max(opened[9:]) <= max(opened[:8])
    group.barrier().wait()
    assert max(keys[8:]) <= max(keys[:8]) + 8  # a result for each departure, and no more
    left = [key for key in group.get_group_store().list_keys() if " left" in key]
    assert sum(key.endswith("/result") for key in left) >= 4, "a late rank may look for one"
    kept = [weakref.ref(kept.engine) for kept in group._membership.kept_engines.values()]
    assert len(kept) == (1 if ctx.rank < 2 else 0)
    group.shutdown()
    assert not any(engine() for engine in kept)


def test_engines_of_subsets_are_reused_and_closed_on_shutdown(ranks):
    ranks.run(come_and_go, 4)


def use_the_same_engine(ctx):
    group = ctx.group("gloo", timeout=LONG)
    made = set()
    for _ in range(3):
        if group.update_membership(ctx.rank != 2) and ctx.rank != 2:
            made.add(id(group._membership.kept_engines[0, 1].engine))
        group.rejoin()
    assert len(made) == (ctx.rank != 2)


def test_the_same_departure_every_round_creates_one_engine(ranks):
    ranks.run(use_the_same_engine, 3)


def keep_nothing(ctx):
    group = ctx.group("gloo", timeout=LONG)
    usual, _membership.MAX_KEPT_DEPARTURES = _membership.MAX_KEPT_DEPARTURES, 0
    try:
        for left in (3, 2, 1):
            group.update_membership(ctx.rank < left)
            if ctx.rank >= left:
                break
            assert total(group) == left
        if ctx.rank == 0:  # the one before the last is not, for others may be at its last call
            assert sorted(map(len, group._membership.kept_engines)) == [1, 2]
        group.rejoin()
        assert not group._membership.kept_engines
    finally:
        _membership.MAX_KEPT_DEPARTURES = usual
    assert total(group) == 4.0


def test_engines_of_earlier_departures_are_closed_after_rejoin(ranks):
    ranks.run(keep_nothing, 4)


def shut_down_narrowed(ctx):
    group = ctx.group("gloo", timeout=LONG)
    group.update_membership(ctx.rank != 1)
    if ctx.rank == 1:
        group.shutdown()
        return
    assert total(group) == 2.0  # whatever becomes of who has left
    engine = weakref.ref(group._membership.kept_engines[0, 2].engine)
    group.shutdown()
    assert engine() is None
    with pytest.raises(GroupAborted, match="this rank shut the group down"):
        group.update_membership()


def test_shutdown_after_a_departure_closes_all_engines(ranks):
    ranks.run(shut_down_narrowed, 3)


def rejoin_and_close(ctx):
    group = ctx.group("gloo", timeout=LONG)
    group.rejoin()
    barrier = weakref.ref(group._membership._barrier)
    group.shutdown()
    assert barrier() is None


def test_shutdown_closes_the_connection_of_the_rejoin_barrier(ranks):
    ranks.run(rejoin_and_close, 2)


# -- other operations ----------------------------------------------------------------------


def use_the_rest(ctx, backend):
    group = ctx.group(backend, timeout=LONG)
    got = torch.zeros(2)
    if ctx.rank == 2:  # begun before the departure, and met after it
        early = group.recv(got, 3)
    if group.update_membership(ctx.rank != 0) == () or ctx.rank == 0:
        group.rejoin()
        group.barrier().wait()
        return
    if ctx.rank == 3:
        group.send(torch.full((2,), 3.0), 2).wait()
        group.send(torch.full((2,), 4.0), 2, tag=1).wait()
    elif ctx.rank == 2:
        early.wait()
        assert got.tolist() == [3.0, 3.0]
        work = group.recv_anysource(got, tag=1)
        work.wait()
        assert (got.tolist(), work.source_rank()) == ([4.0, 4.0], 3)
    tensor = torch.ones(2)
    dist.all_reduce(tensor, group=group)
    assert tensor.tolist() == [3.0, 3.0]
    pair = group.split_group([1, 3])
    if pair is not None:
        assert total(ctx.closing(pair)) == 2.0
        assert pair.global_ranks == (1, 3)
    for call in (group.broadcast, group.reduce):
        with pytest.raises(PeerLeft, match="its root, rank 0, has left the group"):
            call(tensor, root=0).wait()
    group.set_timeout(timedelta(seconds=30))
    assert total(group) == 3.0
    group.rejoin()
    group.barrier().wait()


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_transfers_splits_and_torch_functions_work_after_a_departure(ranks, backend):
    ranks.run(use_the_rest, 4, args=(backend,))


def call_alone(ctx):
    group = ctx.group("gloo", timeout=LONG, checks=True)
    if group.update_membership(ctx.rank == 1) != (1,) or ctx.rank == 0:
        return
    mine = torch.tensor([3, 5])
    for op in (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.MAX):
        group.allreduce(mine, op=op).wait()
    group.reduce(mine, root=1).wait()
    group.broadcast(mine, root=1).wait()
    group.barrier().wait()
    assert mine.tolist() == [3, 5]
    rows = [torch.zeros(2, dtype=torch.int64) for _ in range(2)]
    for fill in (
        lambda: group.allgather([rows], [mine]),
        lambda: group.gather([rows], [mine], root=1),
        lambda: group.alltoall(rows, [torch.zeros_like(mine), mine]),
    ):
        rows[1].zero_()
        fill().get_future().wait()
        assert [row.tolist() for row in rows] == [[0, 0], [3, 5]]
    part = torch.zeros(2)
    group.reduce_scatter_single(part, torch.arange(4.0), op=ReduceOp.AVG).wait()
    assert part.tolist() == [2.0, 3.0]
    group.scatter(part, [torch.zeros(2), torch.ones(2)], root=1).wait()
    assert part.tolist() == [1.0, 1.0]
    sparse = torch.tensor([0.0, 2.0]).to_sparse()
    group.allreduce(sparse).wait()
    assert sparse.to_dense().tolist() == [0.0, 2.0]
    for call in (lambda: group.recv(part, 0), lambda: group.gather([], [part], root=0)):
        with pytest.raises(PeerLeft, match="rank 0, has left|rank 0 has left"):
            call().wait()
    assert group.update_membership() == (1,)


def test_every_collective_works_on_the_last_member(ranks):
    ranks.run(call_alone, 2)


def settle_first(ctx, backend):
    group = ctx.group(backend, timeout=LONG)
    tensor = torch.ones(200_000)
    work = group.allreduce(tensor)
    group.update_membership(ctx.rank != 0)
    if ctx.rank == 0:
        assert tensor.unique().tolist() == [2.0]
    work.wait()
    assert tensor.unique().tolist() == [2.0]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_leaving_rank_waits_for_its_calls_in_flight(crew, backend):
    crew[backend].run(settle_first, 2, args=(backend,))


def disagree(ctx):
    group = ctx.group("gloo", timeout=LONG, checks=True)
    group.update_membership(ctx.rank != 3)
    if ctx.rank == 3:
        with pytest.raises(RankMismatch, match="rank 2 called barrier"):
            group.rejoin()
        return
    with pytest.raises(RankMismatch, match=r"rank 2 called barrier") as caught:
        group.barrier() if ctx.rank == 2 else group.update_membership(False)
    assert 2 in caught.value.ranks


def test_mismatched_calls_after_a_departure_raise_on_every_rank(ranks):
    ranks.run(disagree, 4)


# -- waiting -------------------------------------------------------------------------------


def sleep_while_others_work(ctx, backend):
    group = ctx.group(backend, timeout=LONG)
    total(group)
    group.update_membership(ctx.rank != 2)
    started, used = time.monotonic(), time.process_time()
    if ctx.rank != 2:
        more = torch.ones(1)
        while more.item() > 0:
            more = torch.tensor([float(time.monotonic() - started < 0.6)])
            group.allreduce(more, op=ReduceOp.MIN).wait()
    group.rejoin()
    if ctx.rank == 2:
        assert time.process_time() - used < 0.2 * (time.monotonic() - started)


def test_waiting_in_rejoin_uses_no_cpu_while_others_make_calls(ranks):
    ranks.run(sleep_while_others_work, 3, args=("gloo",))


def wait_for_a_rank_that_makes_progress(ctx, backend, size):
    """A rank may wait longer than its timeout as long as the members make progress."""
    group = ctx.group(backend, timeout=LONG)
    there = group.update_membership(ctx.rank < size)
    if ctx.rank < size:
        started = time.monotonic()
        more = torch.ones(1)
        while more.item() > 0:
            more = torch.tensor([float(time.monotonic() - started < 1.8)])
            group.allreduce(more, op=ReduceOp.MIN).wait()
            time.sleep(0.05)
    else:
        assert there == tuple(range(size))
    group.rejoin(timeout=timedelta(seconds=0.8))
    assert total(group) == ctx.size


@pytest.mark.parametrize(("backend", "size"), [("shm", 2), ("gloo", 1)])
def test_the_rejoin_deadline_restarts_with_the_progress_of_members(crew, backend, size):
    crew[backend].run(wait_for_a_rank_that_makes_progress, 3, args=(backend, size))


def wait_in_vain(ctx, backend):
    group = ctx.group(backend, timeout=LONG)
    group.update_membership(ctx.rank == 1)
    if ctx.rank == 0:
        with pytest.raises(
            CollectiveTimeout, match="rank 1 did not call rejoin.., and made no"
        ) as caught:
            group.rejoin(timeout=timedelta(seconds=0.3))
        assert caught.value.missing == (1,)
        assert caught.value.reports[1].operation == "allreduce float32[3]"
        assert "test_update_membership.py" in caught.value.reports[1].site
        ctx.store.set("told", "")
    elif ctx.rank == 1:
        assert total(group) == 1.0
        ctx.store.wait(["told"])
        assert total(group) == 1.0  # the group goes on
    group.rejoin()
    assert total(group) == ctx.size


@pytest.mark.parametrize("backend", BACKENDS)
def test_rejoin_timeout_names_the_missing_rank_and_can_be_retried(crew, backend):
    crew[backend].run(wait_in_vain, 3, args=(backend,))


def come_back_at_different_points(ctx):
    group = ctx.group("gloo", timeout=LONG)
    group.set_timeout(timedelta(seconds=0.4))
    with pytest.raises(RankMismatch, match="rank 0 called rejoin.* rank 1 called allreduce"):
        group.rejoin(LONG) if ctx.rank == 0 else total(group)


def test_a_collective_instead_of_rejoin_is_a_mismatch_on_both_ranks(ranks):
    ranks.run(come_back_at_different_points, 2)


def close_while_waiting(ctx, end):
    group = ctx.group("gloo", timeout=LONG)
    group.update_membership(ctx.rank == 1)
    if ctx.rank == 1:
        ctx.store.wait(["closed"])
        return
    waiter_error = []

    def wait():
        try:
            group.rejoin()
        except GroupAborted as error:
            waiter_error.append(error)

    waiter = threading.Thread(target=wait)
    waiter.start()
    while not group._membership.is_rejoining:
        time.sleep(0.001)
    with pytest.raises(InvalidState, match="another thread of this rank is already in rejoin"):
        group.rejoin()
    getattr(group, end)()
    waiter.join(10)
    assert ("aborted" if end == "abort" else "this rank shut the group down") in str(
        waiter_error[0]
    )
    ctx.store.set("closed", "")


@pytest.mark.parametrize("end", ["abort", "shutdown"])
def test_closing_the_group_ends_rejoin_in_another_thread(ranks, end):
    ranks.run(close_while_waiting, 2, args=(end,))


# -- faults --------------------------------------------------------------------------------


def end_the_wait(ctx, end):
    group = ctx.group("gloo", timeout=LONG)
    group.update_membership(ctx.rank in (1, 2))
    if ctx.rank == 1:
        total(group)
        group.abort("of a test") if end == "abort" else group.shutdown()
        return
    if ctx.rank == 2:
        total(group)
        with pytest.raises(GroupAborted):
            group.barrier().wait()
    started = time.monotonic()
    with pytest.raises(GroupAborted, match="of a test" if end == "abort" else "rank 1 shut the gr"):
        group.rejoin()
    assert time.monotonic() - started < 20
    assert isinstance(group.failure(), GroupAborted) or end == "shutdown"


@pytest.mark.parametrize("end", ["abort", "shutdown"])
def test_abort_or_shutdown_reaches_ranks_waiting_in_rejoin(ranks, end):
    ranks.run(end_the_wait, 4, args=(end,))


def lose_a_member(ctx, backend):
    group = ctx.group(backend, timeout=LONG)
    started = time.monotonic()
    group.update_membership(ctx.rank != 0)
    if ctx.rank == 0:
        with pytest.raises(PeerLost, match="rank 2 .* is dead") as caught:
            group.rejoin()
    else:
        total(group)
        if ctx.rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(PeerLost, match="rank 2 .* is dead") as caught:
            total(group)
    assert caught.value.lost == (2,)
    assert isinstance(group.failure(), PeerLost)
    assert time.monotonic() - started < 30
    if ctx.size == 4:
        rest = group.split_group([0, 1, 3])
        assert total(ctx.closing(rest)) == 3.0


@pytest.mark.parametrize("size", [3, 4])
@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_the_death_of_a_member_reaches_members_and_waiting_ranks(ranks, backend, size):
    ranks.run(lose_a_member, size, args=(backend,), expect_dead=[2])


def lose_a_reconnecting_rank(ctx):
    group = ctx.group("gloo", timeout=LONG)
    if ctx.rank == 0:
        group.update_membership(False)
        with pytest.raises(PeerLost, match="rank 2 .* is dead"):
            group.rejoin()
        return
    with pytest.raises(PeerLost, match="rank 2 .* is dead") as caught:
        group.update_membership()
    assert caught.value.lost == (2,)


def test_a_death_while_reconnecting_is_named_by_group_rank(ranks):
    strike = Fault("form:requested", kill(), rank=2, nth=2)
    ranks.run(lose_a_reconnecting_rank, 4, faults=[strike])


def stop_a_reconnecting_rank(ctx):
    group = ctx.group("gloo", timeout=LONG)
    group.set_timeout(timedelta(seconds=0.5))
    with pytest.raises(
        CollectiveTimeout, match="could not connect ranks 1-3, which stay: "
    ) as caught:
        group.rejoin(LONG) if 0 not in group.update_membership(ctx.rank != 0) else None
    assert caught.value.ranks == (2,)
    if ctx.rank:
        assert "rank 2: stopped by a signal" in str(caught.value)
    assert isinstance(group.failure(), CollectiveTimeout)


def test_reconnecting_uses_the_group_timeout(ranks):
    ranks.run(stop_a_reconnecting_rank, 4, faults=[Fault("form:requested", stop(), rank=2, nth=2)])


def lose_a_rank_that_left(ctx):
    group, other = ctx.group("gloo", timeout=LONG), ctx.group("gloo", timeout=LONG)
    group.update_membership(ctx.rank != 2)
    if ctx.rank == 2:
        other.barrier()  # where it is killed
    until = time.monotonic() + 20
    while 2 not in group._detector.dead_ranks():
        assert time.monotonic() < until
        time.sleep(0.01)
    assert total(group) == 3.0  # a rank that left may die
    if ctx.rank == 0:
        group.send(torch.ones(2), 3).wait()
    if ctx.rank == 3:
        group.recv_anysource(torch.ones(2)).wait()
    assert total(group) == 3.0
    with pytest.raises(PeerLost, match="rank 2 .* is dead"):
        group.rejoin()


def test_the_death_of_a_rank_that_left_is_reported_by_rejoin_only(ranks):
    ranks.run(lose_a_rank_that_left, 4, faults=[Fault("barrier:before", kill(), rank=2)])


def lose_a_rejoining_rank(ctx):
    group = ctx.group("gloo", timeout=LONG)
    group.update_membership(ctx.rank != 1)
    with pytest.raises(PeerLost, match="rank 1 .* is dead"):
        group.rejoin()
        total(group)


@pytest.mark.parametrize("point", ["before", "waiting", "after"])
def test_a_death_during_rejoin_raises_on_every_rank(ranks, point):
    ranks.run(lose_a_rejoining_rank, 3, faults=[Fault(f"rejoin:{point}", kill(), rank=1)])
