"""Upstream's names: present, same signatures, and the same results on every kind of group."""

import inspect
import pickle
import re
import threading

import pytest
import torch.distributed as dist
import torch.distributed.device_mesh as upstream
import torch.distributed.distributed_c10d as c10d
from torch.distributed import _mesh_layout as upstream_layout
from torch.testing._internal.distributed.fake_pg import FakeStore

import phalanx.mesh
from phalanx.errors import InvalidState
from phalanx.groups import new_group
from phalanx.mesh import DeviceMesh, init_device_mesh, layout
from phalanx.testing import ThreadRanks, over_groups

from .internals import RootState, _mesh_resources
from .kits import NAMES, PROGRAMS, WORLD, Ours, told

# -- signatures ----------------------------------------------------------------------------

METHODS = [
    "__eq__",
    "__getitem__",
    "__hash__",
    "__repr__",
    "_concatenate",
    "_flatten",
    "_get_all_submeshes",
    "_get_mesh_dim_by_name",
    "_get_root_mesh",
    "_get_root_mesh_dim",
    "_get_slice_mesh_layout",
    "_unflatten",
    "from_group",
    "get_all_groups",
    "get_coordinate",
    "get_group",
    "get_local_rank",
    "get_rank",
    "size",
]
ENV = ["_get_all_submeshes", "get_current_mesh", "get_root_mesh", "num_devices_per_host"]
FLAT = ["all_ranks_from_zero", "check_orthogonal", "check_sorted", "complement", "composition"]
NESTED = ["collapse", "cosize", "from_sizes_strides", "numel", "remap_to_tensor", "splice"]
PAIRS = {
    "init_device_mesh": (init_device_mesh, upstream.init_device_mesh),
    "DeviceMesh": (DeviceMesh, upstream.DeviceMesh),
    "_FlatLayout": (layout._FlatLayout, upstream_layout._FlatLayout),
    "_MeshLayout": (layout._MeshLayout, upstream_layout._MeshLayout),
    **{
        f"{theirs.__name__}.{name}": (getattr(ours, name), getattr(theirs, name))
        for ours, theirs, names in [
            (DeviceMesh, upstream.DeviceMesh, METHODS),
            (phalanx.mesh._MeshEnv, upstream._MeshEnv, [*ENV, "num_hosts"]),
            (layout._FlatLayout, upstream_layout._FlatLayout, [*FLAT, "global_ranks", "numel"]),
            (layout._MeshLayout, upstream_layout._MeshLayout, NESTED),
        ]
        for name in names
    },
}


def public_parameters(function):
    """Return the public parameters of a function, in order."""
    parameters = inspect.signature(function).parameters.values()
    public = [each for each in parameters if not each.name.startswith("_")]
    return {each.name: (each.kind, each.default) for each in public}


@pytest.mark.parametrize("name", PAIRS)
def test_signatures_accept_upstream_calls(name):
    ours, theirs = map(public_parameters, PAIRS[name])
    for parameter, how in theirs.items():
        assert ours[parameter] == how
    for parameter in ours.keys() - theirs.keys():  # what is ours alone may be left out
        kind, default = ours[parameter]
        assert kind is inspect.Parameter.KEYWORD_ONLY
        assert default is None
    shared = [parameter for parameter in ours if parameter in theirs]
    assert shared == list(theirs)


def test_upstream_properties_are_properties():
    for name in ("device_type", "mesh", "mesh_dim_names", "ndim", "shape"):
        assert isinstance(getattr(upstream.DeviceMesh, name), property)
        assert isinstance(getattr(DeviceMesh, name), property)


@pytest.mark.parametrize("name", ["_FlatLayout", "_MeshLayout"])
def test_layouts_have_every_name_of_torchs(name):
    ours, theirs = PAIRS[name]
    of_any_class = {"__annotations__", "__dict__", "__weakref__"}
    names = [each for each in vars(theirs) if "dataclass" not in each]
    missing = {*names} - {*dir(ours)} - of_any_class
    # torch's raise too: the parts of an axis are not counted or indexed.
    assert missing == ({"__getitem__", "__len__"} if name == "_FlatLayout" else set())
    assert ours.__match_args__ == theirs.__match_args__


@pytest.mark.parametrize("name", [name for name in METHODS if re.fullmatch("_[a-z].*", name)])
def test_underscore_names_are_aliases(name):
    assert getattr(DeviceMesh, name) is getattr(DeviceMesh, name[1:])


# -- the base class ------------------------------------------------------------------------

INHERITED = {
    "__annotations__",
    "_compute_coordinates_from_mesh",  # static
    "_get_mesh_tensor_from_full_mesh",  # static
    "_init_one_process_group",  # static
    "_init_process_groups",  # static
    "_root_mesh",  # set on instances
    "_stable_hash",  # of _hash_key, which is ours
    "_is_current_rank_part_of_mesh",  # these and the others, of properties that are ours
    "_sym_get_coordinate",
    "device_type",
    "get_all_groups",
    "get_coordinate",
    "mesh_dim_names",
    "ndim",
    "shape",
}
ON_INSTANCES = {
    "_device_type",
    "_flatten_mapping",
    "_layout",
    "_mesh_dim_names",
    "_rank",
    "_root_mesh",
    "_thread_id",
}
UNSUPPORTED = {
    "__getstate__",
    "__setstate__",
    "_create_flatten_mesh",
    "_create_sub_mesh",
    "_create_unflatten_mesh",
    "_setup_world_group_and_device",
}


def test_each_torch_mesh_attribute_is_overridden_or_safe_to_inherit():
    """A method that torch adds must not run on state that our mesh lacks."""
    assert set(vars(upstream.DeviceMesh)) - set(vars(DeviceMesh)) == INHERITED
    attributes = set(upstream.DeviceMesh.__annotations__)
    assert attributes - set(vars(DeviceMesh)) == ON_INSTANCES


def test_methods_that_need_torchs_mesh_state_raise():
    group = new_group("fake", rank=1, world_size=4)
    mesh = init_device_mesh("cpu", (2, 2), group=group)
    for name in UNSUPPORTED:
        with pytest.raises(InvalidState, match=name):
            getattr(mesh, name)()
    group.shutdown()


def test_attributes_that_torch_reads_are_present():
    group = new_group("fake", rank=6, world_size=8)
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"), group=group)
    assert isinstance(mesh, upstream.DeviceMesh)
    assert mesh._rank_map.tolist() == list(mesh._flatten_rank_map) == list(range(8))
    assert (mesh._rank, mesh._device_type, mesh._thread_id) == (6, "cpu", None)
    assert (mesh._root_mesh, mesh["tp"]._root_mesh) == (None, mesh)
    assert mesh._coordinate_on_dim == mesh._compute_coordinate_on_dim() == (1, 2)
    assert mesh._sym_get_coordinate(1) == 2
    assert mesh._is_current_rank_part_of_mesh()
    assert mesh._flatten_mapping == {}
    flat = mesh.flatten("all")
    assert mesh._flatten_mapping == {"all": flat}
    groups = mesh.get_all_groups()
    assert mesh._dim_group_names == [each.group_name for each in groups]
    assert mesh._pg_registry == {each.group_name: each for each in groups}
    same = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"), group=group)
    assert mesh._stable_hash() == same._stable_hash() != mesh["tp"]._stable_hash()
    assert DeviceMesh.from_torch(mesh) is mesh
    mesh.shutdown()
    group.shutdown()


def names_its_thread(context):
    group = context.group("local")
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"), group=group)
    assert mesh._thread_id == mesh["tp"]._thread_id == threading.get_ident()
    return mesh


def test_meshes_of_ranks_that_are_threads_differ(threads):
    """torch's caches are shared by all threads and look up meshes by equality."""
    first, second = threads.run(names_its_thread, 2)
    assert first != second


def test_a_large_mesh_builds_no_rank_map(monkeypatch):
    def fail(*_args, **_kwargs):
        raise AssertionError("a map of all ranks was built")

    monkeypatch.setattr(RootState, "global_ranks", fail)
    monkeypatch.setattr(RootState, "tensor", fail)
    group = new_group("fake", rank=513, world_size=16_384)
    mesh = make_everything(group, (256, 8, 8))
    assert isinstance(mesh._root_state.ranks, range)
    assert mesh["tp"].get_group().size() == 8
    assert {mesh, mesh["dp"]}
    mesh.shutdown()
    group.shutdown()


# -- every kind of group -------------------------------------------------------------------

COMPARED = {name: program for name, program in PROGRAMS.items() if name != "no axis"}


class On:
    """Our mesh on a given group, or on torch's default group."""

    cls = DeviceMesh

    def __init__(self, group=None):
        self.more = {} if group is None else {"group": group}

    def by_shape(self, shape, **more):
        return init_device_mesh("cpu", shape, **self.more, **more)

    def of(self, ranks, **more):
        return DeviceMesh("cpu", ranks, **self.more, **more)


def describe_all(kit):
    """Run every program, and describe its mesh, whose groups must be real groups."""
    told_of = {}
    for name, program in COMPARED.items():
        mesh = program(kit)
        told_of[name] = told(mesh)
        mesh.shutdown()
    return told_of


def describe_all_on(context, backend):
    return describe_all(On(context.group(backend)))


@pytest.fixture(scope="module")
def on_fake():
    """The meshes of all eight ranks on fake groups, which `test_device_mesh` compares."""
    found = []
    for rank in range(WORLD):
        kit = Ours(rank)
        found.append(describe_all(kit))
        kit.group.shutdown()
    return found


def test_meshes_on_thread_ranks_match_fake_groups(on_fake):
    assert ThreadRanks(WORLD).run(describe_all_on, args=("local",)) == on_fake


@pytest.mark.filterwarnings("ignore:Slicing a flattened dim")
def test_meshes_on_torchs_default_group_match_fake_groups(on_fake):
    for rank in (0, 5):
        dist.init_process_group("fake", rank=rank, world_size=WORLD, store=FakeStore())
        try:
            assert describe_all(On()) == on_fake[rank]
            assert init_device_mesh("cpu", (8,)).group is dist.group.WORLD
        finally:
            dist.destroy_process_group()


@over_groups(sizes=(4,), backends=("local", "gloo", "shm"), reuse=True)
def test_the_mesh_api_works_on_every_backend(group):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"), group=group)
    row, column = divmod(group.rank(), 2)
    assert mesh.get_rank() == group.rank()
    assert mesh.get_coordinate() == (row, column)
    assert [mesh.get_local_rank(name) for name in ("dp", "tp")] == [row, column]
    assert mesh.mesh.tolist() == [[0, 1], [2, 3]]
    assert mesh["tp"].mesh.tolist() == [2 * row, 2 * row + 1]
    assert (mesh.ndim, mesh.shape, mesh.size(), mesh.size(1)) == (2, (2, 2), 4, 2)
    assert mesh["dp"].get_root_mesh() is mesh
    assert mesh["tp"].get_root_mesh_dim() == mesh.get_mesh_dim_by_name("tp") == 1
    assert len(mesh.get_all_submeshes("dp")) == 2
    assert str(mesh).endswith(f"'cpu', 4 ranks, rank {group.rank()} at {row, column})")
    same = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp"), group=group)
    for other in (same, pickle.loads(pickle.dumps(mesh))):
        assert other == mesh
        assert hash(other) == hash(mesh)
        assert other["tp"].get_group() is mesh.get_group("tp")
    with mesh:
        assert _mesh_resources.get_current_mesh() is mesh
    line = DeviceMesh.from_group(group, "cpu", mesh=list(range(4)), mesh_dim_names=("all",))
    assert line["all"].get_group() is group
    given = DeviceMesh.from_group(
        mesh.get_all_groups(), "cpu", mesh=mesh.mesh, mesh_dim_names=("a", "b")
    )
    assert given.get_all_groups() == mesh.get_all_groups()
    mesh.shutdown()


# -- lazy creation -------------------------------------------------------------------------


def make_everything(group, shape):
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=NAMES, group=group)
    mesh["dp", "tp"].flatten()
    mesh["cp", "tp"].flatten("mp")["mp"].get_coordinate()
    halves = mesh.unflatten("dp", (2, shape[0] // 2), ("x", "y"))
    DeviceMesh.concatenate([halves["y"], mesh["tp"]]).get_local_rank("tp")
    mesh.get_all_submeshes("tp")
    return mesh


def test_creating_and_slicing_a_mesh_creates_no_groups():
    group = new_group("fake", rank=517, world_size=1024)
    before = len(c10d._world.pg_map)
    mesh = make_everything(group, (16, 8, 8))
    assert len(c10d._world.pg_map) == before
    for used, axis in enumerate(NAMES, start=1):
        mesh.get_group(axis)
        assert len(c10d._world.pg_map) == before + used
    mesh.shutdown()
    assert len(c10d._world.pg_map) == before
    group.shutdown()


def alone(context):
    """Create and slice a mesh on one rank only; would hang if another rank were needed."""
    group = context.group("local")
    if context.rank == 1:
        mesh = make_everything(group, (2, 1, 2))
        assert mesh.get_coordinate() == (0, 0, 1)
        assert "[1]" in mesh.draw()
    group.barrier().wait()


def test_a_rank_can_create_a_mesh_without_the_others(threads):
    threads.run(alone, 4)


# -- sizes that are not powers of two ------------------------------------------------------


def test_axes_of_odd_sizes_flatten_unflatten_and_concatenate():
    group = new_group("fake", rank=17, world_size=30)
    line = init_device_mesh("cpu", (30,), mesh_dim_names=("world",), group=group)
    mesh = line.unflatten("world", (5, 3, 2), NAMES)
    assert mesh.get_coordinate() == (2, 2, 1)
    apart = mesh["dp", "tp"].flatten("apart")
    assert apart.mesh.tolist() == [4, 5, 10, 11, 16, 17, 22, 23, 28, 29]
    again = apart.unflatten("apart", (5, 2), ("p", "q"))
    assert again["p"].get_group() is mesh["dp"].get_group()
    both = DeviceMesh.concatenate([mesh["cp"], again])
    assert both.mesh_dim_names == ("cp", "p", "q")
    assert both.mesh.tolist() == mesh.mesh.permute(1, 0, 2).tolist()
    assert both["p", "q"].flatten("pq").get_group() is apart.get_group()
    with pytest.raises(ValueError, match=r"'apart' has size 10.*\(2, 2\)"):
        apart.unflatten("apart", (2, 2), ("p", "q"))
    with pytest.raises(ValueError, match=r"'apart' cannot become \(2, 5\).*no regular strides"):
        apart.unflatten("apart", (2, 5), ("p", "q"))
    group.shutdown()


def test_str_of_a_large_mesh_is_one_line():
    group = new_group("fake", rank=100_001, world_size=262_144)
    mesh = init_device_mesh("cpu", (4096, 8, 8), mesh_dim_names=NAMES, group=group)
    assert str(mesh) == (
        "DeviceMesh((dp=4096, cp=8, tp=8), 'cpu', 262144 ranks, rank 100001 at (1562, 4, 1))"
    )
    with mesh:
        assert str(_mesh_resources.get_current_mesh()["tp"]).endswith("rank 100001 at (1,))")
    group.shutdown()


# -- descriptions --------------------------------------------------------------------------


def test_group_descriptions_match_upstream():
    """Profilers and torch's flight recorder identify groups by their description."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    try:
        described = []
        for make in (init_device_mesh, upstream.init_device_mesh):
            unnamed = make("cpu", (2, 4))
            mesh = make("cpu", (2, 2, 2), mesh_dim_names=("dp", "cp", "tp"))
            flat = mesh["dp", "cp"]._flatten()
            groups = [unnamed.get_group(1), mesh.get_group("dp"), mesh.get_group("cp")]
            described.append([group.group_desc for group in [*groups, flat.get_group()]])
    finally:
        dist.destroy_process_group()
    ours, theirs = described
    assert theirs == ["mesh_dim_1", "mesh_dp", "mesh_cp", "mesh_dp_cp"]
    assert ours == theirs
