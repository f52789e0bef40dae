"""Regression tests: valid programs that once failed, and error messages that were wrong."""

import os
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _make_nccl_premul_sum

from phalanx.errors import GroupAborted, InvalidState, PeerLost, RankMismatch, RendezvousTimeout
from phalanx.groups import new_group
from phalanx.testing import Fault, faults, kill
from ports import free_port

from .test_lifecycle import total

SECONDS = timedelta(seconds=15)


def split_twice_under_one_name(ctx):
    world = ctx.group()
    half = [0, 1] if ctx.rank < 2 else [2, 3]
    if ctx.rank in (1, 2):  # let those arrive first that do not belong together
        ctx.store.wait(["first/0", "first/3"])
    else:
        ctx.store.set(f"first/{ctx.rank}", "")
    mine = ctx.closing(world.split_group(half, group_name="tp"))
    tensor = torch.tensor([float(ctx.rank)])
    mine.allreduce(tensor).wait()
    assert tensor.item() == sum(half)


def test_disjoint_splits_with_one_name_are_separate_groups(threads, ranks):
    threads.run(split_twice_under_one_name, 4)
    ranks.run(split_twice_under_one_name, 4)


def leave_after_the_last_call(ctx, how):
    group = ctx.group("gloo", timeout=SECONDS)
    outputs = [torch.empty(1) for _ in range(3)] if ctx.rank == 0 else []
    if ctx.rank == 1:
        ctx.store.wait(["gone"])
        time.sleep(0.6)  # longer than it takes to look for the dead
    work = group.gather(outputs, torch.ones(1), root=0)
    if ctx.rank == 2:
        work.wait()
        if how == "shutdown":
            group.shutdown()
        else:
            group._detector.exit()  # what the interpreter's end does
        ctx.store.set("gone", "")
        faults.reach("ended")
    work.wait()


@pytest.mark.parametrize("how", ["shutdown", "exit"])
def test_a_rank_that_exited_cleanly_is_not_reported_lost(ranks, how):
    ended = Fault("ended", kill(), rank=2)
    ranks.run(leave_after_the_last_call, 3, args=(how,), faults=[ended])


def wait_in_a_chain(ctx):
    world = ctx.group()
    if ctx.rank == 0:
        time.sleep(2.5)  # long enough for rank 2 to look at what rank 1 is doing, twice
    if ctx.rank < 2:
        ctx.closing(world.split_group([0, 1]))
    if ctx.rank > 0:
        ctx.closing(world.split_group([1, 2]))


def test_a_chain_of_waiting_ranks_is_not_a_mismatch(threads):
    threads.run(wait_in_a_chain, 3)


def try_again(ctx):
    if ctx.rank == 0:
        with pytest.raises(RendezvousTimeout):
            ctx.group("local", name="g", timeout=timedelta(seconds=0.5))
        ctx.store.set("failed", "")
    else:
        ctx.store.wait(["failed"])
    assert total(ctx.group("local", name="g", timeout=SECONDS)) == 3
    assert total(ctx.group("local", name="g", timeout=SECONDS)) == 3


def test_a_group_name_can_be_reused_after_a_failed_rendezvous(threads):
    threads.run(try_again, 2)


def intrude(ctx):
    if ctx.rank < 2:
        first = ctx.group("gloo", name="g", world_size=2)
        ctx.store.set(f"formed/{ctx.rank}", "")
        ctx.store.wait(["refused"])
        first.shutdown()
        assert total(ctx.group("gloo", name="g", world_size=2, timeout=SECONDS)) == 3
    else:
        ctx.store.wait(["formed/0", "formed/1"])
        with pytest.raises(InvalidState, match="same rank"):
            ctx.group("gloo", name="g", rank=1, world_size=2, timeout=SECONDS)
        ctx.store.set("refused", "")


def test_a_duplicate_rank_does_not_disturb_later_groups(ranks):
    ranks.run(intrude, 3)


def merge_again(ctx):
    world = ctx.group()
    for _ in range(2):
        alone = ctx.closing(world.split_group([ctx.rank]))
        both = ctx.closing(alone.merge_remote_group(ctx.store, 2, SECONDS))
        assert both.rank() == ctx.rank
        assert total(both) == 3


def test_a_store_can_be_used_for_consecutive_merges(threads):
    threads.run(merge_again, 2)


def multiply(ctx):
    group = ctx.group()
    tensor = torch.ones(2)
    group.allreduce(tensor, op=_make_nccl_premul_sum(10.0**ctx.rank)).wait()
    assert tensor.tolist() == [11.0, 11.0]
    group.shutdown()
    with pytest.raises(GroupAborted):
        group.allreduce(tensor, op=_make_nccl_premul_sum(2.0))
    assert tensor.tolist() == [11.0, 11.0], "what was refused was not touched"


def test_premultiplied_sum_uses_each_ranks_own_factor(threads, ranks):
    threads.run(multiply, 2)
    ranks.run(multiply, 2)


def abort_under_a_future(ctx):
    group = ctx.group(timeout=timedelta(seconds=60))
    if ctx.rank == 1:
        ctx.store.wait(["over"])
        return
    future = group.allreduce(torch.ones(1)).get_future()
    started = time.monotonic()
    group.abort()
    with pytest.raises(RuntimeError, match="abort"):
        future.wait()
    assert time.monotonic() - started < 5
    ctx.store.set("over", "")


def test_abort_fails_futures_on_the_aborting_rank(threads, ranks):
    threads.run(abort_under_a_future, 2)
    ranks.run(abort_under_a_future, 2)


def chain_calls(ctx):
    group = ctx.group()

    def again(done):
        return group.allreduce(done.value()[0]).get_future().wait()[0]

    tensor = torch.ones(1)
    result = group.allreduce(tensor).get_future().then(again).wait()
    assert result.item() == 4


def test_a_future_callback_can_issue_calls(threads, ranks):
    threads.run(chain_calls, 2)
    ranks.run(chain_calls, 2)


def exchange_nothing(ctx):
    group = ctx.group()
    mine = torch.ones(2 * ctx.rank, 3, dtype=torch.int16)  # rank 0 has no rows at all
    output = torch.zeros(1, 3, dtype=torch.int16)
    splits = [ctx.rank, ctx.rank]
    group.all_to_all_single(output, mine, [0, 1], splits).wait()
    assert output.tolist() == [[1, 1, 1]]


def test_all_to_all_accepts_a_rank_without_rows(threads, ranks):
    threads.run(exchange_nothing, 2)
    ranks.run(exchange_nothing, 2)


def start_again(ctx, port):
    os.environ |= {
        "RANK": str(ctx.rank),
        "WORLD_SIZE": str(ctx.size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    for attempt in range(2):
        os.environ["TORCHELASTIC_RESTART_COUNT"] = str(attempt)
        if attempt == 0 and ctx.rank == 0:  # it got further than the other in its first life
            dist.PrefixStore("attempt_0/phalanx/unnamed", ctx.store).add("0", 1)
        if attempt == 1:
            assert total(ctx.closing(new_group("gloo", SECONDS))) == 3


def test_a_restart_does_not_see_store_keys_of_the_previous_attempt(ranks):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks.run(start_again, 2, args=(store.port,))


def phases(ctx, url):
    for phase in range(3):
        group = new_group("gloo", SECONDS, store=url, rank=ctx.rank, world_size=2)
        if ctx.rank == 0 and phase < 2:  # rank 1 is at the next meeting before this one has ended
            time.sleep(0.3)
        group.shutdown()
        del group
    ctx.store.set(f"end/{ctx.rank}", "")
    ctx.store.wait(["end/0", "end/1"])


def test_the_hosted_store_survives_between_groups(ranks):
    ranks.run(phases, 2, args=(f"tcp://127.0.0.1:{free_port()}",))


def die_before_the_verdict(ctx):
    with pytest.raises(PeerLost, match="rank 0 .* died during") as caught:
        ctx.group("gloo", world_size=3, timeout=timedelta(seconds=40))  # rank 2 never comes
    assert caught.value.lost == (0,)


def test_the_death_of_rank_0_during_rendezvous_is_detected(ranks):
    strike = Fault("form:requested", kill(), rank=0)
    started = time.monotonic()
    ranks.run(die_before_the_verdict, 2, faults=[strike])
    assert time.monotonic() - started < 20


def make_groups_here_and_there(ctx):
    everywhere = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(everywhere)})
    try:
        ctx.group("gloo")
    finally:
        os.sched_setaffinity(0, everywhere)
    known = set(os.listdir("/proc/self/task"))
    ctx.group("gloo")
    engine = set(os.listdir("/proc/self/task")) - known
    assert engine
    assert all(os.sched_getaffinity(int(thread)) == everywhere for thread in engine)


def test_engine_threads_inherit_the_affinity_of_their_creator(ranks):
    ranks.run(make_groups_here_and_there, 1)


def go_on_after_another_call(context):
    group = context.group("shm", timeout=timedelta(seconds=10))
    if context.rank == 0:
        group.barrier()
    else:
        group.allreduce(torch.ones(3))
        group.barrier()
    with pytest.raises(RankMismatch, match="rank . called") as caught:
        group.barrier().wait()
    # The reported calls are not the ones that differ, so the error must not hint at a reduction.
    assert "reduction" not in str(caught.value)


def test_a_mismatch_in_an_unwaited_call_is_reported(ranks):
    ranks.run(go_on_after_another_call, 2)
