"""Process groups of mesh axes: lazy creation, sharing, and mismatches between ranks."""

import gc
import os
import pickle
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from phalanx.errors import GroupAborted, RankMismatch, RendezvousTimeout
from phalanx.groups import ProcessGroup, process_group
from phalanx.mesh import DeviceMesh, init_device_mesh
from phalanx.testing import ThreadRanks, over_groups
from ports import free_port

NAMES = ("dp", "tp")
SECONDS = timedelta(seconds=20)
over_four = over_groups(sizes=(4,), backends=("local", "gloo", "shm"), reuse=True)


def square(group, **more):
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=NAMES, group=group, **more)


def total(group, value):
    tensor = torch.tensor([float(value)])
    group.allreduce(tensor).wait()
    return tensor.item()


# -- created on first use, by members ------------------------------------------------------


@over_four
def test_axis_groups_have_the_ranks_of_their_axis(group):
    mesh, rank = square(group), group.rank()
    row, column = mesh.get_group("tp"), mesh.get_group("dp")
    assert row.global_ranks == ((0, 1), (2, 3))[rank // 2]
    assert column.global_ranks == ((0, 2), (1, 3))[rank % 2]
    assert row.rank() == mesh.get_local_rank("tp") == mesh.get_coordinate()[1]
    assert total(row, rank) == sum(row.global_ranks)
    assert total(column, rank) == sum(column.global_ranks)
    assert mesh.get_all_groups() == [column, row]
    assert row.backend == group.backend
    mesh.shutdown()


@over_groups(sizes=(4,), backends=("local",))
def test_groups_of_different_device_types_have_different_names(group):
    labels = [
        init_device_mesh(device, (2, 2), mesh_dim_names=NAMES, group=group).get_group("tp").label
        for device in ("cpu", "meta")
    ]
    ranks = ("0-1", "2-3")[group.rank() // 2]
    assert labels == [f"{group.label}/mesh {ranks}", f"{group.label}/mesh {ranks} on meta"]


@over_four
def test_only_members_need_to_request_an_axis_group(group):
    mesh = square(group)
    if group.rank() in (1, 3):
        assert total(mesh.get_group("dp"), 1) == 2
    part = DeviceMesh("cpu", [3, 0], group=group)  # made by all, used by two, in their own order
    if group.rank() in (0, 3):
        assert part.get_group().global_ranks == (3, 0)
        assert part.get_local_rank() == part.get_group().rank() == (1, None, None, 0)[group.rank()]
        assert total(part.get_group(), 1) == 2
    group.barrier().wait()
    mesh.shutdown()


@over_four
def test_equal_axes_share_a_group(group):
    mesh, other = square(group), square(group)
    row = mesh.get_group("tp")
    again = init_device_mesh("cpu", (2, 2, 1), group=group)
    for same in (
        mesh.get_group(1),
        mesh["tp"].get_group(),
        other["tp"].get_group(),
        mesh["tp"].flatten("x").get_group(),
        mesh.unflatten("dp", (1, 2), ("a", "b")).get_group("tp"),
        DeviceMesh.concatenate([mesh["tp"], mesh["dp"]]).get_group("tp"),
        again.get_group(1),
        pickle.loads(pickle.dumps(mesh)).get_group("tp"),
        copy_of_mine(mesh).get_group(),
    ):
        assert same is row
    assert mesh.flatten().get_group() is group
    assert init_device_mesh("cpu", (4,), group=group).get_group() is group
    patient = square(group, backend_override={"tp": timedelta(seconds=7)})
    assert patient.get_group("tp") is not row
    assert patient.get_group("tp").timeout == timedelta(seconds=7)
    mesh.shutdown()


def copy_of_mine(mesh):
    """Return the `tp` submesh that contains this rank, as a separate mesh."""
    (mine,) = (each for each in mesh.get_all_submeshes("tp") if each.get_coordinate())
    return mine


@over_four
def test_axis_groups_are_recreated_after_shutdown(group):
    mesh = square(group)
    row = mesh.get_group("tp")
    mesh.shutdown()
    with pytest.raises(GroupAborted):
        row.barrier()
    assert mesh.get_group("tp") is not row
    assert square(group).get_group("tp") is mesh.get_group("tp")
    assert total(mesh.get_group("tp"), 1) == 2
    assert total(group, 1) == 4
    mesh.shutdown()


@over_four
def test_shutdown_releases_axis_groups_immediately(group):
    mesh = square(group)
    column, part = weakref.ref(mesh.get_group("dp")), mesh["dp"]
    assert part.get_group() is column()
    total(column(), 1)
    gc.disable()  # a Gloo engine takes a while to end: not in the middle of something else
    try:
        mesh.shutdown()
        assert column() is None
    finally:
        gc.enable()


@over_four
def test_groups_of_flattened_and_unflattened_axes(group):
    line = init_device_mesh("cpu", (4,), mesh_dim_names=("world",), group=group)
    mesh = line.unflatten("world", (2, 1, 2), ("a", "b", "c"))
    assert total(mesh.get_group("c"), group.rank()) == (1, 1, 5, 5)[group.rank()]
    assert total(mesh.get_group("b"), group.rank()) == group.rank()
    assert total(mesh["a", "b"].flatten("ab").get_group(), 1) == 2
    assert total(mesh.flatten("abc").get_group(), 1) == 4
    assert mesh.get_group("ab") is line["ab"].get_group()
    turned = DeviceMesh.concatenate([mesh["c"], mesh["a"]]).flatten("ca")
    assert turned.get_group().global_ranks == (0, 2, 1, 3)
    assert total(turned.get_group(), 1) == 4
    line.shutdown()


@over_groups(sizes=(4,), backends=("gloo",))
def test_an_axis_can_override_the_backend(group):
    mesh = square(group, backend_override={"tp": "shm", 0: ("gloo", {"timeout": SECONDS / 2})})
    assert mesh.get_group("tp").backend == "shm"
    assert mesh.get_group("dp").timeout == SECONDS / 2
    assert total(mesh.get_group("tp"), 1) == total(mesh.get_group("dp"), 1) == 2
    assert mesh["tp"].get_group() is mesh.get_group("tp")
    flat = mesh.flatten("all", backend_override="shm")
    assert flat.get_group().backend == "shm"
    assert total(flat.get_group(), 1) == 4
    mesh.shutdown()


@over_groups(sizes=(4,), backends=("local",))
def test_threads_can_request_axis_groups_in_any_order(group):
    mesh = square(group)
    order = NAMES if group.rank() % 2 else NAMES[::-1]
    found = {}
    workers = [
        threading.Thread(target=lambda name=name: found.update({name: mesh.get_group(name)}))
        for name in (*order, *order)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(20)
    assert found["dp"] is mesh.get_group("dp")
    assert total(found["tp"], 1) == total(found["dp"], 1) == 2
    mesh.shutdown()


def three_axes(ctx):
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("a", "b", "c"), group=ctx.group())
    sums = [total(mesh.get_group(name), ctx.rank) for name in "abc"]
    sums.append(total(mesh["a", "c"].flatten().get_group(), ctx.rank))
    mesh.shutdown()
    return sums


def test_axis_groups_of_a_three_dimensional_mesh():
    for rank, sums in enumerate(ThreadRanks(8).run(three_axes)):
        others = rank ^ 4, rank ^ 2, rank ^ 1
        apart = [4 * a + (rank & 2) + c for a in (0, 1) for c in (0, 1)]
        assert sums == [*(rank + other for other in others), sum(apart)]


# -- on other groups -----------------------------------------------------------------------


@over_groups(sizes=(4,), backends=("local",), split=True)
def test_mesh_ranks_are_the_ranks_of_its_group(group):
    mesh = init_device_mesh("cpu", (group.size(),), mesh_dim_names=("x",), group=group)
    assert mesh.get_rank() == group.rank()
    assert mesh.mesh.tolist() == list(range(group.size()))
    given = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("x",))
    assert given.mesh.tolist() == list(group.global_ranks)
    assert given.get_group() is given.get_group("x") is group
    assert given.get_rank() == group.global_ranks[group.rank()]
    halves = given.unflatten("x", (group.size() // 2, 2), ("y", "z"))
    pair = halves.get_group("z")
    assert pair.global_ranks == tuple(halves["z"].mesh.tolist())
    assert total(pair, 1) == 2
    with process_group(group):
        assert init_device_mesh("cpu", (group.size(),)).group is group
    mesh.shutdown()


@over_groups(sizes=(4,), backends=("local",))
def test_a_mesh_from_axis_groups_needs_no_parent_group(group):
    mesh = square(group)
    given = DeviceMesh.from_group(
        mesh.get_all_groups(), "cpu", mesh=[[0, 1], [2, 3]], mesh_dim_names=("a", "b")
    )
    assert given.group is None
    assert given["b"].get_group() is mesh.get_group("tp")
    assert given.get_coordinate() == mesh.get_coordinate()
    with pytest.raises(RuntimeError, match="without a group of all its ranks"):
        given.flatten().get_group()
    mesh.shutdown()


def on_default_group(ctx):
    dist.init_process_group(
        "gloo", store=ctx.store, rank=ctx.rank, world_size=ctx.size, timeout=SECONDS
    )
    try:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=NAMES)
        assert mesh.group is dist.group.WORLD
        assert mesh.flatten().get_group() is dist.group.WORLD
        if ctx.rank in (0, 2):  # one group more here, which torch would count into the next name
            mesh.get_group("dp")
        row = mesh.get_group("tp")
        assert isinstance(row, ProcessGroup)
        assert (row.backend, row.timeout) == ("gloo", SECONDS)
        assert dist.get_process_group_ranks(row) == mesh["tp"].mesh.tolist()
        tensor = torch.ones(1)
        dist.all_reduce(tensor, group=row)
        assert tensor.item() == 2
        options = dist.ProcessGroupGloo._Options()
        options._timeout = SECONDS / 2
        torchs = init_device_mesh("cpu", (2, 2), backend_override={1: options, 0: "shm"})
        assert not isinstance(torchs.get_group(1), ProcessGroup)
        assert torchs.get_group(0).backend == "shm"
        dist.all_reduce(tensor, group=torchs.get_group(1))
        assert tensor.item() == 4
        given = DeviceMesh.from_group(
            mesh.get_all_groups(), "cpu", mesh=mesh.mesh, mesh_dim_names=("a", "b")
        )
        assert given.get_group("b") is row
        assert given.flatten().get_group() is dist.group.WORLD
        assert pickle.loads(pickle.dumps(mesh)) == mesh
        mesh.shutdown()
        dist.barrier()
    finally:
        dist.destroy_process_group()


def test_axis_groups_on_torchs_default_group(ranks):
    ranks.run(on_default_group, 4)


def from_environment(ctx, port):
    places = {"RANK": ctx.rank, "WORLD_SIZE": ctx.size, "MASTER_PORT": port}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", **{name: str(each) for name, each in places.items()}}
    mesh = init_device_mesh("cpu", (2,))
    ctx.closing(mesh.group)
    assert mesh.get_group() is mesh.group
    assert total(mesh.get_group(), 1) == 2
    mesh.group.barrier().wait()  # rank 0 hosts the store


def test_without_a_group_the_mesh_forms_one_from_the_environment(ranks):
    ranks.run(from_environment, 2, args=(free_port(),))


# -- mismatched meshes ---------------------------------------------------------------------


def disagree(ctx, backend, *, use, mine):
    """Use an axis of this rank's mesh; returns the mismatch error, or "fine"."""
    group = ctx.group(backend)
    mesh = mine(ctx.rank, group)
    try:
        if (found := use(mesh, ctx.rank)) is not group:
            ctx.closing(found)
    except RankMismatch as error:
        return str(error)
    return "fine"


def swapped_on_rank_0(rank, group):
    names = NAMES if rank == 0 else NAMES[::-1]
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=names, group=group)


def wide_on_rank_3(rank, group):
    shape = (1, 4) if rank == 3 else (2, 2)
    return init_device_mesh("cpu", shape, mesh_dim_names=NAMES, group=group)


def use_tp(mesh, rank):
    return mesh.get_group("tp")


def use_same_ranks(mesh, rank):
    return mesh.get_group("tp" if rank == 0 else "dp")


def flat(rank, group):
    return init_device_mesh("cpu", (4,), mesh_dim_names=("world",), group=group)


def use_unflat(mesh, rank):
    sizes = (1, 4) if rank == 0 else (2, 2)
    return mesh.unflatten(0, sizes, ("x", "y")).get_group("y")


def both_sides(told):
    return "dp=2, tp=2" in told and "tp=2, dp=2" in told


MISMATCHES = {
    "swapped": (use_tp, swapped_on_rank_0),
    "by accident": (use_same_ranks, swapped_on_rank_0),
    "wide": (use_tp, wide_on_rank_3),
    "unflattened": (use_unflat, flat),
}


@pytest.fixture(scope="module")
def quarrels():
    """The errors of four threads in each case; run concurrently, since most of it is waiting."""

    def have(case):
        use, mine = MISMATCHES[case]
        kwargs = {"use": use, "mine": mine}
        return ThreadRanks(4).run(disagree, args=("local",), kwargs=kwargs)

    with ThreadPoolExecutor() as pool:
        return dict(zip(MISMATCHES, pool.map(have, MISMATCHES), strict=True))


def check_swapped(told):
    assert both_sides(told[0])
    assert "rank 0 uses" in told[0]
    assert "rank 1 uses" in told[0]
    assert both_sides(told[2])
    assert told[1] == told[3] == "fine"  # they agree with each other


def test_swapped_axis_names_are_reported_with_both_meshes(quarrels, ranks):
    check_swapped(quarrels["swapped"])
    kwargs = {"use": use_tp, "mine": swapped_on_rank_0}
    check_swapped(ranks.run(disagree, 4, args=("gloo",), kwargs=kwargs))


def test_different_axes_with_equal_ranks_are_reported_as_a_mismatch(quarrels):
    told = quarrels["by accident"]
    assert both_sides(told[0])
    assert told[0] == told[1]


def test_a_different_mesh_shape_is_reported_as_a_mismatch(quarrels):
    told = quarrels["wide"]
    assert told[:2] == ["fine", "fine"]
    assert "rank 2 uses DeviceMesh((dp=2, tp=2)" in told[2]
    assert "rank 3 uses DeviceMesh((dp=1, tp=4)" in told[2]


def test_a_different_unflattening_is_reported_as_a_mismatch(quarrels):
    told = quarrels["unflattened"]
    assert told[2:] == ["fine", "fine"]
    assert "rank 0 has the axis 'y' as 4:1" in told[1]
    assert "rank 1 has the axis 'y' as 2:1" in told[1]


def different_but_right(ctx):
    """Create meshes that other ranks do not have, where that is no mismatch."""
    group = ctx.group("local")
    if ctx.rank == 0:
        init_device_mesh("cpu", (4, 1), mesh_dim_names=("planned", "only"), group=group)
    halves = DeviceMesh("cpu", [[0, 1], [2, 3]][ctx.rank // 2], group=group)
    assert total(halves.get_group(), 1) == 2
    mesh = square(group)
    # The same group, for which each rank has a different name and mesh.
    same = mesh["tp"].flatten(f"mine of {ctx.rank}") if ctx.rank % 2 else mesh["tp"]
    assert total(same.get_group(), 1) == 2
    assert total(mesh.get_group("dp"), 1) == 2
    mesh.shutdown()


def test_different_meshes_with_compatible_groups_are_accepted(threads):
    threads.run(different_but_right, 4)


def late(ctx):
    mesh = square(ctx.group("local"), backend_override={"tp": timedelta(seconds=0.3)})
    if ctx.rank == 0:
        with pytest.raises(RendezvousTimeout, match="missing: rank 1"):
            mesh.get_group("tp")


def test_axis_group_timeout_names_the_missing_rank(threads):
    threads.run(late, 4)
