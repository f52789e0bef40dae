"""Allreduce in shared memory, against Gloo, MPI and a plain copy of the same bytes.

``shared`` reduces tensors of ``group.allocate`` where they are, ``ordinary`` any others, through
windows. ``gloo`` is torch's, ``mpi`` is MPICH through mpi4py, in place, in processes of its own.
``memcpy`` is one private copy by one rank while the others sleep, ``memcpy by all`` the same by
all ranks at once. ``in place by all`` is the limit at large sizes: every rank reads and writes as
many bytes of its own as an allreduce makes it touch, and waits for nobody. ``call``, at small
sizes, is the call of ``shared`` in a group of one rank: what it costs where nobody is waited for.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._C._distributed_c10d import PrefixStore

from benchmarks.entries.group_overhead import torch_group
from benchmarks.entry import Aim, Competitor, Competitors, entry
from benchmarks.limits import alone, in_place, lone_group, memcpy, warm
from benchmarks.mpi import mpi
from benchmarks.stats import Compare
from phalanx.groups import ProcessGroup
from phalanx.testing import RankContext

KIB, MIB = 1 << 10, 1 << 20
SMALL = [4, KIB, 16 * KIB]
SIZES = [*SMALL, 128 * KIB, MIB, 4 * MIB, 25 * MIB, 100 * MIB]


@entry(
    title="Allreduce of float32 by two ranks: how many times faster than Gloo",
    ranks=(2,),
    grid={"bytes": SIZES},
    peer="gloo",
    compare=Compare.SPEED,
    aims=[
        *(Aim("shared", at_least=100, where={"bytes": size}) for size in SMALL),
        *(
            Aim(
                "shared",
                at_most=10e-6,
                where={"bytes": size},
                against="call",
                compare=Compare.ADDED,
            )
            for size in SMALL
        ),
        Aim("shared", at_least=60, where={"bytes": MIB}),
        Aim("shared", at_least=10, where={"bytes": 25 * MIB}),
        Aim("shared", at_least=8, where={"bytes": 100 * MIB}),
        *(
            Aim(
                "shared",
                at_most=most,
                where={"bytes": size},
                against="memcpy",
                compare=Compare.COST,
            )
            for size, most in ((25 * MIB, 0.6), (100 * MIB, 0.8))
        ),
        Aim("ordinary", at_least=4, where={"bytes": 25 * MIB}),
        Aim("shared", at_least=1, against="mpi"),
    ],
    repeats=20,
    process_sets=2,
)
def allreduce(ctx: RankContext, **grid: Any) -> Iterator[Competitors]:
    nbytes = grid["bytes"]
    copy = memcpy(nbytes)
    with engines(ctx, nbytes) as competitors:
        limits: dict[str, Competitor] = {
            "memcpy": alone(ctx, copy),
            "memcpy by all": copy,
            "in place by all": in_place(nbytes),
        }
        if nbytes in SMALL:
            lone = lone_group(ctx, "shm")
            limits["call"] = reduction(lone, lone.allocate((nbytes // 4,)).zero_())
        yield {**competitors, **limits}


@contextlib.contextmanager
def engines(ctx: RankContext, nbytes: int) -> Iterator[dict[str, Competitor]]:
    """Set up the same allreduce on all engines; zeros, for they stay what they are."""
    theirs = torch_group(PrefixStore("torch", ctx.store), ctx.rank, ctx.size)
    ours = ctx.group("shm")
    shared, private = ours.allocate((nbytes // 4,)).zero_(), warm(nbytes)
    with mpi(ctx, "allreduce", nbytes) as outside:
        yield {
            "shared": reduction(ours, shared),
            "ordinary": reduction(ours, private),
            "gloo": lambda: theirs.allreduce(private).wait(),
            "mpi": outside,
        }


def reduction(group: ProcessGroup, tensor: torch.Tensor) -> Callable[[], object]:
    """Prepare an allreduce that is waited for."""
    return lambda: group.allreduce(tensor).wait()
