"""Stores that fail: what is asked of them once more, and what is not."""

import threading
import time

import pytest
from torch.distributed import DistNetworkError, HashStore

from .internals import RejoinBarrier, StatusStore, StoreClient, _worker_threads, run_on_worker


class Failing:
    """A store that raises for as long as it has an error."""

    def __init__(self):
        self.error = None
        self.asked = 0
        self._store = HashStore()

    def __getattr__(self, name):
        method = getattr(self._store, name)

        def ask(*args):
            self.asked += 1
            if self.error is not None:
                raise self.error
            return method(*args)

        return ask


PASSING = [
    RuntimeError("can't start new thread"),
    OSError(24, "Too many open files"),
    KeyError("k"),
]


@pytest.mark.parametrize("error", PASSING, ids=lambda error: type(error).__name__)
def test_a_board_asks_again_when_trouble_has_passed(error):
    """Being out of threads for a moment made a rank deaf to its group for ever."""
    store = Failing()
    board = StatusStore(StoreClient(store), rank=0, size=2)
    store.error = error
    assert (board.request_reports(), board.failure(), board.shut_down()) == (0, None, {})
    assert type(error).__name__ in board.last_error or str(error) in board.last_error
    store.error = None
    assert (board.request_reports(), board.last_error) == (1, "")


def test_a_board_does_not_ask_a_store_whose_connection_is_closed():
    store = Failing()
    board = StatusStore(StoreClient(store), rank=0, size=2)
    store.error = DistNetworkError("Broken pipe")
    board.request_reports()
    asked, store.error = store.asked, None
    assert (board.request_reports(), store.asked) == (0, asked)
    assert "is its host alive" in board.last_error


@pytest.mark.parametrize("error", PASSING, ids=lambda error: type(error).__name__)
def test_who_waits_to_come_back_asks_again_when_trouble_has_passed(error, monkeypatch):
    store = Failing()
    monkeypatch.setattr(StoreClient, "connect", lambda _: store)
    monkeypatch.setattr(StoreClient, "under", lambda self, _: self)
    hall = RejoinBarrier(store, rank=0, size=1)
    store.error = error
    assert hall.rejoin(7, 0.01) == ("waiting", 0)
    store.error = None
    assert hall.rejoin(7, 0.01) == ("waiting", 0)  # it has said that it is there
    assert hall.rejoin(7, 0.1) == ("entered", 7)


def test_who_asks_gets_the_error_of_a_users_store():
    """It got IndexError instead, and the thread that had asked on its behalf ended."""
    store = Failing()
    store.error = LookupError("no such shelf")
    with pytest.raises(LookupError, match="no such shelf"):
        StoreClient(store).read("key")


def test_a_worker_thread_outlives_its_job():
    """If not, whoever exits would wait for it to come home."""
    used = []

    def fail():
        used.append(threading.get_ident())
        raise SystemExit

    run_on_worker(fail)
    until = time.monotonic() + 5
    while (not used or used[0] in _worker_threads._pool._busy) and time.monotonic() < until:
        time.sleep(0.001)
    assert used[0] not in _worker_threads._pool._busy
    assert used[0] in {thread.ident for thread in threading.enumerate()}
