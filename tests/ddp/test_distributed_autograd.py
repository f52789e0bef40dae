"""RRef inputs and outputs, and distributed autograd across RPC workers."""

import pytest
import torch
import torch.distributed.autograd as dist_autograd
from torch import nn
from torch.distributed import rpc

import phalanx.ddp
from phalanx.ddp import DDP
from phalanx.testing import RankPool

from .whole import ROWS, assert_close, batch, compare, mlp, seeded, share, squares, whole_loss


def on_workers(ctx, where):
    """Run all bodies on RPC workers; RPC can be initialized only once per process.

    Groups of two are subgroups of the world of four. ``local`` is left out: workers are processes.
    """
    options = rpc.TensorPipeRpcBackendOptions(
        num_worker_threads=4, rpc_timeout=20, init_method=f"file://{where}", _transports=["uv"]
    )
    rpc.init_rpc(f"worker{ctx.rank}", rank=ctx.rank, world_size=4, rpc_backend_options=options)
    try:
        for backend in ("gloo", "shm"):
            world = ctx.group(backend)
            half = [ctx.rank % 2, ctx.rank % 2 + 2]
            for group, members in ((world, range(4)), (ctx.closing(world.split_group(half)), half)):
                other = f"worker{members[(group.rank() + 1) % group.size()]}"
                for body in BODIES:
                    body(group, other)
    finally:
        rpc.shutdown()


class Referring(nn.Module):
    """Takes an RRef and returns one."""

    def __init__(self):
        super().__init__()
        self.net = mlp()

    def forward(self, rows):
        return rpc.RRef(self.net(rows.to_here()))


def remote_rows(step, size, rank):
    return batch(step, size)[rank * ROWS :][:ROWS]


def has_references_as_inputs_and_outputs(group, other):
    module, whole = seeded(Referring, seed=group.rank()), seeded(mlp)
    ddp = DDP(module, process_group=group)
    for step in range(3):
        rows = rpc.remote(other, remote_rows, args=(step, group.size(), group.rank()))
        output = ddp(rows)
        assert list(phalanx.ddp._find_tensors([output])) == [output.local_value()]
        output.local_value().square().mean().backward()
        squares(whole, batch(step, group.size())).backward()
        for mine, theirs in zip(module.parameters(), whole.parameters(), strict=True):
            assert_close(mine.grad, theirs.grad)
        ddp.zero_grad()
        whole.zero_grad()


def flattens_references(group, other):
    value = {"a": torch.ones(2), "b": [torch.zeros(1)]}
    leaves, spec, is_rref = phalanx.ddp._tree_flatten_with_rref(rpc.RRef(value))
    assert is_rref
    again = phalanx.ddp._tree_unflatten_with_rref(leaves, spec, is_rref)
    assert again.local_value()["b"][0] is value["b"][0]


def double(rows):
    return rows * 2


def gradients_of(ddp, rows, other, loss):
    """Run backward through both workers and return the context's gradients."""
    with dist_autograd.context() as context:
        output = ddp(rows)
        far = rpc.rpc_sync(other, double, args=(output,))
        dist_autograd.backward(context, [loss(far)])
        found = dist_autograd.get_gradients(context)
        return [found.get(parameter) for parameter in ddp.parameters()]


def loss_far(far):
    return (far / 2).square().mean()


def reduces_in_a_context(group, other):
    ddp, whole = DDP(seeded(mlp, seed=group.rank()), process_group=group), seeded(mlp)
    for step in range(3):
        rows = batch(step, group.size())
        found = gradients_of(ddp, share(rows, group), other, loss_far)
        assert all(parameter.grad is None for parameter in ddp.parameters())
        squares(whole, rows).backward()
        for mine, theirs in zip(found, whole.parameters(), strict=True):
            assert_close(mine, theirs.grad)
        whole.zero_grad()
    with ddp.no_sync():
        mine = gradients_of(ddp, share(rows, group), other, loss_far)
    squares(whole, share(rows, group)).backward()
    assert_close(mine[0], next(whole.parameters()).grad)
    whole.zero_grad()
    with ddp.no_sync():
        ddp.reducer.prepare_for_backward([])
        announced = gradients_of(ddp, share(rows, group), other, loss_far)
    squares(whole, rows).backward()
    assert_close(announced[0], next(whole.parameters()).grad)
    whole.zero_grad()
    ddp.weight = 1 + group.rank()
    found = gradients_of(ddp, share(rows, group), other, loss_far)
    total = sum(range(1, group.size() + 1))
    for rank, part in enumerate(rows.split(ROWS)):
        (squares(whole, part) * (1 + rank) / total).backward()
    for mine, theirs in zip(found, whole.parameters(), strict=True):
        assert_close(mine, theirs.grad)
    ddp.weight = None
    whole.zero_grad()
    for step in range(3):  # plain backward still works, also inside a context
        rows = batch(step, group.size())
        with dist_autograd.context():
            squares(ddp, share(rows, group)).backward()
        squares(whole, rows).backward()
        compare(ddp, whole)


class Forking(nn.Module):
    """Uses one of its two layers."""

    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(5, 3), nn.Linear(5, 3)

    def forward(self, rows, left):
        return self.left(rows) if left else self.right(rows)


def reduces_what_some_have(group, other):
    """Use other layers per rank: a missing gradient counts as zero and stays absent."""
    ddp = DDP(seeded(Forking), process_group=group)
    whole = seeded(Forking)
    rows, rank = batch(0, group.size()), group.rank()
    with dist_autograd.context() as context:
        far = rpc.rpc_sync(other, double, args=(ddp(share(rows, group), left=rank == 0),))
        dist_autograd.backward(context, [loss_far(far)])
        found = dist_autograd.get_gradients(context)
    assert len(found) == 2

    def loss(module, part, step, rank):
        return module(part, left=rank == 0).square().mean()

    whole_loss(whole, rows, group, loss, 0).backward()
    mine, theirs = (m.left if rank == 0 else m.right for m in (ddp.module, whole))
    assert_close(found[mine.weight], theirs.weight.grad)
    assert_close(found[mine.bias], theirs.bias.grad)


BODIES = (
    has_references_as_inputs_and_outputs,
    flattens_references,
    reduces_in_a_context,
    reduces_what_some_have,
)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:You are using a Backend")  # as RPC itself does
def test_distributed_autograd_on_rpc_workers(tmp_path):
    with RankPool(4, preload=("phalanx.ddp",)) as pool:
        pool.run(on_workers, 4, args=(str(tmp_path / "rendezvous"),))
