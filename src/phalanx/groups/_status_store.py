"""The status store: the state of a group's ranks, exchanged through its store.

Nothing is written while calls complete in time. A rank that waits too long increments a counter.
The watchdog of every rank polls that counter and, when it has changed, writes a report of what
its rank is doing. The first cause of a failure (`Failure`) is written once, by compare-and-set,
for all ranks.

No method blocks for longer than a store request: a store that does not answer reads as empty.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal, TypeVar

from torch.distributed import DistNetworkError

from .._formatting import first_line
from ..errors import RankReport, RendezvousTimeout
from ._store import StoreClient, from_json, to_json

FailureKind = Literal["timeout", "lost", "mismatch", "aborted", "engine"]


@dataclass(frozen=True)
class Failure:
    """Why a group failed: the first cause that any rank found, the same on every rank."""

    kind: FailureKind
    by: int  # the rank that found it
    cause: str
    """A clause. If it names the ranks at fault it is complete (``rank 2 is dead``); otherwise its
    subject is the rank `by` (``timed out after 5 s``)."""
    ranks: tuple[int, ...] = ()  # those at fault
    operation: str = ""
    sequence: int | None = None


T = TypeVar("T")


class StatusStore:
    """One rank's view of the status of its group."""

    def __init__(self, store: StoreClient, *, rank: int, size: int) -> None:
        self._store = store
        self._rank = rank
        self._size = size
        self._is_disconnected = False
        self._failure_key = "failure"
        self._answered_request = 0
        self.last_error = ""  # why the last store request failed; empty if it did not

    def request_reports(self) -> int:
        """Ask every rank to report; returns the number of this request."""
        return self._try(lambda: self._store.add("report_requests", 1), 0)

    def answer(self, report: Callable[[], RankReport]) -> bool:
        """Write this rank's report if one was requested since the last. Return whether it was."""
        requests = self._report_requests()
        if requests == self._answered_request:
            return False
        self._answered_request = requests
        self._write(f"report/{self._rank}", (requests, report()))
        return True

    def reports(self, *, since: int) -> dict[int, RankReport]:
        """Read the reports that answer request `since` or a later one."""
        found = self._read_all("report", tuple[int, RankReport])
        return {rank: report for rank, (request, report) in found.items() if request >= since}

    def fail(self, failure: Failure) -> Failure:
        """Record the cause of a failure; returns the first one, which may be another rank's."""
        mine = to_json(failure)
        key = self._failure_key
        first = self._try(lambda: self._store.write_once(key, mine), mine.encode())
        self.request_reports()
        return from_json(first, Failure)

    def failure(self) -> Failure | None:
        text = self._try(lambda: self._store.read(self._failure_key), None)
        return None if text is None else from_json(text, Failure)

    def reset_failure(self, without: str) -> None:
        """Continue after a failure; ranks that exclude the same ranks use the same key."""
        self._failure_key = f"failure without {without}"

    def record_shutdown(self, *, sequence: int, site: str) -> None:
        """Record that this rank shut the group down after its call number `sequence`."""
        self._write(f"shutdown/{self._rank}", (sequence, site))

    def shut_down(self) -> dict[int, tuple[int, str]]:
        """Return the ranks that shut the group down: rank -> (number of last call, call site)."""
        return self._read_all("shutdown", tuple[int, str])

    def close(self) -> None:
        """Record that this rank has closed the group after a failure and reads nothing more."""
        self._write(f"closed/{self._rank}", ())

    def has_closed(self, rank: int) -> bool:
        has = self._store.has
        return self._try(lambda: has(f"shutdown/{rank}") or has(f"closed/{rank}"), False)

    def _report_requests(self) -> int:
        requests = self._try(lambda: self._store.read("report_requests"), None)
        return int(requests or self._answered_request)

    def _write(self, key: str, data: tuple[object, ...]) -> None:
        self._try(lambda: self._store.set(key, to_json(data)), None)

    def _read_all(self, key: str, kind: type[T]) -> dict[int, T]:
        found = {}
        for rank in range(self._size):
            text = self._try(partial(self._store.read, f"{key}/{rank}"), None)
            if text is not None:
                found[rank] = from_json(text, kind)
        return found

    def _try(self, request: Callable[[], T], default: T) -> T:
        if self._is_disconnected:
            return default
        try:
            answer = request()
        except (RendezvousTimeout, DistNetworkError) as error:
            self.last_error = "the store does not answer: is its host alive?"
            # A host that is stopped or unreachable may recover. A closed connection does not, and
            # torch would log every further request.
            self._is_disconnected = isinstance(error, DistNetworkError)
        except Exception as error:  # noqa: BLE001 - out of threads, a user's store: may pass
            self.last_error = f"the store failed: {first_line(error) or type(error).__name__}"
        else:
            self.last_error = ""
            return answer
        return default
