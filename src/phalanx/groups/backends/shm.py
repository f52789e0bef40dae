"""Shared memory: ranks on one machine read and write each other's buffers.

The engine is native (`native/`, `docs/design.md`); this module gives it torch's call forms and
work handles. A call announces that this rank is ready; the rank's share of the work is done
when it next enters the engine, or by a driver thread if there is a core for one. `offer_region`
is the short way to an engine for ranks that are known to be on one machine.

A work handle keeps the memory of its call alive until the engine is done with it. A forked child
is not a rank: its engines refuse every call.
"""

from __future__ import annotations

import functools
import os
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Literal, NoReturn, cast

import torch
from torch import Tensor
from torch._C._distributed_c10d import Store
from torch.futures import Future

from ... import native
from ...env import local_ranks, usable_cores
from ...errors import InvalidArgument, InvalidState, PeerLeft, PeerLost, UnknownOption
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
    peer_left,
)
from .._peers import PeerProcess
from .._reductions import plain_op
from .._timing import default_timing
from .._worker_threads import is_exiting, run_on_worker
from ._shm_region import RegionOffer, Slab, share_region

if TYPE_CHECKING:
    from ...native._engine import Engine as NativeEngine
if TYPE_CHECKING or native.engine is not None:
    from ...native._engine import DTYPES as NATIVE_DTYPES
    from ...native._engine import Collective, Outcome, ReduceOp, RejoinStage, TransferState

    # As globals, since hot paths use them. The first two are also those of `TransferState`.
    PENDING = Outcome.PENDING
    FINISHED = Outcome.FINISHED
    SUM = ReduceOp.SUM
    ALLREDUCE = Collective.ALLREDUCE
    DTYPES = {getattr(torch, name): number for name, number in NATIVE_DTYPES.items()}
    REJOIN_STAGES = {n: name.lower() for name, n in vars(RejoinStage).items() if name.isupper()}
else:
    DTYPES = {}  # without the extension there are no engines

# Not in `Timing`: neither delays anything that a test could wait for.
_LONG_WAIT = 3600.0  # seconds; a wait without a timeout repeats this
_POLL_INTERVAL = 0.02  # seconds that one attempt to advance a transfer may take
_NO_BYTES = torch.empty(0, dtype=torch.uint8)

Tensors = list[Tensor]
Driver = Literal["thread", "caller"]
DRIVER_OPTION = "driver"


def choose_driver(size: int, cores: int) -> Driver:
    """Choose for `size` ranks that share `cores`: a thread if there are more cores than ranks."""
    if size == 1 or usable_cores() == 1:  # it never waits, or has no core for a thread
        return "caller"
    return "thread" if cores > max(size, local_ranks() or 0) else "caller"


def start_driver(engine: NativeEngine, asked: object, size: int) -> Driver:
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


class ShmWork:
    """A call in flight; keeps the memory of the call alive."""

    __slots__ = ("_future", "_memory", "_owner", "ticket")

    def __init__(self, owner: ShmEngine, memory: object) -> None:
        self._owner = owner
        self.ticket = 0  # the engine's number of the call, from 1; the engine sets it
        self._memory = memory
        self._future: Future[Any] | None = None

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        seconds = timeout.total_seconds()
        outcome = self._owner._native.wait(self.ticket, seconds or _LONG_WAIT)
        while outcome[0] == PENDING and not seconds:
            outcome = self._owner._native.wait(self.ticket, _LONG_WAIT)
        if outcome[0] == FINISHED:
            return True
        if outcome[0] == PENDING:
            raise WorkNotDone
        raise _outcome_error(*outcome)

    def is_completed(self) -> bool:
        return self._owner._native.test(self.ticket)[0] != PENDING

    def get_future(self) -> Future[Any]:
        """Return a future, which a worker thread completes."""
        if self._future is None:
            self._future = Future()
            run_on_worker(functools.partial(self._complete, self._future))
        return self._future

    def _complete(self, future: Future[Any]) -> None:
        step = timedelta(seconds=default_timing().background_check_interval)
        while not is_exiting():
            try:
                self.wait(step)
            except WorkNotDone:
                continue
            except ReceiveBufferExhausted:  # until the message is received or memory is freed
                time.sleep(_POLL_INTERVAL)
                continue
            except Exception as error:  # noqa: BLE001 - the future must complete
                future.set_exception(error)
            else:
                future.set_result([])
            return

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


class ShmOrderedWork(ShmWork):
    """An ordered all-reduce, which has no root and needs every rank."""

    __slots__ = ()

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        try:
            return super().wait(timeout)
        except CallFailed as error:
            if error.kind is not PeerLeft:
                raise
            raise peer_left(error.rank) from None


class ShmTransfer(ShmWork):
    """A send or receive in flight."""

    __slots__ = ()

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        seconds = timeout.total_seconds()
        owner = self._owner
        limit = seconds or _LONG_WAIT
        while True:
            state, peer, length = owner._native.wait_transfer(self.ticket, limit)
            if state != PENDING:
                break
            # The engine stops waiting when the peer has died.
            if peer in owner.dead_ranks():
                raise PeerDead(peer)
            if seconds:
                raise WorkNotDone
        if state == TransferState.STOPPED:
            raise EngineStopped
        if state == TransferState.STARVED:  # it stays in flight
            raise ReceiveBufferExhausted(
                f"out of memory while buffering a message of {length} bytes from rank {peer} that "
                "was sent before the one being received. Receive that message first, or free memory"
            )
        self._memory = None
        owner._transfers.pop(self.ticket, None)
        if state == FINISHED:
            return True
        if state == TransferState.CANCELLED:
            raise peer_left(peer)
        raise RuntimeError(f"rank {peer} sent {length} bytes; the receive buffer has another size")

    def cancel(self) -> None:
        """Withdraw it, unless a part of it has been transferred."""
        if self._owner._native.cancel_transfer(self.ticket):
            self._memory = None
            self._owner._transfers.pop(self.ticket, None)

    def __del__(self) -> None:
        if self.ticket == 0:  # it was never started
            return
        with suppress(InvalidState):  # in a forked child
            self._owner._native.detach_transfer(self.ticket)
        if self._memory is not None:  # its end was not observed
            self._owner._transfers[self.ticket] = self._memory
            self._owner._dropped.add(self.ticket)

    def is_completed(self) -> bool:
        return self._owner._native.test_transfer(self.ticket)[0] != PENDING

    def _source_rank(self) -> int:
        return self._owner._native.test_transfer(self.ticket)[1]


def _outcome_error(outcome: int, first: int, second: int) -> RuntimeError:
    if outcome == Outcome.MISMATCH:
        return EngineMismatch(first, second)
    if outcome == Outcome.ROOT_LEFT:
        return peer_left(first, is_root=True)
    if outcome == Outcome.TORN:
        cause = "died during the call; the contents of its tensors are undefined"
        return CallFailed(PeerLost, first, cause)
    return PeerDead(first) if outcome == Outcome.DEAD else EngineStopped()


class ShmEngine:
    """One rank of a group in shared memory."""

    def __init__(self, engine: NativeEngine, rank: int, size: int, driver: object = None) -> None:
        self._native = engine  # in a forked child, a `_ForkedEngine`
        self._rank = rank
        self._size = size
        self._slab = Slab(engine, rank, size)
        self.started_works: list[Any] = []
        self._transfers: dict[int, object] = {}  # memory of those in flight, by ticket
        self._dropped: set[int] = set()  # without a handle, so that only `progress` advances them
        _engines.add(self)
        _register_fork_hook()
        self.driver = start_driver(engine, driver, size)

    def dead_ranks(self) -> list[int]:
        return self._native.dead_ranks()

    def abort_calls(self) -> None:
        self._native.abort()

    def members(self) -> list[int]:
        return self._native.members()

    def leave(self) -> str:
        self.progress()
        peers = {self._native.test_transfer(ticket)[1] for ticket in self._transfers}
        if peers & set(self.members()):
            return TRANSFERS_IN_FLIGHT
        return "" if self._native.leave() else "calls"

    def rejoin(self, calls: int, seconds: float) -> tuple[str, int]:
        stage, most = self._native.rejoin(calls, seconds)
        return REJOIN_STAGES[stage], most

    def missing_in_rejoin(self) -> list[int]:
        return self._native.missing_in_rejoin()

    def exclude(self, rank: int) -> None:
        self._native.exclude(rank)

    def stop_thread(self) -> None:
        with suppress(InvalidState):  # in a forked child
            self._native.stop_driver()

    def progress(self) -> None:
        """Advance transfers whose handle is gone, and drop those that have ended."""
        for ticket in list(self._transfers):
            if self._native.test_transfer(ticket)[0] != PENDING:
                self._transfers.pop(ticket, None)
                self._dropped.discard(ticket)
        # A large transfer takes many rounds.
        for ticket in sorted(self._dropped)[:1]:
            self._native.wait_transfer(ticket, _POLL_INTERVAL)

    def allocate(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Create a tensor in memory that peers can access directly."""
        self._native.region  # noqa: B018 - raises in a forked child
        return self._slab.allocate(shape, dtype)

    def make_fast_path(self, **parts: Any) -> Any:
        return cast("Any", native.engine).FastPath(engine=self._native, owner=self, **parts)

    def work_for_ticket(self, ticket: int, memory: Tensors) -> RawWork:
        work = ShmWork(self, memory)
        work.ticket = ticket
        return work

    def allreduce(self, tensors: Tensors, opts: Any) -> RawWork:
        return self._in_place(ALLREDUCE, tensors[0], _op_number(opts))

    def allreduce_coalesced(self, tensors: Tensors, opts: Any) -> RawWork:
        return JointWork(
            [  # the shape includes the length of the list, so that ranks' lists are compared
                self._in_place(ALLREDUCE, t, _op_number(opts), shape=(len(tensors), *t.shape))
                for t in tensors
            ]
        )

    def ordered_allreduce(
        self,
        nodes: Tensor,
        count: int,
        tree_inputs: list[int],
        merges: list[int],
        divisor: float,
    ) -> RawWork:
        """Sum subtrees of all ranks in the order of one binary tree, and divide by `divisor`.

        `nodes` is a contiguous matrix. The rows from row 1 on are this rank's inputs, of which the
        first `count` elements are summed; the result replaces those of row 0 on every rank. Inputs
        are not written to. They are ordered by rank, then by row: `tree_inputs` has their number on
        each rank, and every rank has one row more than the rank with most. Inputs are pushed on a
        stack; after each, as many pairs of topmost sums are replaced by their sum as `merges` says.

        Every sum is rounded to the dtype, so the bits depend on the tree but not on the number of
        ranks. Above 16 KiB of inputs, `nodes` must be from `allocate`; rows should not be a power
        of two of bytes apart, where they compete for the same sets of the cache. Raises
        ``ValueError`` without having issued anything.
        """
        assert nodes.dim() == 2, "one row for the result and one for each input"
        assert nodes.is_contiguous()
        rows, stride = nodes.shape
        work = ShmOrderedWork(self, (nodes,))
        self._native.issue_ordered(
            DTYPES[nodes.dtype],
            nodes.data_ptr(),
            stride * nodes.element_size(),
            rows,
            count * nodes.element_size(),
            tree_inputs,
            merges,
            divisor,
            (count, stride, *tree_inputs, *merges),
            self.started_works,
            work,
        )
        return work

    def reduce(self, tensors: Tensors, opts: Any) -> RawWork:
        return self._in_place(Collective.REDUCE, tensors[0], _op_number(opts), opts.rootRank)

    def broadcast(self, tensors: Tensors, opts: Any) -> RawWork:
        return self._in_place(Collective.BROADCAST, tensors[0], root=opts.rootRank)

    def barrier(self, _: Any) -> RawWork:
        return self._in_place(Collective.BARRIER, _NO_BYTES, shape=())

    def allgather(self, outputs: list[Tensors], inputs: Tensors, _: Any) -> RawWork:
        return self._issue(Collective.ALLGATHER, inputs[0], outputs[0], inputs[0])

    def _allgather_base(self, output: Tensor, part: Tensor, _: Any) -> RawWork:
        return self._issue(Collective.ALLGATHER, part, list(output.view(self._size, -1)), part)

    def gather(self, outputs: list[Tensors], inputs: Tensors, opts: Any) -> RawWork:
        rows, part = outputs[0] if outputs else [], inputs[0]
        return self._issue(Collective.GATHER, part, rows, part, root=opts.rootRank)

    def scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any) -> RawWork:
        whole, part = _concatenated(inputs[0]) if inputs else None, outputs[0]
        root, extent = opts.rootRank, part.nbytes
        return self._issue(Collective.SCATTER, whole, outputs, part, root=root, extent=extent)

    def reduce_scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any) -> RawWork:
        parts = inputs[0]
        if len({part.numel() for part in parts}) == 1:
            return self._reduce_scatter_base(outputs[0], _concatenated(parts), opts)
        works = []
        for root, part in enumerate(parts):  # of different sizes: one reduction each
            mine = outputs[0] if root == self._rank else torch.empty_like(part)
            mine.detach().copy_(part.detach().view_as(mine))
            flat = mine.detach().view(-1)  # a list's tensor may have another shape than the output
            op = _op_number(opts)
            works.append(self._in_place(Collective.REDUCE, flat, op, root, kind_of_work=ShmPart))
        return JointWork(works)

    def _reduce_scatter_base(self, output: Tensor, whole: Tensor, opts: Any) -> RawWork:
        op = _op_number(opts)
        return self._issue(Collective.REDUCE_SCATTER, whole, [output], output, op=op)

    def alltoall_base(
        self, output: Tensor, source: Tensor, into: list[int], out_of: list[int], opts: Any
    ) -> RawWork:
        del opts
        splits = _offsets(out_of, source), _offsets(into, output)
        return self._issue(Collective.ALLTOALL, source, [output], output, extent=0, splits=splits)

    def send(self, tensors: Tensors, peer: int, tag: int) -> RawWork:
        return self._transfer(self._native.send, tensors, peer, tag)

    def recv(self, tensors: Tensors, peer: int, tag: int) -> RawWork:
        return self._transfer(self._native.receive, tensors, peer, tag)

    def recv_anysource(self, tensors: Tensors, tag: int) -> RawWork:
        return self.recv(tensors, -1, tag)

    def _transfer(self, start: Any, tensors: Tensors, peer: int, tag: int) -> RawWork:
        tensor = tensors[0]
        work = ShmTransfer(self, tensors)
        start(peer, tag, tensor.data_ptr(), tensor.nbytes, self.started_works, work)
        self._transfers[work.ticket] = tensors
        return work

    def _in_place(
        self,
        kind: int,
        tensor: Tensor,
        op: int = 0,
        root: int = 0,
        *,
        kind_of_work: type[ShmWork] = ShmWork,
        shape: tuple[int, ...] | None = None,
    ) -> RawWork:
        work = kind_of_work(self, (tensor,))
        self._native.issue_in_place(
            kind,
            DTYPES[tensor.dtype],
            op,
            root,
            tensor.data_ptr(),
            tensor.nbytes,
            tensor.shape if shape is None else shape,
            self.started_works,
            work,
        )
        return work

    def _issue(
        self,
        kind: int,
        source: Tensor | None,
        outputs: Sequence[Tensor],
        part: Tensor,
        *,
        op: int = 0,
        root: int = 0,
        extent: int | None = None,
        splits: tuple[list[int], list[int]] | None = None,
    ) -> RawWork:
        """Issue a call whose outputs have the size of `part`.

        Ranks compare `extent`, by default the size of `source`; and the shape of `part`, unless
        each rank has its own `splits`.
        """
        length = 0 if source is None else source.nbytes
        work = ShmWork(self, (source, outputs))
        self._native.issue(
            kind,
            DTYPES[part.dtype],
            op,
            root,
            0 if source is None else source.data_ptr(),
            length,
            length if extent is None else extent,
            () if splits else part.shape,
            [output.data_ptr() for output in outputs],
            part.nbytes,
            *(splits or ([], [])),
            self.started_works,
            work,
        )
        return work


class _ForkedEngine:
    """Replaces the engine in a forked child; every use raises."""

    def __init__(self, engine: NativeEngine) -> None:
        self._kept = engine  # the child may still read tensors in the region

    def __getattr__(self, name: str) -> NoReturn:
        raise InvalidState(
            "this process was forked from a rank and is not a rank itself. Use the group in the "
            "parent only, or start processes with the 'spawn' method"
        )


_engines: weakref.WeakSet[ShmEngine] = weakref.WeakSet()


@functools.cache  # on first use, since importing must not register hooks
def _register_fork_hook() -> None:
    """Make engines unusable in forked children, at no cost per call."""
    os.register_at_fork(after_in_child=_detach_engines)


def _detach_engines() -> None:
    for engine in _engines:
        engine._native = cast("Any", _ForkedEngine(engine._native))
    _engines.clear()


def _op_number(opts: Any) -> int:
    return int(plain_op(opts.reduceOp).value)


def _concatenated(tensors: Tensors) -> Tensor:
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def _offsets(rows: list[int], tensor: Tensor) -> list[int]:
    """Return the byte at which each rank's rows begin, and the end of the last."""
    row = tensor.nbytes // len(tensor) if len(tensor) else 0
    return [0, *(count * row for count in accumulate(rows))]


def check_options(options: dict[str, object]) -> None:
    """Raise for unknown options and drivers, and if the engine is not built."""
    unknown = sorted(set(options) - {DRIVER_OPTION})
    if unknown:
        raise UnknownOption(f"shm has only the option {DRIVER_OPTION!r}, got {unknown[0]!r}")
    asked = options.get(DRIVER_OPTION)
    if asked not in (None, "thread", "caller"):
        raise InvalidArgument(f"{DRIVER_OPTION} must be 'thread', 'caller' or None, got {asked!r}")
    if native.engine is None:
        raise InvalidState(f"backend 'shm' is not available: {native.why_missing}")


def make(
    store: Store, rank: int, world_size: int, timeout: timedelta, device: torch.device, **opts: Any
) -> Engine:
    """Create the engine of one rank, on a region that all ranks have mapped."""
    del device
    engine = share_region(store, rank, world_size, timeout=timeout)
    return ShmEngine(engine, rank, world_size, opts.get(DRIVER_OPTION))


def offer_region(
    rank: int, processes: Sequence[PeerProcess], ranks_on_machine: int, options: dict[str, object]
) -> RegionOffer:
    """Return this rank's part in a region that rank 0 offers with the rendezvous result."""

    def build(engine: NativeEngine, cores: int) -> ShmEngine:
        driver = options.get(DRIVER_OPTION)
        if driver is None and choose_driver(ranks_on_machine, cores) == "caller":
            driver = "caller"
        return ShmEngine(engine, rank, len(processes), driver)

    return RegionOffer(rank, processes, ranks_on_machine, build)


TRAITS = Traits(
    dtypes=frozenset(DTYPES),
    averages=REDUCTIONS,
    averages_all_types=True,
    sums_sparse=False,
    detects_mismatch=True,
    connects_in_background=True,
    offer=offer_region,
    check_options=check_options,
    own_options=frozenset({DRIVER_OPTION}),
)
