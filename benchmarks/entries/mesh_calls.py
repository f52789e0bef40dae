"""What a program asks of a mesh again and again: is it this one, what is its hash, which group.

``equal`` compares two meshes that are alike and not the same object, the slowest case.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh as torch_init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.entry import Aim, Competitors, entry
from phalanx.groups import new_group
from phalanx.mesh import init_device_mesh
from phalanx.testing import RankContext

WORLD, SHAPE, NAMES = 1024, (16, 8, 8), ("dp", "cp", "tp")


@entry(
    title="Questions to a mesh of 1,024 ranks",
    aims=[Aim(name, at_most=2e-6) for name in ("hash", "equal", "get_group")],
    repeats=30,
    seconds=0.02,
)
def mesh_calls(ctx: RankContext) -> Iterator[Competitors]:
    del ctx
    group = new_group("fake", rank=5, world_size=WORLD)
    ours, same = (
        init_device_mesh("cpu", SHAPE, mesh_dim_names=NAMES, group=group) for _ in range(2)
    )
    dist.init_process_group("fake", rank=5, world_size=WORLD, store=FakeStore())
    theirs, alike = (torch_init_device_mesh("cpu", SHAPE, mesh_dim_names=NAMES) for _ in range(2))
    yield {
        "hash": lambda: hash(ours),
        "equal": lambda: ours == same,
        "get_group": lambda: ours.get_group("tp"),
        "torch hash": lambda: hash(theirs),
        "torch equal": lambda: theirs == alike,
        "torch get_group": lambda: theirs.get_group("tp"),
    }
    dist.destroy_process_group()
    ours.shutdown()
    group.shutdown()
