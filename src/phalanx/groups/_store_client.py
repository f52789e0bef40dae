"""A store client with per-request timeouts.

torch's stores block until the server answers, so a stopped server would void every deadline.
Requests run on a borrowed thread; the caller stops waiting after the timeout and the thread is
abandoned, not joined. While a request is unanswered, further requests on the same connection
fail at once.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Self, TypeVar

from torch._C._distributed_c10d import PrefixStore, Store

from ..errors import RendezvousTimeout
from ._background_threads import BackgroundCall
from ._timing import default_timing

T = TypeVar("T")
MIN_POLL_INTERVAL, MAX_POLL_INTERVAL = 5e-5, 2e-2  # seconds


def clone_connection(store: Store) -> Store:
    """Open a second connection to a store."""
    # Out of descriptors, torch would retry until the store's timeout; this raises at once.
    socket.socket().close()
    clone: Store = store.clone()  # type: ignore[attr-defined]  # missing in torch's stubs
    return clone


class BlockingStoreClient:
    """A store client whose requests block until the store answers."""

    def __init__(self, store: Store) -> None:
        self.raw = store

    def under(self, prefix: str) -> Self:
        """Return the part of the store whose keys begin with `prefix`, on the same connection."""
        return self._with_store(PrefixStore(prefix, self.raw))

    def connect(self) -> Store:
        """Open another connection to the same part of the store."""
        return self._request(lambda: clone_connection(self.raw))

    def add(self, key: str, amount: int) -> int:
        """Add to a counter and return its new value."""
        return self._request(lambda: self.raw.add(key, amount))

    def set(self, key: str, value: str) -> None:
        """Write a value."""
        self._request(lambda: self.raw.set(key, value))

    def set_all(self, values: dict[str, str]) -> None:
        """Write several values, with one request if the store supports it."""
        keys, texts = list(values), list(values.values())
        self._request(lambda: self.raw.multi_set(keys, texts))  # type: ignore[attr-defined]  # no stub

    def read(self, key: str) -> bytes | None:
        """Return a value, or None if the key does not exist."""
        return self._request(lambda: self.raw.get(key) if self.raw.check([key]) else None)

    def fetch(self, key: str) -> bytes:
        """Return the value of a key that exists."""
        return self.write_once(key, "")  # one request, where `read` makes two

    def has(self, *keys: str) -> bool:
        """Whether all these keys exist."""
        return self._request(lambda: self.raw.check(list(keys)))

    def write_once(self, key: str, value: str) -> bytes:
        """Write a value unless the key exists, and return its value."""
        return self._request(lambda: self.raw.compare_set(key, "", value))

    def all_keys(self) -> list[str]:
        """Return all keys."""
        return self._request(self.raw.list_keys)

    def delete(self, key: str) -> None:
        """Delete a key, if it exists."""
        self._request(lambda: self.raw.delete_key(key))

    def await_all(self, keys: Sequence[str], seconds: float) -> bool:
        """Wait until all these keys exist; whether they do.

        Polls, since torch logs two lines whenever a store's own wait times out.
        """

        def poll() -> bool:
            until = time.monotonic() + seconds
            pause = MIN_POLL_INTERVAL
            while not self.raw.check(list(keys)):
                left = until - time.monotonic()
                if left <= 0:
                    return False
                time.sleep(min(pause, left))
                pause = min(pause * 1.25, MAX_POLL_INTERVAL)
            return True

        return self._request(poll)

    def _with_store(self, store: Store) -> Self:
        return type(self)(store)

    def _request(self, request: Callable[[], T]) -> T:
        return request()


class StoreClient(BlockingStoreClient):
    """A store client whose requests raise `RendezvousTimeout` when they take too long."""

    def __init__(
        self,
        store: Store,
        *,
        timeout: float | None = None,
        connection: _Connection | None = None,
    ) -> None:
        super().__init__(store)
        self._timeout = default_timing().request_timeout if timeout is None else timeout
        self._connection = connection or _Connection()

    def _with_store(self, store: Store) -> Self:
        return type(self)(store, timeout=self._timeout, connection=self._connection)

    def _request(self, request: Callable[[], T]) -> T:
        return self._connection.request(request, self._timeout)


class _Connection:
    """A connection on which at most one request may remain unanswered."""

    def __init__(self) -> None:
        self._unanswered: threading.Event | None = None

    def request(self, request: Callable[[], T], timeout: float) -> T:
        unanswered = self._unanswered
        if unanswered is not None and not unanswered.is_set():
            raise RendezvousTimeout("the store does not answer")
        call = BackgroundCall(request)
        if not call.ended.wait(timeout):
            self._unanswered = call.ended
            raise RendezvousTimeout(f"the store did not answer within {timeout:g} s")
        return call.result()
