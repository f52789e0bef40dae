"""Properties of layouts, checked by enumeration; torch's own classes are a second oracle."""

import itertools
import math
import pickle

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.distributed import _mesh_layout as theirs

from phalanx.errors import InvalidArgument, InvalidType
from phalanx.mesh import layout as module
from phalanx.mesh.layout import FlatLayout, MeshLayout

LAW = settings(max_examples=50, deadline=None)

# --- Strategies ---


@st.composite
def shapes_and_strides(draw, *, loops=3, size=4, stride=12):
    count = draw(st.integers(0, loops))
    shape = draw(st.lists(st.integers(1, size), min_size=count, max_size=count))
    steps = draw(st.lists(st.integers(0, stride), min_size=count, max_size=count))
    return tuple(shape), tuple(steps)


def flat_layouts(**limits):
    """Any layout; most contain repeated ranks."""
    return shapes_and_strides(**limits).map(lambda both: FlatLayout(*both))


@st.composite
def worlds(draw, *, factors=4):
    """The axis sizes of a contiguous world."""
    return tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=factors)))


@st.composite
def tiles(draw):
    """Some axes of a world in any order: an orthogonal layout, and the world size."""
    sizes = draw(worlds())
    root = MeshLayout.from_sizes_strides(sizes)
    kept = draw(st.permutations(range(len(sizes))))[: draw(st.integers(0, len(sizes)))]
    return MeshLayout([root[axis] for axis in kept]), math.prod(sizes)


@st.composite
def meshes(draw):
    """Arbitrary axes, including nested ones."""
    return MeshLayout(draw(st.lists(flat_layouts(loops=2, size=3), max_size=3)))


# --- Reference implementations ---


def by_hand(shape, stride):
    coordinates = itertools.product(*map(range, shape))
    return [sum(c * s for c, s in zip(each, stride, strict=True)) for each in coordinates]


def ranks(flat):
    return by_hand(flat.shape, flat.stride)


def mesh_ranks(mesh):
    """Map every coordinate to its rank."""
    axes = [ranks(axis) for axis in mesh]
    coordinates = itertools.product(*(range(len(axis)) for axis in axes))
    return {each: sum(axis[c] for axis, c in zip(axes, each, strict=True)) for each in coordinates}


def covers_by_hand(values):
    """Place copies of the ranks at the first gap until there is none; False on overlap."""
    extent = max(values) + 1
    taken = set()
    # The smallest free rank must be the start of the next copy; no other copy can cover it.
    for start in range(2 * extent):
        if start not in taken:
            copy = {start + value for value in values}
            if len(copy) < len(values) or copy & taken:
                return False
            taken |= copy
        if len(taken) == max(taken) + 1:
            return True
    return False


def is_regular(values):
    """Return whether nested strides can produce these values."""
    if len(values) == 1:
        return values[0] == 0
    for size in range(2, len(values) + 1):
        blocks = [values[i : i + size] for i in range(0, len(values), size)]
        step = values[1] - values[0]
        if (
            len(values) % size == 0
            and all(
                [value - block[0] for value in block] == [i * step for i in range(size)]
                for block in blocks
            )
            and is_regular([block[0] for block in blocks])
        ):
            return True
    return False


# --- One axis ---


@LAW
@given(shapes_and_strides())
def test_the_canonical_form_keeps_the_ranks_and_their_order(both):
    flat = FlatLayout(*both)
    assert flat.all_ranks_from_zero() == by_hand(*both)
    assert [flat.rank_at(index) for index in range(flat.numel())] == by_hand(*both)
    assert tuple(flat.sizes_and_strides) == tuple(zip(flat.shape, flat.stride, strict=True))


@LAW
@given(shapes_and_strides(stride=4), shapes_and_strides(stride=4))
def test_layouts_are_equal_if_and_only_if_their_ranks_are(left, right):
    same = by_hand(*left) == by_hand(*right)
    assert (FlatLayout(*left) == FlatLayout(*right)) is same
    if same:
        assert hash(FlatLayout(*left)) == hash(FlatLayout(*right))


@LAW
@given(worlds(), st.data())
def test_splitting_and_nesting_a_shape_gives_an_equal_layout(sizes, data):
    cut = data.draw(st.integers(0, len(sizes)))
    strides = FlatLayout(sizes), FlatLayout((sizes[:cut], sizes[cut:]))
    assert strides[0] == strides[1] == FlatLayout(math.prod(sizes))


@LAW
@given(flat_layouts())
def test_numel_and_cosize_match_enumeration(flat):
    assert flat.numel() == len(ranks(flat))
    assert flat.cosize() == max(ranks(flat)) + 1


@LAW
@given(flat_layouts(stride=30))
def test_has_repeats_matches_enumeration(flat):
    assert flat.has_repeats() is (len(set(ranks(flat))) < len(ranks(flat)))


@LAW
@given(st.one_of(flat_layouts(), tiles().map(lambda tile: tile[0].collapse())))
def test_a_layout_is_orthogonal_iff_its_copies_tile_the_ranks(flat):
    assert flat.check_orthogonal() is covers_by_hand(ranks(flat))


@LAW
@given(flat_layouts())
def test_check_sorted_means_nonincreasing_strides(flat):
    assert flat.check_sorted() is (list(flat.stride) == sorted(flat.stride, reverse=True))


@LAW
@given(tiles())
def test_a_complement_covers_the_world_without_overlap(tile):
    mesh, world_size = tile
    flat = mesh.collapse()
    starts = flat.complement(world_size).all_ranks_from_zero()
    covered = [start + rank for start in starts for rank in ranks(flat)]
    assert sorted(covered) == list(range(world_size))
    assert starts == sorted(starts)


@LAW
@given(flat_layouts(), st.integers(1, 60))
def test_complement_raises_iff_none_exists(flat, world_size):
    values = ranks(flat)
    taken = set()
    exists = True
    for start in range(world_size):
        if start not in taken:
            copy = {start + value for value in values}
            exists = exists and len(copy) == len(values) and not copy & taken
            taken |= copy
    if exists and taken == set(range(world_size)):
        assert len(flat.complement(world_size).all_ranks_from_zero()) * len(values) == world_size
    else:
        with pytest.raises(InvalidArgument):
            flat.complement(world_size)


@LAW
@given(tiles())
def test_global_ranks_partition_the_world_into_the_ranks_groups(tile):
    mesh, world_size = tile
    flat = mesh.collapse()
    groups = flat.global_ranks(world_size)
    assert sorted(itertools.chain(*groups)) == list(range(world_size))
    for group in groups:
        assert [rank - group[0] for rank in group] == ranks(flat)
        assert all(list(flat.group_of(rank)) == group for rank in group)


@LAW
@given(flat_layouts(), meshes())
def test_composition_is_function_composition(flat, selector):
    table = ranks(flat)
    try:
        composed = flat.composition(selector)
    except InvalidArgument:
        return
    assert composed.top_level_sizes == selector.top_level_sizes
    for coordinate, index in mesh_ranks(selector).items():
        assert composed.rank_of(coordinate) == table[index]


@LAW
@given(flat_layouts(stride=30), st.integers(1, 8), st.integers(0, 8))
def test_composition_raises_iff_no_strides_can_express_it(flat, size, stride):
    table = ranks(flat)
    wanted = range(0, size * stride, stride) if stride else [0] * size
    possible = max(wanted) < len(table) and is_regular([table[index] for index in wanted])
    selector = MeshLayout.from_sizes_strides((size,), (stride,))
    if possible:
        composed = flat.composition(selector)
        assert composed[0].all_ranks_from_zero() == [table[index] for index in wanted]
    else:
        with pytest.raises(InvalidArgument):
            flat.composition(selector)


@LAW
@given(tiles())
def test_unflatten_inverts_flatten(tile):
    mesh, _ = tile
    inner = MeshLayout.from_sizes_strides(mesh.top_level_sizes)
    assert mesh.collapse().composition(inner) == mesh


# --- Several axes ---


@LAW
@given(meshes())
def test_mesh_numel_and_cosize_match_enumeration(mesh):
    assert mesh.numel() == len(mesh_ranks(mesh))
    assert mesh.cosize() == max(mesh_ranks(mesh).values()) + 1
    assert mesh.top_level_sizes == tuple(len(ranks(axis)) for axis in mesh)
    values = list(mesh_ranks(mesh).values())
    assert mesh.has_repeats() is (len(set(values)) < len(values))


@LAW
@given(meshes())
def test_collapse_enumerates_ranks_with_the_last_axis_fastest(mesh):
    values = list(mesh_ranks(mesh).values())
    assert mesh.collapse().all_ranks_from_zero() == values
    assert mesh.coalesce() == mesh.collapse()
    assert mesh.flatten() == MeshLayout([mesh.collapse()]) == mesh.nest()
    assert mesh.check_sorted() is mesh.collapse().check_sorted()
    assert mesh.check_orthogonal() is mesh.collapse().check_orthogonal() is covers_by_hand(values)


@LAW
@given(meshes(), meshes(), st.integers(0, 3), st.integers(0, 3))
def test_splice_behaves_like_list_slice_assignment(mesh, other, start, end):
    expected = list(mesh)
    expected[start:end] = list(other)
    assert list(mesh.splice(start, end, other)) == expected
    assert mesh.splice(0, len(mesh), mesh) == mesh


@LAW
@given(meshes(), st.data())
def test_nest_keeps_every_rank(mesh, data):
    start = data.draw(st.integers(0, len(mesh)))
    end = data.draw(st.integers(start, len(mesh)))
    nested = mesh.nest(start, end)
    assert len(nested) == len(mesh) - (end - start) + 1
    assert nested.collapse() == mesh.collapse()
    assert nested[:start] == mesh[:start]
    assert nested[start + 1 :] == mesh[end:]


@LAW
@given(meshes())
def test_rank_of_and_coordinate_of_are_inverse(mesh):
    table = mesh_ranks(mesh)
    for coordinate, rank in table.items():
        assert mesh.rank_of(coordinate) == rank
        assert mesh.rank_of(mesh.coordinate_of(rank)) == rank
        assert mesh.contains(rank)
        if not mesh.has_repeats():
            assert mesh.coordinate_of(rank) == coordinate


@LAW
@given(meshes())
def test_a_rank_outside_the_mesh_has_no_coordinate(mesh):
    for rank in set(range(-2, mesh.cosize() + 3)) - set(mesh_ranks(mesh).values()):
        assert mesh.coordinate_of(rank) is None
        assert not mesh.contains(rank)


@LAW
@given(tiles())
def test_locate_finds_the_copy_and_coordinate_of_every_rank(tile):
    mesh, world_size = tile
    located = [mesh.locate(rank) for rank in range(world_size)]
    assert [start + mesh.rank_of(place) for start, place in located] == list(range(world_size))
    starts = mesh.collapse().complement(world_size).all_ranks_from_zero()
    assert sorted({start for start, _ in located}) == starts


@LAW
@given(tiles())
def test_ranks_of_group_vary_along_one_axis_only(tile):
    mesh, world_size = tile
    for rank, axis in itertools.product(range(world_size), range(len(mesh))):
        start, place = mesh.locate(rank)
        expected = [
            start + mesh.rank_of((*place[:axis], number, *place[axis + 1 :]))
            for number in range(mesh.top_level_sizes[axis])
        ]
        assert list(mesh.ranks_of_group(rank, axis)) == expected
        assert list(mesh.ranks_of_group(rank, axis - len(mesh))) == expected


@LAW
@given(tiles(), st.randoms(use_true_random=False))
def test_a_remapped_tensor_has_the_ranks_of_every_copy(tile, random):
    mesh, world_size = tile
    names = random.sample(range(1000), world_size)
    tensor = mesh.remap_to_tensor(torch.tensor(names))
    starts = mesh.collapse().complement(world_size).all_ranks_from_zero()
    assert tensor.shape == (len(starts), *mesh.top_level_sizes)
    for number, start in enumerate(starts):
        for coordinate, rank in mesh_ranks(mesh).items():
            assert tensor[(number, *coordinate)].item() == names[start + rank]


@LAW
@given(meshes())
def test_layouts_round_trip_through_pickle_and_repr(mesh):
    again = pickle.loads(pickle.dumps(mesh))
    assert again == mesh
    assert hash(again) == hash(mesh)
    assert eval(repr(mesh), {**vars(module)}) == mesh  # noqa: S307 - our own text


def test_layouts_can_be_matched_by_position():
    match MeshLayout([FlatLayout((2, 2), (4, 1))]):
        case MeshLayout([FlatLayout(shape, stride)]):
            assert (shape, stride) == ((2, 2), (4, 1))
        case _:
            raise AssertionError("no match")


# --- Agreement with torch ---


def as_theirs(mesh):
    return theirs._MeshLayout([theirs._FlatLayout(axis.shape, axis.stride) for axis in mesh])


def said(flat):
    return flat.shape, flat.stride


@LAW
@given(shapes_and_strides())
def test_the_canonical_form_matches_torch(both):
    ours, other = FlatLayout(*both), theirs._FlatLayout(*both)
    assert said(ours) == said(other)
    assert ours == other
    assert other == ours
    assert hash(ours) == hash(other)
    assert ours.to_pycute() == other.to_pycute()
    assert ours != theirs._FlatLayout(7, 11)
    assert ours.numel() == other.numel()
    assert ours.check_sorted() == other.check_sorted()
    assert ours.all_ranks_from_zero() == other.all_ranks_from_zero()


@LAW
@given(flat_layouts())
def test_check_orthogonal_matches_torch(flat):
    assume(0 not in flat.stride)  # torch divides by zero, or takes one rank many times for none
    assert flat.check_orthogonal() == theirs._FlatLayout(*said(flat)).check_orthogonal()


@LAW
@given(tiles())
def test_orthogonal_meshes_match_torch(tile):
    mesh, world_size = tile
    assert mesh != as_theirs([*mesh, FlatLayout(7)])
    for their_mesh in (as_theirs(mesh), theirs._MeshLayout(mesh.axes)):
        assert mesh == their_mesh
        assert their_mesh == mesh
        assert hash(mesh) == hash(their_mesh)
        assert mesh.to_pycute() == their_mesh.to_pycute()
    flat, other = mesh.collapse(), as_theirs(mesh).collapse()
    assert said(flat) == said(other)
    assert said(flat.complement(world_size)) == said(other.complement(world_size))
    assert flat.global_ranks(world_size) == other.global_ranks(world_size)
    assert mesh.cosize() == as_theirs(mesh).cosize()
    assert mesh.top_level_sizes == as_theirs(mesh).top_level_sizes
    rank_map = torch.arange(world_size)
    assert torch.equal(mesh.remap_to_tensor(rank_map), as_theirs(mesh).remap_to_tensor(rank_map))
    assume(len(mesh))  # torch makes an axis of none
    inner = MeshLayout.from_sizes_strides(mesh.top_level_sizes)
    theirs_composed = other.composition(as_theirs(inner))
    assert list(map(said, flat.composition(inner))) == list(map(said, theirs_composed))


# --- Very large meshes ---


def test_queries_on_a_very_large_mesh_do_not_enumerate_it():
    mesh = MeshLayout.from_sizes_strides((2**20, 2**20, 2**20))
    rank = mesh.rank_of((3, 4, 5))
    assert mesh.coordinate_of(rank) == (3, 4, 5)
    assert mesh.ranks_of_group(rank, 1)[4] == rank
    assert mesh[::2].locate(rank) == (4 * 2**20, (3, 5))
    assert not mesh.has_repeats()
    assert mesh.check_orthogonal()
    assert mesh.flatten().numel() == mesh.cosize() == 2**60


# --- Errors ---


@pytest.mark.parametrize(
    ("make", "error", "named"),
    [
        (lambda: FlatLayout([2, 3]), InvalidType, "[2, 3]"),
        (lambda: FlatLayout("8"), InvalidType, "'8'"),
        (lambda: FlatLayout(4, 1.5), InvalidType, "1.5"),
        (lambda: FlatLayout((4, 0)), InvalidArgument, "0"),
        (lambda: FlatLayout(-4), InvalidArgument, "-4"),
        (lambda: FlatLayout(4, -1), InvalidArgument, "-1"),
        (lambda: FlatLayout((2, (3, 4)), (12, 4)), InvalidArgument, "(12, 4)"),
        (lambda: FlatLayout(4, (1,)), InvalidArgument, "(1,)"),
        (
            lambda: FlatLayout(4).complement(0),
            InvalidArgument,
            "world_size must be at least 1, got 0",
        ),
        (lambda: FlatLayout(4).complement(10), InvalidArgument, "a multiple of 4"),
        (lambda: FlatLayout((2, 2), (3, 1)).complement(6), InvalidArgument, "(2:3,2:1)"),
        (lambda: FlatLayout((2, 2), (3, 1)).group_of(2), InvalidArgument, "rank 2"),
        (lambda: FlatLayout(4).rank_at(4), InvalidArgument, "index must be 0 to 3, got 4"),
        (lambda: FlatLayout(4).group_of(-1), InvalidArgument, "-1"),
        (lambda: MeshLayout([4]), InvalidType, "4"),
        (lambda: MeshLayout.from_sizes_strides((2, 3), (1,)), InvalidArgument, "(2, 3)"),
        (lambda: MeshLayout.from_sizes_strides((2, -3)), InvalidArgument, "-3"),
        (lambda: MeshLayout.from_sizes_strides((2, 3)).rank_of((1,)), InvalidArgument, "2 axes"),
        (lambda: MeshLayout.from_sizes_strides((2, 3)).rank_of((1, 3)), InvalidArgument, "(1, 3)"),
        (
            lambda: MeshLayout.from_sizes_strides((2, 3)).ranks_of_group(0, 2),
            InvalidArgument,
            "axis 2",
        ),
        (lambda: MeshLayout([FlatLayout(2)] * 2).locate(1), InvalidArgument, "overlap"),
        (
            lambda: MeshLayout([FlatLayout(4)]).remap_to_tensor(torch.zeros(2, 2)),
            InvalidArgument,
            "(2, 2)",
        ),
        (
            lambda: MeshLayout([FlatLayout(4)]).remap_to_tensor(torch.arange(6)),
            InvalidArgument,
            "6 ranks",
        ),
    ],
)
def test_invalid_arguments_are_named_in_the_error(make, error, named):
    with pytest.raises(error) as caught:
        make()
    assert named in str(caught.value)


def test_layouts_are_immutable():
    flat, mesh = FlatLayout(4), MeshLayout([FlatLayout(4)])
    for layout, name in [(flat, "shape"), (mesh, "axes"), (mesh, "other")]:
        with pytest.raises((AttributeError, TypeError)):
            setattr(layout, name, ())


def test_upstream_aliases_exist():
    assert module._FlatLayout is FlatLayout
    assert module._MeshLayout is MeshLayout
    assert FlatLayout(4) != MeshLayout([FlatLayout(4)])
    assert FlatLayout(4) != 4
