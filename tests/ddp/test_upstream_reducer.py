"""`ddp.reducer` and the logging data under torch's names, as frameworks use them.

Each use is run with torch's DDP too, on the same group.
"""

import copy

import pytest
import torch
from torch import nn
from torch._C import _distributed_c10d as c10d
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from cases import over_cases
from phalanx.ddp import DDP
from phalanx.ddp.hooks import allreduce_hook
from phalanx.errors import InvalidState

from .internals import Reducer
from .whole import (
    TINY,
    alone,
    assert_same_everywhere,
    batch,
    compare,
    everywhere,
    mlp,
    on_pairs,
    operations,
    seeded,
    share,
    squares,
    wrapped,
)

# -- backward passes that a framework announces --------------------------------------------


class Adversaries(nn.Module):
    """A generator and a discriminator that a training step optimizes in turn."""

    def __init__(self):
        super().__init__()
        self.generator = nn.Linear(5, 5)
        self.discriminator = nn.Linear(5, 1)

    def forward(self, rows, backward):
        made = self.generator(rows)
        backward(self.discriminator(made).square().mean())
        real, fake = self.discriminator(rows), self.discriminator(made.detach())
        backward((real - fake - 1).square().mean())


def manual_optimization(ddp, rows):
    """Run backward passes inside forward, as Lightning does with `manual_backward`."""
    seen = []

    def backward(loss):
        optimized = ddp.module.discriminator if seen else ddp.module.generator
        ddp.module.requires_grad_(False)
        optimized.requires_grad_(True)
        ddp.zero_grad()
        ddp.require_forward_param_sync = True
        ddp.reducer._rebuild_buckets()
        ddp.reducer.prepare_for_backward([loss])
        loss.backward()
        ddp.module.requires_grad_(True)
        seen.append([None if p.grad is None else p.grad.clone() for p in ddp.module.parameters()])
        if len(seen) == 2:
            ddp.require_backward_grad_sync = False  # for the end of forward

    ddp(rows, backward)
    ddp.require_backward_grad_sync = True
    return seen


def accumulation(ddp, rows):
    """Run forward passes in `no_sync` and reduce in the last backward pass, as Accelerate does."""
    with ddp.no_sync():
        losses = [squares(ddp, part) for part in rows.chunk(2)]
    losses[0].backward()
    ddp.require_backward_grad_sync = ddp.require_forward_param_sync = True
    ddp.reducer.prepare_for_backward([])
    losses[1].backward()
    return [p.grad.clone() for p in ddp.module.parameters()]


def reduced_in_no_sync(ddp, rows):
    """Reduce a pass whose forward and backward are in `no_sync`; the next pass stays local."""
    seen = []
    with ddp.no_sync():
        for announced in (True, False):
            loss = squares(ddp, rows)
            if announced:
                ddp.reducer.prepare_for_backward(list(ddp.parameters())[:0])
            loss.backward()
            seen.append([p.grad.clone() for p in ddp.module.parameters()])
            ddp.zero_grad()
    return seen


def without_the_wrapper(ddp, rows):
    """Reduce a pass of which the wrapper saw no forward pass, as pipelines do."""
    loss = squares(ddp.module, rows)
    ddp.reducer.prepare_for_backward([])
    loss.backward()
    return [p.grad.clone() for p in ddp.module.parameters()]


def train(ddp, act, group):
    seen = []
    for step in range(4):
        seen.append(act(ddp, share(batch(step, group.size()), group)))
        ddp.zero_grad()
    return seen


@on_pairs
@pytest.mark.parametrize(
    ("make", "act"),
    [
        (mlp, accumulation),
        (mlp, reduced_in_no_sync),
        (mlp, without_the_wrapper),
        (Adversaries, manual_optimization),
    ],
    ids=lambda each: each.__name__,
)
def test_announced_passes_are_reduced_as_by_torch(group, make, act):
    module = seeded(make, seed=group.rank())
    told = {"find_unused_parameters": make is Adversaries}
    theirs = TorchDDP(copy.deepcopy(module), process_group=group, **told)
    expected = train(theirs, act, group)
    ours = DDP(module, process_group=group)
    found = train(ours, act, group)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@everywhere
def test_first_pass_of_manual_optimization_is_equal_on_all_ranks(group):
    ddp = DDP(seeded(Adversaries, seed=group.rank()), process_group=group)
    manual_optimization(ddp, share(batch(0, group.size()), group))
    assert_same_everywhere(ddp)


@everywhere
def test_buckets_are_rebuilt_once(group):
    module = seeded(mlp)
    kinds = {DDP: [], TorchDDP: []}
    for kind, rebuilt in kinds.items():
        ddp = kind(copy.deepcopy(module), process_group=group, bucket_cap_mb=TINY)
        for step in range(3):
            rebuilt.append(ddp.reducer._rebuild_buckets())
            squares(ddp, share(batch(step, group.size()), group)).backward()
            ddp.zero_grad()
    assert kinds[DDP] == kinds[TorchDDP] == [False, True, False]


class Backwards(nn.Module):
    """Registers its layers, all of one shape, in the opposite order of forward."""

    def __init__(self):
        super().__init__()
        self.last, self.middle, self.first = (nn.Linear(5, 5, bias=False) for _ in range(3))

    def forward(self, rows):
        return self.last(self.middle(self.first(rows)))


@pytest.mark.parametrize("name", ["prepare_for_backward", "_rebuild_buckets", "forward"])
@on_pairs
def test_ranks_rebuild_buckets_before_the_same_pass(group, name):
    """Some rank may run both forward passes before the first backward pass, another may not."""
    ddp, whole = wrapped(Backwards, group)
    rows = share(batch(0, group.size()), group)
    if name == "forward" and group.rank() == 0:
        squares(ddp, rows).backward()
        second = squares(ddp, rows)
    else:
        first, second = squares(ddp, rows), squares(ddp, rows)
        first.backward()
        if group.rank() == 0 and name != "forward":
            getattr(ddp.reducer, name)()
    ddp.zero_grad()
    second.backward()
    squares(whole, batch(0, group.size())).backward()
    compare(ddp, whole, rtol=1e-5)


@on_pairs
def test_pass_announced_during_a_pass_does_not_reduce_the_next_one(group):
    ddp = DDP(seeded(mlp), process_group=group)
    rows = share(batch(0, group.size()), group)
    handle = ddp.module[0].weight.register_post_accumulate_grad_hook(
        lambda _: ddp.reducer.prepare_for_backward([])
    )
    squares(ddp, rows).backward()
    handle.remove()
    with ddp.no_sync():
        assert "allreduce" not in str(operations(group, lambda: squares(ddp, rows).backward()))


@pytest.mark.parametrize("is_early", [True, False], ids=["before", "after"])
@on_pairs
def test_pass_announced_to_ranks_without_data(group, is_early):
    ddp = DDP(seeded(mlp), process_group=group)
    ddp.register_comm_hook(None, allreduce_hook)  # so ranks shadow instead of leaving
    rows = share(batch(0, group.size()), group)

    with ddp.join(), ddp.no_sync():
        for _ in range(1 + group.rank()):
            if is_early:
                ddp.reducer.prepare_for_backward([])
            loss = squares(ddp, rows)
            if not is_early:
                with pytest.raises(InvalidState, match="before forward"):
                    ddp.reducer.prepare_for_backward([])
            loss.backward()
    assert (ddp.module[0].weight.grad is not None) == is_early


@everywhere
def test_hooks_of_the_reducer_reduce_a_bucket(group):
    """torch's own hooks sum a bucket this way."""
    ddp = DDP(seeded(mlp), process_group=group)

    def hook(_, bucket):
        ddp.reducer._run_allreduce_hook(bucket).wait()
        total = bucket.buffer().clone()
        future = ddp.reducer._run_allreduce_hook(bucket)
        torch.testing.assert_close(future.wait(), total * group.size())
        future = torch.futures.Future()
        future.set_result(total / group.size())
        return future

    whole = seeded(mlp)
    rows = batch(0, group.size())
    ddp.register_comm_hook(None, hook)
    squares(ddp, share(rows, group)).backward()
    squares(whole, rows).backward()
    for mine, other in zip(ddp.module.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad)


# -- names ---------------------------------------------------------------------------------

REFUSED = {
    "_autograd_hook": (0,),
    "_get_local_used_map": (),
    "_get_zeros_like_grad_buckets": (),
    "_install_post_backward_futures": ([],),
    "_set_forward_pass_work_handle": (None, True),
    "_set_mixed_precision_param_dtype": (torch.float16,),
    "_update_process_group": (None,),
    "get_backward_stats": (),
    "set_logger": (None,),
}
ACCEPTED = {
    "_check_reducer_finalized": (),
    "_ddp_graph_static": (),
    "_delay_all_reduce": (),
    "_push_all_rebuilt_params": (),
    "_rebuild_buckets": (),
    "_reset_state": (),
    "_set_ddp_runtime_logging_sample_rate": (10,),
    "_set_optimizer_in_backward": (),
    "_set_sparse_metadata": ({},),
    "_set_static_graph": (),
    "prepare_for_backward": ([],),
    "prepare_for_forward": (),
    "_remove_autograd_hooks": (),
}
NEEDS_BUCKET = {"_run_allreduce_hook", "_run_comm_hook"}


def test_reducer_has_every_name_of_torchs():
    names = {each for each in vars(c10d.Reducer) if not each.startswith(("__", "_pybind11"))}
    assert names == REFUSED.keys() | ACCEPTED.keys() | NEEDS_BUCKET
    assert names <= vars(Reducer).keys()


@alone
def test_names_of_torchs_reducer_work_or_say_what_to_use(group):
    ddp = DDP(mlp(), process_group=group)
    squares(ddp, torch.ones(1, 5)).backward()
    for name, args in REFUSED.items():
        with pytest.raises(InvalidState, match=rf"{name}\(\) .* Instead, (use|pass) "):
            getattr(ddp.reducer, name)(*args)
    assert ddp.reducer._ddp_graph_static() is True
    for name, args in ACCEPTED.items():
        getattr(ddp.reducer, name)(*args)
    assert operations(group, lambda: squares(ddp, torch.ones(1, 5)).backward()) == []


# -- logging data --------------------------------------------------------------------------

ONLY_OURS = {"has_error", "static_graph", "can_set_static_graph", "join_uneven_inputs"}
"""torch sets these when they become true."""
ONLY_GLOO = {"gloo_device_transport", "gloo_socket_ifname", "gloo_num_threads"}
"""torch's are about its Gloo engine; ours has as many threads as it needs."""
REBUILT = {
    "bucket_sizes", "has_rebuilt_buckets", "rebuilt_bucket_sizes",
    "rebuilt_per_bucket_param_indices", "prev_iteration_grad_ready_order_indices",
}  # fmt: skip
"""torch neither rebuilds buckets nor orders all parameters with `find_unused_parameters`."""
EQUAL = {
    "bucket_sizes", "broadcast_buffers", "cuda_visible_devices", "device_ids", "dtypes",
    "find_unused_parameters", "has_rebuilt_buckets", "has_sync_bn", "is_multi_device_module",
    "iteration", "master_addr", "master_port", "module_name", "num_buckets_reduced",
    "num_parameter_tensors", "output_device", "prev_iteration_grad_ready_order_indices", "rank",
    "rebuilt_bucket_sizes", "rebuilt_per_bucket_param_indices", "torch_distributed_debug",
    "total_parameter_size_bytes", "unused_parameter_size", "world_size",
}  # fmt: skip
TIMES = {
    f"{prefix}{phase}_time"
    for prefix in ("", "avg_")
    for phase in (
        "forward_compute",
        "backward_compute",
        "backward_comm",
        "backward_compute_comm_overlap",
    )
}


class Halves(nn.Module):
    """Parameters of two dtypes, of which one is never used."""

    def __init__(self):
        super().__init__()
        self.used = nn.Linear(5, 2)
        self.unused = nn.Parameter(torch.ones(7, dtype=torch.float64))

    def forward(self, rows):
        return self.used(rows)


@on_pairs
@pytest.mark.parametrize("make", [mlp, Halves], ids=lambda each: each.__name__)
def test_logging_data_matches_torch(group, make):
    told = {"process_group": group, "find_unused_parameters": make is Halves}
    modules = [kind(seeded(make), **told) for kind in (DDP, TorchDDP)]
    not_rebuilt = REBUILT if make is Halves else set()
    for steps in (0, 3):
        for ddp in modules:
            for step in range(steps):
                squares(ddp, share(batch(step, group.size()), group)).backward()
        if steps:
            modules[1](batch(0, 1))  # torch describes a step when the next one begins
        ours, theirs = (ddp._get_ddp_logging_data() for ddp in modules)
        assert theirs.keys() - ours.keys() <= ONLY_GLOO
        assert ours.keys() - theirs.keys() - not_rebuilt == ONLY_OURS
        shared = theirs.keys() & ours.keys()
        assert [type(ours[name]) for name in shared] == [type(theirs[name]) for name in shared]
        equal = shared & EQUAL - not_rebuilt
        assert {name: ours[name] for name in equal} == {name: theirs[name] for name in equal}
        assert ours["has_error"] == 0
    assert ours.keys() >= TIMES
    assert all(ours[name] > 0 for name in TIMES if "overlap" not in name)
    assert ours["forward_compute_time_start"] < ours["backward_compute_time_start"]
    assert ours["backward_comm_time_start"] < ours["backward_comm_time_end"]


@alone
def test_logging_data_of_flags_and_hooks(group):
    ddp = DDP(mlp(), process_group=group)
    ddp._set_static_graph()
    ddp.register_comm_hook(None, allreduce_hook)
    data = ddp._get_ddp_logging_data()
    assert (data["static_graph"], data["comm_hook"]) == (1, "allreduce_hook")


@alone
def test_logging_data_after_an_unused_layer_was_frozen(group):
    ddp = DDP(Halves(), process_group=group)
    squares(ddp, torch.ones(1, 5)).backward()
    assert ddp._get_ddp_logging_data()["unused_parameter_size"] > 0
    for index in ddp.reducer.unused:
        ddp.reducer.parameters[index].requires_grad_(False)
    ddp.reducer.track_trainable_parameters()
    assert ddp._get_ddp_logging_data()["unused_parameter_size"] == 0


@over_cases("local-2", "shm-2", reuse=False)
def test_logging_data_has_the_error_of_a_failed_pass(group):
    ddp = DDP(mlp(), process_group=group)

    def hook(_, bucket):
        raise ZeroDivisionError("nothing to divide by")

    ddp.register_comm_hook(None, hook)
    with pytest.raises(Exception, match="nothing to divide by"):
        squares(ddp, torch.ones(1, 5)).backward()
    data = ddp._get_ddp_logging_data()
    assert data["has_error"] == 1
    assert "nothing to divide by" in data["error"]
