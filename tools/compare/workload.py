"""Time one version of phalanx as one of two ranks; rank 0 prints the seconds per case as JSON.

`run.py` starts it. Only names that exist in both versions are used.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable

import torch
from torch import nn

# An editable installation of another version must not win over the one in PYTHONPATH.
sys.meta_path[:] = [each for each in sys.meta_path if "editable" not in type(each).__module__]

import phalanx  # noqa: E402
from phalanx.checkpoint import CheckpointerConfig, make_sync_checkpointer  # noqa: E402
from phalanx.groups import new_group  # noqa: E402
from phalanx.mesh import init_device_mesh  # noqa: E402

REPEATS = 7


def best_of(call: Callable[[], object], calls: int) -> float:
    """Return the median over repeats of the mean time of a call."""
    call()
    times = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        for _ in range(calls):
            call()
        times.append((time.perf_counter() - started) / calls)
    return sorted(times)[len(times) // 2]


def main() -> None:
    assert phalanx.__file__ is not None
    assert phalanx.__file__.startswith(os.environ["PYTHONPATH"]), phalanx.__file__
    torch.set_num_threads(1)
    torch.manual_seed(0)
    group = new_group("shm")
    gloo = new_group("gloo")
    seconds = {}

    for name, numel, calls in [
        ("4 B", 1, 3000),
        ("64 KiB", 16 << 10, 500),
        ("25 MiB", 6_553_600, 8),
    ]:
        tensor = torch.zeros(numel)
        seconds[f"allreduce {name}, shm"] = best_of(
            lambda t=tensor: group.allreduce(t).wait(), calls
        )
    small = torch.zeros(1)
    seconds["allreduce 4 B, gloo"] = best_of(lambda: gloo.allreduce(small).wait(), 200)
    seconds["allreduce 4 B max, shm"] = best_of(
        lambda: group.allreduce(small, op=torch.distributed.ReduceOp.MAX).wait(), 1000
    )
    seconds["broadcast 4 B, shm"] = best_of(lambda: group.broadcast(small, root=0).wait(), 1000)
    seconds["barrier, shm"] = best_of(lambda: group.barrier().wait(), 2000)

    for name, width, depth, calls in [("26k", 56, 8, 60), ("2M", 512, 8, 12)]:
        layers = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.ReLU())]
        model = phalanx.DDP(nn.Sequential(*layers), process_group=group)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        inputs = torch.randn(16, width)

        def step(model: nn.Module = model, optimizer: torch.optim.SGD = optimizer) -> None:
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()

        seconds[f"DDP step, {name} parameters"] = best_of(step, calls)

    fake = new_group("fake", rank=5, world_size=16384)

    def make_mesh() -> object:
        mesh = init_device_mesh("cpu", (256, 8, 8), mesh_dim_names=("dp", "cp", "tp"), group=fake)
        return mesh["dp", "tp"]

    seconds["mesh of 16,384 ranks, and a slice"] = best_of(make_mesh, 50)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",), group=group)
    seconds["mesh get_group"] = best_of(lambda: mesh["dp"].get_group(), 1000)

    state = {f"w{i}": torch.ones(64 << 10) for i in range(64)}  # 16 MiB
    folder = tempfile.mkdtemp(dir="/dev/shm") if group.rank() == 0 else ""
    folder = share(group, folder)
    checkpointer = make_sync_checkpointer(CheckpointerConfig())
    numbers = iter(range(1000))
    save = lambda: checkpointer.save(os.path.join(folder, str(next(numbers))), state)  # noqa: E731
    seconds["checkpoint save, 16 MiB"] = best_of(save, 2)
    load = lambda: checkpointer.load(os.path.join(folder, "0"))  # noqa: E731
    seconds["checkpoint load, 16 MiB"] = best_of(load, 2)
    group.barrier().wait()
    if group.rank() == 0:
        shutil.rmtree(folder)
        print(json.dumps(seconds))


def share(group: object, text: str) -> str:
    """Send a text of rank 0 to rank 1."""
    payload = torch.zeros(256, dtype=torch.uint8)
    payload[: len(text)] = torch.tensor(list(text.encode()), dtype=torch.uint8)
    group.broadcast(payload, root=0).wait()  # type: ignore[attr-defined]
    return bytes(payload.tolist()).rstrip(b"\0").decode()


if __name__ == "__main__":
    main()
