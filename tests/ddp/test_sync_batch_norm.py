"""Batch normalisation over all ranks: what one process makes of all their rows."""

import copy
import pickle
from datetime import timedelta

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

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

everywhere = over_groups(sizes=(2, 4), reuse=True)
on_pairs = over_groups(sizes=(2,), backends=("local", "shm"), reuse=True)
LONG = timedelta(seconds=60)
CHANNELS = 3
NORMS = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}


def oracle(dims, dtype=torch.float64, **options):
    """Make torch's layer, with parameters that show where they were used."""
    norm = NORMS[dims](CHANNELS, **options).to(dtype)
    if norm.affine:
        with torch.no_grad():
            norm.weight.copy_(torch.tensor([0.5, -2.0, 1.0]))
            norm.bias.copy_(torch.tensor([3.0, 0.0, -1.0]))
    return norm


def values(counts, dims, step=0, dtype=torch.float64, shift=0.0):
    """Make everybody's values, and the rows of each rank; channels have different means."""
    generator = torch.Generator().manual_seed(7 + step)
    shape = (sum(counts), CHANNELS, 2, 3, 2)[:dims]
    drawn = torch.randn(shape, generator=generator, dtype=torch.float64)
    each = torch.tensor([0.0, 5.0, -3.0], dtype=torch.float64).view(-1, *[1] * (dims - 2))
    whole = (drawn + each + shift).to(dtype)
    return whole, whole.split(list(counts))


def weights_of(whole):
    """Weigh every output differently, so that no part of a gradient cancels by chance."""
    return torch.linspace(-1, 2, whole.numel(), dtype=torch.float64).view(whole.shape)


def parts_of(norm):
    """List what a layer has learnt, and what it has seen."""
    return [p.grad for p in norm.parameters()] + list(norm.buffers())


def check(group, counts, dims=2, *, steps=2, dtype=torch.float64, rtol=1e-10, shift=0.0, **options):
    """Compare a rank's outputs, gradients and statistics with those of one process."""
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
def test_it_is_what_one_process_makes_of_all_rows(group, counts):
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
    # Means of 10,000 times the deviation leave two thirds of the digits, to the oracle as well.
    check(ctx.group("local", timeout=LONG), counts, dims, shift=shift, rtol=1e-6, **options)


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(layer=layers())
def test_any_split_and_any_option(threads, layer):
    threads.run(check_layer, len(layer[0]), args=(layer,))


@pytest.mark.parametrize(
    ("dtype", "rtol"),
    [(torch.float32, 1e-5), (torch.float16, 4e-3), (torch.bfloat16, 3e-2)],
    ids=["float32", "float16", "bfloat16"],
)
@everywhere
def test_narrow_types(group, dtype, rtol):
    for affine in (True, False):
        check(group, [5, 0, 2, 6][: group.size()], 4, dtype=dtype, rtol=rtol, affine=affine)


@on_pairs
def test_narrow_values_and_wide_parameters(group):
    norm = SyncBatchNorm(CHANNELS, process_group=group)
    mine = torch.randn(4, CHANNELS).bfloat16().requires_grad_()
    norm(mine).sum().backward()
    assert (mine.grad.dtype, norm.weight.grad.dtype) == (torch.bfloat16, torch.float32)


@on_pairs
def test_means_far_from_zero_leave_the_variance_its_digits(group):
    norm = SyncBatchNorm(1, momentum=1.0, process_group=group, dtype=torch.float64)
    whole = 1e7 + torch.arange(8, dtype=torch.float64)[:, None]
    norm(whole.split([3, 5])[group.rank()])
    assert norm.running_var.item() == pytest.approx(6.0, rel=1e-12)


@everywhere
def test_a_gradient_that_is_one_number_everywhere(group):
    norm = SyncBatchNorm(CHANNELS, process_group=group).double()
    _, parts = values([2] * group.size(), 3)
    mine = parts[group.rank()].clone().requires_grad_()
    norm(mine).sum().backward()  # of a tensor without strides
    assert_close(mine.grad, torch.zeros_like(mine), rtol=1e-9)


@everywhere
def test_one_collective_each_way_and_none_in_evaluation(group):
    norm = SyncBatchNorm(CHANNELS, process_group=group)
    mine = torch.randn(4, CHANNELS, requires_grad=True)
    outputs = []
    assert operations(group, lambda: outputs.append(norm(mine))) == ["all_gather_single"]
    assert operations(group, outputs[0].sum().backward) == ["allreduce"]
    # Parameters alone need nobody else.
    assert operations(group, lambda: norm(mine.detach()).sum().backward()) == ["all_gather_single"]
    with torch.no_grad():
        assert operations(group, lambda: norm(mine)) == ["all_gather_single"]
    norm.eval()
    assert operations(group, lambda: norm(mine).sum().backward()) == []
    plain = oracle(2, torch.float32)
    plain.load_state_dict(norm.state_dict())
    assert torch.equal(norm(mine), plain.eval()(mine))


@everywhere
def test_too_few_values(group):
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
def test_wrong_shapes_and_groups_are_refused(group):
    norm = SyncBatchNorm(CHANNELS, process_group=group)
    with pytest.raises(ValueError, match="at least 2D"):
        norm(torch.ones(3))
    with pytest.raises(TypeError, match="process_group must be a ProcessGroup or None, got str"):
        SyncBatchNorm(CHANNELS, process_group="world")


@on_pairs
def test_channels_are_compared(group):
    norm = SyncBatchNorm(CHANNELS, process_group=group)
    with pytest.raises(ValueError, match="expected 3 channels"):
        norm(torch.ones(2, 4))


@on_pairs
def test_gradients_of_gradients_are_refused(group):
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
def test_the_one_that_is_left_normalises_its_own(threads, ranks, backend):
    crew = {"local": threads, "shm": ranks}[backend]
    crew.run(leave_one_by_one, 4, args=(backend,))


# -- in modules ----------------------------------------------------------------------------


class Norms(nn.Sequential):
    """Two batch norms, of which one is in two places."""

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
def test_torchs_is_refused_with_what_to_do(group):
    torchs = nn.SyncBatchNorm.convert_sync_batchnorm(Norms(), process_group=group)
    with pytest.raises(
        ValueError, match=r"'1' is torch's SyncBatchNorm.*Use ours: .*\.convert_sync_batchnorm\(mod"
    ):
        DDP(torchs, process_group=group)
    DDP(SyncBatchNorm.convert_sync_batchnorm(torchs), process_group=group)


@on_pairs
def test_the_group_is_the_argument_or_the_wrappers_or_the_current_one(group):
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
def test_copies_have_the_group_and_what_is_pickled_has_none(group):
    norm = SyncBatchNorm(1, process_group=group)
    DDP(nn.Sequential(norm), process_group=group)
    assert copy.deepcopy(norm).process_group is group
    assert copy.deepcopy(norm)._group() is group
    loaded = pickle.loads(pickle.dumps(norm))
    assert loaded._group() is None
    assert loaded.state_dict().keys() == norm.state_dict().keys()


# -- conversion ----------------------------------------------------------------------------


def test_conversion_keeps_what_a_layer_has():
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


def test_conversion_of_a_layer_without_a_shape_is_refused():
    with pytest.raises(RuntimeError, match="Run the module once, then convert"):
        SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.LazyBatchNorm1d()))


def test_without_a_group_it_is_a_plain_batch_norm():
    mine = torch.randn(4, CHANNELS)
    norm, plain = SyncBatchNorm(CHANNELS), nn.BatchNorm1d(CHANNELS)
    assert torch.equal(norm(mine), plain(mine))
    assert torch.equal(norm.running_var, plain.running_var)


class Sometimes(nn.Module):
    """Has a layer after its batch norm that not every rank uses."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Linear(5, 4), nn.BatchNorm1d(4)
        self.last = nn.Linear(4, 4)

    def forward(self, rows, *, whole=True):
        hidden = self.norm(self.first(rows))
        return self.last(hidden) if whole else hidden


@on_pairs
def test_graphs_that_differ_between_ranks_with_a_group_for_the_layers_alone(group, ctx):
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
