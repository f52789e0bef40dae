"""The work handles of shared memory: a ticket of the engine, and what it works on."""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.futures import Future

from ...errors import InvalidState, PeerLeft, PeerLost
from .._engine import CallSpoiled, EngineMismatch
from .._patient import borrow_thread

if TYPE_CHECKING:
    from .shm import ShmEngine

__all__ = ["PENDING", "ShmPart", "ShmTransfer", "ShmWork"]

# The numbers of `native/engine.hpp`.
PENDING, FINISHED, DEAD, MISMATCH, ABORTED, ROOTLESS, TORN = range(7)
CANCELLED = 3  # of a transfer
_FOREVER = 3600.0


class ShmWork:
    """A call under way; it keeps the memory that it works on."""

    __slots__ = ("_future", "_memory", "_owner", "_ticket")

    def __init__(self, owner: ShmEngine, ticket: int, memory: object) -> None:
        self._owner = owner
        self._ticket = ticket
        self._memory = memory
        self._future: Future[Any] | None = None

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Do this rank's share and wait for the others'."""
        seconds = timeout.total_seconds() or _FOREVER
        verdict = self._owner._engine.wait(self._ticket, seconds)
        if verdict[0] == FINISHED:
            return True
        if verdict[0] == PENDING:
            raise RuntimeError("not yet")
        raise _error(*verdict)

    def is_completed(self) -> bool:
        """Do what can be done now, and tell whether the call has ended."""
        return self._owner._engine.test(self._ticket)[0] != PENDING

    def get_future(self) -> Future[Any]:
        """Return a future; somebody has to wait for it to come true, so a thread is borrowed."""
        if self._future is None:
            self._future = Future()
            borrow_thread(self._fill)
        return self._future

    def result(self) -> list[Tensor]:
        """Return nothing; the group knows the outputs."""
        return []

    def _source_rank(self) -> int:
        return -1

    def _fill(self) -> None:
        assert self._future is not None
        try:
            self.wait()
        except RuntimeError as error:
            self._future.set_exception(error)
        else:
            self._future.set_result([])


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
        seconds = timeout.total_seconds() or _FOREVER
        state, peer, length = self._owner._engine.wait_transfer(self._ticket, seconds)
        if state == PENDING:
            raise RuntimeError("not yet")
        self._owner._transfers.pop(self._ticket, None)
        if state == FINISHED:
            return True
        if state == CANCELLED:
            raise CallSpoiled(PeerLeft, peer, f"rank {peer} has left the group")
        raise RuntimeError(f"rank {peer} sent {length} bytes, which is not what was expected")

    def cancel(self) -> None:
        """Take it back, unless a part of it has gone."""
        if self._owner._engine.cancel_transfer(self._ticket):
            self._owner._transfers.pop(self._ticket, None)

    def __del__(self) -> None:
        with suppress(InvalidState):  # a forked child has no engine
            self._owner._engine.forget_transfer(self._ticket)
        if self._ticket in self._owner._transfers:
            self._owner._dropped.add(self._ticket)

    def is_completed(self) -> bool:
        """Move what can be moved now, and tell whether it has ended."""
        return self._owner._engine.test_transfer(self._ticket)[0] != PENDING

    def _source_rank(self) -> int:
        return self._owner._engine.test_transfer(self._ticket)[1]


def _error(outcome: int, first: int, second: int) -> RuntimeError:
    if outcome == MISMATCH:
        return EngineMismatch(first, second)
    if outcome == ROOTLESS:
        return CallSpoiled(PeerLeft, first, f"its root, rank {first}, has left the group")
    if outcome == TORN:
        told = f"rank {first} died in the middle of it: what the tensors hold is undefined"
        return CallSpoiled(PeerLost, first, told)
    told = f"rank {first} is dead" if outcome == DEAD else "the group was aborted"
    return RuntimeError(f"connection lost: {told}")
