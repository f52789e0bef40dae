"""Uneven inputs combined with accumulation, unfreezing, weights and other modules."""

import copy
import io
import sys
import time
from contextlib import contextmanager

import pytest
import torch
from torch import nn

import phalanx
from phalanx.ddp import DDP, ShardedOptimizer, SyncBatchNorm
from phalanx.ddp.hooks import allreduce_hook
from phalanx.errors import InvalidArgument, InvalidState, UnevenInputs
from phalanx.groups import process_group
from phalanx.join import Join
from phalanx.testing import over_groups

from .whole import TINY, on_every_backend, operations

ROW = torch.ones(1, 2, dtype=torch.float64)


def line(dtype=torch.float64):
    module = nn.Linear(2, 1, bias=False).to(dtype)
    nn.init.zeros_(module.weight)
    return module


def first(ddp):
    return ddp.module.weight.grad[0, 0].item()


def steps(group, ddp, mine, **options):
    """Run `mine` steps without zero_grad; return the gradient after each."""
    seen = []
    for number, _ in enumerate(phalanx.uneven(range(mine), ddp, **options), 1):
        ddp(ROW * number).sum().backward()
        seen.append(first(ddp))
    return seen


def expected(counting, size):
    """Return the gradients after a step of all ranks and after one more step of rank 0."""
    first = size if counting == "sum" else 1.0
    return [first, first + 2 / (size if counting == "all" else 1)]


@pytest.mark.parametrize("counting", ["all", "active", "sum"])
@on_every_backend
def test_reduced_gradients_are_not_reduced_again(group, counting):
    ddp = DDP(line(), process_group=group, reduce="sum" if counting == "sum" else "mean")
    options = {"divide_by_initial_world_size": counting != "active"}
    seen = steps(group, ddp, 1 if group.rank() else 2, **options)
    assert seen == expected(counting, group.size())[: len(seen)]
    assert first(ddp) == expected(counting, group.size())[1]  # on ranks that have left, too


@on_every_backend
def test_unreduced_no_sync_gradients_are_dropped_at_the_end(group):
    ddp = DDP(line(), process_group=group)
    with ddp.no_sync():
        steps(group, ddp, 1 + group.rank())
    assert ddp.module.weight.grad is None
    ddp(ROW).sum().backward()
    assert first(ddp) == 1.0


@pytest.mark.parametrize("hook", [None, allreduce_hook], ids=["leaves", "shadows"])
@on_every_backend
def test_float16_weights_after_a_rank_was_absent(group, hook):
    ddp = DDP(line(torch.float16), process_group=group)
    if hook is not None:
        ddp.register_comm_hook(None, hook)
    ddp.weight = 1.0
    for others in (0, 2):
        for _ in phalanx.uneven(range(others if group.rank() else 2), ddp):
            ddp.zero_grad()
            ddp(ROW.half()).sum().backward()
    assert first(ddp) == 1.0


@pytest.mark.parametrize("when", ["before", "meanwhile"])
@on_every_backend
def test_layers_unfrozen_before_or_while_a_rank_is_absent(group, when):
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)).double()
    net[0].requires_grad_(False)
    ddp = DDP(net, process_group=group)
    net[0].requires_grad_(when == "before")
    mine = 3 if group.rank() == 0 else int(when == "meanwhile")
    for number, _ in enumerate(phalanx.uneven(range(mine), ddp)):
        if number == 2:
            net[0].requires_grad_(True)
        ddp.zero_grad()
        ddp(ROW).sum().backward()
    assert all(p.requires_grad for p in net.parameters())
    with ddp.join():
        for _ in range(1 + group.rank()):
            ddp.zero_grad()
            ddp(ROW).sum().backward()
    ddp.assert_in_sync()


def normed():
    parts = [nn.Linear(2, 3), SyncBatchNorm(3), nn.Linear(3, 2), SyncBatchNorm(2)]
    return nn.Sequential(*parts).double()


@on_every_backend
def test_modules_that_share_a_backward_while_a_rank_is_absent(group):
    """Early launch must stop on all ranks, since SyncBatchNorm communicates in backward."""
    one, other = (DDP(normed(), process_group=group, bucket_cap_mb=TINY) for _ in range(2))
    rows = torch.eye(2).double() + group.rank()
    for _ in phalanx.uneven(range(0 if group.rank() else 3), one, other):
        other(one(rows)).square().sum().backward()
    for _ in phalanx.uneven(range(4), one, other):
        one(rows).square().sum().backward()
    assert one.reducer.has_shared_backward


@on_every_backend
def test_optimizer_with_an_empty_param_group(group):
    ddp, alone = DDP(line(), process_group=group), line()
    given = torch.optim.Adam([{"params": []}, {"params": list(ddp.parameters())}], lr=0.1)
    own = torch.optim.Adam(alone.parameters())  # of a local module
    for _ in phalanx.uneven(range(1 + group.rank()), ddp, optimizers=[given]):
        for module, optimizer in ((ddp, given), (alone, own)):
            module(ROW).sum().backward()
            optimizer.step()
    assert given.param_groups[1]["betas"] == (0.9, 0.999)
    assert given.state[ddp.module.weight]["step"].item() == group.size()


@on_every_backend
def test_tensor_options_reach_ranks_that_were_absent(group):
    ddp = DDP(line(), process_group=group)
    optimizer = torch.optim.Adam(ddp.parameters(), lr=torch.tensor(0.1), foreach=False)
    decay = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    for _ in phalanx.uneven(range(1 + group.rank()), ddp, optimizers=[optimizer]):
        ddp(ROW).sum().backward()
        optimizer.step()
        decay.step()
    lr = optimizer.param_groups[0]["lr"]
    assert isinstance(lr, torch.Tensor)
    assert lr.item() == pytest.approx(0.1 * 0.5 ** group.size())


class Listing(torch.optim.SGD):
    """Keeps a list of tensors for each parameter."""

    def step(self):
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["history"] = [parameter.detach().clone()]


@over_groups(backends=("local",), sizes=(2,), timeout=30)
def test_unsupported_optimizer_state_is_named(group):
    ddp = DDP(line(), process_group=group)
    optimizer = Listing(ddp.parameters(), lr=0.1)
    with pytest.raises(InvalidState, match="'history' of parameter 0 is a list. State values must"):
        for _ in phalanx.uneven(range(1 + group.rank()), ddp, optimizers=[optimizer]):
            ddp(ROW).sum().backward()
            optimizer.step()


@on_every_backend
def test_unknown_keyword_arguments_are_rejected(group):
    ddp = DDP(line(), process_group=group)
    for refused in (
        lambda: phalanx.uneven(range(3), ddp, optimisers=[]),
        lambda: Join([ddp], tiemout=3),
        lambda: Join([ddp], False, divide=True),
    ):
        with pytest.raises(InvalidArgument, match="no joinable takes the keyword argument '"):
            refused()
    foreign = Foreign(ddp.parameters(), torch.optim.SGD, process_group=group, lr=0.1)
    Join([ddp, foreign], log="all")
    assert foreign.given == {"log": "all"}
    for _ in phalanx.uneven(range(2), ddp, divide_by_initial_world_size=False):
        ddp(ROW).sum().backward()
        assert ddp.reducer.scaling.divide_by_initial_world_size is False


@on_every_backend
def test_final_model_source_is_chosen_once(group):
    ddp = DDP(line(), process_group=group)
    ddp(ROW).sum().backward()
    join = ddp.join()
    with join:
        ddp(ROW).sum().backward()
    told = operations(group, lambda: ddp._sync_final_model(True))
    assert told.count("allgather") == 1  # outside a join the last rank is unknown
    join.__enter__()
    ddp(ROW).sum().backward()
    told = operations(group, lambda: join.__exit__(None, None, None))
    assert told.count("allgather") == 1  # for the report


class Foreign(ShardedOptimizer):
    """A joinable whose hook accepts any keyword argument."""

    def join_hook(self, **kwargs):
        self.given = kwargs
        return super().join_hook()


@over_groups(backends=("shm",), sizes=(2,), timeout=30, reuse=True)  # warnings are caught there
def test_optimizer_state_that_differs_warns(group):
    ddp = DDP(line(), process_group=group)
    optimizer = torch.optim.Adam(ddp.parameters())

    def train():
        for _ in phalanx.uneven(range(1 + group.rank()), ddp):
            ddp(ROW).sum().backward()
            optimizer.step()

    with pytest.warns(UserWarning, match="state of Adam differs between ranks") as caught:
        train()
    assert {each.filename for each in caught} == {__file__}


@on_every_backend
def test_copy_is_not_part_of_the_join(group):
    ddp = DDP(line(), process_group=group)
    with process_group(group):
        for _ in phalanx.uneven(range(2), ddp):
            twin = copy.deepcopy(ddp)
            torch.save(ddp, io.BytesIO())
            assert not twin._join_config.enable
            ddp(ROW).sum().backward()


@on_every_backend
def test_join_restores_the_ddp_state(group):
    ddp = DDP(line(), process_group=group)
    joins = [ddp.join() for _ in range(2)]
    ddp(ROW).sum().backward()  # outside both joins
    for join in joins:
        with join:
            for _ in range(1 + group.rank()):
                ddp(ROW).sum().backward()
    loop = phalanx.uneven(range(2), ddp)
    one, other = iter(loop), iter(loop)
    for each in (one, other):
        next(each)
    for each in (one, other):
        each.close()
    assert not ddp._join_config.enable
    assert ddp._join_block is None
    ddp(ROW).sum().backward()
    assert ddp.reducer.scaling.divide_by_initial_world_size is None


@on_every_backend
def test_error_after_break_is_raised_by_report(group):
    """Python ignores an exception raised while ``break`` closes a generator."""
    ddp = DDP(line(), process_group=group)
    loop = phalanx.uneven(range(5), ddp, throw_on_early_termination=True)
    if group.rank():
        with pytest.raises(UnevenInputs):
            steps_of(loop, ddp)
        return
    with ignoring_unraisable_exceptions():
        for _ in loop:
            ddp(ROW).sum().backward()
            break
    with pytest.raises(UnevenInputs, match="rank 0 exhausted"):
        _ = loop.report


def steps_of(loop, ddp):
    for _ in loop:
        ddp(ROW).sum().backward()


@contextmanager
def ignoring_unraisable_exceptions():
    """Silence sys.unraisablehook."""
    usual, sys.unraisablehook = sys.unraisablehook, lambda _: None
    try:
        yield
    finally:
        sys.unraisablehook = usual


@over_groups(backends=("local", "shm"), sizes=(2,), timeout=30)
def test_buffers_sync_after_rank_0_leaves(group):
    ddp = DDP(nn.BatchNorm1d(2).double(), process_group=group)
    rows = torch.eye(2).double()
    ddp(rows).sum().backward()
    if group.rank() == 0:
        group.leave()
    else:
        while 0 in group.members:
            time.sleep(0.001)
        ddp(rows).sum().backward()
    group.rejoin()
