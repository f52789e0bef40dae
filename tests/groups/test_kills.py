"""Kill ranks at random points of random collectives in shared memory.

A few by default; ``PHALANX_KILLS=300 make test ARGS=tests/groups/test_kills.py`` for many.
"""

import os
import random
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from phalanx.errors import PeerLost
from phalanx.testing import Fault, kill

KILLS = int(os.environ.get("PHALANX_KILLS", "12"))
OPERATIONS = {
    "allreduce": lambda group, tensor: group.allreduce(tensor),
    "broadcast": lambda group, tensor: group.broadcast(tensor, root=0),
    "reduce": lambda group, tensor: group.reduce(tensor, 1),
    "barrier": lambda group, _: group.barrier(),
    "allgather": lambda group, tensor: group.allgather([tensor.clone() for _ in range(4)], tensor),
    "all_to_all_single": lambda group, tensor: group.all_to_all_single(tensor.clone(), tensor),
    "reduce_scatter_single": lambda group, tensor: group.reduce_scatter_single(
        tensor[: len(tensor) // 4].clone(), tensor
    ),
}


def survive(ctx, operation, count, shared):
    group = ctx.group("shm", timeout=timedelta(seconds=60))
    tensor = group.allocate((count,)) if shared else torch.empty(count)
    tensor.zero_()
    last = time.monotonic()
    with pytest.raises(PeerLost) as caught:
        for _ in range(80):
            OPERATIONS[operation](group, tensor).wait()
            last = time.monotonic()
    assert time.monotonic() - last < 2
    assert caught.value.lost == (2,)
    group.abort()
    rest = ctx.closing(group.split_group([0, 1, 3]))
    total = torch.ones(2)
    rest.allreduce(total).wait()
    assert total.tolist() == [3.0, 3.0]


def test_random_kills_are_detected_and_survivors_continue(ranks):
    seed = random.randrange(1 << 30)
    chance = random.Random(seed)
    before = set(Path("/dev/shm").iterdir())
    for _ in range(KILLS):
        operation = chance.choice(list(OPERATIONS))
        point = chance.choice(["before", "issued", "after"])
        strike = Fault(f"{operation}:{point}", kill(), rank=2, nth=chance.randint(1, 30))
        args = (operation, chance.choice([4, 5_000, 300_000]), chance.random() < 0.5)
        ranks.run(survive, 4, args=args, faults=[strike], name=f"survive{args} (seed {seed})")
    assert not [path for path in set(Path("/dev/shm").iterdir()) - before if "phalanx" in path.name]
