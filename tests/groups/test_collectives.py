"""What every collective does, on groups of one and three ranks and on both halves of a split."""

import math
import time
from itertools import pairwise

import torch

from phalanx.testing import over_groups

everywhere = over_groups(sizes=(1, 3), split=True, reuse=True)
with_peers = over_groups(sizes=(3,), split=True, reuse=True)


def brought(group, rank, *shape):
    """Return a rank's input to a call; no two ranks of the world have the same numbers."""
    shape = shape or (2, 3)
    numbers = torch.arange(1.0, math.prod(shape) + 1).reshape(shape)
    return numbers + 1000 * group.global_ranks[rank]


def mine(group, *shape):
    return brought(group, group.rank(), *shape)


def everybodys(group, *shape):
    return [brought(group, rank, *shape) for rank in range(group.size())]


def total(group, *shape):
    return torch.stack(everybodys(group, *shape)).sum(0)


def blank(*shape):
    return torch.full(shape or (2, 3), -1.0)


def blanks(group, *shape):
    return [blank(*shape) for _ in range(group.size())]


def same(tensors, expected):
    """Compare lists of tensors, shapes included."""
    return len(tensors) == len(expected) and all(map(torch.equal, tensors, expected))


# -- reductions ----------------------------------------------------------------------------


@everywhere
def test_allreduce_gives_every_rank_the_sum(group):
    tensor = mine(group)
    group.allreduce(tensor).wait()
    assert torch.equal(tensor, total(group))


@everywhere
def test_allreduce_coalesced_sums_tensors_of_several_shapes(group):
    shapes = [(2, 3), (5,), (1, 1, 4)]
    tensors = [mine(group, *shape) for shape in shapes]
    group.allreduce_coalesced(tensors).wait()
    assert same(tensors, [total(group, *shape) for shape in shapes])


@everywhere
def test_reduce_writes_the_sum_on_the_root_only(group):
    for root in range(group.size()):
        tensor = mine(group)
        group.reduce(tensor, root).wait()
        assert torch.equal(tensor, total(group) if group.rank() == root else mine(group))


@everywhere
def test_reduce_scatter_gives_each_rank_the_sum_of_its_tensors(group):
    size, rank = group.size(), group.rank()
    inputs = [mine(group, 3) + 10 * part for part in range(size)]
    output = blank(3)
    group.reduce_scatter(output, inputs).wait()
    assert torch.equal(output, total(group, 3) + 10 * rank * size)
    assert same(inputs, [mine(group, 3) + 10 * part for part in range(size)])


@everywhere
def test_reduce_scatter_accepts_tensors_of_different_sizes(group):
    inputs = [mine(group, part + 1) for part in range(group.size())]
    output = blank(group.rank() + 1)
    group.reduce_scatter(output, inputs).wait()
    assert torch.equal(output, total(group, group.rank() + 1))


@everywhere
def test_reduce_scatter_single_gives_each_rank_the_sum_of_its_part(group):
    size, rank = group.size(), group.rank()
    for call in (group.reduce_scatter_single, group._reduce_scatter_base):
        whole, output = mine(group, 2 * size, 3), blank(2, 3)
        call(output, whole).wait()
        assert torch.equal(output, total(group, 2 * size, 3)[2 * rank : 2 * rank + 2])
        assert torch.equal(whole, mine(group, 2 * size, 3))
        call(output, mine(group, size, 2, 3)).wait()
        assert torch.equal(output, total(group, size, 2, 3)[rank])


@everywhere
def test_reduce_scatter_single_coalesced_reduces_several_tensors(group):
    size, rank = group.size(), group.rank()
    calls = (group.reduce_scatter_single_coalesced, group.reduce_scatter_tensor_coalesced)
    for call in calls:
        outputs = [blank(1), blank(4)]
        call(outputs, [mine(group, size), mine(group, 4 * size)]).wait()
        sums = [total(group, size).view(size, 1), total(group, 4 * size).view(size, 4)]
        assert same(outputs, [each[rank] for each in sums])


# -- one to all, all to one ----------------------------------------------------------------


@everywhere
def test_broadcast_copies_the_roots_tensor_to_every_rank(group):
    for root in range(group.size()):
        tensor = mine(group)
        group.broadcast(tensor, root).wait()
        assert torch.equal(tensor, brought(group, root))


@everywhere
def test_gather_fills_the_outputs_of_the_root_only(group):
    for root in range(group.size()):
        outputs = blanks(group) if group.rank() == root else []
        group.gather(outputs, mine(group), root).wait()
        assert same(outputs, everybodys(group) if group.rank() == root else [])


@everywhere
def test_scatter_gives_each_rank_its_item_of_the_roots_list(group):
    size, rank = group.size(), group.rank()
    for root in range(size):
        inputs = [mine(group) + 10 * part for part in range(size)] if rank == root else []
        output = blank()
        group.scatter(output, inputs, root).wait()
        assert torch.equal(output, brought(group, root) + 10 * rank)


# -- all to all ----------------------------------------------------------------------------


@everywhere
def test_allgather_fills_one_output_per_rank(group):
    outputs = blanks(group)
    group.allgather(outputs, mine(group)).wait()
    assert same(outputs, everybodys(group))


@everywhere
def test_all_gather_single_concatenates_the_tensors_of_all_ranks(group):
    for call in (group.all_gather_single, group._allgather_base):
        rows, stacked = blank(2 * group.size(), 3), blank(group.size(), 2, 3)
        call(rows, mine(group)).wait()
        call(stacked, mine(group)).wait()
        assert torch.equal(rows, torch.cat(everybodys(group)))
        assert torch.equal(stacked, torch.stack(everybodys(group)))


@everywhere
def test_all_gather_single_coalesced_gathers_several_tensors(group):
    for call in (group.all_gather_single_coalesced, group.allgather_into_tensor_coalesced):
        outputs = [blank(group.size()), blank(group.size() * 4)]
        call(outputs, [mine(group, 1), mine(group, 4)]).wait()
        assert same(outputs, [torch.cat(everybodys(group, n)) for n in (1, 4)])


@everywhere
def test_allgather_coalesced_gathers_the_lists_of_all_ranks(group):
    lists = [[blank(2), blank(3, 1)] for _ in range(group.size())]
    group.allgather_coalesced(lists, [mine(group, 2), mine(group, 3, 1)]).wait()
    for rank, outputs in enumerate(lists):
        assert same(outputs, [brought(group, rank, 2), brought(group, rank, 3, 1)])


@everywhere
def test_all_to_all_single_exchanges_rows(group):
    size, rank = group.size(), group.rank()
    for call in (group.all_to_all_single, group.alltoall_base):
        output = blank(2 * size, 3)
        call(output, mine(group, 2 * size, 3), [], []).wait()
        parts = [each[2 * rank : 2 * rank + 2] for each in everybodys(group, 2 * size, 3)]
        assert torch.equal(output, torch.cat(parts))


@everywhere
def test_all_to_all_single_exchanges_uneven_and_empty_splits(group):
    """Rank i sends ``(i + j) % 3`` rows to rank j, so that some parts are empty."""
    size, rank = group.size(), group.rank()
    sizes = [[(i + j) % 3 for j in range(size)] for i in range(size)]  # symmetric

    def sent(sender):
        return brought(group, sender, sum(sizes[sender]), 2)

    output = blank(sum(sizes[rank]), 2)
    group.alltoall_base(output, sent(rank), sizes[rank], sizes[rank]).wait()
    parts = [sent(sender).split(sizes[sender])[rank] for sender in range(size)]
    assert torch.equal(output, torch.cat(parts))


@everywhere
def test_alltoall_exchanges_tensors_of_different_shapes(group):
    """Rank i sends a row of ``i + j + 1`` numbers to rank j."""
    size, rank = group.size(), group.rank()
    outputs = [blank(sender + rank + 1) for sender in range(size)]
    group.alltoall(outputs, [mine(group, rank + to + 1) + 10 * to for to in range(size)]).wait()
    received = [brought(group, sender, sender + rank + 1) + 10 * rank for sender in range(size)]
    assert same(outputs, received)


# -- barriers ------------------------------------------------------------------------------


@everywhere
def test_barrier_completes_only_after_every_rank_arrives(group):
    store = group.get_group_store()
    if group.rank() == 0:
        store.wait([f"is there/{rank}" for rank in range(1, group.size())])
        group.barrier().wait()
    else:
        work = group.barrier()
        assert not work.is_completed()
        store.set(f"is there/{group.rank()}", "")
        work.wait()
        assert work.is_completed()


@everywhere
def test_monitored_barrier_waits_for_every_rank(group):
    store = group.get_group_store()
    store.add("came", 1)
    assert group.monitored_barrier() is None
    assert store.add("came", 0) == group.size()
    group.monitored_barrier(group.timeout, wait_all_ranks=True)


# -- point to point ------------------------------------------------------------------------


@with_peers
def test_send_and_recv_around_a_ring(group):
    size, rank = group.size(), group.rank()
    received = blank()
    works = [
        group.send(mine(group), (rank + 1) % size),
        group.recv(received, (rank - 1) % size),
    ]
    for work in works:
        work.wait()
    assert torch.equal(received, brought(group, (rank - 1) % size))


@with_peers
def test_messages_with_equal_tags_are_ordered_and_tags_are_separate(group):
    if group.rank() == 0:
        works = [group.send(mine(group) + n, 1, tag) for n, tag in enumerate((7, 8, 7))]
        for work in works:
            work.wait()
    elif group.rank() == 1:
        received = [blank(), blank(), blank()]
        for tensor, tag in zip(received, (8, 7, 7), strict=True):
            group.recv([tensor], 0, tag).wait()
        assert same(received, [brought(group, 0) + n for n in (1, 0, 2)])


@with_peers
def test_recv_anysource_reports_the_source_rank(group):
    if group.rank() != 0:
        group.send(mine(group), 0, tag=3).wait()
        return
    sources = []
    for _ in range(group.size() - 1):
        tensor = blank()
        work = group.recv_anysource(tensor, 3)
        work.wait()
        sources.append(work.source_rank())
        assert torch.equal(tensor, brought(group, sources[-1]))
    assert sorted(sources) == list(range(1, group.size()))


# -- order ---------------------------------------------------------------------------------


@everywhere
def test_calls_in_flight_can_be_waited_for_in_any_order(group):
    tensors = [mine(group) + n for n in range(6)]
    works = [group.allreduce(tensor) for tensor in tensors]
    gathered = blank(2 * group.size(), 3)
    works.append(group.all_gather_single(gathered, mine(group)))
    for work in reversed(works):
        work.wait()
    assert same(tensors, [total(group) + n * group.size() for n in range(6)])
    assert torch.equal(gathered, torch.cat(everybodys(group)))
    numbers = [record.sequence for record in group.records()[-len(works) :]]
    assert all(later == earlier + 1 for earlier, later in pairwise(numbers))


@everywhere
def test_a_call_completes_without_a_wait(group):
    tensor = mine(group)
    group.allreduce(tensor)
    while not torch.equal(tensor, total(group)):  # or the test's own timeout ends it
        time.sleep(0.001)


# -- dtypes and shapes ---------------------------------------------------------------------

DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64, torch.complex128, torch.bool),
    *(torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint8, torch.uint16, torch.uint32, torch.uint64),
]


def copied_everywhere(group, give):
    """Run every collective that only copies; yields (collective, got, expected)."""
    size, rank = group.size(), group.rank()
    everybody = [give(each) for each in range(size)]
    mine, whole = give(rank), torch.stack(everybody)
    fresh = [torch.zeros_like(mine) for _ in range(size)]
    into, part = torch.zeros_like(whole), mine.detach().clone()

    group.broadcast(part, 1).wait()
    yield "broadcast", part, everybody[1]
    group.allgather(fresh, mine).wait()
    yield "allgather", torch.stack(fresh), whole
    group.all_gather_single(into.view(-1), mine).wait()
    yield "all_gather_single", into, whole
    group.allgather_coalesced([[tensor] for tensor in fresh], [mine]).wait()
    yield "allgather_coalesced", torch.stack(fresh), whole
    group.scatter(part, everybody if rank == 0 else [], 0).wait()
    yield "scatter", part, mine
    group.gather(fresh if rank == 2 else [], mine, 2).wait()
    yield "gather", torch.stack(fresh), whole
    group.alltoall(fresh, everybody).wait()
    yield "alltoall", torch.stack(fresh), torch.stack([mine] * size)
    group.all_to_all_single(into, whole).wait()
    yield "all_to_all_single", into, torch.stack([mine] * size)
    sent = group.send(mine, (rank + 1) % size)
    group.recv(part, (rank - 1) % size).wait()
    sent.wait()
    yield "send and recv", part, everybody[rank - 1]


@over_groups(sizes=(3,), reuse=True)
def test_tensors_of_any_dtype_can_be_copied(group):
    for dtype in DTYPES:

        def give(rank, dtype=dtype):
            return torch.tensor([[rank % 2, 1, 0], [1, rank // 2, 1]]).to(dtype)

        for how, got, expected in copied_everywhere(group, give):
            assert got.dtype is dtype
            assert got.tolist() == expected.tolist(), (how, dtype)


@over_groups(sizes=(3,), reuse=True)
def test_tensors_of_any_shape_can_be_copied(group):
    for shape in [(), (0,), (0, 3), (2, 0), (1,), (3, 1, 2), (1 << 18,)]:

        def give(rank, shape=shape):
            return torch.full(shape, float(rank + 1))

        for how, got, expected in copied_everywhere(group, give):
            assert got.shape == expected.shape
            assert torch.equal(got, expected), (how, shape)


@over_groups(sizes=(3,), reuse=True)
def test_parameters_and_views_can_be_copied(group):
    def parameter(rank):
        return torch.nn.Parameter(torch.full((2, 3), float(rank)))

    def row(rank):
        return torch.full((5, 4), float(rank))[2]

    for give in (parameter, row):
        for how, got, expected in copied_everywhere(group, give):
            assert torch.equal(got, expected), (how, give.__name__)
