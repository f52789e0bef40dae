"""SyncBatchNorm matches batch norm in one process over the rows of all ranks."""

import copy
import pickle
from datetime import timedelta

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from cases import over_cases
from phalanx.ddp import DDP, SyncBatchNorm
from phalanx.groups import process_group
from phalanx.testing import over_groups

from .whole import (
    ROWS,
    TINY,
    alone,
    assert_close,
    compare,
    operations,
    seeded,
    share,
    squares,
    wrapped,
)
from .whole import batch as rows_of_all

everywhere = over_cases("local-2", "shm-4", "gloo-2")
on_pairs = over_groups(sizes=(2,), backends=("local", "shm"), reuse=True)
LONG = timedelta(seconds=60)
CHANNELS = 3
NORMS = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}


def oracle(dims, dtype=torch.float64, **options):
    """Return torch's batch norm with distinct parameters per channel."""
    norm = NORMS[dims](CHANNELS, **options).to(dtype)
    if norm.affine:
        with torch.no_grad():
            norm.weight.copy_(torch.tensor([0.5, -2.0, 1.0]))
            norm.bias.copy_(torch.tensor([3.0, 0.0, -1.0]))
    return norm


def values(counts, dims, step=0, dtype=torch.float64, shift=0.0):
    """Return the values of all ranks and the rows of each; channels have different means."""
    generator = torch.Generator().manual_seed(7 + step)
    shape = (sum(counts), CHANNELS, 2, 3, 2)[:dims]
    drawn = torch.randn(shape, generator=generator, dtype=torch.float64)
    each = torch.tensor([0.0, 5.0, -3.0], dtype=torch.float64).view(-1, *[1] * (dims - 2))
    whole = (drawn + each + shift).to(dtype)
    return whole, whole.split(list(counts))


def weights_of(whole):
    """Return a different weight per output, so that no gradient cancels by chance."""
    return torch.linspace(-1, 2, whole.numel(), dtype=torch.float64).view(whole.shape)


def parts_of(norm):
    """Return a layer's parameter gradients and buffers."""
    return [p.grad for p in norm.parameters()] + list(norm.buffers())


def check(group, counts, dims=2, *, steps=2, dtype=torch.float64, rtol=1e-10, shift=0.0, **options):
    """Compare this rank's outputs, gradients and statistics with one process."""
    norm, reference = oracle(dims, dtype, **options), oracle(dims, **options)
    norm = SyncBatchNorm.convert_sync_batchnorm(norm, group)
    for step in range(steps):
        whole, parts = values(counts, dims, step, dtype, shift)
        mine = parts[group.rank()].clone().requires_grad_()
        whole = whole.double().clone().requires_grad_()
        output, expected = norm(mine), reference(whole)
        assert (output.dtype, output.shape) == (dtype, mine.shape)
        assert_close(output.double(), expected.split(counts)[group.rank()], "output", rtol)
        weights = weights_of(whole)
        (expected.square() * weights).sum().backward()
        (output.double().square() * weights.split(counts)[group.rank()]).sum().backward()
        told = whole.grad.split(counts)[group.rank()]
        assert_close(mine.grad.double(), told, "input gradient", rtol)
    for gradient in [p.grad for p in norm.parameters()]:
        group.allreduce([gradient]).wait()  # each rank has its part of the sum
    for seen, told in zip(parts_of(norm), parts_of(reference), strict=True):
        assert_close(seen.double(), told.double(), "parameters and buffers", rtol)


SPLITS = {"even": (3, 3, 3, 3), "uneven": (1, 4, 2, 3), "one has none": (2, 0, 1, 2)}


@pytest.mark.parametrize("counts", SPLITS.values(), ids=SPLITS)
@everywhere
def test_matches_batch_norm_over_all_rows(group, counts):
    for dims in NORMS:
        check(group, list(counts[: group.size()]), dims)


@st.composite
def layers(draw):
    counts = draw(st.lists(st.integers(0, 5), min_size=2, max_size=4).filter(lambda c: sum(c) > 1))
    options = {
        "momentum": draw(st.sampled_from([None, 0.1, 1.0])),
        "affine": draw(st.booleans()),
        "track_running_stats": draw(st.booleans()),
        "eps": draw(st.sampled_from([1e-5, 0.1])),
    }
    return counts, draw(st.sampled_from(list(NORMS))), draw(st.sampled_from([0, 1e4])), options


def check_layer(ctx, layer):
    counts, dims, shift, options = layer
    # A mean of 10,000 deviations costs a third of the digits, in the oracle as well.
    check(ctx.group("local", timeout=LONG), counts, dims, shift=shift, rtol=1e-6, **options)


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(layer=layers())
def test_any_split_with_any_options(threads, layer):
    threads.run(check_layer, len(layer[0]), args=(layer,))


@pytest.mark.parametrize(
    ("dtype", "rtol"),
    [(torch.float32, 1e-5), (torch.float16, 4e-3), (torch.bfloat16, 3e-2)],
    ids=["float32", "float16", "bfloat16"],
)
@everywhere
def test_low_precision_dtypes(group, dtype, rtol):
    for affine in (True, False):
        check(group, [5, 0, 2, 6][: group.size()], 4, dtype=dtype, rtol=rtol, affine=affine)


@on_pairs
def test_low_precision_input_with_float32_parameters(group):
    norm = SyncBatchNorm(CHANNELS, process_group=group)
    mine = torch.randn(4, CHANNELS).bfloat16().requires_grad_()
    norm(mine).sum().backward()
    assert (mine.grad.dtype, norm.weight.grad.dtype) == (torch.bfloat16, torch.float32)


@on_pairs
def test_variance_is_accurate_for_large_means(group):
    norm = SyncBatchNorm(1, momentum=1.0, process_group=group, dtype=torch.float64)
    whole = 1e7 + torch.arange(8, dtype=torch.float64)[:, None]
    norm(whole.split([3, 5])[group.rank()])
    assert norm.running_var.item() == pytest.approx(6.0, rel=1e-12)


@everywhere
def test_expanded_output_gradient(group):
    norm = SyncBatchNorm(CHANNELS, process_group=group).double()
    _, parts = values([2] * group.size(), 3)
    mine = parts[group.rank()].clone().requires_grad_()
    norm(mine).sum().backward()  # the gradient is an expanded scalar
    assert_close(mine.grad, torch.zeros_like(mine), rtol=1e-9)


@everywhere
def test_one_collective_per_direction_and_none_in_eval(group):
    norm = SyncBatchNorm(CHANNELS, process_group=group)
    mine = torch.randn(4, CHANNELS, requires_grad=True)
    outputs = []
    assert operations(group, lambda: outputs.append(norm(mine))) == ["all_gather_single"]
    assert operations(group, outputs[0].sum().backward) == ["allreduce"]
    # Parameter gradients need no collective.
    assert operations(group, lambda: norm(mine.detach()).sum().backward()) == ["all_gather_single"]
    with torch.no_grad():
        assert operations(group, lambda: norm(mine)) == ["all_gather_single"]
    norm.eval()
    assert operations(group, lambda: norm(mine).sum().backward()) == []
    plain = oracle(2, torch.float32)
    plain.load_state_dict(norm.state_dict())
    assert torch.equal(norm(mine), plain.eval()(mine))


@everywhere
def test_too_few_values_per_channel_are_rejected(group):
    norm = SyncBatchNorm(CHANNELS, process_group=group)
    with pytest.raises(ValueError, match="more than 1 value per channel .* all ranks together"):
        norm(torch.ones(int(group.rank() == 1), CHANNELS))
    assert norm(torch.ones(1, CHANNELS)).shape == (1, CHANNELS)
    before = [buffer.clone() for buffer in norm.buffers()]
    nothing = torch.ones(0, CHANNELS, 2, requires_grad=True)
    norm(nothing).sum().backward()  # on all ranks
    assert nothing.grad.shape == nothing.shape
    assert norm.weight.grad.tolist() == [0] * CHANNELS
    mean, var, count = norm.buffers()
    assert torch.equal(mean, before[0])
    assert torch.equal(var, before[1])
    assert count == before[2] + 1  # as torch counts


@alone
def test_bad_shapes_and_groups_are_rejected(group):
    norm = SyncBatchNorm(CHANNELS, process_group=group)
    with pytest.raises(ValueError, match="at least 2D"):
        norm(torch.ones(3))
    with pytest.raises(TypeError, match="process_group must be a ProcessGroup or None, got str"):
        SyncBatchNorm(CHANNELS, process_group="world")


@on_pairs
def test_wrong_channel_count_is_rejected(group):
    norm = SyncBatchNorm(CHANNELS, process_group=group)
    with pytest.raises(ValueError, match="expected 3 channels"):
        norm(torch.ones(2, 4))


@on_pairs
def test_double_backward_is_rejected(group):
    norm = SyncBatchNorm(CHANNELS, process_group=group)
    mine = torch.randn(2, CHANNELS, requires_grad=True)
    (slope,) = torch.autograd.grad(norm(mine).square().sum(), mine, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        slope.sum().backward()


# -- ranks that leave ----------------------------------------------------------------------


def leave_one_by_one(ctx, backend):
    group = ctx.group(backend, timeout=LONG)
    norm, reference = SyncBatchNorm(CHANNELS, process_group=group).double(), oracle(2)
    norm.load_state_dict(reference.state_dict())
    for step, there in enumerate([(0, 1, 2, 3), (0, 1, 3), (1, 3), (1,)]):
        if ctx.rank not in there:
            group.leave()
            return
        counts = [2 + rank if rank in there else 0 for rank in range(4)]
        whole, parts = values(counts, 2, step)
        whole, mine = (t.clone().requires_grad_() for t in (whole, parts[ctx.rank]))
        output, expected = norm(mine), reference(whole)
        assert_close(output, expected.split(counts)[ctx.rank])
        expected.pow(3).sum().backward()
        output.pow(3).sum().backward()
        assert_close(mine.grad, whole.grad.split(counts)[ctx.rank])
    for seen, told in zip(norm.buffers(), reference.buffers(), strict=True):
        assert_close(seen, told)
    assert group.members == (1,)


@pytest.mark.parametrize("backend", ["local", "shm"])
def test_statistics_follow_ranks_that_leave(threads, ranks, backend):
    pool = {"local": threads, "shm": ranks}[backend]
    pool.run(leave_one_by_one, 4, args=(backend,))


# -- in modules ----------------------------------------------------------------------------


class Norms(nn.Sequential):
    """Two batch norms, one of them used twice."""

    def __init__(self):
        twice = nn.BatchNorm1d(4)
        super().__init__(
            nn.Linear(5, 4), twice, nn.Sequential(nn.Tanh(), twice), nn.Unflatten(1, (2, 2)),
            nn.BatchNorm1d(2), nn.Flatten(), nn.Linear(4, 2),
        )  # fmt: skip


@everywhere
def test_training_equals_one_process(group):
    def make():
        return SyncBatchNorm.convert_sync_batchnorm(Norms().double())

    ddp, _ = wrapped(make, group)
    whole = seeded(lambda: Norms().double())
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (ddp, whole)]
    for step in range(4):
        rows = rows_of_all(step, group.size()).double()
        squares(ddp, share(rows, group)).backward()
        squares(whole, rows).backward()
        for optimizer in optimizers:
            optimizer.step()
        compare(ddp, whole, rtol=1e-8)
    for mine, theirs in zip(ddp.module.buffers(), whole.buffers(), strict=True):
        assert_close(mine.double(), theirs.double(), rtol=1e-8)
    ddp.assert_in_sync()


@on_pairs
def test_several_forwards_before_a_backward(group):
    ddp, _ = wrapped(lambda: SyncBatchNorm.convert_sync_batchnorm(Norms()).double(), group)
    whole = seeded(lambda: Norms().double())
    rows = rows_of_all(0, group.size()).double()
    for module, given_ in ((ddp, share(rows, group)), (whole, rows)):
        sum(squares(module, given_ * n) for n in (1, 2)).backward()
    compare(ddp, whole, rtol=1e-8)


@on_pairs
def test_torchs_sync_batch_norm_is_rejected_with_a_hint(group):
    torchs = nn.SyncBatchNorm.convert_sync_batchnorm(Norms(), process_group=group)
    with pytest.raises(
        ValueError, match=r"'1' is torch's SyncBatchNorm.*Use ours: .*\.convert_sync_batchnorm\(mod"
    ):
        DDP(torchs, process_group=group)
    DDP(SyncBatchNorm.convert_sync_batchnorm(torchs), process_group=group)


@on_pairs
def test_group_comes_from_argument_ddp_or_context(group):
    mine = torch.randn(2, 1, generator=torch.Generator().manual_seed(group.rank()))

    def calls(norm):
        return operations(group, lambda: norm(mine))

    assert calls(SyncBatchNorm(1)) == []  # there is none
    assert calls(SyncBatchNorm(1, process_group=group)) == ["all_gather_single"]
    ddp = DDP(nn.Sequential(SyncBatchNorm(1)), process_group=group)
    assert calls(ddp.module) == ["all_gather_single"]
    with process_group(group):
        assert calls(SyncBatchNorm(1)) == ["all_gather_single"]


@on_pairs
def test_deepcopy_keeps_the_group_and_pickle_drops_it(group):
    norm = SyncBatchNorm(1, process_group=group)
    DDP(nn.Sequential(norm), process_group=group)
    assert copy.deepcopy(norm).process_group is group
    assert copy.deepcopy(norm)._group() is group
    loaded = pickle.loads(pickle.dumps(norm))
    assert loaded._group() is None
    assert loaded.state_dict().keys() == norm.state_dict().keys()


# -- conversion ----------------------------------------------------------------------------


def test_conversion_keeps_parameters_buffers_and_options():
    inner = nn.BatchNorm2d(4, eps=0.1, momentum=None).eval()
    inner.weight.requires_grad_(False)
    inner.qconfig = "mine"
    bare = nn.BatchNorm3d(2, affine=False, track_running_stats=False)
    module = nn.ModuleDict({"a": nn.Sequential(inner, nn.ReLU(), inner), "b": bare})
    state = module.state_dict()
    converted = SyncBatchNorm.convert_sync_batchnorm(module)
    assert converted is module
    first, last = module["a"][0], module["a"][2]
    assert type(first) is SyncBatchNorm
    assert first is last
    assert first.weight is inner.weight
    assert first.running_var is inner.running_var
    assert (first.eps, first.momentum, first.training, first.qconfig) == (0.1, None, False, "mine")
    assert module["b"].weight is module["b"].running_mean is None
    assert module["b"].training
    assert list(module.state_dict()) == list(state)
    assert isinstance(SyncBatchNorm.convert_sync_batchnorm(nn.BatchNorm1d(3)), nn.SyncBatchNorm)
    half = SyncBatchNorm.convert_sync_batchnorm(nn.BatchNorm1d(3, dtype=torch.float16))
    assert {p.dtype for p in half.parameters()} == {torch.float16}
    without = SyncBatchNorm.convert_sync_batchnorm(nn.BatchNorm1d(3, bias=False))
    assert without.bias is None


def test_conversion_of_a_lazy_layer_is_rejected():
    with pytest.raises(RuntimeError, match="Run the module once, then convert"):
        SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.LazyBatchNorm1d()))


def test_plain_batch_norm_without_a_group():
    mine = torch.randn(4, CHANNELS)
    norm, plain = SyncBatchNorm(CHANNELS), nn.BatchNorm1d(CHANNELS)
    assert torch.equal(norm(mine), plain(mine))
    assert torch.equal(norm.running_var, plain.running_var)


class Sometimes(nn.Module):
    """Has an optional layer after its batch norm."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Linear(5, 4), nn.BatchNorm1d(4)
        self.last = nn.Linear(4, 4)

    def forward(self, rows, *, whole=True):
        hidden = self.norm(self.first(rows))
        return self.last(hidden) if whole else hidden


@on_pairs
def test_rank_dependent_graphs_with_a_separate_norm_group(group, ctx):
    own = ctx.closing(group.split_group(range(group.size())))

    def make():
        return SyncBatchNorm.convert_sync_batchnorm(Sometimes().double(), own)

    ddp, _ = wrapped(make, group, bucket_cap_mb=TINY)
    whole = seeded(lambda: Sometimes().double())
    for step in range(4):
        rows = rows_of_all(step, 2).double()
        ddp(share(rows, group), whole=group.rank() == 0).square().mean().backward()
        hidden = whole(rows, whole=False)
        first, last = whole.last(hidden[:ROWS]), hidden[ROWS:]
        ((first.square().mean() + last.square().mean()) / 2).backward()
        compare(ddp, whole, rtol=1e-8)
