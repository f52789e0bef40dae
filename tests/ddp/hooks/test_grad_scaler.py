"""A GradScaler that skips a step on one rank does not make ranks diverge."""

import pytest
import torch
from torch import nn

from phalanx.ddp.hooks import DiLoCo, PeriodicModelAverager, PostLocalSGDOptimizer

from .buckets import everywhere, on_threads

STEPS, RATE = 7, 0.5


def post_local(optim, group):
    return PostLocalSGDOptimizer(optim, PeriodicModelAverager(2, process_group=group))


def diloco(optim, group):
    def plain(anchors):
        return torch.optim.SGD(anchors, lr=1.0)  # yields the plain mean

    return DiLoCo(optim, sync_every=2, process_group=group, outer=plain)


WRAPPERS = {post_local: 0, diloco: 1}
"""Wrapper to the step of two after which it averages."""


def is_bad(rank, number):
    """Whether a rank's gradient is infinite in a step: on one rank, then on all."""
    return number == 5 or (number in (2, 3) and rank == 1)


def expected(size, turn):
    """Simulate all ranks in one process; steps with non-finite gradients are skipped."""
    ranks = torch.ones(size).double()
    for number in range(STEPS):
        for rank in range(size):
            ranks[rank] -= 0 if is_bad(rank, number) else RATE * (rank + 1)
        if number % 2 == turn:
            ranks[:] = ranks.mean()
    return ranks


def train(wrapper, group, *, unscales=False, fused=False):
    """Train one parameter with a scaler; return both."""
    parameter = nn.Parameter(torch.ones(3))
    optim = torch.optim.SGD([parameter], lr=RATE, fused=fused or None)
    optimizer = wrapper(optim, group)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for number in range(STEPS):
        optimizer.zero_grad()
        scaler.scale(parameter.sum() * (group.rank() + 1)).backward()
        if is_bad(group.rank(), number):
            parameter.grad[1] = float("inf")
        if unscales:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        assert not hasattr(optimizer, "found_inf")
        assert not hasattr(optim, "found_inf")
    return parameter.detach(), scaler


@everywhere
def test_skipped_steps_do_not_make_ranks_diverge(group):
    for wrapper, turn in WRAPPERS.items():
        mine = expected(group.size(), turn)[group.rank()].expand(3)
        for options in ({}, {"unscales": True}, {"fused": True}):
            parameter, scaler = train(wrapper, group, **options)
            torch.testing.assert_close(parameter.double(), mine, rtol=1e-5, atol=1e-5)
            bad = sum(is_bad(group.rank(), number) for number in range(STEPS))
            assert scaler.get_scale() == 8.0 / 2**bad, "every rank halves its own"


@on_threads
def test_failed_step_clears_the_scaler_attributes(group):
    parameter = nn.Parameter(torch.ones(3))
    optimizer = post_local(torch.optim.SGD([parameter], lr=RATE), group)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    average, optimizer.averager.average_parameters = optimizer.averager.average_parameters, None
    scaler.scale(parameter.sum()).backward()
    with pytest.raises(TypeError):
        scaler.step(optimizer)
    optimizer.averager.average_parameters = average
    parameter.grad = torch.ones(3)
    optimizer.step()
    torch.testing.assert_close(parameter.detach(), torch.zeros(3))


@on_threads
def test_disabled_scaler_has_no_effect(group):
    parameter = nn.Parameter(torch.ones(3))
    optimizer = post_local(torch.optim.SGD([parameter], lr=RATE), group)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    scaler.scale(parameter.sum()).backward()
    scaler.step(optimizer)
    torch.testing.assert_close(parameter.detach(), torch.full((3,), 1 - RATE))
