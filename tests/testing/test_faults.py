"""Fault injection: ranks that are killed, stopped or delayed at a fault point."""

import os
import signal
import threading
import time

import pytest
import torch

from phalanx.errors import GroupError, InvalidArgument
from phalanx.testing import Died, Fault, RankFailures, Stopped, delay, faults, kill, stop
from phalanx.testing.faults import exit_abruptly, hold_gil, kill_supervisor, segfault

from .internals import _faultpoints


def walk(ctx, steps=3):
    for step in range(steps):
        faults.reach("step")
        ctx.store.set(f"{ctx.rank}/{step}", "done")
    return steps


def test_nothing_is_armed_by_default(ranks):
    assert _faultpoints.armed == ()
    assert ranks.run(walk, 2) == [3, 3]


def test_kill_ends_one_rank_at_its_point(ranks):
    assert ranks.run(walk, 3, faults=[Fault("step", kill(), rank=1)]) == [3, Died(-9), 3]
    assert ranks.run(walk, 3) == [3, 3, 3]


def test_kill_with_another_signal(ranks):
    fault = Fault("step", kill(signal.SIGABRT), rank=0)
    assert ranks.run(walk, 1, faults=[fault]) == [Died(-signal.SIGABRT)]


def handle_in_the_main_thread(ctx):
    """Reach the point in a thread that blocks the signal."""
    handled = threading.Event()
    signal.signal(signal.SIGUSR1, lambda *_: handled.set())

    def reach():
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
        faults.reach("step")
        handled.wait(10)

    thread = threading.Thread(target=reach)
    thread.start()
    deadline = time.monotonic() + 5
    while not handled.is_set() and time.monotonic() < deadline:
        time.sleep(0.01)
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    return handled.is_set()


def test_a_signal_is_sent_to_the_process_and_not_to_one_thread(ranks):
    fault = Fault("step", kill(signal.SIGUSR1))
    assert ranks.run(handle_in_the_main_thread, 1, faults=[fault]) == [True]


def walk_or_watch(ctx):
    """Rank 0 walks; rank 1 returns the number of steps that rank 0 completed."""
    if ctx.rank == 0:
        return walk(ctx)
    for step in range(3):
        if not wait_for(ctx.store, f"0/{step}"):
            return step
    return 3


def wait_for(store, key, timeout=0.5):
    deadline = time.monotonic() + timeout
    while not store.check([key]):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


@pytest.mark.parametrize("nth", [1, 3])
def test_a_fault_triggers_at_the_nth_pass(ranks, nth):
    fault = Fault("step", kill(), rank=0, nth=nth)
    assert ranks.run(walk_or_watch, 2, faults=[fault]) == [Died(-9), nth - 1]


def test_stop_without_resume(ranks):
    fault = Fault("step", stop(), rank=0)
    assert ranks.run(walk_or_watch, 2, faults=[fault]) == [Stopped(), 0]
    assert ranks.run(walk, 2) == [3, 3]


def walk_timed(ctx):
    start = time.monotonic()
    walk(ctx)
    return os.getpid(), time.monotonic() - start


def test_stop_with_resume(ranks):
    fault = Fault("step", stop(resume_after=0.4), rank=0)
    (pid, stopped), (_, free) = ranks.run(walk_timed, 2, faults=[fault])
    assert stopped >= 0.4
    assert stopped > free
    assert ranks.run(walk_timed, 1)[0][0] == pid


def test_delay_on_every_rank(ranks):
    results = ranks.run(walk_timed, 2, faults=[Fault("step", delay(0.1), nth=2)])
    assert all(seconds >= 0.1 for _, seconds in results)


def test_several_faults(ranks):
    both = [Fault("step", delay(0.2), rank=0), Fault("step", kill(), rank=1, nth=2)]
    (_, seconds), died = ranks.run(walk_timed, 2, faults=both)
    assert seconds >= 0.2
    assert died == Died(-9)


@pytest.mark.parametrize(
    ("action", "status"),
    [(segfault(), -signal.SIGSEGV), (exit_abruptly(), 137), (exit_abruptly(3), 3)],
    ids=str,
)
def test_ways_to_die(ranks, action, status):
    assert ranks.run(walk, 2, faults=[Fault("step", action, rank=1)]) == [3, Died(status)]


def count_while_walking(ctx):
    """Return the longest time for which another thread did not run."""
    gaps, done = [], threading.Event()

    def count():
        last = time.monotonic()
        while not done.wait(0.001):
            gaps.append(time.monotonic() - last)
            last += gaps[-1]

    thread = threading.Thread(target=count)
    thread.start()
    walk(ctx)
    done.set()
    thread.join()
    return max(gaps, default=0.0)


def test_hold_gil_blocks_all_threads(ranks):
    (held,) = ranks.run(count_while_walking, 1, faults=[Fault("step", hold_gil(0.5), nth=2)])
    assert held >= 0.5


@pytest.mark.parametrize("action", [kill(), delay(0.1)])
def test_a_fault_that_is_never_reached_fails_the_run(ranks, action):
    with pytest.raises(RankFailures, match="rank 1 finished, but did not reach its fault"):
        ranks.run(walk, 2, faults=[Fault("stepp", action, rank=1)])


def test_an_optional_fault_need_not_be_reached(ranks):
    fault = Fault("stepp", kill(), rank=1, optional=True)
    assert ranks.run(walk, 2, faults=[fault]) == [3, 3]
    fault = Fault("step", kill(), rank=1, optional=True)
    assert ranks.run(walk, 2, faults=[fault]) == [3, Died(-9)]


def inject_delay(ctx):
    with faults.inject("step", delay(0.2), nth=2):
        _, seconds = walk_timed(ctx)
    return seconds >= 0.2


def inject_kill(ctx):
    if ctx.rank == 1:
        with faults.inject("step", kill()):
            walk(ctx)


def test_a_body_can_inject_faults(ranks, threads):
    assert ranks.run(inject_delay, 2) == [True, True]
    assert threads.run(inject_delay, 2) == [True, True]
    assert _faultpoints.armed == ()
    assert ranks.run(inject_kill, 2, expect_dead={1}) == [None, Died(-9)]


def lose_a_peer(ctx):
    group = ctx.group()
    # A call that was issued before its rank died may still be completed; a second one cannot.
    with pytest.raises(GroupError):
        for _ in range(2):
            group.allreduce(torch.ones(1)).wait()
    return "noticed"


@pytest.mark.parametrize("point", ["allreduce:before", "allreduce:issued"])
def test_group_calls_have_fault_points(ranks, point):
    results = ranks.run(lose_a_peer, 3, faults=[Fault(point, kill(), rank=2)])
    assert results == ["noticed", "noticed", Died(-9)]


def test_threads_can_only_be_delayed(threads):
    results = threads.run(walk_timed, 2, faults=[Fault("step", delay(0.2), rank=1)])
    assert results[1][1] >= 0.2
    assert results[1][1] > results[0][1]
    for action in (kill(), stop(), stop(resume_after=1), segfault(), hold_gil(1)):
        with pytest.raises(InvalidArgument, match="only delay a thread"):
            threads.run(walk, 2, faults=[Fault("step", action)])


def test_arguments_are_checked(ranks, threads):
    with pytest.raises(InvalidArgument, match="nth must be at least 1"):
        Fault("step", kill(), nth=0)
    with pytest.raises(InvalidArgument, match="expect_dead"):
        ranks.run(walk, 2, expect_dead={2})
    with pytest.raises(InvalidArgument, match="use it in a FaultPlan"):
        Fault("step", kill_supervisor())
    for options in ({"incarnation": 1}, {"once": True}, {"survivors": 1}):
        with pytest.raises(InvalidArgument, match="workers of run_elastic"):
            ranks.run(walk, 2, faults=[Fault("step", kill(), **options)])
    for each in (ranks, threads):
        with pytest.raises(InvalidArgument, match="fault for rank 2"):
            each.run(walk, 2, faults=[Fault("step", delay(1), rank=2)])
