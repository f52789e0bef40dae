"""Misuse that must not corrupt shared memory: forks, dropped tensors, mismatched calls."""

import atexit
import gc
import os
import time
from datetime import timedelta

import pytest
import torch
from torch.distributed import ReduceOp

from phalanx import native
from phalanx.errors import GroupError, RankMismatch

pytestmark = pytest.mark.skipif(native.engine is None, reason="the engine was not built")

LONG = timedelta(seconds=60)
BIG = 100_000  # numbers: more than a channel between two ranks holds, and than a small slot


# -- forked children -----------------------------------------------------------------------


def in_child(body):
    """Run a function in a forked child; returns whether it was refused as not being a rank."""
    child = os.fork()
    if child == 0:
        status = 3
        try:
            body()
            status = 0
        except RuntimeError as error:
            status = 7 if "forked from a rank" in str(error) else 1
        finally:
            os._exit(status)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, 7)
    return status == 7


def fork_in_the_middle(ctx):
    group = ctx.group("shm", timeout=LONG)
    tensor = group.allocate((BIG,)).fill_(1)
    work = group.allreduce(tensor)
    if ctx.rank == 0:
        other = torch.ones(3)
        assert in_child(lambda: group.allreduce(other))
        assert in_child(lambda: group.all_gather_single(torch.empty(6), other))
        assert in_child(lambda: group.send(other, 1))
        assert in_child(lambda: group.recv(other, 1))
        assert in_child(lambda: group.allocate((10,)))
        assert in_child(work.wait)
        assert in_child(work.is_completed)
    work.wait()
    assert tensor.unique().tolist() == [2.0], "the child took no part"
    group.allreduce(tensor).wait()
    assert tensor.unique().tolist() == [4.0]


def test_a_forked_child_cannot_act_for_its_parent(ranks):
    ranks.run(fork_in_the_middle, 2)


def fork_and_free(ctx):
    group = ctx.group("shm", timeout=LONG)
    tensors = [group.allocate((BIG,)).fill_(5)]

    def let_go():
        tensors.clear()
        gc.collect()

    assert not in_child(let_go)
    assert tensors[0].unique().tolist() == [5.0]


def test_a_forked_child_does_not_free_its_parents_tensors(ranks):
    ranks.run(fork_and_free, 1)


def fork_and_end(ctx, how):
    group = ctx.group("shm", timeout=LONG)
    if ctx.rank == 0:
        in_child({"exit": atexit._run_exitfuncs, "shutdown": group.shutdown}[how])
    tensor = torch.ones(3)
    group.allreduce(tensor).wait()
    assert tensor.tolist() == [2.0] * 3
    # A rank that waits long enough requests reports and checks whether a peer has left.
    if ctx.rank == 0:
        group.get_group_store().wait(["status/report_requests"])
        group.barrier().wait()
        ctx.store.wait(["passed"])
    else:
        group.barrier().wait()
        ctx.store.set("passed", "")


@pytest.mark.parametrize("how", ["exit", "shutdown"])
def test_the_exit_of_a_forked_child_does_not_affect_its_parent(ranks, how):
    """A child of `os.fork` runs the exit handlers too."""
    ranks.run(fork_and_end, 2, args=(how,))


# -- dropped while in flight ---------------------------------------------------------------


def litter(value):
    """Overwrite memory that was freed."""
    gc.collect()
    return [torch.full((BIG,), value) for _ in range(4)]


def drop_a_send(ctx):
    group = ctx.group("shm", timeout=LONG)
    if ctx.rank == 0:
        group.send(torch.full((BIG,), 5.0), 1)  # the tensor and the work are dropped
        kept = litter(-1.0)
        ctx.store.set("dropped", "")
        ctx.store.wait(["received"])  # without another call: the send gets on by itself
        del kept
        return
    ctx.store.wait(["dropped"])
    received = torch.zeros(BIG)
    group.recv(received, 0).wait()
    ctx.store.set("received", "")
    assert received.unique().tolist() == [5.0]


def drop_a_receive(ctx):
    group = ctx.group("shm", timeout=LONG)
    if ctx.rank == 0:
        group.recv(torch.zeros(BIG), 1)
        kept = litter(-1.0)
        ctx.store.set("dropped", "")
        ctx.store.wait(["sent"])
        assert all(tensor.unique().tolist() == [-1.0] for tensor in kept)
        return
    ctx.store.wait(["dropped"])
    group.send(torch.full((BIG,), 5.0), 0).wait()
    ctx.store.set("sent", "")


def drop_a_large_send(ctx):
    group = ctx.group("shm", timeout=LONG, driver="caller")
    if ctx.rank == 0:
        group.send(torch.full((40 * BIG,), 5.0), 1)
        ctx.store.wait(["received"])
        return
    started = time.monotonic()
    group.recv(torch.zeros(40 * BIG), 0).wait()  # 16 MB, of which a channel holds 1/64
    ctx.store.set("received", "")
    assert time.monotonic() - started < 8


def test_a_dropped_large_send_makes_progress_quickly(ranks):
    ranks.run(drop_a_large_send, 2)


def exchange_often(ctx):
    group = ctx.group("shm", timeout=LONG)
    tensor = torch.ones(3)
    for turn in range(50):
        if (ctx.rank + turn) % 2:
            group.send(tensor, 1 - ctx.rank)  # not waited for, half of the time
        else:
            group.recv(tensor, 1 - ctx.rank).wait()
    group.barrier().wait()
    group._detector.poll()
    gc.collect()
    assert group._engine._native.transfers_kept <= 2


def test_completed_transfers_are_released(ranks):
    ranks.run(exchange_often, 2)


def drop_calls(ctx, shared):
    group = ctx.group("shm", timeout=LONG)
    make = group.allocate if shared else torch.empty
    for turn in range(5):
        group.allreduce(make((BIG,)).fill_(turn))
        group.broadcast(make((BIG,)).fill_(turn), root=0)
        group.all_gather_single(torch.empty(2 * BIG), make((BIG,)).fill_(turn))
    kept = litter(-1.0)
    fresh = make((BIG,)).fill_(ctx.rank + 1)
    group.allreduce(fresh).wait()
    assert fresh.unique().tolist() == [3.0]
    assert all(tensor.unique().tolist() == [-1.0] for tensor in kept)


@pytest.mark.parametrize("body", [drop_a_send, drop_a_receive], ids=["send", "receive"])
def test_a_transfer_keeps_its_tensor_alive(ranks, body):
    ranks.run(body, 2)


@pytest.mark.parametrize("shared", [True, False], ids=["shared", "ordinary"])
def test_a_collective_keeps_its_tensors_alive(ranks, shared):
    ranks.run(drop_calls, 2, args=(shared,))


def give_up_on_a_transfer(ctx):
    group = ctx.group("shm", timeout=LONG)
    if ctx.rank == 0:
        future = group.recv(torch.zeros(4), 1).get_future()
        group.abort()
        with pytest.raises(RuntimeError, match="abort"):
            future.wait()
        used = time.process_time()
        ctx.store.set("aborted", "")
        time.sleep(0.3)
        assert time.process_time() - used < 0.2, "somebody goes on waiting, at full speed"
        return
    ctx.store.wait(["aborted"])
    with pytest.raises(GroupError):
        group.barrier().wait()


def test_abort_ends_the_background_wait_for_a_transfer(ranks):
    ranks.run(give_up_on_a_transfer, 2)


# -- completion after peers have read ------------------------------------------------------


def exchange_little_for_much(ctx):
    group = ctx.group("shm", timeout=LONG)
    send = [1, 1] if ctx.rank == 0 else [BIG, BIG]
    source = group.allocate((sum(send),)).fill_(ctx.rank + 1)
    received = torch.zeros(1 + BIG)
    if ctx.rank == 0:
        ctx.store.wait(["arrived"])
    work = group.all_to_all_single(received, source, [1, BIG], send)
    if ctx.rank == 0:
        ctx.store.set("looked", str(work.is_completed()))
        work.wait()
        source.fill_(-1)  # it is the caller's again
    else:
        ctx.store.set("arrived", "")
        assert ctx.store.get("looked") == b"False", "rank 1 has not read it yet"
        work.wait()
    assert received[0] == 1
    assert received[1:].unique().tolist() == [2.0]


def test_a_call_completes_only_after_peers_have_read_a_small_input(ranks):
    ranks.run(exchange_little_for_much, 2)


# -- mismatched calls ----------------------------------------------------------------------

INTEGERS = {"dtype": torch.int32}
DISAGREEMENTS = {
    "operation": (
        lambda group, make: group.allreduce(make(BIG)),
        lambda group, make: group.broadcast(make(BIG), root=0),
    ),
    "length": (
        lambda group, make: group.allreduce(make(BIG)),
        lambda group, make: group.allreduce(make(BIG + 1)),
    ),
    "length of what is small": (
        lambda group, make: group.reduce(make(10), 0),
        lambda group, make: group.reduce(make(BIG), 0),
    ),
    "type of a sum": (
        lambda group, make: group.allreduce(make(BIG)),
        lambda group, make: group.allreduce(make(BIG, **INTEGERS)),
    ),
    "type of a copy": (
        lambda group, make: group.broadcast(make(BIG), root=0),
        lambda group, make: group.broadcast(make(BIG, **INTEGERS), root=0),
    ),
    "type of what is gathered": (
        lambda group, make: group.all_gather_single(torch.empty(3 * BIG), make(BIG)),
        lambda group, make: group.all_gather_single(
            torch.empty(3 * BIG, **INTEGERS), make(BIG, **INTEGERS)
        ),
    ),
    "reduce operation": (
        lambda group, make: group.allreduce(make(BIG)),
        lambda group, make: group.allreduce(make(BIG), ReduceOp.AVG),
    ),
    "root": (
        lambda group, make: group.reduce(make(BIG), 0),
        lambda group, make: group.reduce(make(BIG), 1),
    ),
}


def disagree(ctx, which, shared):
    group = ctx.group("shm", timeout=LONG)

    def make(count, dtype=torch.float32):
        return (group.allocate if shared else torch.empty)((count,), dtype=dtype).fill_(1)

    group.barrier().wait()
    majority, minority = DISAGREEMENTS[which]
    with pytest.raises(RankMismatch, match=r"ranks disagree.*rank 1 called") as caught:
        (minority if ctx.rank == 1 else majority)(group, make).wait()
    assert 1 in caught.value.ranks
    with pytest.raises(GroupError):
        group.barrier()


@pytest.mark.parametrize(
    ("which", "shared"), [(which, i % 2 == 0) for i, which in enumerate(DISAGREEMENTS)]
)
def test_a_mismatch_in_a_large_call_names_the_ranks(ranks, which, shared):
    ranks.run(disagree, 3, args=(which, shared))


def exchange_what_does_not_fit(ctx, lengths):
    """Rank 0 sends rank 1 more, or less, than it has room for."""
    sent, room = lengths
    group = ctx.group("shm", timeout=LONG)
    around = torch.full((sent + room + 10,), 7.0)
    received = around[: 1 + room] if ctx.rank == 1 else torch.empty(2)
    source = torch.ones(1 + sent) if ctx.rank == 0 else torch.ones(2)
    out_of = [1, sent] if ctx.rank == 0 else [1, 1]
    into = [room, 1] if ctx.rank == 1 else [1, 1]
    work = group.all_to_all_single(received, source, into, out_of)
    if ctx.rank == 0:
        ctx.store.wait(["told"])
        with pytest.raises(RankMismatch):
            group.barrier().wait()
        return
    with pytest.raises(RankMismatch, match="rank 0 called all_to_all_single") as caught:
        work.wait()
    assert caught.value.ranks == (0, 1)
    assert around.unique().tolist() == [7.0], "nothing was written, least of all past the end"
    ctx.store.set("told", "")


@pytest.mark.parametrize("lengths", [(5, 3), (3, 5), (BIG, 3)], ids=str)
def test_mismatched_all_to_all_splits_raise_and_write_nothing(ranks, lengths):
    ranks.run(exchange_what_does_not_fit, 2, args=(lengths,))


def receive_what_does_not_fit(ctx):
    group = ctx.group("shm", timeout=LONG)
    if ctx.rank == 0:
        group.send(torch.ones(7), 1).wait()
        ctx.store.wait(["told"])
        return
    around = torch.full((20,), 7.0)
    with pytest.raises(GroupError, match="rank 0 sent 28 bytes"):
        group.recv(around[:6], 0).wait()
    assert around.unique().tolist() == [7.0]
    ctx.store.set("told", "")


def test_a_message_of_a_different_length_is_rejected(ranks):
    ranks.run(receive_what_does_not_fit, 2)
