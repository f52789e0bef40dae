"""The shared memory region of a group, and the tensors allocated in it.

Rank 0 creates a region and the other ranks map it. Several kinds of memory are tried in turn,
since each fails somewhere: a memfd needs a /proc that peers can see, /dev/shm may be too small.
The name of the region is removed as soon as all ranks have mapped it, so nothing is left behind
after `kill -9`.

Either all ranks map the same region or all raise. Tensors die on any thread and at any line, so
their finalizers may only append to a deque.
"""

from __future__ import annotations

import ctypes
import json
import os
import tempfile
import threading
import time
import weakref
from bisect import insort
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch._C._distributed_c10d import Store

from ... import _faultpoints as faultpoints
from ... import native
from ...env import usable_cores
from ...errors import InvalidState, PeerLost, RendezvousError, RendezvousTimeout
from .._peers import Member
from .._store_client import BlockingStoreClient, is_abandoned

if TYPE_CHECKING:
    from ...native import _engine


PEER_POLL_INTERVAL = 0.05  # seconds between two looks for a peer's death
OVERCOMMIT_SETTING = Path("/proc/sys/vm/overcommit_memory")
PAGE_BYTES = 4096  # bytes; slab memory is handed out in pages


def share_region(
    store: Store,
    rank: int,
    size: int,
    *,
    sizes: _engine.Sizes | None = None,
    places: Sequence[str] | None = None,
    timeout: timedelta = timedelta(minutes=5),
) -> _engine.Engine:
    """Make the engine of one rank, on a region that all ranks have mapped.

    If any rank cannot, every rank raises: all come to the same end.
    """
    peers = _PeerMessages(store, timeout)
    store.set(f"here/{rank}", json.dumps(Member.here().to_json()))
    refusals = []
    for number, place in enumerate(places or ("memfd", "/dev/shm", tempfile.gettempdir())):
        host = _offer_region if rank == 0 else _accept_region
        engine, verdict = host(peers, number, place, rank, size, sizes)
        if engine is not None:
            engine.set_cores(verdict["cores"])
            watch_peers(engine, rank, [Member.from_json(told) for told in verdict["members"]])
            return engine
        refusals.append(f"{place}: {verdict['why']}")
    raise RendezvousError(
        f"these {size} ranks cannot share memory; are they on one machine? {'; '.join(refusals)}"
    )


class _PeerMessages:
    """What the ranks tell each other until they share memory."""

    def __init__(self, store: Store, timeout: timedelta) -> None:
        self._store = BlockingStoreClient(store)
        self._until = time.monotonic() + timeout.total_seconds()

    def tell(self, key: str, data: object) -> None:
        """Say something to whoever waits for it."""
        self._store.set(key, json.dumps(data))

    def hear(self, key: str, rank: int) -> Any:
        """Wait for what a rank has to say, for as long as it lives.

        In turns, for others ask on the same connection whether somebody has died.
        """
        while not self._store.await_all([key], PEER_POLL_INTERVAL):
            self._look_at(rank, key)
        return json.loads(self._store.fetch(key))

    def _look_at(self, rank: int, key: str) -> None:
        if is_abandoned():
            raise RendezvousError("sharing memory was given up by this rank")
        member = self.member(rank)
        if member is not None and member.is_dead and not self._store.has(key):
            raise PeerLost(f"rank {rank} ({member}) died while forming", ranks=[rank])
        if time.monotonic() >= self._until:
            raise RendezvousTimeout(f"rank {rank} did not come to share memory in time")

    def member(self, rank: int) -> Member | None:
        """Tell which process a rank is, once it has said so."""
        told = self._store.read(f"here/{rank}")
        return None if told is None else Member.from_json(json.loads(told))


def _offer_region(
    peers: _PeerMessages, number: int, place: str, rank: int, size: int, sizes: _engine.Sizes | None
) -> tuple[_engine.Engine | None, dict[str, Any]]:
    del rank
    verdict: dict[str, Any] = {"members": [], "cores": 1, "why": "", "lost": []}
    try:
        region = make_region(place, size, sizes)
    except (RuntimeError, OSError) as error:  # nanobind makes a RuntimeError of a system error
        verdict["why"] = str(error)
        peers.tell(f"offer/{number}", None)
        peers.tell(f"verdict/{number}", verdict)
        return None, verdict
    path, token = region.path, region.token
    engine = _require_native(size).Engine(region, 0, usable_cores())
    engine.mark_present()
    peers.tell(f"offer/{number}", {"path": path, "token": str(token)})
    if faultpoints.armed:
        faultpoints.reach("form:mapped")
    try:
        answers = [peers.hear(f"answer/{number}/{peer}", peer) for peer in range(1, size)]
        verdict["members"] = [Member.here().to_json(), *(each["member"] for each in answers)]
        verdict["cores"] = _shared_core_count(
            [_own_cores(), *(answer["cores"] for answer in answers)]
        )
        verdict["why"] = _objections(engine, answers, peers, size)
    except Exception as error:
        verdict.update(why=str(error), lost=getattr(error, "lost", ()))
        raise
    finally:
        engine.region.unlink()
        peers.tell(f"verdict/{number}", verdict)
    return (None if verdict["why"] else engine), verdict


def make_region(place: str, size: int, sizes: _engine.Sizes | None = None) -> _engine.Region:
    """Make a region whose memory is there, for to touch what is not would be a SIGBUS.

    Files have theirs from the start. A memfd gets it page by page, which fails only where the
    kernel promises no more than it has: there it is taken at once, though that takes time.
    """
    region: _engine.Region = _require_native(size).Region.create(
        place, size, sizes or _require_native(size).Sizes()
    )
    if place == "memfd" and _never_overcommits():
        descriptor = os.open(region.path, os.O_RDWR | os.O_CLOEXEC)
        try:
            _, slab = region.slab(0)  # which takes its memory when tensors are made in it
            os.posix_fallocate(descriptor, 0, os.fstat(descriptor).st_size - size * slab)
        finally:
            os.close(descriptor)
    return region


def _never_overcommits() -> bool:
    try:
        return OVERCOMMIT_SETTING.read_text().strip() == "2"
    except OSError:
        return False


def _own_cores() -> list[list[int]]:
    """List the cores that this rank may run on, and how many its cgroup lets it keep busy."""
    cores = sorted(os.sched_getaffinity(0))
    return [cores, [usable_cores(os.cpu_count())]]


def _shared_core_count(ranks: list[list[list[int]]]) -> int:
    """Tell how many cores ranks have between them; each alone may be kept to one of its own."""
    cores = {core for own, _ in ranks for core in own}
    return min([len(cores), *(most for _, [most] in ranks)])


def _objections(
    engine: _engine.Engine, answers: list[dict[str, Any]], peers: _PeerMessages, size: int
) -> str:
    """Say what keeps ranks from sharing the region that was offered; nothing, in the best case."""
    whys = [answer["why"] for answer in answers if answer["why"]]
    absent = [peer for peer in range(size) if not engine.region.present(peer)]
    if absent and not whys:
        whys.append(f"rank {absent[0]} left no token")
    machines = {member.machine for peer in range(size) if (member := peers.member(peer))}
    if len(machines) > 1 and not whys:
        whys.append("ranks live in different pid namespaces, and could not see each other die")
    return "; ".join(whys)


def _accept_region(
    peers: _PeerMessages, number: int, place: str, rank: int, size: int, sizes: _engine.Sizes | None
) -> tuple[_engine.Engine | None, dict[str, Any]]:
    del place
    offer = peers.hear(f"offer/{number}", 0)
    engine, why = None, "nothing was offered"
    if offer is not None:
        try:
            made = _require_native(size)
            token = int(offer["token"])
            region = made.Region.open(offer["path"], token, size, sizes or made.Sizes())
            engine, why = made.Engine(region, rank, usable_cores()), ""
            engine.mark_present()
        except RuntimeError as error:
            why = f"rank {rank}: {error}"
        if faultpoints.armed:
            faultpoints.reach("form:mapped")
        answer = {"member": Member.here().to_json(), "cores": _own_cores(), "why": why}
        peers.tell(f"answer/{number}/{rank}", answer)
    try:
        verdict: dict[str, Any] = peers.hear(f"verdict/{number}", 0)
    except PeerLost:
        if offer is not None and engine is not None:
            _remove_name(offer["path"])
        raise
    if verdict["lost"]:
        raise PeerLost(verdict["why"], ranks=verdict["lost"])
    return (None if verdict["why"] else engine), verdict


def _remove_name(path: str) -> None:
    """Remove the name of a region whose maker did not live to do so."""
    with suppress(OSError):  # a memfd has none, and another rank may have been here first
        os.unlink(path)


_processes: WeakValueDictionary[Member, _engine.Process] = WeakValueDictionary()
"""The processes that engines of this one watch: one descriptor for each, however many groups."""


def watch_peers(engine: _engine.Engine, rank: int, members: Sequence[Member]) -> None:
    """Have the engine notice when a peer's process ends."""
    for peer, member in enumerate(members):
        if member.pid != members[rank].pid:  # threads of one process need no watching
            try:
                engine.watch(peer, _process_of(member))
            except ProcessLookupError:
                told = f"rank {peer} ({member}) died while forming"
                raise PeerLost(told, ranks=[peer]) from None


def _process_of(member: Member) -> _engine.Process:
    known = _processes.get(member)
    if known is None:
        assert native.engine is not None, "it has made the region"
        known = native.engine.Process(os.pidfd_open(member.pid))
        # Looked at last: the descriptor is of whoever has the pid, and that may be another by now.
        if not member.has_its_pid():
            raise ProcessLookupError
        _processes[member] = known
    return known


def _require_native(size: int) -> Any:
    if native.engine is None:
        raise InvalidState(native.why_missing)
    if size > native.engine.MAX_RANKS:
        raise InvalidState(f"a region has room for {native.engine.MAX_RANKS} ranks, not {size}")
    return native.engine


class Slab:
    """This rank's own part of the region, handed out as tensors."""

    def __init__(self, engine: _engine.Engine, rank: int, ranks: int = 1) -> None:
        self._engine = engine
        self._rank, self._ranks = rank, ranks
        self._base, self._size = engine.region.slab(rank)
        self._pid = os.getpid()
        self._lock = threading.Lock()  # over `_release_number`; nothing else is locked under it
        self._free: list[tuple[int, int]] = [(0, self._size)]
        """What is free: (offset, length), by offset, never two next to each other."""
        self._returned: deque[tuple[int, int]] = deque()
        """What dead tensors have left. They die on any thread and at any line, even in the middle
        of `allocate`, so this is all that their end may touch."""
        self._suspect: deque[tuple[int, int]] = deque()
        """The same, while a peer was stopped in the middle of a share: it may yet store there."""
        self._common: list[tuple[int, int, Any]] = []
        """Memory that peers have tensors of too: (offset, length, a byte of each who has)."""

    def allocate(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Make a tensor in shared memory; it is given back when the last view of it dies."""
        count = 1
        for extent in shape:
            count *= extent
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
        ended.atexit = False  # peers may still be reading, and the kernel frees it all anyway
        return torch.frombuffer(buffer, dtype=dtype, count=count).view(*shape)

    def allocate_shared(self, nbytes: int) -> int:
        """Set memory aside that every rank will `reach`, and tell where; it is given back, some
        time later, when nobody has a tensor of it any more."""
        data = _round_up_to_pages(nbytes)
        length = data + _round_up_to_pages(self._ranks)
        offset = self._claim(length)
        holders = (ctypes.c_uint8 * self._ranks).from_address(self._base + offset + data)
        holders[:] = [1] * self._ranks
        with self._lock:
            self._common.append((offset, length, holders))
        return offset

    def reach(self, owner: int, offset: int, nbytes: int) -> Tensor:
        """Make a tensor of memory that a rank has set aside for all."""
        base, _ = self._engine.region.slab(owner)
        holder = ctypes.c_uint8.from_address(
            base + offset + _round_up_to_pages(nbytes) + self._rank
        )
        buffer = (ctypes.c_char * nbytes).from_address(base + offset)
        weakref.finalize(buffer, self._let_go, holder).atexit = False
        return torch.frombuffer(buffer, dtype=torch.uint8)

    def _let_go(self, holder: Any) -> None:
        # Whatever read the memory has been waited for, so that its reads come before this store.
        if os.getpid() == self._pid:
            holder.value = 0

    def _claim(self, length: int) -> int:
        with self._lock:
            self._collect()
            offset = self._take(length)
        try:
            self._engine.region.reserve(self._base + offset, length)
        except BaseException as error:
            self._release(offset, length)
            if not isinstance(error, RuntimeError):
                raise
            raise InvalidState(
                f"no shared memory for {length} bytes: {error}. Free some tensors of "
                "group.allocate, or give the machine (or container) more memory"
            ) from error
        return offset

    def _take(self, length: int) -> int:
        for i, (offset, room) in enumerate(self._free):
            if room >= length:
                self._free[i : i + 1] = [(offset + length, room - length)] if room > length else []
                return offset
        raise InvalidState(
            f"no room for {length} bytes in this rank's {self._size} bytes of shared memory: "
            "free some tensors of group.allocate"
        )

    def _release(self, offset: int, length: int) -> None:
        if os.getpid() != self._pid:  # a forked child's copy of a tensor that the parent still has
            return
        if self._engine.is_quiescent:
            self._engine.region.release(self._base + offset, length)
            self._returned.append((offset, length))
        else:
            self._suspect.append((offset, length))

    def _collect(self) -> None:
        """Join what has been returned to what is free."""
        if self._common:
            self._collect_common()
        for _ in range(len(self._suspect)):
            self._release(*self._suspect.popleft())
        if not self._returned:
            return
        while self._returned:
            insort(self._free, self._returned.popleft())
        merged: list[tuple[int, int]] = []
        for start, room in self._free:
            if merged and sum(merged[-1]) == start:
                merged[-1] = (merged[-1][0], merged[-1][1] + room)
            else:
                merged.append((start, room))
        self._free = merged

    def _collect_common(self) -> None:
        """Give back what nobody has any more, or only who is dead."""
        gone = set(self._engine.dead())
        kept = []
        for offset, length, holders in self._common:
            if any(held and rank not in gone for rank, held in enumerate(holders)):
                kept.append((offset, length, holders))
            else:
                self._release(offset, length)
        self._common = kept


def _round_up_to_pages(nbytes: int) -> int:
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES
