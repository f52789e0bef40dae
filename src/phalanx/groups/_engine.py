"""The interface between a process group and the engine that moves its bytes.

torch's engines (`ProcessGroupGloo`, `ProcessGroupNCCL`, or a whole `ProcessGroup`) already have
this interface, so a backend may return one as it is. An engine written in Python has the same
methods in torch's list-and-options form and may have the optional ones described at `Engine`.
`Traits` states what an engine supports; the group makes up for the rest. `PythonWork` and
`JointWork` are work handles for such engines.

Errors cross this interface as exception types. Only `is_peer_failure` looks at the text of an
error, and only of Gloo's, which has no other way to tell a broken connection from a bad
argument.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import starmap
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllreduceOptions
from torch.futures import Future

from ..errors import GroupError, InternalError
from ._peers import Member

REDUCTIONS = frozenset(
    {
        "allreduce",
        "allreduce_coalesced",
        "reduce",
        "reduce_scatter",
        "reduce_scatter_single",
        "reduce_scatter_single_coalesced",
    }
)


TRANSFERS_IN_FLIGHT = "sends and receives"
"""What an engine says that is under way when a rank cannot leave for it."""


class EngineMismatch(RuntimeError):
    """Raised by an engine's work when it sees that two ranks call different operations."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"ranks {first} and {second} call different operations")
        self.ranks = (first, second)


class ReceiveBufferExhausted(MemoryError):
    """Raised by a wait for a message behind another that there is no memory for.

    The call stays under way: the wait may be repeated.
    """


class WorkNotDone(RuntimeError):
    """Raised by an engine's work that has not ended when the timeout of `wait` has passed."""

    def __init__(self) -> None:
        super().__init__("not yet")


class PeerDead(RuntimeError):
    """Raised by an engine's work that cannot end: the engine sees that a rank is dead."""

    def __init__(self, rank: int) -> None:
        super().__init__(f"rank {rank} is dead")
        self.rank = rank


class EngineStopped(RuntimeError):
    """Raised by an engine's work that was ended by `wake`: the group has failed."""

    def __init__(self) -> None:
        super().__init__("the group has failed or was aborted")


# Gloo raises nothing but `RuntimeError`, so it takes the text to tell a broken connection from bad
# arguments. Its transport begins a message with the file that it comes from; a pair that was closed
# after something timed out says just this. What ProcessGroupGloo refuses begins with its own name.
_GLOO_TRANSPORT = re.compile(
    r"\[[^\]]*/gloo/transport/[^\]]*\] |Application timeout caused pair closure$"
)


def is_peer_failure(error: Exception) -> bool:
    """Tell whether an engine's error is about a peer rather than about the arguments.

    The only place that looks at the text of a foreign engine's error, and only of Gloo's.
    """
    if isinstance(error, PeerDead | EngineStopped | dist.DistBackendError | dist.DistNetworkError):
        return True
    return type(error) is RuntimeError and _GLOO_TRANSPORT.match(str(error)) is not None


class CallFailed(RuntimeError):
    """Raised by an engine's work when this call failed, alike on every rank, and no other did."""

    def __init__(self, kind: type[GroupError], rank: int, told: str) -> None:
        super().__init__(told)
        self.kind = kind
        self.rank = rank


class RawWork(Protocol):
    """An engine's own handle of one call."""

    def wait(self, timeout: timedelta = ...) -> bool:
        """Block until done; raises ``RuntimeError`` when `timeout` passes or the call failed."""

    def is_completed(self) -> bool:
        """Tell whether the call has ended, well or badly."""

    def get_future(self) -> Future[Any]:
        """Return a future of the output tensors."""

    def result(self) -> list[Tensor]:
        """Return the output tensors."""

    def _source_rank(self) -> int: ...


Engine = Any
"""An object with torch's collectives in list-and-options form.

Optional, for engines of our own: ``agree(sequence, said, side)`` compares a call with
the others'
of the same number and returns the side of one that says something else; ``lost_ranks()`` lists
ranks known to be dead; ``wake()`` ends calls under way, for the group has failed; ``drive()`` gets
on with what nobody waits for; ``rest()`` ends a thread of its own, for the group that kept the
memory of calls under way is gone; ``sum(tensor)`` is a quicker way to an allreduce that adds up
real numbers; ``shortcut(**parts)`` makes an even shorter way, for that and for
barriers, and
``adopt(ticket, tensor_memory)`` the work of a call that came by it (`_shortcut`).

An interrupt may come between the engine's start of a call and the moment when its handle is stored.
So an engine has ``begun``, a list that the group sets: it puts the handle of each call there in the
same step in which it takes the call, or before. The group empties it when the handle is safe. For
an engine without it, `track_started_works` does this around every method, which is as good for
one in C++.

An engine whose membership may change has ``members()``, the ranks that take part in what comes
next; ``leave()``, after which this rank does not, or which names what is under way instead;
``rejoin(calls, seconds)``, one step of entering again or some time of waiting for it, which tells
how far this rank has come (``waiting``, ``entering``, ``entered``) and the most `calls` of all;
``awaited()``, the ranks that it waits for there; and perhaps ``exclude(rank)``, to go on without a
rank that is dead. The work of a send or receive may have ``cancel()``, to take it back.
For an engine without ``leave()`` the group makes up (`_narrowing`, `_hall`).
"""

_REAL_DTYPES = frozenset(
    {
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
    }
)


_STARTING_METHODS = frozenset(
    {
        "_allgather_base",
        "_reduce_scatter_base",
        "allgather",
        "allreduce",
        "allreduce_coalesced",
        "alltoall",
        "alltoall_base",
        "barrier",
        "broadcast",
        "gather",
        "recv",
        "recv_anysource",
        "reduce",
        "reduce_scatter",
        "scatter",
        "send",
    }
)
"""The methods that return a handle."""


def track_started_works(engine: Engine, begun: list[Any]) -> Engine:
    """Have an engine put the handles of what it starts into a list."""
    if hasattr(engine, "begun"):
        engine.begun = begun
        return engine
    return _TrackedEngine(engine, begun)


class _TrackedEngine:
    """An engine that does not know of `begun`, and whose handles are noted all the same."""

    def __init__(self, engine: Engine, begun: list[Any]) -> None:
        self._engine = engine
        self.begun = begun

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._engine, name)
        if name in _STARTING_METHODS:
            found = partial(_start_and_track, self.begun, found)
            setattr(self, name, found)  # so that the next call finds it sooner
        return found


def _start_and_track(begun: list[Any], method: Callable[..., RawWork], *args: Any) -> RawWork:
    # Signals raise exceptions between two steps of the interpreter. To call the method and to store
    # what it returns is one step here, for it is all done by `extend`.
    calling = starmap(method, (args,))
    known = len(begun)
    try:
        begun.extend(calling)
    except Exception:
        raise
    except BaseException:
        if len(begun) == known:
            begun += [None]  # the method is itself in Python: it may have started something
        raise
    return cast("RawWork", begun[-1])


def plain_sum_method(engine: Engine) -> Callable[[Tensor], RawWork]:
    """Return an engine's quickest way to add up a tensor over all ranks."""
    if hasattr(engine, "sum"):
        return cast("Callable[[Tensor], RawWork]", engine.sum)
    options = AllreduceOptions()  # made once, for that takes as long as all the rest
    return lambda tensor: cast("RawWork", engine.allreduce([tensor], options))


class ClosedEngine:
    """Stands where the engine of a closed group was; the group refuses before it is used."""

    def __getattr__(self, name: str) -> Callable[..., RawWork]:
        def refused(*_: object) -> RawWork:
            raise InternalError(f"{name} reached the engine of a closed group")

        return refused


@dataclass(frozen=True)
class Traits:
    """What an engine can do by itself; the group makes up for the rest."""

    devices: frozenset[str] = frozenset()
    """Types of devices that it serves beside the one that the group was made for."""
    dtypes: frozenset[torch.dtype] | None = None
    """The element types it knows; None means all."""
    averages: frozenset[str] = frozenset()
    """The operations in which it knows ``ReduceOp.AVG``, of floating-point numbers at least."""
    averages_all_types: bool = False
    """Whether it knows it of integers and complex numbers too."""
    premultiplies: bool = False
    """Whether it knows ``ReduceOp.PREMUL_SUM``."""
    sums_sparse: bool = True
    """Whether it adds up sparse tensors."""
    alltoall_lists: bool = False
    """Whether the tensors of an all-to-all's lists may have different sizes."""
    waits_on_stream: bool = False
    """Whether waiting orders a device's stream instead of blocking the caller."""
    wrap_transfer: Callable[[RawWork, float], RawWork] | None = None
    """Makes a send or receive that may be waited for in short turns, given its timeout."""
    compares_calls: bool = False
    """Whether it sees by itself, and at once, that ranks call different operations."""
    needs_store: bool = True
    """Whether its ranks have to meet in a store before there is a group."""
    ranks_are_threads: bool = False
    """Whether its ranks are threads of one process."""
    connects_in_background: bool = False
    """Whether it may be made on another thread, so that a peer's death meanwhile is noticed."""
    offer: Callable[[int, Sequence[Member], int, dict[str, object]], Any] | None = None
    """Makes what rank 0 offers to ranks on the same machine (see `_engine_setup`), given a rank,
    the
    group's members, how many ranks there are on the machine, and the backend's options."""
    name_of: Callable[[Engine], str] | None = None
    """Tells the name of the engine that was chosen, where the backend is a choice."""
    check_options: Callable[[dict[str, object]], None] | None = None
    """Refuses bad options before ranks meet, so that nobody waits for one that cannot come."""
    own_options: frozenset[str] = frozenset()
    """Options that every rank chooses for itself; the others need not agree."""

    @property
    def real_dtypes(self) -> frozenset[torch.dtype]:
        """List the common types of real numbers that it knows."""
        return _REAL_DTYPES if self.dtypes is None else _REAL_DTYPES & self.dtypes


_NO_TIMEOUT = timedelta(0)


class JointWork:
    """Done when all of its parts are."""

    def __init__(self, parts: Sequence[RawWork]) -> None:
        self._parts = list(parts)

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        """Wait for every part within one timeout."""
        until = time.monotonic() + timeout.total_seconds()
        failure: RuntimeError | None = None
        for part in self._parts:
            try:
                if timeout <= _NO_TIMEOUT:
                    part.wait()
                else:
                    part.wait(timedelta(seconds=max(until - time.monotonic(), 0.001)))
            except RuntimeError as error:  # wait for the others all the same: all or nothing
                failure = error
        if failure is not None:
            raise failure
        return True

    def is_completed(self) -> bool:
        """Tell whether every part has ended."""
        return all(part.is_completed() for part in self._parts)

    def get_future(self) -> Future[Any]:
        """Return a future of every part's future."""
        return torch.futures.collect_all([part.get_future() for part in self._parts])

    def result(self) -> list[Tensor]:
        """Return what every part filled."""
        return [tensor for part in self._parts for tensor in part.result()]

    def _source_rank(self) -> int:
        return -1


class PythonWork:
    """A call that some thread ends with `finish`."""

    def __init__(self, outputs: list[Tensor]) -> None:
        self._outputs = outputs
        self._ended = threading.Event()
        self._error: Exception | None = None
        self._source = -1
        self._future: Future[Any] | None = None
        self.cancel: Callable[[], None] = _cancel_nothing
        """Takes a transfer back that nobody has met."""
        # For what must happen once: the end, and the making and filling of the future.
        self._lock = threading.Lock()

    def finish(self, error: Exception | None = None, *, source: int = -1) -> None:
        """End the call, well or badly; only the first end counts."""
        with self._lock:
            if self._ended.is_set():
                return
            self._error = error
            self._source = source
            self._ended.set()
            future = self._future
        if future is not None:  # outside of the lock, for this runs whatever hangs on it
            self._fill(future)

    @property
    def has_future(self) -> bool:
        """Whether somebody has asked for the future."""
        return self._future is not None

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        """Block until the call has ended; raises ``RuntimeError`` if it has not, or badly."""
        if not self._ended.wait(timeout.total_seconds() or None):
            raise WorkNotDone
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        """Tell whether the call has ended, well or badly."""
        return self._ended.is_set()

    def get_future(self) -> Future[Any]:
        """Return a future of the output tensors."""
        with self._lock:
            if self._future is not None:
                return self._future
            future: Future[Any] = Future()
            self._future = future
            ended = self._ended.is_set()
        if ended:
            self._fill(future)
        return future

    def result(self) -> list[Tensor]:
        """Return the output tensors."""
        return self._outputs

    def _source_rank(self) -> int:
        return self._source

    def _fill(self, future: Future[Any]) -> None:
        if self._error is not None:
            future.set_exception(self._error)
        else:
            future.set_result(self._outputs)


def _cancel_nothing() -> None:
    """Take back what cannot be."""
