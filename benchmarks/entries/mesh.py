"""Making a mesh of three axes, slicing and flattening it, as one rank of many thousands.

Both sides stand on ``fake`` groups, so that nothing is sent and what is timed is the mesh alone.
torch makes the groups of all ranks along all axes when a mesh is made or flattened, and an array of
all ranks with every mesh. Ours makes no group before it is used: ``ours, groups`` is what it costs
to make a mesh and ask for this rank's group along every axis too.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh as TorchMesh
from torch.distributed.device_mesh import init_device_mesh as torch_init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.entry import Aim, Competitors, SelfTimed, entry
from phalanx.groups import new_group
from phalanx.mesh import DeviceMesh, init_device_mesh
from phalanx.testing import RankContext

NAMES = ("dp", "cp", "tp")
RANK = 5


@entry(
    title="A mesh of three axes on groups that are not there",
    grid={"world": [1024, 16384, 262144], "operation": ["make", "slice", "flatten"]},
    peer="torch",
    aims=[Aim("ours", at_least=50, where={"world": 16384})],
    repeats=15,
    seconds=0.02,
)
def mesh(ctx: RankContext, *, world: int, operation: str) -> Iterator[Competitors]:
    del ctx
    shape = (world // 64, 8, 8)
    group = new_group("fake", rank=RANK, world_size=world)

    def ours() -> DeviceMesh:
        return init_device_mesh("cpu", shape, mesh_dim_names=NAMES, group=group)

    def theirs() -> TorchMesh:
        return torch_init_device_mesh("cpu", shape, mesh_dim_names=NAMES)

    made = ours()
    numbers = itertools.count()
    if operation == "make":
        yield {
            "torch": SelfTimed(lambda calls: _afresh(theirs, world, calls)),
            "ours": ours,
            "ours, groups": SelfTimed(lambda calls: _with_groups(ours, calls)),
        }
    else:
        with _default_group(world):
            torchs = theirs()
            if operation == "slice":
                yield {"torch": lambda: torchs["dp", "tp"], "ours": lambda: made["dp", "tp"]}
            else:
                # A name that was there before would be answered from memory.
                part, torch_part = made["dp", "cp"], torchs["dp", "cp"]
                yield {
                    "torch": lambda: torch_part._flatten(f"flat {next(numbers)}"),
                    "ours": lambda: part.flatten(f"flat {next(numbers)}"),
                }
    made.shutdown()
    group.shutdown()


@contextlib.contextmanager
def _default_group(world: int) -> Iterator[None]:
    dist.init_process_group("fake", rank=RANK, world_size=world, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def _afresh(make: Callable[[], TorchMesh], world: int, calls: int) -> float:
    """Time meshes on a default group that has made nothing yet."""
    seconds = 0.0
    for _ in range(calls):
        with _default_group(world):
            began = time.perf_counter()
            make()
            seconds += time.perf_counter() - began
    return seconds


def _with_groups(make: Callable[[], DeviceMesh], calls: int) -> float:
    """Time meshes with the groups of this rank, which are let go of while the clock stands."""
    seconds = 0.0
    for _ in range(calls):
        began = time.perf_counter()
        made = make()
        made.get_all_groups()
        seconds += time.perf_counter() - began
        made.shutdown()
    return seconds
