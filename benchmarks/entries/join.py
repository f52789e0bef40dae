"""A step of training in a join: what it adds while all have data, and when one rank alone has some.

``torch`` is torch's DistributedDataParallel on Gloo in its own join, ``shm`` and ``gloo`` are ours
in ours; ``bare`` is the same loop with the module of ``shm`` and no join, which one rank alone
cannot run. Only steps are timed, not the end of the block. One thread per rank; four ranks share
two cores, and what those without data do is at the cost of the one that has some.
"""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from benchmarks.entry import Absent, Aim, Competitors, SelfTimed, entry
from benchmarks.models import MODELS, step_of
from benchmarks.stats import Compare
from phalanx.ddp import DDP
from phalanx.testing import RankContext

ALL, ONE = "all ranks", "one rank"


@entry(
    title="A step of training in a join, while all ranks have data and when only one has",
    ranks=(2, 4),
    grid={"data": [ALL, ONE], "model": ["MLP, 8 tensors", "transformer"]},
    peer="torch",
    aims=[
        Aim("shm", at_most=1.01, where={"data": ALL}, against="bare", compare=Compare.COST),
        Aim("shm", at_least=1, where={"data": ONE}),
        Aim("gloo", at_least=1, where={"data": ONE}),
    ],
    repeats=20,
    process_sets=2,
    seconds=0.2,
)
def join(ctx: RankContext, *, data: str, model: str) -> Iterator[Competitors]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    make, make_batch = MODELS[model]
    module, batch = make(), make_batch()
    store = PrefixStore("torch", ctx.store)
    dist.init_process_group("gloo", store=store, rank=ctx.rank, world_size=ctx.size)
    modules: dict[str, Any] = {
        "torch": TorchDDP(copy.deepcopy(module), gradient_as_bucket_view=True),
        "gloo": DDP(copy.deepcopy(module), process_group=ctx.group("gloo")),
        "shm": DDP(copy.deepcopy(module), process_group=ctx.group("shm")),
    }
    has_data = data == ALL or ctx.rank == 0
    competitors: dict[str, Any] = {
        name: SelfTimed(_loop(step_of(each, batch), each.join, has_data=has_data))
        for name, each in modules.items()
    }
    alone = Absent("a rank without data keeps the other from its step")
    bare = SelfTimed(_loop(step_of(modules["shm"], batch), contextlib.nullcontext, has_data=True))
    yield {**competitors, "bare": bare if data == ALL else alone}
    dist.destroy_process_group()


def _loop(
    step: Callable[[], None], block: Callable[[], Any], *, has_data: bool
) -> Callable[[int], float]:
    """Make the loop over a rank's data, which tells the seconds that its steps took."""

    def loop(steps: int) -> float:
        with block():
            start = time.perf_counter()
            for _ in range(steps if has_data else 0):
                step()
            return time.perf_counter() - start

    return loop
