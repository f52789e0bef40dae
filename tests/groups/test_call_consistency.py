"""Mismatched calls: the error names both calls, on every rank."""

import sys
import threading
from datetime import timedelta

import pytest
import torch

from phalanx.errors import CollectiveTimeout, GroupAborted, GroupError, RankMismatch
from phalanx.groups import ReduceOp
from phalanx.testing import over_groups

LONG = timedelta(seconds=60)

DISAGREEMENTS = {
    "operation": (
        lambda group: group.allreduce(torch.ones(10)),
        lambda group: group.broadcast(torch.ones(10), root=0),
        "allreduce float32[10]",
        "broadcast float32[10]",
    ),
    "shape": (
        lambda group: group.allreduce(torch.ones(10)),
        lambda group: group.allreduce(torch.ones(11)),
        "allreduce float32[10]",
        "allreduce float32[11]",
    ),
    "dtype": (
        lambda group: group.allreduce(torch.ones(10)),
        lambda group: group.allreduce(torch.ones(10, dtype=torch.float64)),
        "allreduce float32[10]",
        "allreduce float64[10]",
    ),
    "root": (
        lambda group: group.broadcast(torch.ones(3), root=0),
        lambda group: group.broadcast(torch.ones(3), root=1),
        "broadcast float32[3]",
        "broadcast float32[3]",
    ),
    "reduce operation": (
        lambda group: group.allreduce(torch.ones(3), op=torch.distributed.ReduceOp.MAX),
        lambda group: group.allreduce(torch.ones(3), op=torch.distributed.ReduceOp.MIN),
        "allreduce float32[3]",
        "allreduce float32[3]",
    ),
}


def disagree(ctx, which, checks):
    group = ctx.group(timeout=LONG, checks=checks)
    group.barrier().wait()
    majority, minority, said, other = DISAGREEMENTS[which]
    with pytest.raises(RankMismatch) as caught:
        (minority if ctx.rank == 1 else majority)(group).wait()
    text = str(caught.value)
    assert said in text
    assert f"rank 1 called {other} at groups/test_call_consistency.py:" in text
    assert 1 in caught.value.ranks
    with pytest.raises(GroupError):
        group.barrier()


@pytest.mark.parametrize("which", DISAGREEMENTS)
def test_mismatch_is_always_detected_between_thread_ranks(threads, which):
    threads.run(disagree, 3, args=(which, None))


@pytest.mark.parametrize("which", DISAGREEMENTS)
def test_mismatch_is_detected_between_processes_with_checks_enabled(ranks, which):
    ranks.run(disagree, 3, args=(which, True))


def agree(ctx, checks):
    group = ctx.group(checks=checks)
    for size in range(3):
        group.allreduce(torch.ones(size)).wait()
    sizes = [1 + (rank + ctx.rank) % 2 for rank in range(ctx.size)]
    output, source = torch.empty(sum(sizes)), torch.ones(sum(sizes))
    group.all_to_all_single(output, source, sizes, sizes).wait()  # may be uneven
    outputs = [torch.empty(2) for _ in range(ctx.size)] if ctx.rank == 1 else []
    group.gather(outputs, torch.ones(2), root=1).wait()
    if ctx.rank == 0:
        group.send(torch.ones(5), 1).wait()
    elif ctx.rank == 1:
        group.recv(torch.ones(5), 0).wait()
    group.barrier().wait()


@pytest.mark.parametrize("checks", [None, True, False])
def test_arguments_that_may_differ_between_ranks_are_not_checked(threads, ranks, checks):
    threads.run(agree, 3, args=(checks,))
    ranks.run(agree, 3, args=(checks,))


def abort_before_comparing(ctx):
    group = ctx.group(timeout=LONG, checks=True)
    group.barrier().wait()

    def abort(frame, _event, _arg):
        if frame.f_code.co_name == "_check_consistency":
            other = threading.Thread(target=group.abort)
            other.start()
            other.join()

    if ctx.rank == 0:
        sys.settrace(abort)
        try:
            with pytest.raises(GroupAborted, match="aborted the group at"):
                group.allreduce(torch.ones(2)).wait()
        finally:
            sys.settrace(None)


def test_abort_by_another_thread_while_calls_are_compared(threads, ranks):
    threads.run(abort_before_comparing, 2)
    ranks.run(abort_before_comparing, 2)


def disagree_unchecked(ctx):
    group = ctx.group("gloo", timeout=timedelta(seconds=2))
    group.barrier().wait()
    with pytest.raises((RankMismatch, CollectiveTimeout)) as caught:
        if ctx.rank == 0:
            group.allreduce(torch.ones(3)).wait()
        else:
            group.barrier().wait()
    return type(caught.value).__name__, str(caught.value)


def test_a_hang_from_mismatched_calls_is_diagnosed_without_checks(ranks):
    for kind, text in ranks.run(disagree_unchecked, 2):
        assert kind == "RankMismatch", text
        assert "rank 0 called allreduce float32[3] at groups/test_call_consistency.py" in text
        assert "rank 1 called barrier at groups/test_call_consistency.py" in text


@over_groups(backends=("local", "shm"), sizes=(2,), timeout=20, reuse=True)
def test_mismatched_reduce_op_is_named_in_the_error(group):
    op = ReduceOp.AVG if group.rank() else ReduceOp.SUM
    with pytest.raises(RankMismatch, match=r"allreduce float32\[3\].*reduce op"):
        group.allreduce(torch.ones(3), op=op).wait()
