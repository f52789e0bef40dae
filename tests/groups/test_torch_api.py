"""torch's own API accepts our groups: functions, functional collectives and torch's DDP."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch._C import _distributed_c10d as c10d
from torch.distributed import ReduceOp
from torch.nn.parallel import DistributedDataParallel

from phalanx.errors import CollectiveTimeout
from phalanx.groups import current_process_group, process_group
from phalanx.testing import over_groups

over_two = over_groups(sizes=(2,), reuse=True)
over_split = over_groups(sizes=(2,), split=True, reuse=True)


def pair(group):
    """Return this rank's input: ``[1, 2]`` on rank 0 and ``[3, 4]`` on rank 1."""
    return torch.tensor([[1.0, 2.0], [3.0, 4.0]])[group.rank()]


def blanks(count=2, length=2):
    return [torch.zeros(length) for _ in range(count)]


# -- group properties ----------------------------------------------------------------------


@over_split
def test_torch_reports_ranks_size_and_backend_of_the_group(group):
    assert isinstance(group, dist.ProcessGroup)
    assert dist.get_process_group_ranks(group) == list(group.global_ranks)
    assert dist.get_world_size(group) == group.size() == 2
    assert dist.get_backend(group) == group.backend
    for rank, global_rank in enumerate(group.global_ranks):
        assert dist.get_group_rank(group, global_rank) == rank
        assert dist.get_global_rank(group, rank) == global_rank


@over_two
def test_the_current_group_is_visible_to_torch(group):
    before = current_process_group()
    with process_group(group):
        assert current_process_group() is group
        assert c10d._current_process_group() is group
    assert current_process_group() is before


# -- functions of torch.distributed --------------------------------------------------------


@over_split
def test_reductions(group):
    last = group.global_ranks[1]
    tensor = pair(group)
    dist.all_reduce(tensor, group=group)
    assert tensor.tolist() == [4.0, 6.0]
    tensor = pair(group)
    work = dist.all_reduce(tensor, ReduceOp.MAX, group=group, async_op=True)
    work.wait()
    assert tensor.tolist() == [3.0, 4.0]
    for destination in ({"dst": last}, {"group_dst": 1}):
        tensor = pair(group)
        dist.reduce(tensor, **destination, group=group)
        assert tensor.tolist() == [[1.0, 2.0], [4.0, 6.0]][group.rank()]
    output = torch.zeros(1)
    dist.reduce_scatter(output, list(pair(group).view(2, 1)), group=group)
    assert output.tolist() == [[4.0, 6.0][group.rank()]]
    dist.reduce_scatter_single(output, pair(group), ReduceOp.AVG, group=group)
    assert output.tolist() == [[2.0, 3.0][group.rank()]]


@over_split
def test_roots_can_be_global_ranks_or_group_ranks(group):
    last = group.global_ranks[1]
    for source in ({"src": last}, {"group_src": 1}):
        tensor = pair(group)
        dist.broadcast(tensor, **source, group=group)
        assert tensor.tolist() == [3.0, 4.0]
        mine, root = torch.zeros(1), group.rank() == 1
        parts = list(pair(group).view(2, 1)) if root else None
        dist.scatter(mine, parts, **source, group=group)
        assert mine.tolist() == [[3.0, 4.0][group.rank()]]
    for destination in ({"dst": last}, {"group_dst": 1}):
        outputs = blanks() if group.rank() == 1 else None
        dist.gather(pair(group), outputs, **destination, group=group)
        if outputs is not None:
            assert [each.tolist() for each in outputs] == [[1.0, 2.0], [3.0, 4.0]]


@over_split
def test_gather_and_all_to_all_functions(group):
    outputs = blanks()
    dist.all_gather(outputs, pair(group), group=group)
    assert [each.tolist() for each in outputs] == [[1.0, 2.0], [3.0, 4.0]]
    whole = torch.zeros(4)
    dist.all_gather_single(whole, pair(group), group=group)
    assert whole.tolist() == [1.0, 2.0, 3.0, 4.0]
    expected = [[1.0, 3.0], [2.0, 4.0]][group.rank()]
    output = torch.zeros(2)
    dist.all_to_all_single(output, pair(group), group=group)
    assert output.tolist() == expected
    dist.all_to_all_single(output.zero_(), pair(group), [1, 1], [1, 1], group=group)
    assert output.tolist() == expected
    outputs = blanks(length=1)
    dist.all_to_all(outputs, list(pair(group).view(2, 1)), group=group)
    assert torch.cat(outputs).tolist() == expected
    dist.barrier(group=group)
    if group.backend == "gloo":  # torch lets no other backend have it
        dist.monitored_barrier(group=group, timeout=timedelta(seconds=10))


@over_split
def test_object_collectives(group):
    everybodys = [None, None]
    dist.all_gather_object(everybodys, {"rank": group.rank(), "x": "y" * group.rank()}, group=group)
    assert everybodys == [{"rank": 0, "x": ""}, {"rank": 1, "x": "y"}]
    mine = [group.rank(), "from rank 1"] if group.rank() == 1 else [None, None]
    dist.broadcast_object_list(mine, group_src=1, group=group)
    assert mine == [1, "from rank 1"]
    received = [None]
    parts = ["for 0", "for 1"] if group.rank() == 0 else None
    dist.scatter_object_list(received, parts, group_src=0, group=group)
    assert received == [f"for {group.rank()}"]
    everybodys = [None, None] if group.rank() == 0 else None
    dist.gather_object(group.rank(), everybodys, group_dst=0, group=group)
    assert everybodys == ([0, 1] if group.rank() == 0 else None)


@over_split
def test_point_to_point(group):
    peer = 1 - group.rank()
    received = torch.zeros(2)
    works = [
        dist.isend(pair(group), group.global_ranks[peer], group=group, tag=3),
        dist.irecv(received, group_src=peer, group=group, tag=3),
    ]
    for work in works:
        work.wait()
    assert received.tolist() == [[3.0, 4.0], [1.0, 2.0]][group.rank()]
    transfers = [
        dist.P2POp(dist.isend, pair(group) * 10, group=group, group_peer=peer),
        dist.P2POp(dist.irecv, received, group=group, group_peer=peer),
    ]
    for work in dist.batch_isend_irecv(transfers):
        work.wait()
    assert received.tolist() == [[30.0, 40.0], [10.0, 20.0]][group.rank()]
    if group.rank() == 0:
        dist.send(pair(group), group_dst=1, group=group)
    else:
        assert dist.recv(received, group=group) == group.global_ranks[0]
        assert received.tolist() == [1.0, 2.0]


@over_two
def test_coalesced_calls(group):
    tensors = [pair(group), pair(group) * 10]
    with dist._coalescing_manager(group=group, async_ops=True) as together:
        for tensor in tensors:
            dist.all_reduce(tensor, group=group)
    together.wait()
    assert [tensor.tolist() for tensor in tensors] == [[4.0, 6.0], [40.0, 60.0]]


# -- functional collectives ----------------------------------------------------------------


@over_two
def test_functional_collectives_on_one_tensor(group):
    mine = pair(group)
    assert functional.all_reduce(mine, "sum", group).tolist() == [4.0, 6.0]
    assert functional.all_reduce(mine, "avg", group).tolist() == [2.0, 3.0]
    assert functional.broadcast(mine, 1, group).tolist() == [3.0, 4.0]
    assert functional.all_gather_single(mine, 0, group).tolist() == [1.0, 2.0, 3.0, 4.0]
    scattered = functional.reduce_scatter_single(mine, "sum", 0, group)
    assert scattered.tolist() == [[4.0, 6.0][group.rank()]]
    exchanged = functional.all_to_all_single(mine, [1, 1], [1, 1], group)
    assert exchanged.tolist() == [[1.0, 3.0], [2.0, 4.0]][group.rank()]
    assert mine.tolist() == pair(group).tolist()


@over_two
def test_functional_collectives_on_several_tensors(group):
    mine = [pair(group), pair(group) * 10]
    summed = functional.all_reduce_coalesced(mine, "sum", group)
    assert [each.tolist() for each in summed] == [[4.0, 6.0], [40.0, 60.0]]
    gathered = functional.all_gather_single_coalesced(mine, group)
    assert [each.tolist() for each in gathered] == [[1.0, 2.0, 3.0, 4.0], [10.0, 20.0, 30.0, 40.0]]
    parts = functional.reduce_scatter_single_coalesced(mine, "sum", [0, 0], group)
    assert torch.cat(parts).tolist() == [[4.0, 40.0], [6.0, 60.0]][group.rank()]


@over_two
def test_gradients_flow_through_functional_collectives(group):
    mine = pair(group).requires_grad_()
    whole = functional.all_gather_single_autograd(mine, 0, group)
    (whole * torch.arange(4.0)).sum().backward()
    expected = [[0.0, 2.0], [4.0, 6.0]][group.rank()]  # every rank's gradient, summed
    assert mine.grad.tolist() == expected


@over_groups(sizes=(2,))
def test_a_functional_collective_raises_collective_timeout(group, ctx):
    if group.rank() == 1:
        ctx.store.wait(["failed"])
        return
    group.set_timeout(timedelta(milliseconds=300))
    result = functional.all_reduce(pair(group), "sum", group)
    with pytest.raises(CollectiveTimeout, match="Missing: rank 1") as caught:
        result + 1
    assert caught.value.missing == (1,)
    ctx.store.set("failed", "")


# -- torch's own DDP -----------------------------------------------------------------------


def make_model():
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    generator = torch.Generator().manual_seed(3)  # of its own: thread ranks share torch's
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5, generator=generator)
    return model


def train(model, batches, labels):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for inputs, targets in zip(batches, labels, strict=True):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()


@over_two
def test_torch_ddp_matches_one_process_on_the_whole_batch(group):
    generator = torch.Generator().manual_seed(5)
    batches = torch.randn(3, 8, 4, generator=generator)
    labels = torch.randn(3, 8, 2, generator=generator)
    alone, shared = make_model(), make_model()
    if group.rank() == 1:
        for parameter in shared.parameters():
            parameter.data.zero_()  # DDP begins with rank 0's
    replica = DistributedDataParallel(shared, process_group=group)
    train(alone, batches, labels)
    part = slice(4 * group.rank(), 4 * group.rank() + 4)
    train(replica, batches[:, part], labels[:, part])
    for expected, found in zip(alone.parameters(), replica.parameters(), strict=True):
        torch.testing.assert_close(found, expected)
        everybodys = torch.zeros(2, found.numel())
        group.all_gather_single(everybodys, found.detach()).wait()
        assert torch.equal(everybodys[0], everybodys[1])
