"""The state that all meshes derived from one root share: its ranks, base group and groups.

It is separate from `DeviceMesh`, which is a view of it: a layout, names and options.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh as TorchMesh

from ..errors import InvalidState, NotInMesh
from ..groups._parent_group import DEFAULT_OPTIONS, GroupOptions, ParentGroup
from ._arguments import as_range
from ._axis_groups import AxisGroups, AxisUse, RootKey, axis_groups_of
from .layout import FlatLayout, MeshLayout

if TYPE_CHECKING:
    from ._device_mesh import DeviceMesh


_AxisKey = tuple[Sequence[int], str]  # ranks and name of an axis


class RootState:
    """State that a root mesh shares with all meshes derived from it.

    Layouts of the meshes give positions in `ranks`. Those are ranks of the base group or, where
    `base_global_ranks` is set, global ranks, for a mesh made from a group.
    """

    root_key: RootKey  # set with `root`

    def __init__(
        self,
        device_type: str,
        ranks: Sequence[int],
        *,
        base: ParentGroup | None,
        own_rank: int | None = None,
        base_global_ranks: Sequence[int] | None = None,
        is_registered: bool = True,
        provided_groups: dict[_AxisKey, dist.ProcessGroup] | None = None,
    ) -> None:
        if own_rank is None and base is not None:
            own_rank = base.rank if base_global_ranks is None else base_global_ranks[base.rank]
        elif own_rank is None:
            own_rank = dist.get_rank() if dist.is_initialized() else 0
        self.device_type = device_type
        self.ranks = ranks
        self.rank = own_rank
        self.position = ranks.index(own_rank) if own_rank in ranks else None
        self.base = base
        is_thread = base is not None and base.ranks_are_threads
        self.thread_id = threading.get_ident() if is_thread else None
        """The thread that is this rank, where ranks are threads."""
        self.base_global_ranks = base_global_ranks
        self.is_registered = is_registered
        self.groups = AxisGroups() if base is None else axis_groups_of(base.group)
        # Not shared with other roots: a member that was not given the group would form one and
        # wait for the others.
        self.provided_groups = {} if provided_groups is None else provided_groups
        # The groups in the caches of meshes, for torch's compiler, which can trace only a dict.
        self.groups_by_name: dict[str, dist.ProcessGroup] = {}
        self.flattened: dict[str, DeviceMesh] = {}
        self.unflattened: dict[str, set[FlatLayout]] = {}
        """Axes made by unflatten, by name. A flattened axis must have another name."""
        self.root: DeviceMesh | None = None  # the first mesh of this state
        self.torch_root: TorchMesh | None = None

    def is_equivalent(self, other: RootState) -> bool:
        """Whether a layout means the same ranks of the same group in both."""
        return self is other or (
            self.groups is other.groups
            and self.device_type == other.device_type
            and self.ranks == other.ranks
        )

    def base_ranks(self, ranks: Sequence[int]) -> Sequence[int]:
        if self.base_global_ranks is None:
            return ranks
        return as_range([self.base_global_ranks.index(rank) for rank in ranks])

    def global_ranks(self) -> Sequence[int]:
        if self.base is None or self.base_global_ranks is not None:
            return self.ranks
        global_ranks = self.base.global_ranks
        return [global_ranks[rank] for rank in self.ranks]

    def ranks_at(self, positions: Sequence[int]) -> Sequence[int]:
        if isinstance(self.ranks, range) and isinstance(positions, range):
            return self.ranks[positions.start : positions.stop : positions.step]
        return as_range([self.ranks[position] for position in positions])

    def require_position(self, consequence: str) -> int:
        """Return the position of this rank, or raise `NotInMesh`."""
        if self.position is None:
            raise NotInMesh(
                f"rank {self.rank} is not in {self.root}, so {consequence}. "
                "Hint: check get_coordinate() is not None first."
            )
        return self.position

    def tensor(self, layout: MeshLayout) -> torch.Tensor:
        """Return the ranks of the copy of a layout that contains this rank."""
        start = 0
        if layout.numel() < len(self.ranks):
            start, _ = layout.locate(self.require_position("it is in no slice of it"))
        flat = layout.collapse()
        positions = torch.arange(start, start + flat.cosize(), device="cpu")
        positions = positions.as_strided(flat.shape, flat.stride)
        if isinstance(self.ranks, range):
            ranks = positions * self.ranks.step + self.ranks.start
        else:
            ranks = torch.tensor(self.ranks, device="cpu")[positions]
        return ranks.to(torch.int32).reshape(layout.top_level_sizes)

    def axis_ranks(self, axis: FlatLayout, name: str) -> Sequence[int]:
        position = self.require_position(f"it has no group along axis {name!r}")
        return self.ranks_at(axis.group_of(position))

    def axis_group(
        self, axis: FlatLayout, name: str, options: GroupOptions, *, desc: str
    ) -> dist.ProcessGroup:
        """Return this rank's group along an axis; form it if there is none."""
        ranks = self.axis_ranks(axis, name)
        # One given for an axis of another name will do: unflattening may only rename an axis.
        provided = {
            each: group
            for (members, each), group in self.provided_groups.items()
            if members == ranks
        }
        if provided and options == DEFAULT_OPTIONS:
            return provided.get(name, next(iter(provided.values())))
        if self.base is None:
            raise InvalidState(
                f"no group for ranks {list(ranks)} along axis {name!r}: {self.root} was made "
                "without a group of all its ranks"
            )
        use = AxisUse(self.root_key, name, axis)
        return self.groups.get_or_form(
            self.base, self.base_ranks(ranks), options, use=use, desc=desc
        )
