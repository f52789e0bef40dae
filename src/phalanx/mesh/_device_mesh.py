"""The device mesh: ranks with coordinates, and a process group per axis on first use.

`DeviceMesh` has the names and semantics of torch's class, and derives from it so that torch's code
accepts it. It never runs torch's constructor, which builds a map of all ranks and forms every
group. A mesh stores a layout and a `RootState`, which all meshes derived from one root share.

No constructor communicates, except that `init_device_mesh` forms the base group where there is
none. Groups of axes are formed by `get_group`, by the members of that group only.

While torch's compiler traces, an object with the attributes of torch's class stands for a mesh; it
passes for one, but lacks what is ours (`_without_proxy`).

Code that compares exact types needs a mesh of torch's own class, which `to_torch` gives our layout
and groups, so no group is formed twice. Meshes of one root stay meshes of one root, since torch
compares roots.

Slices, flattened, unflattened and concatenated meshes are layout arithmetic: they form no group,
do not communicate, and cost the same for any number of ranks. Where axes have no names, they raise
`InvalidState` or `InvalidType`, whichever derives from what torch raises there.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from datetime import timedelta
from types import ModuleType
from typing import Any, NoReturn

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch.distributed import _mesh_layout
from torch.distributed.device_mesh import DeviceMesh as TorchMesh
from torch.distributed.distributed_c10d import GroupName
from torch.utils._python_dispatch import _disable_current_modes

from ..env import read_rank_env
from ..errors import InvalidArgument, InvalidMesh, InvalidState, InvalidType, UnknownAxis
from ..groups._call_site import warn_user
from ..groups._current_group import default_group
from ..groups._parent_group import (
    DEFAULT_OPTIONS,
    GroupOptions,
    ParentGroup,
    default_parent_group,
    parent_group,
    resolve_group,
)
from ._arguments import (
    Override,
    Overrides,
    as_range,
    as_tuple,
    check_device_type,
    check_names,
    check_ranks,
    check_shape,
    find_axis,
    parse_override,
    parse_overrides,
    read_ranks,
)
from ._axis_groups import RootKey
from ._root_state import RootState
from .layout import FlatLayout, MeshLayout, format_axes

_Names = tuple[str, ...] | None
_Options = tuple[GroupOptions, ...]
_Axis = tuple[FlatLayout, GroupOptions]


class _MeshEnv(threading.local):
    """The meshes that a thread has entered by ``with``."""

    def __init__(self) -> None:
        self.mesh_stack: list[DeviceMesh] = []

    def get_current_mesh(self) -> DeviceMesh:
        """Return the mesh that this thread entered last."""
        if not self.mesh_stack:
            raise InvalidState("this thread has entered no mesh: use `with mesh:`")
        return self.mesh_stack[-1]

    def get_root_mesh(self, device_mesh: DeviceMesh) -> DeviceMesh:
        """Return the mesh that a mesh was derived from."""
        return device_mesh.get_root_mesh()

    def _get_all_submeshes(self, device_mesh: DeviceMesh, mesh_dim_name: str) -> list[DeviceMesh]:
        return device_mesh.get_all_submeshes(mesh_dim_name)

    @staticmethod
    def num_devices_per_host(device_type: str) -> int:
        """Return the number of devices of a type on this machine."""
        module = device_module(device_type)
        if module is None:
            raise InvalidState(f"torch has no devices of type {device_type!r} on this machine")
        return int(module.device_count())

    @staticmethod
    def num_hosts(device_type: str) -> int:
        """Return the number of machines, if all have as many devices as this one."""
        group = default_group()
        world_size = read_rank_env().world_size if group is None else group.size()
        return world_size // _MeshEnv.num_devices_per_host(device_type)


_mesh_resources = _MeshEnv()


def device_module(device_type: str) -> ModuleType | None:
    module = getattr(torch, device_type, None)
    return module if hasattr(module, "device_count") else None


def choose_device(device_type: str, base: ParentGroup) -> None:
    """Select the device of this rank, unless the program has used one of that type already.

    It is ``LOCAL_RANK`` if the launcher sets that. Otherwise all machines are assumed to have the
    same number of devices.
    """
    module = device_module(device_type)
    if device_type == "cpu" or module is None or not base.talks or module.is_initialized():
        return
    count = module.device_count()
    if count == 0:
        return
    if "LOCAL_RANK" in os.environ:
        module.set_device(int(os.environ["LOCAL_RANK"]))
        return
    if base.size > count and base.size % count:
        raise InvalidMesh(
            f"cannot choose a device: {base.size} ranks do not divide among machines with {count} "
            f"devices of type {device_type!r}. Hint: set LOCAL_RANK, or choose a device first."
        )
    chosen = base.rank % count
    warn_user(
        f"rank {base.rank} has chosen no device and LOCAL_RANK is not set: using "
        f"{device_type}:{chosen}. Choose a device before making a mesh, or use a launcher"
    )
    module.set_device(chosen)


def _unsupported(name: str) -> Callable[..., NoReturn]:
    def method(self: DeviceMesh, *_: Any, **__: Any) -> NoReturn:
        raise InvalidState(f"DeviceMesh.{name} is internal to torch's mesh; {self} has none")

    method.__name__ = name
    return method


class DeviceMesh(TorchMesh):
    """An array of ranks with one or more axes, stored as a layout of constant size.

    `mesh` is an array of ranks of `group`. Axes are numbered, and have names if `mesh_dim_names`
    is given. See `init_device_mesh` for the other arguments, and to make a mesh by its shape.
    """

    # Inherited, since they read only what this class sets: device_type, mesh_dim_names, ndim,
    # shape, get_coordinate and get_all_groups.

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
        _shape: tuple[int, ...] | None = None,
    ) -> None:
        ranks: Sequence[int]
        if _shape is not None:
            sizes, ranks = _shape, range(math.prod(_shape))
        elif mesh is not None:
            sizes, ranks = read_ranks(mesh)
            mesh_dim_names = mesh_dim_names or None
        else:
            raise InvalidType("mesh is missing: pass an array of ranks, or use init_device_mesh")
        names = check_names(mesh_dim_names, len(sizes))
        check_device_type(device_type)
        options = parse_overrides(backend_override, len(sizes), names)
        base: ParentGroup | None = None
        if group is not None or _init_backend:
            base = default_parent_group(device_type) if group is None else parent_group(group)
        check_ranks(ranks, size=None if base is None else base.size)
        state = RootState(device_type, ranks, base=base, own_rank=_rank)
        self._set_state(state, MeshLayout.from_sizes_strides(sizes), names, options)
        self._become_root()

    @staticmethod
    def _make(
        state: RootState, layout: MeshLayout, names: _Names, options: _Options | None = None
    ) -> DeviceMesh:
        """Make a mesh of `state`: the root if it has none yet."""
        mesh = DeviceMesh.__new__(DeviceMesh)
        mesh._set_state(state, layout, names, options or (DEFAULT_OPTIONS,) * len(layout))
        if state.root is None:
            mesh._become_root()
        return mesh

    def _set_state(
        self, state: RootState, layout: MeshLayout, names: _Names, options: _Options
    ) -> None:
        self._root_state = state
        self._root_mesh: DeviceMesh | None = state.root  # None in the root itself
        self._thread_id = state.thread_id
        self._device_type = state.device_type
        self._rank = state.rank
        self._flatten_mapping: dict[str, DeviceMesh] = state.flattened  # type: ignore[assignment]
        self._layout: MeshLayout = layout  # type: ignore[assignment]
        self._mesh_dim_names = names
        self._options = options
        self._groups: dict[int | str | None, dist.ProcessGroup] = {}
        self._tensor: torch.Tensor | None = None
        self._hash: int | None = None

    def _become_root(self) -> None:
        state = self._root_state
        if state.base is not None:
            for each in self._options:
                if each is not DEFAULT_OPTIONS:
                    state.base.check(each)
            choose_device(state.device_type, state.base)
        state.root = self
        state.root_key = RootKey(
            state.device_type, self._mesh_dim_names, self._layout, state.base_ranks(state.ranks)
        )
        if state.is_registered:
            state.groups.registry.add(state.root_key)

    # -- shape and coordinates -------------------------------------------------------------

    @property
    def layout(self) -> MeshLayout:
        """The positions of the ranks among those of the root mesh."""
        return self._layout

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The group whose ranks the mesh consists of."""
        base = self._root_state.base
        return None if base is None else base.group

    def size(self, mesh_dim: int | str | None = None) -> int:
        """Return the number of ranks, or the size of one axis."""
        if mesh_dim is None:
            return self._layout.numel()
        return self._layout[self._axis_number(mesh_dim)].numel()

    @property
    def mesh(self) -> torch.Tensor:
        """The ranks as an array of the mesh's shape, built on first access.

        For a slice: the ranks that share this rank's coordinates on the other axes.
        """
        if self._tensor is None:
            with _disable_current_modes():
                self._tensor = self._root_state.tensor(self._layout)
        return self._tensor

    def get_rank(self) -> int:
        """Return this rank in the group that the mesh is made on."""
        return self._root_state.rank

    def get_local_rank(self, mesh_dim: int | str | None = None) -> int:
        """Return this rank's coordinate on one axis."""
        flattened = self._flattened(mesh_dim)
        if flattened is not None:
            return flattened.get_local_rank()
        axis = self._require_single_axis("get_local_rank") if mesh_dim is None else mesh_dim
        number = self._axis_number(axis)
        position = self._root_state.require_position("it has no coordinate")
        return self._layout.locate(position)[1][number]

    def _axis_number(self, axis: int | str) -> int:
        return find_axis(axis, self._mesh_dim_names, ndim=self.ndim, mesh=self)

    def _require_single_axis(self, method: str) -> int:
        if self.ndim != 1:
            raise InvalidMesh(f"{method} needs an axis: {self} has {self.ndim} axes")
        return 0

    def __repr__(self) -> str:
        coordinate = self.get_coordinate()
        where = "not in it" if coordinate is None else f"at {coordinate}"
        size = self.size()
        return (
            f"DeviceMesh(({format_axes(self._mesh_dim_names, self.shape)}), {self.device_type!r}, "
            f"{size} rank{'s' if size > 1 else ''}, rank {self.get_rank()} {where})"
        )

    # -- groups ----------------------------------------------------------------------------

    def get_group(self, mesh_dim: int | str | None = None) -> dist.ProcessGroup:
        """Return this rank's group along an axis; the first call forms it with its other members.

        No other rank takes part. Meshes whose axes have the same ranks and options share a group.
        """
        if torch.compiler.is_compiling():
            # The compiler traces this call, and lets it read what torch's own mesh has.
            return TorchMesh.get_group(self, mesh_dim)
        return self._get_or_form_group(mesh_dim)

    def _get_or_form_group(self, mesh_dim: int | str | None) -> dist.ProcessGroup:
        known = self._groups.get(mesh_dim)
        if known is not None:
            return known
        groups = self._root_state.groups
        generation = groups.generation
        flattened = self._flattened(mesh_dim)
        if flattened is not None:
            group = flattened._get_or_form_group(None)
        else:
            axis = self._require_single_axis("get_group") if mesh_dim is None else mesh_dim
            number = self._axis_number(axis)
            names = self._mesh_dim_names
            group = self._root_state.axis_group(
                self._layout[number],
                names[number] if names else str(number),
                self._options[number],
                desc=f"mesh_{names[number]}" if names else f"mesh_dim_{number}",
            )
        groups.cache_in(self, mesh_dim, group, generation=generation)
        return group

    def _flattened(self, mesh_dim: int | str | None) -> DeviceMesh | None:
        """Return the flattened mesh of that name, unless an axis of this mesh has it."""
        if not isinstance(mesh_dim, str) or mesh_dim in (self._mesh_dim_names or ()):
            return None
        return self._root_state.flattened.get(mesh_dim)

    def _set_axis_group(self, axis: int, group: dist.ProcessGroup) -> None:
        """Use an existing group for an axis, in this mesh and its slices."""
        state = self._root_state
        name = self._mesh_dim_names[axis] if self._mesh_dim_names else str(axis)
        ranks = state.axis_ranks(self._layout[axis], name)
        members = as_range(dist.get_process_group_ranks(group))
        if ranks != members:
            raise InvalidMesh(
                f"axis {name!r} of rank {state.rank} has ranks {list(ranks)}, but the group "
                f"given for it has {list(members)}"
            )
        state.provided_groups[ranks, name] = group

    def shutdown(self) -> None:
        """Shut down this rank's part in all groups formed for meshes on the same base group.

        The base group and groups passed to `from_group` continue. An axis that is used again gets
        a new group.
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
        """Make a mesh from existing groups, one for each axis.

        A list of groups needs `mesh`, an array of global ranks, and `mesh_dim_names`.
        """
        check_device_type(device_type)
        if isinstance(group, dist.ProcessGroup):
            members = as_range(dist.get_process_group_ranks(group))
            if mesh is not None and read_ranks(mesh) != ((len(members),), members):
                given = mesh.tolist() if isinstance(mesh, torch.Tensor) else mesh
                raise InvalidMesh(f"mesh {given} differs from the group's ranks, {list(members)}")
            names = check_names(mesh_dim_names, 1)
            state = RootState(
                device_type, members, base=parent_group(group), base_global_ranks=members
            )
            made = DeviceMesh._make(state, MeshLayout.from_sizes_strides((len(members),)), names)
            made._set_axis_group(0, group)
            return made
        groups = list(as_tuple(group, "group", "a group or a list of groups", dist.ProcessGroup))
        for value, name in ((groups, "group"), (mesh, "mesh"), (mesh_dim_names, "mesh_dim_names")):
            if value is None or value == []:
                raise InvalidMesh(f"{name} is missing: a list of groups needs mesh and names")
        sizes, ranks = read_ranks(mesh)
        if len(sizes) != len(groups):
            raise InvalidMesh(f"mesh {sizes} has {len(sizes)} axes for {len(groups)} groups")
        names = check_names(mesh_dim_names, len(sizes))
        check_ranks(ranks, size=None)
        rank = dist.get_process_group_ranks(groups[0])[groups[0].rank()]
        world = dist.group.WORLD if dist.is_initialized() else None
        base = None if world is None else parent_group(world)
        state = RootState(device_type, ranks, base=base, own_rank=rank)
        made = DeviceMesh._make(state, MeshLayout.from_sizes_strides(sizes), names)
        for axis, each in enumerate(groups):
            made._set_axis_group(axis, each)
        return made

    # -- derived meshes --------------------------------------------------------------------

    def __getitem__(self, mesh_dim_names: str | tuple[str, ...]) -> DeviceMesh:
        """Return a mesh of some axes by name. Those of a root may be flattened ones."""
        names = self._mesh_dim_names
        wanted = (mesh_dim_names,) if isinstance(mesh_dim_names, str) else mesh_dim_names
        if not names:
            raise InvalidState(f"{self} cannot be sliced: its axes have no names")
        if wanted == names:
            return self
        wanted = as_tuple(wanted, "a slice", "names of axes")
        known = dict(zip(names, self._axes(), strict=True))
        if self._root_mesh is None:
            known |= {name: flat._axes()[0] for name, flat in self._root_state.flattened.items()}
        for name in wanted:
            find_axis(name, tuple(known), ndim=0, mesh=self)
        axes = [known[name] for name in wanted]
        twice = [name for name in wanted if wanted.count(name) > 1]
        if twice:
            raise InvalidMesh(f"slice {wanted} of {self} has axis {twice[0]!r} more than once")
        if not _layout_of(axes).check_sorted():
            raise UnknownAxis(
                f"slice {wanted} of {self} is not in the order of its axes, "
                f"{_format_names(names)}. Hint: concatenate() takes any order."
            )
        _check_overlap(wanted, axes, where=f"a slice of {self}")
        return self._derive(axes, wanted)

    def flatten(
        self, mesh_dim_name: str | None = None, backend_override: Override | None = None
    ) -> DeviceMesh:
        """Return a mesh of one axis with all ranks; the root can be sliced by its name.

        The default name is the names of all axes, joined by underscores.
        """
        names, state = self._mesh_dim_names, self._root_state
        if not names:
            raise InvalidState(f"{self} cannot be flattened: its axes have no names")
        if mesh_dim_name is not None and not isinstance(mesh_dim_name, str):
            raise InvalidType(f"mesh_dim_name must be a string, got {mesh_dim_name!r}")
        name = mesh_dim_name or "_".join(names)
        if (name,) == names:
            return self
        layout = self._layout.flatten()
        options = (parse_override(backend_override),)
        self._check_name_is_free(name, layout[0])
        known = state.flattened.get(name)
        if known is None:
            made = DeviceMesh._make(state, layout, (name,), options)
            known = state.flattened.setdefault(name, made)
            state.groups.registry.record_axes(state.root_key, (name,), layout)
        if known._layout != layout or (backend_override is not None and known._options != options):
            raise InvalidMesh(
                f"cannot flatten {self} as {name!r}: {known} has that name and other ranks or "
                "options"
            )
        return known

    def _check_name_is_free(self, name: str, flat: FlatLayout) -> None:
        root, state = self.get_root_mesh(), self._root_state
        own, of_root = self._mesh_dim_names or (), root._mesh_dim_names or ()
        if name in of_root or name in own:
            taken = {*of_root, *own, *state.flattened, *state.unflattened}
            raise InvalidMesh(
                f"{name!r} is already an axis of {root if name in of_root else self}. Names in "
                f"use: {_format_names(sorted(taken))}"
            )
        others = state.unflattened.get(name, set()) - {flat}
        if others:
            raise InvalidMesh(
                f"{name!r} is already an axis of {root}, made by unflatten as {next(iter(others))}"
            )

    def unflatten(
        self,
        dim: int | str,
        mesh_sizes: tuple[int, ...],
        mesh_dim_names: tuple[str, ...],
        backend_override: Overrides | None = None,
    ) -> DeviceMesh:
        """Return a mesh with several axes in place of one; the last of them varies fastest."""
        number, own, state = self._axis_number(dim), self._mesh_dim_names, self._root_state
        if own is None:
            raise InvalidType(f"{self} cannot be unflattened: its axes have no names")
        given: dict[str, object] = {"mesh_sizes": mesh_sizes, "mesh_dim_names": mesh_dim_names}
        for what, value in given.items():
            if isinstance(value, str) or not isinstance(value, Sequence):
                raise InvalidType(f"{what} must be a tuple, got {value!r}")
        sizes, names = tuple(mesh_sizes), tuple(mesh_dim_names)
        axis = self._layout[number]
        if len(sizes) != len(names):
            raise InvalidMesh(
                f"mesh_sizes {sizes} and mesh_dim_names {names} have different lengths"
            )
        if math.prod(sizes) != axis.numel():
            raise InvalidMesh(
                f"axis {own[number]!r} has size {axis.numel()}, but mesh_sizes are {sizes}"
            )
        try:
            parts = axis.composition(MeshLayout.from_sizes_strides(sizes))
        except InvalidArgument as error:
            raise InvalidMesh(f"axis {own[number]!r} cannot become {sizes}: {error}") from error
        options = parse_overrides(backend_override, len(parts), names)
        all_names = (*own[:number], *names, *own[number + 1 :])
        check_names(all_names, len(all_names))
        for name, part in zip(names, parts, strict=True):
            flat = state.flattened.get(name)
            if flat is not None and flat._layout[0] != part:
                raise InvalidMesh(f"{name!r} is already a flattened axis with other ranks, {flat}")
        for name, part in zip(names, parts, strict=True):
            state.unflattened.setdefault(name, set()).add(part)
        state.groups.registry.record_axes(state.root_key, names, parts)
        axes = self._axes()
        axes[number : number + 1] = zip(parts, options, strict=True)
        return self._derive(axes, all_names)

    @staticmethod
    def concatenate(device_mesh_list: list[DeviceMesh]) -> DeviceMesh:
        """Return a mesh with the axes of several meshes of one root, in this order."""
        given = as_tuple(device_mesh_list, "device_mesh_list", "a list of meshes", DeviceMesh)
        meshes: list[DeviceMesh] = [_without_proxy(mesh) for mesh in given]
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
            if mesh._mesh_dim_names is None:
                raise InvalidType(f"{mesh} cannot be concatenated: its axes have no names")
            names += mesh._mesh_dim_names
            axes += mesh._axes()
        _check_overlap(names, axes, where="a concatenated mesh")
        check_names(names, len(names))
        return first._derive(axes, names)

    def _axes(self) -> list[_Axis]:
        return list(zip(self._layout, self._options, strict=True))

    def _derive(self, axes: Sequence[_Axis], names: Sequence[str]) -> DeviceMesh:
        options = tuple([options for _, options in axes])
        return DeviceMesh._make(self._root_state, _layout_of(axes), tuple(names), options)

    def get_root_mesh(self) -> DeviceMesh:
        """Return the mesh that this one was derived from, or itself."""
        return self if self._root_mesh is None else self._root_mesh

    def get_root_mesh_dim(self) -> int | None:
        """Return the number of this mesh's only axis in the root mesh."""
        if self._mesh_dim_names is None:
            return None
        self._require_single_axis("get_root_mesh_dim")
        return self.get_root_mesh()._axis_number(self._mesh_dim_names[0])

    def get_mesh_dim_by_name(self, mesh_dim_name: str) -> int:
        """Return the number of the axis of that name."""
        return self._axis_number(str(mesh_dim_name))

    def get_slice_mesh_layout(self, mesh_dim_names: tuple[str, ...]) -> MeshLayout:
        """Return the layout of a slice by these names."""
        return self[mesh_dim_names]._layout

    def get_all_submeshes(self, mesh_dim_name: str) -> list[DeviceMesh]:
        """Return a mesh for each group along one axis, those of other ranks included."""
        axis, state = self._axis_number(str(mesh_dim_name)), self._root_state
        names = None if self._mesh_dim_names is None else (self._mesh_dim_names[axis],)
        layout = MeshLayout.from_sizes_strides((self.size(axis),))
        meshes = []
        for positions in self._layout[axis].global_ranks(len(state.ranks)):
            part = RootState(
                state.device_type,
                state.ranks_at(positions),
                base=state.base,
                own_rank=state.rank,
                base_global_ranks=state.base_global_ranks,
                is_registered=False,  # before first use, since there may be thousands of them
                provided_groups=state.provided_groups,
            )
            meshes.append(DeviceMesh._make(part, layout, names, (self._options[axis],)))
        return meshes

    # -- identity, pickling, context -------------------------------------------------------

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        other = _without_proxy(other)
        return self is other or (
            isinstance(other, DeviceMesh)
            and self._mesh_dim_names == other._mesh_dim_names
            and self._layout == other._layout
            and self._root_state.is_equivalent(other._root_state)
        )

    def _hash_key(self) -> tuple[Any, ...]:
        state = self._root_state
        return self._layout, self._mesh_dim_names, state.device_type, state.ranks

    def __hash__(self) -> int:
        if self._hash is None:
            self._hash = hash(self._hash_key())
        return self._hash

    # torch's stack too, from which distribute_tensor and others take the mesh. Both are per thread.

    def __enter__(self) -> DeviceMesh:
        super().__enter__()
        _mesh_resources.mesh_stack.append(self)
        return self

    def __exit__(self, *exception: object) -> None:
        _mesh_resources.mesh_stack.pop()
        super().__exit__(*exception)

    def __reduce__(self) -> tuple[Any, ...]:
        state, base = self._root_state, self._root_state.base
        options = _picklable_options(self._options)
        if self._root_mesh is not None:
            return _unpickle_submesh, (self._root_mesh, self._layout, self._mesh_dim_names, options)
        return _unpickle_root, (
            (state.device_type, state.ranks, state.rank, state.base_global_ranks),
            # Groups are pickled as the names under which torch knows them.
            ("", 0) if base is None else (base.group.group_name, base.size),
            [(axis, group.group_name) for axis, group in state.provided_groups.items()],
            (self._layout, self._mesh_dim_names, options),
            [
                (name, flat._layout, _picklable_options(flat._options))
                for name, flat in state.flattened.items()
            ],
        )

    def draw(self, *, ranks_per_host: int | None = None, svg: bool = False) -> str:
        """Draw axes, hosts and this rank, as text or as SVG."""
        from ._drawing import MeshView  # rarely needed

        state = self._root_state
        start = 0 if state.position is None else self._layout.locate(state.position)[0]
        view = MeshView(
            self._layout,
            names=self._mesh_dim_names,
            rank=None if state.position is None else state.rank,
            ranks_per_host=ranks_per_host,
            start=start,
            rank_map=state.ranks,
            svg=svg,
        )
        return view.draw()

    def _repr_html_(self) -> str:
        return self.draw(svg=True)

    # -- torch's mesh ----------------------------------------------------------------------

    def to_torch(self, *, as_default: bool = False) -> TorchMesh:
        """Return a mesh of torch's own class with the same ranks and groups.

        All ranks of the mesh call it, since it forms the groups of all axes. Meshes of one root
        become meshes of one root. DTensor needs a default group: with `as_default` the mesh's
        group becomes torch's default group if there is none.
        """
        state, base, our_root = self._root_state, self._root_state.base, self.get_root_mesh()
        if as_default and not dist.is_initialized():
            if base is None or list(base.global_ranks) != list(range(base.size)):
                raise InvalidState(
                    f"{our_root} cannot provide torch's default group: its group does not have "
                    "all global ranks"
                )
            c10d._update_default_pg(base.group)
        if not dist.is_initialized() and self.size() != len(state.ranks):
            raise InvalidState(
                f"{self} is a slice of {our_root}, and torch's mesh needs a default group to "
                "locate this rank in it. Hint: initialize torch's default group, or pass "
                "as_default=True."
            )
        if state.torch_root is None:
            state.torch_root = our_root._without_groups(root=None)
        root = state.torch_root
        made = root if self is our_root else self._without_groups(root=root)
        made._dim_group_names = list(self._dim_group_names)
        for each in (made, root):
            each._pg_registry.update(self._pg_registry)
        name = (self._mesh_dim_names or ("",))[0]
        if state.flattened.get(name) is self:
            root._flatten_mapping[name] = made
        return made

    def _without_groups(self, *, root: TorchMesh | None) -> TorchMesh:
        base = self._root_state.base
        return TorchMesh(
            self._device_type,
            _layout=_mesh_layout._MeshLayout(
                [_mesh_layout._FlatLayout(axis.shape, axis.stride) for axis in self._layout]
            ),
            _rank_map=self._rank_map if root is None else root._rank_map,
            mesh_dim_names=self._mesh_dim_names,
            _root_mesh=root,
            _init_backend=False,
            _rank=self._rank if base is None else base.global_ranks[base.rank],
        )

    @staticmethod
    def from_torch(mesh: TorchMesh) -> DeviceMesh:
        """Return a mesh with the ranks and groups of torch's mesh."""
        if isinstance(mesh, DeviceMesh):
            return mesh
        if not isinstance(mesh, TorchMesh):
            raise InvalidType(f"from_torch takes a torch DeviceMesh, got {mesh!r}")
        root = mesh._get_root_mesh()
        ranks = as_range(root._rank_map.tolist())
        state = RootState(root.device_type, ranks, base=default_parent_group(root.device_type))
        state.torch_root = root
        made = _with_groups_of(root, state, root.mesh_dim_names)
        for name, flat in root._flatten_mapping.items():
            state.flattened[name] = _with_groups_of(flat, state, (name,))
        return made if mesh is root else _with_groups_of(mesh, state, mesh.mesh_dim_names or ())

    # What torch's code reads from a mesh. Everything is computed on access: nothing of a mesh
    # grows with the number of ranks until torch asks for it. Constructing torch's class does ask.

    @property
    def _rank_map(self) -> torch.Tensor:  # type: ignore[override]
        with _disable_current_modes():
            return torch.tensor(self._flatten_rank_map, dtype=torch.int, device="cpu")

    @property
    def _flatten_rank_map(self) -> tuple[int, ...]:  # type: ignore[override]
        return tuple(self._root_state.global_ranks())

    @property
    def _dim_group_names(self) -> Sequence[GroupName]:  # type: ignore[override]
        names = _AxisGroupNames(self)
        is_complete = all(axis in self._groups for axis in range(len(names)))
        # The compiler traces a list only, and compiles again if it finds anything else later.
        return list(names) if is_complete or torch.compiler.is_compiling() else names

    @property
    def _pg_registry(self) -> dict[str, dist.ProcessGroup]:  # type: ignore[override]
        return self._root_state.groups_by_name

    @property
    def _coordinate_on_dim(self) -> tuple[int, ...] | None:  # type: ignore[override]
        position = self._root_state.position
        return None if position is None else self._layout.locate(position)[1]

    def _compute_coordinate_on_dim(self) -> tuple[int, ...] | None:
        return self._coordinate_on_dim

    _get_root_mesh = get_root_mesh
    _get_root_mesh_dim = get_root_mesh_dim
    _get_mesh_dim_by_name = get_mesh_dim_by_name
    _get_slice_mesh_layout = get_slice_mesh_layout  # type: ignore[assignment]
    _get_all_submeshes = get_all_submeshes  # type: ignore[assignment]
    _flatten = flatten
    _unflatten = unflatten  # type: ignore[assignment]
    _concatenate = concatenate  # type: ignore[assignment]

    # Constructors and state of torch's class, which ours does not have.
    _setup_world_group_and_device = _unsupported("_setup_world_group_and_device")
    _create_sub_mesh = _unsupported("_create_sub_mesh")
    _create_flatten_mesh = _unsupported("_create_flatten_mesh")
    _create_unflatten_mesh = _unsupported("_create_unflatten_mesh")
    __getstate__ = _unsupported("__getstate__")
    __setstate__ = _unsupported("__setstate__")


class _AxisGroupNames(Sequence[GroupName]):
    """The names of the groups along the axes of a mesh. Reading one forms that group only."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self._mesh = mesh

    def __len__(self) -> int:
        return 0 if self._mesh._root_state.position is None else self._mesh.ndim

    def __getitem__(self, axis: Any) -> Any:
        number = range(len(self))[axis]  # raises IndexError
        return GroupName(self._mesh._get_or_form_group(number).group_name)


def init_device_mesh(
    device_type: str,
    mesh_shape: tuple[int, ...],
    *,
    mesh_dim_names: tuple[str, ...] | None = None,
    backend_override: Overrides | None = None,
    group: dist.ProcessGroup | None = None,
) -> DeviceMesh:
    """Make a mesh of ranks 0, 1, 2, ... with the last axis varying fastest.

    The mesh is on `group`; by default on the group that the thread has entered, else torch's
    default group, else a new group of all ranks of the launcher. No group is formed for an axis
    before it is used. `backend_override` sets a backend, options or a timeout for some axes, by
    name or number.
    """
    return DeviceMesh(
        device_type,
        mesh_dim_names=mesh_dim_names,
        backend_override=backend_override,
        group=group,
        _shape=check_shape(mesh_shape),
    )


def _without_proxy(mesh: Any) -> Any:
    """Return the mesh behind the object that stands for it while torch's compiler traces."""
    # It passes for a mesh, but has only the attributes that torch's own mesh has.
    return mesh if type(mesh) is DeviceMesh else getattr(mesh, "real_obj", mesh)


def _check_overlap(names: Sequence[str], axes: Sequence[_Axis], *, where: str) -> None:
    if _layout_of(axes).check_orthogonal():
        return
    number = next(n for n in range(len(axes)) if not _layout_of(axes[: n + 1]).check_orthogonal())
    raise InvalidMesh(
        f"axis {names[number]!r} overlaps with {_format_names(names[:number])} in {where}"
    )


def _layout_of(axes: Sequence[_Axis]) -> MeshLayout:
    return MeshLayout([layout for layout, _ in axes])


def _format_names(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names)) or "none"


def _with_groups_of(mesh: TorchMesh, state: RootState, names: _Names) -> DeviceMesh:
    layout = MeshLayout([FlatLayout(axis.shape, axis.stride) for axis in mesh._layout])
    made = DeviceMesh._make(state, layout, names)
    if state.position is not None and hasattr(mesh, "_dim_group_names"):
        for axis in range(len(layout)):
            made._set_axis_group(axis, mesh.get_group(axis))
    return made


def _picklable_options(options: _Options) -> _Options:
    """Drop torch's own options, which cannot be pickled."""
    return tuple(replace(each, torch_options=None) for each in options)


def _unpickle_root(
    identity: tuple[str, Sequence[int], int, Sequence[int] | None],
    base_group: tuple[str, int],
    provided_groups: list[tuple[tuple[Sequence[int], str], str]],
    mesh_arguments: tuple[MeshLayout, _Names, _Options],
    flattened: list[tuple[str, MeshLayout, _Options]],
) -> DeviceMesh:
    """Make a root mesh with those of its groups that exist in this process."""
    device_type, ranks, rank, base_global_ranks = identity
    name, size = base_group
    group = resolve_group(name)
    base = parent_group(group) if group is not None and group.size() == size else None
    state = RootState(
        device_type,
        ranks,
        base=base,
        own_rank=rank if base is None else None,
        base_global_ranks=base_global_ranks,
    )
    for axis, name in provided_groups:
        group = resolve_group(name)
        if group is not None and as_range(dist.get_process_group_ranks(group)) == axis[0]:
            state.provided_groups[axis] = group
    mesh = DeviceMesh._make(state, *mesh_arguments)
    for name, layout, options in flattened:
        state.flattened[name] = DeviceMesh._make(state, layout, (name,), options)
    return mesh


def _unpickle_submesh(
    root: DeviceMesh, layout: MeshLayout, names: tuple[str, ...], options: _Options
) -> DeviceMesh:
    mesh = DeviceMesh._make(root._root_state, layout, names, options)
    flattened = root._root_state.flattened.get(names[0]) if len(names) == 1 else None
    return flattened if flattened == mesh and flattened is not None else mesh


# A state dict with DTensors contains their mesh, and torch.load accepts only what is listed.
torch.serialization.add_safe_globals(
    [_unpickle_root, _unpickle_submesh, FlatLayout, MeshLayout, GroupOptions, range, timedelta]
)
