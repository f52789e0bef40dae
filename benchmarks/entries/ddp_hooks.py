"""A step of training with each communication hook: how long it takes, and what a rank sends.

All train the same model over Gloo, on one thread per rank. Hooks that begin with exact steps are
taken past them first. The number after PowerSGD is its rank; batched, it is 1. ``post-local`` is
the hook in its local phase, without the average of the models that belongs to it now and then.
``noop`` is a step of DDP that sends no gradients: the limit.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from benchmarks.entry import Competitors, Counted, entry
from benchmarks.models import MODELS, step_of
from benchmarks.stats import Compare
from phalanx.ddp import DDP, hooks
from phalanx.groups import ProcessGroup
from phalanx.testing import RankContext

PLAIN = "no hook"
EXACT_STEPS = 2
"""What hooks with a memory send uncompressed; buckets are planned anew after the first step."""

Registered = tuple[Any, Callable[..., Any]]


def _power_sgd(rank: int, hook: Callable[..., Any]) -> Registered:
    state = hooks.PowerSGDState(
        None, matrix_approximation_rank=rank, start_powerSGD_iter=EXACT_STEPS
    )
    return state, hook


def _post_local(group: ProcessGroup) -> Registered:
    state = hooks.PostLocalSGDState(
        group, None, start_localSGD_iter=EXACT_STEPS, post_local_gradient_allreduce=False
    )
    return state, hooks.post_localSGD_hook


HOOKS: Mapping[str, Callable[[ProcessGroup], Registered]] = {
    "allreduce": lambda _: (None, hooks.allreduce_hook),
    "fp16": lambda _: (None, hooks.fp16_compress_hook),
    "bf16": lambda _: (None, hooks.bf16_compress_hook),
    "8 bits, tensor": lambda _: (None, hooks.quantization_pertensor_hook),
    "8 bits, channel": lambda _: (None, hooks.quantization_perchannel_hook),
    "PowerSGD 1": lambda _: _power_sgd(1, hooks.powerSGD_hook),
    "PowerSGD 2": lambda _: _power_sgd(2, hooks.powerSGD_hook),
    "PowerSGD 4": lambda _: _power_sgd(4, hooks.powerSGD_hook),
    "batched PowerSGD": lambda _: _power_sgd(1, hooks.batched_powerSGD_hook),
    "top-k 1%": lambda _: (hooks.TopKState(k=0.01, start_iter=EXACT_STEPS), hooks.topk_hook),
    "random-k 1%": lambda _: (
        hooks.RandomKState(k=0.01, start_iter=EXACT_STEPS),
        hooks.randomk_hook,
    ),
    "post-local": _post_local,
    "noop": lambda _: (None, hooks.noop_hook),
}
"""By name: how to make the state and the hook to register."""


@entry(
    title="A step of training by two ranks over Gloo, with each communication hook",
    ranks=(2,),
    grid={"model": ["MLP, 25 M"]},
    peer=PLAIN,
    compare=Compare.COST,
    repeats=10,
    seconds=0.1,
)
def ddp_hooks(ctx: RankContext, *, model: str) -> Iterator[Competitors]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    make, make_batch = MODELS[model]
    module, batch = make(), make_batch()
    group = ctx.group("gloo")
    modules = {name: DDP(copy.deepcopy(module), process_group=group) for name in (PLAIN, *HOOKS)}
    for name, make_hook in HOOKS.items():
        modules[name].register_comm_hook(*make_hook(group))
    steps = {name: step_of(each, batch) for name, each in modules.items()}
    for step in steps.values():
        for _ in range(EXACT_STEPS):
            step()
    yield {name: Counted(step) for name, step in steps.items()}
