"""How a rank that forms a group gets its engine, and when the group is there: when all have one.

Otherwise a rank that is done with the group at once would hang up on those still connecting. A rank
that fails on the way, in whatever, writes down why under `broken`, and the others look there; those
who have their group already read it on the board.

Where ranks know each other to be on one machine, an engine may be made of what rank 0 offers with
its verdict, and be ready without another word in the store. If any rank cannot take the offer, all
of them connect in the ordinary way.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

from torch._C._distributed_c10d import Store

from ..errors import PeerLost, PhalanxError, RendezvousError, RendezvousTimeout
from ._board import Board
from ._engine import Engine
from ._failure import Failure
from ._forming import TURN, Forming
from ._patient import PatientStore, PlainStore
from ._stores import own_connection
from ._telling import Verdict
from ._words import first_line, ranks_text

__all__ = ["Connecting", "Offer"]


class Offer(Protocol):
    """Something that rank 0 makes and the others reach by what they are told of it."""

    def make(self) -> dict[str, Any] | None:
        """Make it, on rank 0, and return what to tell the others; may raise, or return None."""

    def take(self, told: dict[str, Any]) -> None:
        """Reach it, on the other ranks; may raise."""

    def absent(self) -> list[int]:
        """List the ranks that have not reached it yet."""

    def engine(self) -> Engine:
        """Return this rank's engine; all ranks have theirs, so nothing may go wrong here."""


class Connecting:
    """One rank's way to an engine."""

    def __init__(
        self,
        forming: Forming,
        *,
        make: Callable[[Store], Engine],
        offer: Offer | None,
        lends_store: bool,
    ) -> None:
        self._forming = forming
        self._make_engine = make
        self._offer = offer
        self._lends_store = lends_store
        self._own_room: PlainStore | None = None
        self._has_told = False
        self._lines: dict[PlainStore, PatientStore] = {}
        self.verdict: Verdict = Verdict()
        """What the ranks have come to."""

    @property
    def room(self) -> PlainStore:
        """The group's own part of the store."""
        return self._forming.room if self._own_room is None else self._own_room

    def run(self, check: Callable[[], None], *, background: bool) -> Engine:
        """Meet the others and return an engine; `check` may refuse those who have come."""
        try:
            return self._run(check, background=background)
        except BaseException as error:
            if not self._is_known(error):
                self.give_up(error)
            raise

    def give_up(self, error: BaseException) -> None:
        """Tell the others why this rank has no group, whether or not they have theirs."""
        rank, size = self._forming.rank, self._forming.terms.size
        with suppress(Exception):  # who is not told learns it by the deadline
            line = self._line()
            self._tell(error, line.set)
            board = Board(line.under("board"), rank=rank, size=size)
            board.fail(Failure("engine", rank, f"could not form the group: {_reason(error)}"))
            board.close()

    def _run(self, check: Callable[[], None], *, background: bool) -> Engine:
        forming = self._forming

        def meet() -> None:
            self.verdict = forming.meet(self._make_offer)
            check()

        def meet_and_connect() -> Engine:
            meet()
            engine = self._take_offer()
            if engine is None:
                engine = self._make()
                self._await_others()
            return engine

        if background:
            return forming.carry_out(meet_and_connect, self._look)
        forming.carry_out(meet, self._look)
        engine = self._make()
        forming.carry_out(self._await_others, self._look)
        return engine

    # -- what goes wrong -------------------------------------------------------------------

    def _is_known(self, error: BaseException) -> bool:
        """Whether the others learn of an error by themselves: a death, a deadline, a verdict."""
        if not self._forming.has_signed_in:
            return True  # which is all that they need to know
        met = bool(self.verdict.token)
        return isinstance(error, (PeerLost, RendezvousTimeout) if met else PhalanxError)

    def _tell(self, error: BaseException, write: Callable[[str, str], None]) -> None:
        """Write down, once, why this rank has no engine."""
        if not self._has_told:
            self._has_told = True
            write("broken", f"rank {self._forming.rank}: {_reason(error)}")

    def _line(self) -> PatientStore:
        """Return a connection to the room that no engine waits on."""
        room = self._forming.room
        line = self._lines.get(room)
        if line is None:
            line = self._lines[room] = PatientStore(PatientStore(room.raw).connect())
        return line

    def _look(self) -> None:
        """Raise if no engine can come about, for this rank's may wait for one that failed."""
        self._forming.look()
        broken = self._ask_for_broken()
        if broken is not None:
            raise self._not_connected(broken)

    def _ask_for_broken(self) -> bytes | None:
        if not self._forming.has_signed_in:
            return None
        try:
            return self._line().read("broken")
        except Exception:  # noqa: BLE001 - who cannot ask learns it by the deadline
            return None

    def _not_connected(self, broken: bytes) -> RendezvousError:
        self._has_told = True  # as somebody has
        return RendezvousError(f"{self._forming.terms} did not connect: {broken.decode()}")

    # -- by an offer -----------------------------------------------------------------------

    def _make_offer(self) -> dict[str, Any] | None:
        try:
            return None if self._offer is None else self._offer.make()
        except PeerLost:
            raise
        except Exception:  # noqa: BLE001 - whatever it is, the ordinary way may do without
            self._offer = None  # with all that it has opened
            return None

    def _take_offer(self) -> Engine | None:
        try:
            return self._try_offer()
        finally:
            self._offer = None  # where it was refused, with all that it has opened

    def _try_offer(self) -> Engine | None:
        offer, told = self._offer, self.verdict.offer
        if offer is None or told is None:
            return None
        why = "" if self._forming.rank == 0 else _why_not(offer, told)
        if why:
            self._offer = offer = None
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
                self._check_time(
                    f"{ranks_text(offer.absent())} did not map the memory that rank 0 offered"
                )
        return offer.engine()

    # -- in the ordinary way ---------------------------------------------------------------

    def _make(self) -> Engine:
        forming = self._forming
        try:
            if self._lends_store:  # to which others may wish to talk while an engine connects
                self._own_room = PlainStore(own_connection(forming.room.raw))
            return self._make_engine(self.room.under("engine").raw)
        except (PeerLost, RendezvousTimeout):
            raise
        except Exception as error:
            self._tell(error, self.room.set)
            if isinstance(error, PhalanxError) or not isinstance(error, RuntimeError | OSError):
                raise
            forming.look()  # a death explains it better
            told = f"{forming.terms} did not connect: {_reason(error)}"
            raise RendezvousError(told) from error

    def _await_others(self) -> None:
        if self.room.add("connected", 1) == self._forming.terms.size:
            self.room.set("complete", "")
            return
        while not self.room.await_all(["complete"], TURN):
            broken = self.room.read("broken")
            if broken is not None:
                raise self._not_connected(broken)
            self._check_time("some rank's engine is stuck")

    def _check_time(self, why: str) -> None:
        self._forming.check_given_up()
        if time.monotonic() >= self._forming.deadline:
            raise RendezvousTimeout(f"{self._forming.terms} did not connect in time: {why}")


def _why_not(offer: Offer, told: dict[str, Any]) -> str:
    """Take an offer, or return the reason that keeps this rank from it."""
    try:
        offer.take(told)
    except PeerLost:
        raise
    except Exception as error:  # noqa: BLE001 - whatever it is, the others must not go ahead
        return _reason(error)
    return ""


def _reason(error: BaseException) -> str:
    name = type(error).__name__
    if not isinstance(error, Exception):  # whose text says little: the code of an exit
        return name
    return first_line(error) or name
