"""The oracle for a sharded optimizer: the plain optimizer on a copy with the same gradients."""

import torch
from torch import nn

from phalanx.ddp import DDP, ShardedOptimizer

from .whole import batch, copy_of, seeded, share

KINDS = {
    "momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "adam": (torch.optim.Adam, {"lr": 0.01, "amsgrad": True}),
    "adamw": (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.1}),
}


def wide():
    """Return a network whose layers have different sizes."""
    return nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 4), nn.Tanh(), nn.Linear(4, 2))


class Pair:
    """A module with a sharded optimizer, and an equal one with a plain optimizer."""

    def __init__(self, group, kind="adam", make=wide, groups=None, ddp=False, **options):
        self.group = group
        optimizer_class, defaults = KINDS[kind]
        groups = groups or (lambda module: module.parameters())
        self.module = seeded(make)
        self.whole = copy_of(self.module)
        self.model = DDP(self.module, process_group=group) if ddp else self.module
        self.sharded = ShardedOptimizer(
            groups(self.module), optimizer_class, process_group=group, **options, **defaults
        )
        self.plain = optimizer_class(groups(self.whole), **defaults)
        self.both = (self.sharded, self.plain)
        self.steps = 0

    def backward(self):
        """Give both the same gradients: with DDP from its rows, else from the whole batch."""
        rows = batch(self.steps, self.group.size())
        rows = share(rows, self.group) if self.model is not self.module else rows
        self.model(rows).square().mean().backward()
        self.steps += 1
        for mine, theirs in zip(self.module.parameters(), self.whole.parameters(), strict=True):
            theirs.grad = None if mine.grad is None else mine.grad.clone()

    def step(self):
        self.backward()
        for optimizer in self.both:
            optimizer.step()
        self.assert_same()
        for optimizer in self.both:
            optimizer.zero_grad()

    def assert_same(self):
        for (name, mine), theirs in zip(
            self.module.named_parameters(), self.whole.parameters(), strict=True
        ):
            assert torch.equal(mine, theirs), f"{name} differs"
        # Without a barrier a fast rank would write the next weights while others still compare.
        self.group.barrier().wait()
