"""The oracle: a single process that trains on the whole batch in plain torch.

Bodies run on any group. Every rank generates the same batch and trains on its part of it, so each
rank can run the oracle on a copy of the module.
"""

import copy
import zlib

import pytest
import torch
from torch import nn

from cases import over_cases
from phalanx.ddp import DDP
from phalanx.testing import over_groups

everywhere = over_cases("local-1", "shm-2", "local-4")
"""The default: threads and processes, world sizes 1, 2 and 4."""
several = over_cases("local-2", "shm-4", timeout=20)
"""For bodies in which ranks behave differently."""
on_pairs = over_cases("local-2", "shm-2")
"""For bodies where two ranks are enough."""
on_every_backend = over_cases("local-4", "shm-2", "shm-4", "gloo-2", timeout=60)
"""For bodies whose collectives differ between backends, such as leave and shadow."""
alone = over_groups(backends=("local",), sizes=(1,))
"""For bodies that make no collective."""
VIEWS = {"views": True, "own": False}
both_ways = pytest.mark.parametrize("keeps", VIEWS.values(), ids=VIEWS)
"""``gradient_as_bucket_view``."""
TINY = 1e-6  # MiB: every parameter has a bucket of its own
CAPS = {"many": TINY, "one": 25}
both_caps = pytest.mark.parametrize("cap", CAPS.values(), ids=CAPS)
"""``bucket_cap_mb``."""

ROWS = 4  # per rank and step


def batch(step, size, width=5):
    """Return the batch of all ranks; a private generator, since ranks may be threads."""
    generator = torch.Generator().manual_seed(1000 + step)
    return torch.randn(ROWS * size, width, generator=generator)


def share(rows, group):
    """Return this rank's part of a batch."""
    return rows[group.rank() * ROWS :][:ROWS]


def seeded(make, seed=0):
    """Return a module whose weights depend only on the seed, also with threads."""
    module = make()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.is_complex() or parameter.is_floating_point():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 4)
    return module


def wrapped(make, group, **options):
    """Wrap a module with rank-dependent weights; return it and a copy with rank 0's weights."""
    module = seeded(make, seed=group.rank())
    ddp = DDP(module, process_group=group, **options)
    whole = seeded(make, seed=0)
    for (name, mine), theirs in zip(module.named_parameters(), whole.parameters(), strict=True):
        assert torch.equal(mine, theirs), f"{name} was not broadcast"
    return ddp, whole


def squares(module, rows, step=0, rank=0):
    """Return the mean square of a module's output."""
    return module(rows).square().mean()


def whole_loss(whole, rows, group, loss, step):
    """Return the mean of the ranks' losses, computed in one process."""
    parts = rows.split(ROWS)
    losses = [loss(whole, part, step, rank) for rank, part in enumerate(parts)]
    return sum(losses) / len(losses)


def train(make, group, loss, *, steps=4, set_to_none=True, **options):
    """Train a wrapped module and the oracle, comparing gradients in every step; return both.

    Rank 0 compares with the oracle; the other ranks compare with rank 0, bit for bit.
    `loss(module, rows, step, rank)` is the loss of one rank. Values are float64, so that the order
    of summation does not matter.
    """
    ddp, whole = wrapped(lambda: make().double(), group, **options)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (ddp, whole)]
    for step in range(steps):
        rows = batch(step, group.size()).double()
        loss(ddp, share(rows, group), step, group.rank()).backward()
        if group.rank() == 0:
            whole_loss(whole, rows, group, loss, step).backward()
            assert_same_gradients(ddp.module, whole)
        assert_same_everywhere(ddp)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)
    ddp.assert_in_sync()
    return ddp, whole


def both(ddp, whole, group, step, loss=squares):
    """Run one backward pass on both modules."""
    rows = batch(step, group.size())
    loss(ddp, share(rows, group), step, group.rank()).backward()
    whole_loss(whole, rows, group, loss, step).backward()


def compare(ddp, whole, rtol=1e-6, *, set_to_none=True):
    """Compare the gradients of both modules and zero them."""
    assert_same_gradients(ddp.module, whole, rtol)
    for module in (ddp, whole):
        module.zero_grad(set_to_none=set_to_none)


def parts(ddp, whole, rows, group):
    """Pair each module with the rows that it sees."""
    return (ddp, share(rows, group)), (whole, rows)


def inner(module):
    """Return the unwrapped module."""
    return module.module if isinstance(module, DDP) else module


def operations(group, action):
    """Return the operations that `action` issued on a group."""
    before = [record.sequence for record in group.records()][-1:]
    action()
    return [record.operation for record in group.records() if [record.sequence] > before]


def launched(ddp, rows):
    """Return how many buckets are in flight when the first layer's weight gets its gradient."""
    counts = []
    weight = ddp.module[0].weight
    hook = weight.register_hook(lambda _: counts.append(len(ddp.reducer._in_flight._works)))
    squares(ddp, rows).backward()
    hook.remove()
    (count,) = counts
    return count


def assert_same_everywhere(ddp):
    """Compare every gradient across ranks in one collective."""
    gradients = [p.grad for p in ddp.module.parameters()]
    hashes = [0 if g is None else zlib.crc32(g.contiguous().numpy()) + 1 for g in gradients]
    cards = [card.tolist() for card in ddp._comm.gather(torch.tensor(hashes))]
    assert all(card == cards[0] for card in cards), "gradients are not the same on all ranks"


def assert_same_gradients(module, whole, rtol=1e-6):
    """Compare every gradient with the oracle's, relative to the largest element."""
    for (name, mine), theirs in zip(module.named_parameters(), whole.parameters(), strict=True):
        assert (mine.grad is None) == (theirs.grad is None), f"{name}: one has no gradient"
        if mine.grad is not None:
            assert_close(mine.grad, theirs.grad, name, rtol)


def assert_close(mine, theirs, name="", rtol=1e-6):
    """Compare two tensors, relative to the largest element."""
    mine, theirs = (t.to_dense() if t.is_sparse else t for t in (mine, theirs))
    largest = max(theirs.abs().max().item() if theirs.numel() else 0.0, 1e-3)
    worst = (mine - theirs).abs().max().item() if theirs.numel() else 0.0
    assert worst <= rtol * largest, f"{name}: off by {worst / largest:.2e} of the largest"


def mlp():
    """Return a small network."""
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def copy_of(module):
    """Copy an unwrapped module."""
    return copy.deepcopy(module)
