"""The shared memory region of a group, and the tensors allocated in it.

Rank 0 creates a region and the other ranks map it: `share_region` through the store, or
`RegionOffer` for ranks that already know each other's processes. Several kinds of memory are
tried in turn, since each fails somewhere: a memfd needs a /proc that peers can see, /dev/shm may
be too small. The name of the region is removed as soon as all ranks have mapped it, so nothing is
left behind after `kill -9`.

Either all ranks map the same region or all raise. Tensors are freed on any thread and at any
line, so their finalizers may only append to a deque.
"""

from __future__ import annotations

import ctypes
import math
import os
import tempfile
import threading
import time
import weakref
from bisect import insort
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch._C._distributed_c10d import Store

from ... import _faultpoints as faultpoints
from ... import native
from ...env import usable_cores
from ...errors import InvalidState, PeerLost, RendezvousError, RendezvousTimeout
from .._peers import PeerProcess
from .._store import BlockingStoreClient, from_json, to_json
from .._timing import default_timing
from .._worker_threads import is_abandoned

if TYPE_CHECKING:
    from ...native._engine import Engine as NativeEngine
    from ...native._engine import Process, Region, Sizes


T = TypeVar("T")

OVERCOMMIT_SETTING = Path("/proc/sys/vm/overcommit_memory")
PAGE_BYTES = 4096  # slab memory is allocated in pages

CoreLimit = tuple[list[int], int]
"""The cores that a process may run on, and how many of them its cgroup lets it keep busy."""


def share_region(
    store: Store,
    rank: int,
    size: int,
    *,
    sizes: Sizes | None = None,
    places: Sequence[str] | None = None,
    timeout: timedelta = timedelta(minutes=5),
) -> NativeEngine:
    """Create the engine of one rank, on a region that all ranks have mapped.

    If any rank cannot map it, every rank raises.
    """
    setup = _RegionSetup(store, rank, size, sizes, timeout)
    failures = []
    for number, place in enumerate(places or ("memfd", "/dev/shm", tempfile.gettempdir())):
        engine, result = setup.offer(number, place) if rank == 0 else setup.accept(number)
        if engine is not None:
            engine.set_cores(result.cores)
            watch_peers(engine, rank, result.processes)
            return engine
        failures.append(f"{place}: {result.error}")
    raise RendezvousError(
        f"{size} ranks cannot share memory ({'; '.join(failures)}). Check that all ranks are on "
        "one machine, or use backend 'gloo'"
    )


class _Answer(NamedTuple):
    process: PeerProcess
    cores: CoreLimit
    error: str  # why this rank could not map the region


@dataclass
class _RegionResult:
    processes: list[PeerProcess] = field(default_factory=list)
    cores: int = 1
    error: str = ""
    lost: list[int] = field(default_factory=list)


class _RegionSetup:
    """One rank's part in mapping a region; ranks exchange messages through the store.

    A rank that is present but then fails to watch the others tells them in the rendezvous.
    """

    def __init__(
        self, store: Store, rank: int, size: int, sizes: Sizes | None, timeout: timedelta
    ) -> None:
        self._store = BlockingStoreClient(store)
        self._rank = rank
        self._size = size
        self._sizes = sizes
        self._timeout = timeout.total_seconds()
        self._deadline = time.monotonic() + self._timeout
        self._poll_interval = default_timing().poll_interval
        self._process = PeerProcess.current()
        self._write(f"process/{rank}", self._process)

    def offer(self, number: int, place: str) -> tuple[NativeEngine | None, _RegionResult]:
        """Create a region on rank 0 and wait until the others have tried to map it."""
        size = self._size
        result = _RegionResult()
        try:
            region = make_region(place, size, self._sizes)
        except (RuntimeError, OSError) as error:  # nanobind turns a system error into RuntimeError
            result.error = str(error)
            self._write(f"offer/{number}", {})
            self._write(f"result/{number}", result)
            return None, result
        offer = _offer_of(region)  # the engine takes the region
        engine = _require_native(size).Engine(region, 0, usable_cores())
        engine.mark_present()
        self._write(f"offer/{number}", offer)
        if faultpoints.armed:
            faultpoints.reach("form:mapped")
        try:
            others = range(1, size)
            answers = [self._await(f"answer/{number}/{peer}", peer, _Answer) for peer in others]
            result.processes = [self._process, *(answer.process for answer in answers)]
            result.cores = shared_core_count([core_limit(), *(each.cores for each in answers)])
            absent = [peer for peer in range(size) if not engine.region.present(peer)]
            if errors := [answer.error for answer in answers if answer.error]:
                result.error = "; ".join(errors)
            elif absent:
                result.error = f"rank {absent[0]} mapped other memory"
            elif len({process.machine for process in result.processes}) > 1:
                result.error = "ranks in different pid namespaces cannot see each other die"
        except Exception as error:
            result.error = str(error)
            result.lost = list(getattr(error, "lost", ()))
            raise
        finally:
            engine.region.unlink()
            self._write(f"result/{number}", result)
        return (None if result.error else engine), result

    def accept(self, number: int) -> tuple[NativeEngine | None, _RegionResult]:
        offer = self._await(f"offer/{number}", 0, dict[str, str])
        engine = None
        if offer:
            error = ""
            try:
                region = open_region(offer, self._size, self._sizes)
                engine = _require_native(self._size).Engine(region, self._rank, usable_cores())
                engine.mark_present()
            except RuntimeError as caught:
                error = f"rank {self._rank}: {caught}"
            if faultpoints.armed:
                faultpoints.reach("form:mapped")
            answer = _Answer(self._process, core_limit(), error)
            self._write(f"answer/{number}/{self._rank}", answer)
        try:
            result = self._await(f"result/{number}", 0, _RegionResult)
        except PeerLost:
            if engine is not None:
                with suppress(OSError):  # a memfd has no name, and a peer may have removed it
                    os.unlink(offer["path"])
            raise
        if result.lost:
            raise PeerLost(result.error, ranks=result.lost)
        return (None if result.error else engine), result

    def _write(self, key: str, data: object) -> None:
        self._store.set(key, to_json(data))

    def _await(self, key: str, rank: int, kind: type[T]) -> T:
        """Wait for a message of a rank for as long as it lives."""
        # In turns, since others use the same connection to check for deaths.
        while not self._store.await_all([key], self._poll_interval):
            if is_abandoned():
                raise RendezvousError(f"rank {self._rank} stopped waiting for shared memory")
            text = self._store.read(f"process/{rank}")
            if text is not None:
                process = from_json(text, PeerProcess)
                if process.is_dead and not self._store.has(key):
                    raise _died(rank, process)
            if time.monotonic() >= self._deadline:
                raise RendezvousTimeout(
                    f"rank {rank} did not map the shared memory within {self._timeout:g} s"
                )
        return from_json(self._store.fetch(key), kind)


@dataclass
class RegionOffer:
    """One rank's part in a region that rank 0 offers with the rendezvous result.

    For ranks that know each other's processes. `build` makes the backend's engine, given the native
    one and the number of cores that the machine's ranks share.
    """

    rank: int
    processes: Sequence[PeerProcess]
    ranks_on_machine: int
    build: Callable[[NativeEngine, int], Any]
    _region: Region = field(init=False)
    _built: Any = field(init=False)

    def make(self) -> dict[str, str] | None:
        """Create the region, in memory without a name."""
        if native.engine is None or len(self.processes) > native.engine.MAX_RANKS:
            return None
        region = make_region("memfd", len(self.processes))
        offer = _offer_of(region)
        self._enter(region)
        return offer

    def take(self, offer: dict[str, str]) -> None:
        self._enter(open_region(offer, len(self.processes)))

    def absent(self) -> list[int]:
        return [rank for rank in range(len(self.processes)) if not self._region.present(rank)]

    def engine(self) -> Any:
        self._region.unlink()
        return self._built

    def _enter(self, region: Region) -> None:
        """Create the engine, then mark this rank present.

        The mark comes last: ranks that see it go ahead, so nothing may fail after it.
        """
        if faultpoints.armed:
            faultpoints.reach("form:mapped")
        assert native.engine is not None, "it has created the region"
        engine = native.engine.Engine(region, self.rank, usable_cores())
        self._region = engine.region
        watch_peers(engine, self.rank, self.processes)
        limits = []
        quota = usable_cores(os.cpu_count())
        for pid in {process.pid for process in self.processes}:
            with suppress(ProcessLookupError):  # a death is reported elsewhere
                limits.append(core_limit(pid, quota))
        cores = shared_core_count(limits)
        # The other ranks of the parent group use the same cores.
        engine.set_cores(max(1, cores * len(self.processes) // self.ranks_on_machine))
        self._built = self.build(engine, cores)
        engine.mark_present()


def _died(rank: int, process: PeerProcess) -> PeerLost:
    return PeerLost(f"rank {rank} ({process}) died while mapping the shared memory", ranks=[rank])


def make_region(place: str, size: int, sizes: Sizes | None = None) -> Region:
    """Create a region whose memory is allocated, since touching a hole raises SIGBUS.

    Files are allocated from the start. A memfd is allocated page by page, which fails only where
    the kernel does not overcommit; there it is allocated at once, which takes time.
    """
    made = _require_native(size)
    region: Region = made.Region.create(place, size, sizes or made.Sizes())
    mode = ""
    with suppress(OSError):  # there is no /proc
        mode = OVERCOMMIT_SETTING.read_text().strip()
    if place == "memfd" and mode == "2":  # the kernel never overcommits
        descriptor = os.open(region.path, os.O_RDWR | os.O_CLOEXEC)
        try:
            _, slab = region.slab(0)  # slabs are allocated when tensors are
            os.posix_fallocate(descriptor, 0, os.fstat(descriptor).st_size - size * slab)
        finally:
            os.close(descriptor)
    return region


def _offer_of(region: Region) -> dict[str, str]:
    return {"path": region.path, "token": str(region.token)}


def open_region(offer: dict[str, str], size: int, sizes: Sizes | None = None) -> Region:
    made = _require_native(size)
    region: Region = made.Region.open(
        offer["path"], int(offer["token"]), size, sizes or made.Sizes()
    )
    return region


def core_limit(pid: int = 0, quota: int | None = None) -> CoreLimit:
    """Return the limit of a process, by default this one, whose quota the others have too."""
    return sorted(os.sched_getaffinity(pid)), quota or usable_cores(os.cpu_count())


def shared_core_count(limits: Iterable[CoreLimit]) -> int:
    """Return how many cores processes have together; each may be pinned to one of its own."""
    limits = list(limits)
    cores = {core for own, _ in limits for core in own}
    return min([len(cores), *(quota for _, quota in limits)])


_watched: WeakValueDictionary[PeerProcess, Process] = WeakValueDictionary()
"""The processes that engines here watch: one descriptor for each, however many groups."""


def watch_peers(engine: NativeEngine, rank: int, processes: Sequence[PeerProcess]) -> None:
    """Have the engine notice when a peer's process ends."""
    assert native.engine is not None, "it has created the region"
    for peer, process in enumerate(processes):
        if process.pid == processes[rank].pid:  # another thread of this process
            continue
        try:
            watched = _watched.get(process)
            if watched is None:
                watched = native.engine.Process(os.pidfd_open(process.pid))
                # Checked after the open: the pid may have been reused before it.
                if not process.has_its_pid():
                    raise ProcessLookupError
                _watched[process] = watched
            engine.watch(peer, watched)
        except ProcessLookupError:
            raise _died(peer, process) from None


def _require_native(size: int) -> Any:
    if native.engine is None:
        raise InvalidState(native.why_missing)
    if size > native.engine.MAX_RANKS:
        raise InvalidState(f"shm serves at most {native.engine.MAX_RANKS} ranks, not {size}")
    return native.engine


class Slab:
    """This rank's own part of the region, from which it allocates tensors."""

    def __init__(self, engine: NativeEngine, rank: int, ranks: int = 1) -> None:
        self._native = engine
        self._rank = rank
        self._ranks = ranks
        self._base, self._size = engine.region.slab(rank)
        self._pid = os.getpid()
        self._lock = threading.Lock()  # of `_free` and `_shared`; no other is taken under it
        self._free: list[tuple[int, int]] = [(0, self._size)]
        """Free ranges, (offset, length), ordered by offset and merged."""
        self._freed: deque[tuple[int, int]] = deque()
        """Ranges of freed tensors. Finalizers run on any thread and at any line, even within
        `allocate`, so they touch nothing else."""
        self._in_use_by_peer: deque[tuple[int, int]] = deque()
        """The same, freed while a peer may still write there: it was stopped within a call."""
        self._shared: list[tuple[int, int, Any]] = []
        """Memory that peers have tensors in: (offset, length, a flag per rank that has one)."""

    def allocate(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Create a tensor in shared memory; the memory is freed with the last view of it."""
        count = math.prod(shape)
        if count == 0:
            return torch.empty(*shape, dtype=dtype)
        length = _round_up_to_pages(count * dtype.itemsize)
        offset = self._claim(length)
        try:
            buffer = (ctypes.c_char * (count * dtype.itemsize)).from_address(self._base + offset)
            ended = weakref.finalize(buffer, self._release, offset, length)
        except MemoryError:
            self._release(offset, length)
            raise
        ended.atexit = False  # peers may still be reading, and the kernel frees everything anyway
        return torch.frombuffer(buffer, dtype=dtype, count=count).view(*shape)

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor is in this rank's part of the region."""
        return 0 <= tensor.data_ptr() - self._base < self._size

    def offset_of(self, tensor: Tensor) -> int:
        """Return where a tensor of `allocate` is, for `map_peer` of another rank."""
        return tensor.data_ptr() - self._base

    def map_peer(self, owner: int, offset: int, nbytes: int) -> Tensor:
        """Return bytes in another rank's part of the region.

        They keep the region mapped, but do not keep the owner from freeing them: use them only if
        it cannot, because it has died.
        """
        start = self._native.region.slab(owner)[0] + offset
        buffer = (ctypes.c_char * nbytes).from_address(start)
        weakref.finalize(buffer, _keep, self).atexit = False
        return torch.frombuffer(buffer, dtype=torch.uint8)

    def dead_ranks(self) -> list[int]:
        """List the ranks whose process has ended: what they have stored is final."""
        return self._native.dead_ranks()

    def allocate_shared(self, nbytes: int) -> int:
        """Allocate memory that every rank will `map_shared`, and return its offset.

        It is freed some time after the last rank has dropped its tensor.
        """
        data = _round_up_to_pages(nbytes)
        length = data + _round_up_to_pages(self._ranks)
        offset = self._claim(length)
        holders = (ctypes.c_uint8 * self._ranks).from_address(self._base + offset + data)
        holders[:] = [1] * self._ranks
        with self._lock:
            self._shared.append((offset, length, holders))
        return offset

    def map_shared(self, owner: int, offset: int, nbytes: int) -> Tensor:
        """Return a tensor in memory that a rank has allocated for all."""
        start = self._native.region.slab(owner)[0] + offset
        holder = ctypes.c_uint8.from_address(start + _round_up_to_pages(nbytes) + self._rank)
        buffer = (ctypes.c_char * nbytes).from_address(start)
        weakref.finalize(buffer, self._drop_reference, holder).atexit = False
        return torch.frombuffer(buffer, dtype=torch.uint8)

    def _drop_reference(self, holder: Any) -> None:
        # All reads of the memory have been waited for, so they come before this store.
        if os.getpid() == self._pid:
            holder.value = 0

    def _claim(self, length: int) -> int:
        with self._lock:
            self._collect()
            place = next((i for i, (_, free) in enumerate(self._free) if free >= length), None)
            if place is None:
                raise InvalidState(
                    f"no room for {length} bytes in this rank's {self._size} bytes of shared "
                    "memory. Free tensors created with group.allocate"
                )
            offset, free = self._free[place]
            remaining = [(offset + length, free - length)] if free > length else []
            self._free[place : place + 1] = remaining
        try:
            self._native.region.reserve(self._base + offset, length)
        except BaseException as error:
            self._release(offset, length)
            if not isinstance(error, RuntimeError):
                raise
            raise InvalidState(
                f"no shared memory for {length} bytes: {error}. Free tensors created with "
                "group.allocate, or give the machine or container more memory"
            ) from error
        return offset

    def _release(self, offset: int, length: int) -> None:
        if os.getpid() != self._pid:  # a forked child's copy of the parent's tensor
            return
        if self._native.is_quiescent:
            self._native.region.release(self._base + offset, length)
            self._freed.append((offset, length))
        else:
            self._in_use_by_peer.append((offset, length))

    def _collect(self) -> None:
        """Free shared memory that no living rank has a tensor in, and merge the free ranges."""
        gone = set(self._native.dead_ranks()) if self._shared else set()
        for block in list(self._shared):
            offset, length, holders = block
            if not any(held and rank not in gone for rank, held in enumerate(holders)):
                self._shared.remove(block)
                self._release(offset, length)
        for _ in range(len(self._in_use_by_peer)):
            self._release(*self._in_use_by_peer.popleft())
        if not self._freed:
            return
        while self._freed:
            insort(self._free, self._freed.popleft())
        merged: list[tuple[int, int]] = []
        for start, available in self._free:
            if merged and sum(merged[-1]) == start:
                merged[-1] = (merged[-1][0], merged[-1][1] + available)
            else:
                merged.append((start, available))
        self._free = merged


def _keep(_: object) -> None:
    """Do nothing. A finalizer with this callback keeps its argument alive."""


def _round_up_to_pages(nbytes: int) -> int:
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES
