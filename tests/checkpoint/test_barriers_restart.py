"""Barriers that are recreated, interrupted, or called with bad arguments: all recover."""

import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed import FileStore, TCPStore

from phalanx.errors import BarrierTimeout, InvalidArgument, InvalidState, InvalidType

from .barrier_tools import FAST, LONG, SHORT, caught, keys, members, server_value, tcp
from .internals import OPEN, StoreBarrierMember, StoreConnection


def wait_for_arrival(server, member, use):
    """Wait until a rank has arrived at a round."""
    while not server_value(server, member, f"progress/{member.rank}").startswith(b"%d" % use):
        time.sleep(0.001)


def again(server, member):
    """Recreate the barrier of a rank."""
    rank, size = member.rank, member.size
    return StoreBarrierMember(
        server.clone, member.prefix, rank=rank, size=size, timings=member._timings
    )


def test_all_ranks_recreate_their_barriers_while_others_wait(server, together):
    """As a program does that creates its checkpointer twice; no round is lost."""
    places = members(server, 3, together, FAST)
    together(3, lambda rank: places[rank].wait(None, LONG))
    with ThreadPoolExecutor(3) as pool:
        for text in ("a", "b"):
            waiting = []
            for rank in range(3):
                places[rank] = again(server, places[rank])
                waiting.append(pool.submit(places[rank].wait, text, LONG))
                wait_for_arrival(server, places[rank], 2 if text == "a" else 3)
            assert [each.result() for each in waiting] == [[text] * 3] * 3
    assert len(keys(server, places[0])) <= 3 * 3 + 6


def test_waiting_for_a_recreated_barrier_keeps_the_timeout(server, together):
    places = members(server, 2, together, FAST)
    together(2, lambda rank: places[rank].wait(None, LONG))
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(caught, places[0].wait, None, 0.5)
        wait_for_arrival(server, places[0], 2)
        fresh = again(server, places[1])
        assert waiting.result().progress == {1: 1}
    assert caught(fresh.wait, None, LONG).round == 2
    both = [places[0], fresh]
    assert together(2, lambda rank: both[rank].wait("3", LONG)) == [["3", "3"]] * 2


def test_recreated_barrier_recovers_from_a_round_ended_without_a_cause(server, together):
    """Its predecessor and the rank that ended the round are dead; the others are at round 4."""
    places = members(server, 3, together, FAST)
    for _ in range(3):
        together(3, lambda rank: places[rank].wait(None, LONG))
    places[2]._store.set(places[2]._progress_key, "4")
    assert places[2]._end_epoch(places[2]._base)[0]
    fresh = again(server, places[1])
    assert caught(places[0].wait, None, LONG).round == 4
    places[1:] = [fresh, again(server, places[2])]
    assert together(3, lambda rank: places[rank].wait("5", LONG)) == [["5"] * 3] * 3


class Interrupted:
    """A store that raises KeyboardInterrupt after `moment` calls."""

    def __init__(self, store, moment):
        self.store, self.left = store, moment

    def __getattr__(self, name):
        if self.left == 0:
            raise KeyboardInterrupt
        self.left -= 1
        return getattr(self.store, name)


@pytest.mark.parametrize("moment", range(4))
@pytest.mark.parametrize("text", [None, "x"])  # the two make different store calls
def test_interrupted_rank_recovers(server, together, moment, text):
    """Whether the interrupted round passed or failed, the next one passes in time."""
    places = members(server, 2, together)
    place = places[0]
    place._store = Interrupted(place._store, moment)
    with pytest.raises(KeyboardInterrupt):
        for _ in range(2):
            place.wait(text, SHORT)
    if place._number == 1 and moment > (text is not None):  # it was counted
        assert places[1].wait(text, LONG) is not None
    else:
        assert caught(places[1].wait, text, SHORT)
    places[1].skip_to(place._number + 1, passed=0)
    began = time.monotonic()
    both = together(2, lambda rank: places[rank].wait(f"{rank}", LONG))
    assert both == [["0", "1"]] * 2
    assert time.monotonic() - began < LONG / 2


@pytest.mark.usefixtures("foreground")
@pytest.mark.parametrize("text", [None, "x"])
def test_signal_is_handled_while_the_barrier_waits(server, together, text):
    places = members(server, 2, together)
    began = time.monotonic()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(press_keys, server, places[0])
        with pytest.raises(KeyboardInterrupt):
            places[0].wait(text, LONG)
    assert time.monotonic() - began < LONG / 2
    assert places[1].wait(text, LONG) == ["x", "x"][: 2 * bool(text)], "the other was counted"
    assert together(2, lambda rank: places[rank].wait(f"{rank}", LONG)) == [["0", "1"]] * 2


def press_keys(server, member):
    while int(server_value(server, member, "count/0")) == OPEN:  # it is not counted
        time.sleep(0.001)
    signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)


def test_call_with_a_bad_argument_is_a_failed_round(port, together):
    barriers = together(2, lambda rank: tcp(rank, 2, "wrong", port, timeout_secs=0.1))
    with pytest.raises(InvalidType, match="exchange takes a str, got NoneType"):
        barriers[0].exchange(None)
    assert caught(barriers[1].exchange, "").round == 1
    for barrier in barriers:
        barrier._timeout = LONG
    assert together(2, lambda rank: barriers[rank].exchange(f"{rank}")) == [["0", "1"]] * 2


@pytest.mark.parametrize(
    "text",
    ["", "\0\n", "\ud800 of a file's name", "é" * 1_500_000],
    ids=["nothing", "controls", "no-text", "much"],
)
def test_any_text_can_be_exchanged(server, together, text):
    """Some texts exceed the store's value limit; none is kept longer than needed."""
    places = members(server, 2, together)
    for use in range(3):
        said = [f"{use}{text}", text]
        assert (
            together(2, lambda rank, said=said: places[rank].wait(said[rank], LONG)) == [said] * 2
        )
    together(2, lambda rank: [places[rank].wait("", LONG) for _ in range(2)])
    assert not [key for key in keys(server, places[0]) if "text/" in key]


def test_long_texts_of_many_ranks_can_be_exchanged(server, together):
    """Each text fits a store value, but not all of them together."""
    places = members(server, 16, together)
    said = [chr(ord("a") + rank) * 600_000 for rank in range(16)]
    assert together(16, lambda rank: places[rank].wait(said[rank], LONG)) == [said] * 16


def test_timeouts_hold_with_a_file_store(tmp_path, together):
    """As with a default group initialized from ``file://``."""
    path = str(tmp_path / "store")
    places = together(
        2, lambda rank: StoreBarrierMember(lambda: FileStore(path, 2), "x", rank=rank, size=2)
    )
    error = caught(places[0].wait, None, SHORT)
    assert isinstance(error, BarrierTimeout)
    assert error.progress == {1: 0}
    assert caught(places[1].wait, None, LONG).round == 1
    assert together(2, lambda rank: places[rank].wait(f"{rank}", LONG)) == [["0", "1"]] * 2


def test_world_size_mismatch_raises(server):
    one = StoreBarrierMember(server.clone, "how many", rank=0, size=2)
    with pytest.raises(
        InvalidArgument, match="world size of barrier .*: rank 1 says 3, the first rank said 2"
    ):
        StoreBarrierMember(server.clone, one.prefix, rank=1, size=3)


def test_rounds_start_over_in_a_new_store(server, together):
    """Progress from the previous store is not reported any more."""
    stores = [server]

    def connect():
        return stores[-1].clone()

    places = together(2, lambda rank: StoreBarrierMember(connect, "two stores", rank=rank, size=2))
    together(2, lambda rank: [places[rank].wait(None, LONG) for _ in range(3)])
    stores.append(TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False))
    for place in places:
        place._connection.cut()  # as when the previous store dies
        assert caught(place.wait, None, LONG).round == 4
    error = caught(places[0].wait, None, SHORT)
    assert (error.round, error.progress) == (1, {1: 0})
    assert caught(places[1].wait, None, LONG).round == 1
    assert together(2, lambda rank: places[rank].wait(f"{rank}", LONG)) == [["0", "1"]] * 2


def test_concurrent_connections_hold_one_socket_each(server, together):
    """Otherwise cutting one would cut others."""
    made = together(32, lambda _: StoreConnection(server.clone, None, timeout=LONG))
    assert [len(each._fds) for each in made] == [1] * 32


def test_second_thread_has_its_own_timeout(server, together):
    place, _ = members(server, 2, together)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(caught, place.wait, None, 0.4)
        wait_for_arrival(server, place, 1)
        error = caught(place.wait, None, SHORT)
        assert isinstance(error, TimeoutError)
        assert "another thread of this process" in str(error)
        assert waiting.result().round == 1


def test_waking_others_repeatedly_leaves_no_keys(server, together):
    """Rank 1 is never the first to arrive, and only the first one deletes old keys."""
    places = members(server, 3, together, FAST)
    with ThreadPoolExecutor(1) as pool:
        for use in range(1, 6):
            waiting = pool.submit(caught, places[0].wait, None, LONG)
            wait_for_arrival(server, places[0], use)
            assert caught(places[1].wait, None, 0.25).round == waiting.result().round == use
    assert len([key for key in keys(server, places[0]) if "round/" in key]) <= 2


def test_replaced_barrier_raises_on_every_call(server):
    old = StoreBarrierMember(server.clone, "replaced", rank=0, size=1)
    again(server, old).wait(None, LONG)
    for _ in range(2):
        with pytest.raises(
            InvalidState, match="barrier 'replaced', rank 0: replaced by a newer barrier"
        ):
            old.wait(None, LONG)
