"""Arguments of the DDP constructor."""

import inspect

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import phalanx
from cases import over_cases
from phalanx import groups
from phalanx.ddp import DDP, DistributedDataParallel
from phalanx.errors import InvalidType
from phalanx.mesh import init_device_mesh
from phalanx.testing import over_groups

from .whole import TINY, alone, batch, everywhere, mlp, operations, seeded, share, squares, train


def test_signature_starts_with_torchs_parameters():
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
def test_bad_arguments_are_rejected(group, case):
    options, error, told = REFUSED[case]
    with pytest.raises(error, match=told):
        DDP(mlp(), process_group=group, **options)


@alone
def test_bad_modules_are_rejected(group):
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
def test_missing_or_bad_group_is_rejected(group):
    with pytest.raises(TypeError, match="group"):
        DDP(mlp(), process_group="gloo")
    with pytest.raises(InvalidType, match="got NON_GROUP_MEMBER"):
        DDP(mlp(), process_group=dist.GroupMember.NON_GROUP_MEMBER)
    with pytest.raises(ValueError, match="no group"):
        DDP(mlp())


@everywhere
def test_default_is_the_current_group(group):
    with groups.process_group(group):
        ddp = DDP(mlp())
    assert ddp.process_group is group


@everywhere
def test_init_sync_false_makes_no_collective(group):
    module = seeded(mlp, seed=group.rank())
    before = [p.detach().clone() for p in module.parameters()]
    wrappers = []
    told = operations(
        group, lambda: wrappers.append(DDP(module, process_group=group, init_sync=False))
    )
    assert told == []
    assert all(map(torch.equal, before, wrappers[0].parameters()))


@everywhere
def test_init_sync_is_one_allgather_and_one_broadcast(group):
    module = seeded(mlp, seed=group.rank())
    told = operations(group, lambda: DDP(module, process_group=group))
    assert told == ["allgather", "broadcast"]


def train_on(mesh, group):
    """Run one backward pass on a mesh and compare gradients."""

    ddp = DDP(seeded(mlp, seed=group.rank()), device_mesh=mesh)
    whole = seeded(mlp)
    rows = batch(0, group.size())
    squares(ddp, share(rows, group)).backward()
    squares(whole, rows).backward()
    for mine, theirs in zip(ddp.parameters(), whole.parameters(), strict=True):
        assert torch.allclose(mine.grad, theirs.grad, atol=1e-6)
    assert ddp.device_mesh is mesh


@over_cases("local-1", "shm-2", "local-4")
def test_device_mesh_argument(group):
    with groups.process_group(group):
        train_on(init_device_mesh("cpu", (group.size(),), mesh_dim_names=("dp",)), group)


@over_groups(backends=("shm",), sizes=(4,), reuse=True)
def test_one_mesh_axis_is_accepted_and_two_are_rejected(group):
    with groups.process_group(group):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        train_on(mesh["dp"], mesh["dp"].get_group())
        with pytest.raises(RuntimeError, match="one axis.*has 2"):
            DDP(mlp(), device_mesh=mesh)


@everywhere
def test_torchs_performance_flags_are_accepted(group):
    train(mlp, group, squares, dim=0, forward_sync_buffers=True, bucket_cap_mb_list=[TINY, 1],
          skip_all_reduce_unused_params=True, batched_grad_copy=True)  # fmt: skip
