"""Shared memory: ranks on one machine read and write each other's buffers.

The engine is native (see ``native/`` and ``docs/design.md``); here it gets torch's call forms. A
call says that this rank is ready, and the rank's share of the work is done when it next enters the
engine, or by a thread in the background where there is a core for one (`_driver`).
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NoReturn, cast

import torch
from torch import Tensor
from torch._C._distributed_c10d import Store

from ... import native
from ...errors import InvalidState
from .._adapt import plain_op
from .._engine import REDUCTIONS, TRANSFERS, Engine, RawWork, Traits
from .._joint import JointWork
from ._driver import OPTION, check_driver, start_driver
from ._region import Slab, share
from ._shm_work import PENDING, ShmPart, ShmTransfer, ShmWork

if TYPE_CHECKING:
    from ...native import _engine

__all__ = ["TRAITS", "make"]

Tensors = list[Tensor]

# The numbers of `native/layout.hpp`, `native/types.hpp` and `native/engine.hpp`.
BARRIER, ALLREDUCE, REDUCE, BROADCAST, ALLGATHER = 1, 2, 3, 4, 5
GATHER, SCATTER, REDUCE_SCATTER, ALLTOALL = 6, 7, 8, 9
ADD = 0
STAGES = ("outside", "waiting", "entering", "entered")
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
A_TURN = 0.02  # seconds that the watcher gives to a transfer that nobody waits for


class ShmEngine:
    """One rank of a group in shared memory."""

    def __init__(self, engine: _engine.Engine, rank: int, size: int, driver: object = None) -> None:
        self._engine = engine
        """In a forked child, what refuses instead of it."""
        self._rank = rank
        self._size = size
        self._slab = Slab(engine, rank, size)
        self.begun: list[Any] = []
        self._transfers: dict[int, object] = {}
        """What sends and receives under way work on, whoever else has let go of it.

        Until they are entered here, their handles keep it."""
        self._dropped: set[int] = set()
        """Those of them that nobody can wait for any more."""
        _part_with_children(self)
        self.driver = start_driver(engine, driver, size)

    # -- the rank and its peers ------------------------------------------------------------

    def lost_ranks(self) -> list[int]:
        """List the ranks whose process has ended."""
        return self._engine.dead()

    def wake(self) -> None:
        """End the waits of this rank, for the group has failed."""
        self._engine.abort()

    def members(self) -> list[int]:
        """List the ranks that take part in what comes next."""
        return self._engine.members()

    def leave(self) -> str:
        """Take part in nothing more, unless something is under way; tells what."""
        self.drive()
        there = set(self.members())
        waited_for = {self._engine.test_transfer(ticket)[1] for ticket in self._transfers}
        if waited_for & there:
            return TRANSFERS
        return "" if self._engine.leave() else "calls"

    def rejoin(self, calls: int, seconds: float) -> tuple[str, int]:
        """Take a step towards being a member again, or wait for it; tells how far it has come."""
        stage, most = self._engine.rejoin(calls, seconds)
        return STAGES[stage], most

    def awaited(self) -> list[int]:
        """List the ranks that `rejoin` waits for."""
        return self._engine.awaited()

    def forget(self, rank: int) -> None:
        """Go on without a rank that is dead."""
        self._engine.forget(rank)

    def rest(self) -> None:
        """End the thread, if there is one."""
        with suppress(InvalidState):  # a forked child has none
            self._engine.stop_driver()

    def drive(self) -> None:
        """Get on with transfers that nobody waits for, and let go of those that have ended."""
        for ticket in list(self._transfers):
            if self._engine.test_transfer(ticket)[0] != PENDING:
                self._transfers.pop(ticket, None)
                self._dropped.discard(ticket)
        # A large one takes many turns with its peer, and nobody but the caller of this is at it.
        for ticket in sorted(self._dropped)[:1]:
            self._engine.wait_transfer(ticket, A_TURN)

    def allocate(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Make a tensor that peers can reach where it is."""
        self._engine.region  # noqa: B018 - which a forked child does not have
        return self._slab.allocate(shape, dtype)

    def shortcut(self, **parts: Any) -> _engine.Shortcut:
        """Make a shorter way to plain sums and barriers, of parts of the group."""
        assert native.engine is not None
        shortcut: _engine.Shortcut = native.engine.Shortcut(
            engine=self._engine, owner=self, **parts
        )
        return shortcut

    def adopt(self, ticket: int, memory: Tensors) -> RawWork:
        """Make the work of a call that came the shorter way."""
        work = ShmWork(self, memory)
        work.ticket = ticket
        return work

    # -- in place --------------------------------------------------------------------------

    def sum(self, tensor: Tensor) -> RawWork:
        """Add up on every rank."""
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
        """Reduce on every rank."""
        return self._in_place(ALLREDUCE, tensors[0], opts.reduceOp, 0)

    def allreduce_coalesced(self, tensors: Tensors, opts: Any) -> RawWork:
        """Reduce several, one after the other."""
        return JointWork(
            [  # with the length of the list, in which ranks may differ too
                self._in_place(ALLREDUCE, t, opts.reduceOp, 0, shape=(len(tensors), *t.shape))
                for t in tensors
            ]
        )

    def reduce(self, tensors: Tensors, opts: Any) -> RawWork:
        """Reduce on the root."""
        return self._in_place(REDUCE, tensors[0], opts.reduceOp, opts.rootRank)

    def broadcast(self, tensors: Tensors, opts: Any) -> RawWork:
        """Copy from the root."""
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
        """Meet."""
        del opts
        work = ShmWork(self, ())
        self._engine.issue_in_place(BARRIER, BYTES, 0, 1.0, 0, 0, 0, (), self.begun, work)
        return work

    # -- from many to many -----------------------------------------------------------------

    def allgather(self, outputs: list[Tensors], inputs: Tensors, opts: Any) -> RawWork:
        """Collect in lists."""
        del opts
        part = inputs[0]
        return self._issue(ALLGATHER, part, outputs[0], part.nbytes, shape=part.shape)

    def _allgather_base(self, output: Tensor, part: Tensor, opts: Any) -> RawWork:
        del opts
        rows = list(output.view(self._size, -1))
        return self._issue(ALLGATHER, part, rows, part.nbytes, shape=part.shape)

    def gather(self, outputs: list[Tensors], inputs: Tensors, opts: Any) -> RawWork:
        """Collect on the root."""
        targets = outputs[0] if outputs else []
        part, root = inputs[0], opts.rootRank
        return self._issue(GATHER, part, targets, part.nbytes, root=root, shape=part.shape)

    def scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any) -> RawWork:
        """Hand out from the root."""
        whole = _joined(inputs[0]) if inputs else None
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
        """Reduce lists and keep one tensor."""
        parts = inputs[0]
        if len({part.numel() for part in parts}) == 1:
            return self._reduce_scatter_base(outputs[0], _joined(parts), opts)
        works = []
        for root, part in enumerate(parts):  # of different sizes: one reduction for each
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
        """Exchange rows."""
        del opts
        sent = _offsets(out_of, source)
        received = _offsets(into, output)
        return self._issue(
            ALLTOALL, source, [output], output.nbytes, extent=0, splits=(sent, received)
        )

    # -- one to one ------------------------------------------------------------------------

    def send(self, tensors: Tensors, peer: int, tag: int) -> RawWork:
        """Send to one rank."""
        tensor = tensors[0]
        work = ShmTransfer(self, tensors)
        self._engine.send(peer, tag, tensor.data_ptr(), tensor.nbytes, self.begun, work)
        self._transfers[work.ticket] = tensors
        return work

    def recv(self, tensors: Tensors, peer: int, tag: int) -> RawWork:
        """Receive from one rank."""
        tensor = tensors[0]
        work = ShmTransfer(self, tensors)
        self._engine.receive(peer, tag, tensor.data_ptr(), tensor.nbytes, self.begun, work)
        self._transfers[work.ticket] = tensors
        return work

    def recv_anysource(self, tensors: Tensors, tag: int) -> RawWork:
        """Receive from anybody."""
        return self.recv(tensors, -1, tag)

    # -- inside ----------------------------------------------------------------------------

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


class _Forked:
    """Stands where the engine was, in a process that was forked from a rank and is none itself.

    It keeps the engine, for the child may still look at tensors in the region.
    """

    def __init__(self, engine: _engine.Engine) -> None:
        self._kept = engine

    def __getattr__(self, name: str) -> NoReturn:
        raise InvalidState(
            "this process was forked from a rank and is none itself: use the group in the "
            "parent only, or start processes with the 'spawn' method"
        )


_engines: weakref.WeakSet[ShmEngine] = weakref.WeakSet()
_knows_forks = False


def _part_with_children(engine: ShmEngine) -> None:
    """See to it that a forked child does not take the engine's part; costs its calls nothing."""
    global _knows_forks  # noqa: PLW0603 - on first use, for importing must not register hooks
    _engines.add(engine)
    if not _knows_forks:
        _knows_forks = True
        os.register_at_fork(after_in_child=_forget_engines)


def _forget_engines() -> None:
    for engine in _engines:
        engine._engine = cast(Any, _Forked(engine._engine))
    _engines.clear()


def _joined(tensors: Tensors) -> Tensor:
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def _offsets(rows: list[int], tensor: Tensor) -> list[int]:
    """Tell at which byte each rank's rows begin, and where the last ones end."""
    row = tensor.nbytes // len(tensor) if len(tensor) else 0
    return [0, *(count * row for count in accumulate(rows))]


def check_options(options: dict[str, object]) -> None:
    """Refuse options but the driver: sizes that fit all are chosen here."""
    check_driver(options)
    if native.engine is None:
        raise InvalidState(f"there is no shared memory here: {native.why_missing}")


def make(
    store: Store,
    rank: int,
    world_size: int,
    timeout: timedelta,
    device: torch.device,
    **kwargs: object,
) -> Engine:
    """Map the region that the ranks share."""
    del device
    engine = share(store, rank, world_size, timeout=timeout)
    return ShmEngine(engine, rank, world_size, kwargs.get(OPTION))


TRAITS = Traits(
    dtypes=frozenset(DTYPES),
    averages=REDUCTIONS,
    averages_all_types=True,
    sums_sparse=False,
    compares_calls=True,
    connects_in_background=True,
    check_options=check_options,
    own_options=frozenset({OPTION}),
)
