"""Where ranks meet: opens the store that a URL or the environment names."""

from __future__ import annotations

import logging
import os
import socket
import sys
import time
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache
from urllib.parse import parse_qsl, urlparse

import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, HashStore, PrefixStore, Store, TCPStore
from torch.distributed.rendezvous import rendezvous

from ..env import is_launched, read_rank_env
from ..errors import InvalidArgument, InvalidType, RendezvousError, RendezvousTimeout
from ._words import first_line

__all__ = ["Meeting", "await_listener", "check_place", "meet", "own_connection"]

_log = logging.getLogger(__name__)

_hosted: dict[tuple[int, int], Store] = {}
"""Stores that this process hosts, by pid and port: for as long as it lives, since peers may be
meeting there for the next group before this rank has ended the last."""


@dataclass(frozen=True)
class Meeting:
    """A store, and this process's place among those that use it."""

    store: Store
    rank: int
    size: int
    lent_store: Store | None = None
    """The caller's own store, which may be the one that hosts it all; kept alive."""


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
        return Meeting(_tcp_store(url.hostname, url.port, rank == 0, timeout), rank, size)
    if url.scheme == "file":
        return Meeting(_file_store(where, url.netloc + url.path, size), rank, size)
    return Meeting(_other_store(where, rank, size), rank, size)


@lru_cache(maxsize=1)
def _say_alone() -> None:
    script = os.path.basename(sys.argv[0]) or "train.py"
    _log.warning(
        "phalanx: no launcher, so this is rank 0 of 1; for 4 ranks: phalanx run -n 4 %s", script
    )


def own_connection(store: Store) -> Store:
    """Open a second connection to a store."""
    # Out of descriptors, torch would try again until the store's timeout; this raises at once.
    socket.socket().close()
    clone: Store = store.clone()  # type: ignore[attr-defined]  # missing in torch's stubs
    return clone


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
    store = _tcp_store(env.master_addr, env.master_port, hosts, timeout)
    if env.agent_store:  # it outlives the ranks: what they left in it must not confuse the next
        store = PrefixStore(f"attempt_{env.restart_count}", store)
    return Meeting(store, env.rank, env.world_size)


def _tcp_store(host: str, port: int, hosts: bool, timeout: timedelta) -> Store:
    if not hosts:
        await_listener(host, port, timeout)
    key = (os.getpid(), port)
    if hosts and key in _hosted:
        return own_connection(_hosted[key])
    try:
        # Nobody waits for workers here: forming the group does, and can say who is missing.
        store = TCPStore(
            host,
            port,
            is_master=hosts,
            timeout=timeout,
            wait_for_workers=False,
            multi_tenant=True,
        )
    except dist.DistNetworkError as error:
        raise _explained(error, host, port) from error
    if hosts:
        _hosted[key] = store
    return store


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
