"""Meshes derived from a mesh: slices, flattened and unflattened axes, concatenations.

All of it is layout arithmetic. Nothing here forms a group or communicates, and no cost depends
on the number of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..errors import InvalidArgument, InvalidMesh, InvalidState, InvalidType, UnknownAxis
from ..groups._subgroups import GroupOptions
from ._arguments import Override, Overrides, check_names, parse_override, parse_overrides
from .layout import FlatLayout, MeshLayout

if TYPE_CHECKING:
    from ._device_mesh import DeviceMesh


_Axis = tuple[FlatLayout, GroupOptions]


def find_axis(mesh: DeviceMesh, axis: int | str, *, what: str = "axis") -> int:
    """Return the number of an axis that is given by name or number."""
    names = mesh.mesh_dim_names
    if isinstance(axis, str):
        if names is not None and axis in names:
            return names.index(axis)
        allowed = f"it has {_format_names(names)}" if names else "its axes have no names"
        raise UnknownAxis(f"{mesh} has no {what} {axis!r}: {allowed}")
    if isinstance(axis, int) and -mesh.ndim <= axis < mesh.ndim:
        return axis % mesh.ndim
    raise UnknownAxis(f"{mesh} has no {what} {axis!r}: {_format_axis_range(mesh.ndim)}, or a name")


def slice_mesh(mesh: DeviceMesh, wanted: str | Sequence[str]) -> DeviceMesh:
    """Return a mesh of some axes, in the order of the mesh."""
    names = (wanted,) if isinstance(wanted, str) else wanted
    if mesh.mesh_dim_names and names == mesh.mesh_dim_names:
        return mesh
    axes = _slice_axes(mesh, names)
    return mesh._derive(_layout_of(axes), tuple(names), tuple([options for _, options in axes]))


def slice_layout(mesh: DeviceMesh, wanted: Sequence[str]) -> MeshLayout:
    """Return the layout that a slice has."""
    return _layout_of(_slice_axes(mesh, wanted))


def flatten(mesh: DeviceMesh, name: str | None, override: Override | None) -> DeviceMesh:
    """Return a mesh of one axis with the ranks of all."""
    names, family = mesh.mesh_dim_names, mesh._root_state
    if not names:
        raise InvalidState(f"{mesh} cannot be flattened: its axes have no names")
    if name is not None and not isinstance(name, str):
        raise InvalidType(f"{mesh} cannot be flattened to an axis {name!r}: a name is a string")
    name = name or "_".join(names)
    if (name,) == names:
        return mesh
    layout, options = mesh._layout.flatten(), (parse_override(override),)
    _check_free_name(mesh, name, layout[0])
    known = family.flattened.get(name)
    if known is None:
        known = family.flattened.setdefault(name, mesh._derive(layout, (name,), options))
        family.record_axes((name,), layout)
    if known._layout != layout or (override is not None and known._options != options):
        raise InvalidMesh(
            f"{name!r} is the name of a flattened axis with other ranks or options, {known}: "
            "choose another one"
        )
    return known


def unflatten(
    mesh: DeviceMesh,
    dim: int | str,
    sizes: Sequence[int],
    names: Sequence[str],
    overrides: Overrides | None,
) -> DeviceMesh:
    """Return a mesh with several axes in place of one."""
    axis, parts = _split_axis(mesh, dim, sizes, names)
    given = parse_overrides(overrides, len(parts), names)
    own = mesh.mesh_dim_names or ()
    all_names = (*own[:axis], *names, *own[axis + 1 :])
    check_names(all_names, len(all_names))
    options = (*mesh._options[:axis], *given, *mesh._options[axis + 1 :])
    _reserve_unflattened_names(mesh, names, parts)
    return mesh._derive(mesh._layout.splice(axis, axis + 1, parts), all_names, options)


def concatenate(meshes: Sequence[DeviceMesh]) -> DeviceMesh:
    """Return a mesh with the axes of several."""
    axes, names = _concatenated_axes(meshes)
    check_names(names, len(names))
    options = tuple([options for _, options in axes])
    return meshes[0]._derive(_layout_of(axes), names, options)


def _slice_axes(mesh: DeviceMesh, wanted: Sequence[str]) -> list[_Axis]:
    """Return some axes of a mesh, in its order; the root's may be flattened ones."""
    names = mesh.mesh_dim_names
    if not names:
        raise InvalidState(f"{mesh} cannot be sliced: its axes have no names")
    try:
        wanted = tuple(wanted)
    except TypeError:
        raise InvalidType(f"a mesh is sliced by the names of axes, not by {wanted!r}") from None
    own = dict(zip(names, zip(mesh._layout, mesh._options, strict=True), strict=True))
    flattened = mesh._root_state.flattened if mesh is mesh._root_state.root else {}
    known = own | {name: (flat._layout[0], flat._options[0]) for name, flat in flattened.items()}
    for name in wanted:
        if name not in known:
            raise UnknownAxis(f"{mesh} has no axis {name!r}: it has {_format_names(known)}")
    axes = [known[name] for name in wanted]
    _check_order(mesh, wanted, axes)
    return axes


def _check_order(mesh: DeviceMesh, wanted: Sequence[str], axes: Sequence[_Axis]) -> None:
    twice = [name for name in wanted if wanted.count(name) > 1]
    if twice:
        raise InvalidMesh(f"slice {tuple(wanted)} of {mesh} has axis {twice[0]!r} more than once")
    if not _layout_of(axes).check_sorted():
        raise UnknownAxis(
            f"slice {tuple(wanted)} of {mesh} is not in the order of its axes, which is "
            f"{_format_names(mesh.mesh_dim_names or ())}: concatenate() takes any order"
        )
    _check_overlap(wanted, axes, what=f"they are no slice of {mesh}")


def _check_overlap(names: Sequence[str], axes: Sequence[_Axis], *, what: str) -> None:
    """Name the first axis that has ranks in common with those before it."""
    if _layout_of(axes).check_orthogonal():
        return
    number = next(n for n in range(len(axes)) if not _layout_of(axes[: n + 1]).check_orthogonal())
    raise InvalidMesh(
        f"axis {names[number]!r} overlaps with {_format_names(names[:number])}: {what}"
    )


def _check_free_name(mesh: DeviceMesh, name: str, flat: FlatLayout) -> None:
    """Refuse a name for a flattened axis that another axis of this mesh or its root has."""
    root, family = mesh.get_root_mesh(), mesh._root_state
    for owner in (root, mesh):
        if name in (owner.mesh_dim_names or ()):
            taken = {
                *(root.mesh_dim_names or ()),
                *(mesh.mesh_dim_names or ()),
                *family.flattened,
                *family.unflattened,
            }
            raise InvalidMesh(
                f"{name!r} is an axis of {owner} already: choose a name that is not one of "
                f"{_format_names(sorted(taken))}"
            )
    others = family.unflattened.get(name, set()) - {flat}
    if others:
        raise InvalidMesh(
            f"{name!r} is an axis {next(iter(others))} that was made of {root} by unflatten: "
            "choose another name"
        )


def _reserve_unflattened_names(mesh: DeviceMesh, names: Sequence[str], parts: MeshLayout) -> None:
    """Refuse names that flattened axes have; the others are taken from now on."""
    family = mesh._root_state
    for name, axis in zip(names, parts, strict=True):
        flat = family.flattened.get(name)
        if flat is not None and flat._layout[0] != axis:
            raise InvalidMesh(
                f"{name!r} is the name of a flattened axis with other ranks, {flat}: choose "
                "another one"
            )
    for name, axis in zip(names, parts, strict=True):
        family.unflattened.setdefault(name, set()).add(axis)
    family.record_axes(names, parts)


def _split_axis(
    mesh: DeviceMesh, dim: int | str, sizes: Sequence[int], names: Sequence[str]
) -> tuple[int, MeshLayout]:
    """Return which axis becomes several, and these."""
    axis = find_axis(mesh, dim)
    own = mesh.mesh_dim_names
    if own is None:
        raise InvalidType(f"{mesh} cannot be unflattened: its axes have no names")
    for what, several in (("mesh_sizes", sizes), ("mesh_dim_names", names)):
        if isinstance(several, str) or not isinstance(several, Sequence):
            raise InvalidType(f"{what} has one for each new axis, in a tuple: not {several!r}")
    if len(sizes) != len(names):
        raise InvalidMesh(
            f"axis {own[axis]!r} is to become {len(sizes)} axes {tuple(sizes)} with {len(names)} "
            f"names {tuple(names)}: give one name for each"
        )
    size = mesh._layout[axis].numel()
    if math.prod(sizes) != size:
        raise InvalidMesh(
            f"axis {own[axis]!r} has size {size}, which is not the product of {tuple(sizes)}"
        )
    try:
        parts = mesh._layout[axis].composition(MeshLayout.from_sizes_strides(tuple(sizes)))
    except InvalidArgument as error:
        raise InvalidMesh(f"axis {own[axis]!r} cannot become {tuple(sizes)}: {error}") from error
    return axis, parts


def _concatenated_axes(meshes: Sequence[DeviceMesh]) -> tuple[list[_Axis], tuple[str, ...]]:
    """Return the axes of several meshes of one root, and their names."""
    _check_meshes(meshes)
    axes: list[_Axis] = []
    names: list[str] = []
    first = meshes[0]
    for mesh in meshes:
        if not mesh._root_state.is_equivalent(first._root_state):
            raise InvalidMesh(
                f"{mesh} and {first} come from different meshes, {mesh.get_root_mesh()} and "
                f"{first.get_root_mesh()}: only slices of one can be concatenated"
            )
        if mesh.mesh_dim_names is None:
            raise InvalidType(f"{mesh} cannot be concatenated: its axes have no names")
        names += mesh.mesh_dim_names
        axes += zip(mesh._layout, mesh._options, strict=True)
    _check_overlap(names, axes, what="they cannot be concatenated")
    return axes, tuple(names)


def _check_meshes(meshes: Sequence[DeviceMesh]) -> None:
    from ._device_mesh import DeviceMesh  # here, for it imports this module

    if not isinstance(meshes, Sequence):
        raise InvalidType(f"concatenate takes a list of meshes, not {meshes!r}")
    if not meshes:
        raise UnknownAxis("there is nothing to concatenate: give at least one mesh")
    for each in meshes:
        if not isinstance(each, DeviceMesh):
            raise InvalidType(f"concatenate takes a list of meshes, not of {each!r}")


def _layout_of(axes: Sequence[_Axis]) -> MeshLayout:
    """Return the layout that some axes make."""
    return MeshLayout([layout for layout, _ in axes])


def _format_names(names: Sequence[str] | dict[str, _Axis] | None) -> str:
    return ", ".join(map(repr, names or ())) or "none"


def _format_axis_range(ndim: int) -> str:
    return (
        f"axes are 0 to {ndim - 1}" if ndim > 1 else f"it has {ndim} axis" + ("" if ndim else "es")
    )
