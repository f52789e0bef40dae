"""The notice board: what ranks tell each other when something is overdue.

It hangs in the group's store and nobody writes on it while all is well. Who waits too long *rings*
(adds to a counter); every rank's watcher looks at that counter a few times a second and, when it
has moved, pins up what its rank is doing. The first cause of a failure is pinned up once, for all.

Every method comes back soon: a store that does not answer reads like an empty board.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, TypeVar

from torch.distributed import DistNetworkError

from ..errors import RankReport, RendezvousTimeout
from ._failure import Failure
from ._patient import PatientStore
from ._words import first_line

__all__ = ["Board"]

T = TypeVar("T")

NO_ANSWER = "the store does not answer: is its host alive?"


class Board:
    """One rank's view of its group's notice board."""

    def __init__(self, store: PatientStore, *, rank: int, size: int) -> None:
        self._store = store
        self._rank = rank
        self._size = size
        self._lost = False
        self._page = "failure"
        self._heard = 0  # the ring that this rank answered last
        self.trouble = ""
        """Why the store gave no answer the last time it was asked; empty if it did."""

    def ring(self) -> int:
        """Ask every rank to report; returns the number of this ring."""
        return self._ask(lambda: self._store.add("alarm", 1), 0)

    def answer(self, report: Callable[[], RankReport]) -> bool:
        """Pin up this rank's report if somebody rang since the last answer."""
        rings = self._rings()
        if rings == self._heard:
            return False
        self._heard = rings
        self._write(f"report/{self._rank}", {"ring": rings, **asdict(report())})
        return True

    def reports(self, *, since: int) -> dict[int, RankReport]:
        """Collect the reports that answer ring `since` or a later one."""
        found = {}
        for rank in range(self._size):
            data = self._read(f"report/{rank}")
            if data is not None and data.pop("ring") >= since:
                found[rank] = RankReport(**data)
        return found

    def fail(self, failure: Failure) -> Failure:
        """Pin up the cause of a failure; returns the first one, which may be another rank's."""
        mine = json.dumps(failure.to_json())
        page = self._page
        first = self._ask(lambda: self._store.write_once(page, mine), mine.encode())
        self.ring()
        return Failure.from_json(json.loads(first))

    def failure(self) -> Failure | None:
        """Read the cause of the group's failure, if there is one."""
        data = self._read(self._page)
        return None if data is None else Failure.from_json(data)

    def turn_page(self, without: str) -> None:
        """Leave a failure behind; whoever goes on without the same ranks turns to the same page."""
        self._page = f"failure without {without}"

    def leave(self, *, sequence: int, site: str) -> None:
        """Say that this rank shut the group down after its call number `sequence`."""
        self._write(f"left/{self._rank}", {"sequence": sequence, "site": site})

    def left(self) -> dict[int, tuple[int, str]]:
        """Tell who shut the group down: rank -> (number of its last call, call site)."""
        found = {}
        for rank in range(self._size):
            data = self._read(f"left/{rank}")
            if data is not None:
                found[rank] = (int(data["sequence"]), str(data["site"]))
        return found

    def close(self) -> None:
        """Say that this rank has closed the group after it failed, and asks nothing any more."""
        self._write(f"closed/{self._rank}", {})

    def has_closed(self, rank: int) -> bool:
        """Tell whether a rank has shut the group down or closed it."""
        told = self._store
        return self._ask(lambda: told.has(f"left/{rank}") or told.has(f"closed/{rank}"), False)

    def _rings(self) -> int:
        return int(self._ask(lambda: self._store.read("alarm"), None) or self._heard)

    def _write(self, key: str, data: dict[str, Any]) -> None:
        self._ask(lambda: self._store.set(key, json.dumps(data)), None)

    def _read(self, key: str) -> dict[str, Any] | None:
        text = self._ask(lambda: self._store.read(key), None)
        return None if text is None else json.loads(text)

    def _ask(self, question: Callable[[], T], otherwise: T) -> T:
        if self._lost:
            return otherwise
        try:
            answer = question()
        except RendezvousTimeout:  # the store's host is stopped or out of reach, and may come back
            self.trouble = NO_ANSWER
        except DistNetworkError:  # the connection is closed, for good; torch logs every further try
            self.trouble = NO_ANSWER
            self._lost = True
        except Exception as error:  # noqa: BLE001 - out of threads, a user's store: it may pass
            self.trouble = f"the store failed: {first_line(error) or type(error).__name__}"
        else:
            self.trouble = ""
            return answer
        return otherwise
