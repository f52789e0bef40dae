"""Mixed precision: low-precision compute and reduction, full-precision parameters."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from cases import in_turn
from phalanx.ddp import DDP, MixedPrecision
from phalanx.ddp.hooks import allreduce_hook
from phalanx.errors import InvalidArgument, InvalidState, InvalidType

from .internals import _MixedPrecision
from .whole import ROWS, TINY, assert_close, batch, mlp, seeded, several, share, wrapped

LOW = torch.bfloat16


class Layers(nn.Module):
    """Three layers, optionally checkpointed; the last one is optional."""

    def __init__(self, recompute=None):
        super().__init__()
        self.parts = nn.ModuleList([nn.Linear(5, 8), nn.Linear(8, 8), nn.Linear(8, 3)])
        self.recompute = recompute
        self.seen = set()

    def forward(self, rows, both=True):
        for part in self.parts if both else self.parts[:2]:
            rows = self.run(part, rows)
        return rows

    def run(self, part, rows):
        def body(rows):
            self.seen.add((part.weight.dtype, rows.dtype))
            return part(rows).tanh()

        if self.recompute is None or not torch.is_grad_enabled():
            return body(rows)
        return checkpoint(body, rows, use_reentrant=self.recompute)


def gradients_of(whole, parts, used, weights):
    """Return the expected gradients: computed in LOW per rank, averaged in float32."""
    total = [torch.zeros_like(p) for p in whole.parameters()]
    for rank, part in enumerate(parts):
        low = copy.deepcopy(whole).to(LOW)
        low.seen, low.recompute = set(), None
        low(part.to(LOW), both=used[rank]).square().mean().backward()
        for so_far, p in zip(total, low.parameters(), strict=True):
            if p.grad is not None:
                so_far.add_(p.grad.float(), alpha=weights[rank] / sum(weights))
    return total


WAYS = ["plain", "unused", "accumulated", "weighted", "hooked", "copies"]
RECOMPUTE = {"kept": None, "reentrant": True, "recomputed": False}


@in_turn("local-2", "shm-4", name=list(RECOMPUTE), way=WAYS)
def test_mixed_precision_combined_with_other_features(group, name, way):
    recompute = RECOMPUTE[name]
    turn = WAYS.index(way) + list(RECOMPUTE).index(name)  # alternate reduce_dtype over the cases
    reduce_dtype = torch.float32 if turn % 2 else None
    ddp, whole = wrapped(
        lambda: Layers(recompute),
        group,
        mixed_precision=MixedPrecision(param_dtype=LOW, reduce_dtype=reduce_dtype),
        bucket_cap_mb=TINY,
        gradient_as_bucket_view=way != "copies",
    )
    if way == "hooked":
        ddp.register_comm_hook(None, allreduce_hook)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    weights = [rank + 1 if way == "weighted" else 1 for rank in range(group.size())]
    ddp.weight = weights[group.rank()] if way == "weighted" else None
    for step in range(3):
        rows = batch(step, group.size())
        used = [way != "unused" or (step + rank) % 2 == 0 for rank in range(group.size())]
        if recompute is True:
            rows.requires_grad_()  # reentrant checkpointing needs an input that requires grad
        if way == "accumulated":
            with ddp.no_sync():
                ddp(share(rows, group)).square().mean().backward()
        ddp(share(rows, group), both=used[group.rank()]).square().mean().backward()
        if group.rank() == 0:  # assert_in_sync() below covers the other ranks
            expected = gradients_of(whole, rows.detach().split(ROWS), used, weights)
            times = 2 if way == "accumulated" else 1
            for (name, p), wanted in zip(ddp.module.named_parameters(), expected, strict=True):
                assert p.dtype == torch.float32
                if p.grad is None:
                    assert not wanted.any(), name
                    continue
                assert p.grad.dtype == torch.float32
                assert_close(p.grad, times * wanted, name, 2e-2 if reduce_dtype is None else 4e-3)
        optimizer.step()
        optimizer.zero_grad()
        whole.load_state_dict(ddp.module.state_dict())
    assert ddp.module.seen == {(LOW, LOW)}
    ddp.assert_in_sync()


@several
def test_parameters_are_full_precision_outside_forward(group):
    ddp, _ = wrapped(mlp, group, mixed_precision=MixedPrecision(param_dtype=LOW))
    full = [p.detach().clone() for p in ddp.parameters()]
    rows = share(batch(0, group.size()), group)

    def assert_full():
        for p, before in zip(ddp.parameters(), full, strict=True):
            assert torch.equal(p, before)
        for value in ddp.state_dict().values():
            assert value.dtype == torch.float32

    with torch.no_grad():
        assert ddp(rows).dtype == LOW
    assert_full()
    output = ddp(rows)
    assert_full()
    output.sum().backward(retain_graph=True)
    assert_full()
    ddp.zero_grad()
    output.sum().backward()  # again, with the tensors saved by the first forward
    assert_full()
    with pytest.raises(RuntimeError):
        ddp(rows[:, :2])  # wrong shape
    assert_full()


def fail(_):
    raise ArithmeticError("in the middle")


@several
def test_parameters_are_full_precision_after_a_failed_backward(group):
    ddp, _ = wrapped(mlp, group, mixed_precision=MixedPrecision(param_dtype=LOW))
    handle = ddp.module[0].weight.register_hook(fail)
    with pytest.raises(ArithmeticError):
        ddp(share(batch(0, group.size()), group)).sum().backward()
    handle.remove()
    assert all(p.dtype == torch.float32 for p in ddp.parameters())


@several
def test_previous_grads_keep_full_precision(group):
    ddp, _ = wrapped(mlp, group, mixed_precision=MixedPrecision(LOW, torch.float32))
    rows = batch(0, group.size())
    small = 1.0 + 2**-12  # rounds to 1 in LOW
    for p in ddp.parameters():
        p.grad = torch.full_like(p, small)
    (ddp(share(rows, group)).sum() * 0).backward()
    for p in ddp.parameters():
        assert torch.equal(p.grad, torch.full_like(p, small))


@several
def test_buffer_dtype_and_ignored_parameters(group):
    class Normed(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.norm = nn.Linear(5, 4), nn.BatchNorm1d(4)
            self.ignored = nn.Parameter(torch.ones(1))
            self.register_buffer("kept", torch.ones(1))

        def forward(self, rows):
            assert self.ignored.dtype == torch.float32
            return self.norm(self.first(rows))

    module = Normed()
    DDP._set_params_and_buffers_to_ignore_for_model(module, ["ignored", "kept"])
    ddp = DDP(module, process_group=group, mixed_precision=_MixedPrecision(LOW, None, LOW))
    assert module.norm.running_mean.dtype == LOW
    assert module.norm.num_batches_tracked.dtype == torch.int64
    assert module.kept.dtype == torch.float32
    ddp(share(batch(0, group.size()), group)).sum().backward()
    assert module.first.weight.grad.dtype == torch.float32


@several
def test_our_setting_is_kept_as_it_is(group):
    class Named(MixedPrecision):
        name = "ours"

    setting = Named(param_dtype=LOW)
    ddp, _ = wrapped(mlp, group, mixed_precision=setting)
    assert ddp.mixed_precision is setting


@several
def test_torchs_mixed_precision_config_is_accepted(group):
    from torch.nn.parallel.distributed import _MixedPrecision as Theirs

    ddp, _ = wrapped(mlp, group, mixed_precision=Theirs(param_dtype=LOW))
    assert ddp(share(batch(0, group.size()), group)).dtype == LOW


@several
def test_autocast_with_a_grad_scaler(group):
    ddp, whole = wrapped(mlp, group)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    rows = batch(0, group.size())
    with torch.autocast("cpu", dtype=LOW):
        loss = ddp(share(rows, group)).float().square().mean()
        wanted = whole(rows).float().square().mean()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    wanted.backward()
    for p, theirs in zip(ddp.module.parameters(), whole.parameters(), strict=True):
        assert_close(p.grad, theirs.grad, rtol=2e-2)
    scaler.step(optimizer)
    scaler.update()
    ddp.assert_in_sync()


@several
def test_bad_mixed_precision_is_rejected(group):
    for setting, error, told in (
        ("bf16", InvalidType, "MixedPrecision"),
        (MixedPrecision(torch.float64), InvalidArgument, "would be lost"),
    ):
        with pytest.raises(error, match=told):
            DDP(mlp(), process_group=group, mixed_precision=setting)
    with pytest.raises(InvalidArgument, match="no full-precision parameters.*only reduce_dtype"):
        DDP(mlp().to(LOW), process_group=group, mixed_precision=MixedPrecision(LOW))
    DDP(mlp().to(LOW), process_group=group, mixed_precision=MixedPrecision(None, torch.float32))
    with pytest.raises(InvalidArgument, match="floating-point"):
        MixedPrecision(param_dtype=torch.int8)
    with pytest.raises(InvalidType, match="param_dtype"):
        MixedPrecision(param_dtype="bfloat16")


@several
def test_unsupported_reduce_dtype_is_rejected(group):
    with pytest.raises((ValueError, RuntimeError), match="float8"):
        DDP(
            mlp(),
            process_group=group,
            mixed_precision=MixedPrecision(reduce_dtype=torch.float8_e4m3fn),
        )


# -- interaction with forward and backward ---------------------------------------------------


@several
def test_parameter_shared_by_two_ddp_modules(group):
    """Neither module is left with the low-precision copy."""
    precision = MixedPrecision(LOW, torch.float32)
    first, second = seeded(lambda: nn.Linear(4, 4)), seeded(lambda: nn.Linear(4, 4), seed=1)
    second.weight = first.weight
    a, b = (DDP(m, process_group=group, mixed_precision=precision) for m in (first, second))
    rows = batch(group.rank(), 1, width=4)
    for _ in range(3):
        a(b(rows)).square().mean().backward()
        for p in (*a.parameters(), *b.parameters()):
            assert isinstance(p, nn.Parameter)
            assert p.dtype == p.grad.dtype == torch.float32
        a.zero_grad()
        b.zero_grad()


class Product(nn.Module):
    """Uses torch.mm, for which autograd saves the parameter itself."""

    def __init__(self):
        super().__init__()
        self.matrix, self.norm = nn.Parameter(torch.ones(5, 3)), nn.LayerNorm(3)

    def forward(self, rows):
        return self.norm(torch.mm(rows, self.matrix))


@several
def test_autograd_grad_and_multi_grad_hooks(group):
    seen = []
    for make in (mlp, Product):
        ddp, _ = wrapped(make, group, mixed_precision=MixedPrecision(LOW, torch.float32))
        parameters = list(ddp.parameters())
        rows = share(batch(0, group.size()), group).requires_grad_()
        gradients = torch.autograd.grad(ddp(rows).square().sum(), parameters)
        assert [g.dtype for g in gradients] == [torch.float32] * len(parameters)
        (of_rows,) = torch.autograd.grad(ddp(rows).square().sum(), rows)
        assert of_rows.dtype == torch.float32
        handle = torch.autograd.graph.register_multi_grad_hook(parameters, seen.append)
        ddp(rows).square().sum().backward(inputs=parameters)
        handle.remove()
        assert all(p.grad is not None for p in parameters)
    assert len(seen) == 2


@several
def test_recurrent_layers(group):
    class Steps(nn.Module):
        def __init__(self):
            super().__init__()
            self.cells = nn.GRU(5, 4, num_layers=2)

        def forward(self, rows):
            return self.cells(rows[None])[0]

    ddp, whole = wrapped(Steps, group, mixed_precision=MixedPrecision(LOW, torch.float32))
    rows = batch(0, group.size())
    output = ddp(share(rows, group))
    assert output.dtype == LOW
    output.float().square().mean().backward()
    whole(rows).square().mean().backward()
    for p, theirs in zip(ddp.module.parameters(), whole.parameters(), strict=True):
        assert_close(p.grad, theirs.grad, rtol=0.1)


@several
def test_sparse_gradients_on_some_ranks(group):
    class Words(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.out = nn.Embedding(10, 4, sparse=True), nn.Linear(4, 2)

        def forward(self, words):
            return self.out(self.words(words) if len(words) else torch.zeros(1, 4, dtype=LOW))

    ddp, _ = wrapped(Words, group, mixed_precision=MixedPrecision(LOW, torch.float32))
    for _ in range(3):
        words = torch.tensor([1, 2] if group.rank() == 0 else [], dtype=torch.int64)
        ddp(words).float().square().sum().backward()
        assert ddp.module.words.weight.grad.is_sparse
        assert ddp.module.words.weight.grad.dtype == torch.float32
        ddp.zero_grad()


@several
def test_backward_inside_forward(group):
    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(5, 5), nn.Linear(5, 2)

        def forward(self, rows):
            self.second(self.first(rows)).sum().backward()
            return self.second(self.first(rows))

    ddp, _ = wrapped(Inner, group, mixed_precision=MixedPrecision(LOW, torch.float32))
    ddp(share(batch(0, group.size()), group)).sum().backward()
    assert all(p.dtype == torch.float32 for p in ddp.parameters())


@several
def test_parameter_written_in_forward_is_rejected(group):
    class Clamped(nn.Linear):
        def forward(self, rows):
            with torch.no_grad():
                self.weight.clamp_(-0.01, 0.01)
            return super().forward(rows)

    ddp, _ = wrapped(lambda: Clamped(5, 2), group, mixed_precision=MixedPrecision(LOW))
    with pytest.raises(InvalidState, match="'weight'"):
        ddp(share(batch(0, group.size()), group))


@several
def test_state_dict_taken_in_forward_is_full_precision(group):
    ddp, _ = wrapped(mlp, group, mixed_precision=MixedPrecision(LOW))
    saved = []
    ddp.module[1].register_forward_hook(lambda *_: saved.append(ddp.state_dict()))
    assert ddp(share(batch(0, group.size()), group)).dtype == LOW
    assert {value.dtype for value in saved[0].values()} == {torch.float32}


@several
def test_comm_hook_may_write_to_parameters(group):
    def stepping(state, bucket):
        with torch.no_grad():
            for parameter in bucket.parameters():
                parameter.add_(1.0)
        return allreduce_hook(state, bucket)

    ddp, whole = wrapped(mlp, group, mixed_precision=MixedPrecision(LOW), bucket_cap_mb=TINY)
    ddp.register_comm_hook(None, stepping)
    for _ in range(4):
        ddp(share(batch(0, group.size()), group)).sum().backward()
    for p, before in zip(ddp.parameters(), whole.parameters(), strict=True):
        assert_close(p, before + 4.0)


@several
def test_loss_weights_do_not_overflow_low_precision(group):
    for hook in (None, allreduce_hook):
        for dtype in (torch.float16, LOW):
            ddp, _ = wrapped(
                lambda: nn.Linear(5, 2), group, mixed_precision=MixedPrecision(dtype, dtype)
            )
            if hook is not None:
                ddp.register_comm_hook(None, hook)
            ddp.weight = 4096.0 * (group.rank() + 1)
            (ddp(torch.ones(1, 5)).sum() * 20).backward()
            assert ddp.module.weight.grad.tolist() == [[20.0] * 5] * 2
