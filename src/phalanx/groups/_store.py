"""Opening the store that a URL or the environment names, and hosting it for peers.

`open_store` accepts a store, `env://`, `tcp://`, `file://` or a scheme registered with torch.
Rank 0
hosts the TCP store unless a launcher does.

Groups on a hosted store hold leases. When the last lease ends, the store stays open until every
other member of every closed group has closed it or died, since it may still read there why the
group ended; members on other machines are given `REMOTE_CLOSE_TIMEOUT` seconds. The watchdog
checks. Peers that already wait for the next group hold a reservation: a peer first reserves and
then looks whether the store is closing, the host first announces that it closes and then looks
for reservations, so one of them sees the other. A process that has forked keeps its stores,
since the child holds the socket.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import sys
import threading
import time
import uuid
import weakref
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import lru_cache
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl, urlparse

import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, HashStore, PrefixStore, Store, TCPStore
from torch.distributed.rendezvous import rendezvous

from ..env import is_launched, read_rank_env
from ..errors import InvalidArgument, InvalidState, InvalidType, RendezvousError, RendezvousTimeout
from ._formatting import first_line
from ._peers import Member, Roster
from ._store_client import StoreClient, clone_connection
from ._watchdog import watch

if TYPE_CHECKING:
    from ._status_store import StatusStore


IDLE_LINGER = (
    0.5  # seconds, where no group was closed; with two looks of the watcher it is not a whole
)
REMOTE_CLOSE_TIMEOUT = 600.0  # seconds for a member on another machine to close its group
CLOSING_KEY = "phalanx/closing"
RESERVATION_PREFIX = "phalanx/visitor/"


class Lease:
    """Keeps a hosted store alive, until it is ended or garbage."""

    def __init__(self, hosted: HostedStore) -> None:
        self._hosted = hosted
        hosted._leases.add(self)

    def end(self) -> None:
        """Give it up."""
        self._hosted._leases.discard(self)


class ClosedGroup:
    """A group that this rank has closed, and the members that have not."""

    def __init__(self, board: StatusStore, roster: Roster, rank: int) -> None:
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
        is_late = time.monotonic() - self._since > REMOTE_CLOSE_TIMEOUT and not member.is_here
        return is_late or member.is_dead or self._board.has_closed(rank)


class HostedStore:
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

    def poll(self) -> None:
        """Close the store if it is time to; the watcher calls this."""
        if self.store is None or not self._is_due() or self._has_visitors(self.store):
            return
        with _lock:
            store, leased = self.store, self._is_leased()
            if not leased:
                self.store = None
                _hosted_stores.pop(self.key, None)
        if leased:
            _cancel_closing(store)
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
        return not self._closed and (had_closed or now - self._idle_since >= IDLE_LINGER)

    def _drop_one(self) -> None:
        """Forget one closed group that is over, for a program may close many; one at a look."""
        if self._closed:
            oldest = self._closed.popleft()
            if not oldest.is_over():
                self._closed.append(oldest)

    def _has_visitors(self, store: Store) -> bool:
        """Say that the store is about to close, and see whether anybody waits in it."""
        with suppress(RuntimeError):
            store.set(CLOSING_KEY, "")
            keys = store.list_keys()
            if any(key.startswith(RESERVATION_PREFIX) and self._waits(store, key) for key in keys):
                _cancel_closing(store)
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


class StoreReservation:
    """The stay of a rank in a peer's store, until its group has formed."""

    def __init__(self, store: Store, *, seconds: float) -> None:
        """Come; raises if the store is closed meanwhile."""
        self._store = StoreClient(store, patience=seconds)
        self._key = f"{RESERVATION_PREFIX}{uuid.uuid4().hex}"
        until = time.monotonic() + seconds
        said = {"member": Member.here().to_json(), "seconds": seconds}
        self._store.set(self._key, json.dumps(said))
        while self._store.has(CLOSING_KEY):
            if time.monotonic() >= until:
                raise RendezvousTimeout("the store is about to close, and does not")
            time.sleep(0.01)

    def end(self) -> None:
        """Go, or stay as a member."""
        with suppress(Exception):  # the store is closed, and so has other troubles
            self._store.delete(self._key)


def _cancel_closing(store: Store | None) -> None:
    with suppress(RuntimeError):
        if store is not None:
            store.delete_key(CLOSING_KEY)


_hosted_stores: dict[tuple[int, int], HostedStore] = {}
"""By pid and port: a fork's are its parent's."""
_lock = (
    threading.Lock()
)  # over `_hosted_stores` and the leases, for moments; nothing is locked under it


def find_hosted_store(port: int) -> tuple[HostedStore, Lease] | None:
    """Return the store that this process hosts at a port, with a lease, if there is one."""
    with _lock:
        found = _hosted_stores.get((os.getpid(), port))
        return None if found is None else (found, Lease(found))


def host_store(store: Store, port: int) -> tuple[HostedStore, Lease]:
    """Host a store from now on."""
    _register_fork_hook()
    made = HostedStore(store, port)
    with _lock:
        made = _hosted_stores.setdefault(made.key, made)
        lease = Lease(made)
    watch(made)
    return made, lease


@lru_cache(maxsize=1)
def _register_fork_hook() -> None:
    os.register_at_fork(after_in_parent=_keep_stores_open)


def _keep_stores_open() -> None:
    # Without the lock, which another thread may hold.
    for hosted in list(_hosted_stores.values()):
        hosted.stays = True


_log = logging.getLogger(__name__)

PORT_RELEASE_TIMEOUT = 1.0  # seconds


@dataclass(frozen=True)
class OpenStore:
    """A store, and this process's place among those that use it."""

    store: Store
    rank: int
    size: int
    lent_store: Store | None = None
    """The caller's own store, which may be the one that hosts it all; kept alive."""
    hosted: HostedStore | None = None
    """The store behind it, if this process hosts that."""
    lease: Lease | None = None
    """Keeps that one alive until the group has a lease of its own."""
    visit: StoreReservation | None = None
    """Keeps one alive that a peer hosts."""
    is_at_peers: bool = False
    """Whether rank 0, another process or thread, hosts it."""


def open_and_reserve_store(
    where: Store | str | None, *, rank: int | None, size: int | None, timeout: timedelta
) -> OpenStore:
    """Do what `open_store` does, and stay: a peer that is about to close its store does not.

    Whoever calls it ends the visit when a group has formed, or has not.
    """
    until = time.monotonic() + timeout.total_seconds()
    while True:
        meeting = open_store(where, rank=rank, size=size, timeout=timeout)
        if not meeting.is_at_peers:
            return meeting
        try:
            return replace(
                meeting, visit=StoreReservation(meeting.store, seconds=timeout.total_seconds())
            )
        except dist.DistNetworkError:  # it was closed under us: await the next one
            timeout = timedelta(seconds=max(until - time.monotonic(), 0.001))


def open_store(
    where: Store | str | None, *, rank: int | None, size: int | None, timeout: timedelta
) -> OpenStore:
    """Open a store, or take one that is open, and settle this process's rank and the size."""
    if isinstance(where, Store):
        # A connection of our own: others may wait on theirs for long, and nobody else gets a word
        # in meanwhile.
        return OpenStore(
            clone_connection(where), *check_rank_and_size(rank, size), lent_store=where
        )
    if where is None:
        if rank is None and size is None and not is_launched():
            _warn_no_launcher()
            return OpenStore(HashStore(), 0, 1)
        where = "env://"
    if not isinstance(where, str):
        raise InvalidType(f"store is a Store or a URL, not {type(where).__name__}")
    url = urlparse(where)
    query = dict(parse_qsl(url.query))
    rank = int(query["rank"]) if rank is None and "rank" in query else rank
    size = int(query["world_size"]) if size is None and "world_size" in query else size
    if url.scheme == "env":
        return _open_from_env(rank, size, timeout)
    rank, size = check_rank_and_size(rank, size)
    if url.scheme == "tcp":
        if not url.hostname or url.port is None:
            raise InvalidArgument(f"{where!r} must name a host and a port: tcp://10.0.0.1:29500")
        return _open_tcp(url.hostname, url.port, rank, size, rank == 0, timeout)
    if url.scheme == "file":
        return OpenStore(_file_store(where, url.netloc + url.path, size), rank, size)
    return OpenStore(_open_registered_scheme(where, rank, size), rank, size)


@lru_cache(maxsize=1)
def _warn_no_launcher() -> None:
    script = os.path.basename(sys.argv[0]) or "train.py"
    _log.warning(
        "phalanx: no launcher, so this is rank 0 of 1; for 4 ranks: phalanx run -n 4 %s", script
    )


def check_rank_and_size(rank: int | None, size: int | None) -> tuple[int, int]:
    """Check a rank and a world size."""
    if rank is None or size is None:
        raise InvalidArgument(
            "give rank and world_size, or leave out the store to take all of them from the "
            "environment that `phalanx run` and `torchrun` set"
        )
    if size < 1:
        raise InvalidArgument(f"world_size must be at least 1, not {size}")
    if not 0 <= rank < size:
        raise InvalidArgument(
            f"rank {rank} does not fit world_size {size}: ranks are 0 to {size - 1}"
        )
    return rank, size


def _open_from_env(rank: int | None, size: int | None, timeout: timedelta) -> OpenStore:
    given = {"RANK": rank, "WORLD_SIZE": size}
    overrides = {name: str(value) for name, value in given.items() if value is not None}
    env = read_rank_env({**os.environ, **overrides})
    if env.master_addr is None or env.master_port is None:
        raise InvalidArgument(
            "MASTER_ADDR and MASTER_PORT are not both in the environment: start the script with "
            "`phalanx run` or `torchrun`, or pass store, rank and world_size yourself"
        )
    hosts = env.rank == 0 and not env.agent_store
    place = env.master_addr, env.master_port, env.rank, env.world_size
    meeting = _open_tcp(*place, hosts, timeout)
    if not env.agent_store:
        return meeting
    # It outlives the ranks: what they left in it must not confuse the next.
    store = PrefixStore(f"attempt_{env.restart_count}", meeting.store)
    return OpenStore(store, env.rank, env.world_size)


def _open_tcp(
    address: str, port: int, rank: int, size: int, hosts: bool, timeout: timedelta
) -> OpenStore:
    if not hosts:
        store = _connect_tcp_store(address, port, timeout)
        return OpenStore(store, rank, size, is_at_peers=True)
    found = find_hosted_store(port) or host_store(_host_tcp_store(address, port, timeout), port)
    hosted, lease = found
    assert hosted.store is not None, "there is a lease"
    # A connection without the server, which is not to live as long as anybody has this.
    return OpenStore(clone_connection(hosted.store), rank, size, hosted=hosted, lease=lease)


def _connect_tcp_store(address: str, port: int, timeout: timedelta) -> Store:
    """Connect to a store that a peer hosts; all of it takes no longer than `timeout`."""
    until = time.monotonic() + timeout.total_seconds()
    wait_for_listener(address, port, timeout)
    left = timedelta(seconds=max(until - time.monotonic(), 0.001))
    store = _tcp_store(address, port, False, left)
    store.set_timeout(timeout)  # of later questions
    return store


def _host_tcp_store(address: str, port: int, timeout: timedelta) -> Store:
    try:
        return _tcp_store(address, port, True, timeout)
    except RendezvousError:
        if not _wait_for_free_port(port):
            raise
    return _tcp_store(address, port, True, timeout)


def _tcp_store(address: str, port: int, hosts: bool, timeout: timedelta) -> Store:
    try:
        # Nobody waits for workers here: forming the group does, and can say who is missing.
        return TCPStore(
            address,
            port,
            is_master=hosts,
            timeout=timeout,
            wait_for_workers=False,
            multi_tenant=True,
        )
    except dist.DistNetworkError as error:
        raise _open_error(error, address, port) from error


def _wait_for_free_port(port: int) -> bool:
    """Wait for a port that another process may be about to release, as `_store_server` says."""
    until = time.monotonic() + PORT_RELEASE_TIMEOUT
    while time.monotonic() < until:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with suppress(OSError):
                probe.bind(("", port))
                return True
        time.sleep(0.02)
    return False


def wait_for_listener(host: str, port: int, timeout: timedelta) -> None:
    """Wait until somebody listens, quietly: torch would log a stack trace for every retry."""
    until = time.monotonic() + timeout.total_seconds()
    pause = 0.005
    while True:
        try:
            socket.create_connection((host, port), timeout=2).close()
            return
        except socket.gaierror as error:
            reason = f"the host name does not resolve ({error.strerror})"
        except OSError as error:
            reason = (error.strerror or str(error) or type(error).__name__).lower()
        if time.monotonic() + pause >= until:
            raise RendezvousTimeout(
                f"no store answered at {host}:{port} within {timeout.total_seconds():g} s: "
                f"{reason}. Rank 0 or the launcher hosts it: is it running there?"
            )
        time.sleep(pause)
        pause = min(pause * 1.5, 0.25)


def _open_error(error: Exception, host: str, port: int) -> RendezvousError:
    text = str(error)
    if "EADDRINUSE" in text:
        return RendezvousError(
            f"port {port} on {host} is in use by another program: choose another MASTER_PORT, "
            "or start with `phalanx run`, which finds a free one"
        )
    return RendezvousError(f"cannot open the store at {host}:{port}: {first_line(error)}")


def _file_store(url: str, path: str, size: int) -> Store:
    if not path:
        raise InvalidArgument(f"{url!r} must name a file: file:///shared/folder/job-17")
    folder = os.path.dirname(path)
    if not os.path.isdir(folder):
        raise InvalidArgument(f"{url!r}: there is no folder {folder}")
    return FileStore(path, size)


def _open_registered_scheme(url: str, rank: int, size: int) -> Store:
    """Ask torch, where a user may have registered a scheme of their own."""
    try:
        store: Store = next(iter(rendezvous(url, rank, size)))[0]
    except RuntimeError as error:
        raise InvalidArgument(
            f"cannot meet at {url!r}: use env://, tcp://host:port or file:///path, or a scheme "
            "registered with torch.distributed.rendezvous"
        ) from error
    return store
