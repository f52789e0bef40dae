"""Combinations of communication hooks, mixed precision and optimizers."""

import pytest
import torch
from torch import nn

from cases import pairwise
from phalanx.ddp import DDP, MixedPrecision, ShardedOptimizer
from phalanx.ddp.hooks import allreduce_hook
from phalanx.join import Join

from .whole import ROWS, TINY, assert_close, batch, seeded, several, share

LOW = torch.bfloat16
STEPS = 4
RATE = 0.1
STEPPING = ("after", "in backward", "divided")


class Branching(nn.Module):
    """Has an optional second layer."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(5, 7), nn.Linear(7, 3)

    def forward(self, rows, both=True):
        hidden = self.first(rows).tanh()
        return self.second(hidden) if both else hidden


def loss_of(module, rows, way, step, rank):
    both = way != "unused" or (step + rank) % 2 == 0
    return module(rows, both=both).float().square().mean()


def is_local(way, step):
    return way == "accumulated" and step % 2 == 0


def steps_of(way, rank):
    return STEPS - rank if way == "uneven" else STEPS


def train(group, way, *, hook, low, stepping, views):
    """Train with the given features and return the module."""
    precision = MixedPrecision(LOW, torch.float32) if low else None
    ddp = DDP(
        seeded(Branching),
        process_group=group,
        bucket_cap_mb=TINY,
        gradient_as_bucket_view=views,
        mixed_precision=precision,
    )
    if hook:
        ddp.register_comm_hook(None, allreduce_hook)
    optimizer, joinables = None, [ddp]
    if stepping == "in backward":
        ddp._register_fused_optim(torch.optim.SGD, lr=RATE)
    elif stepping == "divided":
        optimizer = ShardedOptimizer(
            ddp.parameters(), torch.optim.SGD, process_group=group, lr=RATE
        )
        joinables.append(optimizer)
    else:
        optimizer = torch.optim.SGD(ddp.parameters(), lr=RATE)
    with Join(joinables, enable=way == "uneven"):
        for step in range(steps_of(way, group.rank())):
            rows = share(batch(step, group.size()), group)
            if is_local(way, step):
                with ddp.no_sync():
                    loss_of(ddp, rows, way, step, group.rank()).backward()
                continue
            loss_of(ddp, rows, way, step, group.rank()).backward()
            if optimizer is not None:
                optimizer.step()
                optimizer.zero_grad()
    return ddp.module


def train_whole(way, size):
    """Train in one process on the data of all ranks."""
    whole = seeded(Branching)
    optimizer = torch.optim.SGD(whole.parameters(), lr=RATE)
    for step in range(STEPS):
        for rank, rows in enumerate(batch(step, size).split(ROWS)):
            if step < steps_of(way, rank):
                (loss_of(whole, rows, way, step, rank) / size).backward()
        if not is_local(way, step):
            optimizer.step()
            optimizer.zero_grad()
    return whole


@several
@pytest.mark.parametrize("way", ["accumulated", "unused", "uneven"])
def test_feature_combinations(group, way):
    whole = train_whole(way, group.size())
    either = (False, True)
    for hook, low, stepping, views in pairwise([either, either, STEPPING, either]):
        module = train(group, way, hook=hook, low=low, stepping=stepping, views=views)
        told = f"hook {hook}, low {low}, {stepping}, views {views}"
        for mine, theirs in zip(module.parameters(), whole.parameters(), strict=True):
            assert mine.dtype == torch.float32
            assert_close(mine, theirs, told, 2e-2 if low else 1e-5)
