"""Process groups of mesh axes: formed on first use, by their members only, and shared.

`AxisGroups` holds the groups formed for one base group and lives as long as that group, not as
long as a mesh: two meshes whose axes have the same ranks and options share a group.

Constructing a mesh does not communicate, so ranks may hold different meshes, and that alone is no
error. It is an error when a rank uses a mesh that a peer does not have while the peer has used one
that includes the rank and that the rank does not have; likewise for two axes of one name in one
mesh. Each rank keeps a record of the meshes it made and used in the base group's store, written
when a group forms. Members normally see at rendezvous that they want the same axis of the same
mesh. Only when they do not, or when some are missing, are records read: at most
`MAX_RECORDS_READ`, those of the nearest ranks. If the records of a large group differ at all,
those of some neighbours differ.

No lock is held while a group forms: ranks may form two groups in different order on two
threads.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch.distributed as dist

from ..errors import InvalidState, RankMismatch
from ..groups._formatting import format_rank_ranges
from ..groups._subgroups import DEFAULT_OPTIONS, GroupOptions, ParentGroup, end_group
from .layout import FlatLayout, MeshLayout

if TYPE_CHECKING:
    from ..groups._store_client import BlockingStoreClient, StoreClient


MAX_MESHES_KEPT = 256  # meshes, the last ones made
MAX_RECORDS_READ = 64  # records of others, at most, where there is any doubt
MAX_RANKS_LISTED = 4096  # ranks; a longer list of irregular ranks is taken to have everybody


@dataclass(frozen=True)
class RootKey:
    """What tells a mesh that was not derived from another."""

    device_type: str
    names: tuple[str, ...] | None
    layout: MeshLayout
    ranks: Sequence[int]

    @cached_property
    def text(self) -> str:
        """Tell it in a message."""
        sizes = self.layout.top_level_sizes
        names = self.names or (None,) * len(sizes)
        axes = ", ".join(
            str(size) if name is None else f"{name}={size}"
            for name, size in zip(names, sizes, strict=True)
        )
        return f"DeviceMesh(({axes}), {self.device_type!r}, ranks {_format_mesh_ranks(self.ranks)})"

    @cached_property
    def digest(self) -> str:
        """Tell it from all others, alike in every process."""
        said = repr((self.device_type, self.names, str(self.layout), self.ranks))
        return hashlib.blake2b(said.encode(), digest_size=12).hexdigest()


@dataclass(frozen=True)
class AxisUse:
    """An axis that a group is made for."""

    root: RootKey
    name: str
    axis: FlatLayout


@dataclass
class _RegisteredMesh:
    used: bool = False
    axes: dict[str, dict[FlatLayout, None]] = field(default_factory=dict)
    """The layouts that derived axes of a name have had."""


class MeshRegistry:
    """The meshes that a rank has made on a group."""

    def __init__(self) -> None:
        self._entries: dict[RootKey, _RegisteredMesh] = {}
        self._lock = threading.Lock()  # over `_entries`, for moments
        self._announced = ""  # the record that others were told last, where no group was made
        self._store: StoreClient | None = None

    def note(self, root: RootKey) -> None:
        """Remember that a mesh was made."""
        with self._lock:
            if root not in self._entries:
                self._entries[root] = _RegisteredMesh()
                if len(self._entries) > MAX_MESHES_KEPT:
                    del self._entries[next(iter(self._entries))]

    def record_axis(self, root: RootKey, name: str, axis: FlatLayout) -> None:
        """Remember that a mesh got an axis by flattening or unflattening."""
        with self._lock:
            entry = self._entries.setdefault(root, _RegisteredMesh())
            entry.axes.setdefault(name, {})[axis] = None

    def purpose(
        self, base: ParentGroup, ranks: Sequence[int], use: AxisUse, *, label: str
    ) -> AxisPurpose | None:
        """Note that an axis is used, and return what its members tell each other, if they talk."""
        if not base.talks or len(ranks) == 1:
            return None
        return AxisPurpose(base.rank, ranks, use, self._record(use), label)

    def announce(self, base: ParentGroup, use: AxisUse) -> None:
        """Tell the others of an axis that needs no group made, and compare as far as is known."""
        purpose = self.purpose(base, range(base.size), use, label=base.label)
        if purpose is None or purpose.told == self._announced:
            return
        if self._store is None:
            self._store = base.connect()
        self._store.set_all(purpose.notes())
        conflict = purpose.contradiction(self._store, range(base.size))
        if conflict is not None:
            raise conflict
        self._announced = purpose.told  # not before: who asks again must hear the same

    def _record(self, use: AxisUse) -> dict[str, Any]:
        with self._lock:
            entry = self._entries.setdefault(use.root, _RegisteredMesh())
            entry.used = True
            entry.axes.setdefault(use.name, {})[use.axis] = None
            return {root.digest: _mesh_record(root, each) for root, each in self._entries.items()}


@dataclass(frozen=True)
class AxisPurpose:
    """What a group is made for, to be compared with what the other members make it for."""

    rank: int
    ranks: Sequence[int]
    use: AxisUse
    mine: dict[str, Any]
    """This rank's record."""
    label: str

    @cached_property
    def told(self) -> str:
        """The record as it is written down."""
        return json.dumps(self.mine)

    @property
    def text(self) -> str:
        """Tell the axis from all others."""
        return f"{self.use.root.digest} {self.use.name} {self.use.axis}"

    def notes(self) -> dict[str, str]:
        """Return this rank's record, for others to read."""
        return {_record_key(self.rank): self.told}

    def contradiction(
        self, store: BlockingStoreClient, members: Sequence[int]
    ) -> RankMismatch | None:
        """Return what is wrong with one of these members of the group, if anything is."""
        for member in self._nearest(members):
            said = store.read(_record_key(self.ranks[member]))
            theirs = None if said is None else self._contradiction(json.loads(said))
            if theirs is not None:
                return self._mismatch(member, theirs)
        return None

    def _nearest(self, members: Sequence[int]) -> list[int]:
        size, me = len(self.ranks), self._me
        away = {each: min((each - me) % size, (me - each) % size) for each in members if each != me}
        return sorted(away, key=lambda each: away[each])[:MAX_RECORDS_READ]

    @cached_property
    def _me(self) -> int:
        return list(self.ranks).index(self.rank)

    def _contradiction(self, theirs: dict[str, Any]) -> str | None:
        root = self.use.root.digest
        if root not in theirs:
            for digest, entry in theirs.items():
                if entry["used"] and digest not in self.mine and _includes_rank(entry, self.rank):
                    return f"uses {entry['text']}"
            return None
        entry = theirs[root]
        known = entry["axes"].get(self.use.name, [])
        strange = [axis for axis in known if axis not in self.mine[root]["axes"][self.use.name]]
        if known and str(self.use.axis) not in known and strange:
            return f"has the axis {self.use.name!r} as {strange[0]} in {entry['text']}"
        return None

    def _mismatch(self, member: int, theirs: str) -> RankMismatch:
        root = self.use.root.text
        mine = (
            f"has the axis {self.use.name!r} as {self.use.axis} in {root}"
            if theirs.startswith("has")
            else f"uses {root}"
        )
        sides = sorted([(self._me, self.rank, mine), (member, self.ranks[member], theirs)])
        told = ", ".join(f"rank {rank} {what}" for _, rank, what in sides)
        return RankMismatch(
            f"ranks disagree on the mesh behind group {self.label!r}: {told}. Every rank must make "
            "the same mesh",
            group=self.label,
            ranks=[side[0] for side in sides],
        )


def _record_key(rank: int) -> str:
    return f"phalanx/meshes/{rank}"


def _mesh_record(root: RootKey, entry: _RegisteredMesh) -> dict[str, Any]:
    ranks = root.ranks
    return {
        "text": root.text,
        "used": entry.used,
        "range": [ranks.start, ranks.stop, ranks.step] if isinstance(ranks, range) else None,
        "ranks": None if isinstance(ranks, range) or len(ranks) > MAX_RANKS_LISTED else list(ranks),
        "axes": {name: [str(axis) for axis in axes] for name, axes in entry.axes.items()},
    }


def _includes_rank(entry: dict[str, Any], rank: int) -> bool:
    if entry["range"] is not None:
        return rank in range(*entry["range"])
    return entry["ranks"] is None or rank in entry["ranks"]


def _format_mesh_ranks(ranks: Sequence[int]) -> str:
    if isinstance(ranks, range):
        step = f":{ranks.step}" if ranks.step > 1 else ""
        return f"{ranks[0]}-{ranks[-1]}{step}"
    shown = ", ".join(map(str, ranks[:16]))
    return f"[{shown}{', ...' if len(ranks) > 16 else ''}]"


_GroupKey = tuple[Sequence[int], GroupOptions, str]
"""Ranks, options and the type of device: who has all of these alike shares a group."""


class GroupCache(Protocol):
    """Who keeps groups at hand: a mesh."""

    def let_go(self) -> None:
        """Keep none any more."""


class AxisGroups:
    """The groups that were made of one group's ranks for axes of meshes, as one rank sees them."""

    def __init__(self) -> None:
        self.registry = MeshRegistry()
        """The meshes that this rank has made on the group, to be compared with those of others."""
        self.era = 0
        """How often all groups were shut down: what was found in an earlier era is not to be kept.
        """
        # Over the rest and the era, for moments: ranks may form two groups in different order on
        # two threads, and must not wait for each other here.
        self._lock = threading.Lock()
        self._made: dict[_GroupKey, Future[dist.ProcessGroup]] = {}
        self._caching_meshes: WeakValueDictionary[int, GroupCache] = WeakValueDictionary()

    def keep(self, keeper: GroupCache, keep: Callable[[], None], *, era: int) -> None:
        """Let a mesh keep a group at hand until it is shut down, which it may have been since."""
        with self._lock:
            if era == self.era:
                keep()
                self._caching_meshes[id(keeper)] = keeper

    def find(
        self,
        base: ParentGroup,
        ranks: Sequence[int],
        options: GroupOptions,
        *,
        use: AxisUse,
        desc: str,
    ) -> dist.ProcessGroup:
        """Return the group of these ranks, in this order, or make it."""
        device_type = use.root.device_type
        if base.is_gone:
            raise InvalidState(
                f"group {base.label!r} was destroyed: {use.root.text} gets no more groups, make it "
                "on another one"
            )
        if options == DEFAULT_OPTIONS and ranks == range(base.size) and base.takes(device_type):
            self.registry.announce(base, use)
            return base.group
        name = f"mesh {_format_group_ranks(ranks)}{options.label}"

        def make() -> dist.ProcessGroup:
            purpose = self.registry.purpose(base, ranks, use, label=f"{base.label}/{name}")
            return base.make(
                ranks, options, name=name, desc=desc, device_type=device_type, purpose=purpose
            )

        return self._once((ranks, options, device_type), make)

    def shutdown(self) -> None:
        """End this rank's part in all groups that were made so far, or are being made."""
        with self._lock:
            made, self._made = self._made, {}
            self.era += 1
            for keeper in list(self._caching_meshes.values()):
                keeper.let_go()  # an engine's threads and memory end with the last who has it
        for future in made.values():
            if future.exception() is None:  # otherwise who has asked for it is told
                end_group(future.result())

    def _once(self, key: _GroupKey, make: Callable[[], dist.ProcessGroup]) -> dist.ProcessGroup:
        with self._lock:
            found = self._made.get(key)
            if found is None:
                mine = self._made[key] = Future[dist.ProcessGroup]()
        if found is not None:
            return found.result()  # what makes it has a deadline
        try:
            group = make()
        except BaseException as error:
            with self._lock:
                if self._made.get(key) is mine:  # and none of a later era
                    del self._made[key]  # the next to ask tries again
            mine.set_exception(error)
            raise
        mine.set_result(group)
        return group


def _format_group_ranks(ranks: Sequence[int]) -> str:
    """Write ranks in short, the same on every rank: ``0-6:2`` is 0, 2, 4, 6."""
    if isinstance(ranks, range) and ranks.step > 1 and len(ranks) > 1:
        return f"{ranks[0]}-{ranks[-1]}:{ranks.step}"
    return format_rank_ranges(ranks)


# Groups of torch's own take no attributes, so this stands in for one: it has nothing of a group
# that is gone.
_by_base_group: WeakKeyDictionary[dist.ProcessGroup, AxisGroups] = WeakKeyDictionary()
_by_base_group_lock = threading.Lock()


def axis_groups_of(group: dist.ProcessGroup) -> AxisGroups:
    """Return what was made of this group's ranks so far."""
    with _by_base_group_lock:
        found = _by_base_group.get(group)
        if found is None:
            found = _by_base_group[group] = AxisGroups()
        return found
