"""One rank of a job of `benchmarks.elastic_jobs`, which makes steps when it is told to."""

from __future__ import annotations

import json
import socket
import sys
import time
from contextlib import nullcontext

import torch

from benchmarks.entries.elastic import elastic_step
from benchmarks.memory_sampler import MemorySampler
from benchmarks.models import MODELS


def main(model: str, micro_batches: int, what: str, path: str) -> None:
    """Run the steps that are requested through the socket at `path` until it is closed."""
    make, make_batch = MODELS[model]
    torch.set_num_threads(1)
    torch.manual_seed(0)
    sampler = MemorySampler()
    with (
        sampler if what == "memory" else nullcontext(),
        socket.socket(socket.AF_UNIX) as connection,
    ):
        step = elastic_step(make(), make_batch(), None, micro_batches)
        connection.connect(path)
        stream = connection.makefile("rw")
        for line in stream:
            steps = json.loads(line)["steps"]
            start = time.perf_counter()
            for _ in range(steps):
                step()
            took = time.perf_counter() - start
            answer = {"seconds": took, "peak": sampler.peak}
            stream.write(json.dumps(answer) + "\n")
            stream.flush()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])
