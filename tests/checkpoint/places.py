"""Ranks as threads at barriers in real stores."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from torch.distributed import TCPStore

from phalanx.checkpoint import TCPStoreBarrier, _store_barrier
from phalanx.checkpoint._store_barrier import StoreBarrierMember
from phalanx.errors import BarrierError
from ports import free_port

SHORT, LONG = 0.05, 20.0  # seconds: for uses that are to fail, and for those that are to pass


@pytest.fixture(scope="module")
def port():
    return free_port()


@pytest.fixture(scope="module")
def server():
    return TCPStore(
        "127.0.0.1",
        0,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=LONG),
    )


@pytest.fixture
def soon_woken(monkeypatch):
    """Wake those who wait in a failed use sooner than users need it."""
    monkeypatch.setattr(_store_barrier, "WAKE_AFTER", 0.2)
    monkeypatch.setattr(_store_barrier, "FAILURE_FREE_WINDOW", 0.18)


@pytest.fixture
def together():
    """Call a function for every rank, all at once, and return the results."""
    with ThreadPoolExecutor(32) as pool:
        yield lambda size, call: list(pool.map(call, range(size)))


def tcp(rank, size, prefix, port, *, timeout_secs=LONG, **changes):
    arguments = {
        "global_rank": rank,
        "global_world_size": size,
        "barrier_prefix": prefix,
        "timeout_barrier_init_secs": 20,
        "use_checkpoint_barrier_tcpstore_libuv": True,
        "tcpstore_port": port,
        "master_address": "127.0.0.1",
        "timeout_secs": timeout_secs,
    }
    return TCPStoreBarrier(**{**arguments, **changes})


_prefixes = iter(range(10**9))


def lines(server, size, together):
    """Make a line for each rank, at a barrier that no other test uses."""
    prefix = f"p{next(_prefixes)}"
    return together(
        size,
        lambda rank: StoreBarrierMember(
            server.clone, prefix, rank=rank, size=size, host="the store"
        ),
    )


def keys(server, line):
    return sorted(key for key in server.list_keys() if line._keys.root in key)


def caught(call, *args):
    """Return the error that a call raises, or None."""
    try:
        call(*args)
    except BarrierError as error:
        return error
    return None


def server_value(server, line, name):
    key = f"{line._keys.root}{name}"
    return server.get(key) if server.check([key]) else b""
