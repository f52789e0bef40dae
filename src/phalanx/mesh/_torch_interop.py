"""Conversion between our mesh and torch's: same ranks, same groups.

DTensor, FSDP2 and tensor parallelism require torch's class. It is given our layout and groups,
so no group is formed twice. Meshes of one root stay meshes of one root, since torch compares
roots.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch.distributed._mesh_layout import _FlatLayout, _MeshLayout
from torch.distributed.device_mesh import DeviceMesh as TorchMesh

from ..errors import InvalidState, InvalidType
from ..groups._subgroups import DEFAULT_OPTIONS, default_parent_group
from ._arguments import as_range
from ._device_mesh import DeviceMesh, set_axis_group, uninitialized_mesh
from ._root_state import RootState, init_root_mesh
from .layout import FlatLayout, MeshLayout


def to_torch(mesh: DeviceMesh, *, as_default: bool) -> TorchMesh:
    """Return torch's mesh for one of ours; makes the groups of its axes."""
    family = mesh._root_state
    if as_default and not dist.is_initialized():
        _make_default(family)
    whole = mesh._layout.numel() == len(family.ranks)
    if not dist.is_initialized() and not whole:
        raise InvalidState(
            f"{mesh} is a part of {family.root}: torch's mesh for it asks torch's default group "
            "which part this rank is in, and there is none. Initialise it, or pass as_default=True"
        )
    if family.torch_root is None:
        family.torch_root = _bare(family.root, root=None)
    made = family.torch_root if mesh is family.root else _bare(mesh, root=family.torch_root)
    if family.position is None:
        made._dim_group_names = []
        return made
    groups = mesh.get_all_groups()
    made._dim_group_names = [group.group_name for group in groups]
    for each in (made, family.torch_root):
        each._pg_registry.update({group.group_name: group for group in groups})
    name = (mesh.mesh_dim_names or ("",))[0]
    if family.flattened.get(name) is mesh:
        family.torch_root._flatten_mapping[name] = made
    return made


def _make_default(family: RootState) -> None:
    """Make the group that a mesh is on torch's default group."""
    base = family.base
    if base is None or list(base.global_ranks) != list(range(base.size)):
        raise InvalidState(
            f"{family.root} is not on a group of all global ranks, which torch's default group is"
        )
    c10d._update_default_pg(base.group)


def _bare(mesh: DeviceMesh, *, root: TorchMesh | None) -> TorchMesh:
    """Return torch's mesh without groups."""
    family = mesh._root_state
    numbers = family.global_ranks()
    if root is None:
        rank_map = torch.tensor(list(numbers), dtype=torch.int, device="cpu")
    else:
        rank_map = root._rank_map
    layout = _MeshLayout([_FlatLayout(axis.shape, axis.stride) for axis in mesh.layout])
    own = family.rank if family.base is None else family.base.global_ranks[family.base.rank]
    return TorchMesh(
        family.device_type,
        _layout=layout,
        _rank_map=rank_map,
        mesh_dim_names=mesh.mesh_dim_names,
        _root_mesh=root,
        _init_backend=False,
        _rank=own,
    )


def from_torch(mesh: TorchMesh) -> DeviceMesh:
    """Return one of ours for torch's mesh, with the groups that it has."""
    if not isinstance(mesh, TorchMesh):
        raise InvalidType(f"from_torch takes a torch DeviceMesh, not {mesh!r}")
    root = mesh._get_root_mesh()
    ranks = as_range(root._rank_map.tolist())
    family = RootState(root.device_type, ranks, base=default_parent_group(root.device_type))
    layout = _ours(root._layout)
    made = init_root_mesh(
        uninitialized_mesh(), family, layout, root.mesh_dim_names, (DEFAULT_OPTIONS,) * len(layout)
    )
    family.torch_root = root
    for name, flat in root._flatten_mapping.items():
        family.flattened[name] = made._derive(_ours(flat._layout), (name,), (DEFAULT_OPTIONS,))
        _take_groups(family.flattened[name], flat)
    _take_groups(made, root)
    if mesh is root:
        return made
    layout = _ours(mesh._layout)
    derived = made._derive(layout, mesh.mesh_dim_names or (), (DEFAULT_OPTIONS,) * len(layout))
    _take_groups(derived, mesh)
    return derived


def _ours(layout: _MeshLayout) -> MeshLayout:
    return MeshLayout([FlatLayout(axis.shape, axis.stride) for axis in layout])


def _take_groups(mesh: DeviceMesh, theirs: TorchMesh) -> None:
    if mesh._root_state.position is None or not hasattr(theirs, "_dim_group_names"):
        return
    for axis in range(mesh.ndim):
        set_axis_group(mesh, axis, theirs.get_group(axis))
