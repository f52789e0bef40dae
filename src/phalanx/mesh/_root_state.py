"""State that a root mesh shares with all meshes derived from it.

Layouts of the meshes give positions in `RootState.ranks`. Those are ranks of the base group or,
where `numbers` is set, other numbers for the same ranks (global ranks, for a mesh made from a
group).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from ..errors import InvalidState, NotInMesh
from ..groups._subgroups import DEFAULT_OPTIONS, GroupOptions, ParentGroup
from ._arguments import as_range
from ._axis_groups import AxisGroups, AxisUse, RootKey, axis_groups_of
from ._mesh_env import choose_device
from .layout import FlatLayout, MeshLayout

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh as TorchMesh

    from ._device_mesh import DeviceMesh


class RootState:
    """The ranks that a mesh was made of, and the group that they belong to.

    Layouts of the meshes lead to positions in `ranks`. These are ranks of the base's group, or, if
    there are `numbers`, what the base's ranks are called instead.
    """

    def __init__(
        self,
        device_type: str,
        ranks: Sequence[int],
        *,
        base: ParentGroup | None,
        rank: int | None = None,
        numbers: Sequence[int] | None = None,
    ) -> None:
        self.device_type = device_type
        self.ranks = ranks
        self.base = base
        self.numbers = numbers
        self.rank = rank = _own_rank(base, numbers) if rank is None else rank
        self.position = ranks.index(rank) if rank in ranks else None
        self.groups: AxisGroups = AxisGroups() if base is None else axis_groups_of(base.group)
        self.flattened: dict[str, DeviceMesh] = {}
        self.unflattened: dict[str, set[FlatLayout]] = {}
        """The axes, by name, that came by unflattening: a flattened one is to have another name."""
        # Not shared with other families: a member that has not been given the group would make one
        # and wait for the others.
        self.given: dict[Sequence[int], dist.ProcessGroup] = {}
        self.root: DeviceMesh
        self.key: RootKey
        self.torch_root: TorchMesh | None = None

    def part(self, ranks: Sequence[int]) -> RootState:
        """Return a family of some of the ranks."""
        part = RootState(
            self.device_type, ranks, base=self.base, rank=self.rank, numbers=self.numbers
        )
        part.given = self.given
        return part

    def record_axes(self, names: Sequence[str], layout: MeshLayout) -> None:
        """Remember axes that came by flattening or unflattening."""
        for name, axis in zip(names, layout, strict=True):
            self.groups.registry.record_axis(self.key, name, axis)

    def is_equivalent(self, other: RootState) -> bool:
        """Tell whether the same layout means the same ranks of the same group in both."""
        return self is other or (
            self.groups is other.groups
            and self.device_type == other.device_type
            and self.ranks == other.ranks
        )

    def local(self, ranks: Sequence[int]) -> Sequence[int]:
        """Return ranks as the base's group numbers them."""
        if self.numbers is None:
            return ranks
        return as_range([self.numbers.index(rank) for rank in ranks])

    def global_ranks(self) -> Sequence[int]:
        """Return the launcher's numbers of all ranks of the root mesh."""
        if self.base is None or self.numbers is not None:
            return self.ranks
        everyone = self.base.global_ranks
        return [everyone[rank] for rank in self.ranks]

    def ranks_at(self, positions: Sequence[int]) -> Sequence[int]:
        """Return the ranks at positions that a layout gives."""
        if isinstance(self.ranks, range) and isinstance(positions, range):
            return self.ranks[positions.start : positions.stop : positions.step]
        return as_range([self.ranks[position] for position in positions])

    def require_position(self, what: str) -> int:
        """Return where this rank is, or raise `NotInMesh`."""
        if self.position is None:
            raise NotInMesh(
                f"rank {self.rank} is not in {self.root}, so {what}: ask get_coordinate() first, "
                "which is None there"
            )
        return self.position

    def tensor(self, layout: MeshLayout) -> torch.Tensor:
        """Return the ranks of the copy of a layout that this rank is in."""
        start = 0
        if layout.numel() < len(self.ranks):
            start, _ = layout.locate(self.require_position("its slice has no ranks there"))
        positions = torch.tensor([start], device="cpu")
        for size, step in layout.collapse().sizes_and_strides:
            positions = (positions[:, None] + torch.arange(size, device="cpu") * step).flatten()
        if isinstance(self.ranks, range):
            ranks = positions * self.ranks.step + self.ranks.start
        else:
            ranks = torch.tensor(self.ranks, device="cpu")[positions]
        return ranks.to(torch.int32).reshape(layout.top_level_sizes)

    def make_group(
        self, axis: FlatLayout, name: str, options: GroupOptions, *, desc: str
    ) -> dist.ProcessGroup:
        """Return the group of this rank along an axis; the first axis that has it describes it."""
        position = self.require_position(f"it has no group along axis {name!r}")
        ranks = self.ranks_at(axis.group_of(position))
        if ranks in self.given and options == DEFAULT_OPTIONS:
            return self.given[ranks]
        if self.base is None:
            raise InvalidState(
                f"there is no group along axis {name!r}, ranks {list(ranks)}, and none to make it "
                f"of: {self.root} was made without a group of all its ranks"
            )
        use = AxisUse(self.key, name, axis)
        return self.groups.find(self.base, self.local(ranks), options, use=use, desc=desc)


def _own_rank(base: ParentGroup | None, numbers: Sequence[int] | None) -> int:
    if base is not None:
        return base.rank if numbers is None else numbers[base.rank]
    return dist.get_rank() if dist.is_initialized() else 0


def init_root_mesh(
    mesh: DeviceMesh,
    family: RootState,
    layout: MeshLayout,
    names: tuple[str, ...] | None,
    options: tuple[GroupOptions, ...],
    *,
    noted: bool = True,
) -> DeviceMesh:
    """Make a mesh the one that others of its family are derived from.

    One that was made by the thousands need not be noted before it is used.
    """
    base = family.base
    if base is not None:
        for each in options:
            if each is not DEFAULT_OPTIONS:
                base.check(each)
        choose_device(family.device_type, base)
    mesh._set_state(family, layout, names, options)
    family.root = mesh
    family.key = RootKey(family.device_type, names, layout, family.local(family.ranks))
    if noted:
        family.groups.registry.note(family.key)
    return mesh
