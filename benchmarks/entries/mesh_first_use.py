"""Eight real ranks: a mesh of three axes and the first allreduce along one of them.

Both sides begin with a group of all ranks. torch connects groups along all axes at once, ours along
the one that is used: on Gloo like torch's, in shared memory, or on torch's own default group.
``engine`` is what it takes to connect each rank with one other on Gloo, with no group around it: no
way of making a mesh can be faster than that on Gloo.
"""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Callable, Iterator
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.device_mesh import init_device_mesh as torch_init_device_mesh

from benchmarks.entry import Aim, Competitors, SelfTimed, entry
from phalanx.mesh import init_device_mesh
from phalanx.testing import RankContext

SHAPE, NAMES = (2, 2, 2), ("dp", "cp", "tp")
TIMEOUT = timedelta(minutes=2)


@entry(
    title="A mesh of eight ranks and the first allreduce along one axis",
    ranks=(8,),
    peer="torch",
    aims=[Aim("gloo", at_least=5), Aim("shm", at_least=5)],
    repeats=15,
    seconds=0.001,
)
def mesh_first_use(ctx: RankContext) -> Iterator[Competitors]:
    numbers = itertools.count()
    uses: dict[str, Callable[[str], float]] = {
        "torch": lambda name: _on_default_group(ctx, name, _torchs),
        "gloo": lambda name: _on_our_group(ctx, name, "gloo"),
        "shm": lambda name: _on_our_group(ctx, name, "shm"),
        "default group": lambda name: _on_default_group(ctx, name, _ours),
        "engine": lambda name: _engine(ctx, name),
    }

    def timed(use: Callable[[str], float]) -> SelfTimed:
        return SelfTimed(lambda calls: sum(use(f"use {next(numbers)}") for _ in range(calls)))

    yield {name: timed(use) for name, use in uses.items()}


def _on_default_group(ctx: RankContext, name: str, use: Callable[[], Callable[[], None]]) -> float:
    store = PrefixStore(name, ctx.store)
    dist.init_process_group(
        "gloo", store=store, rank=ctx.rank, world_size=ctx.size, timeout=TIMEOUT
    )
    dist.barrier()
    began = time.perf_counter()
    end = use()
    seconds = time.perf_counter() - began
    dist.barrier()
    end()
    dist.destroy_process_group()
    gc.collect()  # the end of an engine takes long, and must not come when the next is timed
    return seconds


def _torchs() -> Callable[[], None]:
    mesh = torch_init_device_mesh("cpu", SHAPE, mesh_dim_names=NAMES)
    dist.all_reduce(torch.ones(4), group=mesh.get_group("tp"))
    return lambda: None


def _ours(group: dist.ProcessGroup | None = None) -> Callable[[], None]:
    mesh = init_device_mesh("cpu", SHAPE, mesh_dim_names=NAMES, group=group)
    dist.all_reduce(torch.ones(4), group=mesh.get_group("tp"))
    return mesh.shutdown


def _on_our_group(ctx: RankContext, name: str, backend: str) -> float:
    group = ctx.group(backend, name=name)
    group.barrier().wait()
    began = time.perf_counter()
    end = _ours(group)
    seconds = time.perf_counter() - began
    group.barrier().wait()
    end()
    group.shutdown()
    del group
    gc.collect()
    return seconds


def _engine(ctx: RankContext, name: str) -> float:
    store = PrefixStore(f"{name}/{ctx.rank // 2}", ctx.store)
    began = time.perf_counter()
    engine = dist.ProcessGroupGloo(store, ctx.rank % 2, 2, TIMEOUT)
    seconds = time.perf_counter() - began
    store.set(f"made/{ctx.rank % 2}", "")
    store.wait(["made/0", "made/1"])  # or one would hang up on the other, which still connects
    del engine  # which takes 20 ms, for its threads look every 10 whether they should end
    return seconds
