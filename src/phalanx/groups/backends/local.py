"""Local: ranks are threads of one process.

The last rank to arrive does the work for all (`_reference` has the arithmetic), so no thread
waits inside a call and nothing depends on the order of arrival. Slow, exact and easy to reason
about: the other backends are tested against it.

`_Hub._lock` guards bookkeeping only; tensors are touched outside of it.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import Store

from ...errors import PeerLeft
from .._background_threads import borrow_thread
from .._engine import (
    REDUCTIONS,
    TRANSFERS_IN_FLIGHT,
    CallFailed,
    Engine,
    EngineStopped,
    PythonWork,
    Traits,
)
from .._formatting import RankCall
from . import _reference as reference
from . import refuse_options

__all__ = [
    "TRAITS",
    "make",
    "single_rank_engine",
]


THREAD_POLL_INTERVAL = 0.05  # seconds between two looks for threads that have ended

Tensors = list[Tensor]
Function = Callable[[reference.Arguments], None]


class _Slot:
    """One collective: the arguments of the ranks that have arrived."""

    def __init__(self) -> None:
        self.arrived: dict[int, tuple[Function, tuple[Any, ...], PythonWork]] = {}

    def run(self) -> None:
        """Do the work for all ranks."""
        functions = {function for function, _, _ in self.arrived.values()}
        error: Exception | None = None
        try:
            if len(functions) > 1:
                raise RuntimeError("ranks called different operations")
            with torch.no_grad():
                functions.pop()({rank: self.arrived[rank][1] for rank in sorted(self.arrived)})
        except CallFailed as spoiled:
            error = spoiled
        except (RuntimeError, ValueError, IndexError) as caught:
            error = RuntimeError(str(caught))
        self.finish(error)

    def finish(self, error: Exception | None) -> None:
        """End the call on all ranks, unless it has ended."""
        for _, _, work in self.arrived.values():
            # Whatever hangs on a future is another rank's business, and may call that rank's group:
            # not on this thread, which is in the middle of a call of its own.
            if work.has_future:
                borrow_thread(partial(work.finish, error))
            else:
                work.finish(error)


@dataclass(frozen=True)
class _PendingTransfer:
    """One side of a transfer that waits for the other."""

    source: int | None
    """None for a receive from anybody."""
    target: int
    tag: int
    tensor: Tensor
    work: PythonWork

    def matches(self, other: _PendingTransfer) -> bool:
        """Tell whether a send and a receive belong together."""
        same = (self.target, self.tag) == (other.target, other.tag)
        return same and (None in (self.source, other.source) or self.source == other.source)


@dataclass(frozen=True)
class _DeclaredCall:
    """What the first rank to arrive said that it calls."""

    said: str
    side: RankCall
    heard: set[int] = field(default_factory=set)


class _Hub:
    """Where the threads of one group meet."""

    def __init__(self, size: int) -> None:
        self.threads: dict[int, threading.Thread] = {}
        self._size = size
        # Over everything below. Held for bookkeeping only; tensors are touched outside of it.
        self._lock = threading.Lock()
        self._news = threading.Condition(self._lock)  # for who waits to be a member again
        self._slots: dict[int, _Slot] = {}
        self._statements: dict[int, _DeclaredCall] = {}
        self._sends: list[_PendingTransfer] = []
        self._receives: list[_PendingTransfer] = []
        self._left_at: dict[int, int] = {}
        """The first call that a rank takes no part in, for those who have left."""
        self._standing: dict[int, tuple[int, int]] = {}
        """Who is back and waits for all, and its last call: its number here, and the group's."""
        self._returns = 0
        self._agreed = (0, 0)
        self._aborted = False

    def arrive(
        self, engine: LocalEngine, rank: int, function: Function, arguments: tuple[Any, ...]
    ) -> PythonWork:
        """Arrive at a collective; the last to do so carries it out."""
        work = PythonWork([])
        whole: _Slot | None = None
        try:
            with self._lock:
                if self._aborted:
                    return _stopped(work)
                sequence = engine.sequence + 1
                slot = self._slots.setdefault(sequence, _Slot())
                is_last = len(slot.arrived) + 1 == len(self._members(sequence))
                # No function is called in the next lines, so no signal is handled in between.
                slot.arrived[rank] = (function, arguments, work)
                engine.sequence = sequence
                engine.begun += [work]
                if is_last:
                    whole = slot
                    del self._slots[sequence]
            if whole is not None:
                whole.run()
        except BaseException:
            if whole is not None:  # all wait for this rank
                whole.finish(_interrupted(rank))
            raise
        return work

    def members(self) -> list[int]:
        """List the ranks that have not left."""
        with self._lock:
            return [rank for rank in range(self._size) if rank not in self._left_at]

    def leave(self, rank: int, sequence: int) -> str:
        """Take no part from a call on, and carry out what waited for nobody else.

        Not while something is under way with a rank that is there; tells what.
        """
        with self._lock:
            others: set[int | None] = {p.target for p in self._sends if p.source == rank}
            others |= {p.source for p in self._receives if p.target == rank}
            if others & (set(range(self._size)) - set(self._left_at)):
                return TRANSFERS_IN_FLIGHT
            self._left_at[rank] = sequence
            whole = {
                number: slot
                for number, slot in self._slots.items()
                if len(slot.arrived) == len(self._members(number))
            }
            for number in whole:
                del self._slots[number]
        for number in sorted(whole):
            whole[number].run()
        return ""

    def announce_rejoin(self, rank: int, standing: tuple[int, int]) -> int:
        """Say that a rank is back; the last lets all in. Returns the turn to wait for."""
        with self._lock:
            turn = self._returns
            self._standing[rank] = standing
            if len(self._standing) == self._size:
                ends, calls = zip(*self._standing.values(), strict=True)
                self._agreed = max(ends), max(calls)
                self._returns += 1
                self._standing.clear()
                self._left_at.clear()
                self._statements.clear()
                self._news.notify_all()
        return turn

    def await_all(self, turn: int, seconds: float) -> tuple[int, int] | None:
        """Wait until all have come back, and return where they go on; None if not yet."""
        until = time.monotonic() + seconds
        with self._lock:
            while self._returns == turn and not self._aborted and not self._is_waiting_in_vain():
                left = until - time.monotonic()
                if left <= 0:
                    break
                self._news.wait(min(left, THREAD_POLL_INTERVAL))
            return self._agreed if self._returns > turn else None

    def _is_waiting_in_vain(self) -> bool:
        there = [thread for rank, thread in self.threads.items() if rank not in self._standing]
        return any(not thread.is_alive() for thread in there)

    def awaited(self) -> list[int]:
        """List the ranks that have not come back."""
        with self._lock:
            return [rank for rank in range(self._size) if rank not in self._standing]

    def _members(self, sequence: int) -> list[int]:
        return [r for r in range(self._size) if self._left_at.get(r, sequence + 1) > sequence]

    def agree(self, sequence: int, said: str, side: RankCall) -> RankCall | None:
        """Compare with the first rank to arrive, and return its side if it says something else."""
        with self._lock:
            first = self._statements.setdefault(sequence, _DeclaredCall(said, side))
            if first.heard == {side.rank}:  # it was interrupted before it arrived, and calls again
                first = self._statements[sequence] = _DeclaredCall(said, side)
            first.heard.add(side.rank)
            if len(first.heard) == len(self._members(sequence)):
                del self._statements[sequence]
        return None if first.said == said else first.side

    def send(self, post: _PendingTransfer) -> PythonWork:
        """Hand a tensor to a receive that waits for it, or wait for one."""
        return self._match(post, self._receives, self._sends, lambda other: _deliver(post, other))

    def receive(self, post: _PendingTransfer) -> PythonWork:
        """Take a tensor from a send that waits, or wait for one."""
        return self._match(post, self._sends, self._receives, lambda other: _deliver(other, post))

    def abort(self) -> None:
        """End every call under way, on all ranks."""
        with self._lock:
            self._aborted = True
            works = [work for slot in self._slots.values() for _, _, work in slot.arrived.values()]
            works += [post.work for post in self._sends + self._receives]
            self._slots.clear()
            self._sends.clear()
            self._receives.clear()
            self._news.notify_all()
        for work in works:
            _stopped(work)

    def _match(
        self,
        post: _PendingTransfer,
        waiting: list[_PendingTransfer],
        queue: list[_PendingTransfer],
        deliver: Callable[[_PendingTransfer], None],
    ) -> PythonWork:
        other: _PendingTransfer | None = None
        try:
            with self._lock:
                if self._aborted:
                    return _stopped(post.work)
                other = next((other for other in waiting if other.matches(post)), None)
                if other is None:
                    peer = post.target if queue is self._sends else post.source
                    post.work.cancel = partial(self._withdraw, queue, post, peer)
                    queue.append(post)
                    return post.work
                waiting.remove(other)
            deliver(other)
        except BaseException:
            if other is not None:  # which waits for this rank
                rank = post.target if queue is self._receives else post.source
                _end_both(post, other, _interrupted(rank))
            raise
        return post.work

    def _withdraw(
        self, queue: list[_PendingTransfer], post: _PendingTransfer, peer: int | None
    ) -> None:
        with self._lock:
            queue[:] = [other for other in queue if other is not post]
        if peer is not None:
            post.work.finish(CallFailed(PeerLeft, peer, f"rank {peer} has left the group"))


_hubs: dict[str, _Hub] = {}
"""Hubs that some of their threads have not found yet, by a name passed on through the store."""


class LocalEngine:
    """One thread's rank in a hub."""

    def __init__(self, hub: _Hub, rank: int) -> None:
        self._hub = hub
        self._rank = rank
        self.begun: list[Any] = []
        self.sequence = 0
        """The number of the last collective at which it has arrived."""
        self._turn: int | None = None
        """Which of the hub's returns this rank waits for, if it does."""

    def _arrive(self, function: Function, *arguments: Any) -> PythonWork:
        self._hub.threads[self._rank] = threading.current_thread()  # whose life counts from now on
        return self._hub.arrive(self, self._rank, function, arguments)

    def agree(self, sequence: int, said: str, side: RankCall) -> RankCall | None:
        """Compare a call with that of the first rank to make it, and return its side if unlike."""
        return self._hub.agree(sequence, said, side)

    def lost_ranks(self) -> list[int]:
        """List the ranks whose thread has ended."""
        return [rank for rank, thread in self._hub.threads.items() if not thread.is_alive()]

    def wake(self) -> None:
        """End every call under way, on all ranks."""
        self._hub.abort()

    def members(self) -> list[int]:
        """List the ranks that take part in what comes next."""
        return self._hub.members()

    def leave(self) -> str:
        """Take part in nothing more, unless a transfer is under way; tells what."""
        return self._hub.leave(self._rank, self.sequence + 1)

    def rejoin(self, calls: int, seconds: float) -> tuple[str, int]:
        """Take a step towards being a member again, or wait for it; tells how far it has come."""
        self._hub.threads[self._rank] = threading.current_thread()
        if self._turn is None:
            self._turn = self._hub.announce_rejoin(self._rank, (self.sequence, calls))
            return "waiting", 0
        agreed = self._hub.await_all(self._turn, seconds)
        if agreed is None:
            return "waiting", 0
        self._turn = None
        self.sequence, most = agreed
        return "entered", most

    def awaited(self) -> list[int]:
        """List the ranks that `rejoin` waits for."""
        return self._hub.awaited()

    def allreduce(self, tensors: Tensors, opts: Any) -> PythonWork:
        """See `_reference`, as for all of these."""
        return self._arrive(reference.allreduce, tensors, opts)

    allreduce_coalesced = allreduce

    def reduce(self, tensors: Tensors, opts: Any) -> PythonWork:
        """Reduce to the root."""
        return self._arrive(reference.reduce, tensors, opts)

    def broadcast(self, tensors: Tensors, opts: Any) -> PythonWork:
        """Copy from the root."""
        return self._arrive(reference.broadcast, tensors, opts)

    def allgather(self, outputs: list[Tensors], inputs: Tensors, opts: Any) -> PythonWork:
        """Collect in lists."""
        return self._arrive(reference.allgather, outputs, inputs, opts)

    def _allgather_base(self, output: Tensor, part: Tensor, opts: Any) -> PythonWork:
        return self._arrive(reference.allgather_base, output, part, opts)

    def gather(self, outputs: list[Tensors], inputs: Tensors, opts: Any) -> PythonWork:
        """Collect on the root."""
        return self._arrive(reference.gather, outputs, inputs, opts)

    def scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any) -> PythonWork:
        """Hand out from the root."""
        return self._arrive(reference.scatter, outputs, inputs, opts)

    def reduce_scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any) -> PythonWork:
        """Reduce lists and keep one tensor."""
        return self._arrive(reference.reduce_scatter, outputs, inputs, opts)

    def _reduce_scatter_base(self, output: Tensor, whole: Tensor, opts: Any) -> PythonWork:
        return self._arrive(reference.reduce_scatter_base, output, whole, opts)

    def alltoall_base(
        self, output: Tensor, source: Tensor, into: list[int], out_of: list[int], opts: Any
    ) -> PythonWork:
        """Exchange rows."""
        return self._arrive(reference.alltoall_base, output, source, into, out_of, opts)

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any) -> PythonWork:
        """Exchange tensors."""
        return self._arrive(reference.alltoall, outputs, inputs, opts)

    def barrier(self, opts: Any) -> PythonWork:
        """Meet."""
        return self._arrive(reference.barrier, opts)

    def send(self, tensors: Tensors, peer: int, tag: int) -> PythonWork:
        """Send to one rank."""
        return self._hub.send(_PendingTransfer(self._rank, peer, tag, tensors[0], PythonWork([])))

    def recv(self, tensors: Tensors, peer: int, tag: int) -> PythonWork:
        """Receive from one rank."""
        return self._hub.receive(
            _PendingTransfer(peer, self._rank, tag, tensors[0], PythonWork(tensors))
        )

    def recv_anysource(self, tensors: Tensors, tag: int) -> PythonWork:
        """Receive from anybody."""
        return self._hub.receive(
            _PendingTransfer(None, self._rank, tag, tensors[0], PythonWork(tensors))
        )


def _deliver(send: _PendingTransfer, receive: _PendingTransfer) -> None:
    error: Exception | None = None
    try:
        reference.copy_into(receive.tensor, send.tensor)
    except (RuntimeError, ValueError) as caught:
        error = RuntimeError(str(caught))
    receive.work.finish(error, source=-1 if send.source is None else send.source)
    send.work.finish(error)


def _end_both(post: _PendingTransfer, other: _PendingTransfer, error: Exception) -> None:
    post.work.finish(error)
    other.work.finish(error)


def _interrupted(rank: int | None) -> Exception:
    return RuntimeError(f"rank {rank} was interrupted while it carried out the call")


def _stopped(work: PythonWork) -> PythonWork:
    work.finish(EngineStopped())
    return work


def make(
    store: Store,
    rank: int,
    world_size: int,
    timeout: timedelta,
    device: torch.device,
    **kwargs: object,
) -> Engine:
    """Meet the other threads of this process."""
    del timeout, device, kwargs
    return LocalEngine(_enter_hub(store, rank, world_size), rank)


def single_rank_engine() -> Engine:
    """Make an engine of one rank, who has nobody to meet."""
    return LocalEngine(_Hub(1), 0)


def _enter_hub(store: Store, rank: int, size: int) -> _Hub:
    if rank == 0:
        name = uuid.uuid4().hex
        _hubs[name] = _Hub(size)
        store.set("hub", name)
    else:
        name = store.get("hub").decode()
    hub = _hubs[name]
    hub.threads[rank] = threading.current_thread()
    if store.add("entered", 1) == size:
        del _hubs[name]  # from here on the engines keep it
    return hub


TRAITS = Traits(
    compares_calls=True,
    devices=frozenset({"cpu", "cuda", "meta"}),
    dtypes=frozenset(
        {
            torch.float64,
            torch.float32,
            torch.float16,
            torch.bfloat16,
            torch.complex64,
            torch.complex128,
            torch.int64,
            torch.int32,
            torch.int16,
            torch.int8,
            torch.uint8,
            torch.bool,
        }
    ),
    averages=REDUCTIONS,
    averages_all_types=True,
    ranks_are_threads=True,
    alltoall_lists=True,
    check_options=refuse_options("local"),
)
