"""Parameters of every kind."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - torch's own name for it

from cases import over_cases
from phalanx.ddp import DDP

from .models import Waves
from .whole import (
    ROWS,
    TINY,
    assert_same_gradients,
    batch,
    both,
    both_ways,
    compare,
    everywhere,
    mlp,
    share,
    squares,
    train,
    whole_loss,
    wrapped,
)


class Mixed(nn.Module):
    """Parameters of many dtypes, one of them empty."""

    def __init__(self):
        super().__init__()
        self.half_ = nn.Parameter(torch.zeros(5, dtype=torch.float16))
        self.brain = nn.Parameter(torch.zeros(5, dtype=torch.bfloat16))
        self.single = nn.Parameter(torch.zeros(5))
        self.double_ = nn.Parameter(torch.zeros(5, dtype=torch.float64))
        self.wave = nn.Parameter(torch.zeros(5, dtype=torch.complex64))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.scalar = nn.Parameter(torch.zeros(()))

    def forward(self, rows):
        total = sum(rows * p.to(rows.dtype) for p in (self.half_, self.brain, self.single))
        wave = (self.wave * rows.to(self.wave.dtype)).abs()
        return total * self.double_ + wave * self.scalar + self.empty.sum()


@over_cases("local-1", "shm-2", "gloo-2", "local-4")
def test_mixed_dtypes(group):
    ddp, whole = wrapped(Mixed, group)
    for step in range(3):
        rows = batch(step, group.size())
        squares(ddp, share(rows, group)).backward()
        whole_loss(whole, rows, group, squares, step).backward()
        for (name, mine), theirs in zip(
            ddp.module.named_parameters(), whole.parameters(), strict=True
        ):
            assert mine.grad.dtype is mine.dtype
            tolerance = {torch.float16: 4e-3, torch.bfloat16: 3e-2}.get(mine.dtype, 1e-6)
            assert torch.allclose(mine.grad, theirs.grad, rtol=tolerance, atol=tolerance), name
        ddp.zero_grad()
        whole.zero_grad()
    ddp.assert_in_sync()


class Empty(nn.Module):
    """An empty parameter, alone or beside another one."""

    def __init__(self, dtype, beside):
        super().__init__()
        self.empty = nn.Parameter(torch.zeros(0, 3, dtype=dtype))
        self.weight = nn.Parameter(torch.zeros(5, 2)) if beside else None

    def forward(self, rows):
        return (rows if self.weight is None else rows @ self.weight) + self.empty.sum()


@everywhere
def test_empty_parameters(group):
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.complex64):
        for beside, cap in ((False, 25), (True, 25), (True, TINY)):
            ddp, whole = wrapped(partial(Empty, dtype, beside), group, bucket_cap_mb=cap)
            for step in range(3):
                both(ddp, whole, group, step, absolute)
                assert ddp.module.empty.grad.shape == (0, 3)
                assert ddp.module.empty.grad.dtype is dtype
                compare(ddp, whole)


def absolute(module, rows, step=0, rank=0):
    return module(rows).abs().mean()


@everywhere
@pytest.mark.parametrize("reduce", ["mean", "sum"])
@both_ways
def test_complex_parameters(group, reduce, keeps):
    ddp, whole = wrapped(Waves, group, reduce=reduce, gradient_as_bucket_view=keeps)
    factor = group.size() if reduce == "sum" else 1
    for step in range(3):
        both(ddp, whole, group, step)
        for parameter in whole.parameters():
            parameter.grad *= factor
        compare(ddp, whole)


@everywhere
@pytest.mark.parametrize("dtype", [torch.complex64, torch.bfloat16], ids=str)
def test_no_parameter_has_the_header_dtype(group, dtype):
    module = nn.Module()
    module.used, module.unused = (nn.Parameter(torch.ones(3, dtype=dtype)) for _ in range(2))
    module.forward = lambda n: (module.used * n).abs().sum()
    ddp = DDP(module, process_group=group)
    for _ in range(3):
        ddp(group.rank() + 1).backward()
        expected = (group.size() + 1) / 2
        assert module.used.grad.real.tolist() == [expected] * 3
        assert module.unused.grad is None
        ddp.zero_grad()


class Words(nn.Module):
    """An embedding with sparse gradients and a dense head."""

    def __init__(self, kind=nn.Embedding, **options):
        super().__init__()
        self.words = kind(9, 5, sparse=True, **options)
        self.head = nn.Linear(5, 2)

    def forward(self, ids, words=True):
        return self.head(self.words(ids).tanh() if words else torch.ones(len(ids), 5))


def ids(step, group):
    generator = torch.Generator().manual_seed(step)
    return torch.randint(9, (ROWS * group.size(), 3), generator=generator)


@over_cases("local-1", "shm-2", "gloo-2", "local-4")
@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag], ids=lambda kind: kind.__name__)
def test_sparse_gradients_of_embeddings(group, kind):
    keeps = kind is nn.Embedding
    ddp, whole = wrapped(lambda: Words(kind), group, gradient_as_bucket_view=keeps)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (ddp, whole)]
    for step in range(3):
        everything = ids(step, group)
        for _ in range(1 + step % 2):  # once, or twice without zero_grad
            squares(ddp, share(everything, group)).backward()
            whole_loss(whole, everything, group, squares, step).backward()
            assert ddp.module.words.weight.grad.is_sparse
            assert_same_gradients(ddp.module, whole)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    ddp.assert_in_sync()


@everywhere
def test_sparse_gradients_with_sparse_adam(group):
    ddp, whole = wrapped(Words, group)
    optimizers = [
        (torch.optim.SparseAdam([m.words.weight]), torch.optim.Adam(m.head.parameters()))
        for m in (ddp.module, whole)
    ]
    for step in range(3):
        everything = ids(step, group)
        squares(ddp, share(everything, group)).backward()
        whole_loss(whole, everything, group, squares, step).backward()
        assert_same_gradients(ddp.module, whole)
        for optimizer in (one for pair in optimizers for one in pair):
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
    ddp.assert_in_sync()


@everywhere
@pytest.mark.parametrize("reduce", ["mean", "sum"])
def test_sparse_gradients_accumulate_in_no_sync(group, reduce):
    ddp, whole = wrapped(Words, group, reduce=reduce)
    factor = group.size() if reduce == "sum" else 1
    with ddp.no_sync():
        squares(ddp, share(ids(0, group), group)).backward()
    squares(ddp, share(ids(1, group), group)).backward()
    for step in range(2):
        (factor * whole_loss(whole, ids(step, group), group, squares, step)).backward()
    assert_same_gradients(ddp.module, whole)


@everywhere
def test_weighted_sparse_gradients_unused_on_some_ranks(group):
    def loss(module, rows, rank):
        return module(rows).square().mean() if rank != 1 else module(rows, words=False).sum()

    ddp, whole = wrapped(Words, group)
    ddp.weight = group.rank() + 1
    weights = torch.arange(1, group.size() + 1)
    for step in range(3):
        everything = ids(step, group)
        loss(ddp, share(everything, group), group.rank()).backward()
        for rank, theirs in enumerate(everything.split(ROWS)):
            (loss(whole, theirs, rank) * weights[rank] / weights.sum()).backward()
        compare(ddp, whole)


@everywhere
def test_sparse_parameter_unused_on_all_ranks_in_some_steps(group):
    def loss(module, ids, step=0, rank=0):
        return module(ids, words=step % 3 == 1).square().mean()

    ddp, whole = wrapped(Words, group)
    for step in range(6):
        everything = ids(step, group)
        loss(ddp, share(everything, group), step).backward()
        whole_loss(whole, everything, group, loss, step).backward()
        assert (ddp.module.words.weight.grad is None) == (step % 3 != 1)
        compare(ddp, whole)


class Functional(nn.Module):
    """Produces a sparse gradient without an embedding layer."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.zeros(9, 5))

    def forward(self, ids):
        return F.embedding(ids, self.table, sparse=True)


@everywhere
def test_sparse_gradient_from_a_functional_embedding(group):
    ddp, whole = wrapped(Functional, group)
    for step in range(3):
        everything = ids(step, group)
        squares(ddp, share(everything, group)).backward()
        whole_loss(whole, everything, group, squares, step).backward()
        compare(ddp, whole)


class Tied(nn.Module):
    """One weight shared by two layers, one of which may produce sparse gradients."""

    def __init__(self, sparse=False, head_first=False):
        super().__init__()
        if head_first:
            self.head = nn.Linear(5, 9, bias=False)
        self.words = nn.Embedding(9, 5, sparse=sparse)
        if not head_first:
            self.head = nn.Linear(5, 9, bias=False)
        self.head.weight = self.words.weight
        self.again = self.head

    def forward(self, ids):
        return self.again(self.head(self.words(ids))[..., :5])


@everywhere
@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
@pytest.mark.parametrize("head_first", [False, True], ids=["words", "head"])
def test_tied_weights(group, sparse, head_first):
    ddp, whole = wrapped(lambda: Tied(sparse, head_first), group)
    for step in range(3):
        everything = ids(step, group)
        squares(ddp, share(everything, group)).backward()
        whole_loss(whole, everything, group, squares, step).backward()
        compare(ddp, whole)


@everywhere
def test_module_shared_by_two_parents(group):
    def make():
        layer = nn.Linear(5, 5)
        return nn.Sequential(layer, nn.Sequential(nn.Tanh(), layer), nn.Linear(5, 2))

    train(make, group, squares, bucket_cap_mb=TINY)


class Conv(nn.Sequential):
    """Convolutions with channels-last weights."""

    def __init__(self):
        super().__init__(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 2, 3, groups=2))
        self.to(memory_format=torch.channels_last)


@everywhere
@both_ways
def test_channels_last(group, keeps):
    def loss(module, rows, step, rank):
        images = rows.repeat(1, 3 * 36 // 5 + 1)[:, : 3 * 36].view(-1, 3, 6, 6)
        return squares(module, images.to(memory_format=torch.channels_last))

    ddp, _ = train(Conv, group, loss, gradient_as_bucket_view=keeps)
    loss(ddp, torch.ones(4, 5).double(), 0, 0).backward()
    for parameter in ddp.parameters():
        assert parameter.grad.stride() == parameter.stride()


@everywhere
def test_transposed_and_strided_parameters(group):
    class Transposed(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(3, 5).t())
            self.sliced = nn.Parameter(torch.zeros(5, 6)[:, ::2])

        def forward(self, rows):
            return rows @ (self.weight + self.sliced)

    train(Transposed, group, squares)


@everywhere
@both_ways
def test_freezing_and_unfreezing_between_steps(group, keeps):
    def loss(module, rows, step, rank):
        inner = module.module if isinstance(module, DDP) else module
        inner[0].requires_grad_(step % 3 == 1)
        inner[2].bias.requires_grad_(step < 2)
        return squares(module, rows)

    def make():
        module = mlp()
        module[0].requires_grad_(False)
        return module

    ddp, _ = train(make, group, loss, steps=8, gradient_as_bucket_view=keeps, bucket_cap_mb=TINY)
    for parameter in ddp.parameters():
        assert len(parameter._post_accumulate_grad_hooks or ()) <= 2, "hooks are left behind"


@everywhere
def test_all_parameters_frozen_in_some_steps(group):
    ddp, whole = wrapped(mlp, group)
    for step in range(6):
        for module in (ddp.module, whole):
            module.requires_grad_(step % 2 == 0)
        if step % 2:
            assert not ddp(share(batch(step, group.size()), group)).requires_grad
        else:
            both(ddp, whole, group, step)
            compare(ddp, whole)


@everywhere
def test_memory_format_changed_after_wrapping(group):
    ddp, whole = wrapped(Conv, group)
    for step in range(5):
        layout = torch.contiguous_format if step > 2 else torch.channels_last
        images = batch(step, group.size(), 3 * 36).view(-1, 3, 6, 6)
        for module in (ddp, whole):
            module.to(memory_format=layout)
        squares(ddp, share(images, group)).backward()
        whole_loss(whole, images, group, squares, step).backward()
        compare(ddp, whole)
