"""Ways of training that people combine with an elastic run: the same bits at every world size."""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils.checkpoint import checkpoint

from phalanx.ddp import ShardedOptimizer
from phalanx.elastic import ElasticRun

from .training import torch_settings

STEPS = 4
MICRO_BATCHES = 6
INPUTS = torch.randn(40, 8, generator=torch.Generator().manual_seed(1))
LABELS = torch.randint(3, (40,), generator=torch.Generator().manual_seed(2))
DATASET = torch.utils.data.TensorDataset(INPUTS, LABELS)


def make_module():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3))


def simple(group, make_optimizer, *, autocast=False, scaler=None, module=None, forward=None):
    """Train a small module; return the digest and the losses."""
    module = module or make_module()
    optimizer = make_optimizer(module.parameters())
    state = {"scaler": scaler} if scaler is not None else {}
    run = ElasticRun(module, optimizer, micro_batches=MICRO_BATCHES, group=group, state=state)
    loader = run.loader(DATASET, 4)
    forward, losses = forward or module, []
    for step in run.steps(STEPS):
        for micro in step.micro_batches(loader):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = cross_entropy(forward(micro.inputs), micro.targets)
            if scaler is None:
                micro.backward(loss)
            else:
                micro.backward(scaler.scale(loss), report=loss)
        if scaler is None:
            nn.utils.clip_grad_norm_(module.parameters(), 0.5)
            optimizer.step()
        else:
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()
        losses.append(step.loss.hex())
    return run.hash(), losses, [p.detach().clone() for p in module.parameters()]


def adam(**options):
    return lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, **options)


def foreach(group):
    return simple(group, adam(foreach=True))


def fused(group):
    return simple(group, adam(fused=True))


def momentum(group):
    return simple(group, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True))


def sharded(group):
    def make(parameters):
        return ShardedOptimizer(parameters, torch.optim.AdamW, process_group=group, lr=1e-2)

    return simple(group, make)


def bfloat16_autocast(group):
    return simple(group, adam(), autocast=True)


def bfloat16_parameters(group):
    module = make_module().to(torch.bfloat16)
    return simple(group, adam(), module=module, forward=lambda x: module(x.bfloat16()).float())


def grad_scaler(group):
    """The scale starts so high that the first steps overflow: all ranks skip the same ones."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=2)
    module = make_module()
    forward = lambda x: 100 * module(x)  # noqa: E731
    result = simple(group, adam(), scaler=scaler, module=module, forward=forward)
    assert scaler.get_scale() < 2.0**127, "no step was skipped"
    return result


def checkpointed(group, use_reentrant):
    module = make_module()

    def forward(x):
        # The first layer is reached twice: within a checkpoint, and outside of it.
        hidden = checkpoint(module, x.requires_grad_(), use_reentrant=use_reentrant)
        return hidden + module(x).detach() + module[3](module[0](x))

    return simple(group, adam(), module=module, forward=forward)


def activation_checkpointing(group):
    return checkpointed(group, use_reentrant=False)


def reentrant_checkpointing(group):
    return checkpointed(group, use_reentrant=True)


def compiled(group):
    module = make_module()
    return simple(group, adam(), module=module, forward=torch.compile(module, backend="aot_eager"))


def channels_last(group):
    torch.manual_seed(3)
    module = nn.Sequential(
        nn.Unflatten(1, (2, 2, 2)), nn.Conv2d(2, 4, 2), nn.Flatten(), nn.Linear(4, 3)
    )
    return simple(group, adam(), module=module.to(memory_format=torch.channels_last))


def weights_by_tokens(group):
    """Micro-batches count by their number of tokens, one of which has none."""
    module = make_module()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    run = ElasticRun(module, optimizer, micro_batches=MICRO_BATCHES, group=group)
    loader, losses = run.loader(DATASET, 4), []
    for step in run.steps(STEPS):
        for micro in step.micro_batches(loader):
            counted = micro.targets != 2
            kept = cross_entropy(module(micro.inputs)[counted], micro.targets[counted])
            micro.backward(kept, weight=int(counted.sum()))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(step.loss.hex())
    return run.hash(), losses, list(module.parameters())


def accumulated_over_steps(group):
    """Gradients that are not zeroed add up, and a buffer is what users see between steps."""
    module = make_module()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    run = ElasticRun(module, optimizer, micro_batches=MICRO_BATCHES, group=group)
    loader = run.loader(DATASET, 4)
    for step in run.steps(STEPS):
        for micro in step.micro_batches(loader):
            micro.backward(cross_entropy(module(micro.inputs), micro.targets))
        if step.number % 2 == 0:
            optimizer.step()
            optimizer.zero_grad()
    return run.hash(), [step.loss.hex()], list(module.parameters())


def gan(group):
    """Two optimizers over parts of one model, two loops in a step, noise drawn in and between."""
    torch.manual_seed(3)
    parts = nn.ModuleDict(
        {
            "generator": nn.Linear(4, 8),
            "critic": nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1)),
        }
    )
    generator, critic = parts["generator"], parts["critic"]
    optimizers = [torch.optim.Adam(generator.parameters()), torch.optim.Adam(critic.parameters())]
    run = ElasticRun(parts, optimizers, micro_batches=MICRO_BATCHES, group=group)
    loader, seen = run.loader(DATASET, 4), []
    for step in run.steps(STEPS):
        for micro in step.micro_batches(loader):
            fake = generator(torch.randn(4, 4)).detach()
            micro.backward(critic(fake).mean() - critic(micro.inputs).mean())
        optimizers[1].step()
        parts.zero_grad()
        seen.append(torch.rand(()).item())
        for micro in step.micro_batches():
            micro.backward(-critic(generator(torch.randn(4, 4))).mean())
        assert critic[0].weight.grad is not None
        optimizers[0].step()
        parts.zero_grad()
        seen += [torch.rand(()).item(), step.loss]
    return run.hash(), seen, list(parts.parameters())


def unused_and_frozen(group):
    """One parameter is used by a single micro-batch, one by none: it gets no gradient."""
    torch.manual_seed(3)
    module = nn.ModuleDict(
        {name: nn.Linear(8, 3) for name in ("always", "once", "never", "frozen")}
    )
    module["frozen"].requires_grad_(False)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    run = ElasticRun(module, optimizer, micro_batches=MICRO_BATCHES, group=group)
    loader = run.loader(DATASET, 4)
    for step in run.steps(STEPS):
        if step.number == 3:
            module["frozen"].requires_grad_(True)
        for micro in step.micro_batches(loader):
            output = module["always"](micro.inputs) + module["frozen"](micro.inputs)
            if micro.number == 4:
                output = output + module["once"](micro.inputs)
            micro.backward(cross_entropy(output, micro.targets))
        gradients = {name: part.weight.grad for name, part in module.items()}
        assert gradients["never"] is None
        assert gradients["once"] is not None
        assert (gradients["frozen"] is None) == (step.number < 3)
        optimizer.step()
        optimizer.zero_grad()
    return run.hash(), [step.loss.hex()], list(module.parameters())


def gradient_hooks(group):
    """Hooks of users on parameters and tensors see the gradient of one micro-batch."""
    module = make_module()
    module[0].weight.register_hook(lambda grad: grad.clamp(-0.01, 0.01))

    def halve(parameter):
        parameter.grad.mul_(0.5)

    module[3].weight.register_post_accumulate_grad_hook(halve)
    return simple(group, adam(), module=module)


def ragged_regression(group):
    """A loss in float64, from a module whose parameters have two dtypes."""
    torch.manual_seed(3)
    module = nn.ModuleDict({"a": nn.Linear(8, 4), "b": nn.Linear(4, 1).double()})
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    run = ElasticRun(module, optimizer, micro_batches=MICRO_BATCHES, group=group)
    loader = run.loader(DATASET, 4)
    for step in run.steps(STEPS):
        for micro in step.micro_batches(loader):
            output = module["b"](module["a"](micro.inputs).double())
            micro.backward(mse_loss(output[:, 0], micro.targets.double()))
        optimizer.step()
        optimizer.zero_grad()
    return run.hash(), [step.loss.hex()], list(module.parameters())


RECIPES = [
    foreach,
    fused,
    momentum,
    sharded,
    bfloat16_autocast,
    bfloat16_parameters,
    grad_scaler,
    activation_checkpointing,
    reentrant_checkpointing,
    channels_last,
    weights_by_tokens,
    accumulated_over_steps,
    gan,
    unused_and_frozen,
    gradient_hooks,
    ragged_regression,
    pytest.param(compiled, marks=pytest.mark.slow),
]


def run_recipe(ctx, recipe, backend):
    with torch_settings():
        digest, losses, parameters = recipe(ctx.group(backend))
        return digest, losses, [p.detach().clone() for p in parameters]


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipe_has_the_same_bits_at_any_world_size(ranks, recipe):
    ((digest, losses, parameters),) = ranks.run(run_recipe, 1, args=(recipe, "shm"), timeout=90)
    assert all(parameter.isfinite().all() for parameter in parameters)
    for size, backend in ((2, "shm"), (4, "gloo")):
        for result in ranks.run(run_recipe, size, args=(recipe, backend), timeout=90):
            assert result[:2] == (digest, losses), f"{size} ranks on {backend}"


def test_the_choice_of_an_optimizers_loop_may_change_bits_but_not_the_world_size(ranks):
    """`foreach` and `fused` differ from each other; each is the same at every world size."""
    results = [ranks.run(run_recipe, 1, args=(each, "shm"))[0] for each in (foreach, fused)]
    assert torch.allclose(
        *(torch.cat([p.flatten() for p in each[2]]) for each in results), atol=1e-4
    )


def test_weights_give_the_gradient_of_the_mean_over_tokens(ranks):
    """With one step of SGD: the weighted mean of all tokens, computed in one batch."""
    _, losses, parameters = ranks.run(run_recipe, 3, args=(one_weighted_step, "shm"))[0]
    module = make_module()
    module[2].p = 0.0
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    counted = LABELS[:24] != 2
    loss = cross_entropy(module(INPUTS[:24])[counted], LABELS[:24][counted])
    loss.backward()
    optimizer.step()
    for ours, theirs in zip(parameters, module.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs.detach())
    assert losses[0] == pytest.approx(loss.item(), rel=1e-6)


def one_weighted_step(group):
    module = make_module()
    module[2].p = 0.0
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    run = ElasticRun(module, optimizer, micro_batches=MICRO_BATCHES, group=group)
    loader = run.loader(DATASET, 4, shuffle=False)
    for step in run.steps(1):
        for micro in step.micro_batches(loader):
            counted = micro.targets != 2
            loss = cross_entropy(module(micro.inputs)[counted], micro.targets[counted])
            micro.backward(loss, weight=int(counted.sum()))
        optimizer.step()
    return run.hash(), [step.loss], list(module.parameters())
