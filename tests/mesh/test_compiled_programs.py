"""Compiled programs that use a mesh: they give the same with ours as with torch's own."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import nn
from torch.distributed.device_mesh import init_device_mesh as torch_init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from phalanx.mesh import init_device_mesh

pytestmark = pytest.mark.slow
ROWS = torch.arange(16.0).reshape(4, 4)


def compiled(function):
    return torch.compile(function, backend="aot_eager", fullgraph=True)


def numbers(mesh):
    """Read sizes and coordinates."""

    @compiled
    def run(rows):
        row, _ = mesh.get_coordinate()
        return rows * mesh.size() + mesh.ndim + mesh.size(1) + mesh.get_local_rank("tp") + row

    return run(ROWS)


def slices(mesh):
    """Slice and compare meshes."""

    @compiled
    def run(rows):
        part = DTensor.from_local(rows, mesh["tp"], [Shard(0)], run_check=False)
        return part.full_tensor() if part.device_mesh == mesh["tp"] else rows

    return run(ROWS)


def groups(mesh):
    """Get groups of axes, by number and by name, and of a flattened mesh."""

    @compiled
    def run(rows):
        rows = funcol.all_reduce(rows, "sum", mesh.get_group("tp"))
        rows = funcol.all_gather_tensor(rows, 0, (mesh, 0))
        return funcol.all_reduce(rows, "sum", mesh["dp", "tp"]._flatten("all"))

    return run(ROWS)


def redistribution(mesh):
    """Redistribute over both axes, forward and backward."""
    weight = distribute_tensor(ROWS, mesh, [Shard(0), Shard(1)]).requires_grad_()

    @compiled
    def run(weight):
        summand = DTensor.from_local(weight.to_local(), mesh, [Partial(), Partial()])
        total = summand.redistribute(mesh, [Replicate(), Replicate()]).to_local()
        return total.sum() + weight.redistribute(mesh, [Replicate(), Shard(1)]).to_local().sum()

    run(weight).backward()
    return weight.grad.to_local()


def tensor_parallelism(mesh):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    parallelize_module(net, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    output = compiled(net)(ROWS)
    output.sum().backward()
    return output.detach(), net[0].weight.grad.to_local()


def sharding(mesh):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    fully_shard(net, mesh=mesh["dp"])
    output = torch.compile(net, backend="aot_eager")(ROWS)
    output.sum().backward()
    return output.detach(), net[0].weight.grad.to_local()


def compare(ctx, program):
    dist.init_process_group("gloo", store=ctx.store, rank=ctx.rank, world_size=ctx.size)
    try:
        found = []
        for init in (torch_init_device_mesh, init_device_mesh):
            torch._dynamo.reset()
            mesh = init("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
            mesh._flatten("all")
            found.append(program(mesh))
        torch.testing.assert_close(found[1], found[0])
        dist.barrier()
        mesh.shutdown()
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    "program",
    [numbers, slices, groups, redistribution, tensor_parallelism, sharding],
    ids=lambda each: each.__name__,
)
def test_compiled_program_matches_torchs_mesh(ranks, program):
    ranks.run(compare, 2, args=(program,))
