"""How a rank that forms a group gets its engine, and when the group is there: when all have one.

Otherwise a rank that is done with the group at once would hang up on those still connecting.

Where ranks know each other to be on one machine, an engine may be made of what rank 0 offers with
its verdict, and be ready without another word in the store. If any rank cannot take the offer, all
of them connect in the ordinary way.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch._C._distributed_c10d import Store

from ..errors import PeerLost, PhalanxError, RendezvousError, RendezvousTimeout
from ._engine import Engine
from ._forming import TURN, Forming
from ._patient import PlainStore
from ._roster import Member
from ._stores import own_connection
from ._telling import Verdict
from ._words import first_line

__all__ = ["Connecting", "Offer"]


class Offer(Protocol):
    """Something that rank 0 makes and the others reach by what they are told of it."""

    def make(self) -> dict[str, Any] | None:
        """Make it, on rank 0, and return what to tell the others; None if it cannot be made."""

    def take(self, told: dict[str, Any]) -> str:
        """Reach it, on the other ranks; returns why that cannot be done, if so."""

    def absent(self) -> list[int]:
        """List the ranks that have not reached it yet."""

    def engine(self, members: Sequence[Member], options: dict[str, object]) -> Engine:
        """Make this rank's engine of it; all ranks have reached it."""


class Connecting:
    """One rank's way to an engine."""

    def __init__(
        self,
        forming: Forming,
        *,
        make: Callable[[Store], Engine],
        offer: Offer | None,
        options: dict[str, object],
        lends_store: bool,
    ) -> None:
        self._forming = forming
        self._make_engine = make
        self._offer = offer
        self._options = options
        self._lends_store = lends_store
        self._own_room: PlainStore | None = None
        self.verdict: Verdict = Verdict()
        """What the ranks have come to."""

    @property
    def room(self) -> PlainStore:
        """The group's own part of the store."""
        return self._forming.room if self._own_room is None else self._own_room

    def run(self, check: Callable[[], None], *, background: bool) -> Engine:
        """Meet the others and return an engine; `check` may refuse those who have come."""
        forming = self._forming

        def meet() -> None:
            self.verdict = forming.meet(lambda: None if self._offer is None else self._offer.make())
            check()

        def meet_and_connect() -> Engine:
            meet()
            engine = self._take_offer()
            if engine is None:
                engine = self._make()
                self._await_others()
            return engine

        if background:
            return forming.carry_out(meet_and_connect)
        forming.carry_out(meet)
        engine = self._make()
        forming.carry_out(self._await_others)
        return engine

    # -- by an offer -----------------------------------------------------------------------

    def _take_offer(self) -> Engine | None:
        offer, told = self._offer, self.verdict.offer
        if offer is None or told is None:
            return None
        why = "" if self._forming.rank == 0 else offer.take(told)
        if why:
            self.room.set("refused", f"rank {self._forming.rank}: {why}")
            return None
        pause, looked = 0.00005, time.monotonic()
        while offer.absent():
            time.sleep(pause)
            pause = min(pause * 1.5, 0.002)
            if time.monotonic() - looked >= TURN:
                looked = time.monotonic()
                if self.room.has("refused"):
                    return None
                self._check_time(f"{offer.absent()} did not reach what rank 0 has offered")
        assert self._forming.roster is not None, "they have met"
        return offer.engine(self._forming.roster.members, self._options)

    # -- in the ordinary way ---------------------------------------------------------------

    def _make(self) -> Engine:
        forming = self._forming
        if self._lends_store:  # to which others may wish to talk while an engine connects
            self._own_room = PlainStore(own_connection(forming.room.raw))
        try:
            return self._make_engine(self.room.under("engine").raw)
        except (PeerLost, RendezvousTimeout):
            raise
        except Exception as error:
            self.room.set("broken", f"rank {forming.rank}: {first_line(error)}")
            if isinstance(error, PhalanxError) or not isinstance(error, RuntimeError):
                raise
            forming.look()  # a death explains it better
            told = f"{forming.terms} did not connect: {first_line(error)}"
            raise RendezvousError(told) from error

    def _await_others(self) -> None:
        if self.room.add("connected", 1) == self._forming.terms.size:
            self.room.set("complete", "")
            return
        while not self.room.await_all(["complete"], TURN):
            broken = self.room.read("broken")
            if broken is not None:
                raise RendezvousError(f"{self._forming.terms} did not connect: {broken.decode()}")
            self._check_time("some rank's engine is stuck")

    def _check_time(self, why: str) -> None:
        self._forming.check_given_up()
        if time.monotonic() >= self._forming.deadline:
            raise RendezvousTimeout(f"{self._forming.terms} did not connect in time: {why}")
