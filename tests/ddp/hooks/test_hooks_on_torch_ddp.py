"""Our hooks on torch's DDP with Gloo, and torch's hooks on our GradBucket."""

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import debugging_hooks, default_hooks
from torch.distributed.algorithms.ddp_comm_hooks import optimizer_overlap_hooks as overlap
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as torch_local
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as torch_power
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from phalanx.ddp import hooks
from phalanx.testing import over_groups

from ..test_torch_groups import world
from ..whole import TINY, batch, both, compare, mlp, seeded, wrapped
from .buckets import assert_near, bucket_of, everywhere, flat_gradients, gradients, mean_of, run

OURS = {
    "allreduce_hook": (lambda: None, 1e-6),
    "fp16_compress_hook": (lambda: None, 2e-3),
    "quantization_pertensor_hook": (lambda: None, 2e-2),
    "quantization_perchannel_hook": (lambda: None, 2e-2),
    "powerSGD_hook": (lambda: hooks.PowerSGDState(None, 4, 2, min_compression_rate=0), 1e-5),
    "batched_powerSGD_hook": (lambda: hooks.PowerSGDState(None, 9, 2), 1e-5),
    "topk_hook": (lambda: hooks.TopKState(k=1000, start_iter=0), 1e-6),
    "randomk_hook": (lambda: hooks.RandomKState(k=1000, start_iter=0), 1e-6),
    "post_localSGD_hook": (lambda: hooks.PostLocalSGDState(None, None, 9), 1e-6),
}
"""States that lose nothing on a small model, so the mean is the oracle; and the tolerance."""


def train_under_torch(ctx):
    for name, (make, close) in OURS.items():
        plain, module = (seeded(lambda: nn.Linear(5, 3)) for _ in range(2))
        ddp = TorchDDP(module)
        ddp.register_comm_hook(make(), getattr(hooks, name))
        for step in range(4):
            rows = batch(step, ctx.size)
            for each, mine in ((ddp, rows[ctx.rank * 4 :][:4]), (plain, rows)):
                each.zero_grad()
                each(mine).square().mean().backward()
            ours, whole = (
                torch.cat([p.grad.view(-1) for p in m.parameters()]) for m in (module, plain)
            )
            assert (ours - whole).abs().max() <= close * whole.abs().max(), (name, step)


def test_our_hooks_run_on_torchs_ddp(ranks):
    ranks.run(in_world, 2)


def in_world(ctx):
    with world(ctx):
        train_under_torch(ctx)


# -- torch's hooks on our bucket -----------------------------------------------------------

fp16, bf16 = default_hooks.fp16_compress_wrapper, default_hooks.bf16_compress_wrapper


def itself(group):
    return group


# Left out because they fail on torch's own DDP with Gloo as of 2.13: the quantization hooks, which
# assume NCCL's allgather result layout, and batched PowerSGD, which fails an assertion of its own.
THEIRS = [
    (default_hooks.allreduce_hook, itself, 1e-6),
    (default_hooks.fp16_compress_hook, itself, 1e-2),
    (default_hooks.bf16_compress_hook, itself, 5e-2),
    (fp16(default_hooks.allreduce_hook), itself, 1e-2),
    (bf16(default_hooks.allreduce_hook), itself, 5e-2),
    (torch_local.post_localSGD_hook, lambda g: torch_local.PostLocalSGDState(g, None, 9), 1e-6),
    (torch_power.powerSGD_hook, lambda g: torch_power.PowerSGDState(g, 8, 2, 0), 1e-4),
    (fp16(torch_power.powerSGD_hook), lambda g: torch_power.PowerSGDState(g, 8, 2, 0), 5e-2),
]


@over_groups(backends=("shm",), sizes=(2, 4), reuse=True)  # not threads: torch has one seed for all
def test_torchs_hooks_accept_our_bucket(group):
    for hook, make, close in THEIRS:
        state = make(group)
        for step in range(4):
            result = run(hook, state, group, step)
            expected = mean_of(flat_gradients(group.size(), step))
            assert (result - expected).abs().max() <= close, (hook.__qualname__, step)


@over_groups(backends=("shm", "gloo"), sizes=(3,), reuse=True)
def test_torchs_fp16_power_sgd_with_many_buckets(group):
    """It issues later collectives from the callbacks of earlier ones, on any thread.

    torch's DDP has several buckets in flight, so the order of those collectives may differ between
    ranks: Gloo hangs, our groups raise RankMismatch. Our DDP runs one bucket at a time.
    """
    ddp, whole = wrapped(mlp, group, bucket_cap_mb=TINY)
    ddp.register_comm_hook(
        torch_power.PowerSGDState(group, 8, 2, 0), fp16(torch_power.powerSGD_hook)
    )
    for step in range(6):
        both(ddp, whole, group, step)
        compare(ddp, whole, rtol=2e-2)


class Descent:
    """A minimal functional optimizer for torch's hook."""

    def step_param(self, parameter, gradient):
        with torch.no_grad():
            parameter.sub_(gradient)


@everywhere
def test_torchs_overlapped_optimizer_around_our_hook(group):
    bucket = bucket_of(*gradients(group.rank()), group=group)
    hook = overlap._hook_then_optimizer(
        hooks.allreduce_hook, overlap._OptimizerHookState(Descent())
    )
    hook(None, bucket).wait()
    stepped = torch.cat([p.detach().reshape(-1) for p in bucket.parameters()])
    assert_near(-stepped, mean_of(flat_gradients(group.size())))
    assert debugging_hooks.noop_hook(None, bucket).wait() is bucket.buffer()
