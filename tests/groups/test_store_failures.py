"""Store failures: which requests are retried, and which are not."""

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
def test_the_status_store_retries_after_a_transient_error(error):
    """Running out of threads for a moment used to cut a rank off from its group for good."""
    store = Failing()
    board = StatusStore(StoreClient(store), rank=0, size=2)
    store.error = error
    assert (board.request_reports(), board.failure(), board.shut_down()) == (0, None, {})
    assert type(error).__name__ in board.last_error or str(error) in board.last_error
    store.error = None
    assert (board.request_reports(), board.last_error) == (1, "")


def test_the_status_store_does_not_retry_a_closed_connection():
    store = Failing()
    board = StatusStore(StoreClient(store), rank=0, size=2)
    store.error = DistNetworkError("Broken pipe")
    board.request_reports()
    asked, store.error = store.asked, None
    assert (board.request_reports(), store.asked) == (0, asked)
    assert "is its host alive" in board.last_error


@pytest.mark.parametrize("error", PASSING, ids=lambda error: type(error).__name__)
def test_rejoin_retries_after_a_transient_error(error, monkeypatch):
    store = Failing()
    monkeypatch.setattr(StoreClient, "connect", lambda _: store)
    monkeypatch.setattr(StoreClient, "under", lambda self, _: self)
    rejoin_barrier = RejoinBarrier(store, rank=0, size=1)
    store.error = error
    assert rejoin_barrier.rejoin(7, 0.01) == ("waiting", 0)
    store.error = None
    assert rejoin_barrier.rejoin(7, 0.01) == ("waiting", 0)  # it has said that it is there
    assert rejoin_barrier.rejoin(7, 0.1) == ("entered", 7)


def test_an_error_of_a_user_defined_store_is_raised_to_the_caller():
    """The caller used to get an IndexError, and the worker thread ended."""
    store = Failing()
    store.error = LookupError("no such table")
    with pytest.raises(LookupError, match="no such table"):
        StoreClient(store).read("key")


def test_a_worker_thread_survives_a_job_that_raises():
    """Otherwise the interpreter would wait for it at exit."""
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
