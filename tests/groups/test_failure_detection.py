"""Dead, stopped and late ranks: every other rank raises an error that names them."""

import os
import re
import signal
import subprocess
import sys
import time
import traceback
from datetime import timedelta

import pytest
import torch

from phalanx.errors import CollectiveTimeout, GroupAborted, GroupError, PeerLost
from phalanx.groups import new_group
from phalanx.testing import Died, Fault, faults, kill, stop
from ports import free_port

from .internals import override_timing

LONG = timedelta(seconds=60)
SHORT = timedelta(seconds=0.5)


def lose_a_rank(ctx, operation):
    group = ctx.group("gloo", timeout=LONG)
    group.barrier().wait()
    started = time.monotonic()
    with pytest.raises(PeerLost) as caught:
        for _ in range(50):
            call(group, operation)
    error = caught.value
    assert error.lost == (2,)
    assert time.monotonic() - started < 5, "well before the deadline of a minute"
    assert "test_failure_detection.py:" in str(error)
    assert "rank 2 (pid" in str(error)
    assert set(error.reports) == {0, 1, 3} - {ctx.rank} | {2}
    assert error.reports[2].state == "dead"
    return str(error)


def call(group, operation):
    tensor = torch.ones(20_000)
    if operation == "allreduce":
        return group.allreduce(tensor).wait()
    if operation == "broadcast":
        return group.broadcast(tensor, root=2).wait()
    if operation == "allgather":
        outputs = [torch.empty_like(tensor) for _ in range(group.size())]
        return group.allgather(outputs, tensor).wait()
    if operation == "future":
        return group.allreduce(tensor).get_future().wait()
    return group.barrier().wait()


@pytest.mark.parametrize(
    ("operation", "point"),
    [
        ("allreduce", "before"),
        ("allreduce", "issued"),
        ("broadcast", "issued"),
        ("allgather", "before"),
        ("barrier", "issued"),
    ],
)
def test_a_killed_rank_raises_peer_lost_on_every_other_rank(ranks, operation, point):
    nth = 3 if operation == "barrier" else 2  # the body begins with a barrier
    strike = Fault(f"{operation}:{point}", kill(), rank=2, nth=nth)
    outcome = ranks.run(lose_a_rank, 4, args=(operation,), faults=[strike], timeout=20)
    assert isinstance(outcome[2], Died)


def lose_a_rank_behind_a_future(ctx):
    group = ctx.group("gloo", timeout=LONG)
    started = time.monotonic()
    with pytest.raises(RuntimeError, match="rank 2 .* is dead"):
        for _ in range(50):
            call(group, "future")
    assert time.monotonic() - started < 5


def test_a_future_fails_when_a_peer_dies(ranks):
    strike = Fault("allreduce:issued", kill(), rank=2, nth=2)
    ranks.run(lose_a_rank_behind_a_future, 4, faults=[strike], timeout=20)


def lose_a_peer_of_a_transfer(ctx):
    group = ctx.group("gloo", timeout=LONG)
    group.barrier().wait()
    if ctx.rank == 2:
        faults.reach("now")
    with pytest.raises(PeerLost) as caught:
        if ctx.rank == 0:
            group.recv(torch.empty(3), 2).wait()
        else:
            group.send(torch.ones(50_000), 2).wait()
    assert caught.value.lost == (2,)


def test_send_and_recv_raise_when_the_peer_dies(ranks):
    ranks.run(lose_a_peer_of_a_transfer, 3, faults=[Fault("now", kill(), rank=2)], timeout=20)


def go_on_with_survivors(ctx):
    group = ctx.group("gloo", timeout=LONG)
    with pytest.raises(PeerLost) as caught:
        for _ in range(50):
            group.allreduce(torch.ones(10)).wait()
    group.abort()
    alive = [rank for rank in range(group.size()) if rank not in caught.value.lost]
    rest = ctx.closing(group.split_group(alive))
    tensor = torch.ones(1)
    rest.allreduce(tensor).wait()
    assert tensor.item() == 3
    assert rest.global_ranks == tuple(alive)
    return rest.rank()


def test_survivors_split_off_a_new_group_and_continue(ranks):
    strike = Fault("allreduce:issued", kill(), rank=1, nth=3)
    outcome = ranks.run(go_on_with_survivors, 4, faults=[strike], timeout=20)
    assert [outcome[0], *outcome[2:]] == [0, 1, 2]


def die_behind_a_busy_rank(ctx, backend):
    """Rank 1, the root that rank 0 waits for, is in user code when rank 2 dies."""
    group = ctx.group(backend, timeout=LONG)
    group.barrier().wait()
    if ctx.rank == 1:
        ctx.store.wait(["noticed"])
        return None
    if ctx.rank == 2:
        while not group._status_store._report_requests():  # rank 0 has begun to wonder
            time.sleep(0.005)
        ctx.store.set("died", str(time.monotonic()))
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(PeerLost) as caught:
        group.broadcast(torch.ones(4), root=1).wait()
    noticed = time.monotonic()
    ctx.store.set("noticed", "")
    assert caught.value.lost == (2,)
    states = {rank: report.state for rank, report in caught.value.reports.items()}
    assert states[2] == "dead"
    assert states[1] in ("busy", "idle")  # by whether its watcher had time to answer
    assert ("rank 1: busy" if states[1] == "busy" else "rank 1: alive") in str(caught.value)
    return noticed - float(ctx.store.get("died"))


@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_a_death_is_reported_at_once_while_another_rank_is_busy(ranks, backend):
    """Torch's engines do not notice the death of a rank they receive nothing from."""
    runs = [
        ranks.run(die_behind_a_busy_rank, 3, args=(backend,), expect_dead=[2]) for _ in range(3)
    ]
    assert min(times[0] for times in runs) < 0.5  # gathering reports from all takes 0.75


def stall(ctx, seconds):
    group = ctx.group(timeout=LONG)
    group.broadcast(torch.ones(4)).wait()
    if ctx.rank == 1:
        while not ctx.store.check(["over/0", "over/2"]):
            time.sleep(0.01)  # busy in user code
        with pytest.raises(CollectiveTimeout):
            eventually_refused(group)
        return
    with pytest.raises(CollectiveTimeout) as caught:
        group.allreduce(torch.ones(3, dtype=torch.float64), timeout=seconds).wait()
    ctx.store.set(f"over/{ctx.rank}", "")
    error = caught.value
    assert error.missing == (1,)
    assert error.sequence == 2
    assert error.operation == "allreduce float64[3]"
    report = error.reports[1]
    assert (report.state, report.operation, report.sequence) == ("idle", "broadcast float32[4]", 1)
    assert "test_failure_detection.py" in report.site
    assert "in stall" in report.here
    assert "Missing: rank 1." in str(error)


def lose_and_time_out(ctx, backend):
    first, second = ctx.group(backend, name="first"), ctx.group(backend, name="second")
    if ctx.rank == 1:
        ctx.store.wait(["over"])
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(CollectiveTimeout) as late:
        first.allreduce(torch.ones(3), timeout=SHORT).wait()
    work = second.allreduce(torch.ones(3))
    ctx.store.set("over", "")
    with pytest.raises(PeerLost) as lost:
        work.wait()
    return ["".join(traceback.format_exception(each.value)) for each in (late, lost)]


@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_tracebacks_do_not_chain_internal_timeouts(ranks, backend):
    late, lost = ranks.run(lose_and_time_out, 2, args=(backend,), expect_dead=[1])[0]
    assert late.count("Traceback") == 1, late
    assert lost.count("Traceback") <= 2, lost
    for text in (late, lost):
        assert "During handling" not in text


def eventually_refused(group):
    """Call until this rank has learned that the group failed in the meantime."""
    until = time.monotonic() + 10
    while time.monotonic() < until:
        group.allreduce(torch.ones(3, dtype=torch.float64)).wait()


def test_timeout_reports_where_a_process_is_in_user_code(ranks):
    ranks.run(stall, 3, args=(SHORT,))


def test_timeout_reports_where_a_thread_is_in_user_code(threads):
    threads.run(stall, 3, args=(SHORT,))


def stop_for_good(ctx):
    group = ctx.group("gloo", timeout=LONG)
    group.barrier().wait()
    if ctx.rank == 1:
        faults.reach("now")
    started = time.monotonic()
    with pytest.raises(CollectiveTimeout) as caught:
        group.allreduce(torch.ones(3), timeout=SHORT).wait()
    assert caught.value.missing == (1,)
    assert caught.value.reports[1].state == "stopped"
    assert 0.45 < time.monotonic() - started < 5


def test_a_stopped_rank_causes_a_timeout_that_names_it(ranks):
    ranks.run(stop_for_good, 3, faults=[Fault("now", stop(), rank=1)], timeout=20)


def stop_the_host_of_the_store(ctx, port):
    with override_timing(request_timeout=0.3, report_timeout=0.3):
        lose_the_host_of_the_store(ctx, port)


def lose_the_host_of_the_store(ctx, port):
    place = {"store": f"tcp://127.0.0.1:{port}", "rank": ctx.rank, "world_size": ctx.size}
    group = ctx.closing(new_group("gloo", LONG, **place))
    group.barrier().wait()
    if ctx.rank == 0:
        faults.reach("now")
    started = time.monotonic()
    with pytest.raises(CollectiveTimeout, match="the store does not answer") as caught:
        group.allreduce(torch.ones(3), timeout=SHORT).wait()
    assert time.monotonic() - started < 10
    assert caught.value.reports[0].state == "stopped"


def test_deadlines_hold_when_the_store_does_not_answer(ranks):
    strike = Fault("now", stop(), rank=0)
    ranks.run(stop_the_host_of_the_store, 3, args=(free_port(),), faults=[strike], timeout=30)


def stop_for_a_while(ctx):
    group = ctx.group("gloo", timeout=LONG)
    group.barrier().wait()
    tensor = torch.ones(3)
    group.allreduce(tensor).wait()
    assert tensor.tolist() == [3.0] * 3
    group.barrier().wait()


def test_a_rank_stopped_for_less_than_the_deadline_does_not_fail_the_call(ranks):
    pause = Fault("allreduce:before", stop(resume_after=0.5), rank=1)
    ranks.run(stop_for_a_while, 3, faults=[pause], timeout=20)


# -- deadlines -----------------------------------------------------------------------------


def miss_every_deadline(ctx, how):
    group = ctx.group(timeout=SHORT if how == "group" else LONG)
    if ctx.rank == 1:
        ctx.store.wait(["over"])
        return
    started = time.monotonic()
    with pytest.raises(CollectiveTimeout) as caught:
        if how == "group":
            group.allreduce(torch.ones(1)).wait()
        elif how == "call":
            group.allreduce(torch.ones(1), timeout=SHORT).wait()
        elif how == "recv":
            group.recv(torch.ones(1), 1, timeout=SHORT).wait()
        elif how == "set_timeout":
            group.set_timeout(SHORT)
            group.barrier().wait()
    elapsed = time.monotonic() - started
    ctx.store.set("over", "")
    assert 0.45 < elapsed < 4
    assert caught.value.missing == (1,)
    with pytest.raises(GroupError):  # what failed stays failed, and says so at once
        group.barrier()


@pytest.mark.parametrize("how", ["group", "call", "recv", "set_timeout"])
def test_deadlines_are_honoured_by_process_ranks(ranks, how):
    ranks.run(miss_every_deadline, 2, args=(how,))


@pytest.mark.parametrize("how", ["recv", "set_timeout"])
def test_deadlines_are_honoured_by_thread_ranks(threads, how):
    threads.run(miss_every_deadline, 2, args=(how,))


def wait_impatiently(ctx):
    group = ctx.group(timeout=LONG)
    if ctx.rank == 1:
        ctx.store.wait(["waited"])
    work = group.allreduce(tensor := torch.ones(2))
    if ctx.rank == 0:
        started = time.monotonic()
        with pytest.raises(CollectiveTimeout, match="Missing: rank 1") as caught:
            work.wait(timedelta(milliseconds=300))
        elapsed = time.monotonic() - started
        (told,) = re.findall(r"timed out after ([\d.]+) s", str(caught.value))
        assert told == "0.3", "the wait's own time, not the call's"
        assert 0.29 < elapsed < 2, "giving up includes asking around, for up to a second"
        assert not work.is_completed()
        ctx.store.set("waited", "")
    work.wait()
    assert tensor.tolist() == [2.0, 2.0]


def test_a_wait_that_times_out_leaves_the_call_in_flight(threads, ranks):
    threads.run(wait_impatiently, 2)
    ranks.run(wait_impatiently, 2)


# -- abort and shutdown --------------------------------------------------------------------


def abort_under_way(ctx):
    group = ctx.group(timeout=LONG)
    group.barrier().wait()
    if ctx.rank == 0:
        ctx.store.wait([f"waiting/{rank}" for rank in range(1, ctx.size)])
        group.abort()
        with pytest.raises(GroupAborted, match="this rank aborted the group"):
            group.allreduce(torch.ones(1))
        return
    work = group.allreduce(torch.ones(1))
    ctx.store.set(f"waiting/{ctx.rank}", "")
    started = time.monotonic()
    with pytest.raises(
        GroupAborted, match=r"rank 0 aborted the group at .*test_failure_detection.py:\d+"
    ):
        work.wait()
    assert time.monotonic() - started < 5
    group.abort()
    again = ctx.group(timeout=LONG, name="again", rank=ctx.rank - 1, world_size=ctx.size - 1)
    again.barrier().wait()


def test_abort_fails_pending_calls_on_every_rank(threads, ranks):
    threads.run(abort_under_way, 3)
    ranks.run(abort_under_way, 3)


def leave_early(ctx):
    group = ctx.group(timeout=LONG)
    group.barrier().wait()
    if ctx.rank == 2:
        group.shutdown()
        group.shutdown()  # twice is no harm
        assert "shut the group down" in repr(group)
        ctx.store.wait(["told/0", "told/1"])
        return
    started = time.monotonic()
    with pytest.raises(GroupAborted, match="rank 2 shut the group down at"):
        group.allreduce(torch.ones(1)).wait()
    assert time.monotonic() - started < 5
    ctx.store.set(f"told/{ctx.rank}", "")


def test_calls_fail_naming_the_rank_that_shut_down(threads, ranks):
    threads.run(leave_early, 3)
    ranks.run(leave_early, 3)


def abort_with_a_call_under_way(ctx):
    group = ctx.group("gloo", timeout=LONG)
    group.barrier().wait()
    if ctx.rank == 1:
        ctx.store.wait(["gone"])
        return
    group.allreduce(torch.ones(1))
    started = time.monotonic()
    group.abort()
    assert time.monotonic() - started < 2, "letting go must not wait for Gloo's own timeout"
    ctx.store.set("gone", "")


def test_abort_with_a_call_in_flight_does_not_block(ranks):
    ranks.run(abort_with_a_call_under_way, 2)


def a_thread_that_ends(ctx):
    group = ctx.group(timeout=LONG)
    group.barrier().wait()
    ctx.leave_open()
    if ctx.rank == 1:
        return
    with pytest.raises(PeerLost, match="rank 1 .*thread") as caught:
        group.barrier().wait()
    assert caught.value.lost == (1,)


def test_a_thread_rank_that_ends_raises_peer_lost(threads):
    threads.run(a_thread_that_ends, 2)


def describe_a_peer_that_still_exits(ctx):
    group = ctx.group("shm", timeout=LONG)
    group.barrier().wait()
    # The engine may notice a death before /proc shows it.
    failure = group._detector.lost_failure([1 - ctx.rank], group._recorder.last)
    assert "thread" not in failure.cause


def test_a_process_is_never_described_as_a_thread(ranks):
    ranks.run(describe_a_peer_that_still_exits, 2)


def lengthen_the_deadline(ctx):
    group = ctx.group("gloo", timeout=SHORT)
    group.set_timeout(LONG)
    if ctx.rank == 1:
        ctx.store.wait(["waiting"])
        time.sleep(1.5)  # longer than the group's first deadline, and that is the point
    work = group.allreduce(torch.ones(1))
    ctx.store.set("waiting", "")
    work.wait()


def test_set_timeout_extends_the_engine_deadline(ranks):
    ranks.run(lengthen_the_deadline, 2)


SCRIPT = """
import os, sys, torch
from datetime import timedelta
from phalanx.groups import new_group
from phalanx.groups._timing import override_timing
rank = next((rank for rank in range(4) if not os.fork()), None)  # so that torch is imported once
if rank is None:
    print(*(os.waitstatus_to_exitcode(os.wait()[1]) for _ in range(4)))
    sys.exit()
os.dup2(os.open(f"{sys.argv[1]}/error{rank}", os.O_CREAT | os.O_WRONLY), 2)
place = {"store": f"file://{sys.argv[1]}/meeting", "rank": rank, "world_size": 4}
group = new_group("gloo", timedelta(seconds=50), **place)
group.barrier().wait()
if group.rank() == 2:
    os.kill(os.getpid(), 9)
group.allreduce(torch.ones(100)).wait()
"""


@pytest.mark.slow
def test_a_script_exits_at_once_after_losing_a_peer(tmp_path):
    command = [sys.executable, "-c", SCRIPT, tmp_path]
    began = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert time.monotonic() - began < 40, "not after Gloo's own timeout"
    assert done.stdout.split() == ["-9", "1", "1", "1"]
    for rank in (0, 1, 3):
        error = (tmp_path / f"error{rank}").read_text()
        assert "PeerLost" in error
        assert "rank 2 (pid" in error
