"""Roll calls: ranks leave together with the others' knowledge, on every backend."""

from datetime import timedelta

import pytest
import torch
from torch.distributed import ReduceOp

LONG = timedelta(seconds=60)
BACKENDS = ["local", "shm", "gloo"]


@pytest.fixture
def crew(threads, ranks):
    """Ranks that fit a backend: threads for `local`, processes for the others."""
    return {"local": threads, "shm": ranks, "gloo": ranks}


def total(group, value=1.0):
    tensor = torch.full((3,), value)
    group.allreduce(tensor).wait()
    return tensor[0].item()


def go_one_by_one(ctx, backend, order):
    group = ctx.group(backend, timeout=LONG)
    assert group.can_leave == (backend != "gloo")
    there = tuple(range(ctx.size))
    for _ in range(2):
        assert group.roll_call() == there
        assert total(group, 2.0**ctx.rank) == 2**ctx.size - 1
    for leavers in order:
        there = tuple(rank for rank in there if rank not in leavers)
        assert group.roll_call(ctx.rank not in leavers) == there
        if ctx.rank in leavers:
            break
        assert group.members == there
        assert total(group, 2.0**ctx.rank) == sum(2**rank for rank in there)
        mean = torch.tensor([float(ctx.rank)])
        group.allreduce(mean, op=ReduceOp.AVG).wait()
        assert mean.item() == pytest.approx(sum(there) / len(there))
    group.rejoin()
    assert group.members == tuple(range(ctx.size))
    assert total(group, 2.0**ctx.rank) == 2**ctx.size - 1


ORDERS = {
    2: [[{0}], [{1}], [{0}, {1}], [{0, 1}]],
    4: [[{2}, {0}, {3}], [{0, 3}, {1}], [{1}], [{0, 1, 2}], [{3}, {0, 1, 2}], []],
}


@pytest.mark.parametrize(("size", "order"), [(n, o) for n in ORDERS for o in ORDERS[n]], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_those_who_stay_go_on(crew, backend, size, order):
    crew[backend].run(go_one_by_one, size, args=(backend, order))
