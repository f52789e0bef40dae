"""Stores that this process hosts for its peers, and when their ports are free again.

A group on such a store has a lease. When the last lease ends, the store stays until every other
member of the groups that were closed last has left or died, for they may be reading why a group has
ended; at most `LINGER` seconds. The watcher looks.

Peers that have come for the next group before this rank does are visitors: they say so in the
store, and it is not closed under them. A visitor announces itself and then looks whether the store
is about to close; the host says that it is about to and then looks for visitors. One of them sees
the other.
"""

from __future__ import annotations

import json
import os
import threading
import time
import uuid
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from torch._C._distributed_c10d import Store

from ..errors import RendezvousTimeout
from ._patient import PatientStore
from ._roster import Member, Roster
from ._watch import watch

if TYPE_CHECKING:
    from ._board import Board

__all__ = ["Hosted", "Lease", "Visit", "find_hosted", "host", "others_are_gone"]

LINGER = 0.5  # seconds; with two looks of the watcher it is not a whole one
RECENT = 1.0  # seconds for which the end of a group matters to its members
CLOSING = "phalanx/closing"
VISITOR = "phalanx/visitor/"


class Lease:
    """Keeps a hosted store alive; groups, and whoever is about to form one, share it."""

    __slots__ = ("__weakref__",)


class Hosted:
    """A store that this process hosts."""

    def __init__(self, store: Store, port: int) -> None:
        self.store: Store | None = store
        """None when it is closed."""
        self.key = os.getpid(), port
        self.stays = False
        """Whether it is kept for as long as the process lives."""
        self._lease: weakref.ref[Lease] | None = None
        self._idle_since: float | None = None
        self._closed: list[tuple[float, Callable[[], bool]]] = []
        self._seen: dict[str, float] = {}

    def lease(self) -> Lease:
        """Return a share in the store."""
        with _lock:
            return self._share()

    def note_closed(self, is_over: Callable[[], bool]) -> None:
        """Remember a group that was closed; `is_over` tells whether all others are gone too."""
        with _lock:
            self._closed.append((time.monotonic(), is_over))

    def attend(self) -> None:
        """Close the store if it is time to; the watcher calls this."""
        if self.store is None or not self._is_due() or self._has_visitors(self.store):
            return
        with _lock:
            store, leased = self.store, self._is_leased()
            if not leased:
                self.store = None
                _hosted.pop(self.key, None)
        if leased:
            _say_open(store)
        # Here, with no lock held, the last reference to it goes, and with it the server.

    def exit(self) -> None:
        """Do nothing: the end of the process frees the port."""

    def _share(self) -> Lease:
        lease = None if self._lease is None else self._lease()
        if lease is None:
            lease = Lease()
            self._lease = weakref.ref(lease)
        return lease

    def _is_leased(self) -> bool:
        return self.stays or (self._lease is not None and self._lease() is not None)

    def _is_due(self) -> bool:
        now = time.monotonic()
        with _lock:
            recent = self._closed = [each for each in self._closed if now - each[0] < RECENT]
            if self._is_leased():
                self._idle_since = None
                return False
        if self._idle_since is None:
            self._idle_since = now
        left = bool(recent) and all(is_over() for _, is_over in recent)
        return left or now - self._idle_since >= LINGER

    def _has_visitors(self, store: Store) -> bool:
        """Say that the store is about to close, and see whether anybody waits in it."""
        with suppress(RuntimeError):
            store.set(CLOSING, "")
            keys = store.list_keys()
            if any(key.startswith(VISITOR) and self._waits(store, key) for key in keys):
                _say_open(store)
                return True
        return False

    def _waits(self, store: Store, key: str) -> bool:
        said = store.compare_set(key, "", "")  # which, unlike `get`, does not wait for a value
        if not said:
            return False
        data = json.loads(said)
        first = self._seen.setdefault(key, time.monotonic())
        is_late = time.monotonic() - first > data["seconds"]
        return not is_late and not Member.from_json(data["member"]).is_dead


class Visit:
    """The stay of a rank in a peer's store, until its group has formed."""

    def __init__(self, store: Store, *, seconds: float) -> None:
        """Come; raises if the store is closed meanwhile."""
        self._store = PatientStore(store, patience=seconds)
        self._key = f"{VISITOR}{uuid.uuid4().hex}"
        until = time.monotonic() + seconds
        said = {"member": Member.here().to_json(), "seconds": seconds}
        self._store.set(self._key, json.dumps(said))
        while self._store.has(CLOSING):
            if time.monotonic() >= until:
                raise RendezvousTimeout("the store is about to close, and does not")
            time.sleep(0.01)

    def end(self) -> None:
        """Go, or stay as a member."""
        with suppress(Exception):  # the store is closed, and so has other troubles
            self._store.delete(self._key)


def _say_open(store: Store | None) -> None:
    with suppress(RuntimeError):
        if store is not None:
            store.delete_key(CLOSING)


_hosted: dict[tuple[int, int], Hosted] = {}
"""By pid and port: a fork's are its parent's."""
_lock = threading.Lock()  # over `_hosted` and the leases, for moments; nothing is locked under it


def find_hosted(port: int) -> tuple[Hosted, Lease] | None:
    """Return the store that this process hosts at a port, with a lease, if there is one."""
    with _lock:
        found = _hosted.get((os.getpid(), port))
        return None if found is None else (found, found._share())


def host(store: Store, port: int) -> tuple[Hosted, Lease]:
    """Host a store from now on."""
    made = Hosted(store, port)
    with _lock:
        made = _hosted.setdefault(made.key, made)
        lease = made._share()
    watch(made)
    return made, lease


def others_are_gone(board: Board, roster: Roster, rank: int) -> bool:
    """Tell whether every other member of a group has left it or died."""
    left, dead = board.left(), set(roster.dead())
    return all(each in left or each in dead or each == rank for each in range(len(roster.members)))
