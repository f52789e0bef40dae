"""How the ranks of a save meet, and learn from each other who has failed.

A barrier with an `exchange` carries the ranks' words itself. For one that can only wait, and where
there is none, ranks leave notes for each other in the folder that the save works in.

Whoever loses a peer in the middle of a save may be met by its successor, which is at the next one.
So every word says in which save it is said, and in which part of it. Ranks that find themselves in
an older save than others give it up; the others begin theirs anew, and wait for them there.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

from ..errors import FolderInUse, SaveFailed, SaveTimeout
from . import _progress
from ._types import RankInfo

__all__ = ["Alone", "AtBarrier", "Company", "OthersAreBehind", "current_turn", "names_of", "turn"]

T = TypeVar("T")


_turn: ContextVar[int | None] = ContextVar("phalanx_checkpoint_turn", default=None)


@contextmanager
def turn(number: int) -> Iterator[None]:
    """Number the save that the block does, where the writer has not made all that came before."""
    token = _turn.set(number)
    try:
        yield
    finally:
        _turn.reset(token)


def current_turn() -> int | None:
    """Return the number that was given to the save under way."""
    return _turn.get()


class OthersAreBehind(SaveFailed):
    """Some ranks are at an older save: they give it up, and will come to this one."""


class Company(ABC):
    """The ranks that save together."""

    turn = 0
    """The number of the save: the same on all ranks, and greater than those before."""

    def __init__(self, rank_info: RankInfo) -> None:
        self.rank = rank_info.global_rank
        self.size = rank_info.global_world_size

    @abstractmethod
    def exchange(self, text: str) -> list[str]:
        """Wait for all ranks, and return their texts by rank."""

    def close(self) -> None:
        """Part from each other."""
        return

    def place(self, phase: str) -> list[Any]:
        """Say where this rank is: in which save, in which part of it, and among how many."""
        return [self.turn, phase, self.size]

    def together(self, phase: str, action: Callable[[], T]) -> list[T]:
        """Do something on every rank and return what came of it, by rank.

        What `action` returns must be something that JSON can say. If it has failed on any rank,
        all raise `SaveFailed` with the cause.
        """
        error: BaseException | None = None
        at = self.place(phase)
        _progress.enter(phase)
        try:
            said = json.dumps({"at": at, "did": action()})
        except BaseException as raised:  # noqa: BLE001 - whatever it is, the others must hear of it
            error = raised
            said = json.dumps({"at": at, "failed": _tell(raised), "kind": _kind(raised)})
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
        self._check_places([each["at"] for each in told], phase)
        failures = {rank: each for rank, each in enumerate(told) if "failed" in each}
        if error is not None:
            failures.setdefault(self.rank, json.loads(said))
        if failures:
            raise _first(failures, phase) from error
        if len(told) != self.size:
            raise SaveFailed(f"the barrier is of {len(told)} ranks, and the save of {self.size}")
        return [each["did"] for each in told]

    def _check_places(self, places: list[tuple[int, str, int]], phase: str) -> None:
        """Raise if others are in another save, in another part of it, or of another number."""
        if all(place == places[0] for place in places):
            return
        sizes = [size for _, _, size in places]
        if len({*sizes}) > 1:
            told = ", ".join(f"rank {rank} says {size}" for rank, size in enumerate(sizes))
            raise SaveFailed(f"ranks do not agree on how many they are: {told}")
        newest = max(turn for turn, _, _ in places)
        ahead = [rank for rank, (turn, _, _) in enumerate(places) if turn == newest]
        if len(ahead) == len(places):
            told = ", ".join(
                f"rank {rank} while {each}" for rank, (_, each, _) in enumerate(places)
            )
            raise SaveFailed(f"ranks have met at different points of a save: {told}")
        if self.rank in ahead:
            raise OthersAreBehind(f"only {names_of(ahead)} came to save number {newest}")
        raise SaveFailed(
            f"save number {self.turn} was given up while {phase}: {names_of(ahead)} had lost it, "
            f"and came to number {newest}"
        )


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
        return texts
