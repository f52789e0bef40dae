"""Opening the store that a URL or the environment names, and hosting it for peers.

`open_store` accepts a store, `env://`, `tcp://`, `file://` or a scheme registered with torch.
Rank 0 hosts the TCP store unless a launcher does.

Groups on a hosted store hold leases. When the last lease ends, the store stays open until every
other member of every closed group has closed it or died, since it may still read there why the
group ended; members on other machines are given `Timing.remote_close_timeout` seconds. The
watchdog checks. Peers that already wait for the next group hold a reservation. A peer first
writes its reservation and then checks whether the store is closing; the host first announces that
it closes and then checks for reservations, so one of them sees the other. A process that has
forked keeps its stores, since the child holds the socket.
"""

from __future__ import annotations

import errno
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
from ._timing import Timing, default_timing
from ._watchdog import watch

if TYPE_CHECKING:
    from ._status_store import StatusStore

_log = logging.getLogger(__name__)


CLOSING_KEY = "phalanx/closing"
RESERVATION_PREFIX = "phalanx/reservation/"


class Lease:
    """Keeps a hosted store open until it is ended or garbage-collected."""

    def __init__(self, hosted: HostedStore) -> None:
        self._hosted = hosted
        hosted._leases.add(self)

    def end(self) -> None:
        self._hosted._leases.discard(self)


class ClosedGroup:
    """A group that this rank has closed, and the members that may not have."""

    def __init__(
        self, status: StatusStore, roster: Roster, rank: int, *, timing: Timing | None = None
    ) -> None:
        self._status = status
        self._members = roster.members
        self._open_ranks = [each for each in range(len(roster.members)) if each != rank]
        self._closed_at = time.monotonic()
        self._remote_timeout = (timing or default_timing()).remote_close_timeout

    def is_over(self) -> bool:
        """Whether every other member has closed it or died."""
        while self._open_ranks and self._is_gone(self._open_ranks[-1]):
            self._open_ranks.pop()
        return not self._open_ranks

    def _is_gone(self, rank: int) -> bool:
        member = self._members[rank]
        is_late = time.monotonic() - self._closed_at > self._remote_timeout
        if is_late and not member.is_here:
            return True
        return member.is_dead or self._status.has_closed(rank)


class HostedStore:
    """A store that this process hosts."""

    def __init__(self, store: Store, port: int, *, timing: Timing | None = None) -> None:
        self.store: Store | None = store
        """None when it is closed."""
        self.key = os.getpid(), port
        self.stays = False
        """Whether it stays open until the process ends."""
        self._timing = timing or default_timing()
        self._leases: weakref.WeakSet[Lease] = weakref.WeakSet()
        self._idle_since: float | None = None
        self._closed_groups: deque[ClosedGroup] = deque()
        self._reservations_seen: dict[str, float] = {}

    def lease(self) -> Lease:
        """Return a lease; raises `InvalidState` if the store is closed."""
        with _lock:
            if self.store is None:
                raise InvalidState(
                    "the store of this group is closed: rank 0 hosted it until all ranks had shut "
                    "down their groups. Create a new group with new_group"
                )
            return Lease(self)

    def note_closed(self, group: ClosedGroup) -> None:
        """Keep the store open until all members of a group have closed it."""
        self._closed_groups.append(group)

    def poll(self) -> None:
        """Close the store if nobody needs it any more; called by the watchdog."""
        if self.store is None or not self._is_unused() or self._has_reservations(self.store):
            return
        with _lock:
            store, leased = self.store, self._is_leased()
            if not leased:
                self.store = None
                _hosted_stores.pop(self.key, None)
        if leased:
            _cancel_closing(store)
        # The last reference is dropped here, with no lock held; that stops the server.

    def exit(self) -> None:
        """Do nothing: the end of the process frees the port."""

    def _is_leased(self) -> bool:
        return self.stays or len(self._leases) > 0

    def _is_unused(self) -> bool:
        now = time.monotonic()
        had_closed = bool(self._closed_groups)
        if self._is_leased():
            self._idle_since = None
            self._drop_one_closed_group()
            return False
        if self._idle_since is None:
            self._idle_since = now
        while self._closed_groups and self._closed_groups[0].is_over():
            self._closed_groups.popleft()
        if self._closed_groups:
            return False
        return had_closed or now - self._idle_since >= self._timing.idle_linger

    def _drop_one_closed_group(self) -> None:
        """Forget a closed group that is over, since a program may close many; one per poll."""
        if self._closed_groups:
            oldest = self._closed_groups.popleft()
            if not oldest.is_over():
                self._closed_groups.append(oldest)

    def _has_reservations(self, store: Store) -> bool:
        """Announce that the store closes, and check whether a peer waits in it."""
        with suppress(RuntimeError):
            store.set(CLOSING_KEY, "")
            keys = store.list_keys()
            reservations = [key for key in keys if key.startswith(RESERVATION_PREFIX)]
            if any(self._is_valid(store, key) for key in reservations):
                _cancel_closing(store)
                return True
        return False

    def _is_valid(self, store: Store, key: str) -> bool:
        text = store.compare_set(key, "", "")  # unlike `get`, this does not wait for a value
        if not text:
            return False
        data = json.loads(text)
        first = self._reservations_seen.setdefault(key, time.monotonic())
        is_late = time.monotonic() - first > data["seconds"]
        return not is_late and not Member.from_json(data["member"]).is_dead


class StoreReservation:
    """Keeps a peer's store open for a rank until its group has formed."""

    def __init__(self, store: Store, *, seconds: float) -> None:
        """Write the reservation; raises if the store closes meanwhile."""
        self._store = StoreClient(store, timeout=seconds)
        self._key = f"{RESERVATION_PREFIX}{uuid.uuid4().hex}"
        until = time.monotonic() + seconds
        data = {"member": Member.here().to_json(), "seconds": seconds}
        self._store.set(self._key, json.dumps(data))
        while self._store.has(CLOSING_KEY):
            if time.monotonic() >= until:
                raise RendezvousTimeout(
                    f"the store that rank 0 hosts has been closing for {seconds:g} s"
                )
            time.sleep(0.01)

    def end(self) -> None:
        with suppress(Exception):  # the store may be closed
            self._store.delete(self._key)


def _cancel_closing(store: Store | None) -> None:
    with suppress(RuntimeError):
        if store is not None:
            store.delete_key(CLOSING_KEY)


_hosted_stores: dict[tuple[int, int], HostedStore] = {}
"""By pid and port; a forked child does not host its parent's stores."""
_lock = threading.Lock()  # guards `_hosted_stores` and the leases; no other lock is taken under it


def find_hosted_store(port: int) -> tuple[HostedStore, Lease] | None:
    """Return the store that this process hosts at a port, with a lease, if there is one."""
    with _lock:
        found = _hosted_stores.get((os.getpid(), port))
        return None if found is None else (found, Lease(found))


def host_store(store: Store, port: int) -> tuple[HostedStore, Lease]:
    """Host a store, with a lease; returns the one that is hosted at that port already, if any."""
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
    # Without the lock, which another thread may hold during the fork.
    for hosted in list(_hosted_stores.values()):
        hosted.stays = True


@dataclass(frozen=True)
class OpenStore:
    """An open store and this process's rank among its users."""

    store: Store
    rank: int
    size: int
    lent_store: Store | None = None
    """The store that the caller passed; kept alive, since it may be the server."""
    hosted: HostedStore | None = None
    """The server, if this process hosts it."""
    lease: Lease | None = None
    """Keeps `hosted` open until the group has its own lease."""
    reservation: StoreReservation | None = None
    """Keeps a store open that a peer hosts."""
    is_remote: bool = False
    """Whether rank 0, another process or thread, hosts it."""


def open_and_reserve_store(
    where: Store | str | None, *, rank: int | None, size: int | None, timeout: timedelta
) -> OpenStore:
    """Open a store and reserve it, so that the peer that hosts it does not close it.

    The caller ends the reservation when the group has formed or failed to form.
    """
    until = time.monotonic() + timeout.total_seconds()
    while True:
        opened = open_store(where, rank=rank, size=size, timeout=timeout)
        if not opened.is_remote:
            return opened
        try:
            reservation = StoreReservation(opened.store, seconds=timeout.total_seconds())
            return replace(opened, reservation=reservation)
        except dist.DistNetworkError:  # it was closed meanwhile: wait for the next one
            timeout = timedelta(seconds=max(until - time.monotonic(), 0.001))


def open_store(
    where: Store | str | None, *, rank: int | None, size: int | None, timeout: timedelta
) -> OpenStore:
    """Open a store, or use an open one, and determine this process's rank and the world size."""
    if isinstance(where, Store):
        # A separate connection, since a wait blocks all other requests on the same one.
        return OpenStore(
            clone_connection(where), *check_rank_and_size(rank, size), lent_store=where
        )
    if where is None:
        if rank is None and size is None and not is_launched():
            _warn_no_launcher()
            return OpenStore(HashStore(), 0, 1)
        where = "env://"
    if not isinstance(where, str):
        raise InvalidType(f"store must be a Store or a URL, got {type(where).__name__}")
    url = urlparse(where)
    query = dict(parse_qsl(url.query))
    rank = int(query["rank"]) if rank is None and "rank" in query else rank
    size = int(query["world_size"]) if size is None and "world_size" in query else size
    if url.scheme == "env":
        return _open_from_env(rank, size, timeout)
    rank, size = check_rank_and_size(rank, size)
    if url.scheme == "tcp":
        if not url.hostname or url.port is None:
            raise InvalidArgument(
                f"store {where!r} must have a host and a port, as in tcp://10.0.0.1:29500"
            )
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
            "rank and world_size are required with a store. Without a store, all three come from "
            "the environment that `phalanx run` and `torchrun` set"
        )
    if size < 1:
        raise InvalidArgument(f"world_size must be at least 1, got {size}")
    if not 0 <= rank < size:
        raise InvalidArgument(
            f"rank must be between 0 and {size - 1} for world_size {size}, got {rank}"
        )
    return rank, size


def _open_from_env(rank: int | None, size: int | None, timeout: timedelta) -> OpenStore:
    given = {"RANK": rank, "WORLD_SIZE": size}
    overrides = {name: str(value) for name, value in given.items() if value is not None}
    env = read_rank_env({**os.environ, **overrides})
    if env.master_addr is None or env.master_port is None:
        raise InvalidArgument(
            "MASTER_ADDR and MASTER_PORT are not both set. Start the script with `phalanx run` or "
            "`torchrun`, or pass store, rank and world_size"
        )
    hosts = env.rank == 0 and not env.agent_store
    address, port = env.master_addr, env.master_port
    opened = _open_tcp(address, port, env.rank, env.world_size, hosts, timeout)
    if not env.agent_store:
        return opened
    # The launcher's store outlives the ranks; keys of an earlier attempt must not be read.
    store = PrefixStore(f"attempt_{env.restart_count}", opened.store)
    return OpenStore(store, env.rank, env.world_size)


def _open_tcp(
    address: str, port: int, rank: int, size: int, hosts: bool, timeout: timedelta
) -> OpenStore:
    if not hosts:
        store = _connect_tcp_store(address, port, timeout)
        return OpenStore(store, rank, size, is_remote=True)
    found = find_hosted_store(port) or host_store(_host_tcp_store(address, port, timeout), port)
    hosted, lease = found
    assert hosted.store is not None, "the lease keeps it open"
    # A plain connection: holding the server itself would keep it from closing.
    return OpenStore(clone_connection(hosted.store), rank, size, hosted=hosted, lease=lease)


def _connect_tcp_store(address: str, port: int, timeout: timedelta) -> Store:
    """Connect to a store that a peer hosts, within `timeout`."""
    until = time.monotonic() + timeout.total_seconds()
    wait_for_listener(address, port, timeout)
    left = timedelta(seconds=max(until - time.monotonic(), 0.001))
    store = _tcp_store(address, port, False, left)
    store.set_timeout(timeout)  # for later requests
    return store


def _host_tcp_store(address: str, port: int, timeout: timedelta) -> Store:
    try:
        return _tcp_store(address, port, True, timeout)
    except RendezvousError as error:
        if not _wait_for_free_port(port):
            raise RendezvousError(
                f"port {port} on {address} is in use by another program. Choose another "
                "MASTER_PORT, or start with `phalanx run`, which finds a free port"
            ) from error
    return _tcp_store(address, port, True, timeout)


def _tcp_store(address: str, port: int, hosts: bool, timeout: timedelta) -> Store:
    try:
        # The rendezvous waits for the other ranks, and can name the missing ones.
        return TCPStore(
            address,
            port,
            is_master=hosts,
            timeout=timeout,
            wait_for_workers=False,
            multi_tenant=True,
        )
    except dist.DistNetworkError as error:
        raise RendezvousError(
            f"cannot open the store at {address}:{port}: {first_line(error)}"
        ) from error


def _wait_for_free_port(port: int) -> bool:
    """Wait for a port that another process may be about to release; False if it does not."""
    until = time.monotonic() + default_timing().port_release_timeout
    while time.monotonic() < until:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("", port))
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    return True  # opening the store raises the error
            else:
                return True
        time.sleep(0.02)
    return False


def wait_for_listener(host: str, port: int, timeout: timedelta) -> None:
    """Wait until the port accepts connections; torch would log a stack trace for every retry."""
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
                f"no store at {host}:{port} within {timeout.total_seconds():g} s: {reason}. Check "
                "that rank 0, or the launcher, is running on that host"
            )
        time.sleep(pause)
        pause = min(pause * 1.5, 0.25)


def _file_store(url: str, path: str, size: int) -> Store:
    if not path:
        raise InvalidArgument(f"store {url!r} must have a path, as in file:///shared/job-17")
    folder = os.path.dirname(path)
    if not os.path.isdir(folder):
        raise InvalidArgument(f"store {url!r}: directory {folder} does not exist")
    return FileStore(path, size)


def _open_registered_scheme(url: str, rank: int, size: int) -> Store:
    """Open a store with a scheme that the user has registered with torch."""
    try:
        store: Store = next(iter(rendezvous(url, rank, size)))[0]
    except RuntimeError as error:
        raise InvalidArgument(
            f"unknown store {url!r}. Use env://, tcp://host:port, file:///path or a scheme "
            "registered with torch.distributed.rendezvous"
        ) from error
    return store
