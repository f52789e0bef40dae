"""Check that all ranks make the same call, before the engine starts it.

`consistency_check_for` selects how. An engine whose ranks see each other's calls compares them at
no cost. Otherwise, and only with `checks=True`, an allgather of a short description precedes every
call. A difference raises `RankMismatch` with both calls, on every rank.
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

DESCRIPTION_BYTES = 256  # longer descriptions are cut


class CallConsistencyCheck(Protocol):
    """Compares a call with the peers' calls of the same sequence number."""

    def check(self, call: Call, timeout: float, terms: tuple[Any, ...], *, uneven: bool) -> None:
        """Raise `RankMismatch`, naming both sides, unless all ranks make the same call."""


def consistency_check_for(
    engine: Engine, checks: bool | None, detector: FailureDetector
) -> CallConsistencyCheck | None:
    """Return the engine's own check, or an exchange if the user asked for one, or None."""
    if detector.size == 1 or checks is False:
        return None
    if hasattr(engine, "agree"):
        return _EngineCheck(engine, detector)
    return _ExchangeCheck(engine, detector) if checks else None


class _EngineCheck:
    """The comparison of an engine whose ranks see each other's calls."""

    def __init__(self, engine: Engine, detector: FailureDetector) -> None:
        self._engine = engine
        self._detector = detector

    def check(self, call: Call, timeout: float, terms: tuple[Any, ...], *, uneven: bool) -> None:
        del timeout  # it does not wait
        mine = RankCall(self._detector.rank, call.what, call.site)
        theirs = self._engine.agree(call.sequence, _call_key(call, terms, uneven=uneven), mine)
        if theirs is not None:
            _raise_mismatch(self._detector, call, theirs)


class _ExchangeCheck:
    """An allgather of the call's description: one round trip for every call."""

    def __init__(self, engine: Engine, detector: FailureDetector) -> None:
        self._engine = engine
        self._detector = detector

    def check(self, call: Call, timeout: float, terms: tuple[Any, ...], *, uneven: bool) -> None:
        size = self._detector.size
        description = _encode_description(_call_key(call, terms, uneven=uneven), call)
        gathered = description.repeat(size)  # ranks that have left agree
        options = c10d.AllgatherOptions()
        options.timeout = timedelta(seconds=timeout)
        raw = self._engine._allgather_base(gathered, description, options)
        Work(self._detector, call, timeout, raw, [gathered]).await_part()
        key, _, _ = _decode_description(description)
        for rank, row in enumerate(gathered.view(size, DESCRIPTION_BYTES)):
            their_key, what, site = _decode_description(row)
            if their_key != key:
                _raise_mismatch(self._detector, call, RankCall(rank, what, site))


def _call_key(call: Call, terms: tuple[Any, ...], *, uneven: bool) -> str:
    """Describe what must be equal on all ranks."""
    what = f"{call.operation} {call.dtype}" if uneven else call.what
    return " ".join([what, *(str(term) for term in terms)])


def _raise_mismatch(detector: FailureDetector, call: Call, theirs: RankCall) -> None:
    mine = RankCall(detector.rank, call.what, call.site)
    raise detector.error(detector.fail(mismatch_failure(mine, theirs, call)), None, call)


def _encode_description(key: str, call: Call) -> torch.Tensor:
    text = (
        "\n".join([key, call.what, call.site])
        .encode()[:DESCRIPTION_BYTES]
        .ljust(DESCRIPTION_BYTES, b"\0")
    )
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def _decode_description(encoded: torch.Tensor) -> tuple[str, str, str]:
    text = bytes(encoded.tolist()).rstrip(b"\0").decode(errors="replace")
    key, what, site = [*text.split("\n"), "", ""][:3]
    return key, what, site
