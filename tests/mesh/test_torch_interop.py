"""Our mesh in torch's DTensor, tensor parallelism and FSDP2, and conversion both ways."""

import io
import itertools
import pickle
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import init_device_mesh as torch_init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.testing._internal.distributed.fake_pg import FakeStore

from phalanx.groups import ProcessGroup
from phalanx.mesh import DeviceMesh, init_device_mesh

SECONDS = timedelta(seconds=20)


def on_default_group(ctx, body):
    dist.init_process_group(
        "gloo", store=ctx.store, rank=ctx.rank, world_size=ctx.size, timeout=SECONDS
    )
    try:
        body(ctx, init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")))
        dist.barrier()
    finally:
        dist.destroy_process_group()


def on_our_group(ctx, body, backend):
    """Run on one of our groups, installed as torch's default group."""
    group = ctx.group(backend)
    # DTensor caches results per mesh by equality, so this mesh must be unlike any other.
    names = (f"dp of {backend}", f"tp of {backend}")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names, group=group)
    mesh.to_torch(as_default=True)
    try:
        assert dist.group.WORLD is group
        body(ctx, mesh)
        dist.barrier()
    finally:
        mesh.shutdown()
        dist.destroy_process_group()


def distributes(ctx, mesh):
    theirs = mesh.to_torch()
    assert theirs is mesh.to_torch()
    assert [theirs.get_group(axis) for axis in (0, 1)] == mesh.get_all_groups()
    assert theirs.get_coordinate() == mesh.get_coordinate()
    matrix = torch.arange(16.0).reshape(4, 4)
    spread = distribute_tensor(matrix, theirs, [Shard(0), Shard(1)])
    row, column = mesh.get_coordinate()
    assert torch.equal(spread.to_local(), matrix.chunk(2)[row].chunk(2, 1)[column])
    rows = spread.redistribute(theirs, [Replicate(), Shard(0)])
    assert torch.equal(rows.to_local(), matrix.chunk(2)[column])
    whole = spread.redistribute(theirs, [Replicate(), Replicate()])
    assert torch.equal(whole.to_local(), matrix)
    assert torch.equal((spread @ whole).full_tensor(), matrix @ matrix)


def is_accepted_by_dtensor(ctx, mesh):
    """DTensor works on our mesh itself, without a conversion."""
    matrix = torch.arange(16.0).reshape(4, 4)
    spread = distribute_tensor(matrix, mesh, [Shard(0), Shard(1)])
    row, column = mesh.get_coordinate()
    assert torch.equal(spread.to_local(), matrix.chunk(2)[row].chunk(2, 1)[column])
    whole = spread.redistribute(mesh, [Replicate(), Replicate()])
    assert torch.equal(whole.to_local(), matrix)
    assert torch.equal((spread @ whole).full_tensor(), matrix @ matrix)


def is_the_current_mesh_of_torch(ctx, mesh):
    matrix = torch.arange(16.0).reshape(4, 4)
    with mesh, mesh.to_torch(), mesh:
        spread = distribute_tensor(matrix, placements=[Shard(0), Shard(1)])
    assert spread.device_mesh is mesh
    with pytest.raises(RuntimeError, match="No device mesh"):
        distribute_tensor(matrix, placements=[Shard(0), Shard(1)])


def has_flattened_meshes_that_dtensor_finds(ctx, mesh):
    mesh.flatten("all")
    summands = DTensor.from_local(torch.ones(2), mesh, [Partial(), Partial()])
    with CommDebugMode() as communication:
        total = summands.redistribute(mesh, [Replicate(), Replicate()]).to_local()
    assert total.tolist() == [4.0, 4.0]
    assert communication.get_total_counts() == 1


def is_loaded_with_weights_only(ctx, mesh):
    data, _ = mesh.mesh_dim_names
    for each in (mesh, mesh[data], mesh.flatten("every rank")):
        spread = distribute_tensor(torch.arange(16.0), each, [Replicate()] * each.ndim)
        file = io.BytesIO()
        torch.save({"weight": spread}, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=True)["weight"]
        assert loaded.device_mesh == each
        assert torch.equal(loaded.to_local(), spread.to_local())


def communicates_along_one_axis_only(ctx, mesh):
    """Ranks 1 and 3 never call: the groups of the other axis must not be formed."""
    if ctx.rank in (0, 2):
        data, _ = mesh.mesh_dim_names
        assert funcol.all_reduce(torch.ones(1), "sum", (mesh, 0)).item() == 2
        assert funcol.all_reduce(torch.ones(1), "sum", mesh[data]).item() == 2
        assert mesh._dim_group_names[0] == mesh._dim_group_names[-2] == mesh.get_group(0).group_name
        assert list(mesh._pg_registry) == [mesh.get_group(0).group_name]


FUNCTIONAL = {
    "all_reduce": lambda t, on: funcol.all_reduce(t, "avg", on),
    "all_gather_single": lambda t, on: funcol.all_gather_single(t, 1, on),
    "reduce_scatter_single": lambda t, on: funcol.reduce_scatter_single(t, "sum", 0, on),
    "all_to_all_single": lambda t, on: funcol.all_to_all_single(t, [2, 2], [2, 2], on),
    "broadcast": lambda t, on: funcol.broadcast(t, 0, on),
    "permute_tensor": lambda t, on: funcol.permute_tensor(t.flatten(), [1, 0], on),
    "all_reduce_coalesced": lambda t, on: funcol.all_reduce_coalesced([t, t * 2], "max", on),
}


def runs_functional_collectives_as_torchs_mesh(ctx, mesh):
    names = mesh.mesh_dim_names
    theirs = torch_init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
    tensor = torch.arange(8.0).reshape(4, 2) + 100 * ctx.rank
    for name, call in FUNCTIONAL.items():
        for axis in (0, 1):
            expected = call(tensor, (theirs, axis))
            for ours in ((mesh, axis), mesh[names[axis]]):
                torch.testing.assert_close(call(tensor, ours), expected, msg=name)
    expected = funcol.all_reduce(tensor, "sum", theirs._flatten("every"))
    torch.testing.assert_close(funcol.all_reduce(tensor, "sum", mesh.flatten("every")), expected)


def replicates_as_torchs_mesh(ctx, mesh):
    """`replicate` on FSDP2, on a slice of our mesh and of torch's."""
    data, _ = mesh.mesh_dim_names
    theirs = torch_init_device_mesh("cpu", (2, 2), mesh_dim_names=mesh.mesh_dim_names)
    gradients = []
    for each in (mesh, theirs):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
        replicate(net, mesh=each[data])
        net(torch.full((2, 4), 1.0 + ctx.rank)).square().mean().backward()
        gradients.append([parameter.grad.full_tensor() for parameter in net.parameters()])
    torch.testing.assert_close(*gradients)


def trains_in_parallel_directly(ctx, mesh):
    trains_in_parallel(ctx, mesh, convert=lambda each: each)


def trains_in_parallel(ctx, mesh, convert=DeviceMesh.to_torch):
    data, model = mesh.mesh_dim_names
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4), nn.Tanh())
    batch = torch.randn(4, 4)
    expected = net(batch)
    expected.square().mean().backward()
    gradient = net[0].weight.grad.clone()
    net.zero_grad()
    parallelize_module(net, convert(mesh[model]), {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(net, mesh=convert(mesh[data]))
    output = net(batch)
    assert torch.allclose(output, expected, atol=1e-6)
    output.square().mean().backward()
    assert torch.allclose(net[0].weight.grad.full_tensor(), gradient, atol=1e-6)


def comes_back(ctx, mesh):
    theirs = mesh.to_torch()
    _, model = mesh.mesh_dim_names
    part = mesh[model].to_torch()
    assert part._get_root_mesh() is theirs
    for ours, torchs in ((mesh, theirs), (mesh[model], part)):
        again = DeviceMesh.from_torch(torchs)
        assert again == ours
        assert again.get_all_groups() == ours.get_all_groups()
        assert again.to_torch() == torchs
    flat = mesh.flatten("both")
    assert flat.to_torch().mesh.tolist() == [0, 1, 2, 3]
    assert theirs.get_group("both") is mesh.get_group("both")
    assert DeviceMesh.from_torch(theirs)["both"] == flat
    unflat = mesh.unflatten(0, (1, 2), ("u", "v")).to_torch()
    assert unflat.mesh_dim_names == ("u", "v", model)
    assert unflat.get_group("v").size() == 2


def takes_torchs_own(ctx, mesh):
    theirs = torch_init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    ours = DeviceMesh.from_torch(theirs)
    assert ours.shape == (2, 2)
    for name in "ab":
        group = theirs.get_group(name)
        assert not isinstance(group, ProcessGroup)
        assert ours.get_group(name) is ours[name].get_group() is group
        assert DeviceMesh.from_torch(theirs[name]).get_group() is group
    assert isinstance(mesh.get_group(1), ProcessGroup)  # the same ranks, but made by us
    unnamed = DeviceMesh.from_torch(torch_init_device_mesh("cpu", (4, 1)))
    assert unnamed.mesh_dim_names is None
    assert unnamed.get_group(0) is dist.group.WORLD


def takes_torchs_groups_of_the_same_ranks(ctx, mesh):
    theirs = torch_init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("a", "b", "c"))
    flat = theirs["a", "b"]._flatten("ab")
    assert flat.get_group() is not theirs.get_group("a")
    assert DeviceMesh.from_torch(flat).get_group() is flat.get_group()
    ours = DeviceMesh.from_torch(theirs)
    for each in (ours, pickle.loads(pickle.dumps(ours))):
        assert each["a"].get_group() is theirs.get_group("a")
        assert each["ab"].get_group() is flat.get_group()
    renamed = ours["a"].unflatten(0, (2, 1), ("x", "y"))
    assert renamed.get_group("x") is theirs.get_group("a")


BODIES = [
    distributes,
    is_accepted_by_dtensor,
    is_the_current_mesh_of_torch,
    has_flattened_meshes_that_dtensor_finds,
    trains_in_parallel,
    trains_in_parallel_directly,
    comes_back,
]


@pytest.mark.parametrize(
    "body",
    [
        *BODIES,
        is_loaded_with_weights_only,
        communicates_along_one_axis_only,
        runs_functional_collectives_as_torchs_mesh,
        replicates_as_torchs_mesh,
        takes_torchs_own,
        takes_torchs_groups_of_the_same_ranks,
    ],
    ids=lambda b: b.__name__,
)
def test_interop_on_torchs_default_group(ranks, body):
    ranks.run(on_default_group, 4, args=(body,))


@pytest.mark.parametrize(
    ("body", "backend"),
    list(zip([*BODIES, is_loaded_with_weights_only], itertools.cycle(["shm", "gloo"]))),
    ids=lambda each: getattr(each, "__name__", each),
)
def test_interop_on_our_group(ranks, body, backend):
    ranks.run(on_our_group, 4, args=(body, backend))


def test_a_functional_collective_is_compiled_once():
    from torch._dynamo.testing import CompileCounter  # takes a second

    dist.init_process_group("fake", rank=1, world_size=4, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        counter = CompileCounter()

        @torch.compile(backend=counter, fullgraph=True)
        def twice(tensor):
            return funcol.all_reduce(tensor, "sum", (mesh, 0)) * 2

        for _ in range(3):
            twice(torch.ones(1))
        assert counter.frame_count == 1
        mesh.shutdown()
    finally:
        dist.destroy_process_group()


def without_a_default(ctx):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"), group=ctx.group("local"))
    assert mesh.to_torch().mesh.tolist() == [[0, 1], [2, 3]]
    with pytest.raises(RuntimeError, match="as_default=True"):
        mesh["tp"].to_torch()
    half = ctx.closing(mesh.get_group("tp"))
    part = init_device_mesh("cpu", (2,), group=half)
    if ctx.rank > 1:
        with pytest.raises(RuntimeError, match="all global ranks"):
            part.to_torch(as_default=True)
        assert part.to_torch().mesh.tolist() == [2, 3]
    mesh.shutdown()


def test_a_root_mesh_converts_without_a_default_group(threads):
    threads.run(without_a_default, 4)
