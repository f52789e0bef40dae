"""The constructor: what it takes, and what it refuses as upstream does."""

import inspect

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import phalanx
from phalanx import groups
from phalanx.ddp import DDP, DistributedDataParallel
from phalanx.errors import InvalidType
from phalanx.mesh import init_device_mesh
from phalanx.testing import over_groups

from .whole import (
    TINY,
    alone,
    batch,
    everywhere,
    mlp,
    operations,
    over_cases,
    seeded,
    share,
    squares,
    train,
)


def test_it_has_upstreams_parameters_in_upstreams_order():
    ours = list(inspect.signature(DDP).parameters)
    theirs = list(inspect.signature(TorchDDP).parameters)
    assert ours[: len(theirs)] == theirs
    assert inspect.signature(DDP).parameters["gradient_as_bucket_view"].default is True
    assert phalanx.DDP is phalanx.DistributedDataParallel is DistributedDataParallel is DDP


REFUSED = {
    "two groups": ({"device_mesh": object()}, RuntimeError, "not both"),
    "two devices": ({"device_ids": [0, 1]}, ValueError, "exactly one device"),
    "a device": ({"device_ids": [0]}, ValueError, "accelerator"),
    "an output device": ({"output_device": 1}, ValueError, "accelerator"),
    "a delay": ({"delay_all_reduce_named_params": [("a", 1)]}, ValueError, "together"),
    "a hook": ({"param_to_hook_all_reduce": nn.Parameter(torch.ones(1))}, ValueError, "together"),
    "a size": ({"bucket_cap_mb": 0}, ValueError, "MiB"),
    "a size that is no number": ({"bucket_cap_mb": float("nan")}, ValueError, "MiB"),
    "sizes": ({"bucket_cap_mb_list": [1, -1]}, ValueError, "MiB"),
    "a count": ({"check_sync_every": -3}, ValueError, "check_sync_every must be an integer"),
    "no count": ({"check_sync_every": "x"}, ValueError, "check_sync_every must be an integer"),
    "a reduction": ({"reduce": "max"}, ValueError, "mean.*sum"),
}


@alone
@pytest.mark.parametrize("case", REFUSED)
def test_arguments_that_are_refused(group, case):
    options, error, told = REFUSED[case]
    with pytest.raises(error, match=told):
        DDP(mlp(), process_group=group, **options)


@alone
def test_modules_that_are_refused(group):
    still = mlp().requires_grad_(False)
    spread = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2, device="meta")])
    for module, error, told in [
        (still, RuntimeError, "requires a gradient"),
        (nn.Tanh(), RuntimeError, "no parameters"),
        (spread, ValueError, "different types"),
        (nn.LazyLinear(3), RuntimeError, "no shape yet"),
        (nn.Linear(2, 2, device="meta"), RuntimeError, "meta"),
    ]:
        with pytest.raises(error, match=told):
            DDP(module, process_group=group)


@alone
def test_what_is_not_a_group(group):
    with pytest.raises(TypeError, match="group"):
        DDP(mlp(), process_group="gloo")
    with pytest.raises(InvalidType, match="got NON_GROUP_MEMBER"):
        DDP(mlp(), process_group=dist.GroupMember.NON_GROUP_MEMBER)
    with pytest.raises(ValueError, match="no group"):
        DDP(mlp())


@everywhere
def test_the_current_group_is_taken(group):
    with groups.process_group(group):
        ddp = DDP(mlp())
    assert ddp.process_group is group


@everywhere
def test_no_syncing_at_the_start(group):
    module = seeded(mlp, seed=group.rank())
    before = [p.detach().clone() for p in module.parameters()]
    wrappers = []
    told = operations(
        group, lambda: wrappers.append(DDP(module, process_group=group, init_sync=False))
    )
    assert told == []
    assert all(map(torch.equal, before, wrappers[0].parameters()))


@everywhere
def test_syncing_at_the_start_is_one_check_and_one_broadcast(group):
    module = seeded(mlp, seed=group.rank())
    told = operations(group, lambda: DDP(module, process_group=group))
    assert told == ["allgather", "broadcast"]


def train_on(mesh, group):
    """Train a little on a mesh, and compare."""

    ddp = DDP(seeded(mlp, seed=group.rank()), device_mesh=mesh)
    whole = seeded(mlp)
    rows = batch(0, group.size())
    squares(ddp, share(rows, group)).backward()
    squares(whole, rows).backward()
    for mine, theirs in zip(ddp.parameters(), whole.parameters(), strict=True):
        assert torch.allclose(mine.grad, theirs.grad, atol=1e-6)
    assert ddp.device_mesh is mesh


@over_cases("local-1", "shm-2", "local-4")
def test_a_mesh_of_ours(group):
    with groups.process_group(group):
        train_on(init_device_mesh("cpu", (group.size(),), mesh_dim_names=("dp",)), group)


@over_groups(backends=("shm",), sizes=(4,), reuse=True)
def test_an_axis_of_a_mesh_of_ours_and_not_two(group):
    with groups.process_group(group):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        train_on(mesh["dp"], mesh["dp"].get_group())
        with pytest.raises(RuntimeError, match="one axis.*has 2"):
            DDP(mlp(), device_mesh=mesh)


@everywhere
def test_flags_of_another_kind(group):
    train(mlp, group, squares, dim=0, forward_sync_buffers=True, bucket_cap_mb_list=[TINY, 1],
          skip_all_reduce_unused_params=True, batched_grad_copy=True)  # fmt: skip
