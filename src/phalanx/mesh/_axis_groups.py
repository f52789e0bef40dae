"""Process groups of mesh axes: formed on first use, by their members only, and shared.

`AxisGroups` holds the groups formed for one base group and lives as long as that group, not as
long as a mesh: two meshes whose axes have the same ranks and options share a group.

Constructing a mesh does not communicate, so ranks may hold different meshes. It is a mistake if
rank A uses a mesh that B lacks and B has used a mesh that contains A and that A lacks; likewise for
two axes of one name in one mesh. Each rank keeps a record of the meshes it made and used in the
base group's store, written when a group forms. Members normally see at rendezvous that they want
the same axis of the same mesh. Only when they do not, or when some are missing, are records read:
at most `MAX_RECORDS_READ`, those of the nearest ranks. If the records of a large group differ at
all, those of some neighbours differ.

No lock is held while a group forms: ranks may form two groups in different order on two
threads.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch.distributed as dist

from ..errors import InvalidState, RankMismatch
from ..groups._parent_group import DEFAULT_OPTIONS, GroupOptions, ParentGroup, end_group
from .layout import FlatLayout, MeshLayout, format_axes, format_rank_pattern

if TYPE_CHECKING:
    from ..groups._store import BlockingStoreClient, StoreClient
    from ._device_mesh import DeviceMesh


MAX_MESHES_KEPT = 256  # the last ones made
MAX_RECORDS_READ = 64
MAX_RANKS_RECORDED = 4096  # a longer irregular list counts as including every rank


@dataclass(frozen=True)
class RootKey:
    """Identity of a root mesh, equal on every rank that made the same mesh."""

    device_type: str
    names: tuple[str, ...] | None
    layout: MeshLayout
    ranks: Sequence[int]

    @cached_property
    def text(self) -> str:
        axes = format_axes(self.names, self.layout.top_level_sizes)
        ranks = format_rank_pattern(self.ranks, limit=16)
        return f"DeviceMesh(({axes}), {self.device_type!r}, ranks {ranks})"

    @cached_property
    def digest(self) -> str:
        identity = repr((self.device_type, self.names, str(self.layout), self.ranks))
        return hashlib.blake2b(identity.encode(), digest_size=12).hexdigest()


class AxisUse(NamedTuple):
    """An axis of a root mesh for which a group is formed."""

    root: RootKey
    name: str
    axis: FlatLayout


@dataclass
class _RegisteredMesh:
    used: bool = False
    axes: dict[str, dict[FlatLayout, None]] = field(default_factory=dict)
    """Layouts of the axes that were derived or used, by name."""


class MeshRegistry:
    """The meshes that a rank has made on a group."""

    def __init__(self) -> None:
        self._entries: dict[RootKey, _RegisteredMesh] = {}
        self._lock = threading.Lock()  # guards `_entries`; never held across a store request
        self._published = ""  # the last record written without forming a group
        self._store: StoreClient | None = None

    def add(self, root: RootKey) -> None:
        with self._lock:
            if root not in self._entries:
                self._entries[root] = _RegisteredMesh()
                if len(self._entries) > MAX_MESHES_KEPT:
                    del self._entries[next(iter(self._entries))]

    def record_axes(self, root: RootKey, names: Sequence[str], layout: MeshLayout) -> None:
        """Record axes made by flatten or unflatten."""
        with self._lock:
            entry = self._entries.setdefault(root, _RegisteredMesh())
            for name, axis in zip(names, layout, strict=True):
                entry.axes.setdefault(name, {})[axis] = None

    def record_use(
        self, base: ParentGroup, ranks: Sequence[int], use: AxisUse, *, label: str
    ) -> AxisRendezvousCheck | None:
        """Record the use of an axis; return what its members compare, if they can communicate."""
        if not base.talks or len(ranks) == 1:
            return None
        with self._lock:
            entry = self._entries.setdefault(use.root, _RegisteredMesh())
            entry.used = True
            entry.axes.setdefault(use.name, {})[use.axis] = None
            record = {each.digest: _mesh_record(each, e) for each, e in self._entries.items()}
        return AxisRendezvousCheck(base.rank, ranks, use, record, label)

    def publish(self, base: ParentGroup, use: AxisUse) -> None:
        """Publish the use of an axis that needs no new group, and compare with known records."""
        check = self.record_use(base, range(base.size), use, label=base.label)
        if check is None or check.record_json == self._published:
            return
        if self._store is None:
            self._store = base.connect()
        self._store.set_all(check.store_entries())
        conflict = check.find_mismatch(self._store, range(base.size))
        if conflict is not None:
            raise conflict
        self._published = check.record_json  # only now, so that a retry raises the same error


@dataclass(frozen=True)
class AxisRendezvousCheck:
    """Compares the axis for which a group forms with the axes of the other members."""

    rank: int
    ranks: Sequence[int]
    use: AxisUse
    record: dict[str, Any]  # this rank's meshes, by digest
    label: str

    @cached_property
    def record_json(self) -> str:
        return json.dumps(self.record)

    @property
    def text(self) -> str:
        return f"{self.use.root.digest} {self.use.name} {self.use.axis}"

    def store_entries(self) -> dict[str, str]:
        """Return what to write into the store, by key."""
        return {_record_key(self.rank): self.record_json}

    def find_mismatch(
        self, store: BlockingStoreClient, members: Sequence[int]
    ) -> RankMismatch | None:
        """Compare with the records of these members, nearest first; return the first conflict."""
        size, own = len(self.ranks), self.ranks.index(self.rank)
        distance = {m: min((m - own) % size, (own - m) % size) for m in members if m != own}
        for member in sorted(distance, key=distance.__getitem__)[:MAX_RECORDS_READ]:
            peer = self.ranks[member]
            text = store.read(_record_key(peer))
            conflict = None if text is None else self._find_conflict(json.loads(text))
            if conflict is not None:
                sides = sorted([(own, self.rank, conflict[0]), (member, peer, conflict[1])])
                facts = ", ".join(f"rank {rank} {what}" for _, rank, what in sides)
                return RankMismatch(
                    f"ranks disagree on the mesh behind group {self.label!r}: {facts}. Every rank "
                    "must make the same mesh",
                    group=self.label,
                    ranks=[side[0] for side in sides],
                )
        return None

    def _find_conflict(self, theirs: dict[str, Any]) -> tuple[str, str] | None:
        """Return what this rank and the other one do differently."""
        root, name = self.use.root, self.use.name
        if root.digest not in theirs:
            for digest, entry in theirs.items():
                if entry["used"] and digest not in self.record and _includes(entry, self.rank):
                    return f"uses {root.text}", f"uses {entry['text']}"
            return None
        entry = theirs[root.digest]
        known = entry["axes"].get(name, [])
        unknown = [axis for axis in known if axis not in self.record[root.digest]["axes"][name]]
        if known and str(self.use.axis) not in known and unknown:
            return (
                f"has the axis {name!r} as {self.use.axis} in {root.text}",
                f"has the axis {name!r} as {unknown[0]} in {entry['text']}",
            )
        return None


def _record_key(rank: int) -> str:
    return f"phalanx/meshes/{rank}"


def _mesh_record(root: RootKey, entry: _RegisteredMesh) -> dict[str, Any]:
    ranks = root.ranks
    return {
        "text": root.text,
        "used": entry.used,
        "range": [ranks.start, ranks.stop, ranks.step] if isinstance(ranks, range) else None,
        "ranks": None
        if isinstance(ranks, range) or len(ranks) > MAX_RANKS_RECORDED
        else list(ranks),
        "axes": {name: [str(axis) for axis in axes] for name, axes in entry.axes.items()},
    }


def _includes(entry: dict[str, Any], rank: int) -> bool:
    if entry["range"] is not None:
        return rank in range(*entry["range"])
    return entry["ranks"] is None or rank in entry["ranks"]


_GroupKey = tuple[Sequence[int], GroupOptions, str]
"""Ranks, options and device type. Axes for which all three are equal share a group."""


class AxisGroups:
    """The groups that one rank has formed from a base group for axes of meshes."""

    def __init__(self) -> None:
        self.registry = MeshRegistry()
        self.generation = 0
        """Number of shutdowns. A group of an earlier generation must not be cached."""
        self._lock = threading.Lock()  # guards the rest and `generation`
        self._groups: dict[_GroupKey, Future[dist.ProcessGroup]] = {}
        # By id: equal meshes are distinct entries.
        self._caches: WeakValueDictionary[int, DeviceMesh] = WeakValueDictionary()

    def cache_in(
        self, mesh: DeviceMesh, axis: int | str | None, group: dist.ProcessGroup, *, generation: int
    ) -> None:
        """Let a mesh cache a group, unless it was shut down meanwhile."""
        with self._lock:
            if generation == self.generation:
                mesh._groups[axis] = group
                mesh._root_state.groups_by_name[group.group_name] = group
                self._caches[id(mesh)] = mesh

    def get_or_form(
        self,
        base: ParentGroup,
        ranks: Sequence[int],
        options: GroupOptions,
        *,
        use: AxisUse,
        desc: str,
    ) -> dist.ProcessGroup:
        """Return the group of these ranks in this order; form it if there is none."""
        device_type = use.root.device_type
        if base.is_gone:
            raise InvalidState(
                f"group {base.label!r} was destroyed, so {use.root.text} can form no more groups"
            )
        if options == DEFAULT_OPTIONS and ranks == range(base.size) and base.takes(device_type):
            self.registry.publish(base, use)
            return base.group
        # The name must be the same on every rank, and only groups that differ in torch's own
        # options, which have no text, may share one.
        device = "" if device_type == "cpu" else f" on {device_type}"
        name = f"mesh {format_rank_pattern(ranks)}{device}{options.label}"
        key = ranks, options, device_type
        with self._lock:
            existing = self._groups.get(key)
            if existing is None:
                future = self._groups[key] = Future[dist.ProcessGroup]()
        if existing is not None:
            return existing.result()  # forming has a deadline, so this wait has one
        try:
            check = self.registry.record_use(base, ranks, use, label=f"{base.label}/{name}")
            group = base.make(
                ranks, options, name=name, desc=desc, device_type=device_type, formation_check=check
            )
        except BaseException as error:
            with self._lock:
                if self._groups.get(key) is future:  # not one of a later generation
                    del self._groups[key]  # the next call tries again
            future.set_exception(error)
            raise
        future.set_result(group)
        return group

    def shutdown(self) -> None:
        """Shut down this rank's part in all groups, those that are forming included."""
        with self._lock:
            groups, self._groups = self._groups, {}
            self.generation += 1
            for mesh in list(self._caches.values()):
                # The last reference ends an engine's threads and memory.
                mesh._groups.clear()
                mesh._root_state.groups_by_name.clear()
        for future in groups.values():
            if future.exception() is None:
                end_group(future.result())


# torch's own groups take no attributes, hence a table. It does not keep groups alive.
_by_base_group: WeakKeyDictionary[dist.ProcessGroup, AxisGroups] = WeakKeyDictionary()
_by_base_group_lock = threading.Lock()


def axis_groups_of(group: dist.ProcessGroup) -> AxisGroups:
    with _by_base_group_lock:
        return _by_base_group.setdefault(group, AxisGroups())
