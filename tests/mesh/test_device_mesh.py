"""DeviceMesh: the same program gives the same mesh with torch's class and ours."""

import copy
import pickle
import threading
import warnings
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing._internal.distributed.fake_pg import FakeStore

from phalanx.errors import NotInMesh
from phalanx.groups import new_group, process_group
from phalanx.mesh import DeviceMesh, init_device_mesh
from phalanx.testing import ThreadRanks

from .internals import _mesh_resources
from .kits import NAMES, PROGRAMS, WORLD, Ours, Theirs, cube, told


@pytest.fixture(params=[0, 3, 6])
def both(request):
    """torch's mesh and ours, as one rank of eight sees them."""
    dist.init_process_group("fake", rank=request.param, world_size=WORLD, store=FakeStore())
    ours = Ours(request.param)
    yield Theirs(), ours
    ours.group.shutdown()
    dist.destroy_process_group()


def check_equal(both, program):
    theirs, mine = (told(program(kit)) for kit in both)
    assert mine == theirs


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_program_gives_the_same_mesh_as_torch(both, name):
    check_equal(both, PROGRAMS[name])


@pytest.mark.filterwarnings("ignore:Slicing a flattened dim")
def test_flattened_axes_are_registered_on_the_root_mesh(both):
    for kit in both:
        mesh = cube(kit)
        flat = mesh["dp", "cp"]._flatten()
        assert mesh["dp", "cp"]._flatten() is flat
        assert mesh["dp_cp"]._get_root_mesh() is mesh
        assert told(mesh["dp_cp", "tp"])["shape"] == (4, 2)
        assert mesh.get_group("dp_cp") is mesh["tp"].get_group("dp_cp") is flat.get_group()
        assert mesh.get_local_rank("dp_cp") == flat.get_coordinate()[0]


def test_root_mesh_and_axis_lookups_match_torch(both):
    for kit in both:
        mesh = cube(kit)
        assert mesh._get_root_mesh() is mesh
        assert mesh["dp", "tp"]["tp"]._get_root_mesh() is mesh
        assert mesh["tp"]._get_root_mesh_dim() == 2
        assert kit.by_shape((8,))._get_root_mesh_dim() is None
        assert mesh._get_mesh_dim_by_name("cp") == 1
        assert mesh[NAMES] is mesh
        assert len(mesh._get_all_submeshes("cp")) == 4


SHAPES = [(8,), (2, 4), (4, 2), (1, 8), (2, 2, 2), (2, 1, 4), (4, 1, 2), (2, 2, 1, 2)]


@st.composite
def derivations(draw):
    """Draw a shape of eight ranks, and a sequence of derivations."""
    shape = draw(st.sampled_from(SHAPES))
    names = [f"a{axis}" for axis in range(len(shape))]
    steps = []
    for turn in range(draw(st.integers(0, 3))):
        kind = draw(st.sampled_from(["slice", "flatten", "unflatten", "concatenate"]))
        if kind == "slice":
            kept = draw(st.lists(st.sampled_from(names), min_size=1, unique=True))
            names = [name for name in names if name in kept]
            sizes = None
        elif kind == "flatten":
            names, sizes = [f"f{turn}"], None
        elif kind == "concatenate":
            names, sizes = draw(st.permutations(names)), None
        else:
            names, sizes = [*names[:-1], f"u{turn}", f"v{turn}"], draw(st.booleans())
        steps.append((kind, tuple(names), sizes))
    return shape, steps


def follow(kit, shape, steps):
    mesh = kit.by_shape(shape, mesh_dim_names=tuple(f"a{axis}" for axis in range(len(shape))))
    for kind, names, first in steps:
        if kind == "slice":
            mesh = mesh[names]
        elif kind == "flatten":
            mesh = mesh._flatten(names[0])
        elif kind == "concatenate":
            mesh = kit.cls._concatenate([mesh[name] for name in names])
        else:
            size = mesh.size(mesh.ndim - 1)
            sizes = (size, 1) if first else (1, size)
            if size == 4:
                sizes = (2, 2)
            mesh = mesh._unflatten(mesh.ndim - 1, sizes, names[-2:])
    return mesh


@settings(max_examples=80, deadline=None)
@given(derivations())
def test_any_chain_of_derivations_gives_the_same_mesh_as_torch(pair, program):
    shape, steps = program
    theirs, mine = pair
    try:
        expected = told(follow(theirs, shape, steps))
    except (KeyError, RuntimeError, ValueError) as error:
        with pytest.raises(type(error), match="a\\d|f\\d|u\\d|v\\d"):  # which axis is at fault
            follow(mine, shape, steps)
        return
    found = told(follow(mine, shape, steps))
    assert found["places"] == list(found["coordinate"])
    if any(kind == "concatenate" for kind, _, _ in steps):
        # torch numbers a group of all ranks in global order, whatever the order of the mesh.
        for each in (found, expected):
            each["groups"] = [sorted(ranks) for ranks, _ in each.pop("groups")]
            del each["places"]
    assert found == expected


def test_a_rank_outside_the_mesh_has_no_coordinate(ours):
    mesh = ours.by_shape((1, 2), mesh_dim_names=("a", "b"))
    assert mesh.get_coordinate() is None
    assert mesh.mesh.tolist() == [[0, 1]]
    assert mesh["b"].mesh.tolist() == [0, 1]
    for question in (mesh["a"].get_group, mesh["b"].get_local_rank, lambda: mesh["a"].mesh):
        with pytest.raises(NotInMesh, match="rank 3 is not in"):
            question()
    with pytest.raises(IndexError):
        mesh.get_group("a")
    assert "rank 3 not in it" in repr(mesh)


# -- equality, pickling, repr --------------------------------------------------------------


def test_meshes_compare_by_layout_names_device_and_group(ours):
    mesh = cube(ours)
    same = cube(ours)
    assert mesh == same
    assert hash(mesh) == hash(same)
    assert mesh["dp"] == same["dp"]
    assert len({mesh, same, mesh["dp"], same["dp"]}) == 2
    others = [
        ours.by_shape((2, 2, 2)),
        ours.by_shape((2, 2, 2), mesh_dim_names=("a", "b", "c")),
        ours.by_shape((2, 2, 2), mesh_dim_names=NAMES, device="meta"),
        mesh["dp"],
        cube(Ours(3)),
        "mesh",
        None,
    ]
    assert all(mesh != other for other in others)
    assert ours.of(list(range(8))) == ours.by_shape((8,))
    assert ours.of([0, 1, 3]) == ours.of(torch.tensor([0, 1, 3]))


def test_a_mesh_can_be_pickled_and_deep_copied(ours):
    mesh = cube(ours)
    flat = mesh["dp", "cp"].flatten()
    for each in (mesh, mesh["dp", "tp"], flat, ours.of([[0, 3], [5, 6]])):
        for again in (pickle.loads(pickle.dumps(each)), copy.deepcopy(each)):
            assert again == each
            assert hash(again) == hash(each)
            assert again.get_group(0) is each.get_group(0)
            assert again.get_root_mesh() == each.get_root_mesh()
    again = pickle.loads(pickle.dumps(mesh))
    assert again["dp_cp"] == flat
    one, two = pickle.loads(pickle.dumps([mesh, mesh["tp"]]))
    assert two.get_root_mesh() is one


def test_a_pickled_mesh_loads_without_its_group(ours):
    pickled = pickle.dumps(cube(ours))
    ours.group.shutdown()
    again = pickle.loads(pickled)
    assert again.get_coordinate() == (0, 1, 1)
    assert again["dp", "tp"].mesh.tolist() == [[2, 3], [6, 7]]
    with pytest.raises(RuntimeError, match="without a group"):
        again.get_group("dp")


def test_the_current_mesh_is_thread_local(ours):
    mesh = cube(ours)
    seen = []
    with mesh, mesh["dp"]:
        assert _mesh_resources.get_current_mesh() == mesh["dp"]
        elsewhere = threading.Thread(target=lambda: seen.append(list(_mesh_resources.mesh_stack)))
        elsewhere.start()
        elsewhere.join()
    assert seen == [[]]
    assert _mesh_resources.mesh_stack == []
    assert _mesh_resources.get_root_mesh(mesh["dp"]) is mesh
    assert _mesh_resources.num_devices_per_host("cpu") == 1
    with process_group(ours.group):
        assert _mesh_resources.num_hosts("cpu") == 8


def test_repr_and_draw_show_the_shape_and_this_rank(ours):
    mesh = cube(ours)
    assert repr(mesh) == "DeviceMesh((dp=2, cp=2, tp=2), 'cpu', 8 ranks, rank 3 at (0, 1, 1))"
    assert repr(ours.by_shape((4, 2))) == "DeviceMesh((4, 2), 'cpu', 8 ranks, rank 3 at (1, 1))"
    assert "[3]" in mesh.draw()
    assert "[3]" in mesh["dp", "tp"].draw(ranks_per_host=4)
    assert mesh.draw(svg=True).startswith("<svg")
    assert "<svg" in mesh._repr_html_()
    scattered = ours.of([[0, 3], [5, 6]], mesh_dim_names=("a", "b")).draw()
    assert "[3]" in scattered
    assert "6" in scattered


# -- large meshes --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def large():
    group = new_group("fake", rank=100_001, world_size=131_072)
    yield group
    group.shutdown()


def test_a_large_mesh_allocates_no_rank_tensor(large):
    mesh = init_device_mesh("cpu", (2048, 8, 8), mesh_dim_names=NAMES, group=large)
    assert mesh.get_coordinate() == (1562, 4, 1)
    assert mesh["tp"].get_group().size() == 8
    assert mesh["tp"].mesh.tolist() == list(range(100_000, 100_008))
    flat = mesh["cp", "tp"].flatten()
    assert flat.get_group().global_ranks == tuple(range(99_968, 100_032))
    assert mesh.unflatten("dp", (32, 64), ("x", "y")).get_local_rank("y") == 1562 % 64
    assert mesh._tensor is None
    assert len(mesh.draw()) < 5_000
    assert mesh.flatten("all").get_group() is large


def choose_abacus(ctx):
    group = ctx.group()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        init_device_mesh("abacus", (1,), group=group)
        DeviceMesh("abacus", [0], group=group)
        DeviceMesh.from_group(group, "abacus")
    return [(str(each.message).split(":")[0], each.filename) for each in caught]


def test_the_missing_device_warning_points_at_the_users_line(monkeypatch):
    beads = SimpleNamespace(
        device_count=lambda: 2, is_initialized=lambda: False, set_device=lambda _: None
    )
    monkeypatch.setattr(torch, "abacus", beads, raising=False)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    (seen,) = ThreadRanks(1).run(choose_abacus)
    assert seen == [("rank 0 has chosen no device and LOCAL_RANK is not set", __file__)] * 3


def test_forming_a_group_asks_for_the_ranks_of_its_parent_once(pair, monkeypatch):
    calls = []
    ask = dist.get_process_group_ranks
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda pg: calls.append(pg) or ask(pg))
    counts = []
    for axis in ("short", "long"):
        mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("short", "long"))
        calls.clear()
        mesh.get_group(axis)
        counts.append(len(calls))
    mesh.shutdown()
    assert counts[0] == counts[1]
