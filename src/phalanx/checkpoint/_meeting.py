"""How the ranks of a save meet, and learn from each other who has failed.

A barrier with an `exchange` carries the ranks' words itself. For one that can only wait, and where
there is none, ranks leave notes for each other in the folder that the save works in.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from ..errors import FolderInUse, SaveFailed, SaveTimeout
from . import _progress
from ._types import RankInfo

__all__ = ["Alone", "AtBarrier", "Company", "names_of"]

T = TypeVar("T")


class Company(ABC):
    """The ranks that save together."""

    def __init__(self, rank_info: RankInfo) -> None:
        self.rank = rank_info.global_rank
        self.size = rank_info.global_world_size

    @abstractmethod
    def exchange(self, text: str) -> list[str]:
        """Wait for all ranks, and return their texts by rank."""

    def close(self) -> None:
        """Part from each other."""
        return

    def together(self, phase: str, action: Callable[[], T]) -> list[T]:
        """Do something on every rank and return what came of it, by rank.

        What `action` returns must be something that JSON can say. If it has failed on any rank,
        all raise `SaveFailed` with the cause.
        """
        error: BaseException | None = None
        _progress.enter(phase)
        try:
            said = json.dumps({"did": action()})
        except BaseException as raised:  # noqa: BLE001 - whatever it is, the others must hear of it
            error = raised
            said = json.dumps({"failed": _tell(raised), "kind": _kind(raised)})
        _progress.enter("waiting for ranks")
        try:
            texts = self.exchange(said)
        except Exception as raised:
            if error is None:
                kind = SaveTimeout if isinstance(raised, TimeoutError) else SaveFailed
                raise kind(f"the save was given up while {phase}: {raised}") from raised
            texts = []  # nobody has heard of it, but it did happen here
        if error is not None and not isinstance(error, Exception):
            raise error  # an interrupt stays one
        told = [json.loads(text) for text in texts]
        failures = {rank: each for rank, each in enumerate(told) if "failed" in each}
        if error is not None:
            failures.setdefault(self.rank, json.loads(said))
        if failures:
            raise _first(failures, phase) from error
        return [each["did"] for each in told]


def _first(failures: dict[int, dict[str, str]], phase: str) -> SaveFailed:
    """Make the one error for all that failed at a meeting; nobody knows which clock to believe."""
    first, *others = sorted(failures)
    more = f" (and {names_of(others)} failed too)" if others else ""
    kind = _KINDS.get(failures[first]["kind"], SaveFailed)
    return kind(f"the save failed on rank {first} while {phase}: {failures[first]['failed']}{more}")


_KINDS: dict[str, type[SaveFailed]] = {"in use": FolderInUse, "timeout": SaveTimeout}


def _kind(error: BaseException) -> str:
    return next((name for name, kind in _KINDS.items() if isinstance(error, kind)), "")


def _tell(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def names_of(ranks: Sequence[int]) -> str:
    """Name some ranks."""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))}"


class Alone(Company):
    """One rank."""

    def exchange(self, text: str) -> list[str]:
        """Return what was said."""
        return [text]


class AtBarrier(Company):
    """Ranks whose barrier carries texts."""

    def __init__(self, rank_info: RankInfo, barrier: Any) -> None:
        super().__init__(rank_info)
        self._barrier = barrier

    def exchange(self, text: str) -> list[str]:
        """Leave it to the barrier."""
        texts: list[str] = self._barrier.exchange(text)
        assert len(texts) == self.size, "a barrier brings the text of every rank"
        return texts
