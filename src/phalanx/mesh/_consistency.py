"""Finds meshes that differ between ranks, when the first group is made of them.

Nobody is asked when a mesh is made, and ranks may make different ones: a rank that plans, a mesh
that only some ranks have. So it is no mistake that ranks know different meshes. It is one if a rank
uses a mesh that its peer does not know, while the peer has used one, with a place for that rank in
it, that the rank does not know. The same goes for two axes of one name in one mesh.

Every rank keeps a record in the store of the group that the meshes are made on: which it has made
and which of them it has used. It is written before a group forms and read by others after that;
and, since ranks with different meshes may wait for different peers, by a watcher if forming takes
long. In a large group a rank reads the records of its neighbours: if not all are alike, some
neighbours differ.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from ..errors import PhalanxError, RankMismatch
from ..groups import ProcessGroup
from ..groups._forming import Terms, _told
from ..groups._patient import ANSWER_WITHIN, PatientStore, borrow_thread
from ..groups._stores import own_connection
from ._bases import Base
from .layout import FlatLayout, MeshLayout

__all__ = ["Ledger", "RootKey", "Use"]

LOOK_AFTER = 1.0  # seconds of forming before anybody suspects anything
LOOK_AGAIN = 0.5
LOOKED_AT = 64  # members, at most, that a watcher looks for
KEPT = 256  # meshes, the last ones made
READ = 8  # records of others, at most, after a group has formed
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
        self._lock = threading.Lock()  # over `_entries` and `_store`, for moments
        self._store: PatientStore | None = None
        self._published = ""

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

    def form(
        self,
        base: Base,
        ranks: Sequence[int],
        use: Use,
        *,
        label: str,
        make: Callable[[], dist.ProcessGroup],
    ) -> dist.ProcessGroup:
        """Make a group, and raise `RankMismatch` if a member's meshes contradict this rank's."""
        judge = self._announce(base, ranks, use, label)
        if judge is None:
            return make()
        with judge.watching():
            group = make()
        conflict = judge.compare(judge.neighbours())
        if conflict is not None:
            if isinstance(group, ProcessGroup):
                group.abort()
            raise conflict
        return group

    def announce(self, base: Base, use: Use) -> None:
        """Tell the others of an axis that needs no group made, and compare as far as is known."""
        judge = self._announce(base, range(base.size), use, base.label)
        conflict = None if judge is None else judge.compare(judge.neighbours())
        if conflict is not None:
            raise conflict

    def _announce(self, base: Base, ranks: Sequence[int], use: Use, label: str) -> _Judge | None:
        if base.store is None or len(ranks) == 1:
            return None
        records = self._connect(base.store)
        mine = self._record(use)
        self._publish(records, base.rank, mine)
        return _Judge(records, base.rank, ranks, use, mine, label)

    def _connect(self, store: Store) -> PatientStore:
        with self._lock:
            if self._store is None:
                self._store = PatientStore(own_connection(store))
            return self._store

    def _record(self, use: Use) -> dict[str, Any]:
        with self._lock:
            entry = self._entries.setdefault(use.root, _Entry())
            entry.used = True
            entry.axes.setdefault(use.name, {})[use.axis] = None
            return {root.digest: _told_entry(root, each) for root, each in self._entries.items()}

    def _publish(self, records: PatientStore, rank: int, record: dict[str, Any]) -> None:
        told = json.dumps(record)
        if told != self._published:
            records.set(_key(rank), told)
            self._published = told


@dataclass
class _Judge:
    """Compares the records of those who form a group."""

    records: PatientStore
    rank: int
    ranks: Sequence[int]
    use: Use
    mine: dict[str, Any]
    label: str

    def neighbours(self, most: int = READ) -> list[int]:
        """Return some other members: those on both sides, and all if there are few."""
        size = len(self.ranks)
        return [(self.me + away) % size for away in _outwards(min(most, size - 1))]

    @cached_property
    def me(self) -> int:
        """This rank among the members."""
        return list(self.ranks).index(self.rank)

    def compare(self, members: Sequence[int]) -> RankMismatch | None:
        """Return what is wrong with one of these members of the group, if anything is."""
        for member in members:
            said = self.records.read(_key(self.ranks[member]))
            theirs = None if said is None else self._contradiction(json.loads(said))
            if theirs is not None:
                return self._mismatch(member, theirs)
        return None

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
        sides = sorted([(self.me, self.rank, mine), (member, self.ranks[member], theirs)])
        told = ", ".join(f"rank {rank} {what}" for _, rank, what in sides)
        return RankMismatch(
            f"ranks disagree on the mesh behind group {self.label!r}: {told}. Every rank must make "
            "the same mesh",
            group=self.label,
            ranks=[side[0] for side in sides],
        )

    @contextmanager
    def watching(self) -> Generator[None, None, None]:
        """Look at the records of those who are missing, if the body takes long."""
        ended = threading.Event()
        borrow_thread(lambda: self._watch(ended))
        try:
            yield
        finally:
            ended.set()

    def _watch(self, ended: threading.Event) -> None:
        pause = LOOK_AFTER
        while not ended.wait(pause):
            pause = LOOK_AGAIN
            try:
                if self._look():
                    return
            except (PhalanxError, RuntimeError):  # the store is gone: forming will say so
                return

    def _look(self) -> bool:
        """Tell those who wait in the group's room, this rank among them, what is wrong."""
        hall = self.records.under(f"phalanx/{self._room}", patience=ANSWER_WITHIN)
        turn = hall.read(f"turn/{self.me}")
        if turn is None:
            return False
        room = hall.under(turn.decode())
        some = self.neighbours(LOOKED_AT)
        conflict = self.compare([each for each in some if not room.has(f"member/{each}")])
        if conflict is None:
            return False
        room.write_once("verdict", json.dumps(_told(conflict)))
        return True

    @property
    def _room(self) -> str:
        return Terms(self.label, tuple(self.ranks), "", "", "").room


def _outwards(count: int) -> list[int]:
    """Return so many steps to either side: 1, -1, 2, -2, ..."""
    return [(step // 2 + 1) * (-1 if step % 2 else 1) for step in range(count)]


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
