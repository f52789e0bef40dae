"""Delayed parameters, buffer hooks and torch.compile, combined with other features."""

import pytest
import torch
import torch._dynamo
from torch import nn

from cases import in_turn
from phalanx.ddp import DDP, MixedPrecision
from phalanx.ddp.hooks import allreduce_hook, bf16_compress_hook
from phalanx.testing import over_groups

from .whole import TINY, assert_close, batch, seeded, share


class Counting(nn.Module):
    """A network with a buffer and an optional layer."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(5, 7), nn.Linear(7, 3)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, rows, whole=True):
        self.count += 1
        hidden = torch.tanh(self.first(rows))
        return self.last(hidden) if whole else hidden


def delayed(module):
    """Return the constructor arguments that delay some gradients."""
    named = [(name, p) for name, p in module.named_parameters() if name != "last.weight"]
    return {"delay_all_reduce_named_params": named, "param_to_hook_all_reduce": module.first.weight}


def add_up(group, buffers):
    return [group.allreduce(buffers["count"]).get_future()]


def special(feature, module, group, **options):
    """Wrap a module with the given feature."""
    if feature == "delay":
        return DDP(module, process_group=group, **delayed(module), **options)
    if feature == "compile":
        torch._dynamo.reset()  # avoid the recompile limit
        return DDP(torch.compile(module, backend="eager"), process_group=group, **options)
    ddp = DDP(module, process_group=group, **options)
    ddp._register_buffer_comm_hook(group, add_up)
    return ddp


LOW = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
SETTINGS = {
    "sum": {"reduce": "sum"},
    "own": {"gradient_as_bucket_view": False},
    "proof": {"check_sync_every": 1},
    "low": {"mixed_precision": LOW},
    "buckets": {"bucket_cap_mb": TINY},
}
HOOKS = {"allreduce": allreduce_hook, "bf16": bf16_compress_hook}


def run(ddp, group):
    """Train with accumulation, weights and unused layers; return the gradients of all steps."""
    seen = []
    for step in range(4):
        rows = share(batch(step, group.size()), group)
        if step == 3:
            ddp.weight = 1 + group.rank()
        with ddp.no_sync():
            ddp(rows).square().mean().backward()
        ddp(rows, whole=step != 2 or group.rank() == 0).square().mean().backward()
        seen += [p.grad.clone() for p in ddp.module.parameters()]
        ddp.zero_grad()
    return seen


def check(feature, group, name):
    """Compare a DDP module that has the feature with one that does not."""
    options, hook = SETTINGS.get(name, {}), HOOKS.get(name)
    pair = (
        special(feature, seeded(Counting), group, **options),
        DDP(seeded(Counting), process_group=group, **options),
    )
    if hook is not None:
        for ddp in pair:
            ddp.register_comm_hook(None, hook)
    for mine, theirs in zip(*(run(ddp, group) for ddp in pair), strict=True):
        assert_close(mine, theirs, name, rtol=1e-6 if name != "bf16" else 1e-2)


@in_turn("local-2", "shm-4", timeout=20, feature=["delay", "buffers"], name=[*SETTINGS, *HOOKS])
def test_delay_and_buffer_hook_change_no_gradient(group, feature, name):
    check(feature, group, name)


@pytest.mark.slow
@over_groups(backends=("shm",), sizes=(2,), timeout=40, reuse=True)
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # of which the compiler asks
def test_torch_compile_changes_no_gradient(group):
    for name in ("own", "low", "allreduce"):
        check("compile", group, name)
