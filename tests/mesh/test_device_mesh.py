"""What a mesh is: the same program on torch's class and on ours comes to the same."""

import copy
import pickle
import threading

import pytest
import torch
import torch.distributed as dist
import torch.distributed.device_mesh as upstream
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing._internal.distributed.fake_pg import FakeStore

from phalanx.errors import (
    InvalidArgument,
    InvalidMesh,
    InvalidType,
    MisuseError,
    NotInMesh,
    UnknownAxis,
)
from phalanx.groups import new_group, process_group
from phalanx.mesh import DeviceMesh, _mesh_resources, init_device_mesh

WORLD = 8
NAMES = ("dp", "cp", "tp")


class Theirs:
    """torch's mesh, on its own fake group."""

    cls = upstream.DeviceMesh

    def by_shape(self, shape, **more):
        return upstream.init_device_mesh(more.pop("device", "cpu"), shape, **more)

    def of(self, ranks, **more):
        return upstream.DeviceMesh(more.pop("device", "cpu"), ranks, **more)


class Ours:
    """Our mesh, on a fake group of ours."""

    cls = DeviceMesh

    def __init__(self, rank):
        self.group = new_group("fake", rank=rank, world_size=WORLD)

    def by_shape(self, shape, **more):
        return init_device_mesh(more.pop("device", "cpu"), shape, group=self.group, **more)

    def of(self, ranks, **more):
        return DeviceMesh(more.pop("device", "cpu"), ranks, group=self.group, **more)


@pytest.fixture(params=[0, 3, 6])
def both(request):
    """torch's mesh and ours, as one rank of eight sees them."""
    dist.init_process_group("fake", rank=request.param, world_size=WORLD, store=FakeStore())
    ours = Ours(request.param)
    yield Theirs(), ours
    ours.group.shutdown()
    dist.destroy_process_group()


@pytest.fixture
def ours():
    kit = Ours(3)
    yield kit
    kit.group.shutdown()


def told(mesh):
    """Tell all that there is to tell about a mesh."""
    member = mesh.get_coordinate() is not None
    return {
        "shape": tuple(mesh.shape),
        "ndim": mesh.ndim,
        "size": mesh.size(),
        "sizes": [mesh.size(axis) for axis in range(mesh.ndim)],
        "names": mesh.mesh_dim_names,
        "device": mesh.device_type,
        "rank": mesh.get_rank(),
        "coordinate": mesh.get_coordinate(),
        "places": [mesh.get_local_rank(axis) for axis in range(mesh.ndim)] if member else None,
        "mesh": (mesh.mesh.tolist(), mesh.mesh.dtype) if member else None,
        "groups": [
            (dist.get_process_group_ranks(group), group.rank()) for group in mesh.get_all_groups()
        ]
        if member
        else None,
    }


def both_tell(both, program):
    theirs, mine = (told(program(kit)) for kit in both)
    assert mine == theirs


def cube(kit):
    return kit.by_shape((2, 2, 2), mesh_dim_names=NAMES)


PROGRAMS = {
    "one axis": lambda kit: kit.by_shape((8,)),
    "two axes": lambda kit: kit.by_shape((2, 4), mesh_dim_names=("a", "b")),
    "a list as shape": lambda kit: kit.by_shape([4, 2], mesh_dim_names=["a", "b"]),
    "axes of one": lambda kit: kit.by_shape((1, 8, 1), mesh_dim_names=NAMES),
    "some ranks": lambda kit: kit.by_shape((2, 2)),
    "an array": lambda kit: kit.of([[0, 1, 2, 3], [4, 5, 6, 7]]),
    "ranks at a distance": lambda kit: kit.of([[0, 3], [5, 6]], mesh_dim_names=("a", "b")),
    "a tensor": lambda kit: kit.of(torch.arange(8).reshape(2, 4).t()),
    "floats": lambda kit: kit.of(torch.arange(4.0)),
    "no axis": lambda kit: kit.by_shape(()),
    "slice of one": lambda kit: cube(kit)["cp"],
    "slice of two": lambda kit: cube(kit)["dp", "cp"],
    "apart": lambda kit: cube(kit)["dp", "tp"],
    "a list as slice": lambda kit: cube(kit)[["dp", "tp"]],
    "slice of a slice": lambda kit: cube(kit)["dp", "tp"]["tp"],
    "slice of an array": lambda kit: kit.of([[0, 3], [5, 6]], mesh_dim_names=("a", "b"))["a"],
    "flat": lambda kit: cube(kit)._flatten(),
    "flat by name": lambda kit: cube(kit)["cp", "tp"]._flatten("x"),
    "flat apart": lambda kit: cube(kit)["dp", "tp"]._flatten(),
    "flat of one": lambda kit: cube(kit)["dp"]._flatten("x"),
    "unflat": lambda kit: cube(kit)._unflatten("dp", (2, 1), ("x", "y")),
    "unflat by number": lambda kit: kit.by_shape((8,), mesh_dim_names=("w",))._unflatten(
        0, (2, 2, 2), NAMES
    ),
    "unflat flat": lambda kit: cube(kit)["dp", "tp"]._flatten()._unflatten(0, (4, 1), ("x", "y")),
    "slice of unflat": lambda kit: cube(kit)._unflatten(0, (1, 2), ("x", "y"))["y", "tp"],
    "joined": lambda kit: kit.cls._concatenate([(mesh := cube(kit))["dp"], mesh["tp"]]),
    "joined in another order": lambda kit: kit.cls._concatenate(
        [(mesh := cube(kit))["tp"], mesh["dp", "cp"]]
    ),
    "first of all": lambda kit: cube(kit)._get_all_submeshes("cp")[0],
    "last of all": lambda kit: cube(kit)._get_all_submeshes("cp")[-1],
    "of a group": lambda kit: kit.cls.from_group(cube(kit).get_group("cp"), "cpu"),
    "of two groups": lambda kit: kit.cls.from_group(
        (mesh := cube(kit)["dp", "tp"]).get_all_groups(),
        "cpu",
        mesh=mesh.mesh,
        mesh_dim_names=("a", "b"),
    ),
}


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_same_program_comes_to_the_same(both, name):
    both_tell(both, PROGRAMS[name])


@pytest.mark.filterwarnings("ignore:Slicing a flattened dim")
def test_flattened_axes_are_known_to_the_root(both):
    for kit in both:
        mesh = cube(kit)
        flat = mesh["dp", "cp"]._flatten()
        assert mesh["dp", "cp"]._flatten() is flat
        assert mesh["dp_cp"]._get_root_mesh() is mesh
        assert told(mesh["dp_cp", "tp"])["shape"] == (4, 2)
        assert mesh.get_group("dp_cp") is mesh["tp"].get_group("dp_cp") is flat.get_group()
        assert mesh.get_local_rank("dp_cp") == flat.get_coordinate()[0]


def test_roots_and_axes(both):
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
    """Draw a shape of eight ranks, and what to do with its mesh, step by step."""
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


@pytest.fixture(scope="module")
def pair():
    dist.init_process_group("fake", rank=5, world_size=WORLD, store=FakeStore())
    kit = Ours(5)
    yield Theirs(), kit
    kit.group.shutdown()
    dist.destroy_process_group()


@settings(max_examples=80, deadline=None)
@given(derivations())
def test_any_chain_of_derivations_comes_to_the_same(pair, program):
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
        # torch numbers a group of all ranks as they are, in whatever order the mesh has them.
        for each in (found, expected):
            each["groups"] = [sorted(ranks) for ranks, _ in each.pop("groups")]
            del each["places"]
    assert found == expected


# -- mistakes ------------------------------------------------------------------------------

MISTAKES = {
    "negative size": (lambda kit: kit.by_shape((-2, 4)), "-2"),
    "negative sizes": (lambda kit: kit.by_shape((-2, -4)), "-2"),
    "size of zero": (lambda kit: kit.by_shape((0, 4)), "size 0"),
    "size of a half": (lambda kit: kit.by_shape((2.5, 4)), "2.5"),
    "no shape": (lambda kit: kit.by_shape(8), "8"),
    "larger than the group": (lambda kit: kit.by_shape((4, 4)), "16 ranks.*group of 8"),
    "more ranks than the group": (lambda kit: kit.of(list(range(9))), "9 ranks.*group of 8"),
    "a rank twice": (lambda kit: kit.of([[0, 0], [1, 2]]), "rank 0 more than once"),
    "a rank too high": (lambda kit: kit.of([[0, 9], [1, 2]]), "rank 9.*0 to 7"),
    "a rank too low": (lambda kit: kit.of([[0, -1], [1, 2]]), "rank -1.*0 to 7"),
    "ragged": (lambda kit: kit.of([[0, 1], [2]]), r"\[\[0, 1\], \[2\]\]"),
    "text": (lambda kit: kit.of("ranks"), "ranks"),
    "nothing": (lambda kit: kit.of(None), "mesh is missing"),
    "no ranks": (lambda kit: kit.of([]), "at least"),
    "device with an index": (lambda kit: kit.by_shape((8,), device="cuda:0"), "cuda:0.*cuda"),
    "names too few": (lambda kit: kit.by_shape((2, 4), mesh_dim_names=("a",)), "1 names for 2"),
    "names of none": (lambda kit: kit.by_shape((2, 4), mesh_dim_names=()), "0 names for 2"),
    "a name twice": (lambda kit: kit.by_shape((2, 4), mesh_dim_names=("a", "a")), "'a'"),
    "names as text": (lambda kit: kit.by_shape((2,), mesh_dim_names="ab"), "'ab'"),
    "unknown slice": (lambda kit: cube(kit)["x"], "'x'.*'dp', 'cp', 'tp'"),
    "slice in another order": (lambda kit: cube(kit)["tp", "dp"], "'tp', 'dp'.*'dp', 'cp', 'tp'"),
    "slice of one twice": (lambda kit: cube(kit)["dp", "dp"], "'dp' more than once"),
    "slice by number": (lambda kit: cube(kit)[0], "0"),
    "slice without names": (lambda kit: kit.by_shape((8,))["x"], "no names"),
    "flattened of a slice": (
        lambda kit: flat_pair(kit)["dp", "cp"]["dp_cp"],
        "'dp_cp'.*'dp', 'cp'",
    ),
    "slice that overlaps": (
        lambda kit: flat_pair(kit)["dp", "dp_cp"],
        "'dp_cp' overlaps with 'dp'",
    ),
    "flattened before its own axis": (
        lambda kit: flat_pair(kit)["dp_cp", "dp"],
        "'dp_cp', 'dp'.*'dp', 'cp', 'tp'",
    ),
    "group of which axis": (lambda kit: cube(kit).get_group(), "3 axes"),
    "group of an unknown axis": (lambda kit: cube(kit).get_group("x"), "'x'.*'dp', 'cp', 'tp'"),
    "group of axis 3": (lambda kit: cube(kit).get_group(3), "3.*0 to 2"),
    "group of axis -4": (lambda kit: cube(kit).get_group(-4), "-4.*0 to 2"),
    "group of axis 1.5": (lambda kit: cube(kit).get_group(1.5), "1.5.*0 to 2"),
    "place on which axis": (lambda kit: cube(kit).get_local_rank(), "3 axes"),
    "place on an unknown axis": (lambda kit: cube(kit).get_local_rank("x"), "'x'"),
    "size of axis 3": (lambda kit: cube(kit).size(3), "3.*0 to 2"),
    "number of an unknown name": (lambda kit: cube(kit)._get_mesh_dim_by_name("x"), "'x'"),
    "number without names": (lambda kit: kit.by_shape((8,))._get_mesh_dim_by_name("x"), "no names"),
    "root axis of two": (lambda kit: cube(kit)["dp", "tp"]._get_root_mesh_dim(), "2 axes"),
    "root axis of flattened": (lambda kit: cube(kit)._flatten()._get_root_mesh_dim(), "dp_cp_tp"),
    "override for axis 5": (
        lambda kit: kit.by_shape((2, 4), backend_override={5: "fake"}),
        "5.*0 to 1",
    ),
    "override for axis 1.5": (
        lambda kit: kit.by_shape((2, 4), backend_override={1.5: "fake"}),
        "1.5",
    ),
    "override for a name": (
        lambda kit: kit.by_shape((8,), mesh_dim_names=("a",), backend_override={"c": "fake"}),
        "'c'.*'a'",
    ),
    "override twice": (
        lambda kit: kit.by_shape(
            (8,), mesh_dim_names=("a",), backend_override={"a": "fake", 0: "fake"}
        ),
        "axis 0 twice",
    ),
    "override by a number": (lambda kit: kit.by_shape((8,), backend_override={0: 5}), "5"),
    "overrides too few": (
        lambda kit: kit.of([[0, 1], [2, 3]], backend_override=(("fake", None),)),
        "1 entries for a mesh of 2",
    ),
    "flat name of an axis": (lambda kit: cube(kit)["dp", "cp"]._flatten("tp"), "'tp'"),
    "flat name of another": (lambda kit: flat_pair(kit)["cp", "tp"]._flatten("dp_cp"), "'dp_cp'"),
    "flat without names": (lambda kit: kit.by_shape((2, 4))._flatten(), "no names"),
    "unflat into others": (lambda kit: cube(kit)._unflatten(0, (3,), ("x",)), r"'dp' has size 2"),
    "unflat of axis 5": (lambda kit: cube(kit)._unflatten(5, (2,), ("x",)), "5.*0 to 2"),
    "unflat of an unknown": (lambda kit: cube(kit)._unflatten("q", (2,), ("x",)), "'q'"),
    "unflat with more names": (lambda kit: cube(kit)._unflatten(0, (2,), ("x", "y")), "2 names"),
    "unflat without names": (
        lambda kit: kit.by_shape((8,))._unflatten(0, (8,), ("x",)),
        "no names",
    ),
    "unflat into zero": (lambda kit: cube(kit)._unflatten(0, (0,), ("x",)), "0"),
    "join nothing": (lambda kit: kit.cls._concatenate([]), "nothing"),
    "join one twice": (
        lambda kit: kit.cls._concatenate([(mesh := cube(kit))["dp"], mesh["dp"]]),
        "'dp' overlaps with 'dp'",
    ),
    "join strangers": (
        lambda kit: kit.cls._concatenate(
            [cube(kit)["dp"], kit.by_shape((4,), mesh_dim_names=("w",))]
        ),
        "different meshes",
    ),
    "of another group's ranks": (
        lambda kit: kit.cls.from_group(kit.by_shape((8,)).get_group(), "cpu", mesh=[0, 1]),
        r"\[0, 1\]",
    ),
    "of no groups": (lambda kit: kit.cls.from_group([], "cpu"), "group is missing"),
    "of groups without ranks": (
        lambda kit: kit.cls.from_group(cube(kit).get_all_groups(), "cpu"),
        "mesh is missing",
    ),
    "of groups without names": (
        lambda kit: kit.cls.from_group(cube(kit).get_all_groups(), "cpu", mesh=[[[0, 1]]]),
        "mesh_dim_names is missing",
    ),
    "of three groups and one axis": (
        lambda kit: kit.cls.from_group(
            cube(kit).get_all_groups(), "cpu", mesh=[0, 1], mesh_dim_names=NAMES
        ),
        "1 axes.*3 groups",
    ),
    "of a number": (lambda kit: kit.cls.from_group(5, "cpu"), "5"),
}


def flat_pair(kit):
    mesh = cube(kit)
    mesh["dp", "cp"]._flatten()
    return mesh


@pytest.mark.parametrize("name", MISTAKES)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_same_mistake_raises_the_same_kind(pair, name):
    program, message = MISTAKES[name]
    theirs, mine = pair
    with pytest.raises(Exception) as error:  # noqa: PT011 - torch decides which
        program(theirs)
    with pytest.raises(error.type, match=message) as ours:
        program(mine)
    assert isinstance(ours.value, MisuseError)


@pytest.mark.parametrize(
    ("program", "kind", "message"),
    [
        (lambda kit: kit.by_shape((2, 4), mesh_dim_names=(1, 2)), InvalidType, "1"),
        (lambda kit: kit.by_shape((8,), device=torch.device("cpu")), InvalidType, r"\.type"),
        (lambda kit: kit.of([0.5, 1.5]), InvalidMesh, "0.5"),
        (lambda kit: kit.of([[0, 1]], mesh_dim_names=("a",)), InvalidMesh, "1 names for 2"),
        (lambda kit: kit.by_shape((8,), device="cpu2"), InvalidMesh, "cpu2"),
        (lambda kit: cube(kit).unflatten(0, (2, 1), ("tp", "y")), InvalidMesh, "'tp'"),
        (lambda kit: cube(kit).unflatten(0, (2, 1), ("x", "x")), InvalidMesh, "'x'"),
        (lambda kit: kit.by_shape((8,), backend_override={0: "zzz"}), InvalidArgument, "zzz.*gloo"),
        (lambda kit: kit.by_shape((8,), backend_override="gloo"), InvalidType, "gloo"),
        (lambda kit: kit.by_shape((8,), backend_override={0: {"x": 1}}), KeyError, "x"),
        (lambda _: init_device_mesh("cpu", (8,), group="gloo"), InvalidType, "'gloo'"),
        (
            lambda kit: kit.cls.from_group(
                cube(kit)["dp", "tp"].get_all_groups(), "cpu", [[0, 1], [2, 3]], mesh_dim_names="ab"
            ),
            InvalidMesh,
            "'ab'",
        ),
        (
            lambda kit: kit.cls.from_group(
                cube(kit)["dp", "tp"].get_all_groups(),
                "cpu",
                [[3, 2], [1, 0]],
                mesh_dim_names=("a", "b"),
            ),
            InvalidMesh,
            r"axis 'a'.*\[3, 1\].*\[3, 7\]",
        ),
        (
            lambda kit: kit.cls.from_group([5], "cpu", mesh=[0], mesh_dim_names=("a",)),
            InvalidType,
            "of 5",
        ),
        (lambda kit: kit.by_shape((2, 4), mesh_dim_names=5), InvalidType, "5"),
        (lambda kit: cube(kit).flatten(5), InvalidType, "5"),
        (lambda kit: cube(kit).unflatten(0, 2, ("x",)), InvalidType, "mesh_sizes.*2"),
        (lambda kit: cube(kit).unflatten(0, (2, 1), "xy"), InvalidType, "mesh_dim_names.*'xy'"),
        (lambda kit: kit.cls.concatenate(5), InvalidType, "5"),
        (lambda kit: kit.cls.concatenate([cube(kit)["dp"], 5]), InvalidType, "of 5"),
        (lambda _: _mesh_resources.get_current_mesh(), RuntimeError, "with mesh"),
        (lambda _: _mesh_resources.num_hosts("abacus"), RuntimeError, "abacus|environment|RANK"),
        (lambda kit: DeviceMesh.from_torch(cube(kit)), InvalidType, "torch"),
        (lambda kit: flat_pair(kit)["dp", "cp"].flatten("dp_cp", "gloo"), InvalidMesh, "'dp_cp'"),
        (lambda kit: flat_pair(kit).unflatten(2, (2, 1), ("dp_cp", "y")), InvalidMesh, "'dp_cp'"),
        (
            lambda kit: (
                (mesh := cube(kit)).unflatten(0, (2, 1), ("x", "y")),
                mesh["cp", "tp"].flatten("x"),
            ),
            InvalidMesh,
            "'x'.*2:4",
        ),
    ],
)
def test_what_torch_lets_pass_is_a_mistake(ours, program, kind, message):
    with pytest.raises(kind, match=message):
        program(ours)


def test_a_rank_outside_has_no_place(ours):
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


# -- as an object --------------------------------------------------------------------------


def test_equal_meshes_are_equal(ours):
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


def test_a_mesh_survives_a_pickle(ours):
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


def test_a_pickle_needs_no_group(ours):
    pickled = pickle.dumps(cube(ours))
    ours.group.shutdown()
    again = pickle.loads(pickled)
    assert again.get_coordinate() == (0, 1, 1)
    assert again["dp", "tp"].mesh.tolist() == [[2, 3], [6, 7]]
    with pytest.raises(RuntimeError, match="without a group"):
        again.get_group("dp")


def test_a_mesh_is_entered_by_a_thread(ours):
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


def test_it_reads_well(ours):
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


# -- large ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def large():
    group = new_group("fake", rank=100_001, world_size=131_072)
    yield group
    group.shutdown()


def test_a_large_mesh_makes_nothing_large(large):
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


def test_names_of_errors_can_be_caught_by_their_own_class(ours):
    with pytest.raises(UnknownAxis):
        cube(ours)["x"]
    with pytest.raises(InvalidMesh):
        ours.by_shape((99,))
