"""What a barrier costs, against upstream's `TCPStoreBarrier` in the same process.

``tcp_store`` is ours of that name: it knows who is missing, deletes its keys, and agrees on the
outcome of every use. ``group`` is the barrier of a group, on ``shm``; it is for processes. As
threads, ranks share a process and its interpreter; each has a connection of its own. With more
ranks than cores most of the time is the server's, and the scheduler's.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from torch.distributed.checkpoint._experimental import barriers as upstream

from benchmarks.entry import Absent, Aim, Competitor, Competitors, SelfTimed, entry
from phalanx.checkpoint.barriers import Barrier, GroupBarrier, TCPStoreBarrier
from phalanx.testing import RankContext

PROCESSES = "2 processes"
THREADS = {"2 threads": 2, "8 threads": 8, "32 threads": 32}
SECONDS = 60


@entry(
    title="A barrier: how many times faster than upstream's TCPStoreBarrier",
    ranks=(2,),
    grid={"ranks are": [*THREADS, PROCESSES]},
    peer="upstream",
    aims=[
        Aim("tcp_store", at_least=1),
        Aim("group", at_least=100, where={"ranks are": PROCESSES}),
    ],
    repeats=60,
    process_sets=3,
    seconds=0.1,
)
def barriers(ctx: RankContext, **grid: Any) -> Iterator[Competitors]:
    kind = grid["ranks are"]
    yield _as_processes(ctx) if kind == PROCESSES else _as_threads(ctx, THREADS[kind])


def _as_processes(ctx: RankContext) -> Competitors:
    if ctx.rank == 0:
        ctx.store.set("ports", f"{_free_port()} {_free_port()}")
    theirs, ours = map(int, ctx.store.get("ports").split())
    return {
        "upstream": _make(upstream.TCPStoreBarrier, theirs, ctx.rank, 2).execute_barrier,
        "tcp_store": _make(TCPStoreBarrier, ours, ctx.rank, 2).execute_barrier,
        "group": GroupBarrier(ctx.group("shm"), timeout_secs=SECONDS).execute_barrier,
    }


def _as_threads(ctx: RankContext, size: int) -> Competitors:
    competitors: dict[str, Competitor] = {"group": Absent("it is for processes")}
    for name, kind in (("upstream", upstream.TCPStoreBarrier), ("tcp_store", TCPStoreBarrier)):
        competitors[name] = SelfTimed(_nothing if ctx.rank else _crowd(kind, size))
    return competitors


def _nothing(calls: int) -> float:
    """Sleep while the other process, which has all the ranks, works."""
    del calls
    return 0.0


def _crowd(kind: Any, size: int) -> Callable[[int], float]:
    """Let threads use a barrier, each with a place of its own."""
    port = _free_port()
    with ThreadPoolExecutor(size) as pool:
        places = list(pool.map(lambda rank: _make(kind, port, rank, size), range(size)))
    return lambda calls: _time(places, calls)


def _time(places: Sequence[Barrier], calls: int) -> float:
    ready = threading.Barrier(len(places) + 1)

    def live(place: Barrier) -> None:
        ready.wait()
        for _ in range(calls):
            place.execute_barrier()

    threads = [threading.Thread(target=live, args=(place,)) for place in places]
    for thread in threads:
        thread.start()
    ready.wait()
    start = time.perf_counter()
    for thread in threads:
        thread.join()
    return time.perf_counter() - start


def _make(kind: Any, port: int, rank: int, size: int) -> Any:
    return kind(rank, size, "benchmark", SECONDS, True, port, "127.0.0.1", SECONDS)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
