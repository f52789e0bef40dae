"""Collectives in shared memory, against Gloo and against a plain copy of the same bytes.

``shared`` reduces tensors of ``group.allocate`` where they are, ``ordinary`` any others, through
windows. ``memcpy`` is one private copy by one rank while the others do the same: what the memory
of this machine allows. The figures include the Python call and our group around the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._C._distributed_c10d import PrefixStore

from benchmarks.entries.group_overhead import torch_group
from benchmarks.entry import Aim, Competitors, entry
from benchmarks.stats import Compare
from phalanx.groups import ProcessGroup
from phalanx.testing import RankContext

MIB = 1 << 20
SIZES = [4, 16 << 10, MIB, 25 * MIB, 100 * MIB]

Call = Callable[[], Any]


@entry(
    title="Allreduce of float32 by two ranks: how many times faster than Gloo",
    ranks=(2,),
    grid={"bytes": SIZES},
    peer="gloo",
    compare=Compare.SPEED,
    aims=[
        Aim("shared", at_least=100, where={"bytes": 4}),
        Aim("shared", at_least=100, where={"bytes": 16 << 10}),
        Aim("shared", at_least=60, where={"bytes": MIB}),
        Aim("shared", at_least=10, where={"bytes": 25 * MIB}),
        Aim("shared", at_least=8, where={"bytes": 100 * MIB}),
        Aim("ordinary", at_least=4, where={"bytes": 25 * MIB}),
    ],
    repeats=10,
    seconds=0.1,
)
def shared_memory(ctx: RankContext, **grid: Any) -> Iterator[Competitors]:
    count = grid["bytes"] // 4
    gloo = torch_group(PrefixStore("torch", ctx.store), ctx.rank, ctx.size)
    group = ctx.group("shm")
    shared = group.allocate((count,)).zero_()
    ordinary, copy = torch.zeros(count), torch.zeros(count)
    yield {
        "shared": _reduce(group, shared),
        "ordinary": _reduce(group, ordinary),
        "gloo": lambda: gloo.allreduce(ordinary).wait(),
        "memcpy": lambda: copy.copy_(ordinary),
    }


def _reduce(group: ProcessGroup, tensor: torch.Tensor) -> Call:
    return lambda: group.allreduce(tensor).wait()
