"""Finds meshes that differ between ranks, when the first group is made of them.

Nobody is asked when a mesh is made, and ranks may make different ones: a rank that plans, a mesh
that only some ranks have. So it is no mistake that ranks know different meshes. It is one if a rank
uses a mesh that its peer does not know, while the peer has used one, with a place for that rank in
it, that the rank does not know. The same goes for two axes of one name in one mesh.

Every rank keeps a record in the store of the group that the meshes are made on: which it has made
and which of them it has used. It is written when a group forms. Mostly its members want it for the
same axis of the same mesh, which they see when they meet. Otherwise, and when some do not come,
for ranks with different meshes may wait for different peers, the records are read. In a large group
a rank reads those of its neighbours: if not all are alike, some neighbours differ.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ..errors import RankMismatch
from ..groups._subgroups import ParentGroup
from .layout import FlatLayout, MeshLayout

if TYPE_CHECKING:
    from ..groups._store_client import BlockingStoreClient, StoreClient

__all__ = ["AxisPurpose", "Ledger", "RootKey", "Use"]

KEPT = 256  # meshes, the last ones made
READ = 64  # records of others, at most, where there is any doubt
LISTED = 4096  # ranks; a longer list of irregular ranks is taken to have everybody


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
        return f"DeviceMesh(({axes}), {self.device_type!r}, ranks {_told_ranks(self.ranks)})"

    @cached_property
    def digest(self) -> str:
        """Tell it from all others, alike in every process."""
        said = repr((self.device_type, self.names, str(self.layout), self.ranks))
        return hashlib.blake2b(said.encode(), digest_size=12).hexdigest()


@dataclass(frozen=True)
class Use:
    """An axis that a group is made for."""

    root: RootKey
    name: str
    axis: FlatLayout


@dataclass
class _Entry:
    used: bool = False
    axes: dict[str, dict[FlatLayout, None]] = field(default_factory=dict)
    """The layouts that derived axes of a name have had."""


class Ledger:
    """The meshes that a rank has made on a group."""

    def __init__(self) -> None:
        self._entries: dict[RootKey, _Entry] = {}
        self._lock = threading.Lock()  # over `_entries`, for moments
        self._announced = ""  # the record that others were told last, where no group was made
        self._store: StoreClient | None = None

    def note(self, root: RootKey) -> None:
        """Remember that a mesh was made."""
        with self._lock:
            if root not in self._entries:
                self._entries[root] = _Entry()
                if len(self._entries) > KEPT:
                    del self._entries[next(iter(self._entries))]

    def note_axis(self, root: RootKey, name: str, axis: FlatLayout) -> None:
        """Remember that a mesh got an axis by flattening or unflattening."""
        with self._lock:
            entry = self._entries.setdefault(root, _Entry())
            entry.axes.setdefault(name, {})[axis] = None

    def purpose(
        self, base: ParentGroup, ranks: Sequence[int], use: Use, *, label: str
    ) -> AxisPurpose | None:
        """Note that an axis is used, and return what its members tell each other, if they talk."""
        if not base.talks or len(ranks) == 1:
            return None
        return AxisPurpose(base.rank, ranks, use, self._record(use), label)

    def announce(self, base: ParentGroup, use: Use) -> None:
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

    def _record(self, use: Use) -> dict[str, Any]:
        with self._lock:
            entry = self._entries.setdefault(use.root, _Entry())
            entry.used = True
            entry.axes.setdefault(use.name, {})[use.axis] = None
            return {root.digest: _told_entry(root, each) for root, each in self._entries.items()}


@dataclass(frozen=True)
class AxisPurpose:
    """What a group is made for, to be compared with what the other members make it for."""

    rank: int
    ranks: Sequence[int]
    use: Use
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
        return {_key(self.rank): self.told}

    def contradiction(
        self, store: BlockingStoreClient, members: Sequence[int]
    ) -> RankMismatch | None:
        """Return what is wrong with one of these members of the group, if anything is."""
        for member in self._nearest(members):
            said = store.read(_key(self.ranks[member]))
            theirs = None if said is None else self._contradiction(json.loads(said))
            if theirs is not None:
                return self._mismatch(member, theirs)
        return None

    def _nearest(self, members: Sequence[int]) -> list[int]:
        size, me = len(self.ranks), self._me
        away = {each: min((each - me) % size, (me - each) % size) for each in members if each != me}
        return sorted(away, key=lambda each: away[each])[:READ]

    @cached_property
    def _me(self) -> int:
        return list(self.ranks).index(self.rank)

    def _contradiction(self, theirs: dict[str, Any]) -> str | None:
        root = self.use.root.digest
        if root not in theirs:
            for digest, entry in theirs.items():
                if entry["used"] and digest not in self.mine and _has(entry, self.rank):
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


def _key(rank: int) -> str:
    return f"phalanx/meshes/{rank}"


def _told_entry(root: RootKey, entry: _Entry) -> dict[str, Any]:
    ranks = root.ranks
    return {
        "text": root.text,
        "used": entry.used,
        "range": [ranks.start, ranks.stop, ranks.step] if isinstance(ranks, range) else None,
        "ranks": None if isinstance(ranks, range) or len(ranks) > LISTED else list(ranks),
        "axes": {name: [str(axis) for axis in axes] for name, axes in entry.axes.items()},
    }


def _has(entry: dict[str, Any], rank: int) -> bool:
    if entry["range"] is not None:
        return rank in range(*entry["range"])
    return entry["ranks"] is None or rank in entry["ranks"]


def _told_ranks(ranks: Sequence[int]) -> str:
    if isinstance(ranks, range):
        step = f":{ranks.step}" if ranks.step > 1 else ""
        return f"{ranks[0]}-{ranks[-1]}{step}"
    shown = ", ".join(map(str, ranks[:16]))
    return f"[{shown}{', ...' if len(ranks) > 16 else ''}]"
