"""Barriers: the names of upstream, the errors, and the law.

The law: the n-th call has the same outcome on every rank. Ranks are threads here, at stores that
are real; `test_barriers_deaths` has what needs processes.
"""

import inspect
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed import PrefixStore, TCPStore
from torch.distributed.checkpoint._experimental import barriers as upstream

from phalanx import checkpoint
from phalanx.checkpoint import (
    BARRIER_REGISTRY,
    Barrier,
    BarrierConfig,
    DistBarrier,
    GroupBarrier,
    TCPStoreBarrier,
    _barrier_line,
    create_barrier_from_config,
    register_barrier,
)
from phalanx.checkpoint._barrier_keys import step_of
from phalanx.checkpoint._barrier_line import Line
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
    monkeypatch.setattr(_barrier_line, "WAKE_AFTER", 0.2)
    monkeypatch.setattr(_barrier_line, "CANNOT_HAVE_FAILED", 0.18)


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
        size, lambda rank: Line(server.clone, prefix, rank=rank, size=size, host="the store")
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


# -- names -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["Barrier", "BarrierConfig", "TCPStoreBarrier", "DistBarrier"])
def test_constructors_take_what_upstreams_take(name):
    theirs = inspect.signature(getattr(upstream, name)).parameters
    ours = inspect.signature(getattr(checkpoint, name)).parameters
    shared = list(ours.values())[: len(theirs)]
    assert [(p.name, p.kind, p.default) for p in shared] == [
        (p.name, p.kind, p.default) for p in theirs.values()
    ]
    added = list(ours.values())[len(theirs) :]
    assert all(p.kind is p.KEYWORD_ONLY and p.default is not p.empty for p in added)


def test_every_name_of_upstream_is_here():
    public = {
        name
        for name, value in vars(upstream).items()
        if getattr(value, "__module__", "") == upstream.__name__ or name == "BARRIER_REGISTRY"
    }
    assert public <= set(checkpoint.__all__)
    assert upstream.BARRIER_REGISTRY.keys() <= BARRIER_REGISTRY.keys()
    for name in ("register_barrier", "create_barrier_from_config"):
        theirs, ours = getattr(upstream, name), getattr(checkpoint, name)
        assert (
            inspect.signature(theirs).parameters.keys() == inspect.signature(ours).parameters.keys()
        )


def test_a_configuration_makes_no_barrier_by_default():
    assert BarrierConfig() == BarrierConfig(barrier_type=None, barrier_args={})
    assert create_barrier_from_config(BarrierConfig()) is None


def test_a_type_that_nobody_registered_is_refused_with_those_that_are():
    with pytest.raises(ValueError, match="no barrier_type 'tcpstore'.*'tcp_store'"):
        create_barrier_from_config(BarrierConfig("tcpstore"))


@pytest.fixture
def registry():
    """Let a test register what it likes."""
    known = dict(BARRIER_REGISTRY)
    yield BARRIER_REGISTRY
    BARRIER_REGISTRY.clear()
    BARRIER_REGISTRY.update(known)


def test_a_barrier_of_ones_own_is_a_class_and_a_decorator(registry):
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


def test_a_class_without_a_type_or_with_anothers_is_refused():
    class Nameless(Barrier):
        pass

    class Impostor(Barrier):
        barrier_type = "tcp_store"

    with pytest.raises(InvalidArgument, match="Nameless needs a class attribute barrier_type"):
        register_barrier(Nameless)
    with pytest.raises(InvalidArgument, match="'tcp_store' of Impostor is that of .*TCPStoreBarr"):
        register_barrier(Impostor)
    assert BARRIER_REGISTRY["tcp_store"] is TCPStoreBarrier
    assert register_barrier(TCPStoreBarrier) is TCPStoreBarrier, "again is no mistake"


@pytest.mark.parametrize(
    ("changes", "kind", "told"),
    [
        ({"timeout_secs": 0}, InvalidArgument, "timeout_secs must be a positive"),
        ({"timeout_secs": "5"}, InvalidType, "timeout_secs is a number of seconds, not '5'"),
        ({"timeout_barrier_init_secs": float("inf")}, InvalidArgument, "timeout_barrier_init_secs"),
        ({"global_rank": 2}, InvalidArgument, "rank 2 does not fit world_size 2"),
    ],
)
def test_bad_arguments_are_refused_by_name(port, changes, kind, told):
    with pytest.raises(kind, match=told):
        tcp(0, 2, "bad", port, **changes)


def test_a_host_that_never_comes_is_named_in_time():
    with pytest.raises(TimeoutError, match="no store answered at 127.0.0.1"):
        tcp(1, 2, "alone", free_port(), timeout_barrier_init_secs=0.05)


def test_a_port_of_another_program_is_explained(server):
    with pytest.raises(RendezvousError, match=f"port {server.port} on 127.0.0.1 is in use"):
        tcp(0, 1, "taken", server.port)


# -- a store ---------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 5])
def test_nobody_goes_on_before_all_have_come(port, together, size):
    came = []

    def body(rank):
        barrier = tcp(rank, size, f"all-{size}", port)
        for use in range(20):
            came.append(use)
            barrier.execute_barrier()
            assert came.count(use) == size
        return barrier.exchange(f"I am {rank} é\n")

    said = together(size, body)
    assert said == [[f"I am {rank} é\n" for rank in range(size)]] * size


def test_two_prefixes_on_one_port_are_two_barriers(port, together):
    """Used in another order by each rank, and one the start of the other."""

    def body(rank):
        barriers = [tcp(rank, 2, prefix, port) for prefix in ("save", "save:at/0")]
        with ThreadPoolExecutor(2) as pool:
            for use in range(25):
                first, second = barriers if (rank + use) % 2 else barriers[::-1]
                waits = pool.submit(first.exchange, f"{rank} {use}")
                second.exchange(f"{rank} {use}")
                assert waits.result() == [f"0 {use}", f"1 {use}"]

    together(2, body)


def test_a_thousand_uses_leave_no_more_keys_than_ten(server, together):
    places = lines(server, 2, together)

    def use(times):
        together(2, lambda rank: [places[rank].meet(None, LONG) for _ in range(times)])
        return len(keys(server, places[0]))

    few = use(10)
    assert use(990) == few
    failed = [caught(places[0].meet, "alone", 0.001) for _ in range(40)]
    assert all(isinstance(error, BarrierTimeout) for error in failed)
    assert len(keys(server, places[0])) <= few


# -- errors ----------------------------------------------------------------------------------


def test_a_timeout_names_who_is_missing_and_how_far_each_got(server, together):
    places = lines(server, 4, together)
    together(4, lambda rank: [places[rank].meet(None, LONG) for _ in range(4)])
    together(3, lambda rank: caught(places[rank].meet, None, SHORT))  # without 3
    errors = together(2, lambda rank: caught(places[rank].meet, None, SHORT))  # nor 2
    assert {error.use for error in errors} == {6}
    assert {error.missing for error in errors} == {(2, 3)}
    assert errors[0].progress == {2: 5, 3: 4}
    assert errors[0].barrier == places[0].prefix
    first, *rest = str(errors[0]).splitlines()
    assert "missing ranks 2, 3" in first
    assert rest == [
        f"  rank 2 arrived at use 5 of {places[0].prefix!r}, 1 use behind",
        f"  rank 3 arrived at use 4 of {places[0].prefix!r}, 2 uses behind",
    ]
    assert isinstance(errors[0], TimeoutError)


def test_a_rank_that_never_came_is_told_apart(server):
    place = Line(server.clone, "lonely", rank=0, size=3, host="the store")
    error = caught(place.meet, None, SHORT)
    assert str(error).splitlines() == [
        f"barrier 'lonely', use 1, rank 0: timed out after {SHORT} s: missing ranks 1, 2",
        "  rank 1 never arrived",
        "  rank 2 never arrived",
    ]


def test_a_late_rank_is_not_let_through_and_all_meet_again(server, together):
    places = lines(server, 3, together)
    early = together(2, lambda rank: caught(places[rank].meet, "1", SHORT))
    assert {error.missing for error in early} == {(2,)}
    late = caught(places[2].meet, "1", LONG)
    assert isinstance(late, BarrierTimeout)
    assert (late.use, late.missing) == (1, ())
    assert "rank 2: this rank came too late: rank " in str(late)
    assert together(3, lambda rank: places[rank].meet("2", LONG)) == [["2"] * 3] * 3


def test_those_who_wait_longer_are_woken_when_another_gives_up(server, together, soon_woken):
    places = lines(server, 3, together)
    began = time.monotonic()
    patience = [0.3, LONG, LONG]
    errors = together(2, lambda rank: caught(places[rank].meet, None, patience[rank]))
    assert time.monotonic() - began < LONG / 2
    assert str(errors[0]).partition("rank 0: ")[2] == str(errors[1]).partition("rank 1: rank 0 ")[2]
    assert caught(places[2].meet, None, LONG).use == 1
    together(3, lambda rank: places[rank].meet(None, LONG))


def test_ranks_that_call_different_things_all_learn_it(server, together, soon_woken):
    places = lines(server, 2, together)
    together(2, lambda rank: places[rank].meet(None, LONG))
    texts = [None, "a"]
    for error in together(2, lambda rank: caught(places[rank].meet, texts[rank], LONG)):
        assert "some ranks called execute_barrier here, and others exchange" in str(error)
    together(2, lambda rank: places[rank].meet(None, LONG))


def test_a_rank_that_makes_its_barrier_anew_begins_where_the_others_are(server, together):
    places = lines(server, 2, together)
    together(2, lambda rank: places[rank].meet(None, LONG))
    for _ in range(3):
        assert caught(places[0].meet, None, SHORT)
    prefix = places[0].prefix
    fresh = Line(server.clone, prefix, rank=1, size=2, host="the store")
    both = [places[0], fresh]
    assert together(2, lambda rank: both[rank].meet("5", LONG)) == [["5", "5"]] * 2
    with pytest.raises(InvalidState, match="rank 1 has made another barrier"):
        places[1].meet(None, LONG)


def test_a_rank_that_comes_anew_in_the_middle_of_a_use_is_not_counted_twice(
    server, together, soon_woken
):
    places = lines(server, 3, together)
    pool = ThreadPoolExecutor(1)
    waiting = pool.submit(places[1].meet, None, LONG)
    while b"1" not in server_value(server, places[1], "at/1"):
        time.sleep(0.001)
    # The one who was counted is as good as dead; in its place there is another.
    fresh = Line(server.clone, places[1].prefix, rank=1, size=3, host="the store")
    with pytest.raises(InvalidState, match="rank 1 has made another barrier"):
        waiting.result(LONG / 2)
    late = caught(places[0].meet, None, LONG)
    assert "rank 1 has made its barrier anew" in str(late)
    assert caught(places[2].meet, None, LONG).use == 1
    both = [places[0], fresh, places[2]]
    together(3, lambda rank: both[rank].meet(None, LONG))


def server_value(server, line, name):
    key = f"{line._keys.root}{name}"
    return server.get(key) if server.check([key]) else b""


def test_a_last_rank_that_dies_before_it_says_so_holds_up_nobody(server, together):
    """It was counted, so the use has passed: whoever's deadline passes first says it instead."""
    places = lines(server, 3, together)
    places[2]._store.set(places[2]._at_key, "1 c")
    places[2]._store.add(places[2]._word_key, step_of("c"))  # and nothing more is heard of it
    # All three are counted, and rank 1, the last, is held up when it is about to say so.
    places[1]._complete = lambda *_: resumed.wait(LONG) and []
    resumed = threading.Event()
    with ThreadPoolExecutor(2) as pool:
        said = pool.submit(places[0].meet, "a", 0.3)
        while server_value(server, places[0], "at/0") != b"1 a":
            time.sleep(0.001)
        pool.submit(places[1].meet, "b", LONG)
        assert said.result() == ["a", "b", "c"]
        resumed.set()


# -- the law ---------------------------------------------------------------------------------

USES = st.lists(
    st.one_of(
        st.just(frozenset()),  # everybody in time
        st.frozensets(st.integers(0, 2), min_size=1, max_size=2),  # these come when it is over
        st.tuples(*[st.sampled_from([0.0005, 0.001, 0.002])] * 3),  # a race
    ),
    min_size=2,
    max_size=7,
)


@settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(USES)
def test_the_nth_call_has_the_same_outcome_on_every_rank(server, together, schedule):
    size = 3
    places = lines(server, size, together)
    over = [[threading.Event() for _ in range(size)] for _ in schedule]

    def body(rank):
        outcomes = []
        for use, plan in enumerate(schedule):
            racing = isinstance(plan, tuple)
            if not racing and rank in plan:
                for other in set(range(size)) - plan:
                    assert over[use][other].wait(LONG)
            timeout = plan[rank] if racing else SHORT if plan else LONG
            try:
                outcomes.append(places[rank].meet(f"{use}", timeout))
            except BarrierTimeout as error:
                outcomes.append(f"failed {error.use}")
            over[use][rank].set()
        return outcomes

    first, *others = together(size, body)
    assert all(other == first for other in others)
    for use, (plan, outcome) in enumerate(zip(schedule, first, strict=True)):
        passed, failed = [f"{use}"] * size, f"failed {use + 1}"
        allowed = [passed, failed] if isinstance(plan, tuple) else [failed if plan else passed]
        assert outcome in allowed
    assert len(keys(server, places[0])) <= 3 * size + 8


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


def test_a_group_is_a_barrier(threads):
    threads.run(use_a_group, 3, args=("local",))


def fail_and_meet_again(ctx, backend):
    group = ctx.group(backend)
    barrier = GroupBarrier(group, timeout_secs=0.5)
    barrier.execute_barrier()
    if ctx.rank == 1:
        ctx.store.wait(["failed/0", "failed/2"])
    with pytest.raises(BarrierTimeout) as error:
        barrier.exchange("late")
    ctx.store.set(f"failed/{ctx.rank}", "")
    ctx.store.wait(["failed/1"])
    assert error.value.use == 2
    if ctx.rank != 1:
        assert error.value.progress == {1: 1}
    # In the store, now: without rank 1 again, and then with everybody.
    if ctx.rank == 1:
        ctx.store.wait(["again/0", "again/2"])
    with pytest.raises(BarrierTimeout) as error:
        barrier.execute_barrier()
    ctx.store.set(f"again/{ctx.rank}", "")
    assert error.value.use == 3
    if ctx.rank != 1:
        assert error.value.progress == {1: 2}
    assert barrier.exchange(str(ctx.rank)) == ["0", "1", "2"]
    for _ in range(5):
        barrier.execute_barrier()
    assert barrier._own is not None, "as fast as ever"
    assert group.failure() is None
    group.barrier().wait()


def test_a_groups_barrier_is_used_again_after_a_failure(threads):
    threads.run(fail_and_meet_again, 3, args=("local",))


def test_a_barrier_without_a_group_says_what_to_do():
    with pytest.raises(InvalidState, match="pass one as group=, or make one the current group"):
        GroupBarrier()
    with pytest.raises(InvalidType, match="DistBarrier"):
        GroupBarrier(object())
    with pytest.raises(Unprepared, match="init_process_group") as error:
        DistBarrier()
    assert isinstance(error.value, AssertionError)


def test_a_barrier_in_a_part_of_a_store_keeps_to_it(server, together):
    """As the default group's store is."""
    store = PrefixStore("part", server)
    both = together(2, lambda rank: Line(store.clone, "x", rank=rank, size=2, host="the store"))
    together(2, lambda rank: both[rank].meet(None, LONG))
    assert all(key.startswith("part/") for key in server.list_keys() if "barrier:1:x:" in key)
