"""The sharded optimizer matches the plain one bit for bit."""

import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

from phalanx.ddp import DDP, ShardedOptimizer
from phalanx.join import Join, Joinable, JoinHook
from phalanx.testing import over_groups

from .internals import BroadcastParameters, balance_by_size
from .sharded import KINDS, Pair, wide
from .whole import batch, everywhere, on_pairs, seeded

on_gloo_too = over_groups(backends=("local", "shm", "gloo"), sizes=(2,), reuse=True)


@everywhere
def test_same_steps_as_the_plain_optimizer(group):
    for kind in KINDS:
        for ddp in (False, True):
            pair = Pair(group, kind, ddp=ddp)
            for _ in range(3):
                pair.step()


@on_gloo_too
def test_broadcast_exchange_on_every_backend(group):
    for kind in KINDS:
        pair = Pair(group, kind, ddp=True, share_parameters=False)
        assert [type(each) for each in pair.sharded._exchanges] == [BroadcastParameters]
        for _ in range(3):
            pair.step()


@everywhere
def test_each_rank_holds_the_state_of_its_shard_only(group):
    pair = Pair(group)
    pair.step()
    sizes = [p.nbytes for p in pair.module.parameters()]
    owners = balance_by_size(sizes, [0] * group.size())
    mine = [p for p, owner in zip(pair.module.parameters(), owners, strict=True)
            if owner == group.rank()]  # fmt: skip
    assert set(pair.sharded.state) == set(mine)


def test_balance_by_size():
    loads = [0] * 3
    assert balance_by_size([9, 1, 5, 5, 4, 0], loads) == [0, 2, 1, 2, 1, 2]
    assert loads == [9, 9, 6]
    assert balance_by_size([6, 1], loads) == [2, 0]
    assert balance_by_size([], [0]) == []


@everywhere
def test_param_groups_schedulers_and_add_param_group(group):
    def groups(module):
        first, second, _ = (m for m in module if isinstance(m, nn.Linear))
        return [{"params": first.parameters()}, {"params": [second.weight], "lr": 0.5}]

    pair = Pair(group, "momentum", groups=groups)
    make = torch.optim.lr_scheduler.ExponentialLR
    schedulers = [make(optimizer, 0.5) for optimizer in pair.both]
    for step in range(4):
        pair.step()
        for scheduler in schedulers:
            scheduler.step()
        if step == 1:
            for optimizer, module in zip(pair.both, (pair.module, pair.whole), strict=True):
                last = [module[2].bias, module[4].weight]
                optimizer.add_param_group({"params": last, "lr": 0.2, "momentum": 0.1})
                optimizer.add_param_group({"params": module[4].bias, "initial_lr": 0.1})
    assert [each["lr"] for each in pair.sharded.param_groups] == [
        each["lr"] for each in pair.plain.param_groups
    ]


class Odd(nn.Module):
    """Parameters of every kind, some of them unused."""

    def __init__(self):
        super().__init__()
        self.long = nn.Parameter(torch.zeros(3, 5, dtype=torch.float64))
        self.short = nn.Parameter(torch.zeros(7, dtype=torch.bfloat16))
        self.turned = nn.Parameter(torch.zeros(5, 6).t())
        self.images = nn.Parameter(torch.zeros(2, 3, 4, 4).to(memory_format=torch.channels_last))
        self.gaps = nn.Parameter(torch.zeros(8, 4)[::2, :3])
        self.frozen = nn.Parameter(torch.zeros(4), requires_grad=False)
        self.unused = nn.Parameter(torch.zeros(4))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.scalar = nn.Parameter(torch.tensor(0.0))

    def forward(self, rows):
        out = rows.double() @ self.long.t()
        out = out.sum() + self.short.float().square().sum() + (rows @ self.turned[:5]).sum()
        return (out + self.images.sum() * self.scalar + self.gaps.square().sum()).reshape(1)


@everywhere
def test_parameters_of_every_kind(group):
    for kind in ("adam", "momentum"):
        pair = Pair(group, kind, make=Odd)
        assert pair.module.turned.stride() == pair.whole.turned.stride()
        assert pair.module.images.is_contiguous(memory_format=torch.channels_last)
        for _ in range(3):
            pair.step()


@everywhere
def test_clipping_grad_scaler_and_closure(group):
    pair = Pair(group, ddp=True)
    scalers = [torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2) for _ in pair.both]
    for step in range(4):
        rows = torch.ones(2, 5)
        for optimizer in pair.both:
            optimizer.zero_grad()
        scalers[0].scale(pair.model(rows).sum()).backward()
        scalers[1].scale(torch.ones(()))  # initializes the scale
        if step == 2:
            pair.module[0].weight.grad.fill_(float("inf"))  # the scaler skips this step
        for mine, theirs in zip(pair.module.parameters(), pair.whole.parameters(), strict=True):
            theirs.grad = mine.grad.clone()
        for scaler, optimizer, module in zip(
            scalers, pair.both, (pair.module, pair.whole), strict=True
        ):
            scaler.unscale_(optimizer)
            clip_grad_norm_(module.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
        pair.assert_same()
    assert scalers[0].get_scale() == scalers[1].get_scale()
    pair.backward()
    assert [optimizer.step(torch.is_grad_enabled) for optimizer in pair.both] == [1, 1]
    pair.assert_same()


@everywhere
def test_parameters_are_broadcast_from_rank_0(group):
    module = seeded(wide, seed=group.rank())
    ShardedOptimizer(module.parameters(), torch.optim.SGD, process_group=group)
    for mine, first in zip(module.parameters(), seeded(wide).parameters(), strict=True):
        assert torch.equal(mine, first)


@everywhere
def test_more_ranks_than_parameters(group):
    for kind in KINDS:
        pair = Pair(group, kind, make=lambda: nn.Linear(5, 3, bias=False))
        pair.step()
        pair.step()
        pair.sharded.load_state_dict(pair.sharded.state_dict())
        pair.step()


class MeanGradients(Joinable):
    """Stands in for DDP: sums the gradients of the ranks with data."""

    def __init__(self, module, group):
        super().__init__()
        self.module, self.group = module, group

    def reduce(self):
        Join.notify_join_context(self)
        for p in self.module.parameters():
            self.group.allreduce([p.grad]).wait()

    def join_hook(self, **_):
        hook = JoinHook()
        hook.main_hook = self.shadow
        return hook

    def shadow(self):
        for p in self.module.parameters():
            p.grad = torch.zeros_like(p)
            self.group.allreduce([p.grad]).wait()

    @property
    def join_device(self):
        return torch.device("cpu")

    @property
    def join_process_group(self):
        return self.group


@everywhere
def test_rank_without_data_still_steps_its_shard(group):
    module, whole = seeded(wide).double(), seeded(wide).double()
    sharded = ShardedOptimizer(module.parameters(), torch.optim.Adam, process_group=group, lr=0.1)
    plain = torch.optim.Adam(whole.parameters(), lr=0.1)
    gradients = MeanGradients(module, group)
    with Join([gradients, sharded]):
        for step in range(1 + group.rank()):
            sharded.zero_grad()
            module(batch(step, 1).double()).sum().backward()
            gradients.reduce()
            sharded.step()
    for step in range(group.size()):
        plain.zero_grad()
        loss = whole(batch(step, 1).double()).sum() * (group.size() - step)
        loss.backward()
        plain.step()
    for mine, theirs in zip(module.parameters(), whole.parameters(), strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-9)


@everywhere
def test_sharded_optimizer_alone_in_a_join(group):
    pair = Pair(group)
    pair.backward()
    with Join([pair.sharded]):
        for _ in range(group.rank()):
            pair.sharded.step()
    for _ in range(group.size() - 1):
        pair.plain.step()
    pair.assert_same()


@on_pairs
def test_gradient_accumulation(group):
    pair = Pair(group, ddp=True)
    for _ in range(2):
        with pair.model.no_sync():
            pair.backward()
        pair.step()


@on_pairs
def test_second_ddp_on_the_same_group(group):
    pair, other = Pair(group, ddp=True), DDP(seeded(wide, 3), process_group=group)
    for _ in range(2):
        other(torch.ones(1, 5)).sum().backward()
        pair.step()
