"""Checkpoints of a sharded optimizer load at any world size."""

import copy

import torch

from phalanx.checkpoint.components import (
    CheckpointReader,
    CheckpointWriter,
    CheckpointWriterConfig,
    RankInfo,
)
from phalanx.ddp import ShardedOptimizer
from phalanx.testing import over_groups

from .internals import GroupBarrier
from .states import load, same


def step(model, optimizer, number):
    """Take a step whose gradients are the same on all ranks."""
    rows = torch.randn(6, 5, generator=torch.Generator().manual_seed(number))
    optimizer.zero_grad()
    model(rows).square().mean().backward()
    optimizer.step()


def sharded(model, group):
    return ShardedOptimizer(model.parameters(), torch.optim.Adam, process_group=group, lr=0.1)


def equal(model):
    """Give a model the same weights on every rank."""
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, generator=generator)
    return model


@over_groups(backends=("local",), sizes=(4,))
def test_sharded_optimizer_loads_at_other_world_sizes(group, tmp_path):
    model = equal(torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 3)))
    oracle = copy.deepcopy(model)
    optimizer, plain = sharded(model, group), torch.optim.Adam(oracle.parameters(), lr=0.1)
    step(model, optimizer, 1)
    step(oracle, plain, 1)
    info, barrier = RankInfo(group.rank(), 4), GroupBarrier(group, timeout_secs=20)
    writer = CheckpointWriter(CheckpointWriterConfig(), info, barrier)
    writer.write(tmp_path / "c", {"model": model, "optimizer": optimizer})
    assert same(load(tmp_path / "c", 7, 8)[0]["optimizer"], plain.state_dict())
    step(oracle, plain, 2)
    for size in (1, 2, 4):
        part = group.split_group(list(range(size))) if group.rank() < size else None
        if part is not None:
            resume(part, tmp_path / "c", oracle)
            part.shutdown()
        group.barrier().wait()


def resume(group, path, oracle):
    """Load on a group and take the step that the oracle took."""
    model = copy.deepcopy(oracle)
    optimizer = sharded(model, group)
    reader = CheckpointReader(RankInfo(group.rank(), group.size()))
    assert reader.read(path, {"model": model, "optimizer": optimizer})[1] == []
    step(model, optimizer, 2)
    assert same(model.state_dict(), dict(oracle.state_dict()))
