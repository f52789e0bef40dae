"""leave() and exclude(): a group continues without ranks that left or died."""

import atexit
import os
import threading
import time
from datetime import timedelta
from functools import partial

import pytest
import torch
from torch.distributed import ReduceOp

from phalanx.errors import (
    GroupAborted,
    InvalidArgument,
    InvalidState,
    PeerLeft,
    PeerLost,
    RankMismatch,
)
from phalanx.testing import Fault, kill

from .internals import _issuer

LONG = timedelta(seconds=60)
ALONE = ["local", "shm"]  # where a rank may leave by itself
BACKENDS = [*ALONE, "gloo"]
# One size per transport in shared memory: slots, windows, and in place.
WAYS = {"small": (10, False), "windows": (700_000, False), "in place": (50_000, True)}


@pytest.fixture
def crew(request, threads, ranks):
    """The ranks for each backend: threads for `local`, processes for the others."""
    return {"local": threads, "shm": ranks, "gloo": ranks}


def tensor_of(group, way, value):
    count, shared = WAYS[way]
    tensor = group.allocate((count,)) if shared else torch.empty(count)
    return tensor.fill_(value)


def has_left(group, *leavers):
    """Have ranks leave, alone or in update_membership(); returns whether this one did."""
    leaves = group.rank() in leavers
    if not group.can_leave_alone:
        group.update_membership(not leaves)
    elif leaves:
        group.leave()
    return leaves


def wait_for_death(group, rank):
    until = time.monotonic() + 20
    while rank not in group._engine.dead_ranks():
        assert time.monotonic() < until
        time.sleep(0.01)


# -- leaving -------------------------------------------------------------------------------


def leave_one_by_one(ctx, backend, way):
    group = ctx.group(backend, timeout=LONG)
    for leaver in (2, 0, 3):
        tensor = tensor_of(group, way, ctx.rank + 1)
        left = {2: (), 0: (2,), 3: (0, 2)}[leaver]
        rest = [rank for rank in range(4) if rank not in left]
        group.allreduce(tensor).wait()
        assert tensor.unique().tolist() == [sum(rank + 1 for rank in rest)]
        assert not set(left) & set(group.members)
        if has_left(group, leaver):
            return
    tensor = tensor_of(group, way, 7)
    group.allreduce(tensor).wait()
    assert tensor.unique().tolist() == [7.0]
    assert group.members == (1,)
    assert group.size() == 4


@pytest.mark.parametrize(
    ("backend", "way"), [*((backend, way) for backend in ALONE for way in WAYS), ("gloo", "small")]
)
def test_remaining_ranks_continue_when_ranks_leave(crew, backend, way):
    crew[backend].run(leave_one_by_one, 4, args=(backend, way))


def call_everything_among_the_rest(ctx, backend, count):
    group = ctx.group(backend, timeout=LONG)
    if has_left(group, 1):
        return
    mine = torch.full((count,), float(ctx.rank))
    mean = mine.clone()
    group.allreduce(mean, op=ReduceOp.AVG).wait()
    assert mean.unique().tolist() == [1.0]  # of 0 and 2

    rows = [torch.full((count,), -1.0) for _ in range(3)]
    group.allgather([rows], [mine]).wait()
    assert [row.unique().tolist() for row in rows] == [[0.0], [-1.0], [2.0]]

    whole = torch.full((3 * count,), -1.0)
    group.all_gather_single(whole, mine).wait()
    assert whole.view(3, count)[:, 0].tolist() == [0.0, -1.0, 2.0]

    part = torch.empty(count)
    group.reduce_scatter_single(part, torch.arange(3.0).repeat_interleave(count)).wait()
    assert part.unique().tolist() == [2.0 * ctx.rank]  # the part that bears this rank's number

    got = torch.full((3,), -1.0)
    group.all_to_all_single(got, torch.tensor([0.0, 1.0, 2.0]) + 10 * ctx.rank).wait()
    assert got.tolist() == [ctx.rank + 0.0, -1.0, ctx.rank + 20.0]

    group.broadcast(mine, root=2).wait()
    assert mine.unique().tolist() == [2.0]
    group.barrier().wait()
    call_the_rest(group)


def call_the_rest(group):
    """Run collectives with a root, a list or an unusual dtype among ranks 0 and 2 of three."""
    rank = group.rank()
    mine = torch.full((2,), rank + 1.0)
    total = mine.clone()
    group.reduce(total, root=2).wait()
    assert total.tolist() == ([4.0, 4.0] if rank == 2 else [1.0, 1.0])

    rows = [torch.full((2,), -1.0) for _ in range(3)]
    group.gather([rows] if rank == 2 else [], [mine], root=2).wait()
    assert [row[0].item() for row in rows] == ([1.0, -1.0, 3.0] if rank == 2 else [-1.0] * 3)

    got = torch.empty(2)
    parts = [torch.full((2,), 10.0 * place) for place in range(3)]
    group.scatter(got, parts if rank == 2 else [], root=2).wait()
    assert got.tolist() == [10.0 * rank] * 2

    several = [mine.clone(), torch.tensor([5.0 * rank])]
    group.allreduce_coalesced(several, op=ReduceOp.AVG).wait()
    assert several[0].tolist() == [2.0, 2.0]
    assert several[1].tolist() == [5.0]

    part = torch.empty(2)
    group.reduce_scatter(part, [place * mine for place in range(3)], op=ReduceOp.AVG).wait()
    assert part.tolist() == [2.0 * rank] * 2

    whole = torch.tensor([rank * 3 + 1])
    group.allreduce(whole, op=ReduceOp.AVG).wait()
    assert whole.item() == 4  # of 1 and 7
    pairs = torch.tensor([rank + 1j])
    group.allreduce(pairs, op=ReduceOp.AVG).wait()
    assert pairs.item() == 1 + 1j

    lists = [[torch.full((1,), -1.0), torch.full((2,), -1.0)] for _ in range(3)]
    group.allgather_coalesced(lists, [mine[:1], mine]).wait()
    assert [both[1][0].item() for both in lists] == [1.0, -1.0, 3.0]
    future = group.all_to_all_single(rows_of := torch.full((3,), -1.0), torch.ones(3)).get_future()
    future.wait()
    assert rows_of.tolist() == [1.0, -1.0, 1.0]
    nothing = torch.empty(0)
    group.all_gather_single(nothing, nothing).wait()
    assert group.records()[-1].operation == "all_gather_single"

    sparse = torch.zeros(3).index_fill_(0, torch.tensor([rank]), 1.0).add(torch.tensor([0, 5.0, 0]))
    sparse = sparse.to_sparse()
    group.allreduce(sparse).wait()
    assert sparse.to_dense().tolist() == [1.0, 10.0, 1.0]


@pytest.mark.parametrize("count", [4, 300_000])
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_collective_works_after_a_rank_left(crew, backend, count):
    crew[backend].run(call_everything_among_the_rest, 3, args=(backend, count))


def ask_an_absent_root(ctx, backend):
    group = ctx.group(backend, timeout=LONG)
    if has_left(group, 1):
        return
    tensor = torch.ones(3)
    with pytest.raises(PeerLeft, match="its root, rank 1, has left the group") as caught:
        group.broadcast(tensor, root=1).wait()
    assert caught.value.left == (1,)
    group.allreduce(tensor).wait()
    assert tensor.tolist() == [2.0, 2.0, 2.0]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_departed_root_raises_peer_left_and_the_group_stays_usable(crew, backend):
    crew[backend].run(ask_an_absent_root, 3, args=(backend,))


def leave_with_work_under_way(ctx, backend):
    group = ctx.group(backend, timeout=LONG)
    tensor = tensor_of(group, "in place", 1.0)
    work = group.allreduce(tensor)
    if has_left(group, 0):
        assert tensor.unique().tolist() == [2.0]  # for leaving waits for it
        return
    work.wait()
    assert tensor.unique().tolist() == [2.0]


@pytest.mark.parametrize("backend", BACKENDS)
def test_leave_waits_for_calls_in_flight(crew, backend):
    crew[backend].run(leave_with_work_under_way, 2, args=(backend,))


def call_after_leaving(ctx, backend):
    group = ctx.group(backend, timeout=LONG)
    if has_left(group, 0):
        for call in (lambda: group.allreduce(torch.ones(1)), group.leave):
            with pytest.raises(
                GroupAborted,
                match=r"this rank left the group at .*test_membership.py:\d+\. Call rejoin",
            ):
                call()
        group.shutdown()
    else:
        group.allreduce(torch.ones(1)).wait()


@pytest.mark.parametrize("backend", BACKENDS)
def test_calls_after_leave_raise_group_aborted(crew, backend):
    crew[backend].run(call_after_leaving, 2, args=(backend,))


def exclude_after_leaving(ctx, backend):
    group = ctx.group(backend, timeout=LONG)
    if has_left(group, 0):
        with pytest.raises(InvalidState, match=f"exclude: {backend} does not support exclude"):
            group.exclude([1])


@pytest.mark.parametrize("backend", ["local", "gloo"])
def test_exclude_after_leave_names_the_unsupporting_backend(crew, backend):
    crew[backend].run(exclude_after_leaving, 2, args=(backend,))


def leave_and_die(ctx):
    group, other = ctx.group("shm", timeout=LONG), ctx.group("shm", timeout=LONG)
    if ctx.rank == 2:
        group.leave()
        other.barrier()  # where it is killed
    wait_for_death(group, 2)
    for _ in range(3):
        tensor = torch.ones(2)
        group.allreduce(tensor).wait()
        assert tensor.tolist() == [2.0, 2.0]


def test_the_death_of_a_rank_that_left_does_not_fail_the_group(ranks):
    ranks.run(leave_and_die, 3, faults=[Fault("barrier:before", kill(), rank=2)])


def recv_from_a_rank_that_left(ctx, backend):
    group = ctx.group(backend, timeout=LONG)
    first, second = torch.ones(2), torch.zeros(2)
    work = group.send(first, 1) if ctx.rank == 0 else group.recv(second, 0)
    work.wait()
    if has_left(group, 0):
        return
    assert second.tolist() == [1.0, 1.0]
    with pytest.raises(PeerLeft, match="rank 0 has left the group") as caught:
        group.recv(second, 0).wait()
    assert caught.value.left == (0,)
    if backend == "gloo":  # elsewhere what is small is on its way at once
        with pytest.raises(PeerLeft, match="rank 0 has left the group"):
            group.send(second, 0).wait()


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_recv_from_a_rank_that_left_raises_peer_left(ranks, backend):
    ranks.run(recv_from_a_rank_that_left, 2, args=(backend,))


def receive_and_leave(ctx):
    group = ctx.group("shm", timeout=LONG)
    if ctx.rank == 0:
        group.leave()
        return
    with pytest.raises(PeerLeft):
        group.recv(torch.zeros(2), 0).wait()
    group.leave()  # does not wait for absent ranks


def test_leave_succeeds_after_a_recv_failed_with_peer_left(ranks):
    ranks.run(receive_and_leave, 2)


def exchange_lists(ctx, backend):
    group = ctx.group(backend, timeout=LONG)
    if has_left(group, 1):
        return
    got = [torch.full((2,), -7.0) for _ in range(3)]
    group.alltoall(got, [torch.full((2,), float(ctx.rank))] * 3).wait()
    assert [row[0].item() for row in got] == [0.0, -7.0, 2.0]


@pytest.mark.parametrize("backend", BACKENDS)
def test_outputs_of_departed_ranks_are_left_unchanged(crew, backend):
    crew[backend].run(exchange_lists, 3, args=(backend,))


def scatter_unevenly(ctx, backend):
    group = ctx.group(backend, timeout=LONG)
    if has_left(group, 1):
        return
    mine = torch.zeros(ctx.rank + 1)
    group.reduce_scatter(mine, [torch.full((n + 1,), 3.0) for n in range(3)]).wait()
    assert mine.unique().tolist() == [6.0]
    group.barrier().wait()


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_uneven_reduce_scatter_works_after_a_rank_left(crew, backend):
    crew[backend].run(scatter_unevenly, 3, args=(backend,))


def leave_while_another_thread_calls(ctx):
    """Rank 0 leaves while a call is in the engine but not yet in the group's in-flight list."""
    group = ctx.group("shm", timeout=LONG)
    tensor = torch.ones(3)
    if ctx.rank == 1:
        ctx.store.wait(["go"])
        group.allreduce(tensor, op=ReduceOp.MAX).wait()
        return
    is_there, may_go_on = threading.Event(), threading.Event()
    call = partial(group.allreduce, tensor, op=ReduceOp.MAX)

    def go_on():
        may_go_on.set()
        ctx.store.set("go", "")

    class Paused(_issuer.Work):
        def __init__(self, *args):
            is_there.set()
            may_go_on.wait()
            super().__init__(*args)

    usual, _issuer.Work = _issuer.Work, Paused
    try:
        caller = threading.Thread(target=call)
        caller.start()
        is_there.wait()
        threading.Timer(0.1, go_on).start()
        group.leave()  # begun before this rank leaves, the call is waited for
        caller.join()
    finally:
        _issuer.Work = usual
    assert group.records()[-1].ended is not None


def test_leave_waits_for_a_call_of_another_thread(ranks):
    ranks.run(leave_while_another_thread_calls, 2)


def leave_with_a_receive(ctx, backend):
    group = ctx.group(backend, timeout=LONG)
    got = torch.zeros(2)
    if ctx.rank == 0:
        work = group.recv(got, 1)
        with pytest.raises(InvalidState, match="wait for this rank's sends and receives"):
            group.leave()
        ctx.store.set("refused", "")
        work.wait()
        assert got.tolist() == [5.0, 5.0]
        group.leave()
        return
    ctx.store.wait(["refused"])
    group.send(torch.full((2,), 5.0), 0).wait()


@pytest.mark.parametrize("backend", ALONE)
def test_leave_is_refused_with_a_recv_in_flight(crew, backend):
    crew[backend].run(leave_with_a_receive, 2, args=(backend,))


def compare_calls_among_the_rest(ctx, backend):
    group = ctx.group(backend, timeout=LONG, checks=True)
    if has_left(group, 1):
        return
    tensor = torch.ones(2)
    group.allreduce(tensor).wait()
    assert tensor.tolist() == [2.0, 2.0]
    with pytest.raises(RankMismatch, match=r"rank 2 called allreduce float32\[3\]"):
        group.allreduce(torch.ones(ctx.rank + 1)).wait()


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_consistency_checks_ignore_departed_ranks(ranks, backend):
    ranks.run(compare_calls_among_the_rest, 3, args=(backend,))


def shut_down_while_leaving(ctx):
    group = ctx.group("shm", timeout=LONG)
    if ctx.rank == 1:
        ctx.store.wait(["shut down"])
        return
    group.barrier()  # for which the other never comes
    closer = threading.Timer(0.2, group.abort)
    closer.start()
    started = time.monotonic()
    with pytest.raises(GroupAborted):
        group.leave()
    assert time.monotonic() - started < 10
    closer.join()
    ctx.store.set("shut down", "")
    with pytest.raises(GroupAborted, match="this rank aborted the group"):
        group.barrier()


def test_abort_interrupts_leave(ranks):
    ranks.run(shut_down_while_leaving, 2)


def cannot_go_on(ctx):
    group = ctx.group("gloo")
    with pytest.raises(InvalidState, match="leave: gloo does not support leave.*update_membership"):
        group.leave()
    with pytest.raises(InvalidState, match="exclude: gloo does not support exclude.*split_group"):
        group.exclude([0])
    assert group.members == tuple(range(ctx.size))


def test_leave_and_exclude_on_gloo_name_the_alternative(ranks):
    ranks.run(cannot_go_on, 1)


# -- dead ranks ----------------------------------------------------------------------------


def go_on(group, way, expected):
    for _ in range(3):
        tensor = tensor_of(group, way, 1.0)
        group.allreduce(tensor).wait()
        assert tensor.unique().tolist() == [expected]
    assert group.members == (0, 2)


def lose_a_rank_before_its_call(ctx, way):
    group = ctx.group("shm", timeout=LONG)
    tensor = tensor_of(group, way, 1.0)
    work = group.allreduce(tensor)  # which rank 1 does not live to make
    with pytest.raises(PeerLost) as caught:
        work.wait()
    with pytest.raises(PeerLost, match="is dead"):
        group.barrier()
    group.exclude(caught.value.lost)
    work.wait()
    assert tensor.unique().tolist() == [2.0]
    go_on(group, way, 2.0)


@pytest.mark.parametrize("way", WAYS)
def test_a_call_the_dead_rank_never_made_completes_after_exclude(ranks, way):
    strike = Fault("allreduce:before", kill(), rank=1)
    ranks.run(lose_a_rank_before_its_call, 3, args=(way,), faults=[strike])


def lose_a_rank_during_its_call(ctx, way):
    group = ctx.group("shm", timeout=LONG)
    tensor = tensor_of(group, way, 1.0)
    if ctx.rank == 1:
        group.allreduce(tensor)  # announced, and then it is killed with nothing done for it
    wait_for_death(group, 1)
    work = group.allreduce(tensor)
    if way == "small":  # all that it had to bring was there
        work.wait()
        assert tensor.unique().tolist() == [3.0]
        with pytest.raises(PeerLost):
            group.barrier().wait()
        group.exclude([1])
    else:
        with pytest.raises(PeerLost, match="is dead"):
            work.wait()
        group.exclude([1])
        with pytest.raises(PeerLost, match=r"rank 1 \(pid .*\) died during the call") as caught:
            work.wait()
        assert caught.value.lost == (1,)
        group.barrier().wait()
    go_on(group, way, 2.0)


@pytest.mark.parametrize("way", WAYS)
def test_a_call_the_dead_rank_left_unfinished_fails_on_all_ranks(ranks, way):
    strike = Fault("allreduce:issued", kill(), rank=1)
    ranks.run(lose_a_rank_during_its_call, 3, args=(way,), faults=[strike])


def lose_two(ctx):
    group = ctx.group("shm", timeout=LONG)
    tensor, lost = torch.ones(5), set()
    work = group.allreduce(tensor)
    while True:  # both at once or one after the other, as each rank happens to hear of it
        try:
            work.wait()
            break
        except PeerLost as error:
            lost |= set(error.lost)
            group.exclude(error.lost)
    assert lost == {1, 3}
    assert tensor.tolist() == [2.0] * 5
    go_on(group, "in place", 2.0)


def test_several_dead_ranks_can_be_excluded(ranks):
    strikes = [Fault("allreduce:before", kill(), rank=rank) for rank in (1, 3)]
    ranks.run(lose_two, 4, faults=strikes)


def receive_after_a_death(ctx):
    group = ctx.group("shm", timeout=LONG)
    if ctx.rank == 1:
        group.barrier()  # where it is killed
    tensor = torch.zeros(2)
    received = group.recv(tensor, 2) if ctx.rank == 0 else None
    with pytest.raises(PeerLost):
        group.allreduce(torch.ones(1)).wait()
    if received is not None:
        with pytest.raises(PeerLost):
            received.wait()
    group.exclude([1])
    if received is None:
        group.send(torch.ones(2), 0).wait()
    else:
        received.wait()
        assert tensor.tolist() == [1.0, 1.0]
    group.barrier().wait()


def test_transfers_between_survivors_complete_after_exclude(ranks):
    strike = Fault("barrier:before", kill(), rank=1)
    ranks.run(receive_after_a_death, 3, faults=[strike])


def end_by_an_exception(ctx):
    group = ctx.group("shm", timeout=LONG)
    tensor = group.allocate((50_000,)) if ctx.rank == 1 else torch.empty(50_000)
    tensor.fill_(7.0 if ctx.rank == 1 else 0.0)
    if ctx.rank == 1:
        group.broadcast(tensor, root=1)
        atexit._run_exitfuncs()  # as the interpreter does; `sys.exit` would be caught here
        os._exit(3)
    wait_for_death(group, 1)
    group.broadcast(tensor, root=1).wait()
    assert tensor.unique().tolist() == [7.0]


def test_data_of_a_rank_that_exits_cleanly_stays_readable(ranks):
    ranks.run(end_by_an_exception, 3, expect_dead=[1])


def forget_the_living(ctx):
    group = ctx.group("shm")
    with pytest.raises(InvalidArgument, match="rank 1 is alive"):
        group.exclude([1])
    with pytest.raises(InvalidArgument, match="rank 5 is not a rank"):
        group.exclude([5])
    group.barrier().wait()


def test_exclude_accepts_only_dead_ranks(ranks):
    ranks.run(forget_the_living, 2)
