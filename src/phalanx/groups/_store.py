"""Stores: clients with per-request timeouts, opening the store that a URL names, hosting it.

torch's stores block until the server answers, so a stopped server would void every deadline.
Requests of a `StoreClient` run on a worker thread; the caller stops waiting after the timeout
and the thread is abandoned, not joined. While a request is unanswered, further requests on the
same connection fail immediately.

`open_store` accepts a store, `env://`, `tcp://`, `file://` or a scheme registered with torch.
Rank 0 hosts the TCP store unless a launcher does.

Groups on a hosted store hold leases. When the last lease ends, the store stays open until every
other rank of every closed group has closed it or died, since it may still read there why the
group ended; ranks on other machines are given `Timing.remote_close_timeout` seconds. The
watchdog checks. Peers that already wait for the next group hold a reservation. A peer first
writes its reservation and then checks whether the store is closing; the host first announces that
it closes and then checks for reservations, so one of them sees the other. A process that has
forked keeps its stores, since the child holds the socket.
"""

from __future__ import annotations

import copy
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
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import lru_cache
from typing import TYPE_CHECKING, Self, TypeVar
from urllib.parse import parse_qsl, urlparse

import msgspec
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, HashStore, PrefixStore, Store, TCPStore
from torch.distributed.rendezvous import rendezvous

from .._formatting import first_line
from ..env import is_launched, read_rank_env, refuse_in_elastic_run
from ..errors import InvalidArgument, InvalidState, InvalidType, RendezvousError, RendezvousTimeout
from ._peers import PeerProcess, Roster
from ._timing import Timing, default_timing
from ._watchdog import watch
from ._worker_threads import BackgroundCall

if TYPE_CHECKING:
    from ._status_store import StatusStore

_log = logging.getLogger(__name__)

T = TypeVar("T")
# Seconds between two polls of a store. Not in `Timing`: they bound the load, no wait lasts longer.
MIN_POLL_INTERVAL = 5e-5
MAX_POLL_INTERVAL = 2e-2
CLOSING_KEY = "phalanx/closing"
RESERVATION_PREFIX = "phalanx/reservation/"


def to_json(value: object) -> str:
    # Not `msgspec.json`, which refuses the surrogates in names of files that are not UTF-8.
    return json.dumps(msgspec.to_builtins(value))


def from_json(text: bytes, kind: type[T]) -> T:
    return msgspec.convert(json.loads(text), kind)


def clone_connection(store: Store) -> Store:
    # Out of descriptors, torch would retry until the store's timeout; this raises immediately.
    socket.socket().close()
    clone: Store = store.clone()  # type: ignore[attr-defined]  # missing in torch's stubs
    return clone


class BlockingStoreClient:
    """A store client whose requests block until the store answers."""

    def __init__(self, store: Store) -> None:
        self.raw = store

    def under(self, prefix: str) -> Self:
        """Return the part of the store whose keys begin with `prefix`, on the same connection."""
        part = copy.copy(self)
        part.raw = PrefixStore(prefix, self.raw)
        return part

    def connect(self) -> Store:
        return self._request(lambda: clone_connection(self.raw))

    def add(self, key: str, amount: int) -> int:
        return self._request(lambda: self.raw.add(key, amount))

    def set(self, key: str, value: str) -> None:
        self._request(lambda: self.raw.set(key, value))

    def set_all(self, values: dict[str, str]) -> None:
        """Write several values, with one request if the store supports it."""
        multi_set = self.raw.multi_set  # type: ignore[attr-defined]  # missing in torch's stubs
        self._request(lambda: multi_set([*values], [*values.values()]))

    def read(self, key: str) -> bytes | None:
        """Return a value, or None if the key does not exist."""
        return self._request(lambda: self.raw.get(key) if self.raw.check([key]) else None)

    def fetch(self, key: str) -> bytes:
        """Return the value of a key that exists."""
        return self.write_once(key, "")  # one request, where `read` makes two

    def has(self, *keys: str) -> bool:
        return self._request(lambda: self.raw.check(list(keys)))

    def write_once(self, key: str, value: str) -> bytes:
        """Write a value unless the key exists, and return its value."""
        return self._request(lambda: self.raw.compare_set(key, "", value))

    def all_keys(self) -> list[str]:
        return self._request(self.raw.list_keys)

    def delete(self, key: str) -> None:
        self._request(lambda: self.raw.delete_key(key))

    def await_all(self, keys: Sequence[str], seconds: float) -> bool:
        """Wait until all these keys exist. Return whether they do.

        Polls, since torch logs two lines whenever a store's own wait times out.
        """

        def poll() -> bool:
            until = time.monotonic() + seconds
            pause = MIN_POLL_INTERVAL
            while not self.raw.check(list(keys)):
                remaining = until - time.monotonic()
                if remaining <= 0:
                    return False
                time.sleep(min(pause, remaining))
                pause = min(pause * 1.25, MAX_POLL_INTERVAL)
            return True

        return self._request(poll)

    def _request(self, request: Callable[[], T]) -> T:
        return request()


class StoreClient(BlockingStoreClient):
    """A store client whose requests raise `RendezvousTimeout` when they take too long."""

    def __init__(self, store: Store, *, timeout: float | None = None) -> None:
        super().__init__(store)
        self._timeout = default_timing().request_timeout if timeout is None else timeout
        # The end of the last request that timed out. All clients of the connection share the list.
        self._unanswered: list[threading.Event] = []

    def _request(self, request: Callable[[], T]) -> T:
        if any(not ended.is_set() for ended in self._unanswered):
            raise RendezvousTimeout("the store does not answer")
        call = BackgroundCall(request)
        if not call.ended.wait(self._timeout):
            self._unanswered[:] = [call.ended]
            raise RendezvousTimeout(f"the store did not answer within {self._timeout:g} s")
        return call.result()


class Lease:
    """Keeps a hosted store open until it is ended or garbage-collected."""

    def __init__(self, hosted: HostedStore) -> None:
        self._hosted = hosted
        hosted._leases.add(self)

    def end(self) -> None:
        self._hosted._leases.discard(self)


class ClosedGroup:
    """A group that this rank has closed, and the ranks that may not have."""

    def __init__(
        self, status: StatusStore, roster: Roster, rank: int, *, timing: Timing | None = None
    ) -> None:
        self._status = status
        self._open = [each for each in enumerate(roster.processes) if each[0] != rank]
        timeout = (timing or default_timing()).remote_close_timeout
        self._remote_deadline = time.monotonic() + timeout

    def is_over(self) -> bool:
        """Whether every other rank has closed it or died."""
        while self._open:
            rank, process = self._open[-1]
            is_late = time.monotonic() > self._remote_deadline and not process.is_on_this_machine
            if not (is_late or process.is_dead or self._status.has_closed(rank)):
                return False
            self._open.pop()
        return True


class HostedStore:
    """A store that this process hosts."""

    def __init__(self, store: Store, key: tuple[int, int]) -> None:
        self.store: Store | None = store  # None when it is closed
        self.keep_open = False  # until the process ends
        self._key = key
        self._linger = default_timing().idle_linger
        self._leases: weakref.WeakSet[Lease] = weakref.WeakSet()
        self._idle_since: float | None = None
        self.closed_groups: deque[ClosedGroup] = deque()  # here, but perhaps not on all ranks
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

    def poll(self) -> None:
        """Close the store if nothing needs it any more; called by the watchdog."""
        store = self.store
        is_reserved = False
        if store is None or not self._is_unused():
            return
        with suppress(RuntimeError):
            store.set(CLOSING_KEY, "")  # before the reservations are read, see above
            keys = [key for key in store.list_keys() if key.startswith(RESERVATION_PREFIX)]
            is_reserved = any(self._is_valid(store, key) for key in keys)
        with _lock:
            is_needed = is_reserved or self._is_leased()
            if not is_needed:
                self.store = None
                _hosted_stores.pop(self._key, None)
        if is_needed:
            with suppress(RuntimeError):
                store.delete_key(CLOSING_KEY)
        # `store`, the last reference, is dropped here, with no lock held; that stops the server.

    def exit(self) -> None:
        """Do nothing: the end of the process frees the port."""

    def _is_leased(self) -> bool:
        return self.keep_open or len(self._leases) > 0

    def _is_unused(self) -> bool:
        closed = self.closed_groups
        had_closed = bool(closed)
        if self._is_leased():
            self._idle_since = None
            if closed:  # a program may close many groups: check one per poll
                oldest = closed.popleft()
                if not oldest.is_over():
                    closed.append(oldest)
            return False
        if self._idle_since is None:
            self._idle_since = time.monotonic()
        while closed and closed[0].is_over():
            closed.popleft()
        if closed:
            return False
        return had_closed or time.monotonic() - self._idle_since >= self._linger

    def _is_valid(self, store: Store, key: str) -> bool:
        text = store.compare_set(key, "", "")  # unlike `get`, this does not wait for a value
        if not text:
            return False
        process, seconds = from_json(text, tuple[PeerProcess, float])
        first = self._reservations_seen.setdefault(key, time.monotonic())
        return time.monotonic() - first <= seconds and not process.is_dead


class StoreReservation:
    """Keeps a peer's store open for a rank until its group has formed."""

    def __init__(self, store: Store, *, seconds: float) -> None:
        """Write the reservation; raises if the store closes meanwhile."""
        self._store = StoreClient(store, timeout=seconds)
        self._key = f"{RESERVATION_PREFIX}{uuid.uuid4().hex}"
        until = time.monotonic() + seconds
        self._store.set(self._key, to_json((PeerProcess.current(), seconds)))
        while self._store.has(CLOSING_KEY):
            if time.monotonic() >= until:
                raise RendezvousTimeout(f"the store of rank 0 has been closing for {seconds:g} s")
            time.sleep(default_timing().brief_poll_interval)

    def end(self) -> None:
        with suppress(Exception):  # the store may be closed
            self._store.delete(self._key)


# By pid and port: a forked child does not host its parent's stores.
_hosted_stores: dict[tuple[int, int], HostedStore] = {}
_lock = threading.Lock()  # guards `_hosted_stores` and the leases; no other lock is taken under it


@lru_cache(maxsize=1)
def _keep_stores_open_after_forks() -> None:
    def keep() -> None:
        # Without the lock, which another thread may hold during the fork.
        for hosted in list(_hosted_stores.values()):
            hosted.keep_open = True

    os.register_at_fork(after_in_parent=keep)


@dataclass(frozen=True)
class OpenStore:
    """An open store and this process's rank among its users."""

    store: Store
    rank: int
    size: int
    caller_store: Store | None = None  # the caller's; kept alive, since it may be the server
    hosted: HostedStore | None = None  # the server, if this process hosts it
    reservation: Lease | StoreReservation | None = None
    """Keeps the store open until the group has formed, if this process or a peer hosts it."""
    hosted_by_peer: bool = False  # rank 0, another process or thread, hosts it


def open_and_reserve_store(
    where: Store | str | None, *, rank: int | None, size: int | None, timeout: timedelta
) -> OpenStore:
    """Open a store and reserve it, so that the peer that hosts it does not close it.

    The caller ends `reservation` when the group has formed or failed to form.
    """
    until = time.monotonic() + timeout.total_seconds()
    while True:
        opened = open_store(where, rank=rank, size=size, timeout=timeout)
        if not opened.hosted_by_peer:
            return opened
        try:
            return replace(
                opened, reservation=StoreReservation(opened.store, seconds=timeout.total_seconds())
            )
        except dist.DistNetworkError:  # it was closed meanwhile: wait for the next one
            timeout = timedelta(seconds=max(until - time.monotonic(), 0.001))


def open_store(
    where: Store | str | None, *, rank: int | None, size: int | None, timeout: timedelta
) -> OpenStore:
    """Open a store, or use an open one, and determine this process's rank and the world size."""
    if isinstance(where, Store):
        # A separate connection, since a wait blocks all other requests on the same one.
        rank, size = check_rank_and_size(rank, size)
        return OpenStore(clone_connection(where), rank, size, caller_store=where)
    if where is None:
        refuse_in_elastic_run("new_group()")
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
        path = url.netloc + url.path
        if not path:
            raise InvalidArgument(f"store {where!r} must have a path, as in file:///shared/job-17")
        folder = os.path.dirname(path)
        if not os.path.isdir(folder):
            raise InvalidArgument(f"store {where!r}: directory {folder} does not exist")
        return OpenStore(FileStore(path, size), rank, size)
    try:  # a scheme that the user has registered with torch
        store: Store = next(iter(rendezvous(where, rank, size)))[0]
    except RuntimeError as error:
        raise InvalidArgument(
            f"unknown store {where!r}. Use env://, tcp://host:port, file:///path or a scheme "
            "registered with torch.distributed.rendezvous"
        ) from error
    return OpenStore(store, rank, size)


@lru_cache(maxsize=1)
def _warn_no_launcher() -> None:
    script = os.path.basename(sys.argv[0]) or "train.py"
    _log.warning(
        "phalanx: no launcher, so this is rank 0 of 1; for 4 ranks: phalanx run -n 4 %s", script
    )


def check_rank_and_size(rank: int | None, size: int | None) -> tuple[int, int]:
    if rank is None or size is None:
        raise InvalidArgument(
            "rank and world_size are required with a store. Without a store, all three come from "
            "the environment that `phalanx run` and `torchrun` set"
        )
    if size < 1:
        raise InvalidArgument(f"world_size must be at least 1, got {size}")
    if not 0 <= rank < size:
        raise InvalidArgument(f"rank must be between 0 and {size - 1}, got {rank}")
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
    opened = _open_tcp(env.master_addr, env.master_port, env.rank, env.world_size, hosts, timeout)
    if not env.agent_store:
        return opened
    # The launcher's store outlives the ranks; keys of an earlier attempt must not be read.
    store = PrefixStore(f"attempt_{env.restart_count}", opened.store)
    return OpenStore(store, env.rank, env.world_size)


def _open_tcp(
    address: str, port: int, rank: int, size: int, hosts: bool, timeout: timedelta
) -> OpenStore:
    if not hosts:
        until = time.monotonic() + timeout.total_seconds()
        wait_for_listener(address, port, timeout)
        remaining = timedelta(seconds=max(until - time.monotonic(), 0.001))
        store = _tcp_store(address, port, False, remaining)
        store.set_timeout(timeout)  # for later requests
        return OpenStore(store, rank, size, hosted_by_peer=True)
    key = os.getpid(), port
    with _lock:
        hosted = _hosted_stores.get(key)
        lease = None if hosted is None else Lease(hosted)
    if hosted is None:
        _keep_stores_open_after_forks()
        made = HostedStore(_host_tcp_store(address, port, timeout), key)
        with _lock:  # another thread may have been faster
            hosted = _hosted_stores.setdefault(key, made)
            lease = Lease(hosted)
        watch(hosted)
    assert hosted.store is not None, "the lease keeps it open"
    # A plain connection: holding the server itself would keep it from closing.
    return OpenStore(clone_connection(hosted.store), rank, size, hosted=hosted, reservation=lease)


def _host_tcp_store(address: str, port: int, timeout: timedelta) -> Store:
    try:
        return _tcp_store(address, port, True, timeout)
    except RendezvousError as error:
        # Another process may be about to release the port.
        until = time.monotonic() + default_timing().port_release_timeout
        while _is_in_use(port):
            if time.monotonic() >= until:
                raise RendezvousError(
                    f"port {port} on {address} is in use by another program. Choose another "
                    "MASTER_PORT, or start with `phalanx run`, which finds a free port"
                ) from error
            time.sleep(default_timing().brief_poll_interval)
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


def _is_in_use(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            return error.errno == errno.EADDRINUSE  # opening the store raises other errors
    return False


def wait_for_listener(host: str, port: int, timeout: timedelta) -> None:
    """Wait until the port accepts connections; torch would log a stack trace for every retry."""
    until = time.monotonic() + timeout.total_seconds()
    pause = 0.005  # grows, since a launcher may take minutes to start rank 0
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
