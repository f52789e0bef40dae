"""The other collectives in shared memory, against Gloo and MPI.

25 MiB is what the largest tensor of the call holds: what is broadcast, all that is gathered, all
that is reduced before it is scattered. ``shared`` works on tensors of ``group.allocate``; the peers
on ordinary ones. ``memcpy`` is one private copy of 25 MiB by one rank while the other sleeps,
``memcpy by all`` the same by both at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from benchmarks.entries.group_overhead import torch_group
from benchmarks.entry import Aim, Competitor, Competitors, entry
from benchmarks.limits import alone, memcpy, warm
from benchmarks.mpi import mpi
from benchmarks.stats import Compare
from phalanx.testing import RankContext

SIZE = 25 << 20
MOVES = ["broadcast", "allgather", "reduce_scatter"]

Call = Callable[[], object]


@entry(
    title="Other collectives, by two ranks, of 25 MiB: how many times faster than Gloo",
    ranks=(2,),
    grid={"operation": ["barrier", *MOVES]},
    peer="gloo",
    compare=Compare.SPEED,
    aims=[
        Aim("shared", at_least=100, where={"operation": "barrier"}),
        *(Aim("shared", at_least=8, where={"operation": move}) for move in MOVES),
        Aim("shared", at_least=1, against="mpi"),
    ],
    repeats=20,
    process_sets=2,
)
def collectives(ctx: RankContext, *, operation: str) -> Iterator[Competitors]:
    ours = ctx.group("shm")
    theirs = torch_group(PrefixStore("torch", ctx.store), ctx.rank, ctx.size)
    part = SIZE // ctx.size
    shared = [ours.allocate((size // 4,)).zero_() for size in (SIZE, part)]
    limits: dict[str, Competitor] = {}
    if operation != "barrier":
        copy = memcpy(SIZE)
        limits = {"memcpy": alone(ctx, copy), "memcpy by all": copy}
    with mpi(ctx, operation, SIZE) as outside:
        yield {
            "shared": _call(ours, operation, *shared),
            "gloo": _call(theirs, operation, warm(SIZE), warm(part)),
            "mpi": outside,
            **limits,
        }


def _call(
    group: dist.ProcessGroup, operation: str, whole: torch.Tensor, part: torch.Tensor
) -> Call:
    """Prepare an operation that is waited for; the methods are torch's, which ours has too."""
    to_all: Any = group  # torch's stubs do not have all of them
    calls: dict[str, Call] = {
        "barrier": lambda: to_all.barrier().wait(),
        "broadcast": lambda: to_all.broadcast(whole, 0).wait(),
        "allgather": lambda: to_all.all_gather_single(whole, part).wait(),
        "reduce_scatter": lambda: to_all.reduce_scatter_single(part, whole).wait(),
    }
    return calls[operation]
