"""Both of torch's call forms for every collective, and the Work handles that calls return."""

import gc
import threading
import time
import weakref
from datetime import timedelta

import torch
from torch._C import _distributed_c10d as c10d
from torch.distributed import ReduceOp

from phalanx.groups import Work
from phalanx.testing import over_groups

over_two = over_groups(sizes=(2,), reuse=True)
SOON = timedelta(seconds=20)
MAX, AVG = ReduceOp.MAX, ReduceOp.AVG


def options(kind, **fields):
    """Create one of torch's options objects, with some fields set."""
    made = kind()
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def pair(group, scale=1.0):
    """Return this rank's input: ``[1, 2]`` on rank 0 and ``[3, 4]`` on rank 1."""
    return scale * torch.tensor([[1.0, 2.0], [3.0, 4.0]])[group.rank()]


def check(group, forms, bring, expected):
    """Make one call in every form; each form takes the input and returns (work, output)."""
    for number, form in enumerate(forms):
        work, output = form(group, bring())
        assert isinstance(work, Work)
        assert work.wait() is True
        assert output.tolist() == expected, f"form {number}"


# -- reductions ----------------------------------------------------------------------------

MAX_OF_SEVERAL = options(c10d.AllreduceCoalescedOptions, reduceOp=MAX)
SUM_FORMS = [
    lambda g, t: (g.allreduce(t), t),
    lambda g, t: (g.allreduce([t]), t),
    lambda g, t: (g.allreduce(tensor=t), t),
    lambda g, t: (g.allreduce(t, timeout=SOON), t),
    lambda g, t: (g.allreduce([t], c10d.AllreduceOptions()), t),
    lambda g, t: (g.allreduce_coalesced([t]), t),
]
MAX_FORMS = [
    lambda g, t: (g.allreduce(t, MAX), t),
    lambda g, t: (g.allreduce(t, op=MAX, timeout=SOON), t),
    lambda g, t: (g.allreduce(t, MAX, SOON), t),
    lambda g, t: (g.allreduce(t, ReduceOp(MAX)), t),
    lambda g, t: (g.allreduce(tensor=t, op=MAX), t),
    lambda g, t: (g.allreduce([t], options(c10d.AllreduceOptions, reduceOp=MAX)), t),
    lambda g, t: (g.allreduce([t], opts=options(c10d.AllreduceOptions, reduceOp=MAX)), t),
    lambda g, t: (g.allreduce_coalesced([t], MAX), t),
    lambda g, t: (g.allreduce_coalesced([t], MAX_OF_SEVERAL), t),
    lambda g, t: (g.allreduce_coalesced([t], opts=MAX_OF_SEVERAL), t),
]
REDUCE_FORMS = [
    lambda g, t: (g.reduce(t, 1, MAX), t),
    lambda g, t: (g.reduce(t, root=1, op=MAX, timeout=SOON), t),
    lambda g, t: (g.reduce(tensor=t, root=1, op=MAX), t),
    lambda g, t: (g.reduce([t], options(c10d.ReduceOptions, rootRank=1, reduceOp=MAX)), t),
    lambda g, t: (g.reduce([t], opts=options(c10d.ReduceOptions, rootRank=1, reduceOp=MAX)), t),
]


@over_two
def test_allreduce(group):
    check(group, SUM_FORMS, lambda: pair(group), [4.0, 6.0])
    check(group, MAX_FORMS, lambda: pair(group), [3.0, 4.0])


@over_two
def test_reduce_to_root(group):
    expected = [[1.0, 2.0], [3.0, 4.0]][group.rank()]  # rank 1 has the greatest already
    check(group, REDUCE_FORMS, lambda: pair(group), expected)
    expected = [[-1.0, -2.0], [-1.0, -2.0]][group.rank()]
    check(group, REDUCE_FORMS, lambda: pair(group, -1.0), expected)


@over_two
def test_reduce_scatter(group):
    opts = options(c10d.ReduceScatterOptions, reduceOp=MAX)

    def parts(t):
        return list(t.view(2, 1).unbind())

    listed = [
        lambda g, t, o: g.reduce_scatter(o, parts(t), MAX),
        lambda g, t, o: g.reduce_scatter(o, parts(t), op=MAX, timeout=SOON),
        lambda g, t, o: g.reduce_scatter([o], [parts(t)], opts),
        lambda g, t, o: g.reduce_scatter([o], [parts(t)], opts=opts),
        lambda g, t, o: g.reduce_scatter_single(o, t, opts),
        lambda g, t, o: g.reduce_scatter_single(o, t, opts=opts),
        lambda g, t, o: g.reduce_scatter_single(o, t, op=MAX, timeout=SOON),
        lambda g, t, o: g._reduce_scatter_base(o, t, opts),
        lambda g, t, o: g.reduce_scatter_single_coalesced([o], [t], opts),
        lambda g, t, o: g.reduce_scatter_tensor_coalesced([o], [t], opts=opts),
    ]
    expected = [3.0, 4.0][group.rank()]
    check(group, map(into_blank, listed), lambda: pair(group), [expected])


@over_two
def test_torch_parameter_names_are_accepted(group):
    whole, output = pair(group), torch.zeros(1)
    group.reduce_scatter(output=output, input=list(whole.view(2, 1).unbind())).wait()
    assert output.tolist() == [[4.0, 6.0][group.rank()]]
    group.reduce_scatter_single(outputTensor=output, inputTensor=whole).wait()
    group._reduce_scatter_base(outputTensor=output, inputTensor=whole).wait()
    assert output.tolist() == [[4.0, 6.0][group.rank()]]


def into_blank(call, count=1):
    """Make a form for `check` out of a call that has a separate output."""

    def form(group, tensor):
        output = torch.zeros(count)
        return call(group, tensor, output), output

    return form


# -- one to all, all to one ----------------------------------------------------------------


@over_two
def test_broadcast(group):
    opts = options(c10d.BroadcastOptions, rootRank=1)
    forms = [
        lambda g, t: (g.broadcast(t, 1), t),
        lambda g, t: (g.broadcast(t, root=1, timeout=SOON), t),
        lambda g, t: (g.broadcast(tensor=t, root=1), t),
        lambda g, t: (g.broadcast([t], opts), t),
        lambda g, t: (g.broadcast([t], opts=opts), t),
        lambda g, t: (g.broadcast(tensors=[t], opts=opts), t),
    ]
    check(group, forms, lambda: pair(group), [3.0, 4.0])
    check(group, [lambda g, t: (g.broadcast([t]), t)], lambda: pair(group), [1.0, 2.0])


@over_two
def test_gather(group):
    opts = options(c10d.GatherOptions, rootRank=1)
    root = group.rank() == 1

    def rows(output):
        return list(output.view(2, 2).unbind()) if root else []

    calls = [
        lambda g, t, o: g.gather(rows(o), t, 1),
        lambda g, t, o: g.gather(rows(o), t, root=1, timeout=SOON),
        lambda g, t, o: g.gather(output_tensors=rows(o), input_tensor=t, root=1),
        lambda g, t, o: g.gather([rows(o)] if root else [], [t], opts),
        lambda g, t, o: g.gather([rows(o)] if root else [], [t], opts=opts),
    ]
    expected = [1.0, 2.0, 3.0, 4.0] if root else [0.0] * 4
    check(group, [into_blank(call, 4) for call in calls], lambda: pair(group), expected)


@over_two
def test_scatter(group):
    opts = options(c10d.ScatterOptions, rootRank=1)
    root = group.rank() == 1

    def parts(t):
        return list(t.view(2, 1).unbind()) if root else []

    calls = [
        lambda g, t, o: g.scatter(o, parts(t), 1),
        lambda g, t, o: g.scatter(o, parts(t), root=1, timeout=SOON),
        lambda g, t, o: g.scatter(output_tensor=o, input_tensors=parts(t), root=1),
        lambda g, t, o: g.scatter([o], [parts(t)] if root else [], opts),
        lambda g, t, o: g.scatter([o], [parts(t)] if root else [], opts=opts),
    ]
    check(group, map(into_blank, calls), lambda: pair(group), [[3.0], [4.0]][group.rank()])


# -- all to all ----------------------------------------------------------------------------


@over_two
def test_allgather(group):
    opts = c10d.AllgatherOptions()

    def rows(output):
        return list(output.view(2, 2).unbind())

    calls = [
        lambda g, t, o: g.allgather(rows(o), t),
        lambda g, t, o: g.allgather(rows(o), t, SOON),
        lambda g, t, o: g.allgather(rows(o), input_tensor=t, timeout=SOON),
        lambda g, t, o: g.allgather([rows(o)], [t]),
        lambda g, t, o: g.allgather([rows(o)], [t], opts),
        lambda g, t, o: g.allgather([rows(o)], [t], opts=opts),
        lambda g, t, o: g.all_gather_single(o, t),
        lambda g, t, o: g.all_gather_single(o, t, opts),
        lambda g, t, o: g._allgather_base(o, t, opts=opts),
        lambda g, t, o: g.all_gather_single_coalesced([o], [t], opts),
        lambda g, t, o: g.allgather_into_tensor_coalesced([o], [t], opts=opts),
        lambda g, t, o: g.allgather_coalesced([[row] for row in rows(o)], [t], opts),
    ]
    expected = [1.0, 2.0, 3.0, 4.0]
    check(group, [into_blank(call, 4) for call in calls], lambda: pair(group), expected)


@over_two
def test_all_to_all(group):
    opts = c10d.AllToAllOptions()

    def parts(t):
        return list(t.view(2, 1).unbind())

    calls = [
        lambda g, t, o: g.alltoall_base(o, t, [], []),
        lambda g, t, o: g.alltoall_base(o, t, [1, 1], [1, 1]),
        lambda g, t, o: g.alltoall_base(o, t, [1, 1], [1, 1], opts),
        lambda g, t, o: g.alltoall_base(o, t, [1, 1], [1, 1], opts=opts),
        lambda g, t, o: g.alltoall_base(o, t, [1, 1], [1, 1], timeout=SOON),
        lambda g, t, o: g.alltoall_base(o, t, [1, 1], [1, 1], SOON),
        lambda g, t, o: g.all_to_all_single(o, t),
        lambda g, t, o: g.all_to_all_single(o, t, output_split_sizes=[1, 1], timeout=SOON),
        lambda g, t, o: g.alltoall(parts(o), parts(t)),
        lambda g, t, o: g.alltoall(parts(o), parts(t), opts),
        lambda g, t, o: g.alltoall(parts(o), parts(t), opts=opts),
    ]
    expected = [[1.0, 3.0], [2.0, 4.0]][group.rank()]
    check(group, [into_blank(call, 2) for call in calls], lambda: pair(group), expected)


@over_two
def test_barrier_and_point_to_point(group):
    for work in (
        group.barrier(),
        group.barrier(c10d.BarrierOptions()),
        group.barrier(opts=c10d.BarrierOptions()),
        group.barrier(timeout=SOON),
        group.barrier(SOON),
    ):
        assert work.wait() is True
    if group.rank() == 0:
        works = [group.send([pair(group)], 1, 0), group.send(pair(group), dstRank=1, tag=2)]
    else:
        outputs = [torch.zeros(2), torch.zeros(2)]
        works = [group.recv([outputs[0]], 0, 0), group.recv(outputs[1], srcRank=0, tag=2)]
    for work in works:
        work.wait(SOON)
    if group.rank() == 1:
        assert [output.tolist() for output in outputs] == [[1.0, 2.0]] * 2


@over_two
def test_timeout_is_honoured_wherever_it_can_be_passed(group):
    t, pieces, out = torch.zeros(2), [torch.zeros(1), torch.zeros(1)], torch.zeros(1)
    everywhere = [torch.zeros(2), torch.zeros(2)]
    root = group.rank() == 0
    works = [
        group.allreduce(t, timeout=SOON),
        group.allreduce(t, ReduceOp.SUM, SOON),
        group.allreduce([t], options(c10d.AllreduceOptions, timeout=SOON)),
        group.allreduce_coalesced([t], timeout=SOON),
        group.reduce(t, 0, timeout=SOON),
        group.broadcast(t, 0, SOON),
        group.broadcast([t], options(c10d.BroadcastOptions, timeout=SOON)),
        group.gather(everywhere if root else [], t, 0, SOON),
        group.scatter(t, everywhere if root else [], 0, SOON),
        group.reduce_scatter(out, pieces, ReduceOp.SUM, SOON),
        group.reduce_scatter_single(out, t, timeout=SOON),
        group.allgather(everywhere, t, SOON),
        group.all_gather_single(torch.zeros(4), t, timeout=SOON),
        group.alltoall_base(t.clone(), t, [], [], SOON),
        group.alltoall_base(t.clone(), t, [], [], timeout=SOON),
        group.alltoall(pieces, [out, out.clone()], timeout=SOON),
        group.barrier(SOON),
        group.barrier(timeout=SOON),
        group.barrier(options(c10d.BarrierOptions, timeout=SOON)),
    ]
    for work in works:
        work.wait()
    assert [work.call.what for work in works if work.timeout != SOON.total_seconds()] == []
    work = group.barrier()
    work.wait()
    assert work.timeout == group.timeout.total_seconds() != SOON.total_seconds()


# -- Work handles --------------------------------------------------------------------------


@over_two
def test_work_reports_completion_and_result(group):
    tensor = pair(group)
    work = group.allreduce(tensor)
    assert work.wait() is True
    assert work.wait(SOON) is True
    assert work.is_completed()
    assert work.is_success()
    assert work.exception() is None
    assert [id(each) for each in work.result()] == [id(tensor)]
    assert tensor.tolist() == [4.0, 6.0]


@over_two
def test_work_is_not_complete_before_the_last_rank_calls(group):
    store = group.get_group_store()
    if group.rank() == 0:
        tensor = pair(group)
        work = group.allreduce(tensor)
        assert not work.is_completed()
        assert not work.is_success()
        assert tensor.tolist() == [1.0, 2.0]
        store.set("looked", "")
        while not work.is_completed():  # looking is enough, nobody need wait
            time.sleep(0.001)
        assert work.is_success()
        assert tensor.tolist() == [4.0, 6.0]
    else:
        store.wait(["looked"])
        group.allreduce(pair(group)).wait()


@over_two
def test_work_result_is_the_output_tensors(group):
    outputs = [torch.zeros(2), torch.zeros(2)]
    work = group.allgather(outputs, pair(group))
    work.wait()
    assert [each.tolist() for each in work.result()] == [[1.0, 2.0], [3.0, 4.0]]
    output = torch.zeros(1)
    work = group.reduce_scatter_single(output, pair(group))
    work.wait()
    assert work.result()[0] is output


@over_two
def test_futures(group):
    tensor = pair(group)
    work = group.allreduce(tensor, AVG)
    future = work.get_future()
    doubled = future.then(lambda done: done.value()[0] * 2)
    assert doubled.wait().tolist() == [4.0, 6.0]
    assert future.done()
    assert future.wait()[0].tolist() == [2.0, 3.0]
    assert work.get_future() is future
    assert work.wait() is True
    assert tensor.tolist() == [2.0, 3.0]


@over_two
def test_get_future_works_after_completion(group):
    work = group.all_gather_single(torch.zeros(4), pair(group))
    work.wait()
    assert work.get_future().wait()[0].tolist() == [1.0, 2.0, 3.0, 4.0]


@over_two
def test_future_of_allgather_holds_one_stacked_tensor(group):
    """As NCCL does; torch's quantization hooks rely on it."""
    outputs = [torch.zeros(2), torch.zeros(2)]
    (rows,) = group.allgather([outputs], [pair(group)]).get_future().wait()
    assert rows.tolist() == [[1.0, 2.0], [3.0, 4.0]]
    assert [each.tolist() for each in outputs] == rows.tolist()


@over_groups(backends=("shm", "gloo"), sizes=(2,), reuse=True)
def test_the_future_of_a_transfer_keeps_no_tensor_alive(group):
    tensor = pair(group)
    seen = weakref.ref(tensor)
    transfer = group.send if group.rank() == 0 else group.recv
    gc.disable()
    try:
        transfer(tensor, 1 - group.rank()).get_future().wait()
        del tensor
        deadline = time.monotonic() + 10  # the worker thread may still return
        while seen() is not None and time.monotonic() < deadline:
            time.sleep(0.001)
        assert seen() is None
    finally:
        gc.enable()


@over_two
def test_average_is_divided_once_when_many_threads_wait(group):
    """An integer average is a sum that the group divides, on both backends."""
    waiting = 4
    for _ in range(30):
        tensor = torch.tensor([10, 20]) * (group.rank() + 1)
        work = group.allreduce(tensor, AVG)
        start = threading.Barrier(waiting)
        seen = []

        def wait(work=work, tensor=tensor, start=start, seen=seen):
            start.wait()
            work.wait()
            seen.append(tensor.tolist())

        threads = [threading.Thread(target=wait) for _ in range(waiting)]
        for thread in threads:
            thread.start()
        work.get_future().wait()
        for thread in threads:
            thread.join()
        assert seen == [[15, 30]] * waiting
        assert tensor.tolist() == [15, 30]
