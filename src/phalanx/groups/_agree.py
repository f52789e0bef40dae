"""Checks that ranks agree on what they call, before they call it."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Protocol

import torch
from torch._C import _distributed_c10d as c10d

from ._engine import Engine
from ._health import Health, mismatch
from ._record import Call
from ._words import Side
from ._work import Work

__all__ = ["Agreement", "agreement_for"]

CARD_BYTES = 256  # bytes that a rank's description travels in; a longer one is cut


class Agreement(Protocol):
    """Compares a call with the peers' calls of the same number."""

    def check(self, call: Call, timeout: float, terms: tuple[Any, ...], *, uneven: bool) -> None:
        """Raise `RankMismatch`, naming both sides, unless all ranks make the same call."""


def agreement_for(engine: Engine, checks: bool | None, health: Health) -> Agreement | None:
    """Choose how to check: for free where the engine can, by exchange where the user asks."""
    if health.size == 1 or checks is False:
        return None
    if hasattr(engine, "agree"):
        return _ComparedByEngine(engine, health)
    return _ComparedByCards(engine, health) if checks else None


class _ComparedByEngine:
    """Leaves the comparison to an engine whose ranks see each other's calls."""

    def __init__(self, engine: Engine, health: Health) -> None:
        self._engine = engine
        self._health = health

    def check(self, call: Call, timeout: float, terms: tuple[Any, ...], *, uneven: bool) -> None:
        del timeout  # nobody waits
        mine = Side(self._health.rank, call.what, call.site)
        theirs = self._engine.agree(call.sequence, _say(call, terms, uneven=uneven), mine)
        if theirs is not None:
            _refuse(self._health, call, theirs)


class _ComparedByCards:
    """Gathers a description of the call from every rank first: a round trip for every call."""

    def __init__(self, engine: Engine, health: Health) -> None:
        self._engine = engine
        self._health = health

    def check(self, call: Call, timeout: float, terms: tuple[Any, ...], *, uneven: bool) -> None:
        size = self._health.size
        card = _card(_say(call, terms, uneven=uneven), call)
        cards = card.repeat(size)  # those who have left agree
        options = c10d.AllgatherOptions()
        options.timeout = timedelta(seconds=timeout)
        raw = self._engine._allgather_base(cards, card, options)
        Work(self._health, call, timeout, raw, [cards]).await_part()
        mine = _read(card)
        for rank, row in enumerate(cards.view(size, CARD_BYTES)):
            said, what, site = _read(row)
            if said != mine[0]:
                _refuse(self._health, call, Side(rank, what, site))


def _say(call: Call, terms: tuple[Any, ...], *, uneven: bool) -> str:
    """Put into words what all ranks must say alike."""
    told = f"{call.operation} {call.dtype}" if uneven else call.what
    return " ".join([told, *(str(term) for term in terms)])


def _refuse(health: Health, call: Call, theirs: Side) -> None:
    mine = Side(health.rank, call.what, call.site)
    raise health.error(health.fail(mismatch(mine, theirs, call)), None, call)


def _card(said: str, call: Call) -> torch.Tensor:
    text = "\n".join([said, call.what, call.site]).encode()[:CARD_BYTES].ljust(CARD_BYTES, b"\0")
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def _read(card: torch.Tensor) -> tuple[str, str, str]:
    text = bytes(card.tolist()).rstrip(b"\0").decode(errors="replace")
    said, what, site = [*text.split("\n"), "", ""][:3]
    return said, what, site
