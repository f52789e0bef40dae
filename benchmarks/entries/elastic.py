"""A step of micro-batches whose sum has the same bits at every world size, and what that costs.

``accumulation`` is the same number of micro-batches with `phalanx.DDP` on shared memory, all but
the last in `no_sync`: the same work, added up in another order. ``torch`` is that with torch's DDP
on Gloo. ``elastic`` is `ElasticRun` on shared memory, ``elastic, gloo`` on Gloo. Of 3 and 5
micro-batches one rank of an elastic run has one more than the other; plain accumulation needs as
many on both, so there it is 4 and 6.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch._C._distributed_c10d import PrefixStore
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from benchmarks.entries.group_overhead import torch_group
from benchmarks.entry import Aim, Competitors, entry
from benchmarks.models import MODELS
from benchmarks.stats import Compare
from phalanx.ddp import DDP
from phalanx.elastic import ElasticRun
from phalanx.testing import RankContext

EVEN = (2, 4, 8)
UNEVEN = (3, 5)


@entry(
    title="A step of micro-batches by two ranks: its cost as a multiple of plain accumulation",
    ranks=(2,),
    grid={"model": list(MODELS), "micro_batches": [*EVEN, *UNEVEN]},
    peer="accumulation",
    compare=Compare.COST,
    aims=[Aim("elastic", at_most=1.05, where={"micro_batches": count}) for count in EVEN],
    repeats=12,
    process_sets=2,
    seconds=0.15,
)
def elastic(ctx: RankContext, *, model: str, micro_batches: int) -> Iterator[Competitors]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    make, make_batch = MODELS[model]
    module, batch = make(), make_batch()
    theirs = torch_group(PrefixStore("torch", ctx.store), ctx.rank, ctx.size)
    shm, gloo = ctx.group("shm"), ctx.group("gloo")
    wrapped = TorchDDP(copy.deepcopy(module), process_group=theirs, gradient_as_bucket_view=True)
    count = -(-micro_batches // ctx.size)
    yield {
        "accumulation": accumulation(
            DDP(copy.deepcopy(module), process_group=shm), batch, count, micro_batches
        ),
        "torch": accumulation(wrapped, batch, count, micro_batches),
        "elastic": elastic_step(copy.deepcopy(module), batch, shm, micro_batches),
        "elastic, gloo": elastic_step(copy.deepcopy(module), batch, gloo, micro_batches),
    }


def accumulation(module: Any, batch: torch.Tensor, count: int, total: int) -> Callable[[], None]:
    """Prepare a step of plain accumulation over `count` micro-batches of this rank."""
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-5, foreach=True)

    def step() -> None:
        optimizer.zero_grad()
        for micro in range(count):
            with nullcontext() if micro == count - 1 else module.no_sync():
                (module(batch).square().mean() / total).backward()
        optimizer.step()

    return step


def elastic_step(
    module: nn.Module, batch: torch.Tensor, group: Any, micro_batches: int
) -> Callable[[], None]:
    """Prepare a step of an elastic run; the data is there, as it is for the others."""
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-5, foreach=True)
    run = ElasticRun(module, optimizer, micro_batches=micro_batches, group=group)
    steps = run.steps(1 << 40)

    def step() -> None:
        optimizer.zero_grad()
        for micro in next(steps).micro_batches():
            micro.backward(module(batch).square().mean())
        optimizer.step()

    return step
