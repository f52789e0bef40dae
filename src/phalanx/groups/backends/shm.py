"""Shared memory: ranks on one machine read and write each other's buffers.

The engine is native (`native/`, `docs/design.md`); this module gives it torch's call forms and
work handles. A call announces that this rank is ready; the rank's share of the work is done
when it next enters the engine, or by a driver thread if there is a core for one. `RegionOffer`
is the fast path to an engine for ranks that are known to be on one machine.

A work handle keeps the memory of its call alive until the engine is done with it. A forked child
is not a rank: its engines refuse every call.
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Literal, NoReturn, cast

import torch
from torch import Tensor
from torch._C._distributed_c10d import Store
from torch.futures import Future

from ... import _faultpoints as faultpoints
from ... import native
from ...env import local_ranks, usable_cores
from ...errors import InvalidArgument, InvalidState, PeerLeft, PeerLost, UnknownOption
from .._background_threads import borrow_thread, is_exiting
from .._engine import (
    REDUCTIONS,
    TRANSFERS_IN_FLIGHT,
    CallFailed,
    Engine,
    EngineMismatch,
    EngineStopped,
    JointWork,
    PeerDead,
    RawWork,
    ReceiveBufferExhausted,
    Traits,
    WorkNotDone,
)
from .._peers import Member
from .._reductions import plain_op
from ._shm_region import (
    CoreLimit,
    Slab,
    make_region,
    share_region,
    shared_core_count,
    watch_peers,
)

if TYPE_CHECKING:
    from ...native import _engine

__all__ = [
    "TRAITS",
    "make",
]


Driver = Literal["thread", "caller"]
DRIVER_OPTION = "driver"


def check_driver(options: dict[str, object]) -> None:
    """Raise for unknown options and unknown drivers."""
    unknown = sorted(set(options) - {DRIVER_OPTION})
    if unknown:
        raise UnknownOption(f"shm has only the option {DRIVER_OPTION!r}, got {unknown[0]!r}")
    asked = options.get(DRIVER_OPTION)
    if asked not in (None, "thread", "caller"):
        raise InvalidArgument(f"{DRIVER_OPTION} must be 'thread', 'caller' or None, got {asked!r}")


def choose_driver(size: int, cores: int) -> Driver:
    """Choose for `size` ranks that share `cores`: a thread if there are more cores than ranks."""
    if size == 1 or usable_cores() == 1:  # it never waits, or has no core for a thread
        return "caller"
    return "thread" if cores > max(size, local_ranks() or 0) else "caller"


def start_driver(engine: _engine.Engine, asked: object, size: int) -> Driver:
    """Start an engine's driver thread if it is asked for or chosen; returns the driver."""
    if (asked or choose_driver(size, engine.cores)) == "caller":
        return "caller"
    try:
        engine.start_driver()
    except RuntimeError as error:  # nanobind turns a system error into it
        if asked is None:
            return "caller"
        raise InvalidState(f"cannot start the driver thread of this rank: {error}") from error
    return "thread"


# The numbers of `native/engine.hpp`; those of transfers are in `native/transfers.hpp`.
PENDING, FINISHED, DEAD, MISMATCH, ABORTED, ROOTLESS, TORN = range(7)
CANCELLED, STARVED, STOPPED = 3, 4, 5  # of a transfer
_LONG_WAIT = 3600.0  # seconds; a wait without a timeout repeats this
_MEMORY_POLL_INTERVAL = 0.02  # seconds between two attempts to buffer a message
_FUTURE_WAIT = timedelta(seconds=0.25)  # of a thread that must notice the interpreter's exit


class ShmWork:
    """A call in flight; keeps the memory of the call alive."""

    __slots__ = ("_future", "_memory", "_owner", "ticket")

    def __init__(self, owner: ShmEngine, memory: object) -> None:
        self._owner = owner
        self.ticket = 0
        """The engine's number of the call, from 1; set by the engine."""
        self._memory = memory
        self._future: Future[Any] | None = None

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        seconds = timeout.total_seconds()
        outcome = self._owner._engine.wait(self.ticket, seconds or _LONG_WAIT)
        while outcome[0] == PENDING and not seconds:
            outcome = self._owner._engine.wait(self.ticket, _LONG_WAIT)
        if outcome[0] == FINISHED:
            return True
        if outcome[0] == PENDING:
            raise WorkNotDone
        raise _outcome_error(*outcome)

    def is_completed(self) -> bool:
        return self._owner._engine.test(self.ticket)[0] != PENDING

    def get_future(self) -> Future[Any]:
        """Return a future, which a borrowed thread completes."""
        if self._future is None:
            self._future = Future()
            borrow_thread(partial(_complete_future, self, self._future))
        return self._future

    def result(self) -> list[Tensor]:
        return []  # the group has the outputs

    def _source_rank(self) -> int:
        return -1


class ShmPart(ShmWork):
    """A part of a call; complete without a result if its root has left."""

    __slots__ = ()

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        try:
            return super().wait(timeout)
        except CallFailed as error:
            if error.kind is not PeerLeft:
                raise
            return True


class ShmTransfer(ShmWork):
    """A send or receive in flight."""

    __slots__ = ()

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        state, peer, length = self._await_end(timeout.total_seconds())
        if state == STARVED:  # it stays in flight
            raise ReceiveBufferExhausted(
                f"out of memory while buffering a message of {length} bytes from rank {peer} that "
                "was sent before the one being received. Receive that message first, or free memory"
            )
        self._memory = None
        self._owner._transfers.pop(self.ticket, None)
        if state == FINISHED:
            return True
        if state == CANCELLED:
            raise CallFailed(PeerLeft, peer, f"rank {peer} has left the group")
        raise RuntimeError(f"rank {peer} sent {length} bytes; the receive buffer has another size")

    def _await_end(self, seconds: float) -> tuple[int, int, int]:
        """Wait until it has ended, without a limit if `seconds` is 0; returns its status."""
        while True:
            status = self._owner._engine.wait_transfer(self.ticket, seconds or _LONG_WAIT)
            if status[0] == STOPPED:
                raise EngineStopped
            if status[0] != PENDING:
                return status
            # The engine stops waiting when the peer has died.
            if status[1] in self._owner.lost_ranks():
                raise PeerDead(status[1])
            if seconds:
                raise WorkNotDone

    def cancel(self) -> None:
        """Withdraw it, unless a part of it has been transferred."""
        if self._owner._engine.cancel_transfer(self.ticket):
            self._memory = None
            self._owner._transfers.pop(self.ticket, None)

    def __del__(self) -> None:
        if self.ticket == 0:  # it was never started
            return
        with suppress(InvalidState):  # in a forked child
            self._owner._engine.detach_transfer(self.ticket)
        if self._memory is not None:  # its end was not observed
            self._owner._transfers[self.ticket] = self._memory
            self._owner._dropped.add(self.ticket)

    def is_completed(self) -> bool:
        return self._owner._engine.test_transfer(self.ticket)[0] != PENDING

    def _source_rank(self) -> int:
        return self._owner._engine.test_transfer(self.ticket)[1]


def _complete_future(work: ShmWork, future: Future[Any]) -> None:
    while not is_exiting():
        try:
            work.wait(_FUTURE_WAIT)
        except WorkNotDone:
            continue
        except ReceiveBufferExhausted:  # until the message is received or memory is freed
            time.sleep(_MEMORY_POLL_INTERVAL)
            continue
        except Exception as error:  # noqa: BLE001 - the future must complete
            future.set_exception(error)
        else:
            future.set_result([])
        return


def _outcome_error(outcome: int, first: int, second: int) -> RuntimeError:
    if outcome == MISMATCH:
        return EngineMismatch(first, second)
    if outcome == ROOTLESS:
        return CallFailed(PeerLeft, first, f"its root, rank {first}, has left the group")
    if outcome == TORN:
        message = f"rank {first} died during the call; the contents of its tensors are undefined"
        return CallFailed(PeerLost, first, message)
    return PeerDead(first) if outcome == DEAD else EngineStopped()


Tensors = list[Tensor]

# The numbers of `native/layout.hpp`, `native/types.hpp` and `native/engine.hpp`.
BARRIER, ALLREDUCE, REDUCE, BROADCAST, ALLGATHER = 1, 2, 3, 4, 5
GATHER, SCATTER, REDUCE_SCATTER, ALLTOALL = 6, 7, 8, 9
ADD = 0
REJOIN_STAGES = ("outside", "waiting", "entering", "entered")
DTYPES = {
    torch.float32: 0,
    torch.float64: 1,
    torch.float16: 2,
    torch.bfloat16: 3,
    torch.int8: 4,
    torch.int16: 5,
    torch.int32: 6,
    torch.int64: 7,
    torch.uint8: 8,
    torch.uint16: 9,
    torch.uint32: 10,
    torch.uint64: 11,
    torch.bool: 12,
    torch.complex64: 13,
    torch.complex128: 14,
}
BYTES = DTYPES[torch.uint8]
DROPPED_TRANSFER_WAIT = 0.02  # seconds per poll for a transfer that nobody waits for


class ShmEngine:
    """One rank of a group in shared memory."""

    def __init__(self, engine: _engine.Engine, rank: int, size: int, driver: object = None) -> None:
        self._engine = engine
        """In a forked child, a `_ForkedEngine`."""
        self._rank = rank
        self._size = size
        self._slab = Slab(engine, rank, size)
        self.begun: list[Any] = []
        self._transfers: dict[int, object] = {}
        """The memory of sends and receives in flight, by ticket."""
        self._dropped: set[int] = set()
        """Transfers whose handle is gone, so that nobody can wait for them."""
        _detach_after_fork(self)
        self.driver = start_driver(engine, driver, size)

    # -- the rank and its peers ------------------------------------------------------------

    def lost_ranks(self) -> list[int]:
        return self._engine.dead()

    def wake(self) -> None:
        """End the waits of this rank, since the group has failed."""
        self._engine.abort()

    def members(self) -> list[int]:
        return self._engine.members()

    def leave(self) -> str:
        """Leave, unless something is in flight; returns what."""
        self.drive()
        peers = {self._engine.test_transfer(ticket)[1] for ticket in self._transfers}
        if peers & set(self.members()):
            return TRANSFERS_IN_FLIGHT
        return "" if self._engine.leave() else "calls"

    def rejoin(self, calls: int, seconds: float) -> tuple[str, int]:
        """Take the next step to become a member again, or wait for it; returns the stage."""
        stage, most = self._engine.rejoin(calls, seconds)
        return REJOIN_STAGES[stage], most

    def awaited(self) -> list[int]:
        """Return the ranks that `rejoin` waits for."""
        return self._engine.awaited()

    def exclude(self, rank: int) -> None:
        """Continue without a dead rank."""
        self._engine.exclude(rank)

    def rest(self) -> None:
        """Stop the driver thread, if there is one."""
        with suppress(InvalidState):  # in a forked child
            self._engine.stop_driver()

    def drive(self) -> None:
        """Advance transfers that nobody waits for, and drop those that have ended."""
        for ticket in list(self._transfers):
            if self._engine.test_transfer(ticket)[0] != PENDING:
                self._transfers.pop(ticket, None)
                self._dropped.discard(ticket)
        # A large transfer takes many rounds, and nobody else advances it.
        for ticket in sorted(self._dropped)[:1]:
            self._engine.wait_transfer(ticket, DROPPED_TRANSFER_WAIT)

    def allocate(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Create a tensor in memory that peers can access directly."""
        self._engine.region  # noqa: B018 - raises in a forked child
        return self._slab.allocate(shape, dtype)

    def shortcut(self, **parts: Any) -> _engine.FastPath:
        """Create the native fast path for plain sums and barriers."""
        assert native.engine is not None
        shortcut: _engine.FastPath = native.engine.FastPath(
            engine=self._engine, owner=self, **parts
        )
        return shortcut

    def adopt(self, ticket: int, memory: Tensors) -> RawWork:
        """Create the work of a call that the fast path started."""
        work = ShmWork(self, memory)
        work.ticket = ticket
        return work

    # -- in place --------------------------------------------------------------------------

    def sum(self, tensor: Tensor) -> RawWork:
        """Allreduce with SUM, with fewer arguments."""
        work = ShmWork(self, tensor)
        self._engine.issue_in_place(
            ALLREDUCE,
            DTYPES[tensor.dtype],
            ADD,
            1.0,
            0,
            tensor.data_ptr(),
            tensor.nbytes,
            tensor.shape,
            self.begun,
            work,
        )
        return work

    def allreduce(self, tensors: Tensors, opts: Any) -> RawWork:
        return self._in_place(ALLREDUCE, tensors[0], opts.reduceOp, 0)

    def allreduce_coalesced(self, tensors: Tensors, opts: Any) -> RawWork:
        return JointWork(
            [  # the shape includes the length of the list, so that ranks' lists are compared
                self._in_place(ALLREDUCE, t, opts.reduceOp, 0, shape=(len(tensors), *t.shape))
                for t in tensors
            ]
        )

    def reduce(self, tensors: Tensors, opts: Any) -> RawWork:
        return self._in_place(REDUCE, tensors[0], opts.reduceOp, opts.rootRank)

    def broadcast(self, tensors: Tensors, opts: Any) -> RawWork:
        tensor = tensors[0]
        work = ShmWork(self, tensors)
        self._engine.issue_in_place(
            BROADCAST,
            DTYPES[tensor.dtype],
            0,
            1.0,
            opts.rootRank,
            tensor.data_ptr(),
            tensor.nbytes,
            tensor.shape,
            self.begun,
            work,
        )
        return work

    def barrier(self, opts: Any) -> RawWork:
        del opts
        work = ShmWork(self, ())
        self._engine.issue_in_place(BARRIER, BYTES, 0, 1.0, 0, 0, 0, (), self.begun, work)
        return work

    # -- from many to many -----------------------------------------------------------------

    def allgather(self, outputs: list[Tensors], inputs: Tensors, opts: Any) -> RawWork:
        del opts
        part = inputs[0]
        return self._issue(ALLGATHER, part, outputs[0], part.nbytes, shape=part.shape)

    def _allgather_base(self, output: Tensor, part: Tensor, opts: Any) -> RawWork:
        del opts
        rows = list(output.view(self._size, -1))
        return self._issue(ALLGATHER, part, rows, part.nbytes, shape=part.shape)

    def gather(self, outputs: list[Tensors], inputs: Tensors, opts: Any) -> RawWork:
        targets = outputs[0] if outputs else []
        part, root = inputs[0], opts.rootRank
        return self._issue(GATHER, part, targets, part.nbytes, root=root, shape=part.shape)

    def scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any) -> RawWork:
        whole = _concatenated(inputs[0]) if inputs else None
        return self._issue(
            SCATTER,
            whole,
            outputs,
            outputs[0].nbytes,
            root=opts.rootRank,
            extent=outputs[0].nbytes,
            shape=outputs[0].shape,
        )

    def reduce_scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any) -> RawWork:
        parts = inputs[0]
        if len({part.numel() for part in parts}) == 1:
            return self._reduce_scatter_base(outputs[0], _concatenated(parts), opts)
        works = []
        for root, part in enumerate(parts):  # of different sizes: one reduction each
            mine = outputs[0] if root == self._rank else torch.empty_like(part)
            mine.detach().copy_(part.detach().view_as(mine))
            flat = mine.detach().view(-1)  # a list's tensor may have another shape than the output
            works.append(self._in_place(REDUCE, flat, opts.reduceOp, root, kind_of_work=ShmPart))
        return JointWork(works)

    def _reduce_scatter_base(self, output: Tensor, whole: Tensor, opts: Any) -> RawWork:
        op = int(plain_op(opts.reduceOp).value)
        return self._issue(
            REDUCE_SCATTER, whole, [output], output.nbytes, op=op, shape=output.shape
        )

    def alltoall_base(
        self, output: Tensor, source: Tensor, into: list[int], out_of: list[int], opts: Any
    ) -> RawWork:
        del opts
        sent = _offsets(out_of, source)
        received = _offsets(into, output)
        return self._issue(
            ALLTOALL, source, [output], output.nbytes, extent=0, splits=(sent, received)
        )

    # -- one to one ------------------------------------------------------------------------

    def send(self, tensors: Tensors, peer: int, tag: int) -> RawWork:
        tensor = tensors[0]
        work = ShmTransfer(self, tensors)
        self._engine.send(peer, tag, tensor.data_ptr(), tensor.nbytes, self.begun, work)
        self._transfers[work.ticket] = tensors
        return work

    def recv(self, tensors: Tensors, peer: int, tag: int) -> RawWork:
        tensor = tensors[0]
        work = ShmTransfer(self, tensors)
        self._engine.receive(peer, tag, tensor.data_ptr(), tensor.nbytes, self.begun, work)
        self._transfers[work.ticket] = tensors
        return work

    def recv_anysource(self, tensors: Tensors, tag: int) -> RawWork:
        return self.recv(tensors, -1, tag)

    # -- issuing ---------------------------------------------------------------------------

    def _in_place(
        self,
        kind: int,
        tensor: Tensor,
        op: Any,
        root: int,
        *,
        kind_of_work: type[ShmWork] = ShmWork,
        shape: tuple[int, ...] | None = None,
    ) -> RawWork:
        work = kind_of_work(self, (tensor,))
        self._engine.issue_in_place(
            kind,
            DTYPES[tensor.dtype],
            int(plain_op(op).value),
            1.0,
            root,
            tensor.data_ptr(),
            tensor.nbytes,
            tensor.shape if shape is None else shape,
            self.begun,
            work,
        )
        return work

    def _issue(
        self,
        kind: int,
        source: Tensor | None,
        outputs: Sequence[Tensor],
        output_bytes: int,
        *,
        op: int = 0,
        root: int = 0,
        extent: int | None = None,
        shape: tuple[int, ...] = (),
        splits: tuple[list[int], list[int]] = ([], []),
    ) -> RawWork:
        length = 0 if source is None else source.nbytes
        work = ShmWork(self, (source, outputs))
        self._engine.issue(
            kind,
            DTYPES[outputs[0].dtype if source is None else source.dtype],
            op,
            1.0,
            root,
            0 if source is None else source.data_ptr(),
            length,
            length if extent is None else extent,
            shape,
            [output.data_ptr() for output in outputs],
            output_bytes,
            *splits,
            self.begun,
            work,
        )
        return work


class _ForkedEngine:
    """Replaces the engine in a forked child; every use raises.

    Keeps the engine, since the child may still read tensors in the region.
    """

    def __init__(self, engine: _engine.Engine) -> None:
        self._kept = engine

    def __getattr__(self, name: str) -> NoReturn:
        raise InvalidState(
            "this process was forked from a rank and is not a rank itself. Use the group in the "
            "parent only, or start processes with the 'spawn' method"
        )


_engines: weakref.WeakSet[ShmEngine] = weakref.WeakSet()
_has_fork_hook = False


def _detach_after_fork(engine: ShmEngine) -> None:
    """Make the engine unusable in forked children, at no cost per call."""
    global _has_fork_hook  # noqa: PLW0603 - on first use, since importing must not register hooks
    _engines.add(engine)
    if not _has_fork_hook:
        _has_fork_hook = True
        os.register_at_fork(after_in_child=_detach_engines)


def _detach_engines() -> None:
    for engine in _engines:
        engine._engine = cast("Any", _ForkedEngine(engine._engine))
    _engines.clear()


def _concatenated(tensors: Tensors) -> Tensor:
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def _offsets(rows: list[int], tensor: Tensor) -> list[int]:
    """Return the byte at which each rank's rows begin, and the end of the last."""
    row = tensor.nbytes // len(tensor) if len(tensor) else 0
    return [0, *(count * row for count in accumulate(rows))]


def check_options(options: dict[str, object]) -> None:
    """Raise for unknown options, and if the engine is not built."""
    check_driver(options)
    if native.engine is None:
        raise InvalidState(f"backend 'shm' is not available: {native.why_missing}")


def make(
    store: Store,
    rank: int,
    world_size: int,
    timeout: timedelta,
    device: torch.device,
    **kwargs: object,
) -> Engine:
    """Create the engine of one rank, on a region that all ranks have mapped."""
    del device
    engine = share_region(store, rank, world_size, timeout=timeout)
    return ShmEngine(engine, rank, world_size, kwargs.get(DRIVER_OPTION))


TRAITS = Traits(
    dtypes=frozenset(DTYPES),
    averages=REDUCTIONS,
    averages_all_types=True,
    sums_sparse=False,
    compares_calls=True,
    connects_in_background=True,
    check_options=check_options,
    own_options=frozenset({DRIVER_OPTION}),
)


class RegionOffer:
    """One rank's part in a region that rank 0 offers with the rendezvous result."""

    def __init__(
        self,
        rank: int,
        members: Sequence[Member],
        ranks_on_machine: int,
        options: dict[str, object],
    ) -> None:
        self._rank = rank
        self._members = members
        self._size = len(members)
        self._ranks_on_machine = ranks_on_machine
        self._driver = options.get(DRIVER_OPTION)
        self._native: _engine.Engine | None = None
        self._engine: ShmEngine | None = None

    def make(self) -> dict[str, Any] | None:
        """Create the region, in memory without a name."""
        made = native.engine
        if made is None or self._size > made.MAX_RANKS:
            return None
        region = make_region("memfd", self._size)
        offer = {"path": region.path, "token": str(region.token)}
        self._enter(region)
        return offer

    def take(self, offer: dict[str, Any]) -> None:
        """Map the region."""
        made = native.engine
        if made is None:
            raise InvalidState(native.why_missing)
        self._enter(made.Region.open(offer["path"], int(offer["token"]), self._size, made.Sizes()))

    def absent(self) -> list[int]:
        """Return the ranks that have not mapped it yet."""
        assert self._native is not None, "it was made or taken"
        region = self._native.region
        return [rank for rank in range(self._size) if not region.present(rank)]

    def engine(self) -> Engine:
        """Return the engine; all ranks have theirs."""
        assert self._native is not None, "it was made or taken"
        assert self._engine is not None, "it was made or taken"
        self._native.region.unlink()
        return self._engine

    def _enter(self, region: _engine.Region) -> None:
        """Create the engine, then mark this rank present.

        The mark comes last: ranks that see it go ahead, so nothing may fail after it.
        """
        if faultpoints.armed:
            faultpoints.reach("form:mapped")
        assert native.engine is not None, "it has created the region"
        engine = native.engine.Engine(region, self._rank, usable_cores())
        watch_peers(engine, self._rank, self._members)
        cores = _core_count_of([member.pid for member in self._members])
        # The other ranks of the parent group use the same cores.
        engine.set_cores(max(1, cores * self._size // self._ranks_on_machine))
        driver = self._driver
        if driver is None and choose_driver(self._ranks_on_machine, cores) == "caller":
            driver = "caller"
        self._native, self._engine = engine, ShmEngine(engine, self._rank, self._size, driver)
        engine.mark_present()


def _core_count_of(pids: Sequence[int]) -> int:
    quota = usable_cores(os.cpu_count())
    limits: list[CoreLimit] = [([], quota)]
    for pid in set(pids):
        with suppress(ProcessLookupError):  # a death is reported elsewhere
            limits.append((list(os.sched_getaffinity(pid)), quota))
    return shared_core_count(limits)
