"""The issuing of calls: numbering, checking, recording and starting them on the engine.

A group's collectives end up in `Issuer.issue`, which takes the issue lock, gives the call its
sequence number, passes it to the engine and returns a `Work`. The order in which calls are
numbered must be the order in which the engine receives them, so both happen under that lock.

Where calls are checked for consistency, ranks that make different calls all raise `RankMismatch`
with both calls before the engine starts them. An engine whose ranks see each other's calls compares
them at no cost (``compare_call``). On the others, only with `checks=True`, an allgather of a short
description precedes every call.

An exception raised by a signal handler may arrive between any two bytecodes; the comments in
`issue` mark where none can. `_reconcile` repairs the numbering after an interrupted start.

Lock order: `issue_lock`, `state_lock`, then the engine's locks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from threading import Lock
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions, AllreduceOptions, Backend

from .. import _faultpoints as faultpoints
from .._formatting import first_line
from ..errors import GroupAborted, GroupError, InvalidArgument, PhalanxError
from . import _validation
from ._call_site import user_site
from ._engine import ClosedEngine, Engine, RankCall, RawWork, TrackedEngine, is_peer_failure
from ._failure_detector import FailureDetector, mismatch_failure
from ._fast_path import make_fast_path
from ._flight_recorder import Call, FlightRecorder
from ._profiler import ENABLED, CallRange, flags
from ._reductions import plain_op
from ._status_store import Failure
from ._work import Work

if TYPE_CHECKING:
    from ..native._engine import FastPath

DESCRIPTION_BYTES = 256  # of a call, where ranks exchange them; longer ones are cut
SUM_OPTIONS = AllreduceOptions()  # made once: that takes as long as the rest of a call


@dataclass(slots=True, eq=False, repr=False, kw_only=True)
class Issuer:
    """Starts the calls of one group on its current engine, or refuses them.

    `Membership` pauses and resumes it, and replaces the engine, when ranks leave or rejoin.
    """

    engine: Engine
    detector: FailureDetector
    recorder: FlightRecorder
    backend: str
    wrap_transfer: Callable[[RawWork, float], RawWork] | None
    timeout: float
    checks: bool | None  # whether to check calls for consistency; None for where it costs nothing
    closed: str = ""
    """Why calls are refused, with this rank as the subject: ``shut the group down``."""
    has_left: bool = False  # calls are refused only because this rank has left
    issue_lock: Lock = field(default_factory=Lock)
    state_lock: Lock = field(default_factory=Lock)  # over `closed` and `has_left`
    can_leave_alone: bool = field(init=False)
    participants: int = field(init=False)
    """How many ranks take part in a call, for engines that cannot count them."""
    checks_before_call: bool = field(init=False)
    """Whether a consistency check precedes every call; see `Traits.detects_mismatch`."""
    fast_path: FastPath | None = field(init=False)
    records_ranges: bool = field(init=False)
    """Whether calls are recorded in torch's profiler here; torch's engines do it themselves."""
    _started_works: list[RawWork | None] = field(init=False, default_factory=list)
    """Handles of the parts of a call that the engine has started, until the `Work` has them."""

    def __post_init__(self) -> None:
        self.can_leave_alone = hasattr(self.engine, "leave")
        self.records_ranges = not isinstance(self.engine, Backend)
        self.use_engine(self.engine, None)
        self.fast_path = make_fast_path(self)

    def use_engine(self, engine: Engine, members: Sequence[int] | None) -> None:
        """Issue the next calls on an engine; `members` is None for all ranks."""
        self.engine = engine = self.track(engine)
        size = self.detector.size
        self.participants = size if members is None else len(members)
        checks = hasattr(engine, "compare_call") if self.checks is None else self.checks
        self.checks_before_call = checks and size > 1
        if not self.can_leave_alone:
            self.detector.set_members(members)

    def track(self, engine: Engine) -> Engine:
        """Make an engine report the works that it starts to this issuer."""
        if not hasattr(engine, "started_works"):
            return TrackedEngine(engine, self._started_works)
        engine.started_works = self._started_works
        return engine

    def detach_engine(self) -> None:
        """Drop the engine; the issuer is closed and refuses before reaching it."""
        self.engine = ClosedEngine()

    def set_timeout(self, timeout: timedelta) -> None:
        if self.closed:
            self.refuse("set_timeout")
        self.timeout = _validation.as_seconds(timeout)
        if self.fast_path is not None:
            self.fast_path.timeout = self.timeout
        if hasattr(self.engine, "set_timeout"):
            self.engine.set_timeout(timeout)

    def close(self, reason: str) -> bool:
        """Refuse calls for good; return False if that was so already."""
        with self.state_lock:
            if self.closed and not self.has_left:
                return False
            self.closed = reason
            self.has_left = False
        if self.fast_path is not None:
            self.fast_path.close()  # every call comes to `issue`, which refuses
        self.detector.closed = True
        return True

    def pause(self, operation: str) -> None:
        """Refuse calls until `reopen`, because this rank leaves in `operation`."""
        site = user_site()
        with self.issue_lock, self.state_lock:
            self.check_usable(operation)
            self.closed = f"left the group at {site}"
            self.has_left = True
            if self.fast_path is not None:
                self.fast_path.close()

    def reopen(self) -> None:
        """Accept calls again; the caller holds `state_lock`."""
        self.closed = ""
        self.has_left = False
        self.fast_path = make_fast_path(self)

    def check_usable(self, operation: str) -> None:
        if self.closed or self.detector.failure is not None:
            self.refuse(operation)

    def refuse(self, operation: str) -> NoReturn:
        detector = self.detector
        failure = detector.failure
        if self.closed and (failure is None or failure.kind == "aborted"):
            hint = "Create a new group with new_group()."
            if self.has_left:
                hint = "Call rejoin() on every rank."
            elif failure is not None:
                hint = "Create a new group with split_group() or new_group()."
            raise GroupAborted(
                f"{operation} at {user_site()} (group {detector.name!r}, rank {detector.rank}): "
                f"refused, this rank {self.closed}. {hint}",
                group=detector.name,
                operation=operation,
            )
        assert failure is not None
        error = detector.error(failure, None, None)
        error.add_note(
            f"{operation} at {user_site()} was refused: the group has already failed. "
            "Create a new group of the surviving ranks with split_group or new_group."
        )
        raise error

    def issue(
        self,
        operation: str,
        tensors: list[Tensor],
        method: Callable[..., RawWork],
        args: tuple[Any, ...] = (),
        opts: Any = None,
        *,
        timeout: timedelta | None = None,
        outputs: list[Tensor] | None = None,
        uneven: bool = False,
        finish: Callable[[], None] | None = None,
        peer: int | None = None,
        one_engine_call: bool = True,
    ) -> Work:
        """Number, check, record and start a call.

        Collectives have the `opts` that the user passed: their operation and root must be equal on
        all ranks, and the shape too, except with `uneven`. Sends and receives have a `timeout`
        instead, and `peer`, the only rank that they depend on. `finish` completes the result before
        anyone sees it. With `one_engine_call`, `method` makes at most one call to the engine; if it
        is interrupted, what the engine has started is the whole call and not a part of it.
        """
        seconds = self.timeout
        transfer = opts is None
        timeout = timeout if transfer else opts.timeout
        if timeout is not None and timeout.days >= 0:  # torch passes -1 ms for "not given"
            seconds = _validation.as_seconds(timeout)
        if faultpoints.armed:
            faultpoints.reach(f"{operation}:before")
        with self.issue_lock:
            engine = self.engine  # read before `closed`: another thread may close the group
            if self.closed or self.detector.failure is not None or self.recorder.starting:
                self.check_usable(operation)
                self._reconcile(None)
            work = None
            is_checked = False
            try:
                call = self.recorder.begin(operation, tensors, transfer=transfer)
                results = tensors if outputs is None else outputs
                work = Work(self.detector, call, seconds, None, results)
                work.peer = peer
                if finish is not None:
                    work.finish = finish
                if flags[ENABLED] and self.records_ranges:
                    work.profiler_range = CallRange(self.backend, operation, tensors, opts)
                    method = partial(work.profiler_range.start, tensors, method)
                if self.checks_before_call and not transfer:
                    self._check_consistency(engine, call, seconds, opts, uneven=uneven)
                is_checked = True
                work.raw = method(*args)
            except BaseException as error:
                self._reconcile(work, error, is_whole=is_checked and one_engine_call)
                raise
            # No function is called in the next lines, so no signal is handled in between.
            if not transfer:
                self.detector.in_flight[call] = work
            self.recorder.starting = None
            del self._started_works[:]
        if not transfer:
            self.detector.prune_in_flight()
        elif self.wrap_transfer is not None:
            work.raw = self.wrap_transfer(work.raw, seconds)
        if faultpoints.armed:
            faultpoints.reach(f"{operation}:issued")
        return work

    def await_part(self, raw: RawWork, timeout: float | None = None) -> None:
        """Wait for one part of the call that is being started."""
        call = self.recorder.starting
        detector = self.detector
        assert call is not None, "a call is recorded before its engine sees it"
        work = Work(detector, call, timeout or self.timeout, raw, [])
        detector.in_flight[call] = work
        detector.prune_in_flight()
        try:
            work.await_engine()
        except GroupError:
            detector.partially_started_call = call.what
            raise
        detector.ended(call)
        del self._started_works[:]  # the part has ended

    def _check_consistency(
        self, engine: Engine, call: Call, timeout: float, opts: Any, *, uneven: bool
    ) -> None:
        """Raise `RankMismatch`, naming both sides, unless all ranks make the same call."""
        detector = self.detector
        what = f"{call.operation} {call.dtype}" if uneven else call.what
        op = plain_op(getattr(opts, "reduceOp", ""))
        key = f"{what} {op} {getattr(opts, 'rootRank', '')}"
        mine = RankCall(detector.rank, call.what, call.site)
        theirs = (
            engine.compare_call(call.sequence, key, mine)
            if hasattr(engine, "compare_call")
            else self._exchange_calls(engine, timeout, "\n".join([key, mine.what, mine.site]))
        )
        if theirs is not None:
            raise detector.error(detector.fail(mismatch_failure(mine, theirs, call)), None, call)

    def _exchange_calls(self, engine: Engine, timeout: float, description: str) -> RankCall | None:
        """Gather the ranks' descriptions; return a call whose first line differs from ours."""
        mine = description.encode()[:DESCRIPTION_BYTES].ljust(DESCRIPTION_BYTES, b"\0")
        sent = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
        gathered = sent.repeat(self.detector.size)  # ranks that have left agree
        options = AllgatherOptions()
        options.timeout = timedelta(seconds=timeout)
        raw = engine._allgather_base(gathered, sent, options)
        self.await_part(raw, timeout)
        for rank, row in enumerate(gathered.view(-1, DESCRIPTION_BYTES)):
            theirs = bytes(row.tolist())
            if theirs.partition(b"\n")[0] != mine.partition(b"\n")[0]:
                text = theirs.rstrip(b"\0").decode(errors="replace")
                _, what, site = [*text.split("\n"), "", ""][:3]
                return RankCall(rank, what, site)
        return None

    def _reconcile(
        self, work: Work | None, error: BaseException | None = None, *, is_whole: bool = False
    ) -> None:
        """Bring the numbering in line with the engine after the start of a call was cut short.

        Either the engine raised or a signal handler did, anywhere. What the engine has received
        counts. Nothing: the number is taken back. The whole call: it is in flight, whether or not
        anyone waits for it. A part of it: the group fails, because this rank's next call would
        match the rest of this one on the other ranks.

        `is_whole` means that a single started work is the call and not a part of it. An interrupt
        in here leaves `starting` set, and the next call does this again with `error` None.
        """
        call = self.recorder.starting
        started = self._started_works
        if call is None:  # it had no number yet
            return
        if isinstance(error, GroupError):  # a part has failed, and was waited for
            self.recorder.undo(call)
            del started[:]
            return
        has_all = work is not None and hasattr(work, "raw")
        raw = started[0] if is_whole and len(started) == 1 else None
        if work is not None and not has_all and raw is not None:
            # Our engines append the handle before they start the call: its ticket is 0 until then.
            # Other handles have no ticket and are appended when the call has started.
            has_all = getattr(raw, "ticket", None) != 0
            work.raw = raw
        if work is not None and has_all:
            if not call.transfer:
                self.detector.in_flight[call] = work
            self.recorder.starting = None
            del started[:]
            return
        if started:
            self._fail_partially_started(call, error)
            return
        self.recorder.undo(call)
        if work is None or isinstance(error, PhalanxError):
            return  # the engine was not called yet, or the error is already ours
        if not isinstance(error, RuntimeError | ValueError | TypeError):
            return  # no engine raises it
        if self.detector.failure is not None or is_peer_failure(error):
            failure = self.detector.fail(self.detector.diagnose(work, error))
            raise self.detector.error(failure, work, call) from error
        raise InvalidArgument(
            f"{call.what} at {call.site}: {self.backend} rejected the call: {first_line(error)}"
        ) from error

    def _fail_partially_started(self, call: Call, error: BaseException | None) -> None:
        detector = self.detector
        by = "" if error is None else f" ({type(error).__name__})"
        cause = f"was interrupted{by} while starting the call"
        # Before the failure is known: if a rank died as well, and that came first, other ranks
        # would continue without it.
        detector.partially_started_call = call.what
        detector.partially_started_works = [*self._started_works]
        failure = detector.fail(
            Failure("aborted", detector.rank, cause, operation=call.what, sequence=call.sequence)
        )
        self.recorder.starting = None
        del self._started_works[:]
        if failure.kind == "aborted":
            # The engine was stopped; what it cannot stop keeps its memory itself.
            detector.partially_started_works = []
        if error is None:
            self.refuse(call.operation)
