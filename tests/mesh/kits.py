"""Factories for torch's meshes and ours, and programs that build the same mesh with both."""

import torch
import torch.distributed as dist
import torch.distributed.device_mesh as upstream

from phalanx.groups import new_group
from phalanx.mesh import DeviceMesh, init_device_mesh

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
    """Our mesh, on one of our fake groups."""

    cls = DeviceMesh

    def __init__(self, rank):
        self.group = new_group("fake", rank=rank, world_size=WORLD)

    def by_shape(self, shape, **more):
        return init_device_mesh(more.pop("device", "cpu"), shape, group=self.group, **more)

    def of(self, ranks, **more):
        return DeviceMesh(more.pop("device", "cpu"), ranks, group=self.group, **more)


def told(mesh):
    """Return the observable properties of a mesh."""
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
