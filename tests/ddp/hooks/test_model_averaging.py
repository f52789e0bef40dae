"""Local SGD: post-local SGD, model averagers and their optimizer."""

import pytest
import torch
from torch import nn

from phalanx.ddp.hooks import (
    HierarchicalModelAverager,
    PeriodicModelAverager,
    PostLocalSGDOptimizer,
    PostLocalSGDState,
    post_localSGD_hook,
)
from phalanx.errors import InvalidArgument, InvalidState
from phalanx.groups import process_group
from phalanx.testing import over_groups

from .buckets import assert_near, bucket_of, everywhere, flat_gradients, mean_of, on_threads, run

of_four = over_groups(backends=("local", "shm"), sizes=(4,), reuse=True)


def parameters_of(rank, dtypes=(torch.float32, torch.float64)):
    """Return parameters filled with the rank, of several dtypes."""
    made = [nn.Parameter(torch.full((2, 3), float(rank), dtype=dtype)) for dtype in dtypes]
    return [*made, nn.Parameter(torch.full((2,), float(rank)), requires_grad=False)]


def values(parameters):
    return [parameter.unique().item() for parameter in parameters]


@of_four
def test_post_local_sgd_averages_over_the_group_then_the_subgroup(group):
    mine = group.rank() // 2 * 2
    subgroup = group.split_group([mine, mine + 1])
    state = PostLocalSGDState(group, subgroup, 2)
    for step in range(4):
        everyones = flat_gradients(4, step)
        expected = mean_of(everyones if step < 2 else everyones[mine : mine + 2])
        torch.testing.assert_close(run(post_localSGD_hook, state, group, step), expected.float())
    subgroup.shutdown()


@on_threads
def test_post_local_sgd_without_gradient_allreduce(group):
    state = PostLocalSGDState(None, None, 1, post_local_gradient_allreduce=False)
    for is_last in (False, True):  # two buckets are one step
        result = run(post_localSGD_hook, state, group, is_last=is_last)
        assert_near(result, mean_of(flat_gradients(group.size())))
    assert torch.equal(
        run(post_localSGD_hook, state, group, 1), flat_gradients(group.size(), 1)[group.rank()]
    )


@everywhere
def test_periodic_averager_averages_every_period(group):
    averager = PeriodicModelAverager(3, warmup_steps=2, process_group=group)
    mean = (group.size() - 1) / 2
    averaged = []
    for step in range(9):
        parameters = parameters_of(group.rank())
        memory = [parameter.data_ptr() for parameter in parameters]
        averager.average_parameters(parameters)
        if values(parameters)[0] == mean:
            averaged.append(step)
            assert values(parameters) == [mean, mean, group.rank()], "what is frozen stays"
        assert [parameter.data_ptr() for parameter in parameters] == memory
    assert averaged == [2, 5, 8]


@of_four
def test_hierarchical_averager_averages_subgroups_more_often(group):
    averager = HierarchicalModelAverager({2: 2, 4: 4}, warmup_steps=1, process_group=group)
    rank, pair = group.rank(), group.rank() // 2 * 2 + 0.5
    seen = []
    for _ in range(9):
        parameters = parameters_of(rank)
        averager.average_parameters([{"params": parameters}])
        seen.append(values(parameters)[0])
    assert seen == [rank, rank, pair, rank, 1.5, rank, pair, rank, 1.5]
    averager.period_process_group_dict[2].shutdown()


@on_threads
def test_optimizer_steps_locally_and_averages_every_period(group):
    parameter = nn.Parameter(torch.zeros(2))
    optimizer = PostLocalSGDOptimizer(
        torch.optim.SGD([parameter], lr=1.0, momentum=0.5), PeriodicModelAverager(2, 0, group)
    )
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    model, velocity, rate = 0.0, 0.0, 1.0
    for step in range(4):
        optimizer.zero_grad()
        parameter.sum().mul(group.rank() + 1).backward()
        assert optimizer.step() is None
        velocity = 0.5 * velocity + group.rank() + 1
        model -= rate * velocity
        if step % 2 == 0:
            total = torch.tensor(model)
            group.allreduce(total).wait()
            model = total.item() / group.size()
        assert parameter.tolist() == pytest.approx([model] * 2)
        scheduler.step()
        rate = 0.5 ** ((step + 1) // 2)
    assert "SGD" in repr(optimizer)
    assert optimizer.state is optimizer.optim.state


@on_threads
def test_optimizer_state_dict_has_the_step_count(group):
    def make():
        parameter = nn.Parameter(torch.ones(2))
        averager = PeriodicModelAverager(2, 3, group)
        return parameter, PostLocalSGDOptimizer(torch.optim.Adam([parameter]), averager)

    parameter, optimizer = make()
    for _ in range(3):
        parameter.grad = torch.ones(2)
        optimizer.step(lambda: 7.0)
    _, other = make()
    other.load_state_dict(optimizer.state_dict())
    assert other.averager.step == 3
    assert other.state_dict()["state"][0]["step"] == 3
    plain = optimizer.optim.state_dict()
    # Warning filters are shared between threads.
    if group.rank() == 0:
        with pytest.warns(UserWarning, match="starts at step 0"):
            other.load_state_dict(plain)
        assert other.averager.step == 0


@on_threads
def test_bad_settings_are_rejected(group):
    size = group.size()
    for levels, told in (
        ({}, "at least one period"),
        ({0: 1, 4: size}, "a period of period_group_size_dict must be an integer of at least 1"),
        ({2: 3, 4: size}, f"{size} ranks do not divide into groups of 3"),
        ({4: 1, 2: size}, "must ascend"),
        ({2: 1}, f"must be the world size .{size}., got 1"),
    ):
        with pytest.raises(ValueError, match=told):
            HierarchicalModelAverager(levels, process_group=group)
    for options, told in (
        ({"period": 0}, "period must be an integer of at least 1, got 0"),
        ({"period": 2, "warmup_steps": -1}, "warmup_steps must be an integer of at least 0"),
    ):
        with pytest.raises(ValueError, match=told):
            PeriodicModelAverager(**options, process_group=group)
    with pytest.raises(TypeError, match="got str"):
        PeriodicModelAverager(2, process_group=group).average_parameters(["weight"])
    with pytest.raises(TypeError, match="optim must be an Optimizer, got list"):
        PostLocalSGDOptimizer([], PeriodicModelAverager(2, process_group=group))
    optimizer = torch.optim.SGD(parameters_of(0), lr=1)
    with pytest.raises(TypeError, match="averager must be a ModelAverager, got int"):
        PostLocalSGDOptimizer(optimizer, 4)


@everywhere
def test_default_is_the_current_group(group):
    with process_group(group):
        averager = PeriodicModelAverager(period=2)
    assert averager.process_group is group


def test_period_of_one_warns(threads):
    def body(context):
        group = context.group()
        with pytest.warns(UserWarning, match="a period of 1") as caught:
            PeriodicModelAverager(1, process_group=group)
        assert caught[0].filename == __file__
        with pytest.warns(UserWarning, match="a period of 1"):
            HierarchicalModelAverager({1: 1}, process_group=group)

    threads.run(body, 1)


def test_missing_groups_are_errors():
    with pytest.raises(InvalidState, match="the hook has no group"):
        PeriodicModelAverager(2)
    with pytest.raises(TypeError, match="got 2"):
        PostLocalSGDState(None, 2, 4)
    state = PostLocalSGDState(None, None, 0)
    with pytest.raises(InvalidArgument, match="has no subgroup, and torch cannot make one"):
        post_localSGD_hook(state, bucket_of(torch.ones(2)))
