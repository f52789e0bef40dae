"""The handle of a call: waiting with a deadline, completing its future, and failing.

`Work.wait` blocks in the engine for `Timing.overdue_after` seconds. Only then does it ask the
`FailureDetector`, in short intervals, whether the call can still succeed.

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
from ..errors import GroupError, PeerLost
from ._engine import NO_TIMEOUT, CallFailed, RawWork, ReceiveBufferExhausted, peer_left
from ._failure_detector import FailureDetector, PendingCall, Reports
from ._flight_recorder import Call
from ._profiler import CallRange
from ._status_store import Failure


def fail_future(future: Future[Any], error: Exception) -> None:
    """End a future with an error, which every waiter in Python or C++ gets."""
    future._set_unwrap_func(_FailedResult.throw)
    # Each waiter gets a copy: a raised error refers to its frames, those to the future, and a cycle
    # through C++ is never collected.
    future.set_result(_FailedResult(copy(error)))


class _FailedResult:
    """The result of a failed future."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def throw(self) -> NoReturn:
        raise copy(self._error)

    def __reduce__(self) -> NoReturn:
        self.throw()  # C++ pickles a result to find the tensors in it


_init_base = dist.Work.__init__


class Work(dist.Work, PendingCall):
    """One call of a group, in flight or done."""

    __slots__ = ("_detector", "_once", "_outputs", "call", "raw", "timeout")

    raw: RawWork
    """The engine's handle; set when the engine has accepted the call."""
    finish: Callable[[], None] | None = None
    """Completes the result, once, before anyone sees it."""
    is_gathered = False
    """Whether the outputs are one tensor per rank."""
    profiler_range: CallRange | None = None
    """Set if a profiler runs when the call is made."""

    # Class attributes are defaults that most works keep: setting them would cost every call.
    _settled = False
    _error: GroupError | None = None
    _failure: Failure | None = None
    _future: Future[Any] | None = None
    _future_ended = False

    def __init__(
        self,
        detector: FailureDetector,
        call: Call,
        timeout: float,
        raw: RawWork | None,
        outputs: list[Tensor],
    ) -> None:
        _init_base(self)
        self.call = call
        self.timeout = timeout
        self._detector = detector
        if raw is not None:
            self.raw = raw
        self._outputs = outputs
        self._once = threading.Lock()

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """Block until the call is done or its deadline has passed.

        A `timeout` that ends before the call's deadline raises, too, but leaves the call in flight.
        """
        if self._settled:
            return True
        waiting = None if self.profiler_range is None else self.profiler_range.begin_wait()
        try:
            self.await_engine(timeout)
            self._settle()
        finally:
            if waiting is not None:
                waiting.__exit__(None, None, None)
        return True

    def await_engine(self, timeout: timedelta = NO_TIMEOUT) -> None:
        """Block until the engine is done; raise the reason if the call fails."""
        if self._error is not None and not self._was_resumed():
            raise self._error
        detector = self._detector
        call = self.call
        if detector.waits_on_stream:
            try:
                self.raw.wait(timeout) if timeout > NO_TIMEOUT else self.raw.wait()
            except RuntimeError as error:
                self._raise(detector.diagnose(self, error), error)
            return
        detector.waiting = call
        limit = call.started + self.timeout  # the property `deadline`, inlined
        if timeout is not NO_TIMEOUT and timeout > NO_TIMEOUT:
            limit = min(limit, time.monotonic() + timeout.total_seconds())
        remaining = limit - time.monotonic()
        timing = detector.timing
        first = timing.first_wait if remaining > timing.overdue_after else _wait_time(remaining)
        try:
            try:
                self.raw.wait(first)
                return
            except RuntimeError:  # not done, or failed: `_is_done` decides
                pass
            self._wait_long(limit, timeout)  # outside the handler, so that its error is no context
        except ReceiveBufferExhausted as error:
            raise ReceiveBufferExhausted(
                f"{call.what} at {call.site} (rank {detector.rank}): {error}"
            ) from None
        finally:
            detector.waiting = None

    def is_completed(self) -> bool:
        """Whether the call has ended, with or without an error."""
        if self._settled or self.exception() or self._detector.failure is not None:
            return True
        if not self.raw.is_completed():
            return False
        with suppress(GroupError):  # `wait` and `exception` report it
            self.wait()
        return True

    def engine_is_done(self) -> bool:
        return self.raw.is_completed()

    def is_success(self) -> bool:
        """Whether the call has ended without an error."""
        return self.is_completed() and self._settled and self._error is None

    def exception(self) -> GroupError | None:
        """Return the error of a failed call."""
        if self._error is not None:
            self._was_resumed()
        return self._error

    def result(self) -> list[Tensor]:
        """Return the output tensors."""
        return self._outputs

    def synchronize(self) -> None:
        """Order later work on the current stream after the call."""
        if self._detector.waits_on_stream:
            self.wait()

    def block_current_stream(self) -> None:
        """Make the current stream, or the caller where there is none, wait for the call."""
        self.wait()

    def source_rank(self) -> int:
        """Return the sender of a receive from any source."""
        return self.raw._source_rank()

    _source_rank = source_rank

    def get_future(self) -> Future[Any]:
        """Return a future of the output tensors."""
        if self._detector.waits_on_stream and self.finish is None:
            return self.raw.get_future()
        with self._once:
            if self._future is not None:
                return self._future
            self._future = Future()
        self._detector.works_with_futures.append(self)
        self.raw.get_future().add_done_callback(self._complete_future)
        return self._future

    def _wait_long(self, limit: float, timeout: timedelta) -> None:
        detector = self._detector
        timing = detector.timing
        peer = self.peer
        while not self._is_done():
            if peer is not None and peer in detector.absent():
                if self._is_done():  # it sent its part before it left
                    return
                if peer in detector.excluded:
                    raise self._fail_call(CallFailed(PeerLost, peer, "is dead"))
                if hasattr(self.raw, "cancel"):
                    self.raw.cancel()  # or it would match what the peer sends after it rejoins
                raise self._fail_call(peer_left(peer))
            failure = detector.check(self)
            if failure is not None:
                self._raise(failure)
            if time.monotonic() >= limit:
                if limit < self.deadline:  # the group and the call continue
                    failure, reports = detector.timed_out(self, after=timeout.total_seconds())
                    raise detector.error(failure, self, self.call, reports) from None
                failure, reports = detector.timed_out(self, after=self.timeout)
                raise self._fail(failure, reports) from None
            wait = timing.overdue_poll_interval
            if self.has_dead_peer:
                wait = timing.dead_peer_poll_interval
            with suppress(RuntimeError):  # not done, or failed: `_is_done` decides
                self.raw.wait(_wait_time(min(wait, limit - time.monotonic())))

    def _is_done(self) -> bool:
        """Whether the engine is done; raise the reason if the call failed."""
        if not self.raw.is_completed():
            return False
        try:
            self.raw.wait()
        except CallFailed as failed:
            raise self._fail_call(failed) from None
        except RuntimeError as error:
            self._raise(self._detector.diagnose(self, error), error)
        return True

    def _settle(self) -> None:
        if self.finish is not None:
            with self._once:
                if self.finish is not None:  # no other thread came first
                    self.finish()
                    self.finish = None
        call = self.call
        if call.ended is None:
            call.ended = time.monotonic()
        self._settled = True
        self._detector.ended(call)
        if faultpoints.armed:
            faultpoints.reach(f"{call.operation}:after")

    def _raise(self, failure: Failure, cause: Exception | None = None) -> NoReturn:
        if failure.kind == "timeout":
            cause = None  # the engine's own deadline, which is the same
        if cause is not None:
            cause.__suppress_context__ = True  # the context is a wait that ended early
        raise self._fail(failure) from cause

    def _fail(self, failure: Failure, reports: Reports | None = None) -> GroupError:
        self._failure = failure = self._detector.fail(failure)
        self._error = error = self._detector.error(failure, self, self.call, reports)
        return error

    def _was_resumed(self) -> bool:
        """Whether `exclude` has resolved the failure of this call; reset its error then."""
        if self._failure is None or self._detector.failure is self._failure:
            return False
        self._failure = self._error = None
        self.timeout += time.monotonic() - self.call.started  # the deadline counts from now
        return True

    def _fail_call(self, failed: CallFailed) -> GroupError:
        """Fail this call but not the group; return the error."""
        call = self.call
        detector = self._detector
        cause = str(failed)
        if failed.kind is PeerLost:
            cause = f"{detector.describe_process(failed.rank)} {cause}"
        self._error = error = failed.kind(
            f"{call.what} #{call.sequence} at {call.site} (group {detector.name!r}, "
            f"rank {detector.rank}): {cause}",
            group=detector.name,
            operation=call.what,
            sequence=call.sequence,
            ranks=(failed.rank,),
        )
        call.ended = time.monotonic()
        detector.ended(call)
        return error

    def _complete_future(self, raw: Future[Any]) -> None:
        """End the future with the engine's result; runs on the engine's thread."""
        try:
            raw.wait()
        except Exception as error:  # noqa: BLE001 - the future must end with it
            if isinstance(error, CallFailed):
                self._end_future(self._fail_call(error))
            elif not self._future_ended:
                self._end_future(self._fail(self._detector.diagnose(self, error)))
            # The traceback refers to this frame, and that to the future that holds the error: a
            # cycle through C++ is never collected.
            error.__traceback__ = None
        else:
            self._settle()
            self._end_future()

    def check_future(self) -> bool:
        """End the future if the call cannot succeed any more; return whether it has ended."""
        if self._future_ended:
            return True
        failure = self._detector.failure
        if failure is None and self.call.age > self._detector.timing.overdue_after:
            failure = self._detector.check(self)
            if failure is None and self.call.age > self.timeout:
                failure, _ = self._detector.timed_out(self, after=self.timeout)
        if failure is not None and not self._future_ended:
            self._end_future(self._fail(failure))
        return self._future_ended

    def _end_future(self, error: GroupError | None = None) -> None:
        """End the future with an error or the outputs, unless it has ended."""
        with self._once:
            if self._future_ended:
                return
            self._future_ended = True
        assert self._future is not None
        if error is not None:
            fail_future(self._future, error)
        elif self.is_gathered:  # stacked, as torch's hooks expect
            first = self._outputs[0]
            self._future.set_result([torch.stack([each.view_as(first) for each in self._outputs])])
        else:
            self._future.set_result(self._outputs)


def _wait_time(seconds: float) -> timedelta:
    return timedelta(seconds=max(seconds, 0.001))  # 0 would mean no limit
