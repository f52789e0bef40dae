"""What takes torch's DDP takes ours: checkpoints, state helpers, gradient scalers, replicate."""

import copy
import sys

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed._composable import replicate
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from phalanx.ddp import DDP
from phalanx.mesh import init_device_mesh

from .test_torch_groups import world
from .whole import ROWS, alone, assert_close, batch, mlp, on_pairs, seeded, share, squares


def both_kinds(group):
    return [kind(seeded(mlp), process_group=group) for kind in (DDP, TorchDDP)]


def train(ddp, optimizer, group, steps=2):
    for step in range(steps):
        optimizer.zero_grad()
        squares(ddp, share(batch(step, group.size()), group)).backward()
        optimizer.step()


# -- torch's checkpoints -------------------------------------------------------------------


@alone
def test_state_dict_helpers_leave_out_the_wrapper(group):
    for helper in (get_model_state_dict, lambda ddp: get_state_dict(ddp, [])[0]):
        ours, theirs = map(helper, both_kinds(group))
        assert list(ours) == list(theirs) == list(mlp().state_dict())
        torch.testing.assert_close(dict(ours), dict(theirs))


@on_pairs
def test_optimizer_state_helpers_match_torch(group):
    found = []
    for ddp in both_kinds(group):
        optimizer = torch.optim.Adam(ddp.parameters(), lr=0.1)
        train(ddp, optimizer, group)
        found.append(get_optimizer_state_dict(ddp, optimizer))
    ours, theirs = found
    assert ours["param_groups"] == theirs["param_groups"]
    assert list(ours["state"]) == [name for name, _ in mlp().named_parameters()]
    torch.testing.assert_close(ours["state"], theirs["state"])


@on_pairs
def test_state_set_by_the_helpers_continues_training(group):
    before, after = (DDP(seeded(mlp, seed), process_group=group) for seed in (0, 1))
    optimizers = [torch.optim.Adam(ddp.parameters(), lr=0.1) for ddp in (before, after)]
    train(before, optimizers[0], group)
    assert not set_model_state_dict(after, get_model_state_dict(before)).missing_keys
    state = get_optimizer_state_dict(before, optimizers[0])
    set_optimizer_state_dict(after, optimizers[1], copy.deepcopy(state))
    for ddp, optimizer in zip((before, after), optimizers, strict=True):
        train(ddp, optimizer, group, steps=1)
    for mine, other in zip(after.parameters(), before.parameters(), strict=True):
        assert torch.equal(mine, other)


def saves_and_loads(ctx, path):
    with world(ctx):
        ours = DDP(seeded(mlp))
        with torch.no_grad():
            ours.module[0].weight.fill_(7)
        for name, state in (("wrapper", nn.Module.state_dict), ("module", get_model_state_dict)):
            dcp.save({"model": state(ours)}, checkpoint_id=f"{path}/{name}")
            for kind in (DDP, TorchDDP):
                loaded = kind(seeded(mlp, seed=3))
                dcp.load({"model": state(loaded)}, checkpoint_id=f"{path}/{name}")
                assert loaded.module[0].weight.eq(7).all()


def test_torchs_dcp_saves_and_loads_a_wrapped_module(ranks, tmp_path):
    """The checkpoint loads into our class and into torch's, with and without the wrapper."""
    ranks.run(saves_and_loads, 2, args=(str(tmp_path),))


# -- gradient scalers ----------------------------------------------------------------------


def scaled_steps(ddp, scaler, group):
    """Train with scaled losses; in the second step one rank's gradients are infinite."""
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    scales = []
    for step in range(4):
        optimizer.zero_grad()
        loss = squares(ddp, share(batch(step, group.size()), group))
        if step == 1 and group.rank() == group.size() - 1:
            loss = loss * torch.inf
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales


@on_pairs
@pytest.mark.parametrize("sharded", [False, True], ids=["GradScaler", "ShardedGradScaler"])
def test_gradient_scalers_match_torch(group, sharded):
    found = []
    for ddp in both_kinds(group):
        options = {"init_scale": 64.0, "growth_interval": 2}
        if sharded:
            scaler = ShardedGradScaler("cpu", process_group=group, **options)
        else:
            scaler = torch.amp.GradScaler("cpu", **options)
        found.append((scaled_steps(ddp, scaler, group), ddp.module.state_dict()))
    (scales, ours), (expected, theirs) = found
    assert scales == expected == [64.0, 32.0, 32.0, 64.0]
    torch.testing.assert_close(dict(ours), dict(theirs))


# -- replicate -----------------------------------------------------------------------------


def train_replicated(ctx, mesh, kind):
    rows = batch(0, ctx.size)
    whole, module = seeded(mlp), seeded(mlp, seed=ctx.rank)
    replicate(module, device_mesh=mesh)
    for step in range(3):
        module.set_requires_gradient_sync(step != 1)
        squares(module, rows[ctx.rank * ROWS :][:ROWS]).backward()
        if step == 0:  # the parameters are rank 0's from the first forward pass on
            module.zero_grad()
        else:
            squares(whole, rows).backward()
    for mine, other in zip(module.parameters(), whole.parameters(), strict=True):
        assert_close(mine.grad, other.grad)
    assert type(replicate.state(module)._ddp) is kind


def replicates(ctx, kind):
    """`replicate` wraps with the class of that name in its module."""
    composable = sys.modules["torch.distributed._composable.replicate"]
    wrapped_by, composable.DistributedDataParallel = composable.DistributedDataParallel, kind
    try:
        with world(ctx):
            mesh = init_device_mesh("cpu", (ctx.size,), mesh_dim_names=("dp",))
            train_replicated(ctx, mesh, kind)
            mesh.shutdown()
    finally:
        composable.DistributedDataParallel = wrapped_by


@pytest.mark.parametrize("kind", [DDP, TorchDDP], ids=["ours", "torchs"])
def test_replicate_works_with_our_class_and_our_mesh(ranks, kind):
    ranks.run(replicates, 2, args=(kind,))


# -- class and subclass --------------------------------------------------------------------


@alone
def test_a_wrapped_module_is_unwrapped_as_torchs(group):
    """As `nn.Module` helpers of other packages do."""
    ddp = DDP(nn.Linear(2, 2), process_group=group)
    assert isinstance(ddp, nn.parallel.DistributedDataParallel)
    assert (ddp.module if isinstance(ddp, TorchDDP) else None) is ddp.module
