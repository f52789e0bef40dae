"""Drawings of meshes as text and SVG, at any size."""

import re
import time
from xml.etree import ElementTree as ET

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.errors import InvalidArgument
from phalanx.mesh.layout import FlatLayout, MeshLayout

from .internals import MeshView, visible_positions


def draw_mesh(layout, **options):
    return MeshView(layout, **options).draw()


def draw_svg(layout, **options):
    return draw_mesh(layout, svg=True, **options)


SVG = "{http://www.w3.org/2000/svg}"
LARGE = MeshLayout.from_sizes_strides((64, 64, 64))


def mesh(*sizes):
    return MeshLayout.from_sizes_strides(sizes)


def words(picture):
    return [element.text for element in ET.fromstring(picture).iter(f"{SVG}text")]


def test_text_shows_ranks_hosts_and_this_rank():
    drawn = draw_mesh(mesh(2, 8), names=("dp", "tp"), rank=5, ranks_per_host=4)
    assert drawn.splitlines() == [
        "dp=2 × tp=8: 16 ranks, 4 ranks per host",  # noqa: RUF001
        "rank 5 is at dp=0, tp=5, on host 1",
        "",
        "        0    1    2    3    4    5    6    7   tp",
        "dp=0    0    1    2    3 │  4   [5]   6    7   hosts 0-1",
        "dp=1    8    9   10   11 │ 12   13   14   15   hosts 2-3",
    ]


def test_a_line_separates_hosts_that_span_several_rows():
    nested = MeshLayout([FlatLayout((2, 2), (8, 1)), FlatLayout(4, 2)])
    drawn = draw_mesh(nested, names=("dp", "tp"), ranks_per_host=4)
    assert drawn.splitlines()[2:] == [
        "        0    1    2    3   tp",
        "dp=0    0    2 │  4    6   hosts 0-1",
        "dp=1    1    3 │  5    7   hosts 0-1",
        "      ─────────┼──────────",
        "dp=2    8   10 │ 12   14   hosts 2-3",
        "dp=3    9   11 │ 13   15   hosts 2-3",
    ]


def test_a_block_is_drawn_for_each_coordinate_of_the_outer_axes():
    lines = draw_mesh(mesh(2, 2, 1, 2), names="abcd").splitlines()
    titles = [line for line in lines if line.startswith("a=") and ":" not in line]
    assert titles == ["a=0, b=0", "a=0, b=1", "a=1, b=0", "a=1, b=1"]


@pytest.mark.parametrize("draw", [draw_mesh, draw_svg])
def test_names_hosts_and_rank_are_optional(draw):
    for layout in [mesh(), mesh(1), mesh(8), mesh(2, 3), mesh(2, 1, 3)]:
        drawn = draw(layout)
        assert "host" not in drawn
        assert f"{layout.numel()} rank" in drawn


@pytest.mark.parametrize("draw", [draw_mesh, draw_svg])
def test_a_rank_outside_the_mesh_is_reported(draw):
    assert "rank 9 is not in this mesh" in draw(mesh(2, 2), rank=9)
    assert "rank 3 is not in this mesh" in draw(mesh(4), rank=3, rank_map=[4, 5, 6, 7])


def test_a_large_mesh_is_drawn_quickly_and_fits_a_screen():
    begin = time.perf_counter()
    drawn = draw_mesh(LARGE, names=("dp", "pp", "tp"), rank=70000, ranks_per_host=8)
    picture = draw_svg(LARGE, names=("dp", "pp", "tp"), rank=70000, ranks_per_host=8)
    assert time.perf_counter() - begin < 0.5
    lines = drawn.splitlines()
    assert len(lines) < 45
    assert max(map(len, lines)) < 120
    assert "[70000]" in drawn
    assert "…" in drawn
    assert "262143" in drawn
    assert len(picture) < 60_000
    assert {"70000", "262143", "…"} <= set(words(picture))


def test_a_submesh_with_an_offset_shows_its_own_ranks():
    tp = mesh(4, 4)[1:]
    drawn = draw_mesh(tp, names=("tp",), rank=6, start=4)
    assert drawn.splitlines()[-1].split() == ["4", "5", "[6]", "7"]


def test_a_rank_map_is_applied():
    layout = mesh(2, 2)
    drawn = draw_mesh(layout, names=("dp", "tp"), rank=30, rank_map=[10, 20, 30, 40])
    assert drawn.splitlines()[1] == "rank 30 is at dp=1, tp=0"
    assert drawn.splitlines()[-1].split() == ["dp=1", "[30]", "40"]


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 500), st.data())
def test_visible_positions_include_the_ends_and_this_rank(size, data):
    here = data.draw(st.none() | st.integers(0, size - 1))
    limit = data.draw(st.integers(3, 16))
    places = visible_positions(size, here=here, limit=limit)
    kept = [place for place in places if place is not None]
    assert len(kept) == min(size, limit)
    assert kept == sorted(set(kept))
    assert {0, size - 1, here} - {None} <= set(kept)
    for left, middle, right in zip(places, places[1:], places[2:], strict=False):
        if middle is None:
            assert right - left > 1
        elif left is not None:
            assert middle == left + 1


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.integers(1, 9), max_size=4),
    st.integers(0, 80),
    st.none() | st.integers(1, 9),
    st.data(),
)
def test_svg_drawings_are_valid_and_deterministic(sizes, rank, ranks_per_host, data):
    letters = st.text(min_size=1, max_size=5)
    names = data.draw(st.none() | st.tuples(*[letters] * len(sizes)))
    options = {"names": names, "rank": rank, "ranks_per_host": ranks_per_host}
    layout = mesh(*sizes)
    picture = draw_svg(layout, **options)
    assert picture == draw_svg(layout, **options)
    numbers = {int(word) for word in words(picture) if word and re.fullmatch(r"\d{1,4}", word)}
    assert layout.numel() - 1 in numbers
    if layout.contains(rank):
        assert rank in numbers
        assert draw_mesh(layout, **options).count(f"[{rank}]") >= bool(sizes)


def test_the_svg_distinguishes_groups_and_hosts_without_colour():
    picture = draw_svg(mesh(2, 2, 4), names=("pp", "dp", "tp"), rank=6, ranks_per_host=8)
    assert {"rank 6", "its pp group", "its dp group", "its tp group"} <= set(words(picture))
    assert {"host 0", "host 1", "pp=0", "pp=1"} <= set(words(picture))
    dashes = set(re.findall(r'stroke-dasharray="([^"]+)"', picture))
    assert len(dashes) == 2  # and the third is a solid line


def test_the_svg_stays_inside_its_frame():
    picture = ET.fromstring(draw_svg(LARGE, rank=9, ranks_per_host=4))
    width, height = float(picture.get("width")), float(picture.get("height"))
    for group in picture.iter(f"{SVG}g"):
        left, top = map(float, re.findall(r"[\d.]+", group.get("transform")))
        for rect in group.iter(f"{SVG}rect"):
            assert 0 <= left + float(rect.get("x")) <= width - float(rect.get("width"))
            assert 0 <= top + float(rect.get("y")) <= height - float(rect.get("height"))


def test_invalid_arguments_are_rejected():
    with pytest.raises(InvalidArgument, match="1 names"):
        draw_mesh(mesh(2, 2), names=("dp",))
    with pytest.raises(InvalidArgument, match="got 0"):
        draw_svg(mesh(2, 2), ranks_per_host=0)
