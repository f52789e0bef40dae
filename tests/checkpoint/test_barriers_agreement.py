"""The guarantee of barriers: the nth call has the same outcome on every rank.

Ranks are threads on real stores; `test_barriers_deaths` covers processes.
"""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed import PrefixStore

from phalanx.errors import BarrierTimeout

from .barrier_tools import (
    LONG,
    SHORT,
    caught,
    keys,
    members,
    tcp,
)
from .internals import StoreBarrierMember


@pytest.mark.parametrize("size", [1, 2, 5])
def test_no_rank_passes_before_all_have_arrived(port, together, size):
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


def test_two_prefixes_on_one_port_are_separate_barriers(port, together):
    """Each rank uses them in another order, and one is a prefix of the other."""

    def body(rank):
        barriers = [tcp(rank, 2, prefix, port) for prefix in ("save", "save:at/0")]
        with ThreadPoolExecutor(2) as pool:
            for use in range(25):
                first, second = barriers if (rank + use) % 2 else barriers[::-1]
                waits = pool.submit(first.exchange, f"{rank} {use}")
                second.exchange(f"{rank} {use}")
                assert waits.result() == [f"0 {use}", f"1 {use}"]

    together(2, body)


def test_number_of_store_keys_is_bounded(server, together):
    places = members(server, 2, together)

    def use(times):
        together(2, lambda rank: [places[rank].wait(None, LONG) for _ in range(times)])
        return len(keys(server, places[0]))

    few = use(10) + 4  # the last keys of a use may be deleted in the next one
    assert use(990) <= few
    failed = [caught(places[0].wait, "alone", 0.001) for _ in range(40)]
    assert all(isinstance(error, BarrierTimeout) for error in failed)
    assert len(keys(server, places[0])) <= few


def test_barrier_in_a_prefix_store_keeps_to_the_prefix(server, together):
    """The default group's store is one."""
    store = PrefixStore("part", server)
    both = together(2, lambda rank: StoreBarrierMember(store.clone, "x", rank=rank, size=2))
    together(2, lambda rank: both[rank].wait(None, LONG))
    assert all(key.startswith("part/") for key in server.list_keys() if "barrier:1:x:" in key)


# -- the guarantee ---------------------------------------------------------------------------------

USES = st.lists(
    st.one_of(
        st.just(frozenset()),  # all in time
        st.frozensets(st.integers(0, 2), min_size=1, max_size=2),  # ranks that arrive too late
        st.tuples(*[st.sampled_from([0.0005, 0.001, 0.002])] * 3),  # a race
    ),
    min_size=2,
    max_size=7,
)


@settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(USES)
def test_nth_call_has_the_same_outcome_on_every_rank(server, together, schedule):
    size = 3
    places = members(server, size, together)
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
                outcomes.append(places[rank].wait(f"{use}", timeout))
            except BarrierTimeout as error:
                outcomes.append(f"failed {error.round}")
            over[use][rank].set()
        return outcomes

    first, *others = together(size, body)
    assert all(other == first for other in others)
    for use, (plan, outcome) in enumerate(zip(schedule, first, strict=True)):
        passed, failed = [f"{use}"] * size, f"failed {use + 1}"
        allowed = [passed, failed] if isinstance(plan, tuple) else [failed if plan else passed]
        assert outcome in allowed
    assert len(keys(server, places[0])) <= 3 * size + 8
