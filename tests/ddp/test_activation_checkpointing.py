"""Activation checkpointing, reentrant and not, and the late gradients it causes."""

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from cases import in_turn
from phalanx.ddp import DDP

from .whole import (
    TINY,
    assert_same_gradients,
    batch,
    both,
    compare,
    everywhere,
    share,
    train,
    wrapped,
)

KINDS = {"reentrant": True, "not": False}
both_kinds = pytest.mark.parametrize("reentrant", KINDS.values(), ids=KINDS)


class Layers(nn.Module):
    """Checkpointed layers; the caller says how often each one runs."""

    def __init__(self, reentrant=True):
        super().__init__()
        self.reentrant = reentrant
        self.first, self.last = nn.Linear(5, 5), nn.Linear(5, 3)
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(3))

    def forward(self, rows, *times):
        hidden = self.first(rows)
        for layer, n in zip(self.layers, times, strict=True):
            for _ in range(n):
                hidden = checkpoint(layer, hidden, use_reentrant=self.reentrant).tanh()
        return self.last(hidden)


TIMES = {
    "once": lambda *_: (1, 1, 1),
    "thrice": lambda *_: (1, 3, 2),
    "changing": lambda step, _: (step % 3, 1 + step % 2, 1),
    "differing": lambda step, rank: (1 + rank % 2, (step + rank) % 3, 1),
}


@in_turn("shm-2", "local-4", reentrant=KINDS, times=list(TIMES))
def test_checkpointed_layers(group, reentrant, times):
    def loss(module, rows, step, rank):
        return module(rows, *TIMES[times](step, rank)).square().mean()

    train(lambda: Layers(reentrant), group, loss, steps=5, bucket_cap_mb=TINY)


class Whole(nn.Module):
    """Nothing but checkpointed layers: the outer graph has no parameter."""

    def __init__(self, reentrant=True):
        super().__init__()
        self.reentrant = reentrant
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(3))

    def forward(self, rows, *which):
        hidden = rows.clone().requires_grad_()
        for i in which:
            hidden = checkpoint(self.layers[i], hidden, use_reentrant=self.reentrant).tanh()
        return hidden


@everywhere
@both_kinds
@pytest.mark.parametrize("is_same", [True, False], ids=["same", "differing"])
def test_module_with_only_checkpointed_layers(group, reentrant, is_same):
    def loss(module, rows, step, rank):
        which = (0, 1, 2) if is_same or rank else (0, 2, 0, 1, 0)[: 1 + step]
        return module(rows, *which).square().mean()

    train(lambda: Whole(reentrant), group, loss, steps=5, bucket_cap_mb=TINY if is_same else 25)


@everywhere
@both_kinds
def test_checkpoint_around_the_ddp_module(group, reentrant):
    def loss(module, rows, step, rank):
        rows = rows.clone().requires_grad_()
        hidden = checkpoint(module, rows, use_reentrant=reentrant).tanh()
        return checkpoint(module, hidden, use_reentrant=reentrant).square().mean()

    train(lambda: nn.Sequential(nn.Linear(5, 6), nn.Linear(6, 5)), group, loss, bucket_cap_mb=TINY)


@everywhere
def test_recomputed_forward_does_not_rebuild_buckets_during_backward(group):
    ddp, whole = wrapped(
        lambda: nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 2)),
        group,
        bucket_cap_mb=TINY,
    )
    for step in range(3):
        rows = batch(step, group.size())
        for module, part in ((ddp, share(rows, group)), (whole, rows)):
            losses = [
                checkpoint(module, part * n, use_reentrant=False).square().mean() for n in (1, 2)
            ]
            for loss in losses:  # the order from the first of them must not be taken in the second
                loss.backward()
        compare(ddp, whole)


# -- late ----------------------------------------------------------------------------------


def late(ddp):
    """Return the layers whose gradients were late on any rank in the last pass."""
    return {ddp.reducer.names[i].rpartition(".")[0] for i in ddp.reducer._layout.header.late()}


@everywhere
@pytest.mark.parametrize("reduce", ["mean", "sum", "weight"])
def test_layer_used_more_often_than_in_the_previous_step(group, reduce):
    options = {} if reduce == "weight" else {"reduce": reduce}
    ddp, whole = wrapped(Layers, group, bucket_cap_mb=TINY, **options)
    weights = [1.0] * group.size()
    if reduce == "weight":
        weights = [1.0 + rank for rank in range(group.size())]
        ddp.weight = weights[group.rank()]
    divisor = 1 if reduce == "sum" else sum(weights)
    for step in range(7):

        def times(rank, step=step):
            again = step == 3 or (step == 5 and rank == 0)
            return (1, 2 if again else 1, 1)

        rows = batch(step, group.size())
        ddp(share(rows, group), *times(group.rank())).square().mean().backward()
        for rank, part in enumerate(rows.split(len(rows) // group.size())):
            (whole(part, *times(rank)).square().mean() * weights[rank] / divisor).backward()
        assert_same_gradients(ddp.module, whole, rtol=2e-6)
        assert late(ddp) == ({"layers.1"} if step in (3, 5) else set()), "the late round"
        ddp.zero_grad()
        whole.zero_grad()


class Laid(nn.Module):
    """Layers whose gradients are late and have other strides than their parameters."""

    def __init__(self, sparse=False):
        super().__init__()
        self.sparse = sparse
        self.conv = nn.Conv2d(2, 2, 3, padding=1).to(memory_format=torch.channels_last)
        self.turned = nn.Parameter(torch.zeros(18, 18).t())
        self.table = nn.Parameter(torch.zeros(4, 18))  # its gradients are sparse, or not
        self.words = nn.Embedding(4, 18, sparse=True)  # and so are these
        self.first, self.last = nn.Linear(5, 18), nn.Linear(18, 2)

    def layer(self, hidden):
        images = self.conv(hidden.view(-1, 2, 3, 3)).flatten(1)
        ids = torch.arange(len(hidden)) % 4
        rows = functional.embedding(ids, self.table, sparse=self.sparse)
        words = self.words(ids) if self.sparse else self.words.weight[ids]
        return images.tanh() + (hidden @ self.turned).tanh() + rows + words

    def forward(self, rows, times):
        hidden = self.first(rows)
        for _ in range(times):
            hidden = checkpoint(self.layer, hidden, use_reentrant=True)
        return self.last(hidden)


@everywhere
@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
def test_late_gradients_with_other_strides_than_the_parameter(group, sparse):
    ddp, whole = wrapped(lambda: Laid(sparse), group, bucket_cap_mb=TINY)
    lates = []
    for step in range(7):
        both(
            ddp, whole, group, step,
            lambda m, rows, step, rank: m(rows, 1 + (step in (3, 5) and rank == 0)).square().mean(),
        )  # fmt: skip
        lates.append(late(ddp))
        compare(ddp, whole, rtol=2e-6)
    assert [step for step, names in enumerate(lates) if names] == [3, 5]


class Optional(nn.Module):
    """Two layers in one bucket, the second of which may be unused."""

    def __init__(self):
        super().__init__()
        self.first, self.late, self.early = (nn.Linear(5, 5, bias=False) for _ in range(3))

    def forward(self, rows, both):
        hidden = self.first(rows)
        return self.early(self.late(hidden).tanh() if both else hidden)


@everywhere
def test_layer_first_used_after_its_bucket_was_launched(group):
    seen = []

    def loss(module, rows, step, rank):
        if isinstance(module, DDP):
            seen.append(late(module) if step else set())
        return module(rows, both=step in (0, 3, 5) and rank % 2 == 0).square().mean()

    two = 2 * 5 * 5 * 8 / (1 << 20)
    ddp, _ = train(Optional, group, loss, steps=8, bucket_cap_mb=two)
    assert [len(bucket.members) for bucket in ddp.reducer.buckets] == [2, 1]
    assert [step - 1 for step, names in enumerate(seen) if names] == [3, 5]
