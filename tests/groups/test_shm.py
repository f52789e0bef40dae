"""The shm backend: the region, tensors allocated in it, and failed peers."""

import gc
import os
import random
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from phalanx import native
from phalanx.errors import (
    CollectiveTimeout,
    GroupAborted,
    InvalidArgument,
    InvalidState,
    PeerLost,
    RendezvousError,
)
from phalanx.testing import Fault, kill, stop

from .internals import share_region
from .test_call_consistency import DISAGREEMENTS, disagree
from .test_failure_detection import call

LONG = timedelta(seconds=60)
engine = native.engine


def test_the_engine_was_built():
    assert engine is not None, native.why_missing
    assert engine.instruction_set() in {"avx512", "avx2", "neon", "baseline"}


# -- tensors that live in the region -------------------------------------------------------


def reduce_in_place(ctx):
    group = ctx.group("shm")
    for count in (1, 5_000, 300_000):
        tensor = group.allocate((count,), torch.float32)
        tensor.fill_(ctx.rank + 1)
        group.allreduce(tensor).wait()
        assert tensor.unique().tolist() == [ctx.size * (ctx.size + 1) / 2]
    matrix = group.allocate((30, 40), torch.int64)
    assert matrix.shape == (30, 40)
    assert group.allocate((0, 3), torch.int8).shape == (0, 3)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_allocated_tensors_are_reduced_in_place(ranks, size):
    ranks.run(reduce_in_place, size)


def mix_kinds_of_memory(ctx):
    group = ctx.group("shm")
    count = 100_000
    tensor = group.allocate((count,)) if ctx.rank == 0 else torch.empty(count)
    tensor.fill_(ctx.rank + 1)
    group.allreduce(tensor).wait()
    assert tensor.unique().tolist() == [3.0]
    group.broadcast(tensor.fill_(ctx.rank), root=1).wait()
    assert tensor.unique().tolist() == [1.0]


def test_allocated_and_ordinary_tensors_can_meet_in_one_call(ranks):
    ranks.run(mix_kinds_of_memory, 2)


def allocate_and_free(ctx):
    group = ctx.group("shm")
    first = group.allocate((1000,)).data_ptr()
    gc.collect()
    assert group.allocate((1000,)).data_ptr() == first, "what dies is given back"
    kept = [group.allocate((size,)) for size in (10, 5000, 70_000)]
    assert len({tensor.data_ptr() for tensor in kept}) == 3
    with pytest.raises(InvalidState, match="no room"):
        group.allocate((1 << 40,))
    view = kept[1][10:20]
    kept.clear()
    gc.collect()
    view.fill_(1)
    assert group.allocate((5000,)).data_ptr() != view.data_ptr() - 40


def test_allocated_memory_is_reused_after_free(ranks):
    ranks.run(allocate_and_free, 1)


# -- the region ----------------------------------------------------------------------------


def share_at(ctx, places):
    sizes = engine.Sizes()
    sizes.slab = 1 << 20
    shared = share_region(ctx.store, ctx.rank, ctx.size, sizes=sizes, places=places)
    value = torch.full((3,), float(ctx.rank + 1))
    arguments = (2, 0, 0, 0, value.data_ptr(), value.nbytes, value.numel())
    assert shared.wait(shared.issue_in_place(*arguments, [], SimpleNamespace()), 10.0)[0] == 1
    assert value.tolist() == [3.0] * 3
    return shared.region.path


@pytest.mark.parametrize("places", [["memfd"], ["/dev/shm"], ["no such folder", "memfd"]])
def test_a_region_can_be_shared_by_memfd_or_dev_shm(ranks, places, tmp_path):
    before = set(Path("/dev/shm").glob("phalanx*"))
    assert ranks.run(share_at, 2, args=(places,)) == ["", ""]
    assert no_names_but(before)


def no_names_but(before):
    """Wait until no new region has a name; a test running in parallel may briefly have one."""
    until = time.monotonic() + 5
    while set(Path("/dev/shm").glob("phalanx*")) - before:
        if time.monotonic() >= until:
            return False
        time.sleep(0.01)
    return True


def test_a_region_can_be_shared_by_a_file(ranks, tmp_path):
    ranks.run(share_at, 2, args=([str(tmp_path)],))
    assert list(tmp_path.iterdir()) == []


def share_nowhere(ctx):
    with pytest.raises(RendezvousError, match="cannot share memory"):
        share_region(ctx.store, ctx.rank, ctx.size, places=["no such folder"])


def test_every_rank_raises_when_memory_cannot_be_shared(ranks):
    ranks.run(share_nowhere, 2)


def test_a_region_is_private_to_its_owner_and_group(tmp_path):
    sizes = engine.Sizes()
    sizes.slab = 1 << 20
    region = engine.Region.create(str(tmp_path), 2, sizes)
    assert os.stat(region.path).st_mode & 0o777 == 0o600
    with pytest.raises(RuntimeError, match="not this group's region"):
        engine.Region.open(region.path, region.token + 2, 2, sizes)
    region.unlink()


# -- peers ---------------------------------------------------------------------------------


@pytest.mark.parametrize("which", DISAGREEMENTS)
def test_mismatched_calls_are_always_detected(ranks, which):
    ranks.run(disagree_in_shared_memory, 3, args=(which,))


def disagree_in_shared_memory(ctx, which):
    ctx.backend = "shm"
    disagree(ctx, which, None)


def lose_a_rank(ctx, operation):
    group = ctx.group("shm", timeout=LONG)
    last = time.monotonic()
    with pytest.raises(PeerLost) as caught:
        for _ in range(50):
            call(group, operation)
            last = time.monotonic()
    assert time.monotonic() - last < 2
    assert caught.value.lost == (2,)
    group.abort()
    rest = ctx.closing(group.split_group([0, 1, 3]))
    tensor = torch.ones(2)
    rest.allreduce(tensor).wait()
    assert tensor.tolist() == [3.0, 3.0]


@pytest.mark.parametrize(
    ("operation", "point"),
    [
        ("allreduce", "before"),
        ("broadcast", "issued"),
        ("allgather", "before"),
        ("barrier", "issued"),
    ],
)
def test_a_killed_rank_raises_peer_lost_and_survivors_continue(ranks, operation, point):
    strike = Fault(f"{operation}:{point}", kill(), rank=2, nth=random.randint(1, 20))
    ranks.run(lose_a_rank, 4, args=(operation,), faults=[strike], timeout=20)


def wait_for_stopped(ctx):
    group = ctx.group("shm", timeout=LONG)
    group.barrier().wait()
    with pytest.raises(CollectiveTimeout) as caught:
        group.allreduce(torch.ones(3), timeout=timedelta(seconds=1)).wait()
    assert caught.value.missing == (1,)


def test_a_stopped_rank_causes_a_timeout(ranks):
    ranks.run(wait_for_stopped, 3, faults=[Fault("allreduce:before", stop(), rank=1)])


def outlast_a_stop(ctx):
    group = ctx.group("shm", timeout=LONG)
    tensor = torch.ones(100_000)
    group.allreduce(tensor).wait()
    assert tensor.unique().tolist() == [2.0]


def test_a_briefly_stopped_rank_does_not_fail_the_call(ranks):
    pause = Fault("allreduce:before", stop(resume_after=0.7), rank=1)
    ranks.run(outlast_a_stop, 2, faults=[pause])


def fork_a_rank(ctx):
    group = ctx.group("shm", timeout=LONG)
    child = os.fork()
    if child == 0:
        try:
            group.barrier()
        except InvalidState as error:
            os._exit(7 if "forked" in str(error) else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    group.barrier().wait()


def test_a_forked_child_cannot_use_the_group(ranks):
    ranks.run(fork_a_rank, 2)


def let_go_of_a_call(ctx):
    group = ctx.group("shm", timeout=LONG)
    group.allreduce(torch.full((50_000,), float(ctx.rank)))  # the tensor and the work are dropped
    gc.collect()
    tensor = torch.ones(50_000)
    group.allreduce(tensor).wait()
    assert tensor.unique().tolist() == [2.0]


def test_a_tensor_can_be_dropped_while_in_flight(ranks):
    ranks.run(let_go_of_a_call, 2)


def abort_while_waiting(ctx):
    group = ctx.group("shm", timeout=LONG)
    if ctx.rank == 0:
        ctx.store.wait(["waiting"])
        group.abort()
        return
    work = group.allreduce(torch.ones(1))
    ctx.store.set("waiting", "")
    with pytest.raises(GroupAborted, match="rank 0 aborted"):
        work.wait()


def test_abort_fails_the_calls_of_other_ranks(ranks):
    ranks.run(abort_while_waiting, 2)


# -- backend selection ---------------------------------------------------------------------


def leave_the_choice(ctx):
    group = ctx.group("auto")
    assert group.backend == "shm"
    tensor = torch.ones(5, dtype=torch.int16)  # which Gloo could not add up
    group.allreduce(tensor).wait()
    assert tensor.tolist() == [ctx.size] * 5
    pair = group.split_group([0, 1])
    assert pair is None or pair.backend == "shm"


def test_auto_selects_shm_on_one_machine(ranks):
    ranks.run(leave_the_choice, 3)


def lack_the_engine(ctx, lacking):
    if ctx.rank == lacking:
        native.engine = None
    try:
        group = ctx.group("auto")
        assert group.backend == "gloo"
        tensor = torch.ones(5)
        group.allreduce(tensor).wait()
        assert tensor.tolist() == [2.0] * 5
    finally:
        native.engine = engine


@pytest.mark.parametrize("lacking", [0, 1])
def test_all_ranks_fall_back_to_gloo_if_one_lacks_the_engine(ranks, lacking):
    ranks.run(lack_the_engine, 2, args=(lacking,))


def test_the_default_backend_is_auto():
    import inspect

    from phalanx.groups import new_group

    assert inspect.signature(new_group).parameters["backend"].default == "auto"


def sum_sparse_tensors(ctx):
    group = ctx.group("shm", timeout=LONG)
    for entries in ([0, 3, 1], [0, 0, 0], [2, 2, 2]):
        count = entries[ctx.rank]
        places = torch.arange(count) * 2 + ctx.rank
        tensor = torch.sparse_coo_tensor(
            places[None], torch.ones(count, 5), (9, 5), check_invariants=True
        )
        group.allreduce(tensor).wait()
        expected = torch.zeros(9, 5)
        for rank, n in enumerate(entries):
            expected[torch.arange(n) * 2 + rank] += 1.0
        assert torch.equal(tensor.to_dense(), expected)


def test_sparse_tensors_can_have_different_numbers_of_entries(ranks):
    ranks.run(sum_sparse_tensors, 3)


def sum_sparse_tensors_of_different_shapes(ctx):
    group = ctx.group("shm", timeout=LONG)
    with pytest.raises(InvalidArgument, match=r"different shapes: \['\[3\]', '\[4\]'\]"):
        group.allreduce(torch.ones(3 + ctx.rank).to_sparse_coo())


def test_sparse_tensors_of_different_shapes_are_rejected(ranks):
    ranks.run(sum_sparse_tensors_of_different_shapes, 2)
