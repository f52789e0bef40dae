"""The device mesh: ranks with coordinates, and a process group per axis on first use.

`DeviceMesh` has the names and semantics of torch's. It stores a layout and a `RootState`, which
all meshes derived from one root share. `init_device_mesh`, `from_groups` and unpickling construct
root meshes; derived meshes come from `_submesh`.

No constructor communicates, except that `init_device_mesh` forms the base group where there is
none. Groups of axes are formed by `get_group`, by the members of that group only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import _disable_current_modes

from ..errors import InvalidMesh, InvalidType
from ..groups._subgroups import (
    DEFAULT_OPTIONS,
    GroupOptions,
    ParentGroup,
    default_parent_group,
    parent_group,
    resolve_group,
)
from . import _submesh
from ._arguments import (
    Override,
    Overrides,
    as_range,
    check_device_type,
    check_names,
    check_ranks,
    check_shape,
    parse_overrides,
    read_ranks,
)
from ._mesh_env import _mesh_resources
from ._root_state import RootState, init_root_mesh
from .layout import MeshLayout

if TYPE_CHECKING:
    from types import TracebackType

    from torch.distributed.device_mesh import DeviceMesh as TorchMesh


class DeviceMesh:
    """Ranks in an array of one or more axes, as layouts that cost the same for any number of them.

    `mesh` is an array of ranks of `group`. Axes are numbered, and have names if `mesh_dim_names`
    gives them. See `init_device_mesh` for the other arguments, and to make one by shape.
    """

    def __init__(
        self,
        device_type: str,
        mesh: Any = None,
        *,
        mesh_dim_names: tuple[str, ...] | None = None,
        backend_override: Overrides | None = None,
        group: dist.ProcessGroup | None = None,
        _init_backend: bool = True,
        _rank: int | None = None,
    ) -> None:
        if mesh is None:
            raise InvalidType("mesh is missing: give an array of ranks, or use init_device_mesh")
        sizes, ranks = read_ranks(mesh)
        names = check_names(mesh_dim_names or None, len(sizes))
        check_device_type(device_type)
        options = parse_overrides(backend_override, len(sizes), names)
        base: ParentGroup | None = None
        if group is not None or _init_backend:
            base = default_parent_group(device_type) if group is None else parent_group(group)
        check_ranks(ranks, size=None if base is None else base.size)
        init_root_mesh(
            self,
            RootState(device_type, ranks, base=base, rank=_rank),
            MeshLayout.from_sizes_strides(sizes),
            names,
            options,
        )

    def _set_state(
        self,
        family: RootState,
        layout: MeshLayout,
        names: tuple[str, ...] | None,
        options: tuple[GroupOptions, ...],
    ) -> None:
        self._root_state = family
        self._layout = layout
        self._names = names
        self._options = options
        self._groups: dict[int | str | None, dist.ProcessGroup] = {}
        self._tensor: torch.Tensor | None = None
        self._hash: int | None = None

    def _derive(
        self, layout: MeshLayout, names: tuple[str, ...], options: tuple[GroupOptions, ...]
    ) -> DeviceMesh:
        """Return another mesh of the same family."""
        mesh = DeviceMesh.__new__(DeviceMesh)
        mesh._set_state(self._root_state, layout, names, options)
        return mesh

    # -- what it is ------------------------------------------------------------------------

    @property
    def device_type(self) -> str:
        """Tell the type of the ranks' devices."""
        return self._root_state.device_type

    @property
    def mesh_dim_names(self) -> tuple[str, ...] | None:
        """Tell the names of the axes, if they have any."""
        return self._names

    @property
    def ndim(self) -> int:
        """Tell how many axes there are."""
        return len(self._layout)

    @property
    def shape(self) -> tuple[int, ...]:
        """Tell the size of every axis."""
        return self._layout.top_level_sizes

    @property
    def layout(self) -> MeshLayout:
        """Tell where its ranks are among those of the root mesh."""
        return self._layout

    @property
    def group(self) -> dist.ProcessGroup | None:
        """Tell the group whose ranks the mesh is made of."""
        base = self._root_state.base
        return None if base is None else base.group

    def size(self, mesh_dim: int | str | None = None) -> int:
        """Return the number of ranks, or the size of one axis."""
        if mesh_dim is None:
            return self._layout.numel()
        return self._layout[_submesh.find_axis(self, mesh_dim)].numel()

    @property
    def mesh(self) -> torch.Tensor:
        """The ranks, as an array of the mesh's shape; made when it is first asked for.

        That of a slice holds the ranks that share this rank's place on the other axes.
        """
        if self._tensor is None:
            with _disable_current_modes():
                self._tensor = self._root_state.tensor(self._layout)
        return self._tensor

    def get_rank(self) -> int:
        """Return this rank, in the group that the mesh is made on."""
        return self._root_state.rank

    def get_coordinate(self) -> tuple[int, ...] | None:
        """Return this rank's place on every axis, or None if it is not in the mesh."""
        position = self._root_state.position
        return None if position is None else self._layout.locate(position)[1]

    def get_local_rank(self, mesh_dim: int | str | None = None) -> int:
        """Return this rank's place on one axis."""
        flattened = self._flattened(mesh_dim)
        if flattened is not None:
            return flattened.get_local_rank()
        axis = self._require_single_axis("get_local_rank") if mesh_dim is None else mesh_dim
        number = _submesh.find_axis(self, axis)
        position = self._root_state.require_position("it has no place on its axes")
        return self._layout.locate(position)[1][number]

    def _require_single_axis(self, method: str) -> int:
        if self.ndim != 1:
            raise InvalidMesh(f"{self} has {self.ndim} axes: tell {method} which one is meant")
        return 0

    def __repr__(self) -> str:
        names = self._names or (None,) * self.ndim
        axes = ", ".join(
            f"{size}" if name is None else f"{name}={size}"
            for name, size in zip(names, self.shape, strict=True)
        )
        place = self.get_coordinate()
        told = "not in it" if place is None else f"at {place}"
        size = self.size()
        of = f"{size} rank{'s' if size > 1 else ''}"
        return f"DeviceMesh(({axes}), {self.device_type!r}, {of}, rank {self.get_rank()} {told})"

    # -- groups ----------------------------------------------------------------------------

    def get_group(self, mesh_dim: int | str | None = None) -> dist.ProcessGroup:
        """Return this rank's group along an axis; the first call makes it, with its other members.

        Nobody else takes part. Meshes whose axes have the same ranks and options share a group.
        """
        try:
            return self._groups[mesh_dim]
        except (KeyError, TypeError):
            return self._find_group(mesh_dim)

    def _find_group(self, mesh_dim: int | str | None) -> dist.ProcessGroup:
        groups = self._root_state.groups
        era = groups.era
        flattened = self._flattened(mesh_dim)
        if flattened is not None:
            group = flattened.get_group()
        else:
            axis = self._require_single_axis("get_group") if mesh_dim is None else mesh_dim
            number = _submesh.find_axis(self, axis)
            name = self._names[number] if self._names else str(number)
            desc = f"mesh_{name}" if self._names else f"mesh_dim_{number}"
            group = self._root_state.make_group(
                self._layout[number], name, self._options[number], desc=desc
            )
        groups.keep(self, lambda: self._groups.update({mesh_dim: group}), era=era)
        return group

    def _flattened(self, mesh_dim: int | str | None) -> DeviceMesh | None:
        """Return the flattened mesh of that name, unless an axis of this one has it."""
        if not isinstance(mesh_dim, str) or mesh_dim in (self._names or ()):
            return None
        return self._root_state.flattened.get(mesh_dim)

    def let_go(self) -> None:
        """Forget which groups were found for the axes; the next call of `get_group` looks again."""
        self._groups.clear()

    def get_all_groups(self) -> list[dist.ProcessGroup]:
        """Return this rank's groups along all axes."""
        return [self.get_group(axis) for axis in range(self.ndim)]

    def shutdown(self) -> None:
        """End this rank's part in all groups that were made for meshes on the same group.

        The group itself goes on, and so do groups that meshes were made of. An axis that is used
        again gets a new group.
        """
        self._root_state.groups.shutdown()

    @staticmethod
    def from_group(
        group: dist.ProcessGroup | list[dist.ProcessGroup],
        device_type: str,
        mesh: Any = None,
        *,
        mesh_dim_names: tuple[str, ...] | None = None,
    ) -> DeviceMesh:
        """Make a mesh whose axes have groups that are there already: one each.

        Several groups need names and an array of global ranks, which one group needs not.
        """

        return from_groups(group, device_type, mesh, names=mesh_dim_names)

    # -- meshes out of this one ------------------------------------------------------------

    def __getitem__(self, mesh_dim_names: str | tuple[str, ...]) -> DeviceMesh:
        return _submesh.slice_mesh(self, mesh_dim_names)

    def flatten(
        self, mesh_dim_name: str | None = None, backend_override: Override | None = None
    ) -> DeviceMesh:
        """Return a mesh of one axis with the ranks of all; the root knows it by its name.

        The name is by default that of all axes, with underscores between them.
        """
        return _submesh.flatten(self, mesh_dim_name, backend_override)

    def unflatten(
        self,
        dim: int | str,
        mesh_sizes: tuple[int, ...],
        mesh_dim_names: tuple[str, ...],
        backend_override: Overrides | None = None,
    ) -> DeviceMesh:
        """Return a mesh with several axes in place of one; the last of them runs fastest."""
        return _submesh.unflatten(self, dim, mesh_sizes, mesh_dim_names, backend_override)

    @staticmethod
    def concatenate(device_mesh_list: list[DeviceMesh]) -> DeviceMesh:
        """Return a mesh with the axes of several meshes of one root, in this order."""
        return _submesh.concatenate(device_mesh_list)

    def get_root_mesh(self) -> DeviceMesh:
        """Return the mesh that this one was derived from: itself if from none."""
        return self._root_state.root

    def get_root_mesh_dim(self) -> int | None:
        """Return which axis of the root mesh the only axis of this one is."""
        if self._names is None:
            return None
        self._require_single_axis("get_root_mesh_dim")
        return _submesh.find_axis(self._root_state.root, self._names[0])

    def get_mesh_dim_by_name(self, mesh_dim_name: str) -> int:
        """Return the number of the axis of that name."""
        return _submesh.find_axis(self, str(mesh_dim_name))

    def get_slice_mesh_layout(self, mesh_dim_names: tuple[str, ...]) -> MeshLayout:
        """Return the layout that a slice by these names has."""
        return _submesh.slice_layout(self, mesh_dim_names)

    def get_all_submeshes(self, mesh_dim_name: str) -> list[DeviceMesh]:
        """Return the meshes along one axis, for all ranks of the root: one for each group."""

        return submeshes_along(self, self.get_mesh_dim_by_name(mesh_dim_name))

    # -- as an object ----------------------------------------------------------------------

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, DeviceMesh):
            return NotImplemented
        family, theirs = self._root_state, other._root_state
        return (
            self._names == other._names
            and self._layout == other._layout
            and (family is theirs or family.is_equivalent(theirs))
        )

    def __hash__(self) -> int:
        if self._hash is None:
            family = self._root_state
            self._hash = hash((self._layout, self._names, family.device_type, family.ranks))
        return self._hash

    def __enter__(self) -> DeviceMesh:
        _mesh_resources.mesh_stack.append(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        _mesh_resources.mesh_stack.pop()

    def __reduce__(self) -> tuple[Any, ...]:

        return reduce_mesh(self)

    def draw(self, *, ranks_per_host: int | None = None, svg: bool = False) -> str:
        """Return a picture of axes, hosts and this rank: as text, or as SVG."""
        from . import _drawing  # pictures are rarely wanted

        family = self._root_state
        start = 0 if family.position is None else self._layout.locate(family.position)[0]
        return (_drawing.svg if svg else _drawing.text)(
            self._layout,
            names=self._names,
            rank=None if family.position is None else family.rank,
            ranks_per_host=ranks_per_host,
            start=start,
            rank_map=family.ranks,
        )

    def _repr_html_(self) -> str:
        return self.draw(svg=True)

    def to_torch(self, *, as_default: bool = False) -> TorchMesh:
        """Return torch's mesh of the same ranks with the same groups, for DTensor and FSDP2.

        All ranks of the mesh call it, for it makes the groups of all axes. Meshes of one root
        become meshes of one root. DTensor wants a default group: `as_default` makes the mesh's
        group that where torch has none.
        """
        from ._torch_interop import to_torch

        return to_torch(self, as_default=as_default)

    @staticmethod
    def from_torch(mesh: TorchMesh) -> DeviceMesh:
        """Return a mesh of the ranks of torch's mesh, with the groups that it has."""
        from ._torch_interop import from_torch

        return from_torch(mesh)

    _get_root_mesh = get_root_mesh
    _get_root_mesh_dim = get_root_mesh_dim
    _get_mesh_dim_by_name = get_mesh_dim_by_name
    _get_slice_mesh_layout = get_slice_mesh_layout
    _get_all_submeshes = get_all_submeshes
    _flatten = flatten
    _unflatten = unflatten
    _concatenate = concatenate


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
    options = parse_overrides(backend_override, len(sizes), names)
    layout = MeshLayout.from_sizes_strides(sizes)
    base = default_parent_group(device_type) if group is None else parent_group(group)
    ranks = range(layout.numel())
    check_ranks(ranks, size=base.size)
    return init_root_mesh(
        uninitialized_mesh(), RootState(device_type, ranks, base=base), layout, names, options
    )


def uninitialized_mesh() -> DeviceMesh:
    """Return a mesh that is yet to be one."""
    return DeviceMesh.__new__(DeviceMesh)


def submeshes_along(mesh: DeviceMesh, axis: int) -> list[DeviceMesh]:
    """Return a mesh of its own for each group along an axis, also for those of other ranks."""
    family, options = mesh._root_state, (mesh._options[axis],)
    names = None if mesh.mesh_dim_names is None else (mesh.mesh_dim_names[axis],)
    layout = MeshLayout.from_sizes_strides((mesh.size(axis),))
    return [
        init_root_mesh(
            uninitialized_mesh(),
            family.part(family.ranks_at(each)),
            layout,
            names,
            options,
            noted=False,
        )
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
        return _from_single_group(groups, device_type, mesh, names)
    groups = _check_groups(groups)
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
    family = RootState(device_type, ranks, base=base, rank=members[groups[0].rank()])
    options = (DEFAULT_OPTIONS,) * len(sizes)
    made = init_root_mesh(
        uninitialized_mesh(), family, MeshLayout.from_sizes_strides(sizes), names, options
    )
    for axis, group in enumerate(groups):
        set_axis_group(made, axis, group)
    return made


def _check_groups(groups: Sequence[dist.ProcessGroup]) -> list[dist.ProcessGroup]:
    try:
        several = list(groups)
    except TypeError:
        raise InvalidType(f"from_group takes a group or a list of groups, not {groups!r}") from None
    for each in several:
        if not isinstance(each, dist.ProcessGroup):
            raise InvalidType(f"from_group takes a list of groups, not of {each!r}")
    return several


def _from_single_group(
    group: dist.ProcessGroup, device_type: str, mesh: Any, names: tuple[str, ...] | None
) -> DeviceMesh:
    members = as_range(dist.get_process_group_ranks(group))
    if mesh is not None and read_ranks(mesh) != ((len(members),), members):
        given = mesh.tolist() if isinstance(mesh, torch.Tensor) else mesh
        raise InvalidMesh(f"mesh {given} does not fit a group of the ranks {list(members)}")
    names = check_names(names, 1)
    family = RootState(device_type, members, base=parent_group(group), numbers=members)
    layout = MeshLayout.from_sizes_strides((len(members),))
    family.given[members] = group
    return init_root_mesh(uninitialized_mesh(), family, layout, names, (DEFAULT_OPTIONS,))


def set_axis_group(mesh: DeviceMesh, axis: int, group: dist.ProcessGroup) -> None:
    """Make a group that of an axis, for this mesh and its slices."""
    family, name = mesh._root_state, (mesh.mesh_dim_names or {axis: str(axis)})[axis]
    position = family.require_position(f"it has no group along axis {name!r}")
    ranks = family.ranks_at(mesh._layout[axis].group_of(position))
    members = as_range(dist.get_process_group_ranks(group))
    if ranks != members:
        raise InvalidMesh(
            f"axis {name!r} has the ranks {list(ranks)} here, and its group {list(members)}"
        )
    family.given[ranks] = group


# -- from a pickle -------------------------------------------------------------------------


def reduce_mesh(mesh: DeviceMesh) -> tuple[Any, ...]:
    """Return how to make a mesh again, as `pickle` wants it: on groups of the same names there."""
    family, base = mesh._root_state, mesh._root_state.base
    options = _picklable_options(mesh._options)
    if mesh is not family.root:
        return _unpickle_submesh, (family.root, mesh._layout, mesh._names, options)
    flattened = [
        (name, flat._layout, _picklable_options(flat._options))
        for name, flat in family.flattened.items()
    ]
    known = _PickledRoot(
        family.device_type,
        family.ranks,
        family.rank,
        family.numbers,
        group=None if base is None else (base.group.group_name, base.size),
        given=[(ranks, group.group_name) for ranks, group in family.given.items()],
    )
    return _unpickle_root, (known, mesh._layout, mesh._names, options, flattened)


@dataclass(frozen=True)
class _PickledRoot:
    """What a pickle has of a family, with groups as the names by which torch knows them."""

    device_type: str
    ranks: Sequence[int]
    rank: int
    numbers: Sequence[int] | None
    group: tuple[str, int] | None
    given: list[tuple[Sequence[int], str]]

    def family(self) -> RootState:
        """Make the family again, with such of its groups as are known here."""
        name, size = self.group or ("", 0)
        group = resolve_group(name)
        base = parent_group(group) if group is not None and group.size() == size else None
        rank = self.rank if base is None else None
        made = RootState(self.device_type, self.ranks, base=base, rank=rank, numbers=self.numbers)
        for ranks, name in self.given:
            group = resolve_group(name)
            if group is not None and as_range(dist.get_process_group_ranks(group)) == ranks:
                made.given[ranks] = group
        return made


def _picklable_options(options: tuple[GroupOptions, ...]) -> tuple[GroupOptions, ...]:
    """Leave out torch's own options, which cannot be pickled."""
    return tuple(replace(each, native=None) for each in options)


def _unpickle_root(
    known: _PickledRoot,
    layout: MeshLayout,
    names: tuple[str, ...] | None,
    options: tuple[GroupOptions, ...],
    flattened: list[tuple[str, MeshLayout, tuple[GroupOptions, ...]]],
) -> DeviceMesh:
    family = known.family()
    mesh = init_root_mesh(uninitialized_mesh(), family, layout, names, options)
    for name, flat, its_options in flattened:
        family.flattened[name] = mesh._derive(flat, (name,), its_options)
    return mesh


def _unpickle_submesh(
    root: DeviceMesh,
    layout: MeshLayout,
    names: tuple[str, ...],
    options: tuple[GroupOptions, ...],
) -> DeviceMesh:
    mesh = root._derive(layout, names, options)
    flattened = root._root_state.flattened.get(names[0]) if len(names) == 1 else None
    return flattened if flattened == mesh and flattened is not None else mesh
