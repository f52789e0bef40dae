"""Parity with torch's DDP on the same seeds and groups.

torch's DDP accepts our groups, so both sum in the same order and gradients are equal bit for
bit. Flags that only torch needs are passed to torch's DDP alone.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from cases import in_turn
from phalanx.ddp import DDP

from .models import Images, Waves, Words, encoder
from .test_activation_checkpointing import Layers
from .test_graphs import CHOICES, Choice
from .test_outputs import SHAPES, Outputs
from .test_parameter_kinds import Mixed, Tied
from .whole import TINY, assert_close, batch, inner, mlp, seeded, share, squares

UNUSED = {"find_unused_parameters": True}
STATIC = {"static_graph": True}


@dataclass
class Case:
    """A training case; `act(ddp, rows, step, rank)` produces the gradients of a step."""

    make: Callable
    act: Callable
    width: int = 5
    told: dict = field(default_factory=dict)
    """Options for torch's DDP only."""
    given: dict = field(default_factory=dict)
    """Options for both."""
    wrap: Callable = lambda kind, module, **options: kind(module, **options)
    clear: Callable = lambda module: module.zero_grad()
    exact: bool = True
    """Whether gradients are compared bit for bit."""


def plain(ddp, rows, step, rank):
    squares(ddp, rows).backward()


def ignore_outputs(ddp, rows, step, rank):
    with torch.no_grad():
        ddp(rows)
    ddp.eval()
    with torch.no_grad():
        ddp(rows)
    ddp.train()
    plain(ddp, rows, step, rank)


def accumulate(ddp, rows, step, rank):
    with ddp.no_sync():
        for turn in range(step):
            squares(ddp, rows * (turn + 2)).backward()
    squares(ddp, rows).backward()


def repeat(ddp, rows, step, rank):
    (squares(ddp, rows) + squares(ddp, rows * 2)).backward()


def clip(ddp, rows, step, rank):
    squares(ddp, rows).backward()
    nn.utils.clip_grad_norm_(ddp.parameters(), 0.1)
    nn.utils.clip_grad_value_(ddp.parameters(), 0.05)
    next(ddp.parameters()).grad[0] += 1


def scale(ddp, rows, step, rank):
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    scaler.scale(squares(ddp, rows)).backward()
    scaler.unscale_(torch.optim.SGD(ddp.parameters()))


def hook(ddp, rows, step, rank):
    """Halve gradients in a hook; every step adds another hook."""

    def halve(parameter):
        parameter.grad.mul_(0.5)

    for parameter in ddp.parameters():
        parameter.register_post_accumulate_grad_hook(halve)
    squares(ddp, rows).backward()


def hook_accumulated(ddp, rows, step, rank):
    """Halve gradients in every pass, so that hooks must see the accumulated sum."""
    with ddp.no_sync():
        hook(ddp, rows, step, rank)
        squares(ddp, rows * 2).backward()
    squares(ddp, rows * 3).backward()


def choose(which):
    def act(ddp, rows, step, rank):
        ddp(rows, *CHOICES[which](step, rank)).square().mean().backward()

    return act


def take(shape, *, whole=False):
    def act(ddp, rows, step, rank):
        a, b = SHAPES[shape][1](ddp(rows))
        which = 2 if whole else (step + rank) % 3
        sum([[a.sum()], [b.mean()], [a.sum(), b.sum()]][which]).backward()

    return act


def times(*counts):
    def act(ddp, rows, step, rank):
        ddp(rows, *counts).square().mean().backward()

    return act


def look_up(ddp, rows, step, rank):
    squares(ddp, rows.abs().mul(7).long() % 9).backward()


def frozen():
    module = mlp()
    module[0].requires_grad_(False)
    return module


def shared():
    layer = nn.Linear(5, 5)
    return nn.Sequential(layer, nn.Sequential(nn.Tanh(), layer), nn.Linear(5, 2))


def wrap_parts(kind, module, **options):
    """Wrap two submodules separately."""
    module[0], module[2] = (kind(module[i], **options) for i in (0, 2))
    return module


def zero(module):
    module.zero_grad(set_to_none=False)


def keep(module):
    """Clear nothing; gradients accumulate."""


def take_away(module):
    """Set some gradients to None and replace the others."""
    for i, parameter in enumerate(module.parameters()):
        parameter.grad = None if i % 2 else torch.full_like(parameter, 0.5)


CASES = {
    "plain": Case(mlp, plain),
    "many buckets": Case(mlp, plain, given={"bucket_cap_mb": TINY}),
    "buckets one by one": Case(mlp, plain, given={"bucket_cap_mb_list": [TINY, 1]}),
    "gradients of their own": Case(mlp, plain, given={"gradient_as_bucket_view": False}),
    "no start": Case(lambda: seeded(mlp, seed=3), plain, given={"init_sync": False}),
    "zeroed": Case(mlp, plain, clear=zero),
    "zeroed, of their own": Case(mlp, plain, clear=zero, given={"gradient_as_bucket_view": False}),
    "added up": Case(mlp, plain, clear=keep),
    "taken away": Case(mlp, plain, clear=take_away),
    "clipped": Case(mlp, clip),
    "scaled": Case(mlp, scale),
    "hooked": Case(mlp, hook),
    "hooked, many buckets": Case(mlp, hook, given={"bucket_cap_mb": TINY}),
    "hooked, zeroed": Case(mlp, hook, clear=zero, given={"bucket_cap_mb": TINY}),
    "hooked, added up": Case(mlp, hook, clear=keep, given={"bucket_cap_mb": TINY}),
    "hooked, accumulated": Case(mlp, hook_accumulated),
    "hooked, accumulated, of their own": Case(
        mlp, hook_accumulated, given={"gradient_as_bucket_view": False}
    ),
    "images": Case(Images, plain, 36),
    "images, statistics apart": Case(Images, plain, 36, given={"forward_sync_buffers": False}),
    "encoder": Case(encoder, plain, 24),
    "words": Case(Words, plain),
    "sparse words": Case(lambda: Words(sparse=True), plain, exact=False),
    "complex": Case(Waves, plain),
    "mixed types, no elements": Case(Mixed, plain, exact=False),
    "frozen": Case(frozen, plain),
    "tied": Case(Tied, look_up),
    "shared": Case(shared, plain),
    "evaluation in between": Case(mlp, ignore_outputs),
    "accumulated": Case(mlp, accumulate),
    "several forwards": Case(mlp, repeat),
    "two in one loss, inside of another": Case(mlp, plain, wrap=wrap_parts),
    "checkpoints": Case(lambda: Layers(reentrant=False), times(1, 3, 2)),
    "reentrant checkpoints": Case(Layers, times(1, 1, 1), told=STATIC),
    "reentrant checkpoints, repeated": Case(Layers, times(1, 3, 2), told=STATIC),
    **{f"unused {which}": Case(Choice, choose(which), told=UNUSED) for which in CHOICES},
    **{
        f"part of a {shape}": Case(partial(Outputs, shape), take(shape), told=UNUSED)
        for shape in ("tuple", "dict", "namedtuple")
    },
    **{
        f"all of a {shape}": Case(partial(Outputs, shape), take(shape, whole=True))
        for shape in SHAPES
    },
    **{
        flag: Case(mlp, plain, given={flag: True})
        for flag in ("find_unused_parameters", "static_graph", "batched_grad_copy")
    },
}  # fmt: skip


def wrap_both(case, group):
    """Wrap a module with both classes; initial weights differ between ranks."""
    module = seeded(case.make, seed=0 if "init_sync" in case.given else group.rank())
    theirs = {"gradient_as_bucket_view": True, **case.told, **case.given}
    return (
        case.wrap(DDP, copy.deepcopy(module), process_group=group, **case.given),
        case.wrap(TorchDDP, module, process_group=group, **theirs),
    )


def assert_equal(ours, theirs, *, exact, step):
    named = inner(ours).named_parameters()
    for (name, mine), other in zip(named, theirs.parameters(), strict=True):
        what = f"gradient of {name} in step {step}"
        assert (mine.grad is None) == (other.grad is None), f"{what}: one has none"
        if mine.grad is None:
            continue
        if exact:
            assert torch.equal(mine.grad, other.grad), what
        else:
            assert_close(mine.grad, other.grad, what, rtol=max(1e-6, eps(mine)))
    for mine, other in zip(ours.buffers(), theirs.buffers(), strict=True):
        assert torch.equal(mine, other), f"a buffer in step {step}"


def eps(parameter):
    """Return the relative precision of 16-bit dtypes, else 0."""
    info = torch.finfo(parameter.dtype)
    return info.eps if info.bits == 16 else 0.0


def learn(module):
    """Take a plain SGD step."""
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.grad is not None:
                parameter.sub_(parameter.grad, alpha=0.1)


@in_turn("local-2", "shm-4", name=list(CASES))
@pytest.mark.filterwarnings("ignore:find_unused_parameters=True was specified")
def test_gradients_and_buffers_match_torchs_ddp(group, name):
    case = CASES[name]
    pair = wrap_both(case, group)
    for step in range(4):
        rows = share(batch(step, group.size(), case.width), group)
        for ddp in pair:
            case.act(ddp, rows, step, group.rank())
        assert_equal(*pair, exact=case.exact, step=step)
        for ddp in pair:
            learn(ddp)
            case.clear(ddp)
