"""Why a group cannot go on: one cause, the same on every rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from .. import errors
from ._record import Call

__all__ = ["Failure", "Kind"]

Kind = Literal["timeout", "lost", "mismatch", "aborted", "engine"]

_ERRORS: dict[Kind, type[errors.GroupError]] = {
    "timeout": errors.CollectiveTimeout,
    "lost": errors.PeerLost,
    "mismatch": errors.RankMismatch,
    "aborted": errors.GroupAborted,
    "engine": errors.GroupError,
}


@dataclass(frozen=True)
class Failure:
    """The first cause that any rank found; whoever finds it later adopts it."""

    kind: Kind
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
        return _ERRORS[self.kind](
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
