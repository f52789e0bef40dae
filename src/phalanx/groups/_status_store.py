"""The status store: what ranks tell each other, through the group's store, when a call is overdue.

Nothing is written while all is well. A rank that waits too long increments a counter; the
watchdog of every rank polls that counter and, when it has changed, writes a report of what its
rank is doing. The first cause of a failure (`Failure`) is written once, by compare-and-set, for
all ranks.

Every method returns soon: a store that does not answer reads like an empty one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeVar

from torch.distributed import DistNetworkError

from .. import errors
from ..errors import RankReport, RendezvousTimeout
from ._flight_recorder import Call
from ._formatting import first_line
from ._store_client import StoreClient

FailureKind = Literal["timeout", "lost", "mismatch", "aborted", "engine"]

_ERROR_BY_KIND: dict[FailureKind, type[errors.GroupError]] = {
    "timeout": errors.CollectiveTimeout,
    "lost": errors.PeerLost,
    "mismatch": errors.RankMismatch,
    "aborted": errors.GroupAborted,
    "engine": errors.GroupError,
}


@dataclass(frozen=True)
class Failure:
    """The first cause that any rank found; whoever finds it later adopts it."""

    kind: FailureKind
    by: int
    """The rank that found it."""
    cause: str
    """A clause that starts with its subject (``rank 2 is dead``) or is about the rank `by`
    (``timed out after 5 s``)."""
    ranks: tuple[int, ...] = ()
    """The ranks at fault."""
    operation: str = ""
    sequence: int | None = None

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Failure:
        """Read what `to_json` wrote."""
        return cls(**{**data, "ranks": tuple(data["ranks"])})

    def to_json(self) -> dict[str, Any]:
        """Write it down as plain data."""
        return asdict(self)

    def error(
        self,
        *,
        group: str,
        rank: int,
        call: Call | None,
        reports: Mapping[int, errors.RankReport] | None = None,
    ) -> errors.GroupError:
        """Make the error that `rank` raises out of `call`."""
        where = f"group {group!r}, rank {rank}"
        if call is not None:
            where = f"{call.what} #{call.sequence} at {call.site} ({where})"
        return _ERROR_BY_KIND[self.kind](
            f"{where}: {self._told_to(rank, call)}",
            group=group,
            operation=self.operation or (call.what if call else ""),
            sequence=self.sequence if self.sequence is not None or call is None else call.sequence,
            ranks=self.ranks,
            reports=reports,
        )

    def _told_to(self, rank: int, call: Call | None) -> str:
        """Give the cause a subject: rank 1 reads that *rank 0* timed out."""
        if rank == self.by or self.cause.startswith("rank"):  # it names its own
            return self.cause
        same = call is not None and (call.what, call.sequence) == (self.operation, self.sequence)
        where = "" if same or not self.operation else f" in {self.operation} #{self.sequence}"
        return f"rank {self.by}{where} {self.cause}"


T = TypeVar("T")

NO_ANSWER = "the store does not answer: is its host alive?"


class StatusStore:
    """One rank's view of its group's notice board."""

    def __init__(self, store: StoreClient, *, rank: int, size: int) -> None:
        self._store = store
        self._rank = rank
        self._size = size
        self._lost = False
        self._failure_key = "failure"
        self._heard = 0  # the ring that this rank answered last
        self.last_error = ""
        """Why the store gave no answer the last time it was asked; empty if it did."""

    def request_reports(self) -> int:
        """Ask every rank to report; returns the number of this ring."""
        return self._ask(lambda: self._store.add("alarm", 1), 0)

    def answer(self, report: Callable[[], RankReport]) -> bool:
        """Pin up this rank's report if somebody rang since the last answer."""
        rings = self._report_requests()
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
        page = self._failure_key
        first = self._ask(lambda: self._store.write_once(page, mine), mine.encode())
        self.request_reports()
        return Failure.from_json(json.loads(first))

    def failure(self) -> Failure | None:
        """Read the cause of the group's failure, if there is one."""
        data = self._read(self._failure_key)
        return None if data is None else Failure.from_json(data)

    def reset_failure(self, without: str) -> None:
        """Leave a failure behind; whoever goes on without the same ranks turns to the same page."""
        self._failure_key = f"failure without {without}"

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

    def _report_requests(self) -> int:
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
            self.last_error = NO_ANSWER
        except DistNetworkError:  # the connection is closed, for good; torch logs every further try
            self.last_error = NO_ANSWER
            self._lost = True
        except Exception as error:  # noqa: BLE001 - out of threads, a user's store: it may pass
            self.last_error = f"the store failed: {first_line(error) or type(error).__name__}"
        else:
            self.last_error = ""
            return answer
        return otherwise
