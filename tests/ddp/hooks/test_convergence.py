"""Every hook reaches about the accuracy of all-reduce on handwritten digits."""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from phalanx.ddp import DDP, hooks
from phalanx.ddp.hooks import (
    DiLoCo,
    PeriodicModelAverager,
    PostLocalSGDOptimizer,
    PostLocalSGDState,
    PowerSGDState,
    RandomKState,
    TopKState,
)
from phalanx.testing import over_groups

from ..whole import seeded

EPOCHS, BATCH, TEST = 4, 32, 297

# Hook name to state.
COMPRESSED = {
    "allreduce_hook": lambda _: None,
    "fp16_compress_hook": lambda _: None,
    "bf16_compress_hook": lambda _: None,
    "quantization_pertensor_hook": lambda _: None,
    "quantization_perchannel_hook": lambda _: None,
    "powerSGD_hook": lambda _: PowerSGDState(None, 2, 20),
    "batched_powerSGD_hook": lambda _: PowerSGDState(None, 4, 20),
    "topk_hook": lambda _: TopKState(k=0.05, start_iter=20),
    "randomk_hook": lambda _: RandomKState(k=0.4, start_iter=20),
}
# Hook, state and optimizer wrapper, for models that are averaged only periodically.
APART = {
    "post-local": (
        "post_localSGD_hook",
        lambda group: PostLocalSGDState(group, None, 10, post_local_gradient_allreduce=False),
        lambda optimizer, group: PostLocalSGDOptimizer(
            optimizer, PeriodicModelAverager(5, 10, group)
        ),
    ),
    "DiLoCo": (
        "noop_hook",
        lambda _: None,
        lambda optimizer, group: DiLoCo(optimizer, sync_every=10, process_group=group),
    ),
    "streaming DiLoCo": (
        "noop_hook",
        lambda _: None,
        lambda optimizer, group: DiLoCo(
            optimizer, sync_every=10, process_group=group, fragments=2, delay=2, alpha=0.5
        ),
    ),
}


def data():
    from sklearn.datasets import load_digits  # takes more than a second

    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(digits.data, dtype=torch.float32)[order] / 16
    labels = torch.tensor(digits.target)[order]
    return images.split([TEST, len(order) - TEST]), labels.split([TEST, len(order) - TEST])


def network():
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


def learn(group, hook, state, around=None):
    """Train a small network with a hook and return its test accuracy."""
    (test, images), (answers, labels) = data()
    model = DDP(seeded(network), process_group=group)
    model.register_comm_hook(state, getattr(hooks, hook))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if around is not None:
        optimizer = around(optimizer, group)
    share = len(images) // group.size()
    generator = torch.Generator().manual_seed(1)
    for _ in range(EPOCHS):
        order = torch.randperm(len(images), generator=generator)
        for batch in order[group.rank() * share :][:share].split(BATCH):
            optimizer.zero_grad()
            cross_entropy(model(images[batch]), labels[batch]).backward()
            optimizer.step()
    if around is None:
        model.assert_in_sync()
    return (model(test).argmax(1) == answers).float().mean().item()


@pytest.mark.slow
@over_groups(backends=("shm",), sizes=(2,), reuse=True, timeout=90.0)
def test_every_hook_converges(group):
    torch.set_num_threads(1)
    read = {name: learn(group, name, make(group)) for name, make in COMPRESSED.items()}
    for name, (hook, make, around) in APART.items():
        read[name] = learn(group, hook, make(group), around)
    assert read["allreduce_hook"] > 0.93, read
    behind = {name: right for name, right in read.items() if right < read["allreduce_hook"] - 0.05}
    assert not behind, read
