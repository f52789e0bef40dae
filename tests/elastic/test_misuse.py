"""Mistakes in an elastic run raise on all ranks, and say what to do."""

import re
import socket

import pytest
import torch
from torch import nn

from phalanx.elastic import ElasticRun
from phalanx.env import ElasticEnv
from phalanx.errors import (
    GroupAborted,
    InvalidArgument,
    InvalidState,
    InvalidType,
    RankMismatch,
)
from phalanx.testing import ThreadRanks

from .training import torch_settings

DATASET = [(torch.randn(4), torch.randn(1)) for _ in range(20)]
three = ThreadRanks(3)


def make_run(group, **options):
    module = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    return ElasticRun(module, optimizer, group=group, **{"micro_batches": 6, **options})


def loss_of(run, micro):
    return (run.model(micro.inputs) - micro.targets).square().mean()


def messages(body, *args, ranks=3):
    """Run a body on ranks that all must raise; return their errors by rank."""

    def catching(ctx):
        try:
            with torch_settings():
                body(ctx, ctx.group("local"), *args)
        except Exception as error:  # noqa: BLE001 - the test looks at it
            return error
        return None

    errors = three.run(catching, ranks)
    assert all(error is not None for error in errors), errors
    return errors


def break_early(ctx, run, loader):
    for step in run.steps(3):
        for micro in step.micro_batches(loader):
            micro.backward(loss_of(run, micro))
            if ctx.rank == 1:
                break
        run.optimizers[0].step()


def break_and_go_on(ctx, run, loader):
    for step in run.steps(3):
        for micro in step.micro_batches(loader):
            micro.backward(loss_of(run, micro))
            if ctx.rank == 1:
                break


def no_backward(ctx, run, loader):
    for step in run.steps(1):
        for micro in step.micro_batches(loader):
            if ctx.rank != 1:
                micro.backward(loss_of(run, micro))


def two_backwards(ctx, run, loader):
    for step in run.steps(1):
        for micro in step.micro_batches(loader):
            micro.backward(loss_of(run, micro))
            if ctx.rank == 1:
                micro.backward(loss_of(run, micro))


def collected_in_a_list(ctx, run, loader):
    for step in run.steps(1):
        micros = step.micro_batches(loader)
        for micro in list(micros) if ctx.rank == 1 else micros:
            micro.backward(loss_of(run, micro))


def backward_of_the_tensor(ctx, run, loader):
    for step in run.steps(1):
        for micro in step.micro_batches(loader):
            loss = loss_of(run, micro)
            loss.backward() if ctx.rank == 1 else micro.backward(loss)


def late_backward(ctx, run, loader):
    for step in run.steps(1):
        kept = None
        for micro in step.micro_batches(loader):
            micro.backward(loss_of(run, micro))
            if ctx.rank == 1 and kept is not None:
                kept.backward(loss_of(run, kept))
            kept = micro


def step_within_the_loop(ctx, run, loader):
    for step in run.steps(1):
        for micro in step.micro_batches(loader):
            micro.backward(loss_of(run, micro))
            if ctx.rank == 1:
                run.optimizers[0].step()


def a_number_as_loss(ctx, run, loader):
    for step in run.steps(1):
        for micro in step.micro_batches(loader):
            loss = loss_of(run, micro)
            micro.backward(loss.item() if ctx.rank == 1 else loss)


def some_weights(ctx, run, loader):
    for step in run.steps(1):
        for micro in step.micro_batches(loader):
            weight = 2.0 if ctx.rank == 1 and micro.number == 3 else None
            micro.backward(loss_of(run, micro), weight=weight)


@pytest.mark.parametrize(
    ("misuse", "said"),
    [
        (break_early, "optimizer.step() was called after 1 of 2 micro-batches of this rank"),
        (break_and_go_on, "step of run.steps() was called after 1 of 2 micro-batches"),
        (no_backward, "micro-batch 2 of step 1 had no backward pass. Call micro.backward(loss)"),
        (two_backwards, "called twice for micro-batch 2 of step 1. Add the losses"),
        (collected_in_a_list, "cannot be collected in a list"),
        (backward_of_the_tensor, "Call micro.backward(loss) instead of loss.backward()"),
        (late_backward, "micro-batch 2 of step 1 is over: call micro.backward() in the body"),
        (some_weights, "Give all micro-batches a weight, or none"),
        (step_within_the_loop, "optimizer.step() was called after 1 of 2 micro-batches"),
        (a_number_as_loss, "loss must be a tensor with one element, got "),
    ],
)
def test_a_mistake_of_one_rank_raises_on_all_and_says_what_to_do(misuse, said):
    def body(ctx, group):
        run = make_run(group)
        misuse(ctx, run, run.loader(DATASET, 2))

    errors = messages(body)
    assert isinstance(errors[1], InvalidState)
    assert said in str(errors[1])
    assert "test_misuse.py:" in str(errors[1])
    for rank in (0, 2):
        assert isinstance(errors[rank], GroupAborted)
        assert said in str(errors[rank])
        assert "rank 1" in str(errors[rank])


def test_a_parameter_that_is_unfrozen_in_the_loop_raises_on_all_ranks():
    """Its gradient would not be reduced."""

    def body(ctx, group):
        module = nn.Linear(4, 1)
        module.bias.requires_grad_(False)
        run = ElasticRun(
            module, torch.optim.SGD(module.parameters(), lr=0.1), group=group, micro_batches=6
        )
        loader = run.loader(DATASET, 2)
        for step in run.steps(3):
            for micro in step.micro_batches(loader):
                if step.number == 2 and micro.number == 2:
                    module.bias.requires_grad_(True)
                micro.backward(loss_of(run, micro))

    errors = messages(body)
    said = "parameter 'bias' was unfrozen in the micro-batches of step 2"
    assert [isinstance(error, InvalidState) for error in errors] == [False, True, False]
    assert all(said in str(error) for error in errors), errors


def test_shapes_that_change_raise_on_all_ranks():
    def collate(samples):
        inputs, targets = zip(*samples, strict=True)
        count = 1 if any(target is DATASET[7][1] for target in targets) else 2
        return torch.stack(inputs[:count]), torch.stack(targets[:count])

    def body(ctx, group):
        run = make_run(group)
        loader = run.loader(DATASET, 2, collate_fn=collate, shuffle=False)
        for step in run.steps(2):
            for micro in step.micro_batches(loader):
                micro.backward(loss_of(run, micro))

    errors = messages(body)
    assert isinstance(errors[1], InvalidState)
    assert "micro-batch 3 of step 1 has float32[1, 4], float32[1, 1]" in str(errors[1])
    assert "the first one had float32[2, 4], float32[2, 1]" in str(errors[1])
    assert all("Micro-batches must have constant shapes" in str(error) for error in errors)


def test_shapes_that_differ_between_ranks_raise_on_all():
    def body(ctx, group):
        run = make_run(group)
        loader = run.loader(DATASET, 2 if ctx.rank else 1)
        for step in run.steps(1):
            for micro in step.micro_batches(loader):
                micro.backward(loss_of(run, micro))

    for error in messages(body):
        assert isinstance(error, RankMismatch)
        assert re.search(r"rank 0: .*float32\[1, 4\].*rank 1: .*float32\[2, 4\]", str(error))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"micro_batches": 7}, "ranks disagree on micro_batches: rank 0 says 6, rank 1 says 7"),
        ({"seed": 1}, "ranks disagree on seed: rank 0 says 0, rank 1 says 1"),
        ({"threads": 2}, "ranks disagree on threads: rank 0 says 1, rank 1 says 2"),
    ],
)
def test_ranks_that_disagree_on_arguments_all_raise(options, said):
    def body(ctx, group):
        make_run(group, **(options if ctx.rank else {}))

    for error in messages(body):
        assert isinstance(error, RankMismatch)
        assert said in str(error)


def test_more_ranks_than_micro_batches_raise():
    for error in messages(lambda _, group: make_run(group, micro_batches=2)):
        assert isinstance(error, InvalidArgument)
        assert "micro_batches must be at least the world size (3), got 2" in str(error)
        assert "start at most 2 ranks" in str(error)


def test_a_collective_that_not_all_ranks_make_in_the_loop_raises_on_all(ranks):
    """On shared memory the group sees that ranks make different calls."""
    for error in ranks.run(some_collectives, 3, timeout=20):
        assert isinstance(error, RankMismatch)
        assert "test_misuse.py" in str(error)


def some_collectives(ctx):
    with torch_settings():
        run = make_run(ctx.group("shm"), micro_batches=7)
        loader = run.loader(DATASET, 2)
        try:
            for step in run.steps(1):
                for micro in step.micro_batches(loader):
                    run.group.allreduce(torch.ones(1)).wait()
                    micro.backward(loss_of(run, micro))
        except RankMismatch as error:
            return error


# -- mistakes that every rank makes --------------------------------------------------------


def alone(body):
    """Run a body on one rank, and return what it raised."""
    return messages(lambda _, group: body(group), ranks=1)[0]


@pytest.mark.parametrize(
    ("make", "kind", "said"),
    [
        (lambda group: make_run(group, micro_batches=0), InvalidArgument, "at least 1, got 0"),
        (lambda group: make_run(group, micro_batches=2.0), InvalidType, "an integer, got float"),
        (lambda group: make_run(group, seed=-1), InvalidArgument, "seed must be at least 0"),
        (lambda group: make_run(group, seed=2**63), InvalidArgument, "seed must be below 2**63"),
        (lambda group: make_run(group, state={"x": 3}), InvalidType, "state['x'] must have"),
        (lambda group: make_run(group, buffers={"x": "mean"}), InvalidArgument, "no buffer 'x'"),
        (lambda _: make_run(torch.ones(1)), InvalidType, "group must be a group of phalanx"),
        (lambda group: ElasticRun(3, [], micro_batches=1, group=group), InvalidType, "nn.Module"),
        (
            lambda group: ElasticRun(nn.Linear(1, 1), [3], micro_batches=1, group=group),
            InvalidType,
            "optimizer must be a torch Optimizer",
        ),
        (
            lambda group: ElasticRun(nn.Identity(), [], micro_batches=1, group=group),
            InvalidState,
            "the module has no parameters",
        ),
        (
            lambda group: ElasticRun(
                nn.Embedding(3, 2, sparse=True), [], micro_batches=1, group=group
            ),
            InvalidArgument,
            "'weight' has sparse gradients",
        ),
        (
            lambda group: ElasticRun(
                nn.Sequential(nn.SyncBatchNorm(3)), [], micro_batches=1, group=group
            ),
            InvalidArgument,
            "'0' is a SyncBatchNorm",
        ),
        (
            lambda group: ElasticRun(
                nn.Linear(1, 1).requires_grad_(False), [], micro_batches=1, group=group
            ),
            InvalidState,
            "no parameter of the module requires a gradient",
        ),
    ],
)
def test_wrong_arguments_say_what_to_do(make, kind, said):
    error = alone(make)
    assert isinstance(error, kind)
    assert said in str(error)


def test_a_wrapped_module_is_refused():
    from phalanx import DDP

    def body(group):
        module = DDP(nn.Linear(1, 1), process_group=group)
        ElasticRun(module, torch.optim.SGD(module.parameters()), micro_batches=1, group=group)

    assert "pass model.module" in str(alone(body))


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (lambda _: 3.0, "loss must be a tensor with one element, got 3.0"),
        (lambda run: run.model.weight * 2, "got a tensor of shape [1, 4]"),
        (lambda _: torch.ones(()), "depends on no parameter"),
    ],
)
def test_a_wrong_loss_says_so(loss, said):
    def body(group):
        run = make_run(group)
        for step in run.steps(1):
            for micro in step.micro_batches():
                micro.backward(loss(run))

    error = alone(body)
    assert isinstance(error, InvalidState)
    assert said in str(error)


def test_a_negative_weight_says_so():
    def body(group):
        run = make_run(group)
        for step in run.steps(1):
            for micro in step.micro_batches():
                micro.backward(run.model.weight.sum(), weight=-1)

    assert "weight must be a finite number, at least 0, got -1" in str(alone(body))


def test_a_parameter_may_be_the_loss():
    def body(ctx):
        with torch_settings():
            module = nn.ParameterDict({"x": torch.ones(())})
            run = ElasticRun(module, [], micro_batches=4, group=ctx.group("local"))
            for step in run.steps(2):
                for micro in step.micro_batches():
                    micro.backward(module["x"])
            return module["x"].grad.item(), step.losses

    assert three.run(body) == [(2.0, [1.0] * 4)] * 3


def test_a_step_without_micro_batches_raises():
    def body(group):
        for _ in make_run(group).steps(1):
            pass

    assert "step 1 had no micro-batches" in str(alone(body))


def test_a_step_that_is_over_has_no_micro_batches():
    def body(group):
        run = make_run(group)
        for step in run.steps(1):
            for micro in step.micro_batches():
                micro.backward(run.model.weight.sum())
        step.micro_batches()

    assert "step 1 is over" in str(alone(body))


def test_saving_without_a_directory_says_what_to_do():
    assert "Call run.restore(directory)" in str(alone(lambda group: make_run(group).save()))


def test_the_loss_is_not_known_before_the_micro_batches():
    assert "only after the micro-batch loop of step 1" in str(
        alone(lambda group: next(make_run(group).steps(1)).loss)
    )


def test_a_loader_of_another_run_is_refused():
    def body(group):
        run, other = make_run(group), make_run(group)
        for step in run.steps(1):
            for _ in step.micro_batches(other.loader(DATASET, 2)):
                pass

    assert "takes a loader that run.loader() of this run has made" in str(alone(body))


def test_inputs_of_a_batch_that_is_no_pair_say_so():
    def body(group):
        run = make_run(group)
        for step in run.steps(1):
            for micro in step.micro_batches():
                micro.inputs  # noqa: B018

    assert "use micro.batch" in str(alone(body))


def test_backward_outside_of_steps_is_the_users_own():
    """Gradients that a program computes for itself, between steps, are not touched."""

    def body(ctx):
        with torch_settings():
            run = make_run(ctx.group("local"))
            loader = run.loader(DATASET, 2)
            for step in run.steps(2):
                run.model.weight.sum().backward()
                assert torch.equal(run.model.weight.grad, torch.ones(1, 4))
                run.optimizers[0].zero_grad()
                for micro in step.micro_batches(loader):
                    micro.backward(loss_of(run, micro))
                run.optimizers[0].step()
                run.optimizers[0].zero_grad()
            return run.hash()

    assert len({*three.run(body)}) == 1


def test_a_minimum_that_no_step_can_have_is_refused(monkeypatch):
    ours, channel = socket.socketpair()
    fd = channel.detach()
    env = ElasticEnv(
        worker="0.0",
        store="127.0.0.1:1",
        ranks=2,
        min_ranks=2,
        has_begun=False,
        is_initial=True,
        channel=fd,
    )
    monkeypatch.setenv("PHALANX_ELASTIC", env.to_variables()["PHALANX_ELASTIC"])
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(InvalidArgument, match=r"at least the minimum number of ranks \(2\), got 1"):
        ElasticRun(model, optimizer, micro_batches=1, seed=0)
    ours.close()
