"""Where ranks meet: opens the store that a URL or the environment names."""

from __future__ import annotations

import logging
import os
import socket
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import lru_cache
from urllib.parse import parse_qsl, urlparse

import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, HashStore, PrefixStore, Store, TCPStore
from torch.distributed.rendezvous import rendezvous

from ..env import is_launched, read_rank_env
from ..errors import InvalidArgument, InvalidType, RendezvousError, RendezvousTimeout
from ._hosting import Hosted, Lease, Visit, find_hosted, host
from ._patient import own_connection
from ._words import first_line

__all__ = ["Meeting", "await_listener", "check_place", "meet", "own_connection", "visit"]

_log = logging.getLogger(__name__)

RELEASED_WITHIN = 1.0  # seconds


@dataclass(frozen=True)
class Meeting:
    """A store, and this process's place among those that use it."""

    store: Store
    rank: int
    size: int
    lent_store: Store | None = None
    """The caller's own store, which may be the one that hosts it all; kept alive."""
    hosted: Hosted | None = None
    """The store behind it, if this process hosts that."""
    lease: Lease | None = None
    """Keeps that one alive until the group has a lease of its own."""
    visit: Visit | None = None
    """Keeps one alive that a peer hosts."""
    is_at_peers: bool = False
    """Whether rank 0, another process or thread, hosts it."""


def visit(
    where: Store | str | None, *, rank: int | None, size: int | None, timeout: timedelta
) -> Meeting:
    """Do what `meet` does, and stay: a peer that is about to close its store does not.

    Whoever calls it ends the visit when a group has formed, or has not.
    """
    until = time.monotonic() + timeout.total_seconds()
    while True:
        meeting = meet(where, rank=rank, size=size, timeout=timeout)
        if not meeting.is_at_peers:
            return meeting
        try:
            return replace(meeting, visit=Visit(meeting.store, seconds=timeout.total_seconds()))
        except dist.DistNetworkError:  # it was closed under us: await the next one
            timeout = timedelta(seconds=max(until - time.monotonic(), 0.001))


def meet(
    where: Store | str | None, *, rank: int | None, size: int | None, timeout: timedelta
) -> Meeting:
    """Open a store, or take one that is open, and settle this process's rank and the size."""
    if isinstance(where, Store):
        # A connection of our own: others may wait on theirs for long, and nobody else gets a word
        # in meanwhile.
        return Meeting(own_connection(where), *check_place(rank, size), lent_store=where)
    if where is None:
        if rank is None and size is None and not is_launched():
            _say_alone()
            return Meeting(HashStore(), 0, 1)
        where = "env://"
    if not isinstance(where, str):
        raise InvalidType(f"store is a Store or a URL, not {type(where).__name__}")
    url = urlparse(where)
    query = dict(parse_qsl(url.query))
    rank = int(query["rank"]) if rank is None and "rank" in query else rank
    size = int(query["world_size"]) if size is None and "world_size" in query else size
    if url.scheme == "env":
        return _from_environment(rank, size, timeout)
    rank, size = check_place(rank, size)
    if url.scheme == "tcp":
        if not url.hostname or url.port is None:
            raise InvalidArgument(f"{where!r} must name a host and a port: tcp://10.0.0.1:29500")
        return _tcp_meeting(url.hostname, url.port, rank, size, rank == 0, timeout)
    if url.scheme == "file":
        return Meeting(_file_store(where, url.netloc + url.path, size), rank, size)
    return Meeting(_other_store(where, rank, size), rank, size)


@lru_cache(maxsize=1)
def _say_alone() -> None:
    script = os.path.basename(sys.argv[0]) or "train.py"
    _log.warning(
        "phalanx: no launcher, so this is rank 0 of 1; for 4 ranks: phalanx run -n 4 %s", script
    )


def check_place(rank: int | None, size: int | None) -> tuple[int, int]:
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


def _from_environment(rank: int | None, size: int | None, timeout: timedelta) -> Meeting:
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
    meeting = _tcp_meeting(*place, hosts, timeout)
    if not env.agent_store:
        return meeting
    # It outlives the ranks: what they left in it must not confuse the next.
    store = PrefixStore(f"attempt_{env.restart_count}", meeting.store)
    return Meeting(store, env.rank, env.world_size)


def _tcp_meeting(
    address: str, port: int, rank: int, size: int, hosts: bool, timeout: timedelta
) -> Meeting:
    if not hosts:
        store = _peers_store(address, port, timeout)
        return Meeting(store, rank, size, is_at_peers=True)
    found = find_hosted(port) or host(_hosting_store(address, port, timeout), port)
    hosted, lease = found
    assert hosted.store is not None, "there is a lease"
    # A connection without the server, which is not to live as long as anybody has this.
    return Meeting(own_connection(hosted.store), rank, size, hosted=hosted, lease=lease)


def _peers_store(address: str, port: int, timeout: timedelta) -> Store:
    """Connect to a store that a peer hosts; all of it takes no longer than `timeout`."""
    until = time.monotonic() + timeout.total_seconds()
    await_listener(address, port, timeout)
    left = timedelta(seconds=max(until - time.monotonic(), 0.001))
    store = _tcp_store(address, port, False, left)
    store.set_timeout(timeout)  # of later questions
    return store


def _hosting_store(address: str, port: int, timeout: timedelta) -> Store:
    try:
        return _tcp_store(address, port, True, timeout)
    except RendezvousError:
        if not _await_free(port):
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
        raise _explained(error, address, port) from error


def _await_free(port: int) -> bool:
    """Wait for a port that another process may be about to release, as `_hosting` says."""
    until = time.monotonic() + RELEASED_WITHIN
    while time.monotonic() < until:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with suppress(OSError):
                probe.bind(("", port))
                return True
        time.sleep(0.02)
    return False


def await_listener(host: str, port: int, timeout: timedelta) -> None:
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


def _explained(error: Exception, host: str, port: int) -> RendezvousError:
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


def _other_store(url: str, rank: int, size: int) -> Store:
    """Ask torch, where a user may have registered a scheme of their own."""
    try:
        store: Store = next(iter(rendezvous(url, rank, size)))[0]
    except RuntimeError as error:
        raise InvalidArgument(
            f"cannot meet at {url!r}: use env://, tcp://host:port or file:///path, or a scheme "
            "registered with torch.distributed.rendezvous"
        ) from error
    return store
