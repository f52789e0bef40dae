"""The interface between a process group and the engine that moves its bytes.

torch's engines (`ProcessGroupGloo`, `ProcessGroupNCCL`, or a whole `ProcessGroup`) already have
this interface, so a backend may return one as it is. An engine written in Python has the same
methods in torch's list-and-options form and may have the optional ones described at `Engine`.
`Traits` states what an engine supports; the group adapts calls to it. `PythonWork` and `JointWork`
are work handles for such engines.

Errors cross this interface as exception types, except Gloo's (`is_peer_failure`).
"""

from __future__ import annotations

import concurrent.futures
import re
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import starmap
from typing import Any, NamedTuple, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from ..errors import GroupError, InternalError, PeerLeft
from ._peers import PeerProcess

_REDUCTIONS = frozenset({"allreduce", "reduce", "reduce_scatter", "reduce_scatter_single"})
REDUCTIONS = _REDUCTIONS | {"allreduce_coalesced", "reduce_scatter_single_coalesced"}

TRANSFERS_IN_FLIGHT = "sends and receives"  # what `leave()` returns while some are in flight


class EngineMismatch(RuntimeError):
    """Raised by an engine's work when two ranks call different operations."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"ranks {first} and {second} call different operations")
        self.ranks = (first, second)


class RankCall(NamedTuple):
    """The call of one rank, for messages about mismatches."""

    rank: int
    what: str
    site: str

    def __str__(self) -> str:
        return f"rank {self.rank} called {self.what} at {self.site}"


class ReceiveBufferExhausted(MemoryError):
    """Raised by a wait for a message behind one that does not fit in memory; may be repeated."""


class WorkNotDone(RuntimeError):
    """Raised by an engine's work when the timeout of `wait` passes first."""


class PeerDead(RuntimeError):
    """Raised by an engine's work that cannot end because a rank is dead."""

    def __init__(self, rank: int) -> None:
        super().__init__(f"rank {rank} is dead")
        self.rank = rank


class EngineStopped(RuntimeError):
    """Raised by an engine's work that `abort_calls` ended: the group has failed."""

    def __init__(self) -> None:
        super().__init__("the group has failed or was aborted")


# Gloo raises only `RuntimeError`, so only the text distinguishes a broken connection from bad
# arguments. Its transport starts a message with the source file; a pair that was closed after a
# timeout has this fixed text. Messages of ProcessGroupGloo itself start with its name.
_GLOO_TRANSPORT = re.compile(
    r"\[[^\]]*/gloo/transport/[^\]]*\] |Application timeout caused pair closure$"
)


def is_peer_failure(error: Exception) -> bool:
    """Whether an engine's error is about a peer rather than about the arguments."""
    if isinstance(error, PeerDead | EngineStopped | dist.DistBackendError | dist.DistNetworkError):
        return True
    return type(error) is RuntimeError and _GLOO_TRANSPORT.match(str(error)) is not None


class CallFailed(RuntimeError):
    """Raised by an engine's work when only this call failed, in the same way on every rank.

    `cause` is a sentence; for `PeerLost` only its predicate, since the group names the process.
    """

    def __init__(self, kind: type[GroupError], rank: int, cause: str) -> None:
        super().__init__(cause)
        self.kind = kind
        self.rank = rank


def peer_left(rank: int, *, is_root: bool = False) -> CallFailed:
    """Return the error of a call that needs a rank which has left the group."""
    who = f"its root, rank {rank}," if is_root else f"rank {rank}"
    return CallFailed(PeerLeft, rank, f"{who} has left the group")


class RawWork(Protocol):
    """An engine's handle of one call; a `torch.distributed.Work` is one.

    `wait` raises ``RuntimeError`` when `timeout` passes or the call failed; `is_completed` is true
    after a failure, too.
    """

    def wait(self, timeout: timedelta = ...) -> bool: ...
    def is_completed(self) -> bool: ...
    def get_future(self) -> Future[Any]: ...
    def _source_rank(self) -> int: ...


Engine = Any
"""An object with torch's collectives in list-and-options form.

Optional methods of our own engines:

- ``compare_call(sequence, key, call)`` compares a call with the other ranks' calls of the same
  number and returns one that differs.
- ``dead_ranks()`` lists ranks known to be dead; ``abort_calls()`` ends this rank's calls in flight
  after a failure.
- ``abort()`` ends an engine's calls when the user aborts the group.
- ``set_timeout(timeout)`` sets the engine's own timeout of later calls.
- ``allocate(shape, dtype)`` makes a tensor in memory that all ranks can access.
- ``progress()`` advances calls that no thread waits for; ``stop_thread()`` ends the engine's thread
  before the group releases the memory of calls in flight.
- ``sum(tensor)`` is a faster allreduce of real numbers; ``make_fast_path(**parts)`` makes the fast
  path for sums and barriers, and ``work_for_ticket(ticket, tensors)`` the work of a call that took
  it.

An interrupt may arrive between the engine's start of a call and the storing of its handle. An
engine therefore has ``started_works``, a list that the group sets and empties: the engine appends
the handle of each call in the same step in which it accepts the call, or before. `TrackedEngine`
adds it to an engine without it by wrapping every method, which is as good for one in C++.

An engine whose membership may change has ``members()``, the ranks that take part in the next call;
``leave()``, which ends this rank's membership or returns what is still in flight;
``rejoin(calls, seconds)``, which takes one step or waits, and returns the stage (``waiting``,
``entering``, ``entered``) and the most `calls` of all ranks; ``missing_in_rejoin()``, the ranks
that it waits for; and perhaps ``exclude(rank)``, to continue without a dead rank. The work of a
send or receive may have ``cancel()``. For an engine without ``leave()``, `Membership` connects
engines of subsets.
"""

_FLOATS = {torch.float64, torch.float32, torch.float16, torch.bfloat16}
REAL_DTYPES = frozenset({torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8}) | _FLOATS

# The methods that return a handle: torch's collectives, in all their forms.
_STARTING_METHODS = re.compile(
    "_?(all(gather|reduce|toall)|barrier|broadcast|gather|recv|reduce|scatter|send)"
)


class TrackedEngine:
    """Adds `started_works` to an engine that lacks it."""

    def __init__(self, engine: Engine, started_works: list[Any]) -> None:
        self._engine = engine
        self.started_works = started_works

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._engine, name)
        if _STARTING_METHODS.match(name):
            # A method of this object would be a cycle, which delays the end of the engine.
            found = partial(_start_and_track, self.started_works, found)
            setattr(self, name, found)  # the next lookup does not come here
        return found


def _start_and_track(started: list[Any], method: Callable[..., RawWork], *args: Any) -> RawWork:
    # A signal handler may raise between any two bytecodes. `extend` calls the method and stores its
    # result within one.
    calling = starmap(method, (args,))  # outside `try`: an interrupt here has started nothing
    known = len(started)
    try:
        started.extend(calling)
    except Exception:
        raise
    except BaseException:
        if len(started) == known:
            started += [None]  # a method in Python may have started something
        raise
    return cast("RawWork", started[-1])


class ClosedEngine:
    """The engine of a closed group, which refuses calls before they reach it."""

    def __getattr__(self, name: str) -> Callable[..., RawWork]:
        def refused(*_: object) -> RawWork:
            raise InternalError(f"{name} reached the engine of a closed group")

        return refused


@dataclass(frozen=True)
class Traits:
    """What an engine supports; the group adapts calls to it."""

    devices: frozenset[str] = frozenset()
    """Types of devices that it serves besides the group's own."""
    dtypes: frozenset[torch.dtype] | None = None
    """The dtypes that it supports; None means all."""
    averages: frozenset[str] = frozenset()
    """The operations in which it supports ``ReduceOp.AVG``, at least of floating-point numbers."""
    averages_all_types: bool = False
    """Whether it averages integers and complex numbers, too."""
    premultiplies: bool = False
    """Whether it supports ``ReduceOp.PREMUL_SUM``."""
    sums_sparse: bool = True
    """Whether it sums sparse tensors."""
    alltoall_lists: bool = False
    """Whether the tensors of an all-to-all's lists may have different sizes."""
    waits_on_stream: bool = False
    """Whether waiting orders a device's stream instead of blocking the caller."""
    wrap_transfer: Callable[[RawWork, float], RawWork] | None = None
    """Wraps the work of a send or receive, with its timeout, so that short waits do not end it."""
    detects_mismatch: bool = False
    """Whether it detects immediately that ranks call different operations."""
    needs_store: bool = True
    """Whether its ranks need a rendezvous in a store."""
    ranks_are_threads: bool = False
    """Whether its ranks are threads of one process."""
    connects_in_background: bool = False
    """Whether it may be made on another thread, while this one watches for dead peers."""
    offer: Callable[[int, Sequence[PeerProcess], int, dict[str, object]], Any] | None = None
    """Makes what rank 0 offers to ranks on the same machine (see `_rendezvous`), given the rank,
    the group's processes, the number of ranks on the machine, and the backend's options."""
    name_of: Callable[[Engine], str] | None = None
    """Returns the name of the chosen engine, for a backend that chooses one."""
    check_options: Callable[[dict[str, object]], None] | None = None
    """Rejects bad options before the rendezvous, so that no rank waits for one that raised."""
    own_options: frozenset[str] = frozenset()
    """Options that may differ between ranks."""


def copy_options(opts: Any, **changes: Any) -> Any:
    """Copy torch's options of a call, with some fields changed."""
    copy = type(opts)()
    for field in ("timeout", "asyncOp", "rootRank", "rootTensor", "reduceOp"):
        if hasattr(opts, field):
            setattr(copy, field, changes.get(field, getattr(opts, field)))
    return copy


NO_TIMEOUT = timedelta(0)


class JointWork:
    """The work of several engine calls; done when all of them are, and `finish` has run once."""

    def __init__(self, parts: Sequence[RawWork], finish: Callable[[], None] | None = None) -> None:
        self._parts = parts
        self._finish = finish
        self._finish_lock = threading.Lock()

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        until = time.monotonic() + timeout.total_seconds()
        failure: RuntimeError | None = None
        for part in self._parts:
            try:
                if timeout <= NO_TIMEOUT:
                    part.wait()
                else:
                    part.wait(timedelta(seconds=max(until - time.monotonic(), 0.001)))
            except RuntimeError as error:  # still wait for the others
                failure = error
        if failure is not None:
            raise failure
        self._finish_once()
        return True

    def is_completed(self) -> bool:
        return all(part.is_completed() for part in self._parts)

    def get_future(self) -> Future[Any]:
        future = torch.futures.collect_all([part.get_future() for part in self._parts])
        if self._finish is None:
            return future

        def finish(done: Future[Any]) -> Any:
            result = done.wait()
            self._finish_once()
            return result

        return future.then(finish)

    def _source_rank(self) -> int:
        return -1

    def _finish_once(self) -> None:
        with self._finish_lock:
            if self._finish is not None:
                self._finish()
                self._finish = None


def start_each(method: Callable[..., RawWork], calls: Sequence[tuple[Any, ...]]) -> RawWork:
    """Start one engine call for each tuple of arguments, and join the works."""
    works = [method(*args) for args in calls]
    return works[0] if len(works) == 1 else JointWork(works)


def flat_pairs(outs: list[Tensor], ins: list[Tensor], opts: Any) -> list[tuple[Any, ...]]:
    """Return the arguments for `start_each` of one call for each output and input, both flat."""
    flat = [[tensor.detach().view(-1) for tensor in tensors] for tensors in (outs, ins)]
    return [(out, part, opts) for out, part in zip(*flat, strict=True)]


class PythonWork:
    """A call that some thread ends with `finish`."""

    def __init__(self, outputs: list[Tensor]) -> None:
        self._outputs = outputs
        self._end: concurrent.futures.Future[int] = concurrent.futures.Future()
        self.has_future = False
        """Whether `get_future` was called: its callbacks run on the thread that calls `finish`."""
        self.cancel: Callable[[], None] = lambda: None  # of a transfer that has no peer yet

    def finish(self, error: Exception | None = None, *, source: int = -1) -> None:
        """End the call, with or without an error; only the first end counts."""
        with suppress(concurrent.futures.InvalidStateError):
            if error is None:
                self._end.set_result(source)
            else:
                self._end.set_exception(error)

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """Block until the call has ended; raise its error, or `WorkNotDone` after `timeout`."""
        try:
            self._end.result(timeout.total_seconds() or None)
        except concurrent.futures.TimeoutError:
            raise WorkNotDone from None
        return True

    def is_completed(self) -> bool:
        return self._end.done()

    def get_future(self) -> Future[Any]:
        future: Future[Any] = Future()
        outputs = self._outputs  # not `self`, which would be a cycle

        def fill(end: concurrent.futures.Future[int]) -> None:
            error = end.exception()
            if error is None:
                future.set_result(outputs)
            else:
                future.set_exception(error)

        self.has_future = True
        self._end.add_done_callback(fill)
        return future

    def _source_rank(self) -> int:
        has_succeeded = self._end.done() and self._end.exception() is None
        return self._end.result() if has_succeeded else -1
