"""Barriers that fail: which ranks are missing, which are notified, and how all recover."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch._C._distributed_c10d import HashStore
from torch.distributed import DistNetworkError

from phalanx.errors import BarrierError, BarrierTimeout, InvalidState

from .barrier_tools import (
    FAST,
    LONG,
    SHORT,
    caught,
    members,
    server_value,
)
from .internals import StoreBarrierMember, arrival_increment


def test_timeout_names_the_missing_ranks_and_their_progress(server, together):
    places = members(server, 4, together)
    together(4, lambda rank: [places[rank].wait(None, LONG) for _ in range(4)])
    together(3, lambda rank: caught(places[rank].wait, None, SHORT))  # without 3
    errors = together(2, lambda rank: caught(places[rank].wait, None, SHORT))  # nor 2
    assert {error.round for error in errors} == {6}
    assert {error.missing for error in errors} == {(2, 3)}
    assert errors[0].progress == {2: 5, 3: 4}
    assert errors[0].barrier == places[0].prefix
    first, *rest = str(errors[0]).splitlines()
    assert "missing ranks 2, 3" in first
    assert rest == [
        f"  rank 2 arrived at round 5 of {places[0].prefix!r}, 1 round behind",
        f"  rank 3 arrived at round 4 of {places[0].prefix!r}, 2 rounds behind",
    ]
    assert isinstance(errors[0], TimeoutError)


def test_rank_that_never_arrived_is_reported_as_such(server):
    place = StoreBarrierMember(server.clone, "lonely", rank=0, size=3)
    error = caught(place.wait, None, SHORT)
    assert str(error).splitlines() == [
        f"barrier 'lonely', round 1, rank 0: timed out after {SHORT} s: missing ranks 1, 2",
        "  rank 1 never arrived",
        "  rank 2 never arrived",
    ]


def test_late_rank_does_not_pass_and_all_recover(server, together):
    places = members(server, 3, together)
    early = together(2, lambda rank: caught(places[rank].wait, "1", SHORT))
    assert {error.missing for error in early} == {(2,)}
    late = caught(places[2].wait, "1", LONG)
    assert isinstance(late, BarrierTimeout)
    assert (late.round, late.missing) == (1, ())
    assert "rank 2: this rank arrived too late: rank " in str(late)
    assert together(3, lambda rank: places[rank].wait("2", LONG)) == [["2"] * 3] * 3


def test_ranks_with_longer_timeouts_are_woken_when_another_times_out(server, together):
    places = members(server, 3, together, FAST)
    began = time.monotonic()
    patience = [0.3, LONG, LONG]
    errors = together(2, lambda rank: caught(places[rank].wait, None, patience[rank]))
    assert time.monotonic() - began < LONG / 2
    assert str(errors[0]).partition("rank 0: ")[2] == str(errors[1]).partition("rank 1: rank 0 ")[2]
    assert caught(places[2].wait, None, LONG).round == 1
    together(3, lambda rank: places[rank].wait(None, LONG))


def test_mixed_calls_fail_on_all_ranks(server, together):
    places = members(server, 2, together, FAST)
    together(2, lambda rank: places[rank].wait(None, LONG))
    texts = [None, "a"]
    for error in together(2, lambda rank: caught(places[rank].wait, texts[rank], LONG)):
        assert "some ranks called execute_barrier and others exchange" in str(error)
    together(2, lambda rank: places[rank].wait(None, LONG))


def test_recreated_barrier_joins_at_the_current_round(server, together):
    places = members(server, 2, together)
    together(2, lambda rank: places[rank].wait(None, LONG))
    for _ in range(3):
        assert caught(places[0].wait, None, SHORT)
    prefix = places[0].prefix
    fresh = StoreBarrierMember(server.clone, prefix, rank=1, size=2)
    both = [places[0], fresh]
    assert together(2, lambda rank: both[rank].wait("5", LONG)) == [["5", "5"]] * 2
    with pytest.raises(InvalidState, match="rank 1: replaced by a newer barrier"):
        places[1].wait(None, LONG)


def test_barrier_recreated_during_a_round_is_not_counted_twice(server, together):
    places = members(server, 3, together, FAST)
    pool = ThreadPoolExecutor(1)
    waiting = pool.submit(places[1].wait, None, LONG)
    while b"1" not in server_value(server, places[1], "progress/1"):
        time.sleep(0.001)
    # Replace the member that was counted.
    fresh = StoreBarrierMember(server.clone, places[1].prefix, rank=1, size=3, timings=FAST)
    with pytest.raises(InvalidState, match="rank 1: replaced by a newer barrier"):
        waiting.result(LONG / 2)
    late = caught(places[0].wait, None, LONG)
    assert "rank 1 recreated its barrier" in str(late)
    assert caught(places[2].wait, None, LONG).round == 1
    both = [places[0], fresh, places[2]]
    together(3, lambda rank: both[rank].wait(None, LONG))


def test_last_rank_that_dies_before_releasing_others_blocks_none(server, together):
    """It was counted, so the round passed; the first rank to time out completes it."""
    places = members(server, 3, together)
    places[2]._store.set(places[2]._progress_key, '1 "c"')
    places[2]._store.add(places[2]._count_key, arrival_increment("c"))  # then it dies
    # All three are counted; rank 1, the last, is delayed before it completes the round.
    places[1]._complete_round = lambda *_: resumed.wait(LONG) and []
    resumed = threading.Event()
    with ThreadPoolExecutor(2) as pool:
        said = pool.submit(places[0].wait, "a", 0.3)
        while server_value(server, places[0], "progress/0") != b'1 "a"':
            time.sleep(0.001)
        pool.submit(places[1].wait, "b", LONG)
        assert said.result() == ["a", "b", "c"]
        resumed.set()


class LosesConnection(HashStore):
    def add(self, key, value):  # noqa: ARG002 - whatever comes
        raise DistNetworkError("connection reset by peer")


def test_a_store_that_is_lost_while_a_barrier_is_created_is_reported():
    with pytest.raises(BarrierError, match="the store is gone: connection reset by peer"):
        StoreBarrierMember(LosesConnection, "p", rank=1, size=2)
