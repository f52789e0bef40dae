"""Where ranks wait until all have come back, for engines that have no such place: the store.

Each writes the number of its last call under a key of this return, and waits until there is one of
everybody. The greatest number is where all go on. Who has written has come, whatever becomes of it
afterwards; so all who look see the same. A key is deleted when its writer has come back once more,
for then everybody has read it.
"""

from __future__ import annotations

import time
from contextlib import suppress

from torch._C._distributed_c10d import Store
from torch.distributed import DistNetworkError

from ..errors import RendezvousTimeout
from ._patient import PatientStore

__all__ = ["Hall"]

A_LOOK = 0.01  # seconds; a store gives up so short a wait before it has looked


class Hall:
    """One rank's place among those who wait to be members again."""

    def __init__(self, store: Store | None, *, rank: int, size: int) -> None:
        self._door = None if store is None else PatientStore(store)
        self._store: PatientStore | None = None
        self._rank = rank
        self._size = size
        self._turn = 1
        self._has_come = False
        self._missing = self._others()
        self._is_lost = False

    def rejoin(self, calls: int, seconds: float) -> tuple[str, int]:
        """Say that this rank has come, or wait for the others; tells how far it has come."""
        if self._door is None:  # and so nobody else
            return "entered", calls
        if self._is_lost:
            time.sleep(seconds)
            return "waiting", 0
        try:
            most = self._take_step(self._enter(self._door), calls, seconds)
        except RendezvousTimeout:  # the store's host is stopped or out of reach, and may come back
            most = None
        except DistNetworkError:  # the connection is closed, for good; torch logs every further try
            self._is_lost = True
            most = None
        except Exception:  # noqa: BLE001 - out of threads, a user's store: it may pass
            time.sleep(max(seconds, A_LOOK))
            most = None
        if most is None:
            return "waiting", 0
        self._turn += 1
        self._has_come = False
        self._missing = self._others()
        return "entered", most

    def awaited(self) -> list[int]:
        """List the ranks that have not come, as far as is known."""
        store, turn = self._store, self._turn
        if store is not None and not self._is_lost:
            with suppress(Exception):  # the store does not answer
                self._missing = [r for r in self._missing if not store.has(f"{turn}/{r}")]
        return self._missing

    def _enter(self, door: PatientStore) -> PatientStore:
        # A connection of its own: a wait in the store keeps others on the same one from asking.
        if self._store is None:
            self._store = PatientStore(door.connect()).under("hall")
        return self._store

    def _take_step(self, store: PatientStore, calls: int, seconds: float) -> int | None:
        """Return where all go on, if everybody has come."""
        turn, rank = self._turn, self._rank
        if not self._has_come:
            store.set(f"{turn}/{rank}", str(calls))
            self._has_come = True
            return None
        keys = [f"{turn}/{other}" for other in range(self._size)]
        if not (store.await_all(keys, seconds) if seconds > A_LOOK else store.has(*keys)):
            return None
        most = max(int(store.fetch(key)) for key in keys)
        if turn > 1:
            store.delete(f"{turn - 1}/{rank}")
        return most

    def _others(self) -> list[int]:
        return [rank for rank in range(self._size) if rank != self._rank]
