"""The two ranks of `phalanx doctor`: allreduce, check the sum, and measure latency and bandwidth.

Run by the launcher with ``-m``. Rank 0 prints one line of JSON per measurement.
"""

from __future__ import annotations

import faulthandler
import json
import signal
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from .. import native
from ..env import read_rank_env

if TYPE_CHECKING:
    from ..groups import ProcessGroup


_LARGE_BYTES = 4 << 20  # bytes
_WARM_UP, _LATENCY_ROUNDS, _BANDWIDTH_ROUNDS = 10, 200, 10  # calls


def main() -> None:
    # If it hangs, print where and end. faulthandler's own timer crashes if Python code is running.
    faulthandler.register(signal.SIGALRM, chain=True)
    signal.setitimer(signal.ITIMER_REAL, float(sys.argv[1]))
    from torch._C._distributed_c10d import HashStore

    from ..groups import new_group

    measured = []
    for backend in ["gloo", "shm"] if native.engine is not None else ["gloo"]:
        group = new_group(backend)
        measured.append(_measure(group, backend=backend, ranks="2 processes"))
        group.shutdown()
    # From here on one process has the machine to itself.
    if read_rank_env().rank == 0:
        store = HashStore()

        def rank(number: int) -> dict[str, object]:
            group = new_group("local", store=store, rank=number, world_size=2)
            return _measure(group, backend="local", ranks="2 threads")

        with ThreadPoolExecutor(2) as pool:
            measured.append(next(pool.map(rank, range(2))))
        for each in measured:
            print(json.dumps(each), flush=True)


def _measure(group: ProcessGroup, **labels: str) -> dict[str, object]:
    """Return the latency of a tiny and the bandwidth of a large allreduce."""
    import torch

    total = torch.ones(1)
    group.allreduce(total).wait()
    assert total.item() == 2, f"allreduce: 1 + 1 gave {total.item()}"
    medians = []
    for numel, rounds in ((1, _LATENCY_ROUNDS), (_LARGE_BYTES // 4, _BANDWIDTH_ROUNDS)):
        tensor, times = torch.zeros(numel), []
        for _ in range(_WARM_UP + rounds):
            began = time.perf_counter()
            group.allreduce(tensor).wait()
            times.append(time.perf_counter() - began)
        medians.append(statistics.median(times[_WARM_UP:]))
    return {
        **labels,
        "latency_us": round(medians[0] * 1e6, 1),
        "bandwidth_gb_per_s": round(_LARGE_BYTES / medians[1] / 1e9, 2),
    }


if __name__ == "__main__":
    main()
