"""Barriers: upstream's names, arguments, and process groups."""

import inspect
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist
from torch.distributed import HashStore
from torch.distributed.checkpoint._experimental import barriers as upstream

from phalanx.checkpoint import barriers
from phalanx.checkpoint.barriers import (
    BARRIER_REGISTRY,
    Barrier,
    BarrierConfig,
    DistBarrier,
    GroupBarrier,
    TCPStoreBarrier,
    create_barrier_from_config,
    register_barrier,
)
from phalanx.errors import (
    BarrierError,
    BarrierTimeout,
    InvalidArgument,
    InvalidState,
    InvalidType,
    RendezvousError,
    Unprepared,
)
from phalanx.groups import process_group
from ports import free_port

from .barrier_tools import LONG, tcp


@pytest.mark.parametrize("name", ["Barrier", "BarrierConfig", "TCPStoreBarrier", "DistBarrier"])
def test_constructor_signatures_match_upstream(name):
    theirs = inspect.signature(getattr(upstream, name)).parameters
    ours = inspect.signature(getattr(barriers, name)).parameters
    shared = list(ours.values())[: len(theirs)]
    assert [(p.name, p.kind, p.default) for p in shared] == [
        (p.name, p.kind, p.default) for p in theirs.values()
    ]
    added = list(ours.values())[len(theirs) :]
    assert all(p.kind is p.KEYWORD_ONLY and p.default is not p.empty for p in added)


def test_every_upstream_name_exists():
    public = {
        name
        for name, value in vars(upstream).items()
        if getattr(value, "__module__", "") == upstream.__name__ or name == "BARRIER_REGISTRY"
    }
    assert public <= set(barriers.__all__)
    assert upstream.BARRIER_REGISTRY.keys() <= BARRIER_REGISTRY.keys()
    for name in ("register_barrier", "create_barrier_from_config"):
        theirs, ours = getattr(upstream, name), getattr(barriers, name)
        assert (
            inspect.signature(theirs).parameters.keys() == inspect.signature(ours).parameters.keys()
        )


def test_default_config_creates_no_barrier():
    assert BarrierConfig() == BarrierConfig(barrier_type=None, barrier_args={})
    assert create_barrier_from_config(BarrierConfig()) is None


def test_unknown_barrier_type_lists_the_registered_ones():
    with pytest.raises(ValueError, match="unknown barrier_type 'tcpstore'.*'tcp_store'"):
        create_barrier_from_config(BarrierConfig("tcpstore"))


@pytest.fixture
def registry():
    """Restore the barrier registry after the test."""
    known = dict(BARRIER_REGISTRY)
    yield BARRIER_REGISTRY
    BARRIER_REGISTRY.clear()
    BARRIER_REGISTRY.update(known)


def test_custom_barrier_can_be_registered(registry):
    @register_barrier
    class Counting(Barrier):
        barrier_type = "counting"

        def __init__(self, start):
            self.uses = start

        def execute_barrier(self):
            self.uses += 1

    barrier = create_barrier_from_config(BarrierConfig("counting", {"start": 3}))
    barrier.execute_barrier()
    assert registry["counting"] is Counting is type(barrier)
    assert barrier.uses == 4


def test_missing_or_duplicate_barrier_type_is_rejected():
    class Nameless(Barrier):
        pass

    class Impostor(Barrier):
        barrier_type = "tcp_store"

    with pytest.raises(InvalidArgument, match="Nameless has no class attribute barrier_type"):
        register_barrier(Nameless)
    with pytest.raises(InvalidArgument, match="'tcp_store' of Impostor is taken by .*TCPStoreBarr"):
        register_barrier(Impostor)
    assert BARRIER_REGISTRY["tcp_store"] is TCPStoreBarrier
    assert register_barrier(TCPStoreBarrier) is TCPStoreBarrier, "again is no mistake"


@pytest.mark.parametrize(
    ("changes", "kind", "told"),
    [
        ({"timeout_secs": 0}, InvalidArgument, "timeout_secs must be positive"),
        ({"timeout_secs": "5"}, InvalidType, "timeout_secs must be a number of seconds, got '5'"),
        ({"timeout_barrier_init_secs": float("inf")}, InvalidArgument, "timeout_barrier_init_secs"),
        ({"global_rank": 2}, InvalidArgument, "rank must be between 0 and 1"),
        ({"global_rank": "0"}, InvalidType, "global_rank must be an integer, got str"),
        ({"global_world_size": 2.0}, InvalidType, "global_world_size must be an integer"),
        ({"barrier_prefix": None}, InvalidType, "barrier_prefix must be a str, got None"),
        ({"barrier_prefix": "\udcff"}, InvalidArgument, "barrier_prefix must be encodable"),
        ({"master_address": None}, InvalidType, "master_address must be a str, got None"),
        ({"tcpstore_port": 0}, InvalidArgument, "tcpstore_port must be from 1 to 65535, got 0"),
        ({"tcpstore_port": "http"}, InvalidArgument, "from 1 to 65535, got 'http'"),
    ],
)
def test_bad_arguments_are_rejected_by_name(port, changes, kind, told):
    with pytest.raises(kind, match=told):
        tcp(0, 2, "bad", port, **changes)


def test_timeout_beyond_torchs_range_is_accepted(port, together):
    both = together(2, lambda rank: tcp(rank, 2, "patient", port, timeout_secs=1e300))
    assert together(2, lambda rank: both[rank].exchange(f"{rank}")) == [["0", "1"]] * 2


def test_missing_store_host_is_named_at_the_timeout():
    with pytest.raises(TimeoutError, match="no store at 127.0.0.1"):
        tcp(1, 2, "alone", free_port(), timeout_barrier_init_secs=0.05)


def test_port_in_use_is_named(server):
    with pytest.raises(RendezvousError, match=f"port {server.port} on 127.0.0.1 is in use"):
        tcp(0, 1, "taken", server.port)


# -- groups ----------------------------------------------------------------------------------


def use_a_group(ctx, backend):
    group = ctx.group(backend)
    with process_group(group):
        barrier = GroupBarrier(timeout_secs=LONG)
    other = create_barrier_from_config(BarrierConfig("group", {"group": group}))
    for use in range(10):
        barrier.execute_barrier()
        told = f"{ctx.rank} of {use} é" + "x" * (200 * use)
        assert other.exchange(told) == [
            f"{rank} of {use} é" + "x" * (200 * use) for rank in range(ctx.size)
        ]
    assert group.failure() is None


def test_group_barrier_executes_and_exchanges(threads):
    threads.run(use_a_group, 3, args=("local",))


def fail_and_recover(ctx, backend):
    group = ctx.group(backend)
    barrier = GroupBarrier(group, timeout_secs=0.4)
    barrier.execute_barrier()
    if ctx.rank == 1:
        ctx.store.wait(["failed/0", "failed/2"])
    with pytest.raises(BarrierTimeout) as error:
        barrier.exchange("late")
    ctx.store.set(f"failed/{ctx.rank}", "")
    ctx.store.wait(["failed/1"])
    assert error.value.round == 2
    if ctx.rank != 1:
        assert error.value.progress == {1: 1}
    # Now through the store: once without rank 1, then with all ranks.
    if ctx.rank == 1:
        ctx.store.wait(["again/0", "again/2"])
    with pytest.raises(BarrierTimeout) as error:
        barrier.execute_barrier()
    ctx.store.set(f"again/{ctx.rank}", "")
    assert error.value.round == 3
    if ctx.rank != 1:
        assert error.value.progress == {1: 2}
    assert barrier.exchange(str(ctx.rank)) == ["0", "1", "2"]
    for _ in range(5):
        barrier.execute_barrier()
    assert barrier._own_group is not None, "as fast as ever"
    assert group.failure() is None
    group.barrier().wait()


def test_group_barrier_recovers_after_a_failure(threads):
    threads.run(fail_and_recover, 3, args=("local",))


def test_missing_group_error_has_a_hint():
    with pytest.raises(InvalidState, match="Pass group=, or set the current group"):
        GroupBarrier()
    with pytest.raises(InvalidType, match="DistBarrier"):
        GroupBarrier(object())
    with pytest.raises(Unprepared, match="init_process_group") as error:
        DistBarrier()
    assert isinstance(error.value, AssertionError)


def test_concurrent_dist_barriers_share_one_member():
    store = HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        ready = threading.Barrier(4)

        def make(_):
            ready.wait(LONG)
            return DistBarrier(timeout_secs=LONG)

        with ThreadPoolExecutor(4) as pool:
            made = list(pool.map(make, range(4)))
        for barrier in made:
            assert barrier.exchange("here") == ["here"]
    finally:
        dist.destroy_process_group()


def raise_in_a_use(ctx, error):
    """A rank raises during a round; its next call must not be matched with that round."""
    barrier = GroupBarrier(ctx.group("local"), timeout_secs=LONG)
    barrier.execute_barrier()
    began = time.monotonic()
    if ctx.rank == 1 and error is KeyboardInterrupt:
        barrier._start = interrupt
        with pytest.raises(KeyboardInterrupt):
            barrier.execute_barrier()
    elif ctx.rank == 1:
        with pytest.raises(InvalidType, match="exchange takes a str, got bytes"):
            barrier.exchange(b"")
    else:
        with pytest.raises(BarrierError, match=f"its barrier raised {error.__name__}") as raised:
            barrier.execute_barrier()
        assert raised.value.round == 2
    assert time.monotonic() - began < LONG / 2
    surrogate = "\udcff"
    assert barrier.exchange(f"{ctx.rank}{surrogate}") == [f"0{surrogate}", f"1{surrogate}"]
    assert barrier.exchange(surrogate) == [surrogate] * 2
    assert barrier._own_group is not None


def interrupt():
    raise KeyboardInterrupt


@pytest.mark.parametrize("error", [KeyboardInterrupt, InvalidType])
def test_rank_that_raises_in_a_group_barrier_is_not_waited_for(threads, error):
    threads.run(raise_in_a_use, 2, args=(error,))


def mix_calls(ctx):
    barrier = GroupBarrier(ctx.group("local"), timeout_secs=LONG)
    with pytest.raises(BarrierError) as error:
        barrier.exchange("") if ctx.rank else barrier.execute_barrier()
    assert error.value.missing == (), "all have come"
    assert barrier.exchange(str(ctx.rank)) == ["0", "1"]


def test_mixed_calls_on_a_group_report_no_missing_rank(threads):
    threads.run(mix_calls, 2)


def form_on_some(ctx):
    """A failure to form a new group does not fail a round that all ranks passed."""
    barrier = GroupBarrier(ctx.group("local"), timeout_secs=1.0)
    if ctx.rank == 0:
        with pytest.raises(BarrierTimeout):
            barrier.execute_barrier()
        ctx.store.set("failed", "")
    else:
        ctx.store.wait(["failed"])
        with pytest.raises(BarrierTimeout):
            barrier.execute_barrier()
    barrier._form_group = full_disk
    assert barrier.exchange(str(ctx.rank)) == ["0", "1"]
    del barrier._form_group
    assert barrier.exchange(str(ctx.rank)) == ["0", "1"]
    assert barrier._own_group is not None


def full_disk():
    raise OSError("no space left on device")


def test_round_passes_even_if_no_new_group_can_be_formed(threads):
    threads.run(form_on_some, 2)
