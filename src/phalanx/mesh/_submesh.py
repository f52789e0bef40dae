"""Meshes derived from a mesh: slices, flattened and unflattened axes, concatenations.

All of it is layout arithmetic: nothing forms a group or communicates, and no cost depends on the
number of ranks. The public methods and their documentation are in `DeviceMesh`.
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


def slice_mesh(mesh: DeviceMesh, wanted: str | Sequence[str]) -> DeviceMesh:
    names = (wanted,) if isinstance(wanted, str) else wanted
    if mesh.mesh_dim_names and names == mesh.mesh_dim_names:
        return mesh
    axes = _slice_axes(mesh, names)
    return mesh._derive(_layout_of(axes), tuple(names), tuple([options for _, options in axes]))


def slice_layout(mesh: DeviceMesh, wanted: Sequence[str]) -> MeshLayout:
    return _layout_of(_slice_axes(mesh, wanted))


def flatten(mesh: DeviceMesh, name: str | None, override: Override | None) -> DeviceMesh:
    names, state = mesh.mesh_dim_names, mesh._root_state
    if not names:
        raise InvalidState(f"{mesh} cannot be flattened: its axes have no names")
    if name is not None and not isinstance(name, str):
        raise InvalidType(f"mesh_dim_name must be a string, got {name!r}")
    name = name or "_".join(names)
    if (name,) == names:
        return mesh
    layout, options = mesh._layout.flatten(), (parse_override(override),)
    _check_name_is_free(mesh, name, layout[0])
    known = state.flattened.get(name)
    if known is None:
        known = state.flattened.setdefault(name, mesh._derive(layout, (name,), options))
        state.record_axes((name,), layout)
    if known._layout != layout or (override is not None and known._options != options):
        raise InvalidMesh(
            f"cannot flatten {mesh} as {name!r}: {known} has that name and other ranks or options"
        )
    return known


def unflatten(
    mesh: DeviceMesh,
    dim: int | str,
    sizes: Sequence[int],
    names: Sequence[str],
    overrides: Overrides | None,
) -> DeviceMesh:
    axis, parts = _split_axis(mesh, dim, sizes, names)
    given = parse_overrides(overrides, len(parts), names)
    own = mesh.mesh_dim_names or ()
    all_names = (*own[:axis], *names, *own[axis + 1 :])
    check_names(all_names, len(all_names))
    options = (*mesh._options[:axis], *given, *mesh._options[axis + 1 :])
    _reserve_unflattened_names(mesh, names, parts)
    return mesh._derive(mesh._layout.splice(axis, axis + 1, parts), all_names, options)


def concatenate(meshes: Sequence[DeviceMesh]) -> DeviceMesh:
    axes, names = _concatenated_axes(meshes)
    check_names(names, len(names))
    options = tuple([options for _, options in axes])
    return meshes[0]._derive(_layout_of(axes), names, options)


def _slice_axes(mesh: DeviceMesh, wanted: Sequence[str]) -> list[_Axis]:
    """Return axes by name. Those of a root may be flattened ones."""
    names = mesh.mesh_dim_names
    if not names:
        raise InvalidState(f"{mesh} cannot be sliced: its axes have no names")
    try:
        wanted = tuple(wanted)
    except TypeError:
        raise InvalidType(f"a mesh is sliced by names of axes, got {wanted!r}") from None
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
            f"slice {tuple(wanted)} of {mesh} is not in the order of its axes, "
            f"{_format_names(mesh.mesh_dim_names or ())}. Hint: concatenate() takes any order."
        )
    _check_overlap(wanted, axes, where=f"a slice of {mesh}")


def _check_overlap(names: Sequence[str], axes: Sequence[_Axis], *, where: str) -> None:
    if _layout_of(axes).check_orthogonal():
        return
    number = next(n for n in range(len(axes)) if not _layout_of(axes[: n + 1]).check_orthogonal())
    raise InvalidMesh(
        f"axis {names[number]!r} overlaps with {_format_names(names[:number])} in {where}"
    )


def _check_name_is_free(mesh: DeviceMesh, name: str, flat: FlatLayout) -> None:
    root, state = mesh.get_root_mesh(), mesh._root_state
    for owner in (root, mesh):
        if name in (owner.mesh_dim_names or ()):
            taken = {
                *(root.mesh_dim_names or ()),
                *(mesh.mesh_dim_names or ()),
                *state.flattened,
                *state.unflattened,
            }
            raise InvalidMesh(
                f"{name!r} is already an axis of {owner}. Names in use: "
                f"{_format_names(sorted(taken))}"
            )
    others = state.unflattened.get(name, set()) - {flat}
    if others:
        raise InvalidMesh(
            f"{name!r} is already an axis of {root}, made by unflatten as {next(iter(others))}"
        )


def _reserve_unflattened_names(mesh: DeviceMesh, names: Sequence[str], parts: MeshLayout) -> None:
    state = mesh._root_state
    for name, axis in zip(names, parts, strict=True):
        flat = state.flattened.get(name)
        if flat is not None and flat._layout[0] != axis:
            raise InvalidMesh(f"{name!r} is already a flattened axis with other ranks, {flat}")
    for name, axis in zip(names, parts, strict=True):
        state.unflattened.setdefault(name, set()).add(axis)
    state.record_axes(names, parts)


def _split_axis(
    mesh: DeviceMesh, dim: int | str, sizes: Sequence[int], names: Sequence[str]
) -> tuple[int, MeshLayout]:
    """Return the number of the axis, and the layout of the axes that replace it."""
    axis = mesh._axis_number(dim)
    own = mesh.mesh_dim_names
    if own is None:
        raise InvalidType(f"{mesh} cannot be unflattened: its axes have no names")
    for what, value in (("mesh_sizes", sizes), ("mesh_dim_names", names)):
        if isinstance(value, str) or not isinstance(value, Sequence):
            raise InvalidType(f"{what} must be a tuple, got {value!r}")
    if len(sizes) != len(names):
        raise InvalidMesh(
            f"mesh_sizes {tuple(sizes)} and mesh_dim_names {tuple(names)} have different lengths"
        )
    size = mesh._layout[axis].numel()
    if math.prod(sizes) != size:
        raise InvalidMesh(f"axis {own[axis]!r} has size {size}, but mesh_sizes are {tuple(sizes)}")
    try:
        parts = mesh._layout[axis].composition(MeshLayout.from_sizes_strides(tuple(sizes)))
    except InvalidArgument as error:
        raise InvalidMesh(f"axis {own[axis]!r} cannot become {tuple(sizes)}: {error}") from error
    return axis, parts


def _concatenated_axes(meshes: Sequence[DeviceMesh]) -> tuple[list[_Axis], tuple[str, ...]]:
    _check_meshes(meshes)
    axes: list[_Axis] = []
    names: list[str] = []
    first = meshes[0]
    for mesh in meshes:
        if not mesh._root_state.is_equivalent(first._root_state):
            raise InvalidMesh(
                f"cannot concatenate meshes of different roots: {mesh} is from "
                f"{mesh.get_root_mesh()}, {first} from {first.get_root_mesh()}"
            )
        if mesh.mesh_dim_names is None:
            raise InvalidType(f"{mesh} cannot be concatenated: its axes have no names")
        names += mesh.mesh_dim_names
        axes += zip(mesh._layout, mesh._options, strict=True)
    _check_overlap(names, axes, where="a concatenated mesh")
    return axes, tuple(names)


def _check_meshes(meshes: Sequence[DeviceMesh]) -> None:
    from ._device_mesh import DeviceMesh  # it imports this module

    if not isinstance(meshes, Sequence):
        raise InvalidType(f"concatenate takes a list of meshes, got {meshes!r}")
    if not meshes:
        raise UnknownAxis("concatenate needs at least one mesh")
    for each in meshes:
        if not isinstance(each, DeviceMesh):
            raise InvalidType(f"concatenate takes a list of meshes, got {each!r} in it")


def _layout_of(axes: Sequence[_Axis]) -> MeshLayout:
    return MeshLayout([layout for layout, _ in axes])


def _format_names(names: Sequence[str] | dict[str, _Axis] | None) -> str:
    return ", ".join(map(repr, names or ())) or "none"
