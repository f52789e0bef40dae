"""Check that all ranks make the same call, before the engine starts it.

`consistency_check_for` selects how. An engine whose ranks see each other's calls compares them at
no
cost. Otherwise, and only with `checks=True`, every call is preceded by an allgather of a short
description. A difference raises `RankMismatch` with both calls, on every rank.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Protocol

import torch
from torch._C import _distributed_c10d as c10d

from ._engine import Engine
from ._failure_detector import FailureDetector, mismatch_failure
from ._flight_recorder import Call
from ._formatting import RankCall
from ._work import Work

DESCRIPTION_BYTES = 256  # bytes that a rank's description travels in; a longer one is cut


class CallConsistencyCheck(Protocol):
    """Compares a call with the peers' calls of the same number."""

    def check(self, call: Call, timeout: float, terms: tuple[Any, ...], *, uneven: bool) -> None:
        """Raise `RankMismatch`, naming both sides, unless all ranks make the same call."""


def consistency_check_for(
    engine: Engine, checks: bool | None, health: FailureDetector
) -> CallConsistencyCheck | None:
    """Choose how to check: for free where the engine can, by exchange where the user asks."""
    if health.size == 1 or checks is False:
        return None
    if hasattr(engine, "agree"):
        return _EngineCheck(engine, health)
    return _ExchangeCheck(engine, health) if checks else None


class _EngineCheck:
    """Leaves the comparison to an engine whose ranks see each other's calls."""

    def __init__(self, engine: Engine, health: FailureDetector) -> None:
        self._engine = engine
        self._detector = health

    def check(self, call: Call, timeout: float, terms: tuple[Any, ...], *, uneven: bool) -> None:
        del timeout  # nobody waits
        mine = RankCall(self._detector.rank, call.what, call.site)
        theirs = self._engine.agree(call.sequence, _call_key(call, terms, uneven=uneven), mine)
        if theirs is not None:
            _raise_mismatch(self._detector, call, theirs)


class _ExchangeCheck:
    """Gathers a description of the call from every rank first: a round trip for every call."""

    def __init__(self, engine: Engine, health: FailureDetector) -> None:
        self._engine = engine
        self._detector = health

    def check(self, call: Call, timeout: float, terms: tuple[Any, ...], *, uneven: bool) -> None:
        size = self._detector.size
        card = _encode_description(_call_key(call, terms, uneven=uneven), call)
        cards = card.repeat(size)  # those who have left agree
        options = c10d.AllgatherOptions()
        options.timeout = timedelta(seconds=timeout)
        raw = self._engine._allgather_base(cards, card, options)
        Work(self._detector, call, timeout, raw, [cards]).await_part()
        mine = _decode_description(card)
        for rank, row in enumerate(cards.view(size, DESCRIPTION_BYTES)):
            said, what, site = _decode_description(row)
            if said != mine[0]:
                _raise_mismatch(self._detector, call, RankCall(rank, what, site))


def _call_key(call: Call, terms: tuple[Any, ...], *, uneven: bool) -> str:
    """Put into words what all ranks must say alike."""
    told = f"{call.operation} {call.dtype}" if uneven else call.what
    return " ".join([told, *(str(term) for term in terms)])


def _raise_mismatch(health: FailureDetector, call: Call, theirs: RankCall) -> None:
    mine = RankCall(health.rank, call.what, call.site)
    raise health.error(health.fail(mismatch_failure(mine, theirs, call)), None, call)


def _encode_description(said: str, call: Call) -> torch.Tensor:
    text = (
        "\n".join([said, call.what, call.site])
        .encode()[:DESCRIPTION_BYTES]
        .ljust(DESCRIPTION_BYTES, b"\0")
    )
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def _decode_description(card: torch.Tensor) -> tuple[str, str, str]:
    text = bytes(card.tolist()).rstrip(b"\0").decode(errors="replace")
    said, what, site = [*text.split("\n"), "", ""][:3]
    return said, what, site
