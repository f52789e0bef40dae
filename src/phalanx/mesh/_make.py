"""The ways in which a mesh comes about: by shape, of groups, by taking apart, from a pickle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from ..errors import InvalidMesh, InvalidType
from ..groups._subgroups import (
    DEFAULT_OPTIONS,
    GroupOptions,
    default_parent_group,
    parent_group,
    resolve_group,
)
from ._axis_options import Overrides, for_axes
from ._checks import as_range, check_device_type, check_names, check_ranks, check_shape, read_ranks
from ._device_mesh import DeviceMesh
from ._family import Family, found
from .layout import MeshLayout

__all__ = ["blank", "from_groups", "give", "init_device_mesh", "lines", "pickled"]


def init_device_mesh(
    device_type: str,
    mesh_shape: tuple[int, ...],
    *,
    mesh_dim_names: tuple[str, ...] | None = None,
    backend_override: Overrides | None = None,
    group: dist.ProcessGroup | None = None,
) -> DeviceMesh:
    """Make a mesh of the ranks 0, 1, 2, ... with the last axis running fastest.

    It is on `group`; by default on the group that the thread is in, on torch's default group, or on
    a new group of all ranks that were started. No group is made for any axis before it is used.
    `backend_override` gives axes, by name or number, a backend, options or a timeout of their own.
    """
    sizes = check_shape(mesh_shape)
    names = check_names(mesh_dim_names, len(sizes))
    check_device_type(device_type)
    options = for_axes(backend_override, len(sizes), names)
    layout = MeshLayout.from_sizes_strides(sizes)
    base = default_parent_group(device_type) if group is None else parent_group(group)
    ranks = range(layout.numel())
    check_ranks(ranks, size=base.size)
    return found(blank(), Family(device_type, ranks, base=base), layout, names, options)


def blank() -> DeviceMesh:
    """Return a mesh that is yet to be one."""
    return DeviceMesh.__new__(DeviceMesh)


def lines(mesh: DeviceMesh, axis: int) -> list[DeviceMesh]:
    """Return a mesh of its own for each group along an axis, also for those of other ranks."""
    family, options = mesh._family, (mesh._options[axis],)
    names = None if mesh.mesh_dim_names is None else (mesh.mesh_dim_names[axis],)
    layout = MeshLayout.from_sizes_strides((mesh.size(axis),))
    return [
        found(blank(), family.part(family.ranks_at(each)), layout, names, options, noted=False)
        for each in mesh._layout[axis].global_ranks(len(family.ranks))
    ]


# -- of groups that are there --------------------------------------------------------------


def from_groups(
    groups: dist.ProcessGroup | Sequence[dist.ProcessGroup],
    device_type: str,
    mesh: Any,
    *,
    names: tuple[str, ...] | None,
) -> DeviceMesh:
    """Return a mesh of global ranks whose axes have the groups given."""
    check_device_type(device_type)
    if isinstance(groups, dist.ProcessGroup):
        return _from_one(groups, device_type, mesh, names)
    groups = _several(groups)
    for missing, what in ((groups, "group"), (mesh, "mesh"), (names, "mesh_dim_names")):
        if missing is None or missing == []:
            raise InvalidMesh(f"{what} is missing: several groups need an array of ranks and names")
    sizes, ranks = read_ranks(mesh)
    if len(sizes) != len(groups):
        raise InvalidMesh(
            f"a mesh of {len(sizes)} axes, {sizes}, does not fit {len(groups)} groups"
        )
    names = check_names(names, len(sizes))
    check_ranks(ranks, size=None)
    members = dist.get_process_group_ranks(groups[0])
    base = parent_group(dist.group.WORLD) if dist.is_initialized() and dist.group.WORLD else None
    family = Family(device_type, ranks, base=base, rank=members[groups[0].rank()])
    options = (DEFAULT_OPTIONS,) * len(sizes)
    made = found(blank(), family, MeshLayout.from_sizes_strides(sizes), names, options)
    for axis, group in enumerate(groups):
        give(made, axis, group)
    return made


def _several(groups: Sequence[dist.ProcessGroup]) -> list[dist.ProcessGroup]:
    try:
        several = list(groups)
    except TypeError:
        raise InvalidType(f"from_group takes a group or a list of groups, not {groups!r}") from None
    for each in several:
        if not isinstance(each, dist.ProcessGroup):
            raise InvalidType(f"from_group takes a list of groups, not of {each!r}")
    return several


def _from_one(
    group: dist.ProcessGroup, device_type: str, mesh: Any, names: tuple[str, ...] | None
) -> DeviceMesh:
    members = as_range(dist.get_process_group_ranks(group))
    if mesh is not None and read_ranks(mesh) != ((len(members),), members):
        given = mesh.tolist() if isinstance(mesh, torch.Tensor) else mesh
        raise InvalidMesh(f"mesh {given} does not fit a group of the ranks {list(members)}")
    names = check_names(names, 1)
    family = Family(device_type, members, base=parent_group(group), numbers=members)
    layout = MeshLayout.from_sizes_strides((len(members),))
    family.given[members] = group
    return found(blank(), family, layout, names, (DEFAULT_OPTIONS,))


def give(mesh: DeviceMesh, axis: int, group: dist.ProcessGroup) -> None:
    """Make a group that of an axis, for this mesh and its slices."""
    family, name = mesh._family, (mesh.mesh_dim_names or {axis: str(axis)})[axis]
    position = family.require_position(f"it has no group along axis {name!r}")
    ranks = family.ranks_at(mesh._layout[axis].group_of(position))
    members = as_range(dist.get_process_group_ranks(group))
    if ranks != members:
        raise InvalidMesh(
            f"axis {name!r} has the ranks {list(ranks)} here, and its group {list(members)}"
        )
    family.given[ranks] = group


# -- from a pickle -------------------------------------------------------------------------


def pickled(mesh: DeviceMesh) -> tuple[Any, ...]:
    """Return how to make a mesh again, as `pickle` wants it: on groups of the same names there."""
    family, base = mesh._family, mesh._family.base
    options = _portable(mesh._options)
    if mesh is not family.root:
        return _derived_again, (family.root, mesh._layout, mesh._names, options)
    flattened = [
        (name, flat._layout, _portable(flat._options)) for name, flat in family.flattened.items()
    ]
    known = _Known(
        family.device_type,
        family.ranks,
        family.rank,
        family.numbers,
        group=None if base is None else (base.group.group_name, base.size),
        given=[(ranks, group.group_name) for ranks, group in family.given.items()],
    )
    return _again, (known, mesh._layout, mesh._names, options, flattened)


@dataclass(frozen=True)
class _Known:
    """What a pickle has of a family, with groups as the names by which torch knows them."""

    device_type: str
    ranks: Sequence[int]
    rank: int
    numbers: Sequence[int] | None
    group: tuple[str, int] | None
    given: list[tuple[Sequence[int], str]]

    def family(self) -> Family:
        """Make the family again, with such of its groups as are known here."""
        name, size = self.group or ("", 0)
        group = resolve_group(name)
        base = parent_group(group) if group is not None and group.size() == size else None
        rank = self.rank if base is None else None
        made = Family(self.device_type, self.ranks, base=base, rank=rank, numbers=self.numbers)
        for ranks, name in self.given:
            group = resolve_group(name)
            if group is not None and as_range(dist.get_process_group_ranks(group)) == ranks:
                made.given[ranks] = group
        return made


def _portable(options: tuple[GroupOptions, ...]) -> tuple[GroupOptions, ...]:
    """Leave out torch's own options, which cannot be pickled."""
    return tuple(replace(each, native=None) for each in options)


def _again(
    known: _Known,
    layout: MeshLayout,
    names: tuple[str, ...] | None,
    options: tuple[GroupOptions, ...],
    flattened: list[tuple[str, MeshLayout, tuple[GroupOptions, ...]]],
) -> DeviceMesh:
    family = known.family()
    mesh = found(blank(), family, layout, names, options)
    for name, flat, its_options in flattened:
        family.flattened[name] = mesh._derive(flat, (name,), its_options)
    return mesh


def _derived_again(
    root: DeviceMesh,
    layout: MeshLayout,
    names: tuple[str, ...],
    options: tuple[GroupOptions, ...],
) -> DeviceMesh:
    mesh = root._derive(layout, names, options)
    flattened = root._family.flattened.get(names[0]) if len(names) == 1 else None
    return flattened if flattened == mesh and flattened is not None else mesh
