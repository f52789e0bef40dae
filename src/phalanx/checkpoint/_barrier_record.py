"""What the ranks of a barrier have agreed on: the one record that decides."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from ..errors import BarrierError, BarrierTimeout

__all__ = ["Failure", "Record"]


@dataclass(frozen=True)
class Failure:
    """Why a use failed; the same on every rank."""

    use: int
    by: int
    """The rank that found it."""
    cause: str
    """What that rank did: ``timed out after 5 s``."""
    progress: Mapping[int, int] = field(default_factory=dict)
    """The last use that each missing rank came to; 0 if it never came."""
    timeout: bool = True
    """Whether a deadline was the cause."""

    @classmethod
    def from_plain(cls, data: dict[str, Any]) -> Self:
        """Read what JSON has made of it."""
        progress = {int(rank): last for rank, last in data["progress"].items()}
        return cls(**{**data, "progress": progress})

    def error(self, barrier: str, use: int, rank: int, *, late: bool = False) -> BarrierError:
        """Make the error that `rank` raises out of its call number `use`."""
        told = self.cause
        if rank != self.by and not told.startswith("rank"):
            told = f"rank {self.by} {told}"
        if use != self.use:
            told = (
                f"this rank came too late: the use had failed, and so have all up to {self.use}. "
                "Every rank makes every call; one that has left some out makes its barrier anew"
            )
        elif late:
            told = f"this rank came too late: {told}"
        kind = BarrierTimeout if self.timeout else BarrierError
        # A rank that reads this has come, at least by now.
        progress = {r: last for r, last in self.progress.items() if r != rank or not late}
        return kind(
            f"barrier {barrier!r}, use {use}, rank {rank}: {told}",
            barrier=barrier,
            use=use,
            progress=progress if use == self.use else {},
        )


@dataclass(frozen=True)
class Record:
    """An epoch: uses from `first` on are counted in its word, until one of them fails."""

    store: str
    """Tells this store's contents from those of one that was started in its place."""
    size: int
    """The number of ranks."""
    epoch: int = 0
    first: int = 1
    """The first use of the epoch; every one before it has been decided."""
    passed: int = 0
    """The last use that was passed before the epoch."""
    failure: Failure | None = None
    """How the last use that failed did."""
    instances: Mapping[int, int] = field(default_factory=dict)
    """Which of its barriers, in the order in which it made them, is each rank's; the first if not
    here."""

    @classmethod
    def from_text(cls, text: bytes) -> Self:
        """Read what `text` wrote."""
        data = json.loads(text)
        failure = data["failure"] and Failure.from_plain(data["failure"])
        instances = {int(rank): number for rank, number in data["instances"].items()}
        return cls(**{**data, "failure": failure, "instances": instances})

    def text(self) -> str:
        """Write it down."""
        return json.dumps(asdict(self))
