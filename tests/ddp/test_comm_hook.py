"""Communication hooks: torch's own, and faulty ones."""

import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import (
    default_hooks,
    post_localSGD_hook,
    powerSGD_hook,
    quantization_hooks,
)
from torch.distributed.algorithms.ddp_comm_hooks.optimizer_overlap_hooks import (
    _hook_then_optimizer,
    _OptimizerHookState,
)
from torch.futures import Future
from torch.utils.checkpoint import checkpoint

from cases import in_turn, over_cases
from phalanx.ddp import DDP, GradBucket
from phalanx.ddp.hooks import allreduce_hook, noop_hook
from phalanx.errors import (
    CollectiveTimeout,
    GroupError,
    HookError,
    InvalidArgument,
    InvalidState,
    InvalidType,
)
from phalanx.testing import over_groups

from .whole import (
    TINY,
    alone,
    assert_close,
    assert_same_gradients,
    batch,
    mlp,
    several,
    share,
    squares,
    train,
    wrapped,
)


def hooked(make, group, hook, state=None, **options):
    ddp, whole = wrapped(make, group, **options)
    ddp.register_comm_hook(state, hook)
    return ddp, whole


def plain(state, bucket: GradBucket) -> Future[torch.Tensor]:
    """Average as a user would write it, with a group as state."""
    work = state.allreduce(bucket.buffer())
    return work.get_future().then(lambda done: done.value()[0].div_(state.size()))


@several
def test_hook_sees_every_bucket_once_in_order(group):
    seen = []

    def watching(state, bucket):
        assert state == "state"
        gradients = [each.data_ptr() for each in bucket.gradients()]
        assert gradients[0] == bucket.buffer().data_ptr()
        assert [g.shape for g in bucket.gradients()] == [p.shape for p in bucket.parameters()]
        seen.append((bucket.index(), bucket.is_last(), len(gradients)))
        return allreduce_hook(group, bucket)

    ddp, whole = hooked(mlp, group, watching, "state", bucket_cap_mb=TINY)
    for step in range(3):
        seen.clear()
        rows = batch(step, group.size())
        squares(ddp, share(rows, group)).backward()
        squares(whole, rows).backward()
        assert_same_gradients(ddp.module, whole)
        assert seen == [(0, False, 1), (1, False, 1), (2, False, 1), (3, True, 1)]
        ddp.zero_grad()
        whole.zero_grad()


OPTIONS = {
    "views": {},
    "copies": {"gradient_as_bucket_view": False},
    "sum": {"reduce": "sum"},
    "small buckets": {"bucket_cap_mb": TINY},
}


class Branching(nn.Module):
    """Has an optional second layer."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(5, 7), nn.Linear(7, 3)

    def forward(self, rows, both=True):
        hidden = self.first(rows).tanh()
        return self.second(hidden) if both else hidden


@in_turn(
    "local-2",
    "shm-4",
    kind=list(OPTIONS),
    way=["plain", "unused", "accumulated", "weighted"],
)
def test_mean_hook_combined_with_other_features(group, kind, way):
    """A hook that computes the mean changes no result, whatever other features are on."""

    def loss(module, rows, rank):
        both = way != "unused" or bool((step + rank) % 2)
        return module(rows, both=both).square().mean()

    ddp, whole = wrapped(lambda: Branching().double(), group, **OPTIONS[kind])
    ddp.register_comm_hook(group, plain)
    weights = [rank + 1 if way == "weighted" else 1 for rank in range(group.size())]
    total = 1 if kind == "sum" and way != "weighted" else sum(weights)
    for step in range(3):
        rows = batch(step, group.size()).double()
        ddp.weight = weights[group.rank()] if way == "weighted" else None
        if way == "accumulated":
            with ddp.no_sync():
                loss(ddp, share(rows, group), group.rank()).backward()
        loss(ddp, share(rows, group), group.rank()).backward()
        times = 2 if way == "accumulated" else 1
        for rank, part in enumerate(rows.split(len(share(rows, group)))):
            (loss(whole, part, rank) * times * weights[rank] / total).backward()
        assert_same_gradients(ddp.module, whole)
        ddp.zero_grad()
        whole.zero_grad()


TORCH_HOOKS = {
    "allreduce": (default_hooks.allreduce_hook, 1e-6),
    "fp16": (default_hooks.fp16_compress_hook, 3e-3),
    "bf16": (default_hooks.bf16_compress_hook, 2e-2),
    "bytes": (quantization_hooks.quantization_pertensor_hook, 3e-2),
    "bytes by channel": (quantization_hooks.quantization_perchannel_hook, 3e-2),
}


@over_cases("shm-4", "gloo-2")
@pytest.mark.parametrize("name", TORCH_HOOKS)
def test_torch_hooks_run_unchanged(group, name):
    hook, rtol = TORCH_HOOKS[name]
    ddp, whole = hooked(mlp, group, hook, group)
    for step in range(3):
        rows = batch(step, group.size())
        squares(ddp, share(rows, group)).backward()
        squares(whole, rows).backward()
        for mine, theirs in zip(ddp.module.parameters(), whole.parameters(), strict=True):
            assert_close(mine.grad, theirs.grad, name, rtol)
        ddp.zero_grad()
        whole.zero_grad()


@over_cases("shm-4", "gloo-2")
def test_torch_power_sgd_runs_unchanged(group):
    """It issues collectives from future callbacks; buckets must not interfere."""
    state = powerSGD_hook.PowerSGDState(
        group, matrix_approximation_rank=2, start_powerSGD_iter=2, min_compression_rate=1.0
    )
    make = lambda: nn.Sequential(*(nn.Linear(16, 16) for _ in range(6)))  # noqa: E731
    ddp, _ = hooked(make, group, powerSGD_hook.powerSGD_hook, state, bucket_cap_mb=TINY)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    losses = []
    rows = batch(0, group.size(), width=16)
    for _ in range(8):
        loss = squares(ddp, share(rows, group))
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < losses[0]
    ddp.assert_in_sync()


@over_cases("shm-4", "gloo-2")
def test_torch_post_local_sgd_runs_unchanged(group):
    state = post_localSGD_hook.PostLocalSGDState(group, subgroup=group, start_localSGD_iter=2)
    ddp, whole = hooked(mlp, group, post_localSGD_hook.post_localSGD_hook, state)
    for step in range(4):
        rows = batch(step, group.size())
        squares(ddp, share(rows, group)).backward()
        squares(whole, rows).backward()
        assert_same_gradients(ddp.module, whole)
        ddp.zero_grad()
        whole.zero_grad()


@over_groups(backends=("shm", "gloo"), sizes=(2,), reuse=True)
def test_torch_overlapped_optimizer_runs_unchanged(group):
    from torch.distributed.optim.utils import functional_optim_map  # takes seconds

    ddp, whole = wrapped(mlp, group)
    functional = functional_optim_map[torch.optim.SGD]([], lr=0.1, _allow_empty_param_list=True)
    state = _OptimizerHookState(functional)
    ddp.register_comm_hook(group, _hook_then_optimizer(default_hooks.allreduce_hook, state))
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.1)
    for step in range(3):
        rows = batch(step, group.size())
        squares(ddp, share(rows, group)).backward()
        squares(whole, rows).backward()
        optimizer.step()
        ddp.zero_grad()
        whole.zero_grad()
        for (name, mine), theirs in zip(
            ddp.module.named_parameters(), whole.parameters(), strict=True
        ):
            assert_close(mine, theirs, name)


@several
def test_torch_builtin_hooks(group):
    for kind, rtol in ((dist.BuiltinCommHookType.ALLREDUCE, 1e-6),
                       (dist.BuiltinCommHookType.FP16_COMPRESS, 3e-3)):  # fmt: skip
        ddp, whole = wrapped(mlp, group)
        ddp._register_builtin_comm_hook(kind)
        rows = batch(0, group.size())
        squares(ddp, share(rows, group)).backward()
        squares(whole, rows).backward()
        assert_same_gradients(ddp.module, whole, rtol=rtol)


@several
def test_second_hook_is_rejected(group):
    ddp, _ = hooked(mlp, group, plain, group)
    with pytest.raises(InvalidState, match="one communication hook"):
        ddp.register_comm_hook(group, plain)
    with pytest.raises(InvalidState, match="one communication hook"):
        ddp._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)


def no_bucket(state):
    """Has too few parameters."""


def of_int(state, bucket: int):
    """Has a wrong parameter annotation."""


def to_int(state, bucket) -> int:
    """Has a wrong return annotation."""


@alone
@pytest.mark.parametrize(
    ("hook", "error"),
    [
        (1, InvalidType),
        (no_bucket, InvalidArgument),
        (of_int, InvalidArgument),
        (to_int, InvalidArgument),
    ],
)
def test_bad_hook_is_rejected(group, hook, error):
    ddp, _ = wrapped(mlp, group)
    with pytest.raises(error, match="hook"):
        ddp.register_comm_hook(None, hook)


def raises(bucket):
    raise ValueError("out of luck")


def returns_nothing(bucket):
    return None


def returns_too_much(bucket):
    future = Future()
    future.set_result(torch.zeros(1000))
    return future


def fails(bucket):
    future = Future()
    future.set_exception(ValueError("out of luck"))
    return future


def never_ends(bucket):
    return Future()


FAULTS = {
    raises: "raised ValueError: out of luck",
    returns_nothing: "returned None",
    returns_too_much: r"returned a future of \[1000\]",
    fails: "raised .*out of luck",
}


@over_cases("local-2", "shm-4", "gloo-2", timeout=30, reuse=False)
@pytest.mark.parametrize("fault", FAULTS)
def test_hook_failure_on_one_rank_is_raised_on_all(group, fault):
    check_faulty_hook(group, fault, FAULTS[fault], deadline=10.0)


@over_groups(backends=("local", "shm", "gloo"), sizes=(4,), timeout=30)
def test_hook_that_never_completes_is_reported_on_all_ranks(group):
    check_faulty_hook(group, never_ends, "did not complete its future", deadline=2.0)


def check_faulty_hook(group, fault, told, *, deadline):
    group.set_timeout(timedelta(seconds=deadline))

    def hook(state, bucket):
        at_fault = group.rank() == 1 and bucket.index() == 1
        return fault(bucket) if at_fault else plain(group, bucket)

    ddp, _ = hooked(mlp, group, hook, bucket_cap_mb=TINY)
    began = time.monotonic()
    # If the other ranks' futures do not complete either, every rank times out by itself.
    expected = HookError if group.rank() == 1 or fault is never_ends else GroupError
    with pytest.raises((expected, GroupError), match=told) as caught:
        squares(ddp, share(batch(0, group.size()), group)).backward()
    assert "hook" in str(caught.value)
    assert "bucket 2 of 4" in str(caught.value)
    assert time.monotonic() - began < deadline


@several
def test_hook_survives_a_group_replacement(group):
    calls = []

    def counting(state, bucket):
        calls.append(bucket.index())
        return allreduce_hook(bucket.group, bucket)

    ddp, whole = hooked(mlp, group, counting)
    ddp._update_process_group(group)
    rows = batch(0, group.size())
    squares(ddp, share(rows, group)).backward()
    squares(whole, rows).backward()
    assert_same_gradients(ddp.module, whole)
    assert calls


@several
def test_sparse_bucket_goes_through_the_hook(group):
    class Words(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(10, 5, sparse=True)
            self.out = nn.Linear(5, 2)

        def forward(self, rows):
            return self.out(self.embed((rows[:, :1] * 3).long() % 10))

    ddp, whole = hooked(Words, group, allreduce_hook)
    rows = batch(0, group.size())
    squares(ddp, share(rows, group)).backward()
    squares(whole, rows).backward()
    assert ddp.module.embed.weight.grad.is_sparse
    assert_same_gradients(ddp.module, whole)


@several
def test_training_with_a_hook(group):
    def with_hook(module, rows, step, rank):
        if isinstance(module, DDP) and step == 0:
            module.register_comm_hook(None, allreduce_hook)
        return squares(module, rows)

    train(mlp, group, with_hook, bucket_cap_mb=TINY)


# -- timing --------------------------------------------------------------------------------


def later(future, seconds):
    """Complete a future some seconds later."""
    slow = Future()

    def end(done):
        threading.Timer(seconds, lambda: slow.set_result(done.value())).start()

    future.add_done_callback(end)
    return slow


@several
def test_collectives_in_backward_keep_their_order_with_a_slow_hook(group):
    """The hook is slow on one rank, and all collectives have the same size."""

    class Talks(torch.autograd.Function):
        @staticmethod
        def forward(_, rows):
            return rows.clone()

        @staticmethod
        def backward(_, gradient):
            told = torch.ones(16)
            group.allreduce(told).wait()
            assert told.tolist() == [group.size()] * 16
            return gradient

    class Talking(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(3))

        def forward(self, rows):
            for part in self.parts:
                rows = Talks.apply(part(rows))
            return rows

    def slow(state, bucket):
        future = allreduce_hook(state, bucket)
        return later(future, 0.02) if group.rank() == 1 else future

    ddp, whole = hooked(Talking, group, slow, bucket_cap_mb=TINY)
    for step in range(4):
        rows = batch(step, group.size(), width=4)
        squares(ddp, share(rows, group)).backward()
        product = rows
        for part in whole.parts:
            product = part(product)
        product.square().mean().backward()
        assert_same_gradients(ddp.module, whole)
        ddp.zero_grad()
        whole.zero_grad()


@over_groups(backends=("local", "shm", "gloo"), sizes=(2,), timeout=30)
def test_missing_peer_is_a_timeout_not_a_hook_error(group):
    ddp, _ = hooked(mlp, group, allreduce_hook)
    rows = share(batch(0, group.size()), group)
    squares(ddp, rows).backward()
    group.set_timeout(timedelta(seconds=0.5))
    if group.rank() == 1:
        while group.failure() is None:
            time.sleep(0.02)
        return
    with pytest.raises(CollectiveTimeout, match="rank 1"):
        squares(ddp, rows).backward()


@over_groups(backends=("local", "shm"), sizes=(2,), timeout=5)
def test_failure_of_another_group_in_a_hook_is_raised_on_all(group):
    """The other ranks cannot see that failure, so it must be reported to them."""

    def hook(state, bucket):
        if group.rank() == 1:
            raise GroupError("the other group is gone", group="other")
        return plain(group, bucket)

    ddp, _ = hooked(mlp, group, hook)
    began = time.monotonic()
    with pytest.raises((HookError, GroupError), match="the other group is gone"):
        squares(ddp, share(batch(0, group.size()), group)).backward()
    assert time.monotonic() - began < 3


class Again(nn.Module):
    """Optionally reuses its second layer inside a checkpoint."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.again = False

    def forward(self, rows):
        rows = rows.requires_grad_()
        hidden = checkpoint(self.part, rows, use_reentrant=True) if self.again else rows
        return self.second(self.first(hidden))

    def part(self, rows):
        return self.second(rows).tanh()


@several
@pytest.mark.parametrize("hook", [noop_hook, allreduce_hook])
def test_late_gradients_go_through_the_hook(group, hook):
    ddp, whole = hooked(Again, group, hook, bucket_cap_mb=TINY)
    for step in range(4):
        ddp.module.again = whole.again = step == 3
        rows = batch(step, group.size(), width=4)
        mine = share(rows, group)
        squares(ddp, mine.clone()).backward()
        squares(whole, (mine if hook is noop_hook else rows).clone()).backward()
        assert_same_gradients(ddp.module, whole)
        ddp.zero_grad()
        whole.zero_grad()


class AgainSparse(Again):
    """Has an embedding with a late sparse gradient."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(7, 4, sparse=True)

    def forward(self, rows):
        words = self.words(torch.arange(len(rows)) % 7)
        return super().forward(rows) + words

    def part(self, rows):
        return rows + self.words(torch.arange(len(rows)) % 5)


@several
def test_late_sparse_gradients_go_through_the_hook_once(group):
    ddp, whole = hooked(AgainSparse, group, allreduce_hook, bucket_cap_mb=TINY)
    for step in range(4):
        ddp.module.again = whole.again = step == 3
        rows = batch(step, group.size(), width=4)
        squares(ddp, share(rows, group).clone()).backward()
        parts = rows.split(len(rows) // group.size())
        sum(squares(whole, part.clone()) / len(parts) for part in parts).backward()
        assert_same_gradients(ddp.module, whole)
        late = [ddp.reducer.names[i] for i in ddp.reducer._layout.header.late()]
        assert late == (["words.weight"] if step == 3 else [])
        ddp.zero_grad()
        whole.zero_grad()


@several
def test_late_gradients_of_a_zero_weight_rank_are_ignored(group):
    """Its gradients may be NaN."""
    ddp, _ = wrapped(Again, group, bucket_cap_mb=TINY)
    for step in range(4):
        ddp.module.again = step == 3
        ddp.weight = 0.0 if group.rank() == 1 else 1.0
        rows = share(batch(step, group.size(), width=4), group)
        (squares(ddp, rows) * (float("nan") if group.rank() == 1 else 1.0)).backward()
        assert all(p.grad.isfinite().all() for p in ddp.parameters())
        ddp.zero_grad()
