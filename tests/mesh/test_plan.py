"""Mesh plans, compared with enumeration."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.errors import InvalidArgument
from phalanx.mesh.layout import format_rank_pattern

from .internals import plan_mesh

LAW = settings(max_examples=100, deadline=None)


@st.composite
def planned(draw):
    sizes = draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))
    ranks = math.prod(sizes)
    hosts = draw(st.sampled_from([count for count in range(1, ranks + 1) if ranks % count == 0]))
    rank = draw(st.integers(0, ranks - 1))
    return plan_mesh("x".join(map(str, sizes)), rank=rank, hosts=hosts), hosts


@LAW
@given(planned())
def test_an_axis_crosses_hosts_iff_any_of_its_groups_does(both):
    mesh, hosts = both
    ranks = mesh.layout.numel()
    for number, axis in enumerate(mesh.layout):
        groups = axis.global_ranks(ranks)
        spans = [{rank // (ranks // hosts) for rank in group} for group in groups]
        assert mesh.crosses_hosts(number) is any(len(span) > 1 for span in spans)


@LAW
@given(planned())
def test_the_printed_groups_match_the_layout(both):
    mesh, hosts = both
    ranks = mesh.layout.numel()
    lines = mesh.text().splitlines()[-len(mesh.layout) :]
    for number, (axis, line) in enumerate(zip(mesh.layout, lines, strict=True)):
        [group] = [g for g in axis.global_ranks(ranks) if mesh.rank in g]
        assert list(mesh.layout.ranks_of_group(mesh.rank, number)) == group
        spanned = {rank // (ranks // hosts) for rank in group}
        where = f"host {min(spanned)}" if len(spanned) == 1 else f"{len(spanned)} hosts"
        shown = format_rank_pattern(mesh.layout.ranks_of_group(mesh.rank, number))
        place = mesh.layout.coordinate_of(mesh.rank)[number]
        assert line.split()[5:] == [str(place), *f"{shown} on {where}".split()]


@pytest.mark.parametrize(
    ("ranks", "short"),
    [
        (range(1), "0"),
        (range(2), "0-1"),
        (range(8), "0-7"),
        (range(1, 64, 8), "1-57:8"),
        ([0, 1, 2, 5, 9, 10], "0-2,5,9-10"),
        (range(512, 640, 8), "512-632:8"),
        ([5], "5"),
    ],
)
def test_ranks_are_abbreviated(ranks, short):
    assert format_rank_pattern(ranks) == short


@pytest.mark.parametrize("shape", ["2x3", "2X3", " 2 x 3 ", "2,3", "2×3"])  # noqa: RUF001
def test_a_shape_can_be_written_in_several_ways(shape):
    assert plan_mesh(shape).layout.top_level_sizes == (2, 3)


@pytest.mark.parametrize(
    ("shape", "options", "words"),
    [
        ("", {}, ["''", "such as 8x16x8"]),
        ("8x", {}, ["'8x'", "such as 8x16x8"]),
        ("8x1.5", {}, ["'8x1.5'"]),
        ("9" * 5000, {}, ["such as 8x16x8"]),
        ("9999999999x9999999999", {}, ["more than"]),
        ("2x0", {}, ["size 0", "minimum is 1"]),
        ("2x-3", {}, ["size -3"]),
        ("2x3", {"names": "dp"}, ["--names has 1 name, but shape 2x3 has 2 axes"]),
        ("6", {"names": "dp,tp"}, ["2 names", "1 axis"]),
        ("2x3", {"names": "dp,"}, ["--names has an empty name"]),
        ("2x3", {"names": "dp,dp"}, ["'dp' twice"]),
        ("2x3", {"rank": 6}, ["rank 6", "0 to 5"]),
        ("2x3", {"rank": -1}, ["rank -1", "0 to 5"]),
        ("2x3", {"hosts": 4}, ["6 ranks", "4 hosts", "such as 3"]),
        ("2x3", {"hosts": 0}, ["at least 1", "got 0"]),
        ("2x3", {"hosts": 7}, ["such as 6"]),
    ],
)
def test_errors_name_the_value_and_suggest_a_fix(shape, options, words):
    with pytest.raises(InvalidArgument) as caught:
        plan_mesh(shape, **options)
    for word in words:
        assert word in str(caught.value)


def test_a_plan_of_a_huge_mesh_is_cheap():
    text = plan_mesh("999999999x999999999", rank=7, hosts=3).text(picture=True)
    assert "0-999999998 on host 0" in text
    assert "on 3 hosts" in text
