"""Stores that this process hosts for its peers, and when their ports are free again.

A group on such a store has a lease. When the last lease ends, the store stays until every other
member of every group that was closed has closed it too or died, for until then it may ask why the
group has ended. Of a member on another machine nobody here can tell whether it lives, so it is
waited for no longer than `UNSEEN` seconds. The watcher looks.

A forked child has the listening socket too and keeps the port taken, so a process that has forked
keeps the store.

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
from collections import deque
from contextlib import suppress
from functools import lru_cache
from typing import TYPE_CHECKING

from torch._C._distributed_c10d import Store

from ..errors import InvalidState, RendezvousTimeout
from ._patient import PatientStore
from ._roster import Member, Roster
from ._watch import watch

if TYPE_CHECKING:
    from ._board import Board

__all__ = ["Hosted", "Lease", "Visit", "find_hosted", "host"]

LINGER = 0.5  # seconds, where no group was closed; with two looks of the watcher it is not a whole
UNSEEN = 600.0  # seconds for a member on another machine to close its group
CLOSING = "phalanx/closing"
VISITOR = "phalanx/visitor/"


class Lease:
    """Keeps a hosted store alive, until it is ended or garbage."""

    def __init__(self, hosted: Hosted) -> None:
        self._hosted = hosted
        hosted._leases.add(self)

    def end(self) -> None:
        """Give it up."""
        self._hosted._leases.discard(self)


class ClosedGroup:
    """A group that this rank has closed, and the members that have not."""

    def __init__(self, board: Board, roster: Roster, rank: int) -> None:
        self._board = board
        self._members = roster.members
        self._awaited = [each for each in range(len(roster.members)) if each != rank]
        self._since = time.monotonic()

    def is_over(self) -> bool:
        """Whether every other member has closed it or died."""
        while self._awaited and self._is_gone(self._awaited[-1]):
            self._awaited.pop()
        return not self._awaited

    def _is_gone(self, rank: int) -> bool:
        member = self._members[rank]
        is_late = time.monotonic() - self._since > UNSEEN and not member.is_here
        return is_late or member.is_dead or self._board.has_closed(rank)


class Hosted:
    """A store that this process hosts."""

    def __init__(self, store: Store, port: int) -> None:
        self.store: Store | None = store
        """None when it is closed."""
        self.key = os.getpid(), port
        self.stays = False
        """Whether it is kept for as long as the process lives."""
        self._leases: weakref.WeakSet[Lease] = weakref.WeakSet()
        self._idle_since: float | None = None
        self._closed: deque[ClosedGroup] = deque()
        self._seen: dict[str, float] = {}

    def lease(self) -> Lease:
        """Return a lease; raises `InvalidState` if the store is closed."""
        with _lock:
            if self.store is None:
                raise InvalidState(
                    "the store of this group is closed: rank 0 hosted it until all ranks had shut "
                    "their groups down; make a new group with new_group"
                )
            return Lease(self)

    def note_closed(self, group: ClosedGroup) -> None:
        """Keep the store until all members of a group have closed it."""
        self._closed.append(group)

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

    def _is_leased(self) -> bool:
        return self.stays or len(self._leases) > 0

    def _is_due(self) -> bool:
        now = time.monotonic()
        had_closed = bool(self._closed)
        if self._is_leased():
            self._idle_since = None
            self._drop_one()
            return False
        if self._idle_since is None:
            self._idle_since = now
        while self._closed and self._closed[0].is_over():
            self._closed.popleft()
        return not self._closed and (had_closed or now - self._idle_since >= LINGER)

    def _drop_one(self) -> None:
        """Forget one closed group that is over, for a program may close many; one at a look."""
        if self._closed:
            oldest = self._closed.popleft()
            if not oldest.is_over():
                self._closed.append(oldest)

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
        return None if found is None else (found, Lease(found))


def host(store: Store, port: int) -> tuple[Hosted, Lease]:
    """Host a store from now on."""
    _notice_forks()
    made = Hosted(store, port)
    with _lock:
        made = _hosted.setdefault(made.key, made)
        lease = Lease(made)
    watch(made)
    return made, lease


@lru_cache(maxsize=1)
def _notice_forks() -> None:
    os.register_at_fork(after_in_parent=_keep_all)


def _keep_all() -> None:
    # Without the lock, which another thread may hold.
    for hosted in list(_hosted.values()):
        hosted.stays = True
