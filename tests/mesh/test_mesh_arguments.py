"""Invalid mesh arguments: the same error types as torch, and messages that name the values."""

import pytest
import torch

from phalanx.errors import InvalidArgument, InvalidMesh, InvalidType, MisuseError, UnknownAxis
from phalanx.mesh import DeviceMesh, init_device_mesh

from .internals import _mesh_resources
from .kits import NAMES, cube

MISTAKES = {
    "negative size": (lambda kit: kit.by_shape((-2, 4)), "-2"),
    "negative sizes": (lambda kit: kit.by_shape((-2, -4)), "-2"),
    "size of zero": (lambda kit: kit.by_shape((0, 4)), "at least 1, got 0"),
    "size of a half": (lambda kit: kit.by_shape((2.5, 4)), "2.5"),
    "no shape": (lambda kit: kit.by_shape(8), "8"),
    "larger than the group": (lambda kit: kit.by_shape((4, 4)), "16 ranks.*group has only 8"),
    "more ranks than the group": (lambda kit: kit.of(list(range(9))), "9 ranks.*group has only 8"),
    "a rank twice": (lambda kit: kit.of([[0, 0], [1, 2]]), "rank 0 more than once"),
    "a rank too high": (lambda kit: kit.of([[0, 9], [1, 2]]), "rank 9.*0 to 7"),
    "a rank too low": (lambda kit: kit.of([[0, -1], [1, 2]]), "rank -1.*0 to 7"),
    "ragged": (lambda kit: kit.of([[0, 1], [2]]), r"\[\[0, 1\], \[2\]\]"),
    "text": (lambda kit: kit.of("ranks"), "ranks"),
    "nothing": (lambda kit: kit.of(None), "mesh is missing"),
    "no ranks": (lambda kit: kit.of([]), "at least"),
    "device with an index": (
        lambda kit: kit.by_shape((8,), device="cuda:0"),
        "'cuda', got 'cuda:0'",
    ),
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
    "group of axis 3": (lambda kit: cube(kit).get_group(3), "3.*'dp', 'cp', 'tp'"),
    "group of axis -4": (lambda kit: cube(kit).get_group(-4), "-4.*'dp', 'cp', 'tp'"),
    "group of axis 1.5": (lambda kit: cube(kit).get_group(1.5), "1.5.*'dp', 'cp', 'tp'"),
    "place on which axis": (lambda kit: cube(kit).get_local_rank(), "3 axes"),
    "place on an unknown axis": (lambda kit: cube(kit).get_local_rank("x"), "'x'"),
    "size of axis 3": (lambda kit: cube(kit).size(3), "3.*'dp', 'cp', 'tp'"),
    "number of an unknown name": (lambda kit: cube(kit)._get_mesh_dim_by_name("x"), "'x'"),
    "number without names": (
        lambda kit: kit.by_shape((8,))._get_mesh_dim_by_name("x"),
        "'x'; its axes are 0, without names",
    ),
    "root axis of two": (lambda kit: cube(kit)["dp", "tp"]._get_root_mesh_dim(), "2 axes"),
    "root axis of flattened": (lambda kit: cube(kit)._flatten()._get_root_mesh_dim(), "dp_cp_tp"),
    "override for axis 5": (
        lambda kit: kit.by_shape((2, 4), backend_override={5: "fake"}),
        "5; its axes are 0, 1, without names",
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
    "unflat of axis 5": (lambda kit: cube(kit)._unflatten(5, (2,), ("x",)), "5.*'dp', 'cp', 'tp'"),
    "unflat of an unknown": (lambda kit: cube(kit)._unflatten("q", (2,), ("x",)), "'q'"),
    "unflat with more names": (
        lambda kit: cube(kit)._unflatten(0, (2,), ("x", "y")),
        "different lengths",
    ),
    "unflat without names": (
        lambda kit: kit.by_shape((8,))._unflatten(0, (8,), ("x",)),
        "no names",
    ),
    "unflat into zero": (lambda kit: cube(kit)._unflatten(0, (0,), ("x",)), "0"),
    "join nothing": (lambda kit: kit.cls._concatenate([]), "at least one"),
    "join one twice": (
        lambda kit: kit.cls._concatenate([(mesh := cube(kit))["dp"], mesh["dp"]]),
        "'dp' overlaps with 'dp'",
    ),
    "join strangers": (
        lambda kit: kit.cls._concatenate(
            [cube(kit)["dp"], kit.by_shape((4,), mesh_dim_names=("w",))]
        ),
        "different roots",
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
def test_invalid_arguments_raise_the_same_type_as_torch(pair, name):
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
            "got 5 in it",
        ),
        (lambda kit: kit.by_shape((2, 4), mesh_dim_names=5), InvalidType, "5"),
        (lambda kit: cube(kit).flatten(5), InvalidType, "5"),
        (lambda kit: cube(kit).unflatten(0, 2, ("x",)), InvalidType, "mesh_sizes.*2"),
        (lambda kit: cube(kit).unflatten(0, (2, 1), "xy"), InvalidType, "mesh_dim_names.*'xy'"),
        (lambda kit: kit.cls.concatenate(5), InvalidType, "5"),
        (lambda kit: kit.cls.concatenate([cube(kit)["dp"], 5]), InvalidType, "got 5 in it"),
        (lambda _: _mesh_resources.get_current_mesh(), RuntimeError, "with mesh"),
        (lambda _: _mesh_resources.num_hosts("abacus"), RuntimeError, "abacus|environment|RANK"),
        (lambda _: DeviceMesh.from_torch(5), InvalidType, "torch"),
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
def test_arguments_that_torch_fails_to_check_are_rejected(ours, program, kind, message):
    with pytest.raises(kind, match=message):
        program(ours)


def test_mesh_errors_have_their_own_classes(ours):
    with pytest.raises(UnknownAxis):
        cube(ours)["x"]
    with pytest.raises(InvalidMesh):
        ours.by_shape((99,))
