"""Hooks on our DDP: many buckets, accumulation, unused parameters."""

import contextlib
import importlib.util
import io
import re
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from phalanx.ddp import hooks
from phalanx.ddp.hooks import PowerSGDState, RandomKState, TopKState, chain

from ..whole import TINY, batch, share, squares, whole_loss, wrapped
from .buckets import everywhere

EXAMPLES = Path(__file__).parents[3] / "examples"

# States that lose nothing on a small model, so one process is the oracle; and the tolerance.
NEAR = {
    "allreduce_hook": (lambda: None, 1e-5),
    "fp16_compress_hook": (lambda: None, 5e-3),
    "bf16_compress_hook": (lambda: None, 5e-2),
    "quantization_pertensor_hook": (lambda: None, 5e-2),
    "quantization_perchannel_hook": (lambda: None, 5e-2),
    "powerSGD_hook": (lambda: PowerSGDState(None, 9, 2, min_compression_rate=0), 1e-4),
    "batched_powerSGD_hook": (lambda: PowerSGDState(None, 9, 2), 1e-4),
    "topk_hook": (lambda: TopKState(k=1000, start_iter=0), 1e-5),
    "randomk_hook": (lambda: RandomKState(k=1000, start_iter=0), 1e-5),
}


class Sometimes(nn.Module):
    """Uses its second layer in every other step."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(5, 7), nn.Linear(7, 7)

    def forward(self, rows, step):
        hidden = self.first(rows).tanh()
        return self.second(hidden) if step % 2 else hidden


def loss_of(module, rows, step, rank):
    return module(rows, step).square().mean()


def largest_difference(ddp, whole):
    """Return the largest gradient difference relative to the largest element."""
    pairs = list(zip(ddp.module.parameters(), whole.parameters(), strict=True))
    assert all((mine.grad is None) == (theirs.grad is None) for mine, theirs in pairs)
    pairs = [(mine.grad, theirs.grad) for mine, theirs in pairs if mine.grad is not None]
    off = max((mine - theirs).abs().max() for mine, theirs in pairs)
    return off / max(theirs.abs().max() for _, theirs in pairs)


@everywhere
def test_every_hook_averages_many_buckets_with_unused_parameters(group):
    for name, (make, close) in NEAR.items():
        ddp, whole = wrapped(Sometimes, group, bucket_cap_mb=TINY)
        ddp.register_comm_hook(make(), getattr(hooks, name))
        for step in range(5):
            rows = batch(step, group.size())
            ddp.zero_grad()
            whole.zero_grad()
            loss_of(ddp, share(rows, group), step, group.rank()).backward()
            whole_loss(whole, rows, group, loss_of, step).backward()
            assert largest_difference(ddp, whole) <= close, (name, step)


@everywhere
def test_every_hook_averages_accumulated_gradients(group):
    for name, (make, close) in NEAR.items():
        ddp, whole = wrapped(lambda: nn.Linear(5, 3), group)
        ddp.register_comm_hook(make(), getattr(hooks, name))
        for step in range(4):
            ddp.zero_grad()
            whole.zero_grad()
            for part in range(2):
                rows = batch(10 * step + part, group.size())
                whole_loss(whole, rows, group, squares, step).backward()
                if part:
                    squares(ddp, share(rows, group)).backward()
                else:
                    with ddp.no_sync():
                        squares(ddp, share(rows, group)).backward()
            assert largest_difference(ddp, whole) <= close, (name, step)


@everywhere
def test_ranks_stay_in_sync_with_lossy_hooks(group):
    hook = chain(hooks.bf16_compress_wrapper, hooks.powerSGD_hook)
    for state, each in (
        (PowerSGDState(None, 1, 2, min_compression_rate=0), hook),
        (TopKState(k=0.1, start_iter=0), hooks.topk_hook),
        (RandomKState(k=0.1, start_iter=0), hooks.randomk_hook),
    ):
        ddp, _ = wrapped(lambda: nn.Sequential(nn.Linear(5, 9), nn.Linear(9, 3)), group)
        ddp.register_comm_hook(state, each)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
        for step in range(6):
            optimizer.zero_grad()
            squares(ddp, share(batch(step, group.size()), group)).backward()
            optimizer.step()
        ddp.assert_in_sync()


def run_example(ctx, names):
    """Run examples/hooks.py for one epoch and return its output."""
    sys.path.insert(0, str(EXAMPLES))
    spec = importlib.util.spec_from_file_location("hooks_example", EXAMPLES / "hooks.py")
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    example.new_group = ctx.group
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        example.main(names, epochs=1)
    return printed.getvalue()


@pytest.mark.slow
def test_example_reports_bytes_per_step(ranks):
    names = ["allreduce", "fp16", "topk"]
    printed, other = ranks.run(run_example, 2, args=(names,), timeout=60)
    told = re.findall(r"(\w+): accuracy ([\d.]+)%, ([\d,]+) bytes a step", printed)
    assert [name for name, _, _ in told] == names
    full, half, few = (int(sent.replace(",", "")) for _, _, sent in told)
    assert full > 1.8 * half > 1.8 * few
    assert other == ""
