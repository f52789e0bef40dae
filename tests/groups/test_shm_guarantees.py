"""Guarantees of the shm backend: reproducible bits, every dtype, any length, and groups
that do not block each other.

``PHALANX_HUGE=1 make test ARGS=tests/groups/test_shm_guarantees.py`` for tensors of more than
4 GiB, which need 10 GB of memory and a minute.
"""

import mmap
import os
import random
import threading
from datetime import timedelta
from functools import reduce
from itertools import permutations
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.distributed import ReduceOp

from phalanx import native

from .internals import share_region

pytestmark = pytest.mark.skipif(native.engine is None, reason="the engine was not built")

LONG = timedelta(seconds=60)
GIB = 1 << 30


# -- the same bits -------------------------------------------------------------------------

# A sum of these depends on the order in which they are added, in every type of float.
AWKWARD = [1e8, 3.14159, -1e8, 1e-3]


def brought(rank, count, dtype):
    numbers = torch.linspace(1, 2, count, dtype=torch.float64) * AWKWARD[rank]
    return (numbers / (3e4 if dtype is torch.float16 else 1)).to(dtype)


def by_rank(order, count, dtype):
    """Sum in a given order, half precision in float32."""
    total = torch.zeros(count, dtype=torch.float32)
    for rank in order:
        total += brought(rank, count, dtype).float()
    return total.to(dtype)


def arrive_in_turn(ctx, orders):
    group = ctx.group("shm", timeout=LONG)
    for number, order in enumerate(orders):
        for count in (5, 3_000, 200_000):  # small, and not
            for dtype in (torch.float32, torch.float16):
                for kind in ("shared", "ordinary", "mixed"):
                    shared = kind == "shared" or (kind == "mixed" and ctx.rank % 2 == 0)
                    tensor = (group.allocate if shared else torch.empty)((count,), dtype=dtype)
                    tensor.copy_(brought(ctx.rank, count, dtype))
                    turn = order.index(ctx.rank)
                    said = f"{number}/{count}/{dtype}/{kind}"
                    if turn > 0:
                        ctx.store.wait([f"{said}/{turn - 1}"])
                    work = group.allreduce(tensor)
                    ctx.store.set(f"{said}/{turn}", "")
                    work.wait()
                    expected = by_rank(range(ctx.size), count, dtype)
                    assert torch.equal(tensor, expected), (order, count, dtype, kind)


def test_sum_is_bitwise_equal_for_any_order_of_arrival(ranks):
    forward, backward = (
        by_rank(range(4), 50, torch.float32),
        by_rank([3, 2, 1, 0], 50, torch.float32),
    )
    assert not torch.equal(forward, backward), "the order shows"
    orders = [(3, 2, 1, 0), *random.sample(list(permutations(range(4))), 2)]
    ranks.run(arrive_in_turn, 4, args=(orders,))


# -- every type ----------------------------------------------------------------------------

# torch has no arithmetic for these, so numpy is the reference instead of `local`.
UNSIGNED = [torch.uint16, torch.uint32, torch.uint64]
FOLDS = {
    "SUM": np.add,
    "PRODUCT": np.multiply,
    "MIN": np.minimum,
    "MAX": np.maximum,
    "BAND": np.bitwise_and,
    "BOR": np.bitwise_or,
    "BXOR": np.bitwise_xor,
}


def unsigned(rank, count, dtype):
    """Make numbers with random bits, so that sums wrap around."""
    bits = torch.randint(0, 256, (count * dtype.itemsize,), generator=seeded(rank))
    return bits.to(torch.uint8).view(dtype).numpy()


def seeded(rank):
    return torch.Generator().manual_seed(rank)


def reduce_unsigned(ctx, dtype):
    group = ctx.group("shm", timeout=LONG)
    for count in (3, 10_000, 400_000):
        inputs = [unsigned(rank, count, dtype) for rank in range(ctx.size)]
        for make in (group.allocate, torch.empty):
            for name, fold in FOLDS.items():
                tensor = make((count,), dtype=dtype).copy_(torch.from_numpy(inputs[ctx.rank]))
                group.allreduce(tensor, getattr(ReduceOp, name)).wait()
                assert np.array_equal(tensor.numpy(), reduce(fold, inputs)), (name, count)
            tensor = make((count,), dtype=dtype).copy_(torch.from_numpy(inputs[ctx.rank]))
            group.allreduce(tensor, ReduceOp.AVG).wait()
            assert np.array_equal(tensor.numpy(), reduce(np.add, inputs) // ctx.size), count


@pytest.mark.parametrize("dtype", UNSIGNED, ids=str)
def test_unsigned_integers_are_reduced_like_numpy(ranks, dtype):
    ranks.run(reduce_unsigned, 3, args=(dtype,))


# -- independent groups --------------------------------------------------------------------


def use_one_while_another_waits(ctx):
    """Rank 1 calls in the slow group only after the quick one has finished."""
    slow, quick = (ctx.group("shm", name=name, timeout=LONG) for name in ("slow", "quick"))
    through = threading.Event()
    sums = []

    def take_part():
        if ctx.rank == 1:
            assert through.wait(30)
        tensor = torch.ones(300_000)
        slow.allreduce(tensor).wait()
        sums.append(tensor.unique().tolist())

    thread = threading.Thread(target=take_part)
    thread.start()
    for turn in range(200):
        tensor = torch.full(([3, 300_000][turn % 20 == 0],), float(turn))
        quick.allreduce(tensor).wait()
        assert tensor.unique().tolist() == [2.0 * turn]
    assert ctx.rank == 1 or thread.is_alive(), "the slow group is still waiting"
    quick.barrier().wait()
    through.set()
    thread.join(30)
    assert sums == [[2.0]]


def test_a_waiting_group_does_not_block_another_group(ranks):
    ranks.run(use_one_while_another_waits, 2)


# -- any length ----------------------------------------------------------------------------


def reach_far_into_a_slab(ctx):
    """Use memory more than 4 GiB into the slab, without using the memory before it."""
    group = ctx.group("shm", timeout=LONG)
    slab = group._engine._slab
    slab._free = [(5 * GIB, GIB)]
    tensor = group.allocate((100_000,)).fill_(ctx.rank + 1)
    assert tensor.data_ptr() - slab._base == 5 * GIB
    group.allreduce(tensor).wait()
    assert tensor.unique().tolist() == [3.0]
    group.broadcast(tensor.fill_(ctx.rank), root=1).wait()
    assert tensor.unique().tolist() == [1.0]


def test_slab_offsets_can_exceed_32_bits(ranks):
    ranks.run(reach_far_into_a_slab, 2)


ALLREDUCE, ALLTOALL = 2, 9  # of `native/region_layout.hpp`
UINT8 = 8  # of `native/types.hpp`
FINISHED, MISMATCH = 1, 3  # of `native/engine.hpp`


def tell_lengths_apart(ctx):
    """Lengths that are equal in their low 32 bits are a mismatch."""
    engine = share_region(ctx.store, ctx.rank, ctx.size)
    place, _ = engine.region.slab(ctx.rank)
    length = 4 * GIB * ctx.rank + 20_000
    arguments = (ALLREDUCE, UINT8, 0, 0, place, length, length)
    ticket = engine.issue_in_place(*arguments, [], SimpleNamespace())
    assert engine.wait(ticket, 20.0)[0] == MISMATCH


def test_lengths_are_compared_beyond_32_bits(ranks):
    ranks.run(tell_lengths_apart, 2)


def send_the_end_of_something_long(ctx):
    """Rank 0 has 4 GiB of untouched pages, which take no memory, followed by a few bytes."""
    sizes = native.engine.Sizes()
    sizes.window = 16 << 20  # fewer and larger ones, for speed
    engine = share_region(ctx.store, ctx.rank, ctx.size, sizes=sizes)
    received = torch.zeros(100, dtype=torch.uint8)
    if ctx.rank == 0:
        source = mmap.mmap(-1, 4 * GIB + 100, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        source[4 * GIB :] = bytes(range(100))
        address = np.frombuffer(source, dtype=np.uint8).ctypes.data
        length, sent, room = 4 * GIB + 100, [4 * GIB, 4 * GIB, 4 * GIB + 100], [0, 0, 0]
    else:
        address, length, sent, room = 0, 0, [0, 0, 0], [0, 100, 100]
    outputs = ([received.data_ptr()], 100, sent, room)
    arguments = (ALLTOALL, UINT8, 0, 0, address, length, 0, (), *outputs)
    ticket = engine.issue(*arguments, [], SimpleNamespace())
    assert engine.wait(ticket, 60.0)[0] == FINISHED
    assert received.tolist() == (list(range(100)) if ctx.rank == 1 else [0] * 100)


@pytest.mark.slow
def test_positions_within_a_tensor_can_exceed_32_bits(ranks):
    ranks.run(send_the_end_of_something_long, 2)


def holds(tensor, value):
    """Return whether a huge tensor holds only this value, without a second huge tensor."""
    return all(bool((part == value).all()) for part in tensor.split(1 << 26))


def reduce_and_copy_huge(ctx, shared):
    group = ctx.group("shm", timeout=timedelta(minutes=5))
    count = 4 * GIB + 4099
    tensor = (group.allocate if shared else torch.empty)((count,), dtype=torch.uint8)
    tensor.fill_(ctx.rank + 1)
    tensor[-1] = 10
    group.allreduce(tensor).wait()
    assert tensor[-1] == 20
    assert holds(tensor[:-1], 3)
    tensor.fill_(ctx.rank + 5)
    group.broadcast(tensor, root=1).wait()
    assert holds(tensor, 6)
    other = 1 - ctx.rank
    if ctx.rank == 0:
        group.send(tensor.fill_(9), other).wait()
    else:
        group.recv(tensor, other).wait()
    assert holds(tensor, 9)


def gather_huge(ctx):
    group = ctx.group("shm", timeout=timedelta(minutes=5))
    part = 2 * GIB + 4099
    whole = torch.zeros(2 * part, dtype=torch.uint8)
    mine = whole[ctx.rank * part : (ctx.rank + 1) * part].fill_(ctx.rank + 1)
    group.all_gather_single(whole, mine).wait()  # in place
    assert holds(whole[:part], 1)
    assert holds(whole[part:], 2)


huge = pytest.mark.skipif(
    "PHALANX_HUGE" not in os.environ, reason="needs PHALANX_HUGE=1, and 10 GB"
)


@huge
@pytest.mark.timeout(400)
@pytest.mark.parametrize("shared", [True, False], ids=["shared", "ordinary"])
def test_tensors_over_4_gib_are_reduced_and_copied(ranks, shared):
    ranks.run(reduce_and_copy_huge, 2, args=(shared,), timeout=380)


@huge
@pytest.mark.timeout(400)
def test_tensors_over_4_gib_are_gathered(ranks):
    ranks.run(gather_huge, 2, timeout=380)
