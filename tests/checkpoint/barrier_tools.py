"""Barriers in real stores, with threads as ranks."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from torch.distributed import TCPStore

from phalanx.checkpoint.barriers import TCPStoreBarrier
from phalanx.errors import BarrierError
from ports import free_port

from .internals import BarrierTimings, StoreBarrierMember

SHORT, LONG = 0.05, 20.0  # seconds, for rounds that must time out and rounds that must pass

FAST = BarrierTimings(wake_after=0.2, failure_free_window=0.02, epoch_timeout=0.05)
"""Wakes ranks that wait in a failed round sooner than in production."""


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
def together():
    """Call a function for every rank concurrently and return the results."""
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


def members(server, size, together, timings=None):
    """Create the members of a barrier with an unused prefix."""
    prefix = f"p{next(_prefixes)}"
    return together(
        size,
        lambda rank: StoreBarrierMember(
            server.clone, prefix, rank=rank, size=size, timings=timings
        ),
    )


def keys(server, member):
    return sorted(key for key in server.list_keys() if member.root in key)


def caught(call, *args):
    """Return the error that a call raises, or None."""
    try:
        call(*args)
    except BarrierError as error:
        return error
    return None


def server_value(server, member, name):
    key = f"{member.root}{name}"
    return server.get(key) if server.check([key]) else b""
