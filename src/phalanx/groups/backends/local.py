"""Local: ranks are threads of one process.

The last rank to arrive does the work for all (`_reference` has the arithmetic), so no thread
waits inside a call and nothing depends on the order of arrival. Slow and exact: the other
backends are tested against it.

`_Hub._lock` guards bookkeeping only; tensors are touched outside of it.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import Store

from .._engine import (
    REAL_DTYPES,
    REDUCTIONS,
    TRANSFERS_IN_FLIGHT,
    CallFailed,
    Engine,
    EngineStopped,
    PythonWork,
    RankCall,
    Traits,
    peer_left,
)
from .._timing import default_timing
from .._worker_threads import run_on_worker
from . import _reference as reference
from . import refuse_options

Tensors = list[Tensor]
Function = Callable[[reference.Arguments], None]


class _Slot:
    """One collective: the arguments of the ranks that have arrived."""

    def __init__(self) -> None:
        self.arrived: dict[int, tuple[Function, tuple[Any, ...], PythonWork]] = {}

    def run(self) -> None:
        functions = {function for function, _, _ in self.arrived.values()}
        error: Exception | None = None
        try:
            if len(functions) > 1:
                raise RuntimeError("ranks called different operations")
            with torch.no_grad():
                (function,) = functions
                function({rank: self.arrived[rank][1] for rank in sorted(self.arrived)})
        except CallFailed as caught:
            error = caught
        except (RuntimeError, ValueError, IndexError) as caught:
            error = RuntimeError(str(caught))
        self.finish(error)

    def finish(self, error: Exception | None) -> None:
        """Complete the call on all ranks, unless it is complete."""
        for _, _, work in self.arrived.values():
            # Callbacks of another rank's future may call that rank's group, so they must not run on
            # this thread, which is within a call itself.
            if work.has_future:
                run_on_worker(partial(work.finish, error))
            else:
                work.finish(error)


@dataclass(frozen=True, eq=False)
class _PendingTransfer:
    """One side of a transfer that waits for the other."""

    is_send: bool
    rank: int
    peer: int | None  # None for a receive from any rank
    tag: int
    tensor: Tensor
    work: PythonWork

    def matches(self, other: _PendingTransfer) -> bool:
        fits = self.peer in (None, other.rank) and other.peer in (None, self.rank)
        return fits and self.tag == other.tag and self.is_send != other.is_send


class _Hub:
    """The state that the threads of one group share."""

    def __init__(self, size: int) -> None:
        self.threads: dict[int, threading.Thread] = {}
        self._size = size
        self._lock = threading.Lock()  # guards everything below
        self._rejoined = threading.Condition(self._lock)
        self._slots: dict[int, _Slot] = {}
        self._declared: dict[int, tuple[str, RankCall, set[int]]] = {}
        """By sequence number: what the first rank to arrive calls, and the ranks that compared."""
        self._transfers: list[_PendingTransfer] = []
        self._left_at: dict[int, int] = {}  # ranks that have left: the first call without them
        self._waiting: dict[int, tuple[int, int]] = {}
        """Ranks in `rejoin`, with the numbers of their last call here and in the group."""
        self._rejoins = 0
        self._agreed = (0, 0)
        self._aborted = False

    def arrive(
        self, engine: LocalEngine, function: Function, arguments: tuple[Any, ...]
    ) -> PythonWork:
        """Arrive at a collective; the last rank carries it out."""
        work = PythonWork([])
        rank = engine.rank
        # From now on, the end of this thread is the death of this rank.
        self.threads[rank] = threading.current_thread()
        complete: _Slot | None = None
        try:
            with self._lock:
                if self._aborted:
                    return _stopped(work)
                sequence = engine.sequence + 1
                slot = self._slots.setdefault(sequence, _Slot())
                is_last = len(slot.arrived) + 1 == len(self._members(sequence))
                # The next lines call no function, so no signal is handled in between.
                slot.arrived[rank] = (function, arguments, work)
                engine.sequence = sequence
                engine.started_works += [work]
                if is_last:
                    complete = slot
                    del self._slots[sequence]
            if complete is not None:
                complete.run()
        except BaseException:
            if complete is not None:  # all wait for this rank
                complete.finish(_interrupted(rank))
            raise
        return work

    def members(self) -> list[int]:
        with self._lock:
            return [rank for rank in range(self._size) if rank not in self._left_at]

    def leave(self, rank: int, sequence: int) -> str:
        """Take no part from a call on, and carry out calls that waited only for this rank.

        Does nothing while a transfer with a member is in flight; returns what is.
        """
        with self._lock:
            others = {post.peer for post in self._transfers if post.rank == rank}
            if others & (set(range(self._size)) - set(self._left_at)):
                return TRANSFERS_IN_FLIGHT
            self._left_at[rank] = sequence
            complete = {
                number: slot
                for number, slot in self._slots.items()
                if len(slot.arrived) == len(self._members(number))
            }
            for number in complete:
                del self._slots[number]
        for number in sorted(complete):
            complete[number].run()
        return ""

    def announce_rejoin(self, rank: int, position: tuple[int, int]) -> int:
        """Register a rank that rejoins; the last completes it. Returns the round to wait for."""
        with self._lock:
            round_number = self._rejoins
            self._waiting[rank] = position
            if len(self._waiting) == self._size:
                ends, calls = zip(*self._waiting.values(), strict=True)
                self._agreed = max(ends), max(calls)
                self._rejoins += 1
                self._waiting.clear()
                self._left_at.clear()
                self._declared.clear()
                self._rejoined.notify_all()
        return round_number

    def await_all(self, round_number: int, seconds: float) -> tuple[int, int] | None:
        """Wait until all have rejoined, and return where they continue; None if not yet."""
        until = time.monotonic() + seconds
        step = default_timing().poll_interval
        with self._lock:
            while self._rejoins == round_number and not self._aborted:
                missing = [each for rank, each in self.threads.items() if rank not in self._waiting]
                remaining = until - time.monotonic()
                if remaining <= 0 or not all(thread.is_alive() for thread in missing):
                    break
                self._rejoined.wait(min(remaining, step))  # a thread that ends does not notify
            return self._agreed if self._rejoins > round_number else None

    def missing_in_rejoin(self) -> list[int]:
        with self._lock:
            return [rank for rank in range(self._size) if rank not in self._waiting]

    def _members(self, sequence: int) -> list[int]:
        return [r for r in range(self._size) if self._left_at.get(r, sequence + 1) > sequence]

    def compare_call(self, sequence: int, key: str, side: RankCall) -> RankCall | None:
        """Compare with the first rank to arrive, and return its call if it differs."""
        with self._lock:
            first, call, compared = self._declared.setdefault(sequence, (key, side, set()))
            if compared == {side.rank}:  # it was interrupted, and calls again
                first, call, compared = self._declared[sequence] = key, side, set()
            compared.add(side.rank)
            if len(compared) == len(self._members(sequence)):
                del self._declared[sequence]
        return None if first == key else call

    def abort(self) -> None:
        with self._lock:
            self._aborted = True
            works = [work for slot in self._slots.values() for _, _, work in slot.arrived.values()]
            works += [post.work for post in self._transfers]
            self._slots.clear()
            self._transfers.clear()
            self._rejoined.notify_all()
        for work in works:
            _stopped(work)

    def transfer(self, post: _PendingTransfer) -> PythonWork:
        """Send to a matching receive or receive from a matching send, or wait for one."""
        other: _PendingTransfer | None = None
        try:
            with self._lock:
                if self._aborted:
                    return _stopped(post.work)
                other = next((other for other in self._transfers if other.matches(post)), None)
                if other is None:
                    post.work.cancel = partial(self._withdraw, post)
                    self._transfers.append(post)
                    return post.work
                self._transfers.remove(other)
            _deliver(*((post, other) if post.is_send else (other, post)))
        except BaseException:
            if other is not None:  # it waits for this rank
                post.work.finish(_interrupted(post.rank))
                other.work.finish(_interrupted(post.rank))
            raise
        return post.work

    def _withdraw(self, post: _PendingTransfer) -> None:
        with self._lock:
            self._transfers = [other for other in self._transfers if other is not post]
        if (peer := post.peer) is not None:
            post.work.finish(peer_left(peer))


_hubs: dict[str, _Hub] = {}
"""Hubs that some threads have not entered yet, by a name that is passed through the store."""


def _collective(function: Function) -> Callable[..., PythonWork]:
    """Return the method of `LocalEngine` that runs a collective of `_reference`."""

    def method(engine: LocalEngine, *arguments: Any) -> PythonWork:
        return engine._hub.arrive(engine, function, arguments)

    return method


class LocalEngine:
    """The engine of one rank, which is a thread."""

    def __init__(self, hub: _Hub, rank: int) -> None:
        self._hub = hub
        self.rank = rank
        self.compare_call = hub.compare_call
        self.members = hub.members
        self.missing_in_rejoin = hub.missing_in_rejoin
        self.abort_calls = hub.abort  # stops every call in flight, on all ranks
        self.started_works: list[Any] = []
        self.sequence = 0  # of the last collective that it has started
        self._round: int | None = None  # of `rejoin` that this rank waits for, if it does

    def dead_ranks(self) -> list[int]:
        return [rank for rank, thread in self._hub.threads.items() if not thread.is_alive()]

    def leave(self) -> str:
        return self._hub.leave(self.rank, self.sequence + 1)

    def rejoin(self, calls: int, seconds: float) -> tuple[str, int]:
        self._hub.threads[self.rank] = threading.current_thread()
        if self._round is None:
            self._round = self._hub.announce_rejoin(self.rank, (self.sequence, calls))
            return "waiting", 0
        agreed = self._hub.await_all(self._round, seconds)
        if agreed is None:
            return "waiting", 0
        self._round = None
        self.sequence, most = agreed
        return "entered", most

    allreduce = allreduce_coalesced = _collective(reference.allreduce)
    reduce = _collective(reference.reduce)
    broadcast = _collective(reference.broadcast)
    allgather = _collective(reference.allgather)
    _allgather_base = _collective(reference.allgather_base)
    gather = _collective(reference.gather)
    scatter = _collective(reference.scatter)
    reduce_scatter = _collective(reference.reduce_scatter)
    _reduce_scatter_base = _collective(reference.reduce_scatter_base)
    alltoall_base = _collective(reference.alltoall_base)
    alltoall = _collective(reference.alltoall)
    barrier = _collective(reference.barrier)

    def send(self, tensors: Tensors, peer: int, tag: int) -> PythonWork:
        post = _PendingTransfer(True, self.rank, peer, tag, tensors[0], PythonWork([]))
        return self._hub.transfer(post)

    def recv(self, tensors: Tensors, peer: int | None, tag: int) -> PythonWork:
        post = _PendingTransfer(False, self.rank, peer, tag, tensors[0], PythonWork(tensors))
        return self._hub.transfer(post)

    def recv_anysource(self, tensors: Tensors, tag: int) -> PythonWork:
        return self.recv(tensors, None, tag)


def _deliver(send: _PendingTransfer, receive: _PendingTransfer) -> None:
    error: Exception | None = None
    try:
        reference.copy_into(receive.tensor, send.tensor)
    except (RuntimeError, ValueError) as caught:
        error = RuntimeError(str(caught))
    receive.work.finish(error, source=send.rank)
    send.work.finish(error)


def _interrupted(rank: int | None) -> Exception:
    return RuntimeError(f"rank {rank} was interrupted during the call")


def _stopped(work: PythonWork) -> PythonWork:
    work.finish(EngineStopped())
    return work


def make(
    store: Store, rank: int, world_size: int, timeout: timedelta, device: torch.device, **_: object
) -> Engine:
    """Create the engine of one thread."""
    del timeout, device
    if rank == 0:
        name = uuid.uuid4().hex
        _hubs[name] = _Hub(world_size)
        store.set("hub", name)
    else:
        name = store.get("hub").decode()
    hub = _hubs[name]
    hub.threads[rank] = threading.current_thread()
    if store.add("entered", 1) == world_size:
        del _hubs[name]  # the engines keep it
    return LocalEngine(hub, rank)


def single_rank_engine() -> Engine:
    """Create the engine of a group of one rank."""
    return LocalEngine(_Hub(1), 0)


TRAITS = Traits(
    detects_mismatch=True,
    devices=frozenset({"cpu", "cuda", "meta"}),
    dtypes=REAL_DTYPES | {torch.bool, torch.complex64, torch.complex128},
    averages=REDUCTIONS,
    averages_all_types=True,
    ranks_are_threads=True,
    alltoall_lists=True,
    check_options=refuse_options("local"),
)
