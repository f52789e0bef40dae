"""gather_uneven: gathers rows of different lengths without padding."""

from collections import namedtuple
from datetime import timedelta

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.data import DistributedSampler

import phalanx
from cases import over_cases
from phalanx import errors
from phalanx.groups import process_group
from phalanx.testing import over_groups

everywhere = over_cases("local-4", "shm-2", "gloo-4")
on_pairs = over_groups(sizes=(2,), backends=("local", "shm"), reuse=True)
LONG = timedelta(seconds=60)
COUNTS = {"uneven": (3, 1, 4, 2), "one has none": (0, 2, 1, 1), "nobody has any": (0, 0, 0, 0)}


def rows_of(rank, count, *shape, dtype=torch.float32):
    """Return rows whose values identify their rank."""
    numbers = torch.arange(count * torch.Size(shape).numel()) + 100 * rank
    return numbers.view(count, *shape).to(dtype)


def gathered(counts, *shape, dtype=torch.float32):
    return torch.cat([rows_of(r, n, *shape, dtype=dtype) for r, n in enumerate(counts)])


def assert_equal(mine, expected):
    assert mine.dtype == expected.dtype
    assert mine.shape == expected.shape
    assert torch.equal(mine, expected)


def operations(group, action):
    """Return the collectives that `action` issued on a group, with shapes."""

    def collectives():
        return [r for r in group.records() if r.operation not in ("send", "recv")]

    before = max([record.sequence for record in collectives()], default=0)
    action()
    return [(r.operation, r.shape) for r in collectives() if r.sequence > before]


# -- inputs --------------------------------------------------------------------------------


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
@everywhere
def test_rows_are_in_rank_order(group, counts):
    counts = counts[: group.size()]
    mine = counts[group.rank()]
    for shape in ((), (2,), (2, 3)):
        result = phalanx.gather_uneven(rows_of(group.rank(), mine, *shape), group)
        assert_equal(result, gathered(counts, *shape))


@everywhere
def test_dst_receives_and_other_ranks_get_none(group):
    counts = (3, 1, 4, 0)[: group.size()]
    rows = rows_of(group.rank(), counts[group.rank()], 2)
    for dst in range(group.size()):
        result = phalanx.gather_uneven({"rows": rows}, group, dst=dst)
        if group.rank() == dst:
            assert_equal(result["rows"], gathered(counts, 2))
        else:
            assert result is None


TYPES = (torch.float64, torch.bfloat16, torch.complex64, torch.bool, torch.int16, torch.uint8)
TYPES += (torch.float8_e4m3fn, torch.uint16)


@everywhere
def test_every_dtype(group):
    for dtype in TYPES:
        rows = torch.arange(3 * group.rank()).view(-1, 3).to(dtype)
        whole = [torch.arange(3 * rank).view(-1, 3).to(dtype) for rank in range(group.size())]
        result = phalanx.gather_uneven(rows, group)
        assert result.dtype == dtype
        expected = torch.cat([part.reshape(-1).view(torch.uint8) for part in whole])
        assert torch.equal(result.reshape(-1).view(torch.uint8), expected)


Pair = namedtuple("Pair", "left right")


@everywhere
def test_nested_trees(group):
    rank, size = group.rank(), group.size()
    tree = {
        "pred": rows_of(rank, rank, 2),
        "more": [Pair(rows_of(rank, 1), rank), (torch.tensor(rank / 2), True)],
        7: rank / 4,
        "nothing": None,
    }
    if rank == 1:  # key order does not matter
        tree = dict(reversed(tree.items()))
    result = phalanx.gather_uneven(tree, group)
    assert list(result) == list(tree)
    assert_equal(result["pred"], gathered(range(size), 2))
    (left, right), (half, true) = result["more"]
    assert isinstance(result["more"][0], Pair)
    assert_equal(left, gathered([1] * size))
    assert_equal(right, torch.arange(size))
    assert_equal(half, torch.arange(size) / 2)
    assert_equal(true, torch.ones(size, dtype=torch.bool))
    assert_equal(result[7], torch.arange(size, dtype=torch.float64) / 4)
    assert result["nothing"] is None


@everywhere
def test_rank_without_rows_need_not_know_the_structure(group):
    tree = {"pred": rows_of(1, 2, 3, dtype=torch.int32), "loss": [0.5]}
    parts = {"pred": torch.empty(0, 9), "loss": [None]}
    for nothing in (None, torch.empty(0), {"pred": None, "loss": None}, parts):
        result = phalanx.gather_uneven(tree if group.rank() == 1 else nothing, group)
        assert_equal(result["pred"], tree["pred"])
        assert_equal(result["loss"][0], torch.tensor([0.5], dtype=torch.float64))


@everywhere
def test_no_rank_has_rows(group):
    assert phalanx.gather_uneven(None, group) is None
    one = torch.empty(0, 3, dtype=torch.int64) if group.rank() == 1 else torch.empty(0)
    assert_equal(phalanx.gather_uneven(one, group), torch.empty(0, 3, dtype=torch.int64))


@everywhere
def test_strided_and_requires_grad_tensors(group):
    base = torch.arange(12.0).view(3, 4).requires_grad_()
    for rows in (base.t(), base[::2], torch.arange(4.0).to(torch.complex64).conj(), base[1:, :0]):
        result = phalanx.gather_uneven(rows, group)
        assert not result.requires_grad
        assert torch.equal(result, torch.cat([rows.detach()] * group.size()))


@everywhere
def test_many_tensors_take_another_exchange(group):
    tree = {f"metric number {i}": rows_of(group.rank(), i % 3) for i in range(40)}
    result = phalanx.gather_uneven(tree if group.rank() else None, group)
    for i in range(40):
        parts = [rows_of(rank, i % 3) for rank in range(1, group.size())]
        assert_equal(result[f"metric number {i}"], torch.cat(parts))


@everywhere
def test_no_padding_is_sent(group):
    counts = [1, 60_000, 0, 2][: group.size()]
    rows = rows_of(group.rank(), counts[group.rank()])
    assert operations(group, lambda: phalanx.gather_uneven(rows, group)) == [
        ("allgather", (512,)),
        *(("broadcast", (4 * count,)) for count in counts if count),
    ]
    assert_equal(phalanx.gather_uneven(rows, group), gathered(counts))


@st.composite
def uneven_trees(draw):
    """Draw counts, row shapes and dtypes of a few tensors, and a destination."""
    size = draw(st.integers(2, 4))
    counts = st.lists(st.integers(0, 6), min_size=size, max_size=size)
    shapes = st.lists(st.integers(0, 3), max_size=2)
    types = st.sampled_from([torch.float32, torch.int64, torch.bool])
    leaves = draw(st.lists(st.tuples(counts, shapes, types), max_size=4))
    return size, leaves, draw(st.none() | st.integers(0, size - 1))


def gather_drawn(ctx, drawn):
    _, leaves, dst = drawn
    group = ctx.group("local", timeout=LONG)
    tree = [
        rows_of(ctx.rank, counts[ctx.rank], *shape, dtype=dtype) for counts, shape, dtype in leaves
    ]
    result = phalanx.gather_uneven(tree, group, dst=dst)
    if dst in (None, ctx.rank):
        for mine, (counts, shape, dtype) in zip(result, leaves, strict=True):
            assert_equal(mine, gathered(counts, *shape, dtype=dtype))
    else:
        assert result is None


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(drawn=uneven_trees())
def test_any_counts_and_shapes(threads, drawn):
    threads.run(gather_drawn, drawn[0], args=(drawn,))


# -- interleaved order ---------------------------------------------------------------------


@pytest.mark.parametrize("shuffle", [False, True])
@everywhere
def test_interleaved_order_restores_the_samplers_order(group, shuffle):
    for length in (1, 7, 8, 13):
        rank, size = group.rank(), group.size()
        sampler = DistributedSampler(range(length), size, rank, shuffle=shuffle)
        mine = torch.tensor(list(sampler))
        tree = {"ids": mine, "rows": mine[:, None] * torch.ones(2), "rank": rank}
        result = phalanx.gather_uneven(tree, group, order="interleaved", total=length)
        whole = DistributedSampler(range(length), 1, 0, shuffle=shuffle)
        assert result["ids"].tolist() == list(whole)
        assert result["rows"][:, 1].tolist() == list(whole)
        assert result["rank"].tolist() == list(range(size))  # one value per rank
        kept = phalanx.gather_uneven(mine, group, order="interleaved")
        assert len(kept) == len(sampler) * size


@everywhere
def test_interleaved_order_without_total_keeps_a_partial_last_round(group):
    mine = torch.arange(group.rank(), 2 * group.size() + 1, group.size())
    result = phalanx.gather_uneven(mine, group, order="interleaved")
    assert result.tolist() == list(range(2 * group.size() + 1))


@everywhere
def test_total_with_missing_rows_is_rejected(group):
    rows = {"pred": torch.ones(2 if group.rank() else 1)}
    with pytest.raises(
        errors.InvalidArgument, match="rank 0 of . must have 2 rows, got 1, at ..pred"
    ):
        phalanx.gather_uneven(rows, group, order="interleaved", total=2 * group.size())
    group.barrier().wait()


# -- ranks that have left ------------------------------------------------------------------


def gather_among_the_rest(ctx, backend):
    group = ctx.group(backend, timeout=LONG)
    for there in ((0, 1, 2, 3), (1, 2, 3), (1, 3), (3,)):
        if ctx.rank not in there:
            group.leave()
            return
        for count in (2, 50_000):
            result = phalanx.gather_uneven(rows_of(ctx.rank, count + ctx.rank), group)
            assert_equal(result, torch.cat([rows_of(rank, count + rank) for rank in there]))
        result = phalanx.gather_uneven(rows_of(ctx.rank, 1), group, dst=there[-1])
        assert (result is None) == (ctx.rank != there[-1])
        mine = torch.tensor([ctx.rank, ctx.rank + 4])
        result = phalanx.gather_uneven(mine, group, order="interleaved", total=7)
        assert result.tolist() == [n for n in range(7) if n % 4 in there]
    with pytest.raises(errors.PeerLeft, match=r"rank 2 \(dst\) has left the group") as caught:
        phalanx.gather_uneven(torch.ones(1), group, dst=2)
    assert caught.value.left == (2,)
    assert phalanx.gather_uneven(torch.ones(1), group).tolist() == [1]


@pytest.mark.parametrize("backend", ["local", "shm"])
def test_ranks_that_have_left_are_not_in_the_result(threads, ranks, backend):
    pool = {"local": threads, "shm": ranks}[backend]
    pool.run(gather_among_the_rest, 4, args=(backend,))


# -- mismatches ----------------------------------------------------------------------------


MISFITS = {
    "type": ({"a": torch.ones(2)}, {"a": torch.ones(2).int()},
             r"rank 0 has rows of float32\[\], rank 1 has rows of int32\[\], at \['a'\]"),
    "shape": ([torch.ones(2, 3)], [torch.ones(2, 4)], r"float32\[3\], .* float32\[4\], at \[0\]"),
    "keys": ({"a": 1, "b": 2}, {"a": 1}, "keys 'a', 'b', rank 1 has a dict with the keys 'a'"),
    "kind": ({"x": [1]}, {"x": (1,)}, r"a list of 1, rank 1 has a tuple of 1, at \['x'\]"),
    "leaf": (torch.ones(1), [torch.ones(1)], r"rows of float32\[\], rank 1 has a list of 1"),
    "number": (1.5, torch.ones(1).double(), r"a number \(float64\), rank 1 has rows of float"),
}  # fmt: skip


@pytest.mark.parametrize(("one", "other", "told"), MISFITS.values(), ids=MISFITS)
@on_pairs
def test_mismatch_is_named_on_all_ranks(group, one, other, told):
    for dst in (None, 1):
        with pytest.raises(errors.RankMismatch, match=told):
            phalanx.gather_uneven(other if group.rank() else one, group, dst=dst)
    assert phalanx.gather_uneven(1, group).tolist() == [1, 1]  # nothing broke


MISTAKES = {
    "text": ({"a": ["no"]}, {}, errors.InvalidType, r"got str, at \['a'\]\[0\] \(on rank 1\)"),
    "keys": ({None: 1}, {}, errors.InvalidType, "keys must be strings or integers, got None"),
    "sparse": (torch.ones(2).to_sparse(), {}, errors.InvalidType, "use tensor.to_dense"),
    "large": ([2**63], {}, errors.InvalidArgument, "9223372036854775808 does not fit in an int64"),
    "order": (
        1,
        {"order": "random"},
        errors.InvalidArgument,
        "order must be 'ranks' or 'interleaved'",
    ),
    "dst": (1, {"dst": 2}, errors.InvalidArgument, "dst must be a rank of a group of 2, got 2"),
    "total": (1, {"total": -1}, errors.InvalidArgument, "total must be a number of rows, got -1"),
    "ranks": (1, {"total": 3}, errors.InvalidArgument, "total needs order='interleaved'"),
}


@pytest.mark.parametrize(("tree", "options", "kind", "told"), MISTAKES.values(), ids=MISTAKES)
@on_pairs
def test_bad_input_on_one_rank_is_raised_on_all(group, tree, options, kind, told):
    mine = (tree, options) if group.rank() else (1, {})
    with pytest.raises(kind, match=told):
        phalanx.gather_uneven(mine[0], group, **mine[1])
    assert phalanx.gather_uneven(1, group).tolist() == [1, 1]


@on_pairs
def test_different_arguments_on_ranks_are_rejected(group):
    order = "interleaved" if group.rank() else "ranks"
    with pytest.raises(errors.RankMismatch, match="rank 0 passed .*'ranks'.* rank 1 passed"):
        phalanx.gather_uneven(1, group, order=order)


@on_pairs
def test_default_is_the_current_group(group):
    with process_group(group):
        assert phalanx.gather_uneven(group.rank()).tolist() == [0, 1]
    with pytest.raises(errors.InvalidArgument, match="gather_uneven has no group"):
        phalanx.gather_uneven(1)
