"""Identities between collectives that hold for any input and any order of arrival."""

import random
import threading

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import ReduceOp

from phalanx.testing import ThreadRanks

many = settings(max_examples=25, deadline=None)
four = ThreadRanks(4)

WHOLE = st.integers(-1000, 1000)
FLOATS = st.floats(-(2.0**100), 2.0**100, width=32)


@st.composite
def rows(draw, numbers=WHOLE, dtype=torch.int64, multiple=False):
    """Draw a tensor for each of one to four ranks; `multiple` makes its length divisible."""
    size = draw(st.integers(1, 4))
    length = draw(st.integers(0, 3)) * (size if multiple else 1)
    drawn = st.lists(numbers, min_size=length, max_size=length)
    return [torch.tensor(draw(drawn), dtype=dtype) for _ in range(size)]


def together(body, inputs):
    """Call ``body(group, tensor)`` on as many ranks as there are tensors, each with its own."""

    def with_group(context):
        return body(context.group("local"), inputs[context.rank].clone())

    return four.run(with_group, len(inputs))


def allreduced(group, tensor, op=ReduceOp.SUM):
    tensor = tensor.clone()
    group.allreduce(tensor, op).wait()
    return tensor


def gathered(group, tensor):
    output = tensor.new_zeros(group.size() * tensor.numel())
    group.all_gather_single(output, tensor).wait()
    return output.view(group.size(), tensor.numel())


def same_bits(one, other):
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


# -- one collective in terms of others -----------------------------------------------------


@many
@given(rows(FLOATS, torch.float32))
def test_allreduce_is_the_sum_by_rank_of_allgather(inputs):
    def law(group, tensor):
        total = torch.zeros_like(tensor)
        for number, row in enumerate(gathered(group, tensor)):
            total = row.clone() if number == 0 else total + row
        return same_bits(allreduced(group, tensor), total)

    assert all(together(law, inputs))


@many
@given(rows(FLOATS, torch.float32, multiple=True))
def test_reduce_scatter_and_allgather_make_allreduce(inputs):
    def law(group, tensor):
        part = tensor.new_zeros(tensor.numel() // group.size())
        group.reduce_scatter_single(part, tensor).wait()
        return same_bits(gathered(group, part).view(-1), allreduced(group, tensor))

    assert all(together(law, inputs))


@many
@given(rows(), st.integers(0, 3))
def test_reduce_and_broadcast_make_allreduce(inputs, root):
    def law(group, tensor):
        copy = tensor.clone()
        group.reduce(copy, root % group.size()).wait()
        group.broadcast(copy, root % group.size()).wait()
        return torch.equal(copy, allreduced(group, tensor))

    assert all(together(law, inputs))


@many
@given(rows(), st.integers(0, 3))
def test_scatter_inverts_gather(inputs, root):
    def law(group, tensor):
        root_rank = root % group.size()
        everybodys = [torch.zeros_like(tensor) for _ in inputs]
        everybodys = everybodys if group.rank() == root_rank else []
        group.gather(everybodys, tensor, root_rank).wait()
        back = torch.zeros_like(tensor)
        group.scatter(back, everybodys, root_rank).wait()
        return torch.equal(back, tensor)

    assert all(together(law, inputs))


@many
@given(rows(), st.integers(0, 3))
def test_a_second_broadcast_changes_nothing(inputs, root):
    def law(group, tensor):
        once = tensor.clone()
        group.broadcast(once, root % group.size()).wait()
        twice = once.clone()
        group.broadcast(twice, (root + 1) % group.size()).wait()
        return torch.equal(once, inputs[root % group.size()]) and torch.equal(once, twice)

    assert all(together(law, inputs))


# -- exchanges -----------------------------------------------------------------------------


@many
@given(rows(multiple=True))
def test_an_even_all_to_all_is_its_own_inverse(inputs):
    def law(group, tensor):
        there, back = torch.zeros_like(tensor), torch.zeros_like(tensor)
        group.all_to_all_single(there, tensor).wait()
        group.all_to_all_single(back, there).wait()
        parts = [torch.zeros_like(part) for part in there.chunk(group.size())]
        if len(parts) == group.size():  # an empty tensor has no parts
            group.alltoall(parts, list(there.chunk(group.size()))).wait()
            back = torch.cat(parts)
        return torch.equal(back, tensor)

    assert all(together(law, inputs))


@many
@given(
    st.integers(1, 4).flatmap(
        lambda n: st.lists(
            st.lists(st.integers(0, 3), min_size=n, max_size=n), min_size=n, max_size=n
        )
    )
)
def test_an_uneven_all_to_all_is_inverted_by_swapping_the_splits(splits):
    """``splits[i][j]`` is how many rows rank i sends to rank j."""
    sent = splits
    received = [list(column) for column in zip(*splits, strict=True)]
    inputs = [torch.arange(sum(row)) + 100 * rank for rank, row in enumerate(splits)]

    def law(group, tensor):
        rank = group.rank()
        there = tensor.new_zeros(sum(received[rank]))
        back = torch.zeros_like(tensor)
        group.all_to_all_single(there, tensor, received[rank], sent[rank]).wait()
        group.all_to_all_single(back, there, sent[rank], received[rank]).wait()
        senders = [n for n, count in enumerate(received[rank]) for _ in range(count)]
        return torch.equal(back, tensor) and (there // 100).tolist() == senders

    assert all(together(law, inputs))


# -- order ---------------------------------------------------------------------------------


@many
@given(st.permutations(range(4)), st.lists(FLOATS, min_size=12, max_size=12))
def test_sum_is_bitwise_equal_for_any_order_of_arrival(arrival, numbers):
    inputs = list(torch.tensor(numbers, dtype=torch.float32).view(4, 3))
    by_rank = ((inputs[0] + inputs[1]) + inputs[2]) + inputs[3]
    turns = [threading.Event() for _ in range(5)]
    turns[0].set()

    def in_turn(group, tensor):
        turn = arrival.index(group.rank())
        turns[turn].wait()
        work = group.allreduce(tensor)
        turns[turn + 1].set()
        work.wait()
        return same_bits(tensor, by_rank)

    assert all(together(in_turn, inputs))


@many
@given(rows(), st.randoms(use_true_random=False))
def test_integer_reductions_do_not_depend_on_rank_order(inputs, chance):
    shuffled = chance.sample(inputs, len(inputs))
    operations = ("SUM", "MIN", "MAX", "PRODUCT", "BAND", "BOR", "BXOR")

    def reduced(group, tensor):
        return [allreduced(group, tensor, getattr(ReduceOp, name)) for name in operations]

    (before, *_), (after, *_) = together(reduced, inputs), together(reduced, shuffled)
    assert all(map(torch.equal, before, after))


# -- splits --------------------------------------------------------------------------------


@many
@given(rows(), st.permutations(range(4)), st.integers(1, 4))
def test_a_split_behaves_like_a_group_formed_directly(inputs, order, count):
    """Its ranks are in the order in which the members were listed."""
    members = [rank for rank in order if rank < len(inputs)][:count]

    def of_split(group, tensor):
        part = group.split_group(members)
        assert (part is not None) == (group.rank() in members)
        if part is None:
            return None
        return part.rank(), gathered(part, tensor), allreduced(part, tensor)

    def of_whole(group, tensor):
        return group.rank(), gathered(group, tensor), allreduced(group, tensor)

    split = together(of_split, inputs)
    alike = together(of_whole, [inputs[rank] for rank in members])
    for rank, member in enumerate(members):
        assert split[member][0] == rank
        assert all(map(torch.equal, split[member][1:], alike[rank][1:]))


# -- engines against the reference ---------------------------------------------------------

DTYPES = [torch.float32, torch.float64, torch.int32, torch.int64, torch.uint8]
OPERATIONS = [ReduceOp.SUM, ReduceOp.AVG, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT]
MOVES = ["broadcast", "allgather", "gather", "scatter", "all_to_all_single"]
REDUCTIONS = ["allreduce", "reduce", "reduce_scatter", "reduce_scatter_single"]


def program(seed, length, size):
    """Generate a random list of calls that all ranks make."""
    chance = random.Random(seed)
    for number in range(length):
        yield {
            "call": chance.choice(MOVES + REDUCTIONS),
            "dtype": chance.choice(DTYPES),
            "length": chance.choice([0, 1, 7, 64, 5000]),
            "op": chance.choice(OPERATIONS),
            "root": chance.randrange(size),
            "seed": seed + number,
            "in flight": chance.randrange(4),
        }


def begin(group, step):
    """Make one call on random input; returns its work and the output tensor."""
    size, rank, root = group.size(), group.rank(), step["root"]
    generator = torch.Generator().manual_seed(step["seed"] * size + rank)
    shape = (size, step["length"])
    whole = torch.randint(1, 9, shape, generator=generator).to(step["dtype"])
    if whole.is_floating_point():
        whole += 0.1
    parts, blank = list(whole.unbind()), torch.zeros_like(whole)
    out, outs, at_root = blank[0], list(blank.unbind()), rank == root
    op = step["op"]
    calls = {
        "allreduce": lambda: (group.allreduce(whole, op), whole),
        "reduce": lambda: (group.reduce(whole, root, op), whole),
        "reduce_scatter": lambda: (group.reduce_scatter(out, parts, op), out),
        "reduce_scatter_single": lambda: (group.reduce_scatter_single(out, whole, op=op), out),
        "broadcast": lambda: (group.broadcast(whole, root), whole),
        "allgather": lambda: (group.allgather(outs, parts[0]), blank),
        "gather": lambda: (group.gather(outs if at_root else [], parts[0], root), blank),
        "scatter": lambda: (group.scatter(out, parts if at_root else [], root), out),
        "all_to_all_single": lambda: (group.all_to_all_single(blank, whole), blank),
    }
    return calls[step["call"]]()


def run_program(context, backend, steps):
    group = context.group(backend)
    outputs, under_way = [], []
    for step in steps:
        work, output = begin(group, step)
        outputs.append(output)
        under_way.append(work)
        while len(under_way) > step["in flight"]:
            under_way.pop(len(under_way) // 2).wait()  # neither first nor last
    for work in under_way:
        work.wait()
    return outputs


def test_a_random_program_gives_equal_results_on_gloo_and_local(ranks, threads):
    steps = list(program(seed=7, length=150, size=3))
    assert {step["call"] for step in steps} == {*MOVES, *REDUCTIONS}
    expected = threads.run(run_program, 3, args=("local", steps))
    found = ranks.run(run_program, 3, args=("gloo", steps))
    for rank in range(3):
        for step, one, other in zip(steps, expected[rank], found[rank], strict=True):
            torch.testing.assert_close(one, other, msg=lambda text, at=(rank, step): f"{at} {text}")
