"""Conversion between our mesh and torch's own class: same ranks, same groups.

Most of torch accepts our mesh, which derives from torch's class. Code that compares exact types
or meshes (compiled DTensor programs) needs torch's own, which is given our layout and groups, so
no group is formed twice. Meshes of one root stay meshes of one root, since torch compares roots.
"""

from __future__ import annotations

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch.distributed._mesh_layout import _FlatLayout, _MeshLayout
from torch.distributed.device_mesh import DeviceMesh as TorchMesh

from ..errors import InvalidState, InvalidType
from ..groups._subgroups import default_parent_group
from ._arguments import as_range
from ._device_mesh import DeviceMesh, RootState
from .layout import FlatLayout, MeshLayout


def to_torch(mesh: DeviceMesh, *, as_default: bool) -> TorchMesh:
    state = mesh._root_state
    base = state.base
    if as_default and not dist.is_initialized():
        if base is None or list(base.global_ranks) != list(range(base.size)):
            raise InvalidState(
                f"{state.root} cannot provide torch's default group: its group does not have all "
                "global ranks"
            )
        c10d._update_default_pg(base.group)
    if not dist.is_initialized() and mesh._layout.numel() != len(state.ranks):
        raise InvalidState(
            f"{mesh} is a slice of {state.root}, and torch's mesh needs a default group to locate "
            "this rank in it. Hint: initialize torch's default group, or pass as_default=True."
        )
    if state.torch_root is None:
        state.torch_root = _without_groups(state.root, root=None)
    torch_root = state.torch_root
    made = torch_root if mesh is state.root else _without_groups(mesh, root=torch_root)
    made._dim_group_names = mesh._dim_group_names
    for each in (made, torch_root):
        each._pg_registry.update(mesh._pg_registry)
    name = (mesh.mesh_dim_names or ("",))[0]
    if state.flattened.get(name) is mesh:
        torch_root._flatten_mapping[name] = made
    return made


def _without_groups(mesh: DeviceMesh, *, root: TorchMesh | None) -> TorchMesh:
    state = mesh._root_state
    return TorchMesh(
        state.device_type,
        _layout=_MeshLayout([_FlatLayout(axis.shape, axis.stride) for axis in mesh.layout]),
        _rank_map=mesh._rank_map if root is None else root._rank_map,
        mesh_dim_names=mesh.mesh_dim_names,
        _root_mesh=root,
        _init_backend=False,
        _rank=state.rank if state.base is None else state.base.global_ranks[state.base.rank],
    )


def from_torch(mesh: TorchMesh) -> DeviceMesh:
    if isinstance(mesh, DeviceMesh):
        return mesh
    if not isinstance(mesh, TorchMesh):
        raise InvalidType(f"from_torch takes a torch DeviceMesh, got {mesh!r}")
    root = mesh._get_root_mesh()
    ranks = as_range(root._rank_map.tolist())
    state = RootState(root.device_type, ranks, base=default_parent_group(root.device_type))
    made = DeviceMesh._make(state, _our_layout(root._layout), root.mesh_dim_names)
    state.torch_root = root
    for name, flat in root._flatten_mapping.items():
        state.flattened[name] = DeviceMesh._make(state, _our_layout(flat._layout), (name,))
        _take_groups(state.flattened[name], flat)
    _take_groups(made, root)
    if mesh is root:
        return made
    derived = DeviceMesh._make(state, _our_layout(mesh._layout), mesh.mesh_dim_names or ())
    _take_groups(derived, mesh)
    return derived


def _our_layout(layout: _MeshLayout) -> MeshLayout:
    return MeshLayout([FlatLayout(axis.shape, axis.stride) for axis in layout])


def _take_groups(mesh: DeviceMesh, torch_mesh: TorchMesh) -> None:
    if mesh._root_state.position is None or not hasattr(torch_mesh, "_dim_group_names"):
        return
    for axis in range(mesh.ndim):
        mesh._set_axis_group(axis, torch_mesh.get_group(axis))
