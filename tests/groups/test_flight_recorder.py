"""The flight recorder: its records, their call sites, and its overhead."""

import threading
import time

import torch

from phalanx.groups import Record, new_group
from phalanx.testing import over_groups

from .internals import FlightRecorder


@over_groups(sizes=(1, 2), split=True)
def test_calls_are_recorded_in_order(group):
    before = time.time()
    group.allreduce(torch.ones(2, 3)).wait()
    group.broadcast(torch.ones(4, dtype=torch.int64)).wait()
    group.barrier().wait()
    after = time.time()
    first, second, third = group.records()[-3:]
    assert [r.operation for r in (first, second, third)] == ["allreduce", "broadcast", "barrier"]
    assert third.sequence == second.sequence + 1 == first.sequence + 2
    assert (first.dtype, first.shape, first.tensors) == ("float32", (2, 3), 1)
    assert (second.dtype, second.shape) == ("int64", (4,))
    assert (third.dtype, third.shape, third.tensors) == ("", (), 0)
    for record in (first, second, third):
        assert before - 1 <= record.started <= record.ended <= after + 1
        assert record.site.startswith("groups/test_flight_recorder.py:")


@over_groups(backends=["local"], sizes=(2,))
def test_the_call_site_is_the_users_line_not_torchs(group):
    import torch.distributed as dist

    dist.all_reduce(torch.ones(1), group=group)
    line = test_the_call_site_is_the_users_line_not_torchs.body.__code__.co_firstlineno + 4
    assert group.records()[-1].site == f"groups/test_flight_recorder.py:{line}"


@over_groups(backends=["local"], sizes=(2,))
def test_point_to_point_calls_have_their_own_sequence_numbers(group):
    group.barrier().wait()
    if group.rank() == 0:
        group.send(torch.ones(1), 1).wait()
    else:
        group.recv(torch.ones(1), 0).wait()
    group.barrier().wait()
    sequences = [(r.operation, r.sequence) for r in group.records()]
    assert sequences[0] == ("barrier", 1)
    assert sequences[1][1] == 1
    assert sequences[2] == ("barrier", 2)


def test_only_the_last_capacity_calls_are_kept():
    recorder = FlightRecorder(capacity=3)
    for _ in range(5):
        begin(recorder)
    assert [record.sequence for record in recorder.records()] == [3, 4, 5]


def begin(recorder):
    return recorder.begin("allreduce", [torch.ones(1)])


def test_a_call_in_flight_has_no_end_time():
    group = new_group("fake", rank=0, world_size=2)
    work = group.barrier()
    assert group.records()[-1].ended is None
    work.wait()
    assert group.records()[-1].ended is not None


def test_a_record_is_formatted_as_operation_tensor_number_and_site():
    record = Record(7, "allreduce", (10,), "float32", 1, 0.0, None, "train.py:12")
    assert str(record) == "allreduce float32[10] #7 at train.py:12"


def test_records_keep_no_tensor_alive():
    import gc
    import weakref

    group = new_group("fake", rank=0, world_size=2)
    tensor = torch.ones(3)
    seen = weakref.ref(tensor)
    group.allreduce(tensor).wait()
    del tensor
    gc.collect()
    assert seen() is None


def test_calls_without_a_wait_do_not_accumulate():
    group = new_group("fake", rank=0, world_size=2)
    for _ in range(2000):
        group.allreduce(torch.ones(1))
    assert len(group._detector.in_flight) < 500


def test_sequence_numbers_are_unique_and_gapless_across_threads(threads):
    threads.run(hammer, 2)


def hammer(ctx):
    group = ctx.group("local", checks=False)

    def work():
        for _ in range(50):
            group.allreduce(torch.ones(1)).wait()

    workers = [threading.Thread(target=work) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert sorted(r.sequence for r in group.records()) == list(range(1, 201))


def test_recording_a_call_takes_under_20_microseconds():
    """The target is 2 us (see the benchmark); ten times that is allowed on a busy machine."""
    recorder, tensors = FlightRecorder(), [torch.ones(4)]
    best = min(time_of(recorder, tensors) for _ in range(50))
    assert best < 20e-6


def time_of(recorder, tensors, calls=200):
    started = time.perf_counter()
    for _ in range(calls):
        recorder.begin("allreduce", tensors)
    return (time.perf_counter() - started) / calls
