"""DDP over one mesh axis with DTensor parameters sharded over another."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

from phalanx.ddp import DDP, MixedPrecision
from phalanx.ddp.hooks import allreduce_hook
from phalanx.errors import RankMismatch
from phalanx.mesh import init_device_mesh

from .whole import ROWS, TINY, assert_close, batch, seeded, share, squares

PLAN = {"first": ColwiseParallel(), "second": RowwiseParallel()}
SHAPE = (2, 2)


class Net(nn.Module):
    """A network with two optional tensor-parallel layers and one replicated layer."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(5, 8), nn.Linear(8, 4)
        self.last = nn.Linear(4, 3)

    recomputes = False

    def forward(self, rows, whole=True):
        if self.recomputes:
            rows = checkpoint(self.spread, rows, use_reentrant=False)
        else:
            rows = self.spread(rows) if whole else rows[:, :4]
        return self.last(rows)

    def spread(self, rows):
        return self.second(torch.tanh(self.first(rows)))


def net():
    """Return the network in float64, so that summation order does not matter."""
    return Net().double()


def on_mesh(ctx, backend, name, *args):
    """Run a body on a 2-axis mesh whose group is torch's default group."""
    group = ctx.group(backend)
    # DTensor caches by mesh equality, so every mesh gets its own axis names.
    names = (f"data {backend} {name}", f"model {backend} {name}")
    mesh = init_device_mesh("cpu", SHAPE, mesh_dim_names=names, group=group)
    mesh.to_torch(as_default=True)
    try:
        BODIES[name](mesh, *args)
        dist.barrier()
    finally:
        mesh.shutdown()
        dist.destroy_process_group()


def make(mesh, **options):
    """Shard a module over one axis, wrap it over the other; return it and an unsharded copy."""
    data, model = mesh.mesh_dim_names
    module = seeded(net, seed=mesh[data].get_group().rank())
    parallelize_module(module, mesh[model].to_torch(), PLAN)
    return DDP(module, device_mesh=mesh[data], **options), seeded(net)


def gradients(module):
    """Return the full gradients of all parameters."""
    found = [p.grad for p in module.parameters()]
    return [g.full_tensor() if isinstance(g, DTensor) else g for g in found]


def compare(ddp, whole, rtol=1e-6):
    """Compare the gradients of both and zero them."""
    for name, mine, theirs in zip(
        dict(whole.named_parameters()), gradients(ddp.module), gradients(whole), strict=True
    ):
        assert (mine is None) == (theirs is None), name
        if mine is not None:
            assert_close(mine, theirs, name, rtol)
    ddp.zero_grad()
    whole.zero_grad()


def trains(mesh, keeps):
    group = mesh[mesh.mesh_dim_names[0]].get_group()
    ddp, whole = make(mesh, gradient_as_bucket_view=keeps, bucket_cap_mb=TINY)
    spread = [p for p in ddp.parameters() if isinstance(p, DTensor)]
    assert len(spread) == 4
    assert torch.equal(ddp.module.first.weight.full_tensor(), whole.first.weight)
    ddp.assert_in_sync()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (ddp, whole)]
    for step in range(4):
        rows = batch(step, group.size()).double()
        squares(ddp, share(rows, group)).backward()
        squares(whole, rows).backward()
        for parameter in spread:
            assert isinstance(parameter.grad, DTensor)
            assert parameter.grad.placements == parameter.placements
        # clip_grad_norm_ does not mix DTensors and plain tensors
        mine = nn.utils.clip_grad_norm_(spread, 0.01).full_tensor()
        assert_close(mine, nn.utils.clip_grad_norm_(list(whole.parameters())[:4], 0.01))
        for optimizer in optimizers:
            optimizer.step()
        compare(ddp, whole)
    ddp.assert_in_sync()


def accumulates(mesh):
    group = mesh[mesh.mesh_dim_names[0]].get_group()
    ddp, whole = make(mesh)
    for step in range(3):
        rows = batch(step, group.size()).double()
        with ddp.no_sync():
            squares(ddp, share(rows, group)).backward()
        squares(whole, rows).backward()
        for _ in range(2):  # the second on top of reduced gradients
            squares(ddp, share(rows, group)).backward()
            squares(whole, rows).backward()
        compare(ddp, whole)
    ddp.weight = 1 + group.rank()
    total = sum(range(1, group.size() + 1))
    for step in range(3):
        rows = batch(step, group.size()).double()
        squares(ddp, share(rows, group)).backward()
        for rank, part in enumerate(rows.split(ROWS)):
            (squares(whole, part) * (1 + rank) / total).backward()
        compare(ddp, whole)


def weighs_nothing(mesh):
    """Begin with a micro-batch of weight 0, which leaves zeros where there was no gradient."""
    group = mesh[mesh.mesh_dim_names[0]].get_group()
    ddp, whole = make(mesh)
    for step in range(3):
        rows = batch(step, group.size()).double()
        with ddp.no_sync():
            ddp.backward(squares(ddp, share(rows, group)), weight=0)
        assert all(p.grad is not None for p in ddp.parameters())
        ddp.backward(squares(ddp, share(rows, group)), weight=1)
        squares(whole, rows).backward()
        compare(ddp, whole)


def runs_out_of_data(mesh, with_hook):
    """Take over gradients, weights and momentum of the rank that had data to the end."""
    group = mesh[mesh.mesh_dim_names[0]].get_group()
    ddp, _ = make(mesh)
    if with_hook:
        ddp.register_comm_hook(None, allreduce_hook)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    with ddp.join(optimizers=[optimizer]):
        for step in range(2 * group.rank() + 1):
            squares(ddp, share(batch(step, group.size()).double(), group)).backward()
            optimizer.step()
            if step < 2:  # rank 0 ends without gradients
                optimizer.zero_grad()
    momenta = [optimizer.state[p]["momentum_buffer"] for p in ddp.parameters()]
    for tensors in ([p.grad for p in ddp.parameters()], momenta):
        parts = [t.to_local() if isinstance(t, DTensor) else t for t in tensors]
        assert sum(isinstance(t, DTensor) for t in tensors) == 4
        flat = torch.cat([part.flatten() for part in parts])
        first, second = ddp._comm.gather(flat)
        assert flat.any()
        assert torch.equal(first, second)
    optimizer.step()
    ddp.assert_in_sync()


def leaves_out(mesh):
    """Use the sharded layers on some ranks only, then on none."""
    group = mesh[mesh.mesh_dim_names[0]].get_group()
    ddp, whole = make(mesh)
    rows = batch(0, group.size()).double()
    for users in ([0], [0, 1], [], [1]):
        for rank, part in enumerate(rows.split(ROWS)):
            (whole(part, rank in users).square().mean() / group.size()).backward()
        ddp(share(rows, group), group.rank() in users).square().mean().backward()
        compare(ddp, whole)


def takes_a_hook(mesh):
    """Reduce local shards with a hook, which sees the DTensor parameters."""
    group = mesh[mesh.mesh_dim_names[0]].get_group()
    ddp, whole = make(mesh)
    seen = []

    def hook(state, bucket):
        seen.extend(bucket.parameters())
        return allreduce_hook(state, bucket)

    ddp.register_comm_hook(None, hook)
    for step in range(3):
        rows = batch(step, group.size()).double()
        squares(ddp, share(rows, group)).backward()
        squares(whole, rows).backward()
        compare(ddp, whole)
    assert {id(p) for p in seen} == {id(p) for p in ddp.parameters()}


def computes_in_low_precision(mesh):
    """Compute in a lower precision, including sharded and recomputed layers."""
    group = mesh[mesh.mesh_dim_names[0]].get_group()
    precision = MixedPrecision(torch.float32, reduce_dtype=torch.float64)
    ddp, whole = make(mesh, mixed_precision=precision, bucket_cap_mb=TINY)
    seen = set()
    ddp.module.first.register_forward_hook(lambda layer, *_: seen.add(layer.weight.dtype))
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (ddp, whole)]
    for step in range(4):
        rows = batch(step, group.size()).double()
        with ddp.no_sync():
            recomputed(ddp, share(rows, group), step).backward()
        squares(whole, rows).backward()
        recomputed(ddp, share(rows, group), step).backward()
        squares(whole, rows).backward()
        assert all(p.dtype == p.grad.dtype == torch.float64 for p in ddp.parameters())
        for optimizer in optimizers:
            optimizer.step()
        compare(ddp, whole, rtol=1e-5)
    assert seen == {torch.float32}
    assert all(p.dtype == torch.float64 for p in ddp.state_dict().values())
    ddp.assert_in_sync()


def recomputed(ddp, rows, step):
    """Return a loss; every other step uses activation checkpointing."""
    ddp.module.recomputes = step % 2 == 1
    return squares(ddp, rows)


def reduces_in_low_precision(mesh):
    group = mesh[mesh.mesh_dim_names[0]].get_group()
    ddp, whole = make(mesh, mixed_precision=MixedPrecision(reduce_dtype=torch.float32))
    for step in range(3):
        rows = batch(step, group.size()).double()
        squares(ddp, share(rows, group)).backward()
        squares(whole, rows).backward()
        assert all(p.dtype == p.grad.dtype == torch.float64 for p in ddp.parameters())
        compare(ddp, whole, rtol=1e-5)


def differs(mesh):
    ddp, _ = make(mesh)
    data = mesh[mesh.mesh_dim_names[0]].get_group()
    if data.rank() == 1:
        ddp.module.first.weight.to_local().data.add_(1)
    with pytest.raises(RankMismatch, match="parameter 'first.weight' differs"):
        ddp.assert_in_sync()


def copies(mesh):
    ddp, _ = make(mesh)
    state = copy.deepcopy(ddp.state_dict())
    assert isinstance(state["module.first.weight"], DTensor)
    ddp.module.first.weight.to_local().data.zero_()
    ddp.load_state_dict(state)
    assert ddp.module.first.weight.to_local().abs().sum() > 0


BODIES = {
    body.__name__: body
    for body in (
        trains,
        accumulates,
        weighs_nothing,
        runs_out_of_data,
        leaves_out,
        takes_a_hook,
        computes_in_low_precision,
        reduces_in_low_precision,
        differs,
        copies,
    )
}


@pytest.mark.parametrize(
    ("backend", "keeps"), [("gloo", True), ("shm", False)], ids=["gloo-views", "shm-own"]
)
def test_gradients_match_the_unsharded_model(ranks, backend, keeps):
    ranks.run(on_mesh, 4, args=(backend, "trains", keeps))


@pytest.mark.parametrize(
    ("backend", "name"),
    [
        ("gloo", "accumulates"),
        ("shm", "weighs_nothing"),
        ("gloo", "leaves_out"),
        ("shm", "takes_a_hook"),
        ("gloo", "computes_in_low_precision"),
        ("shm", "reduces_in_low_precision"),
    ],
)
def test_features_with_dtensor_parameters(ranks, backend, name):
    ranks.run(on_mesh, 4, args=(backend, name))


@pytest.mark.parametrize("backend", ["gloo", "shm"])
@pytest.mark.parametrize("with_hook", [True, False], ids=["shadowed", "left"])
def test_uneven_inputs(ranks, backend, with_hook):
    ranks.run(on_mesh, 4, args=(backend, "runs_out_of_data", with_hook))


@pytest.mark.parametrize("name", ["differs", "copies"])
def test_dtensor_sync_check_and_state_dict(ranks, name):
    ranks.run(on_mesh, 4, args=("shm", name))
