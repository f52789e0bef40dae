"""One rank of MPI, which makes calls when it is told to; `benchmarks.mpi` starts it.

Between orders it is blocked in a read. MPI's own waits spin, and would take the cores away from
whoever is being timed meanwhile.
"""

from __future__ import annotations

import json
import socket
import sys
import time
from collections.abc import Callable
from functools import cache
from typing import Any, TextIO

import numpy as np
from mpi4py import MPI

__all__ = ["main"]

Call = Callable[[], object]


def main(path: str) -> None:
    """Run the steps that are requested through the socket at `path` until it is closed."""
    comm = MPI.COMM_WORLD
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        stream = connection.makefile("rw")
        _say(stream, size=comm.size)
        for line in stream:
            order = json.loads(line)
            call = make_call(order["operation"], order["bytes"])
            _say(stream, seconds=_timed(call, order["calls"]))


def _say(stream: TextIO, **message: Any) -> None:
    stream.write(json.dumps(message) + "\n")
    stream.flush()


def _timed(call: Call, calls: int) -> float:
    MPI.COMM_WORLD.Barrier()
    start = time.perf_counter()
    for _ in range(calls):
        call()
    return time.perf_counter() - start


@cache
def make_call(operation: str, nbytes: int) -> Call:
    """Prepare an operation as a program would that cares: buffers, in place, types given."""
    comm = MPI.COMM_WORLD
    whole, part = _buffer(nbytes), _buffer(nbytes // comm.size)
    calls: dict[str, Call] = {
        "allreduce": lambda: comm.Allreduce(MPI.IN_PLACE, whole),
        "barrier": comm.Barrier,
        "broadcast": lambda: comm.Bcast(whole),
        "allgather": lambda: comm.Allgather(part, whole),
        "reduce_scatter": lambda: comm.Reduce_scatter_block(whole, part),
    }
    return calls[operation]


def _buffer(nbytes: int) -> list[Any]:
    memory = np.empty(nbytes // 4, np.float32)
    memory.fill(0)  # so that every page is there
    return [memory, MPI.FLOAT]


if __name__ == "__main__":
    main(sys.argv[1])
