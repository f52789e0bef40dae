"""The work handles of shared memory: a ticket of the engine, and what it works on."""

from __future__ import annotations

import time
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.futures import Future

from ...errors import InvalidState, PeerLeft, PeerLost
from .._engine import CallSpoiled, EngineMismatch, EngineStopped, NotYet, PeerDead, Starved
from .._patient import borrow_thread, is_exiting

if TYPE_CHECKING:
    from .shm import ShmEngine

__all__ = ["PENDING", "ShmPart", "ShmTransfer", "ShmWork"]

# The numbers of `native/engine.hpp`; those of transfers are in `native/transfers.hpp`.
PENDING, FINISHED, DEAD, MISMATCH, ABORTED, ROOTLESS, TORN = range(7)
CANCELLED, STARVED, STOPPED = 3, 4, 5  # of a transfer
_LONG = 3600.0  # seconds; who waits for as long as it takes waits for this again and again
_A_LOOK = 0.02  # seconds between two looks whether there is memory
_A_TURN = timedelta(seconds=0.25)  # of a thread that must be home before the interpreter goes away


class ShmWork:
    """A call under way; it keeps the memory that it works on."""

    __slots__ = ("_future", "_memory", "_owner", "ticket")

    def __init__(self, owner: ShmEngine, memory: object) -> None:
        self._owner = owner
        self.ticket = 0
        """The engine's number of the call, which it sets itself; counts from 1."""
        self._memory = memory
        self._future: Future[Any] | None = None

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Do this rank's share and wait for the others'."""
        seconds = timeout.total_seconds()
        verdict = self._owner._engine.wait(self.ticket, seconds or _LONG)
        while verdict[0] == PENDING and not seconds:
            verdict = self._owner._engine.wait(self.ticket, _LONG)
        if verdict[0] == FINISHED:
            return True
        if verdict[0] == PENDING:
            raise NotYet
        raise _error(*verdict)

    def is_completed(self) -> bool:
        """Do what can be done now, and tell whether the call has ended."""
        return self._owner._engine.test(self.ticket)[0] != PENDING

    def get_future(self) -> Future[Any]:
        """Return a future; somebody has to wait for it to come true, so a thread is borrowed."""
        if self._future is None:
            self._future = Future()
            borrow_thread(partial(_fill, self, self._future))
        return self._future

    def result(self) -> list[Tensor]:
        """Return nothing; the group knows the outputs."""
        return []

    def _source_rank(self) -> int:
        return -1


class ShmPart(ShmWork):
    """A part of a call, which is nobody's if its root has left."""

    __slots__ = ()

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait as for any call; a part without a root is done."""
        try:
            return super().wait(timeout)
        except CallSpoiled as spoiled:
            if spoiled.kind is not PeerLeft:
                raise
            return True


class ShmTransfer(ShmWork):
    """A send or receive under way."""

    __slots__ = ()

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Move bytes until all have gone."""
        state, peer, length = self._await_end(timeout.total_seconds())
        if state == STARVED:  # it stays under way
            raise Starved(
                f"out of memory while buffering a message of {length} bytes from rank {peer} that "
                "was sent before the one being received. Receive that message first, or free memory"
            )
        self._memory = None
        self._owner._transfers.pop(self.ticket, None)
        if state == FINISHED:
            return True
        if state == CANCELLED:
            raise CallSpoiled(PeerLeft, peer, f"rank {peer} has left the group")
        raise RuntimeError(f"rank {peer} sent {length} bytes; the receive buffer has another size")

    def _await_end(self, seconds: float) -> tuple[int, int, int]:
        """Wait until it has ended, at most for so long unless that is 0; tells how it did."""
        while True:
            status = self._owner._engine.wait_transfer(self.ticket, seconds or _LONG)
            if status[0] == STOPPED:
                raise EngineStopped
            if status[0] != PENDING:
                return status
            # The engine stops waiting when the peer has ended.
            if status[1] in self._owner.lost_ranks():
                raise PeerDead(status[1])
            if seconds:
                raise NotYet

    def cancel(self) -> None:
        """Take it back, unless a part of it has gone."""
        if self._owner._engine.cancel_transfer(self.ticket):
            self._memory = None
            self._owner._transfers.pop(self.ticket, None)

    def __del__(self) -> None:
        if self.ticket == 0:  # it never began
            return
        with suppress(InvalidState):  # a forked child has no engine
            self._owner._engine.forget_transfer(self.ticket)
        if self._memory is not None:  # for all that is known, it has not ended
            self._owner._transfers[self.ticket] = self._memory
            self._owner._dropped.add(self.ticket)

    def is_completed(self) -> bool:
        """Move what can be moved now, and tell whether it has ended."""
        return self._owner._engine.test_transfer(self.ticket)[0] != PENDING

    def _source_rank(self) -> int:
        return self._owner._engine.test_transfer(self.ticket)[1]


def _fill(work: ShmWork, future: Future[Any]) -> None:
    """End a work's future, on a thread that has nothing else to do."""
    while not is_exiting():
        try:
            work.wait(_A_TURN)
        except NotYet:
            continue
        except Starved:  # until somebody receives what is in the way, or frees memory
            time.sleep(_A_LOOK)
            continue
        except Exception as error:  # noqa: BLE001 - whatever it is, the future must end with it
            future.set_exception(error)
        else:
            future.set_result([])
        return


def _error(outcome: int, first: int, second: int) -> RuntimeError:
    if outcome == MISMATCH:
        return EngineMismatch(first, second)
    if outcome == ROOTLESS:
        return CallSpoiled(PeerLeft, first, f"its root, rank {first}, has left the group")
    if outcome == TORN:
        told = f"rank {first} died during the call; the contents of its tensors are undefined"
        return CallSpoiled(PeerLost, first, told)
    return PeerDead(first) if outcome == DEAD else EngineStopped()
