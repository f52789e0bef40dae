"""Random programs in shared memory, compared with the same programs on `local` threads.

A seed defines a program. Every rank derives from it a list of calls for each of several groups (the
world and random splits of it), and runs each group on its own thread: any collective, dtype,
operation and length, tensors in any kind of memory, several calls in flight, waited for in any
order. When a call completes, its tensors are recorded and overwritten, which exposes a completion
reported too early. The `local` backend runs the same program, one lane after the other.

``PHALANX_PROGRAMS=500 make test ARGS=tests/groups/test_shm_stress.py`` for many, and
``PHALANX_SEED=17`` for a specific one.
"""

import hashlib
import os
import random
import threading
import time
from functools import partial

import pytest
import torch
from torch._C import _distributed_c10d as c10d
from torch.distributed import ReduceOp, _make_nccl_premul_sum

from phalanx import native

pytestmark = pytest.mark.skipif(native.engine is None, reason="the engine was not built")

PROGRAMS = int(os.environ.get("PHALANX_PROGRAMS", "10"))
SEED = os.environ.get("PHALANX_SEED")

FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
WHOLE = [torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8]
COMPLEX = [torch.complex64, torch.complex128]
DTYPES = [*FLOATS, *WHOLE, *COMPLEX, torch.bool]
ORDER = ["MIN", "MAX"]
BITS = ["BAND", "BOR", "BXOR"]
LARGEST = 2_100_000  # bytes that one rank brings to a call, or four windows and a bit

SMALL = 16 * 1024  # of `Sizes` in native/region_layout.hpp, as is the next
WINDOW = 512 * 1024
LENGTHS = [0, 1, 2, 64, SMALL - 8, SMALL, SMALL + 8, WINDOW - 8, WINDOW, WINDOW + 8, LARGEST]


def operations(dtype):
    if dtype is torch.bool:
        return ["SUM", "PRODUCT", *ORDER, *BITS]
    if dtype.is_complex:
        return ["SUM", "PRODUCT", "AVG", "PREMUL_SUM"]
    if dtype.is_floating_point:
        return ["SUM", "PRODUCT", "AVG", "PREMUL_SUM", *ORDER]
    return ["SUM", "PRODUCT", "AVG", *ORDER, *BITS]


# -- programs ------------------------------------------------------------------------------


def write_program(seed):
    """Choose a world size, splits of the world, and the calls of each group."""
    chance = random.Random(seed)
    size = chance.choice([2, 3, 4])
    lanes = [list(range(size))]
    for _ in range(chance.randrange(3)):
        lanes.append(chance.sample(range(size), chance.randint(1, size)))
    steps = {lane: write_steps(chance) for lane in range(len(lanes))}
    return {"seed": seed, "size": size, "lanes": lanes, "steps": steps}


def write_steps(chance):
    """Generate a few calls of any length, or so many small ones in flight that they queue up."""
    if chance.random() < 0.25:
        return [write_step(chance, most=64, in_flight=[80, 80, 80, 60]) for _ in range(120)]
    # Small calls find different bugs than large ones, and many cost as little as one large call.
    mosts = [chance.choice([SMALL + 8, SMALL + 8, LARGEST]) for _ in range(12)]
    return [write_step(chance, most=most, in_flight=[0, 1, 5]) for most in mosts]


def write_step(chance, *, most, in_flight):
    dtype = chance.choice(DTYPES)
    length = chance.choice([length for length in LENGTHS if length <= most])
    return {
        "call": chance.choice(list(CALLS)),
        "dtype": dtype,
        "count": length // dtype.itemsize + chance.choice([0, 0, 1, 3]),
        "op": chance.choice(operations(dtype)),
        "root": chance.random(),
        "seed": chance.getrandbits(32),
        "in flight": chance.choice(in_flight),
    }


class Caller:
    """One rank's side of one step: its arguments and tensors."""

    def __init__(self, group, step):
        self.group, self.step = group, step
        self.size, self.rank = group.size(), group.rank()
        self.root = int(step["root"] * self.size)
        self.op = getattr(ReduceOp, step["op"])
        if step["op"] == "PREMUL_SUM":
            self.op = _make_nccl_premul_sum(0.5)
        self.count = step["count"]
        self.tensors = []
        self._numbers = torch.Generator().manual_seed(step["seed"] * 8 + self.rank)
        self._chance = random.Random(f"{step['seed']}/{self.rank}")  # ranks differ in memory

    def part(self):
        """Return the length per rank where each rank has one part for every rank."""
        return self.count // self.size

    def mine(self, count):
        """Make an input tensor with numbers unique to this rank and call."""
        return self.blank(count).copy_(numbers(count, self.step["dtype"], self._numbers))

    def blank(self, count):
        """Make a tensor in random memory, possibly a view into a larger one."""
        before, after = self._chance.choice([(0, 0), (0, 0), (3, 0), (1, 2)])
        make = self._chance.choice([self.group.allocate, torch.empty])
        whole = make((before + count + after,), dtype=self.step["dtype"]).zero_()
        self.tensors.append(whole)
        return whole[before : before + count]

    def each(self, make, count):
        return [make(count) for _ in range(self.size)]

    def at_root(self, make, count):
        return self.each(make, count) if self.rank == self.root else []

    def options(self):
        options = c10d.ReduceScatterOptions()
        options.reduceOp = self.op
        return options


def numbers(count, dtype, generator):
    """Make random numbers of a dtype: the full range of integers; floats with special values."""
    if dtype is torch.bool:
        return torch.randint(0, 2, (count,), generator=generator).bool()
    if dtype in WHOLE:
        info = torch.iinfo(dtype)
        bits = torch.randint(info.min, info.max, (count,), generator=generator, dtype=torch.int64)
        return bits.to(dtype)
    if dtype.is_complex:
        return torch.randn(count, dtype=dtype, generator=generator)
    floats = torch.randn(count, dtype=torch.float64, generator=generator)
    floats *= 10.0 ** torch.randint(-6, 5, (count,), generator=generator)
    odd = torch.tensor([torch.inf, -torch.inf, torch.nan, -0.0, 1e-45, 65504.0])
    floats[: len(odd)] = odd[torch.randperm(len(odd), generator=generator)][:count]
    return floats.to(dtype)


# -- calls: each returns its works ---------------------------------------------------------


def allreduce_coalesced(c):
    return c.group.allreduce_coalesced([c.mine(c.count), c.mine(c.count // 3)], c.op)


def allgather_coalesced(c):
    lists = [[c.blank(c.part()), c.blank(2)] for _ in range(c.size)]
    return c.group.allgather_coalesced(lists, [c.mine(c.part()), c.mine(2)])


def all_gather_single_coalesced(c):
    outputs = [c.blank(c.part() * c.size), c.blank(c.size)]
    return c.group.all_gather_single_coalesced(outputs, [c.mine(c.part()), c.mine(1)])


def reduce_scatter_uneven(c):
    lengths = [c.part() + rank for rank in range(c.size)]
    inputs = [c.mine(length) for length in lengths]
    return c.group.reduce_scatter(c.blank(lengths[c.rank]), inputs, c.op)


def reduce_scatter_single_coalesced(c):
    lengths = [c.part(), 5]
    outputs = [c.blank(length) for length in lengths]
    inputs = [c.mine(length * c.size) for length in lengths]
    return c.group.reduce_scatter_single_coalesced(outputs, inputs, c.options())


def lengths_between(c):
    """Return how much rank i sends to rank j; some lengths are zero and many are unequal."""
    chance = random.Random(c.step["seed"])
    choices = [0, 1, c.part() // 2, c.part()]
    return [[chance.choice(choices) for _ in range(c.size)] for _ in range(c.size)]


def all_to_all_uneven(c):
    lengths = lengths_between(c)
    out_of, into = lengths[c.rank], [row[c.rank] for row in lengths]
    return c.group.all_to_all_single(c.blank(sum(into)), c.mine(sum(out_of)), into, out_of)


def alltoall(c):
    lengths = lengths_between(c)
    outputs = [c.blank(row[c.rank]) for row in lengths]
    return c.group.alltoall(outputs, [c.mine(length) for length in lengths[c.rank]])


def ring(c):
    """Send to the next rank and receive from the previous one, in either order."""
    if c.size == 1:
        return c.group.barrier()
    after, before = (c.rank + 1) % c.size, (c.rank - 1) % c.size
    tag = c.step["seed"] % 1000
    both = [
        partial(c.group.send, c.mine(c.count), after, tag),
        partial(c.group.recv, c.blank(c.count), before, tag),
    ]
    c._chance.shuffle(both)
    return [begin() for begin in both]


CALLS = {
    "allreduce": lambda c: c.group.allreduce(c.mine(c.count), c.op),
    "allreduce_coalesced": allreduce_coalesced,
    "reduce": lambda c: c.group.reduce(c.mine(c.count), c.root, c.op),
    "broadcast": lambda c: c.group.broadcast(c.mine(c.count), c.root),
    "gather": lambda c: c.group.gather(c.at_root(c.blank, c.part()), c.mine(c.part()), c.root),
    "scatter": lambda c: c.group.scatter(c.blank(c.part()), c.at_root(c.mine, c.part()), c.root),
    "allgather": lambda c: c.group.allgather(c.each(c.blank, c.part()), c.mine(c.part())),
    "all_gather_single": lambda c: c.group.all_gather_single(
        c.blank(c.part() * c.size), c.mine(c.part())
    ),
    "allgather_coalesced": allgather_coalesced,
    "all_gather_single_coalesced": all_gather_single_coalesced,
    "reduce_scatter": lambda c: c.group.reduce_scatter(
        c.blank(c.part()), c.each(c.mine, c.part()), c.op
    ),
    "reduce_scatter_uneven": reduce_scatter_uneven,
    "reduce_scatter_single": lambda c: c.group.reduce_scatter_single(
        c.blank(c.part()), c.mine(c.part() * c.size), op=c.op
    ),
    "reduce_scatter_single_coalesced": reduce_scatter_single_coalesced,
    "all_to_all_single": lambda c: c.group.all_to_all_single(
        c.blank(c.part() * c.size), c.mine(c.part() * c.size)
    ),
    "all_to_all_uneven": all_to_all_uneven,
    "alltoall": alltoall,
    "ring": ring,
    "barrier": lambda c: c.group.barrier(),
}


# -- running one ---------------------------------------------------------------------------


def run_program(ctx, backend, program):
    """Run every lane that this rank is in; returns the contents of its tensors after each call."""
    world = ctx.group(backend)
    groups = {0: world}
    for lane, members in enumerate(program["lanes"][1:], start=1):
        if ctx.rank in members:
            groups[lane] = ctx.closing(world.split_group(members, group_name=f"lane {lane}"))
    results, errors = {}, []

    def run(lane):
        try:
            results[lane] = run_lane(groups[lane], program["steps"][lane], f"{lane}/{ctx.rank}")
        except BaseException as error:  # noqa: BLE001 - raised again below
            errors.append(error)

    if backend == "local":  # one after the other: there is nothing to find in the reference
        for lane in groups:
            run(lane)
    else:
        threads = [threading.Thread(target=run, args=(lane,)) for lane in groups]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if errors:
        raise errors[0]
    return results


def run_lane(group, steps, salt):
    chance = random.Random(salt)  # for what ranks may do each in their own way
    ends, under_way = [None] * len(steps), []
    for number, step in enumerate(steps):
        caller = Caller(group, step)
        works = CALLS[step["call"]](caller)
        under_way.append((number, caller, works if isinstance(works, list) else [works]))
        while len(under_way) > step["in flight"]:
            end(chance, ends, *under_way.pop(chance.randrange(len(under_way))))
    while under_way:
        end(chance, ends, *under_way.pop(chance.randrange(len(under_way))))
    return ends


def end(chance, ends, number, caller, works):
    for work in works:
        how = chance.choice(["wait", "wait", "poll", "future"])
        if how == "future":
            work.get_future().wait()
        while how == "poll" and not work.is_completed():
            time.sleep(0)
        work.wait()
    ends[number] = [noted(tensor, caller.step) for tensor in caller.tensors]
    for tensor in caller.tensors:
        tensor.view(torch.uint8).fill_(0xA5)


def noted(tensor, step):
    """Record a tensor: a hash of its bits, or a copy where the bits are not determined."""
    if tensor.is_complex() and step["op"] in ("PRODUCT", "AVG"):
        return tensor.clone()
    plain = torch.view_as_real(tensor).reshape(-1) if tensor.is_complex() else tensor
    if plain.is_floating_point():
        plain = plain.masked_fill(plain.isnan(), torch.nan)  # any may stand for any other
        if step["op"] in ORDER:
            plain.masked_fill_(plain == 0, 0.0)  # of zeros of both signs, either is the least
    return hashlib.blake2b(plain.view(torch.uint8).numpy(), digest_size=16).hexdigest()


def same(found, expected):
    if isinstance(expected, torch.Tensor):
        return torch.allclose(found, expected, rtol=1e-5, equal_nan=True)
    return found == expected


def compare(program, rank, found, expected):
    assert found.keys() == expected.keys()
    for lane in expected:
        for number, (one, other) in enumerate(zip(found[lane], expected[lane], strict=True)):
            right = len(one) == len(other) and all(map(same, one, other))
            step = program["steps"][lane][number]
            group = program["lanes"][lane]
            assert right, (
                f"seed {program['seed']}, rank {rank}, group {group}, step {number}: {step}"
            )


@pytest.mark.slow
def test_random_programs_match_the_local_backend(ranks, threads):
    first = random.randrange(1 << 30) if SEED is None else int(SEED)
    for seed in range(first, first + (PROGRAMS if SEED is None else 1)):
        program = write_program(seed)
        size, name = program["size"], f"the program of seed {seed}"
        expected = threads.run(run_program, size, args=("local", program), name=name)
        found = ranks.run(run_program, size, args=("shm", program), name=name)
        for rank in range(size):
            compare(program, rank, found[rank], expected[rank])
