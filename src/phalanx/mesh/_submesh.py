"""Meshes derived from a mesh: slices, flattened and unflattened axes, concatenations.

All of it is layout arithmetic: nothing forms a group or communicates, and no cost depends on the
number of ranks. The public methods and their documentation are in `DeviceMesh`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from ..errors import InvalidArgument, InvalidMesh, InvalidState, InvalidType, UnknownAxis
from ..groups._parent_group import GroupOptions
from ._arguments import Override, Overrides, as_tuple, check_names, parse_override, parse_overrides
from .layout import FlatLayout, MeshLayout

if TYPE_CHECKING:
    from ._device_mesh import DeviceMesh


_Axis = tuple[FlatLayout, GroupOptions]


def slice_mesh(mesh: DeviceMesh, wanted: str | Sequence[str]) -> DeviceMesh:
    """Return a mesh of some axes by name. Those of a root may be flattened ones."""
    names = mesh.mesh_dim_names
    wanted = (wanted,) if isinstance(wanted, str) else wanted
    if names and wanted == names:
        return mesh
    if not names:
        raise InvalidState(f"{mesh} cannot be sliced: its axes have no names")
    wanted = as_tuple(wanted, "a slice", "names of axes")
    known = dict(zip(names, _axes_of(mesh), strict=True))
    if mesh is mesh._root_state.root:
        known |= {name: _axes_of(flat)[0] for name, flat in mesh._root_state.flattened.items()}
    for name in wanted:
        if name not in known:
            raise UnknownAxis(f"{mesh} has no axis {name!r}: it has {_format_names(known)}")
    axes = [known[name] for name in wanted]
    twice = [name for name in wanted if wanted.count(name) > 1]
    if twice:
        raise InvalidMesh(f"slice {wanted} of {mesh} has axis {twice[0]!r} more than once")
    if not _layout_of(axes).check_sorted():
        raise UnknownAxis(
            f"slice {wanted} of {mesh} is not in the order of its axes, {_format_names(names)}. "
            "Hint: concatenate() takes any order."
        )
    _check_overlap(wanted, axes, where=f"a slice of {mesh}")
    return _derive(mesh, axes, wanted)


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
        known = state.flattened.setdefault(name, mesh._make(state, layout, (name,), options))
        state.groups.registry.record_axes(state.root_key, (name,), layout)
    if known._layout != layout or (override is not None and known._options != options):
        raise InvalidMesh(
            f"cannot flatten {mesh} as {name!r}: {known} has that name and other ranks or options"
        )
    return known


def _check_name_is_free(mesh: DeviceMesh, name: str, flat: FlatLayout) -> None:
    root, state = mesh.get_root_mesh(), mesh._root_state
    own, of_root = mesh.mesh_dim_names or (), root.mesh_dim_names or ()
    if name in of_root or name in own:
        taken = {*of_root, *own, *state.flattened, *state.unflattened}
        raise InvalidMesh(
            f"{name!r} is already an axis of {root if name in of_root else mesh}. Names in use: "
            f"{_format_names(sorted(taken))}"
        )
    others = state.unflattened.get(name, set()) - {flat}
    if others:
        raise InvalidMesh(
            f"{name!r} is already an axis of {root}, made by unflatten as {next(iter(others))}"
        )


def unflatten(
    mesh: DeviceMesh,
    dim: int | str,
    sizes: Sequence[int],
    names: Sequence[str],
    overrides: Overrides | None,
) -> DeviceMesh:
    number, own, state = mesh._axis_number(dim), mesh.mesh_dim_names, mesh._root_state
    if own is None:
        raise InvalidType(f"{mesh} cannot be unflattened: its axes have no names")
    for what, value in (("mesh_sizes", sizes), ("mesh_dim_names", names)):
        if isinstance(value, str) or not isinstance(value, Sequence):
            raise InvalidType(f"{what} must be a tuple, got {value!r}")
    sizes, names, axis = tuple(sizes), tuple(names), mesh._layout[number]
    if len(sizes) != len(names):
        raise InvalidMesh(f"mesh_sizes {sizes} and mesh_dim_names {names} have different lengths")
    if math.prod(sizes) != axis.numel():
        raise InvalidMesh(
            f"axis {own[number]!r} has size {axis.numel()}, but mesh_sizes are {sizes}"
        )
    try:
        parts = axis.composition(MeshLayout.from_sizes_strides(sizes))
    except InvalidArgument as error:
        raise InvalidMesh(f"axis {own[number]!r} cannot become {sizes}: {error}") from error
    axes = _axes_of(mesh)
    axes[number : number + 1] = zip(
        parts, parse_overrides(overrides, len(parts), names), strict=True
    )
    all_names = (*own[:number], *names, *own[number + 1 :])
    check_names(all_names, len(all_names))
    for name, part in zip(names, parts, strict=True):
        flat = state.flattened.get(name)
        if flat is not None and flat._layout[0] != part:
            raise InvalidMesh(f"{name!r} is already a flattened axis with other ranks, {flat}")
    for name, part in zip(names, parts, strict=True):
        state.unflattened.setdefault(name, set()).add(part)
    state.groups.registry.record_axes(state.root_key, names, parts)
    return _derive(mesh, axes, all_names)


def concatenate(meshes: Sequence[DeviceMesh]) -> DeviceMesh:
    from ._device_mesh import DeviceMesh  # it imports this module

    meshes = as_tuple(meshes, "device_mesh_list", "a list of meshes", DeviceMesh)
    if not meshes:
        raise UnknownAxis("concatenate needs at least one mesh")
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
        axes += _axes_of(mesh)
    _check_overlap(names, axes, where="a concatenated mesh")
    check_names(names, len(names))
    return _derive(first, axes, names)


def _check_overlap(names: Sequence[str], axes: Sequence[_Axis], *, where: str) -> None:
    if _layout_of(axes).check_orthogonal():
        return
    number = next(n for n in range(len(axes)) if not _layout_of(axes[: n + 1]).check_orthogonal())
    raise InvalidMesh(
        f"axis {names[number]!r} overlaps with {_format_names(names[:number])} in {where}"
    )


def _derive(mesh: DeviceMesh, axes: Sequence[_Axis], names: Sequence[str]) -> DeviceMesh:
    options = tuple([options for _, options in axes])
    return mesh._make(mesh._root_state, _layout_of(axes), tuple(names), options)


def _axes_of(mesh: DeviceMesh) -> list[_Axis]:
    return list(zip(mesh._layout, mesh._options, strict=True))


def _layout_of(axes: Sequence[_Axis]) -> MeshLayout:
    return MeshLayout([layout for layout, _ in axes])


def _format_names(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names)) or "none"
