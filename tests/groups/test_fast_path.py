"""The fast path of plain sums and barriers; apart from speed it behaves like the slow path."""

import gc
import os
import signal
import sys
import threading
import time
import weakref
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from phalanx import native
from phalanx.errors import CollectiveTimeout, GroupAborted, InvalidArgument, PeerLost, RankMismatch
from phalanx.groups import new_group
from phalanx.testing import Died, delay, faults, over_groups

from .internals import Work

pytestmark = pytest.mark.skipif(native.engine is None, reason="the engine was not built")

LONG = timedelta(seconds=60)
HERE = "groups/test_fast_path.py"


def is_fast_path(work):
    return type(work).__name__ == "FastPathWork"


def alone(**options):
    return new_group("shm", rank=0, world_size=1, store=dist.HashStore(), **options)


def line_of(function, offset):
    return f"{HERE}:{function.__code__.co_firstlineno + offset}"


# -- which calls take it -------------------------------------------------------------------


class Special(torch.Tensor):
    """A tensor subclass."""


ORDINARY = {
    **{
        str(dtype).removeprefix("torch."): torch.ones(6, dtype=dtype)
        for dtype in (
            torch.float64,
            torch.float32,
            torch.float16,
            torch.bfloat16,
            torch.int64,
            torch.int32,
            torch.int16,
            torch.int8,
            torch.uint8,
        )
    },
    "matrix": torch.ones(3, 4),
    "scalar": torch.tensor(1.0),
    "slice": torch.ones(9)[2:7],
    "row": torch.ones(4, 5)[1:2],
    "large": torch.ones(100_000),
    "parameter": torch.nn.Parameter(torch.ones(3)),
    "lazy clone": torch._lazy_clone(torch.ones(3)),
}
EXTRAORDINARY = {
    "no elements": torch.ones(0, 3),
    "bool": torch.ones(3, dtype=torch.bool),
    "complex": torch.ones(3, dtype=torch.complex64),
    "uint16": torch.ones(3, dtype=torch.uint16),
    "sparse": torch.ones(3).to_sparse(),
    "class of its own": torch.ones(3).as_subclass(Special),
    "negated": torch._neg_view(torch.full((3,), -1.0)),
    "in a list": [torch.ones(3)],
}


@over_groups(backends=["shm"], sizes=(1, 2), reuse=True)
def test_plain_sums_take_the_fast_path(group):
    for name, tensor in ORDINARY.items():
        mine = tensor.detach().clone() if name != "lazy clone" else torch._lazy_clone(torch.ones(3))
        if name == "parameter":
            mine = torch.nn.Parameter(mine)
        work = group.allreduce(mine)
        assert is_fast_path(work), name
        assert work.wait() is True
        assert mine.detach().double().unique().tolist() == [group.size()], name
        record = group.records()[-1]
        assert record.shape == tuple(mine.shape), name
        assert record.dtype == str(mine.dtype).removeprefix("torch."), name


@over_groups(backends=["shm"], sizes=(1, 2), reuse=True)
def test_other_tensors_and_options_take_the_slow_path(group):
    whole = torch.ones(4, 4)
    with pytest.raises(InvalidArgument, match="contiguous"):
        group.allreduce(whole.t()[:2])
    for name, tensor in EXTRAORDINARY.items():
        if name == "negated":
            with pytest.raises(InvalidArgument, match="lazy negation"):
                group.allreduce(tensor)
            continue
        mine = tensor if isinstance(tensor, list) else tensor.clone()
        work = group.allreduce(mine)
        assert not is_fast_path(work), name
        assert isinstance(work, Work), name
        work.wait()
    mine = torch.ones(3)
    for options in ({"op": ReduceOp.SUM}, {"timeout": LONG}, {"opts": dist.AllreduceOptions()}):
        work = group.allreduce(mine, **options)
        assert not is_fast_path(work)
        work.wait()
    work = group.barrier(timeout=LONG)
    assert not is_fast_path(work)
    work.wait()


def test_allreduce_of_a_lazy_clone_does_not_modify_the_original():
    group = alone()
    original = torch.ones(3)
    clone = torch._lazy_clone(original)
    group.allreduce(clone).wait()
    clone += 1
    assert original.tolist() == [1, 1, 1]


# -- what it returns -----------------------------------------------------------------------


def test_fast_path_work_is_a_work():
    group = alone()
    tensor = torch.ones(2)
    for work in (group.allreduce(tensor), group.barrier()):
        assert is_fast_path(work)
        assert isinstance(work, Work)
        assert isinstance(work, dist.Work)
        missing = [name for name in dir(Work) if not name.startswith("__")]
        assert not set(missing) - set(dir(type(work)))
        assert weakref.ref(work)() is work


@pytest.mark.parametrize("waited", [False, True])
def test_fast_path_work_has_the_full_work_interface(waited):
    group = alone()
    tensor = torch.ones(2)
    work = group.allreduce(tensor)
    if waited:
        assert work.wait(timeout=LONG)
        assert work.wait(LONG)
    assert work.is_completed()
    assert work.is_success()
    assert work.exception() is None
    assert work.result() == [tensor]
    assert work.source_rank() == -1
    assert work.get_future().wait()[0] is tensor
    assert work.get_future() is work.get_future()
    assert group.barrier().result() == []
    ended = group.records()[-2].ended
    work.wait()
    assert group.records()[-2].ended == ended


@over_groups(backends=["shm"], sizes=(2,))
def test_a_future_completes_and_runs_callbacks(group):
    tensor = torch.ones(2)
    doubled = group.allreduce(tensor).get_future().then(lambda done: done.value()[0] * 2)
    assert doubled.wait().tolist() == [4, 4]
    assert not group._detector.in_flight


# -- flight recorder -----------------------------------------------------------------------


def call_on_both_paths(group):
    before = time.time()
    group.allreduce(torch.ones(2, 3)).wait()
    group.broadcast(torch.ones(1)).wait()
    group.barrier().wait()
    group.allreduce([torch.ones(1)]).wait()
    group.allreduce(torch.ones(5, dtype=torch.int64)).wait()
    group.monitored_barrier()
    return before, time.time()


@over_groups(backends=["shm"], sizes=(1, 2), reuse=True)
def test_flight_recorder_entries_are_the_same_on_both_paths(group):
    first = group._recorder.collectives + 1
    before, after = call_on_both_paths(group)
    records = group.records()[-6:]
    assert [r.sequence for r in records] == list(range(first, first + 6))
    assert [(r.operation, r.dtype, r.shape, r.tensors) for r in records] == [
        ("allreduce", "float32", (2, 3), 1),
        ("broadcast", "float32", (1,), 1),
        ("barrier", "", (), 0),
        ("allreduce", "float32", (1,), 1),
        ("allreduce", "int64", (5,), 1),
        ("barrier", "", (), 0),
    ]
    assert [r.site for r in records] == [line_of(call_on_both_paths, 2 + i) for i in range(6)]
    times = [time for r in records for time in (r.started, r.ended)]
    assert times == sorted(times)
    assert before - 1 <= times[0] <= times[-1] <= after + 1


def test_a_call_in_flight_has_no_end_time():
    group = alone()
    work = group.barrier()
    assert group.records()[-1].ended is None
    assert group._detector.is_busy() is False, (
        "the engine has finished, though no thread has waited"
    )
    work.wait()
    assert group.records()[-1].ended is not None
    assert not group._detector.in_flight


def test_flight_recorder_keeps_the_last_1024_records():
    group = alone()
    for _ in range(1500):
        group.barrier().wait()
    assert [r.sequence for r in group.records()] == list(range(1500 - 1024 + 1, 1501))


# -- memory --------------------------------------------------------------------------------


def test_calls_without_a_wait_do_not_accumulate():
    group = alone()
    for _ in range(2000):
        group.allreduce(torch.ones(1))
    assert len(group._detector.in_flight) < 500


def test_completed_calls_keep_no_tensor_alive():
    group = alone()
    tensor = torch.ones(3)
    seen = weakref.ref(tensor)
    group.allreduce(tensor).wait()
    del tensor
    assert seen() is None
    tensor = torch.ones(3)
    seen = weakref.ref(tensor)
    tensor.work = group.allreduce(tensor)  # in a circle
    tensor.work.wait()
    del tensor
    gc.collect()
    assert seen() is None


def test_shutdown_releases_the_engine():
    group = alone()
    group.allreduce(torch.ones(3)).wait()
    group.allreduce(torch.ones(3))  # not waited for
    seen = weakref.ref(group._engine)
    group.shutdown()
    assert seen() is None


# -- failures ------------------------------------------------------------------------------


def stay_away(ctx, driver):
    group = ctx.group("shm", timeout=timedelta(seconds=0.5), driver=driver)
    group.barrier().wait()
    if ctx.rank == 0:
        tensor = torch.ones(4, 2)
        work = group.allreduce(tensor)
        assert is_fast_path(work)
        with pytest.raises(CollectiveTimeout, match="0.05 s"):
            work.wait(timedelta(seconds=0.05))
        assert not work.is_completed(), "a short wait leaves the call going"
        with pytest.raises(CollectiveTimeout, match="Missing: rank 1") as caught:
            work.wait()
        assert "allreduce float32[4, 2] #2" in str(caught.value)
        assert line_of(stay_away, 5) in str(caught.value)
        assert work.is_completed()
        assert work.exception() is caught.value
        with pytest.raises(CollectiveTimeout):
            group.allreduce(tensor)
        with pytest.raises(CollectiveTimeout):
            group.barrier()
    else:
        deadline = time.monotonic() + 20
        while group._detector.failure is None and time.monotonic() < deadline:
            time.sleep(0.01)
        with pytest.raises(CollectiveTimeout):
            group.allreduce(torch.ones(4, 2))


@pytest.mark.parametrize("driver", ["caller", "thread"])
def test_timeout_names_the_missing_rank(ranks, driver):
    ranks.run(stay_away, 2, args=(driver,))


def test_a_call_keeps_the_timeout_in_effect_when_it_was_issued():
    group = alone(timeout=LONG)
    before = group.allreduce(torch.ones(1))
    group.set_timeout(timedelta(seconds=5))
    after = group.allreduce(torch.ones(1))
    assert (before.timeout, after.timeout) == (60, 5)


def die_in_the_middle(ctx, driver):
    group = ctx.group("shm", timeout=LONG, driver=driver)
    tensor = torch.ones(3)
    for _ in range(100):
        group.allreduce(tensor).wait()
    if ctx.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    started = time.monotonic()
    with pytest.raises(PeerLost, match="rank 1") as caught:
        group.allreduce(tensor).wait()
    assert time.monotonic() - started < 10
    assert caught.value.ranks == (1,)
    assert caught.value.sequence == 101
    with pytest.raises(PeerLost):
        group.barrier()
    group.exclude([1])
    deadline, goes_on_as_before = time.monotonic() + 10, False
    while (
        not goes_on_as_before and time.monotonic() < deadline
    ):  # a thread has to come to rest first
        work = group.allreduce(tensor.fill_(1))
        goes_on_as_before = is_fast_path(work)
        work.wait()
        assert tensor.tolist() == [1, 1, 1]
    assert goes_on_as_before


@pytest.mark.parametrize("driver", ["caller", "thread"])
def test_the_fast_path_resumes_after_a_dead_rank_is_excluded(ranks, driver):
    outcome = ranks.run(die_in_the_middle, 2, args=(driver,), expect_dead=[1])
    assert isinstance(outcome[1], Died)
    assert outcome[0] is None


@pytest.mark.parametrize("end", ["shutdown", "abort", "leave"])
def test_a_closed_group_rejects_calls(end):
    group = alone()
    done, open_still = group.allreduce(torch.ones(1)), group.barrier()
    done.wait()
    getattr(group, end)()
    with pytest.raises(GroupAborted):
        group.allreduce(torch.ones(1))
    with pytest.raises(GroupAborted):
        group.barrier()
    assert done.wait()
    assert open_still.wait(), "the engine was done with it"
    assert len(group.records()) == 2


def test_a_group_can_be_shut_down_by_a_gc_callback_during_a_call():
    """Allocation may trigger garbage collection, and with it arbitrary Python code."""
    group, tensor = alone(), torch.ones(1)

    def close(phase, info):
        if sys._getframe(1).f_code.co_name == "allreduce":
            group.shutdown()

    thresholds = gc.get_threshold()
    gc.callbacks.append(close)
    gc.set_threshold(1)
    try:
        with pytest.raises(GroupAborted):
            group.allreduce(tensor)
    finally:
        gc.set_threshold(*thresholds)
        gc.callbacks.remove(close)
    assert group.records() == []
    assert tensor.item() == 1


def test_fault_points_are_reached_on_the_fast_path():
    group, reached = alone(), []
    handler = reached.append
    faults._faultpoints.arm(handler)
    try:
        group.allreduce(torch.ones(1)).wait()
    finally:
        faults._faultpoints.disarm(handler)
    assert reached == ["allreduce:before", "allreduce:issued", "allreduce:after"]
    work = group.barrier()
    assert is_fast_path(work)
    with faults.inject("barrier:after", delay(0)):
        faults._faultpoints.arm(handler)
        work.wait()
        work.wait()
        faults._faultpoints.disarm(handler)
    assert reached[3:] == ["barrier:after"]


# -- threads -------------------------------------------------------------------------------


def hammer(ctx, driver):
    group = ctx.group("shm", timeout=LONG, driver=driver)
    sums = []

    def work(turn):
        for i in range(200):
            tensor = torch.ones(1)
            # A tensor in a list takes the slow path; to the engine it is the same call.
            group.allreduce([tensor] if (i + turn) % 3 == 0 else tensor).wait()
            sums.append(tensor.item())

    run_together([lambda turn=turn: work(turn) for turn in range(4)])
    assert sums == [group.size()] * 800
    numbers = [record.sequence for record in group.records()]
    assert numbers == list(range(1, 801)), "in the order in which they were made"
    assert not group._detector.in_flight


def run_together(bodies):
    errors = []

    def guarded(body):
        try:
            body()
        except BaseException as error:
            errors.append(error)
            raise

    threads = [threading.Thread(target=guarded, args=(body,)) for body in bodies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


@pytest.mark.parametrize("driver", ["caller", "thread"])
def test_many_threads_can_call_concurrently(ranks, driver):
    ranks.run(hammer, 2, args=(driver,))


def wait_together(ctx):
    group = ctx.group("shm", timeout=LONG)
    for _ in range(20):
        tensor = torch.ones(10)
        if ctx.rank == 1:
            time.sleep(0.002)  # longer than the short way waits, so that the works grow
        work = group.allreduce(tensor)
        run_together([work.wait, work.wait, work.get_future, lambda work=work: work.wait(LONG)])
        assert work.get_future().wait()[0] is tensor
        assert tensor.unique().tolist() == [2]
    assert not group._detector.in_flight
    assert all(record.ended is not None for record in group.records())


def test_many_threads_can_wait_for_one_call(ranks):
    ranks.run(wait_together, 2)


def come_late(ctx):
    group = ctx.group("shm", timeout=LONG, driver="caller")
    tensor = group.allocate((100_000,)).fill_(1)
    if ctx.rank == 0:
        work = group.allreduce(tensor)
        assert is_fast_path(work)
        deadline = time.monotonic() + 20
        while not work.engine_is_done() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not work.is_completed() or tensor[0] == 2
    else:
        time.sleep(0.01)
        work = group.allreduce(tensor)
    work.wait()
    assert tensor.unique().tolist() == [2]
    group.barrier().wait()


def test_large_tensors_take_the_fast_path(ranks):
    ranks.run(come_late, 2)


# -- both paths in one call ----------------------------------------------------------------


@over_groups(backends=["shm"], sizes=(2, 4))
def test_fast_path_and_slow_path_ranks_can_meet_in_one_call(group):
    short = group.rank() % 2 == 0
    for op in (ReduceOp.SUM, ReduceOp.AVG):
        tensor = torch.full((3, 5), float(group.rank()))
        options = dist.AllreduceOptions()
        options.reduceOp = op
        if short:
            work = group.allreduce(tensor, *([] if op == ReduceOp.SUM else [op]))
        else:
            work = group.allreduce([tensor], options)
        assert is_fast_path(work) == short
        work.wait()
        total = sum(range(group.size()))
        assert tensor.unique().tolist() == [total / (1 if op == ReduceOp.SUM else group.size())]
    (group.barrier() if short else group.barrier(dist.BarrierOptions())).wait()


@over_groups(backends=["shm"], sizes=(2,))
def test_shape_mismatch_is_detected_on_the_fast_path(group):
    with pytest.raises(RankMismatch, match=r"float32\[(2, 3|3, 2)\]"):
        group.allreduce(torch.ones(2, 3) if group.rank() else torch.ones(3, 2)).wait()


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_average_takes_the_fast_path(dtype):
    group = alone()
    tensor = torch.full((6,), 7, dtype=dtype)
    work = group.allreduce(tensor, op=ReduceOp.AVG)
    assert is_fast_path(work)
    work.wait()
    assert tensor.tolist() == [7] * 6
    group.shutdown()
