"""rejoin(): every rank becomes a member again."""

import os
import random
import signal
import threading
import time
from datetime import timedelta

import pytest
import torch
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
from phalanx.testing import Fault, kill

LONG = timedelta(seconds=60)
BACKENDS = ["local", "shm"]
KILLS = int(os.environ.get("PHALANX_KILLS", "6"))
# One size per transport in shared memory: slots, windows, and in place.
WAYS = {"small": (10, False), "windows": (200_000, False), "in place": (20_000, True)}


@pytest.fixture
def crew(threads, ranks):
    """The ranks for each backend: threads for `local`, processes for shared memory."""
    return {"local": threads, "shm": ranks}


def tensor_of(group, way, value):
    count, shared = WAYS[way]
    tensor = group.allocate((count,)) if shared else torch.empty(count)
    return tensor.fill_(value)


def total(group, value=1.0):
    tensor = torch.full((3,), value)
    group.allreduce(tensor).wait()
    return tensor[0].item()


# -- membership over rounds ----------------------------------------------------------------


@st.composite
def schedules(draw):
    """Draw rounds: the steps of each, and how many of them each rank makes."""
    size = draw(st.integers(2, 4))
    step = st.tuples(
        st.sampled_from(["sum", "mean", "broadcast", "barrier"]),
        st.sampled_from(list(WAYS)),
        st.integers(0, size - 1),
    )
    rounds = []
    for _ in range(draw(st.integers(1, 4))):
        steps = draw(st.lists(step, max_size=5))
        counts = st.lists(st.integers(0, len(steps)), min_size=size, max_size=size)
        leaves = st.lists(st.booleans(), min_size=size, max_size=size)
        rounds.append((steps, draw(counts), draw(leaves)))
    return size, rounds


def take_step(group, step, there):
    """Run one step, and compare the result with that of the current members."""
    operation, way, root = step
    tensor = tensor_of(group, way, float(group.rank() + 1))
    values = [rank + 1.0 for rank in there]
    if operation == "barrier":
        group.barrier().wait()
    elif operation == "broadcast":
        if root not in there:
            with pytest.raises(PeerLeft, match=f"its root, rank {root}, has left"):
                group.broadcast(tensor, root=root).wait()
            return
        group.broadcast(tensor, root=root).wait()
        assert tensor.unique().tolist() == [root + 1.0]
    elif operation == "mean":
        group.allreduce(tensor, op=ReduceOp.AVG).wait()
        torch.testing.assert_close(tensor, torch.full_like(tensor, sum(values) / len(values)))
    else:
        group.allreduce(tensor).wait()
        assert tensor.unique().tolist() == [sum(values)]


def follow(ctx, backend, rounds):
    group = ctx.group(backend, timeout=LONG)
    made = 0
    for steps, counts, leaves in rounds:
        for i in range(counts[ctx.rank]):
            take_step(group, steps[i], [r for r in range(ctx.size) if counts[r] > i])
            assert group.records()[-1].sequence == made + i + 1
        if leaves[ctx.rank]:
            group.leave()
        group.rejoin()
        made += max(counts) + 1
        last = group.records()[-1]
        assert (last.operation, last.sequence) == ("rejoin", made)
        assert "test_rejoin.py:" in last.site
        assert ctx.rank in group.members
    assert total(group) == ctx.size
    assert group.members == tuple(range(ctx.size))


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
@given(schedule=schedules())
def test_collectives_cover_exactly_the_current_members(crew, backend, schedule):
    size, rounds = schedule
    crew[backend].run(follow, size, args=(backend, rounds))


def come_back_often(ctx, backend, **options):
    group = ctx.group(backend, timeout=LONG, **options)
    for turn in range(200):
        if turn % ctx.size == ctx.rank:
            group.leave()
        group.rejoin()
        if turn % 20 == 0:
            assert total(group) == ctx.size
    assert total(group) == ctx.size


@pytest.mark.parametrize("backend", BACKENDS)
def test_many_rounds_of_leave_and_rejoin(crew, backend):
    crew[backend].run(come_back_often, 3, args=(backend,))


def test_many_rounds_with_a_driver_thread(ranks):
    ranks.run(come_back_often, 3, args=("shm",), kwargs={"driver": "thread"})


def call_after_coming_back(ctx, backend):
    group = ctx.group(backend, timeout=LONG)
    before = type(group.allreduce(torch.ones(2)))
    for _ in range(3):
        group.allreduce(torch.ones(2)).wait() if ctx.rank == 0 else group.leave()
        group.rejoin()
        assert type(group.allreduce(torch.ones(2))) is before  # by the same way, in short
    group.barrier().wait()
    with pytest.raises(RankMismatch, match=r"rank 0 called allreduce float32\[1\]"):
        group.allreduce(torch.ones(ctx.rank + 1)).wait()


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_fast_path_and_mismatch_checks_work_after_rejoin(crew, backend):
    crew[backend].run(call_after_coming_back, 2, args=(backend,))


def rejoin_with_checks(ctx):
    group = ctx.group("shm", timeout=LONG, checks=True)
    for _ in range(ctx.rank):
        group.allreduce(torch.ones(2)).wait()
    group.rejoin()
    assert total(group) == ctx.size


def test_rejoin_aligns_sequence_numbers_with_checks_enabled(ranks):
    ranks.run(rejoin_with_checks, 3)


def receive_again(ctx, backend):
    group = ctx.group(backend, timeout=LONG)
    got = torch.zeros(2)
    if ctx.rank == 0:
        group.leave()
    else:
        lost = torch.zeros(2)
        work = group.recv(lost, 0)
        for _ in range(2):
            with pytest.raises(PeerLeft, match="rank 0 has left the group"):
                work.wait()
    group.rejoin()
    if ctx.rank == 0:
        group.send(torch.ones(2), 1).wait()
    else:
        group.recv(got, 0).wait()
        assert (got.tolist(), lost.tolist()) == ([1.0, 1.0], [0.0, 0.0])
        with pytest.raises(PeerLeft, match="rank 0 has left the group"):
            work.wait()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_recv_that_failed_with_peer_left_consumes_no_later_message(crew, backend):
    crew[backend].run(receive_again, 2, args=(backend,))


# -- waiting -------------------------------------------------------------------------------


def sleep_while_others_work(ctx):
    group = ctx.group("shm", timeout=LONG)
    total(group)
    started, used = time.monotonic(), time.process_time()
    if ctx.rank != 2:
        until = ctx.store.get("until") if ctx.rank else str(time.monotonic() + 0.6)
        ctx.store.set("until", until)
        more = torch.ones(1)
        while more.item() > 0:  # until one of them has had enough
            more = torch.tensor([float(time.monotonic() < float(until))])
            group.allreduce(more, op=ReduceOp.MIN).wait()
    group.rejoin()
    if ctx.rank == 2:
        assert time.process_time() - used < 0.2 * (time.monotonic() - started)


def test_waiting_in_rejoin_uses_no_cpu_while_others_make_calls(ranks):
    ranks.run(sleep_while_others_work, 3)


def wait_in_vain(ctx, backend):
    group = ctx.group(backend, timeout=LONG)
    total(group)
    if ctx.rank == 0:
        with pytest.raises(
            CollectiveTimeout, match=r"rejoin .*rank 1 did not call rejoin"
        ) as caught:
            group.rejoin(timeout=timedelta(seconds=0.3))
        assert caught.value.ranks == (1,)
        assert caught.value.reports[1].operation == "allreduce float32[3]"
        assert "waiting" not in str(caught.value.reports[1])
        with pytest.raises(
            GroupAborted, match=r"left the group at .*Call rejoin\(\) on every rank"
        ):
            group.barrier()
        ctx.store.set("told", "")
    elif ctx.rank == 1:
        ctx.store.wait(["told"])
        assert 0 not in group.members
        assert total(group) == 1.0  # the group goes on
    group.rejoin()
    assert total(group) == ctx.size


@pytest.mark.parametrize("backend", BACKENDS)
def test_rejoin_timeout_names_the_missing_rank_and_can_be_retried(crew, backend):
    crew[backend].run(wait_in_vain, 3, args=(backend,))


def end_the_wait(ctx, backend, end):
    group = ctx.group(backend, timeout=LONG)
    total(group)
    if ctx.rank == 1:
        while group.members != (1,):
            time.sleep(0.01)
        group.abort("of a test") if end == "abort" else group.shutdown()
        return
    with pytest.raises(GroupAborted, match="of a test" if end == "abort" else "rank 1 shut the gr"):
        group.rejoin()


@pytest.mark.parametrize("end", ["abort", "shutdown"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_abort_or_shutdown_ends_a_wait_in_rejoin(crew, backend, end):
    crew[backend].run(end_the_wait, 3, args=(backend, end))


def close_while_waiting(ctx, end):
    group = ctx.group("shm", timeout=LONG)
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
    while not group._engine.missing_in_rejoin():  # until it waits
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


# -- deaths --------------------------------------------------------------------------------


def go_on_with_rounds(group):
    """Check that the two survivors can go through further rounds."""
    for _ in range(3):
        assert total(group) == 2.0
        group.rejoin()
    assert total(group) == 2.0
    assert group.members == (0, 2)


def lose_a_rank_before_it_entered(ctx):
    group = ctx.group("shm", timeout=LONG)
    for _ in range([0, 2, 1][ctx.rank]):
        total(group)
    started = time.monotonic()
    with pytest.raises(PeerLost, match="rank 1 .* is dead") as caught:
        group.rejoin()
    assert time.monotonic() - started < 10
    assert caught.value.lost == (1,)
    with pytest.raises(PeerLost, match="is dead"):
        group.rejoin()
    group.exclude(caught.value.lost)
    group.rejoin()
    go_on_with_rounds(group)


@pytest.mark.parametrize("point", ["before", "left", "waiting"])
def test_no_rank_enters_if_one_dies_before_entering(ranks, point):
    strike = Fault(f"rejoin:{point}", kill(), rank=1)
    ranks.run(lose_a_rank_before_it_entered, 3, faults=[strike])


def lose_a_rank_after_it_entered(ctx):
    group = ctx.group("shm", timeout=LONG)
    group.rejoin()
    tensor = torch.ones(3)
    work = group.allreduce(tensor)
    with pytest.raises(PeerLost) as caught:
        work.wait()
    group.exclude(caught.value.lost)
    work.wait()
    assert tensor.tolist() == [2.0] * 3
    go_on_with_rounds(group)


@pytest.mark.parametrize("point", ["entering", "after"])
def test_all_ranks_enter_if_one_dies_after_entering(ranks, point):
    strike = Fault(f"rejoin:{point}", kill(), rank=1)
    ranks.run(lose_a_rank_after_it_entered, 3, faults=[strike])


def persist(group, action):
    """Run an action, excluding ranks that die meanwhile."""
    while True:
        try:
            return action()
        except PeerLost as error:
            group.exclude(error.lost)


def go_through_rounds(ctx, counts, moment):
    group = ctx.group("shm", timeout=LONG)
    if ctx.rank == 2 and moment is not None:
        killer = threading.Timer(moment, os.kill, (os.getpid(), signal.SIGKILL))
        killer.start()
    for count in counts:
        for _ in range(count[ctx.rank]):
            work = persist(group, lambda: group.allreduce(torch.ones(3)))
            persist(group, work.wait)
        persist(group, group.rejoin)
    if ctx.rank == 2:
        killer.join()  # it has come so far, and dies in peace
    tensor = torch.ones(3)
    work = persist(group, lambda: group.allreduce(tensor))
    persist(group, work.wait)
    assert tensor.tolist() == [3.0] * 3
    assert group.members == (0, 1, 3)


def test_deaths_at_random_points_are_survived(ranks):
    seed = random.randrange(1 << 30)
    chance = random.Random(seed)
    points = ["before", "left", "waiting", "entering", "after"]
    for _ in range(KILLS):
        counts = [[chance.randint(0, 3) for _ in range(4)] for _ in range(6)]
        strike = Fault(f"rejoin:{chance.choice(points)}", kill(), rank=2, nth=chance.randint(1, 6))
        moment = chance.choice([None, chance.random() * 0.02])
        ranks.run(
            go_through_rounds,
            4,
            args=(counts, moment),
            faults=[] if moment else [strike],
            expect_dead=[2],
            name=f"{moment or strike} {counts} (seed {seed})",
        )


def die_elsewhere(ctx):
    group, other = ctx.group("shm", timeout=LONG), ctx.group("shm", timeout=LONG)
    if ctx.rank == 1:
        other.barrier()  # where it is killed, as a member that never comes
    with pytest.raises(PeerLost, match="rank 1 .* is dead"):
        group.rejoin()
    group.exclude([1])
    group.rejoin()
    assert total(group) == 2.0


def test_a_rank_that_dies_outside_rejoin_fails_the_waiting_ranks(ranks):
    ranks.run(die_elsewhere, 3, faults=[Fault("barrier:before", kill(), rank=1)])


def end_a_thread(ctx):
    group = ctx.group("local", timeout=LONG)
    total(group)
    if ctx.rank == 1:
        ctx.leave_open()
        return
    with pytest.raises(PeerLost, match="rank 1 .* is dead"):
        group.rejoin()


def test_a_thread_rank_that_ends_raises_peer_lost(threads):
    threads.run(end_a_thread, 3)
