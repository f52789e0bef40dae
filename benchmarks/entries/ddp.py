"""A step of training: what making gradients the same on all ranks adds to it.

``alone`` is the step with no communication, each rank for itself: the limit. ``torch`` is torch's
DistributedDataParallel on Gloo, with gradients as views of its buckets. ``shm`` and ``gloo`` are
ours. One thread per rank, and a core for each.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator

import torch
from torch._C._distributed_c10d import PrefixStore
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from benchmarks.entries.group_overhead import torch_group
from benchmarks.entry import Aim, Competitors, entry
from benchmarks.models import MODELS, step_of
from benchmarks.stats import Compare
from phalanx.ddp import DDP
from phalanx.testing import RankContext

SMALLEST = "MLP, 8 tensors"


@entry(
    title="A step of training by two ranks: its cost as a multiple of a step without communication",
    ranks=(2,),
    grid={"model": list(MODELS)},
    peer="alone",
    compare=Compare.COST,
    aims=[
        *(
            Aim("shm", at_most=1.10 if model == SMALLEST else 1.05, where={"model": model})
            for model in MODELS
        ),
        Aim("shm", at_least=4, where={"model": SMALLEST}, against="torch", compare=Compare.SPEED),
        Aim("gloo", at_least=1, against="torch", compare=Compare.SPEED),
    ],
    repeats=20,
    process_sets=2,
    seconds=0.2,
)
def ddp(ctx: RankContext, *, model: str) -> Iterator[Competitors]:
    yield steps(ctx, model)


def steps(ctx: RankContext, model: str) -> Competitors:
    """Prepare a step of the same training, in every way."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    make, make_batch = MODELS[model]
    module, batch = make(), make_batch()
    theirs = torch_group(PrefixStore("torch", ctx.store), ctx.rank, ctx.size)
    shm, gloo = ctx.group("shm"), ctx.group("gloo")
    modules = {
        "alone": copy.deepcopy(module),
        "torch": TorchDDP(
            copy.deepcopy(module), process_group=theirs, gradient_as_bucket_view=True
        ),
        "shm": DDP(copy.deepcopy(module), process_group=shm),
        "gloo": DDP(copy.deepcopy(module), process_group=gloo),
    }
    return {name: step_of(each, batch) for name, each in modules.items()}
