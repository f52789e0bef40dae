"""Buffer synchronization: rank 0's buffers are broadcast before forward."""

import pytest
import torch
from torch import nn

from phalanx.ddp import DDP
from phalanx.testing import over_groups

from .whole import (
    ROWS,
    assert_same_gradients,
    batch,
    compare,
    everywhere,
    operations,
    seeded,
    share,
    squares,
    whole_loss,
)


class Counting(nn.Module):
    """Has buffers of several dtypes; forward changes one of them."""

    def __init__(self, rank=0):
        super().__init__()
        self.layer = nn.Linear(5, 3)
        self.register_buffer("count", torch.tensor(rank))
        self.register_buffer("scale", torch.full((3,), 1.0 + rank))
        self.register_buffer("mask", torch.tensor([True, rank == 0]), persistent=False)
        self.register_buffer("empty", torch.zeros(0))
        self.register_buffer("nothing", None)

    def forward(self, rows):
        self.count += 1
        return self.layer(rows) * self.scale


def make(group, **options):
    return DDP(seeded(lambda: Counting(group.rank())), process_group=group, **options)


@everywhere
def test_buffers_are_broadcast_at_construction_and_before_forward(group):
    ddp = make(group)
    inner, rank = ddp.module, group.rank()
    assert (inner.count, inner.mask.tolist(), inner.scale[0]) == (0, [True, True], 1)
    for step in range(3):
        inner.count += 10 * (rank + 1)
        inner.scale.fill_(rank + step)
        assert ddp.will_sync_module_buffers()
        ddp(torch.ones(1, 5)).sum().backward()
        assert inner.count == 11 * (step + 1)
        assert inner.scale.tolist() == [step] * 3


@everywhere
@pytest.mark.filterwarnings("ignore:broadcast_buffers")
def test_buffer_broadcast_can_be_turned_off(group):
    never = make(group, broadcast_buffers=False)
    at_start = make(group, forward_sync_buffers=False)
    assert never.module.count == group.rank()
    assert at_start.module.count == 0
    for ddp in (never, at_start):
        assert not ddp.will_sync_module_buffers()
        assert ddp.broadcast_buffers is False
        ddp.module.count += group.rank()
        before = int(ddp.module.count)
        ddp(torch.ones(1, 5))
        assert ddp.module.count == before + 1


@everywhere
def test_replaced_and_new_buffers_are_broadcast(group):
    ddp = make(group)
    ddp.module.scale = torch.full((3,), float(group.rank() + 7))
    ddp.module.register_buffer("new", torch.tensor([group.rank()]))
    ddp(torch.ones(1, 5))
    assert ddp.module.scale.tolist() == [7] * 3
    assert ddp.module.new == 0


class Moving(nn.Module):
    """Replaces its buffer tensor in every forward."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(5, 3)
        self.register_buffer("mean", torch.ones(3))

    def forward(self, rows):
        output = self.layer(rows)
        self.mean = self.mean * 0.5 + output.detach().mean(dim=0)
        return output * self.mean


@everywhere
def test_buffer_replaced_in_forward_is_broadcast(group):
    ddp, first = DDP(seeded(Moving), process_group=group), seeded(Moving)
    for step in range(4):
        rows = batch(step, group.size())
        squares(ddp, share(rows, group)).backward()
        first.mean, before = first.mean.clone(), first.mean
        for rank, part in reversed(list(enumerate(rows.split(ROWS)))):
            first.mean = before  # of rank 0, which comes last here
            (squares(first, part) / group.size()).backward()
            if rank == group.rank():
                assert torch.equal(ddp.module.mean, first.mean)
        assert_same_gradients(ddp.module, first)
        ddp.zero_grad()
        first.zero_grad()


@everywhere
def test_two_forwards_with_a_buffer_saved_by_autograd(group):
    ddp = make(group)
    whole = seeded(Counting)

    def loss(module, rows, step, rank):
        return squares(module, rows) + squares(module, rows * 2)

    for step in range(3):
        rows = batch(step, group.size())
        loss(ddp, share(rows, group), step, 0).backward()
        whole_loss(whole, rows, group, loss, step).backward()
        compare(ddp, whole)


@everywhere
def test_ignored_buffers_are_not_broadcast(group):
    module = seeded(lambda: Counting(group.rank()))
    DDP._set_params_and_buffers_to_ignore_for_model(module, ["scale"])
    ddp = DDP(module, process_group=group)
    ddp(torch.ones(1, 5))
    assert module.scale.tolist() == [1.0 + group.rank()] * 3
    assert module.count == 1


@everywhere
def test_three_forwards_before_one_backward(group):
    ddp = make(group)
    whole = seeded(Counting)
    for step in range(3):
        rows = batch(step, group.size())
        sum(squares(ddp, share(rows, group) * n) for n in (1, 2, 3)).backward()
        sum(squares(whole, rows * n) for n in (1, 2, 3)).backward()
        assert_same_gradients(ddp.module, whole)


class Norm(nn.Sequential):
    """Batch norm, whose running statistics differ between ranks."""

    def __init__(self):
        super().__init__(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


@everywhere
def test_batch_norm_with_two_forwards_before_backward(group):
    ddp, whole = DDP(seeded(Norm), process_group=group), seeded(Norm)

    def loss(module, rows, step, rank):
        return squares(module, rows) + squares(module, rows * 2)

    for step in range(3):
        rows = batch(step, group.size())
        loss(ddp, share(rows, group), step, 0).backward()
        whole_loss(whole, rows, group, loss, step).backward()
        compare(ddp, whole, rtol=1e-5)


@everywhere
def test_batch_norm_statistics_are_those_of_rank_0(group):
    ddp, whole = DDP(seeded(Norm), process_group=group), seeded(Norm)
    for step in range(3):
        rows = batch(step, group.size())
        squares(ddp, share(rows, group)).backward()
        squares(whole, rows[:4]).backward()
    ddp._sync_buffers()
    for mine, theirs in zip(ddp.module.buffers(), whole.buffers(), strict=True):
        assert torch.allclose(mine, theirs)


@everywhere
def test_evaluation_sends_no_buffers(group):
    ddp = make(group)
    ddp.eval()
    with torch.no_grad():
        ddp(torch.ones(1, 5))
        # no broadcast: no training step since the last one
        assert operations(group, lambda: ddp(torch.ones(1, 5))) == []
    assert not ddp.will_sync_module_buffers()


@everywhere
def test_coalesced_broadcast_from_any_root(group):
    ddp = make(group)
    rank, root = group.rank(), group.size() - 1
    tensors = [torch.full((5,), rank), torch.full((3, 2), float(rank)), torch.full((4,), rank)]
    ddp._distributed_broadcast_coalesced(tensors, 16, root)
    assert all((tensor == root).all() for tensor in tensors)


@over_groups(backends=("shm",), sizes=(2,), reuse=True)
def test_broadcast_buffers_argument_is_deprecated(group):
    for value in (True, False):
        with pytest.warns(FutureWarning, match="forward_sync_buffers"):
            make(group, broadcast_buffers=value)
    with pytest.warns(FutureWarning, match="ignored"):
        ddp = make(group, broadcast_buffers=True, forward_sync_buffers=False)
    assert not ddp.forward_sync_buffers


@everywhere
def test_torchs_sync_batch_norm_on_cpu_is_rejected(group):
    module = nn.SyncBatchNorm.convert_sync_batchnorm(Norm(), process_group=group)
    with pytest.raises(ValueError, match="SyncBatchNorm"):
        DDP(module, process_group=group)
