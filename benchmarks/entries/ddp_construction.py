"""Wrapping a module of 400 tensors: comparing it over the ranks, and giving all rank 0's values."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import torch
from torch import nn
from torch._C._distributed_c10d import PrefixStore
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from benchmarks.entries.group_overhead import torch_group
from benchmarks.entry import Aim, Competitors, SelfTimed, entry
from benchmarks.models import MODELS
from benchmarks.stats import Compare
from phalanx.ddp import DDP
from phalanx.testing import RankContext


@entry(
    title="Wrapping a module of 400 tensors by two ranks",
    ranks=(2,),
    peer="torch",
    compare=Compare.SPEED,
    aims=[Aim("shm", at_least=5)],
    repeats=20,
    process_sets=2,
)
def ddp_construction(ctx: RankContext) -> Iterator[Competitors]:
    torch.set_num_threads(1)
    make, _ = MODELS["MLP, 400 tensors"]
    theirs = torch_group(PrefixStore("torch", ctx.store), ctx.rank, ctx.size)
    shm, gloo = ctx.group("shm"), ctx.group("gloo")
    wraps = {
        "torch": lambda module: TorchDDP(
            module, process_group=theirs, gradient_as_bucket_view=True
        ),
        "shm": lambda module: DDP(module, process_group=shm),
        "gloo": lambda module: DDP(module, process_group=gloo),
    }
    yield {name: SelfTimed(_timed(make, wrap)) for name, wrap in wraps.items()}


def _timed(
    make: Callable[[], nn.Module], wrap: Callable[[nn.Module], object]
) -> Callable[[int], float]:
    def run(calls: int) -> float:
        spent = 0.0
        for _ in range(calls):
            module = make()
            began = time.perf_counter()
            wrapped = wrap(module)
            spent += time.perf_counter() - began
            del wrapped
        return spent

    return run
