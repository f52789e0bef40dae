"""The handle of a call: waiting with a deadline, completing its future, and failing.

`Work.wait` blocks in the engine for `OVERDUE_AFTER` seconds. Only then does it ask the
`FailureDetector`, in short intervals, whether the call can still succeed. The second half of the
module handles
calls that never started: refused because the group is closed or has failed, or interrupted by a
signal
while the engine was taking them.

Several threads may wait for one `Work`. What must happen once happens under `Work._once`; no
other lock is taken and no user code runs while it is held.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from copy import copy
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from .. import _faultpoints as faultpoints
from ..errors import GroupError, PeerLeft, PeerLost
from ._engine import CallFailed, RawWork, ReceiveBufferExhausted
from ._failure_detector import FailureDetector, PendingCall, Reports
from ._flight_recorder import Call
from ._status_store import Failure


def fail_future(future: Future[Any], error: Exception) -> None:
    """End a future badly: whoever waits for it, in Python or C++, gets the error."""
    future._set_unwrap_func(_FailedResult.tell)
    # A copy, and copies of that for those who ask: what is raised refers to the frames it went
    # through, those to the future, and a circle through C++ is never collected.
    future.set_result(_FailedResult(copy(error)))


class _FailedResult:
    """Stands where the result would be."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def tell(self) -> NoReturn:
        """Raise the error."""
        raise copy(self._error)

    def __reduce__(self) -> NoReturn:
        self.tell()  # C++ pickles a result to find the tensors in it


OVERDUE_AFTER = 0.25  # seconds that a call may take before anybody wonders
OVERDUE_POLL_INTERVAL = 0.04
DEAD_PEER_POLL_INTERVAL = (
    0.02  # after a death, for what the dead rank did before it may arrive only now
)

_FIRST_WAIT = timedelta(seconds=OVERDUE_AFTER)
_NO_TIMEOUT = timedelta(0)
_init_base = dist.Work.__init__


class Work(dist.Work, PendingCall):
    """One call of a group, under way or done."""

    __slots__ = ("_detector", "_once", "_outputs", "call", "raw", "timeout")

    raw: RawWork
    """The engine's handle; set when the engine has taken the call."""

    # What most works leave as it is belongs to the class: setting it would cost every call.
    _finish: Callable[[], None] | None = None
    _settled = False
    _error: GroupError | None = None
    _failure: Failure | None = None
    _future: Future[Any] | None = None
    _future_ended = False
    _is_gathered = False

    def __init__(
        self,
        health: FailureDetector,
        call: Call,
        timeout: float,
        raw: RawWork | None,
        outputs: list[Tensor],
    ) -> None:
        _init_base(self)
        self.call = call
        self.timeout = timeout
        self._detector = health
        if raw is not None:
            self.raw = raw
        self._outputs = outputs
        # For the things that must happen once although several threads may wait. Nothing else is
        # locked, and nothing of the user's is called, while it is held.
        self._once = threading.Lock()

    def wrap(self, wrap: Callable[[RawWork, float], RawWork] | None) -> None:
        """Have the waiting done by another handle, where that of a transfer is special."""
        if wrap is not None:
            self.raw = wrap(self.raw, self.timeout)

    def set_finish(self, finish: Callable[[], None]) -> None:
        """Have the result finished by a function, once, before anybody sees it."""
        self._finish = finish

    def mark_gathered(self) -> None:
        """Say that there is a tensor of every rank."""
        self._is_gathered = True

    def mark_settled(self) -> None:
        """Say that the call was seen to its end before there was this work."""
        self._settled = True

    # -- torch's interface -----------------------------------------------------------------

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        """Block until the call is done or its deadline has passed.

        A `timeout` that ends before the call's own deadline raises too, but leaves the call going.
        """
        if self._settled:
            return True
        self.await_engine(timeout)
        self._settle()
        return True

    def await_engine(self, timeout: timedelta = _NO_TIMEOUT) -> None:
        """Block until the engine is done, well; raise the reason if that cannot be."""
        if self._error is not None and not self._was_resumed():
            raise self._error
        health, call = self._detector, self.call
        if health.streams:
            self._wait_on_stream(timeout)
            return
        health.waiting = call
        limit = call.started + self.timeout  # which is the deadline
        if timeout is not _NO_TIMEOUT:
            limit = self._limit(timeout)
        left = limit - time.monotonic()
        turn = _FIRST_WAIT if left > OVERDUE_AFTER else timedelta(seconds=max(left, 0.001))
        try:
            try:
                self.raw.wait(turn)
                return
            except RuntimeError:  # not yet, or failed: `_is_done` asks again and knows
                pass
            self._wait_long(limit, timeout)  # out of the handler: what is no error is no context
        except ReceiveBufferExhausted as error:
            raise ReceiveBufferExhausted(
                f"{call.what} at {call.site} (rank {health.rank}): {error}"
            ) from None
        finally:
            health.waiting = None

    def await_part(self) -> None:
        """Block until a part of a call is done that is still being started."""
        self._detector.begun(self.call, self)
        try:
            self.await_engine()
        except GroupError:
            self._detector.half_started = self.call.what
            raise
        self._detector.ended(self.call)

    def is_completed(self) -> bool:
        """Tell whether the call has ended, well or badly."""
        if self._settled or self.exception() or self._detector.failure is not None:
            return True
        if not self.raw.is_completed():
            return False
        with suppress(GroupError):  # `wait` and `exception` tell how it ended
            self.wait()
        return True

    def engine_is_done(self) -> bool:
        """Tell whether the engine has let go of the call, whatever the group thinks of it."""
        return self.raw.is_completed()

    def is_success(self) -> bool:
        """Tell whether the call has ended well."""
        return self.is_completed() and self._settled and self._error is None

    def exception(self) -> GroupError | None:
        """Return what the call failed with, if it has."""
        if self._error is not None and self._was_resumed():
            return None
        return self._error

    def result(self) -> list[Tensor]:
        """Return the tensors that the call filled."""
        return self._outputs

    def synchronize(self) -> None:
        """Order what follows on the current stream after the call."""
        if self._detector.streams:
            self.wait()

    def block_current_stream(self) -> None:
        """Make the current stream, or the caller where there is none, wait for the call."""
        self.wait()

    def source_rank(self) -> int:
        """Tell whom a receive from any source received from."""
        return self.raw._source_rank()

    _source_rank = source_rank

    def get_future(self) -> Future[Any]:
        """Return a future of the tensors that the call fills."""
        if self._detector.streams and self._finish is None:
            return self.raw.get_future()
        with self._once:
            if self._future is not None:
                return self._future
            self._future = Future()
        self._detector.watch_future(self)
        self.raw.get_future().add_done_callback(self._complete_future)
        return self._future

    def settle(self) -> None:
        """Wait until the call has ended."""
        self.wait()

    # -- waiting ---------------------------------------------------------------------------

    def _limit(self, timeout: timedelta) -> float:
        """Tell when this wait ends: at the call's deadline, or its own if that is sooner."""
        if timeout <= _NO_TIMEOUT:
            return self.deadline
        return min(self.deadline, time.monotonic() + timeout.total_seconds())

    def _wait_long(self, limit: float, timeout: timedelta) -> None:
        while not self._is_done():
            if self.peer is not None and self.peer in self._detector.absent():
                self._fail_without_peer(self.peer)
                return
            failure = self._detector.look(self)
            if failure is not None:
                self._raise(failure)
            if time.monotonic() >= limit:
                self._raise_timeout(limit, timeout)
            turn = DEAD_PEER_POLL_INTERVAL if self.has_dead_peer else OVERDUE_POLL_INTERVAL
            self._wait_briefly(min(turn, limit - time.monotonic()))

    def _is_done(self) -> bool:
        """Tell whether the engine is done; raise the reason if it is done badly."""
        if not self.raw.is_completed():
            return False
        try:
            self.raw.wait()
        except CallFailed as spoiled:
            raise self._fail_call(spoiled) from None
        except RuntimeError as error:
            self._raise(self._detector.diagnose(self, error), error)
        return True

    def _fail_without_peer(self, peer: int) -> None:
        """Take what a rank sent before it left, or say that nothing will come."""
        if self._is_done():
            return
        if self._detector.is_excluded(peer):
            raise self._fail_call(CallFailed(PeerLost, peer, f"rank {peer} is dead"))
        if hasattr(self.raw, "cancel"):
            self.raw.cancel()  # or it would take what that rank sends when it is back
        raise self._fail_call(CallFailed(PeerLeft, peer, f"rank {peer} has left the group"))

    def _wait_briefly(self, seconds: float) -> None:
        with suppress(RuntimeError):  # not yet, or failed: `_is_done` knows
            self.raw.wait(timedelta(seconds=max(seconds, 0.001)))

    def _wait_on_stream(self, timeout: timedelta) -> None:
        try:
            self.raw.wait(timeout) if timeout > _NO_TIMEOUT else self.raw.wait()
        except RuntimeError as error:
            self._raise(self._detector.diagnose(self, error), error)

    # -- ending ----------------------------------------------------------------------------

    def _settle(self) -> None:
        if self._finish is not None:
            self._finish_once()
        call = self.call
        if call.ended is None:
            call.ended = time.monotonic()
        self._settled = True
        self._detector.ended(call)
        if faultpoints.armed:
            faultpoints.reach(f"{self.call.operation}:after")

    def _finish_once(self) -> None:
        with self._once:
            if self._finish is not None:
                self._finish()
                self._finish = None

    def _raise(self, failure: Failure, cause: Exception | None = None) -> NoReturn:
        if cause is not None:
            cause.__suppress_context__ = True  # a wait that was over too early is no news
        raise self._fail(failure) from cause

    def _fail(self, failure: Failure, reports: Reports | None = None) -> GroupError:
        """Fail the group, and this call with it; returns the error."""
        self._failure = failure = self._detector.fail(failure)
        self._error = error = self._detector.error(failure, self, self.call, reports)
        return error

    def _was_resumed(self) -> bool:
        """Tell whether the group has left behind what this call failed with, and forget it then."""
        if self._failure is None or self._detector.failure is self._failure:
            return False
        self._failure = self._error = None
        self.timeout += time.monotonic() - self.call.started  # the time until now was for nothing
        return True

    def _fail_call(self, spoiled: CallFailed) -> GroupError:
        """End this call, and no other, with an error, which is returned."""
        call, health = self.call, self._detector
        self._error = error = spoiled.kind(
            f"{call.what} #{call.sequence} at {call.site} (group {health.name!r}, "
            f"rank {health.rank}): {spoiled}",
            group=health.name,
            operation=call.what,
            sequence=call.sequence,
            ranks=(spoiled.rank,),
        )
        call.ended = time.monotonic()
        health.ended(call)
        return error

    def _raise_timeout(self, limit: float, timeout: timedelta) -> NoReturn:
        """Give up; for good only if it is the call's own deadline that has passed."""
        if limit < self.deadline:
            failure, reports = self._detector.timed_out(self, after=timeout.total_seconds())
            raise self._detector.error(failure, self, self.call, reports) from None
        failure, reports = self._detector.timed_out(self, after=self.timeout)
        raise self._fail(failure, reports) from None

    # -- futures: somebody waits where we have no hand in ----------------------------------

    def _complete_future(self, raw: Future[Any]) -> None:
        """Pass on the engine's result; runs on the engine's thread."""
        try:
            raw.wait()
        except CallFailed as spoiled:
            self._end_future(self._fail_call(spoiled))
            spoiled.__traceback__ = None
            return
        except Exception as error:  # noqa: BLE001 - whatever it is, the future must end with it
            self._fail_future(self._detector.diagnose(self, error))
            # It leads to this frame, and from here back to the future that holds it, in C++, where
            # no collector sees the circle.
            error.__traceback__ = None
            return
        self._settle()
        if self._claim_future():
            assert self._future is not None
            self._future.set_result(self._future_value())

    def _future_value(self) -> list[Tensor]:
        """Tell what the call has made; gathered tensors in one, which torch's hooks go by."""
        if not self._is_gathered:
            return self._outputs
        return [torch.stack([each.view_as(self._outputs[0]) for each in self._outputs])]

    def check_future(self) -> bool:
        """End the future if the call cannot succeed any more, and tell whether it has ended."""
        if self._future_ended:
            return True
        failure = self._detector.failure
        if failure is None and self.call.age > OVERDUE_AFTER:
            failure = self._detector.look(self)
            if failure is None and self.call.age > self.timeout:
                failure, _ = self._detector.timed_out(self, after=self.timeout)
        if failure is not None:
            self._fail_future(failure)
        return self._future_ended

    def _fail_future(self, failure: Failure) -> None:
        if not self._future_ended:
            self._end_future(self._fail(failure))

    def _end_future(self, error: GroupError) -> None:
        if self._claim_future():
            assert self._future is not None
            fail_future(self._future, error)

    def _claim_future(self) -> bool:
        """Tell whether the caller is the first who ends the future."""
        with self._once:
            first = not self._future_ended
            self._future_ended = True
            return first
