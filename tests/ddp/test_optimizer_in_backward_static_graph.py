"""With static_graph=True an optimizer in backward steps each bucket once it is reduced."""

import pytest
import torch
from torch.futures import Future

from phalanx.ddp import DDP
from phalanx.errors import InvalidState

from .test_activation_checkpointing import Layers
from .test_in_backward import KINDS
from .whole import TINY, batch, mlp, seeded, several, share, squares


def fused(group, kind, options, **flags):
    ddp = DDP(seeded(mlp), process_group=group, bucket_cap_mb=TINY, **flags)
    return ddp, [ddp._register_fused_optim(kind, **options)]


def applied(group, kind, options, **flags):
    from torch.distributed.optim import _apply_optimizer_in_backward  # takes seconds

    module = seeded(mlp)
    _apply_optimizer_in_backward(kind, module.parameters(), options)
    ddp = DDP(module, process_group=group, bucket_cap_mb=TINY, **flags)
    return ddp, [each for p in module.parameters() for each in p._in_backward_optimizers]


both_kinds = pytest.mark.parametrize("how", [fused, applied])


def parameters_of(optimizer):
    return [p for group in optimizer.param_groups for p in group["params"]]


def watch(optimizers, seen):
    """Make optimizers call `seen` with the parameters they are about to step."""
    for optimizer in optimizers:

        def step(optimizer=optimizer, inner=optimizer.step):
            seen([p for p in parameters_of(optimizer) if p.grad is not None])
            inner()

        optimizer.step = step


@several
@both_kinds
def test_bucket_is_stepped_while_others_are_in_flight(group, how):
    """The hook holds back the last bucket until the first one has been stepped."""
    ddp, optimizers = how(group, torch.optim.SGD, {"lr": 0.1}, static_graph=True)
    stepped, held = [], []

    def hook(state, bucket):
        future = Future()
        group.allreduce(bucket.buffer()).wait()
        if bucket.is_last() and not stepped:
            held.append((future, bucket.buffer()))
        else:
            future.set_result(bucket.buffer().div_(group.size()))
        return future

    def seen(parameters):
        stepped.extend(parameters)
        for future, buffer in held:
            future.set_result(buffer.div_(group.size()))
        held.clear()

    ddp.register_comm_hook(None, hook)
    watch(optimizers, seen)
    for step in range(3):
        stepped.clear()
        squares(ddp, share(batch(step, group.size()), group)).backward()
        order = [p for bucket in ddp.reducer.buckets for p in bucket.parameters]
        assert list(map(id, stepped)) == list(map(id, order)), "each once, in the order of buckets"
        assert all(p.grad is None for p in ddp.parameters())
    ddp.assert_in_sync()


WAYS = ["plain", "accumulated", "copies", "sum", "weighted", "joined"]


@several
@pytest.mark.parametrize("way", WAYS)
def test_same_parameters_as_stepping_after_backward(group, way):
    turn = WAYS.index(way) + (group.size() == 4)  # alternate optimizers over the cases
    how, kind = (fused, applied)[turn % 2], KINDS[turn // 2 % 2]
    flags = {"gradient_as_bucket_view": way != "copies"}
    flags["reduce"] = "sum" if way == "sum" else "mean"
    both = [how(group, *kind, static_graph=static, **flags)[0] for static in (True, False)]
    for ddp in both:
        with ddp.join(enable=way == "joined"):
            for step in range(3 + group.rank() % 2 if way == "joined" else 3):
                rows = share(batch(step, group.size()), group)
                if way == "weighted":
                    ddp.weight = 1.0 + group.rank() + step
                if way == "accumulated":
                    with ddp.no_sync():
                        squares(ddp, rows).backward()
                squares(ddp, rows).backward()
    for mine, theirs in zip(*(ddp.parameters() for ddp in both), strict=True):
        assert torch.equal(mine, theirs)
    both[0].assert_in_sync()


class Halving(torch.optim.SGD):
    """Reads all gradients before it steps."""

    def step(self):
        gradients = [p.grad for p in parameters_of(self) if p.grad is not None]
        torch._foreach_mul_(gradients, 1 / len(gradients))
        super().step()


@several
@pytest.mark.parametrize("by", ["a hook", "a class of one's own"])
def test_optimizer_that_reads_all_gradients_steps_once(group, by):
    kind = torch.optim.SGD if by == "a hook" else Halving
    ddp, (optimizer,) = fused(group, kind, {"lr": 0.1}, static_graph=True)
    stepped = []
    if by == "a hook":
        optimizer.register_step_pre_hook(lambda *_: stepped.append(4))
    else:
        watch([optimizer], lambda parameters: stepped.append(len(parameters)))
    squares(ddp, share(batch(0, group.size()), group)).backward()
    assert stepped == [4]


@several
def test_changed_static_graph_is_an_error_on_every_rank(group):
    ddp = DDP(seeded(Layers), process_group=group, bucket_cap_mb=TINY, static_graph=True)
    ddp._register_fused_optim(torch.optim.SGD, lr=0.1)
    rows = share(batch(0, group.size()), group)
    for _ in range(3):
        ddp(rows, 1, 1, 1).square().mean().backward()
    again = 2 if group.rank() == 0 else 1
    with pytest.raises(InvalidState, match=r"'layers\.1\.\w+'.* static_graph=True"):
        ddp(rows, 1, again, 1).square().mean().backward()
    group.barrier().wait()


class Optional(torch.nn.Module):
    """Has an optional layer."""

    def __init__(self):
        super().__init__()
        self.first, self.last = torch.nn.Linear(5, 7), torch.nn.Linear(7, 3)

    def forward(self, rows, *, both):
        hidden = self.first(rows)
        return self.last(hidden) if both else hidden


@several
def test_parameter_unused_on_some_ranks(group):
    """A rank without a gradient steps that bucket at the end of backward."""
    options = {"process_group": group, "bucket_cap_mb": TINY}
    both = [DDP(seeded(Optional), static_graph=static, **options) for static in (True, False)]
    for ddp in both:
        ddp._register_fused_optim(torch.optim.Adam, lr=0.1)
        for step in range(3):
            rows = share(batch(step, group.size()), group)
            ddp(rows, both=group.rank() == 0).square().mean().backward()
    for mine, theirs in zip(*(ddp.parameters() for ddp in both), strict=True):
        assert torch.equal(mine, theirs)
    both[0].assert_in_sync()
