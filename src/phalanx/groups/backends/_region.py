"""How ranks come to share memory: rank 0 offers a region, the others map it and say so.

Several kinds of memory are offered in turn, for each has places where it does not work: a memfd
needs a /proc that peers can see, /dev/shm may be too small. What everybody could map is taken, and
its name goes away at once; whatever happens later, nothing is left behind.
"""

from __future__ import annotations

import ctypes
import json
import os
import tempfile
import weakref
from bisect import insort
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import Store

from ... import _faultpoints as faultpoints
from ... import native
from ...env import usable_cores
from ...errors import InvalidState, RendezvousError

if TYPE_CHECKING:
    from ...native import _engine

__all__ = ["Slab", "share"]

GRAIN = 4096  # bytes; slab memory is handed out in pages


def share(
    store: Store,
    rank: int,
    size: int,
    *,
    sizes: _engine.Sizes | None = None,
    places: Sequence[str] | None = None,
) -> _engine.Engine:
    """Make the engine of one rank, on a region that all ranks have mapped.

    If any rank cannot, every rank raises: all come to the same end.
    """
    refusals = []
    for number, place in enumerate(places or ("memfd", "/dev/shm", tempfile.gettempdir())):
        host = _offer if rank == 0 else _accept
        engine, verdict = host(store, number, place, rank, size, sizes)
        if engine is not None:
            _watch_peers(engine, rank, verdict["pids"])
            return engine
        refusals.append(f"{place}: {verdict['why']}")
    raise RendezvousError(
        f"these {size} ranks cannot share memory; are they on one machine? {'; '.join(refusals)}"
    )


def _offer(
    store: Store, number: int, place: str, rank: int, size: int, sizes: _engine.Sizes | None
) -> tuple[_engine.Engine | None, dict[str, Any]]:
    del rank
    try:
        region = _native(size).Region.create(place, size, sizes or _native(size).Sizes())
    except RuntimeError as error:  # what nanobind makes of a system error
        verdict: dict[str, Any] = {"pids": [], "why": str(error)}
        store.set(f"offer/{number}", json.dumps(None))
        store.set(f"verdict/{number}", json.dumps(verdict))
        return None, verdict
    path, token = region.path, region.token
    engine = _native(size).Engine(region, 0, usable_cores())
    store.set(f"offer/{number}", json.dumps({"path": path, "token": str(token)}))
    answers = [json.loads(store.get(f"answer/{number}/{peer}")) for peer in range(1, size)]
    whys = [answer["why"] for answer in answers if answer["why"]]
    absent = [peer for peer in range(size) if not engine.region.present(peer)]
    if absent and not whys:
        whys.append(f"rank {absent[0]} left no token")
    verdict = {"pids": [os.getpid(), *(a["pid"] for a in answers)], "why": "; ".join(whys)}
    engine.region.unlink()
    store.set(f"verdict/{number}", json.dumps(verdict))
    return (None if whys else engine), verdict


def _accept(
    store: Store, number: int, place: str, rank: int, size: int, sizes: _engine.Sizes | None
) -> tuple[_engine.Engine | None, dict[str, Any]]:
    del place
    offer = json.loads(store.get(f"offer/{number}"))
    if faultpoints.armed:
        faultpoints.reach("shm:offered")
    engine, why = None, "nothing was offered"
    if offer is not None:
        try:
            made = _native(size)
            token = int(offer["token"])
            region = made.Region.open(offer["path"], token, size, sizes or made.Sizes())
            engine, why = made.Engine(region, rank, usable_cores()), ""
        except RuntimeError as error:
            why = f"rank {rank}: {error}"
        store.set(f"answer/{number}/{rank}", json.dumps({"pid": os.getpid(), "why": why}))
    verdict: dict[str, Any] = json.loads(store.get(f"verdict/{number}"))
    return (None if verdict["why"] else engine), verdict


def _watch_peers(engine: _engine.Engine, rank: int, pids: list[int]) -> None:
    for peer, pid in enumerate(pids):
        if pid != pids[rank]:  # threads of one process need no watching
            try:
                engine.watch(peer, os.pidfd_open(pid))
            except ProcessLookupError:
                raise RendezvousError(f"rank {peer} (pid {pid}) died while forming") from None


def _native(size: int) -> Any:
    if native.engine is None:
        raise InvalidState(native.why_missing)
    if size > native.engine.MAX_RANKS:
        raise InvalidState(f"a region has room for {native.engine.MAX_RANKS} ranks, not {size}")
    return native.engine


class Slab:
    """This rank's own part of the region, handed out as tensors."""

    def __init__(self, engine: _engine.Engine, rank: int) -> None:
        self._engine = engine
        self._base, self._size = engine.region.slab(rank)
        self._free: list[tuple[int, int]] = [(0, self._size)]
        """What is free: (offset, length), by offset, never two next to each other."""

    def allocate(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Make a tensor in shared memory; it is given back when the last view of it dies."""
        count = 1
        for extent in shape:
            count *= extent
        if count == 0:
            return torch.empty(*shape, dtype=dtype)
        length = -(-count * dtype.itemsize // GRAIN) * GRAIN
        offset = self._take(length)
        try:
            self._engine.region.reserve(self._base + offset, length)
        except RuntimeError as error:
            self._give_back(offset, length)
            raise InvalidState(
                f"no shared memory for {length} bytes: {error}. Free some tensors of "
                "group.allocate, or give the machine (or container) more memory"
            ) from error
        buffer = (ctypes.c_char * (count * dtype.itemsize)).from_address(self._base + offset)
        weakref.finalize(buffer, self._release, offset, length)
        return torch.frombuffer(buffer, dtype=dtype, count=count).view(*shape)

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
        self._engine.region.give_back(self._base + offset, length)
        self._give_back(offset, length)

    def _give_back(self, offset: int, length: int) -> None:
        insort(self._free, (offset, length))
        merged: list[tuple[int, int]] = []
        for start, room in self._free:
            if merged and sum(merged[-1]) == start:
                merged[-1] = (merged[-1][0], merged[-1][1] + room)
            else:
                merged.append((start, room))
        self._free = merged
