"""What ranks that form a group write down for each other: terms, verdicts and errors."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from ..errors import (
    GroupError,
    PeerLost,
    PhalanxError,
    RankMismatch,
    RendezvousError,
    RendezvousTimeout,
)
from ._roster import Member
from ._words import runs

__all__ = ["SignIn", "Terms", "Verdict", "death"]


@dataclass(frozen=True)
class Terms:
    """What every rank must say alike to form a group, and where it said it."""

    name: str
    seats: tuple[int, ...]
    """The ranks in a numbering that all users of the store share, for groups that form at the same
    time have different ranks of the same number."""
    backend: str
    options: str
    site: str

    @property
    def size(self) -> int:
        """How many ranks the group has."""
        return len(self.seats)

    @property
    def room(self) -> str:
        """Where its ranks meet; two splits of one name are two groups."""
        whole = self.seats == tuple(range(self.size))
        return self.name if whole else f"{self.name}@{runs(self.seats)}"

    def agrees(self, other: Terms) -> bool:
        """Tell whether two ranks want the same group; the line of code may differ."""
        return self.key() == other.key()

    def key(self) -> tuple[object, ...]:
        """Return what has to be alike."""
        return self.name, self.seats, self.backend, self.options

    def __str__(self) -> str:
        options = f" with {self.options}" if self.options else ""
        return f"group {self.name!r} of {self.size} on {self.backend}{options} at {self.site}"


@dataclass(frozen=True)
class SignIn:
    """What a rank says when it comes."""

    terms: Terms
    member: Member
    turn: int
    purpose: str
    name_number: int = 0
    """The first that is free on this rank, and all after it, to tell groups of one name apart."""

    def to_json(self) -> str:
        """Write it down."""
        # Not by `asdict`, which takes as long as all the rest.
        told = {"terms": vars(self.terms), "member": vars(self.member)}
        rest = {"turn": self.turn, "purpose": self.purpose, "name_number": self.name_number}
        return json.dumps({**told, **rest})

    @classmethod
    def from_json(cls, text: bytes) -> SignIn:
        """Read what `to_json` wrote."""
        data = json.loads(text)
        terms = Terms(**{**data["terms"], "seats": tuple(data["terms"]["seats"])})
        rest = data["turn"], data["purpose"], data["name_number"]
        return cls(terms, Member.from_json(data["member"]), *rest)


_TELLABLE: dict[str, type[GroupError] | type[RendezvousError]] = {
    error.__name__: error for error in (RankMismatch, PeerLost, RendezvousTimeout, RendezvousError)
}


@dataclass(frozen=True)
class Verdict:
    """What came of a meeting; there is one for all, the first that is written down."""

    token: str = ""
    members: tuple[Member, ...] = ()
    """Who has met, unless everybody knows that already."""
    alike: bool = True
    """Whether all have the same purpose."""
    offer: dict[str, Any] | None = None
    """What rank 0 has made for the others to share."""
    name_number: int = 0
    """The first that is free on all ranks."""
    error: PhalanxError | None = None
    """Why there is no group."""
    here: tuple[int, ...] | None = None
    """Whom the error is for, if not for everybody: who comes later was not meant."""

    def to_json(self) -> str:
        """Write it down."""
        if self.error is not None:
            return json.dumps({"error": _told(self.error), "here": self.here})
        members = [member.to_json() for member in self.members]
        told = {"token": self.token, "members": members, "alike": self.alike}
        return json.dumps({**told, "offer": self.offer, "name_number": self.name_number})

    @classmethod
    def from_json(cls, text: bytes) -> Verdict:
        """Read what `to_json` wrote."""
        data = json.loads(text)
        if "error" in data:
            here = None if data["here"] is None else tuple(data["here"])
            return cls(error=_retold(data["error"]), here=here)
        members = tuple(Member.from_json(member) for member in data.pop("members"))
        return cls(**data, members=members)


def _told(error: PhalanxError) -> dict[str, Any]:
    return {
        "kind": type(error).__name__,
        "message": str(error),
        "ranks": getattr(error, "ranks", ()),
        "group": getattr(error, "group", ""),
    }


def _retold(told: dict[str, Any]) -> PhalanxError:
    kind = _TELLABLE.get(told["kind"], RendezvousError)
    if issubclass(kind, GroupError):
        return kind(told["message"], group=told["group"], ranks=told["ranks"])
    return kind(told["message"])


def death(ranks: list[int], first: Member, terms: Terms) -> PeerLost:
    """Say that ranks died on the way."""
    told = f"rank {ranks[0]} ({first}) died while {terms} was forming"
    return PeerLost(told, group=terms.name, ranks=ranks)
