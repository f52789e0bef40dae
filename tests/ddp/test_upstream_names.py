"""Private and public names of torch's DDP that other projects use."""

import dataclasses
import gc
import weakref

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import phalanx.ddp
from phalanx.ddp import DDP
from phalanx.errors import InvalidState

from .whole import (
    ROWS,
    TINY,
    alone,
    assert_same_gradients,
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


@everywhere
def test_ignored_parameters(group):
    module = seeded(mlp, seed=group.rank())
    DDP._set_params_and_buffers_to_ignore_for_model(module, ["0.weight"])
    ddp = DDP(module, process_group=group)
    assert torch.equal(module[0].weight, seeded(mlp, seed=group.rank())[0].weight)
    names = [name for name, _ in DDP._get_data_parallel_params(ddp, named_params=True)]
    assert names == ["0.bias", "2.weight", "2.bias"]
    assert [p.shape for p in DDP._get_data_parallel_params(mlp())] == [
        p.shape for p in mlp().parameters()
    ]
    own = seeded(mlp, seed=group.rank())
    own.load_state_dict(module.state_dict())
    rows = share(batch(0, group.size()), group)
    for _ in range(2):
        squares(ddp, rows).backward()
        squares(own, rows).backward()
        assert torch.allclose(module[0].weight.grad, own[0].weight.grad, atol=1e-6)
    ddp.assert_in_sync()


@everywhere
def test_active_ddp_module(group):
    seen = []

    class Asking(nn.Linear):
        def forward(self, rows):
            seen.append(DDP._get_active_ddp_module())
            return super().forward(rows)

    ddp = DDP(Asking(5, 2), process_group=group)
    for _ in range(5):
        ddp(torch.ones(1, 5)).sum().backward()
        assert DDP._get_active_ddp_module() is None
    assert all(each is ddp for each in seen)
    with ddp._inside_ddp_forward():
        assert DDP._get_active_ddp_module() is ddp


@everywhere
def test_logging_data_has_torchs_keys(group):
    ddp, _ = wrapped(mlp, group, bucket_cap_mb=TINY)
    ddp._set_ddp_runtime_logging_sample_rate(2)
    with pytest.raises(ValueError, match="sample_rate"):
        ddp._set_ddp_runtime_logging_sample_rate(0)
    assert ddp._get_ddp_logging_data()["iteration"] == 0
    with ddp.no_sync():  # not counted
        squares(ddp, share(batch(0, group.size()), group)).backward()
    for step in range(130):  # more than stats() keeps
        squares(ddp, share(batch(step, group.size()), group)).backward()
    data = ddp._get_ddp_logging_data()
    place = (group.size(), group.rank())
    assert (data["world_size"], data["rank"], data["iteration"]) == (*place, 130)
    assert (data["module_name"], data["num_parameter_tensors"]) == ("Sequential", 4)
    assert data["total_parameter_size_bytes"] == sum(p.nbytes for p in ddp.parameters())
    assert len(data["bucket_sizes"].split(", ")) == 4
    assert data["avg_backward_compute_time"] > 0


@everywhere
def test_remove_autograd_hooks(group):
    ddp, _whole = wrapped(mlp, group)
    rows = share(batch(0, group.size()), group)
    squares(ddp, rows).backward()
    ddp.zero_grad()
    ddp._remove_autograd_hooks()
    assert not any(p._post_accumulate_grad_hooks for p in ddp.parameters())


@everywhere
def test_torchs_private_settings_are_accepted(group):
    ddp, whole = wrapped(mlp, group)
    ddp._set_ddp_sink_clone(False)
    ddp._set_sparse_metadata({})
    ddp._set_static_graph()
    assert ddp.static_graph
    assert ddp.train(False) is ddp
    assert not ddp.module.training
    rows = batch(0, group.size())
    squares(ddp, share(rows, group)).backward()
    squares(whole, rows).backward()
    assert_same_gradients(ddp.module, whole)
    ddp._check_reducer_finalized()


@everywhere
def test_check_reducer_finalized_raises_during_backward(group):
    ddp, _ = wrapped(mlp, group)
    said = []

    def ask(gradient):
        with pytest.raises(RuntimeError, match="has not finished"):
            ddp._check_reducer_finalized()
        said.append(True)

    hidden = ddp.module[0].register_forward_hook(lambda *args: args[2].register_hook(ask) and None)
    squares(ddp, torch.ones(1, 5)).backward()
    hidden.remove()
    assert said


@everywhere
def test_update_process_group(group):
    ddp, whole = wrapped(mlp, group)
    squares(ddp, torch.ones(1, 5)).backward()
    ddp.zero_grad()
    half = [rank for rank in range(group.size()) if rank % 2 == group.rank() % 2]
    mine = group.split_group(half)
    ddp.weight = 1 + mine.rank()
    with ddp.no_sync():
        ddp._update_process_group(mine)
        assert not ddp.require_backward_grad_sync
    assert ddp.require_backward_grad_sync
    assert ddp.process_group is mine
    assert ddp.weight == 1 + mine.rank()
    total = sum(range(1, mine.size() + 1))
    for step in range(3):
        rows = batch(step, mine.size())
        squares(ddp, share(rows, mine)).backward()
        for rank, part in enumerate(rows.split(ROWS)):
            (squares(whole, part) * (1 + rank) / total).backward()
        compare(ddp, whole, rtol=2e-6)
    mine.shutdown()


@everywhere
def test_gradients_stay_local_without_autograd_hooks(group):
    ddp, whole = wrapped(mlp, group)
    rows = share(batch(0, group.size()), group)
    squares(ddp, rows).backward()
    ddp.zero_grad()
    ddp._remove_autograd_hooks()
    assert operations(group, lambda: squares(ddp, rows).backward()) == []
    squares(whole, rows).backward()
    compare(ddp, whole)


NAMES = [
    "_DDPSink", "_BufferCommHook", "_BufferCommHookLocation", "_find_tensors",
    "_tree_flatten_with_rref", "_tree_unflatten_with_rref", "_dump_DDP_relevant_env_vars",
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_torchs_module_level_names_exist(name):
    assert name in vars(phalanx.ddp)
    assert name in vars(torch.nn.parallel.distributed)


def test_find_tensors_matches_torch():
    @dataclasses.dataclass
    class Pair:
        first: object
        second: object

    one, two, three, four = (torch.tensor(n) for n in range(4))
    nested = Pair([one, (two, "text")], {"a": {"b": three}, "c": four})
    found = list(phalanx.ddp._find_tensors(nested))
    theirs = list(torch.nn.parallel.distributed._find_tensors(nested))
    assert [id(each) for each in found] == [id(each) for each in theirs]
    assert list(phalanx.ddp._find_tensors("text")) == []


def test_tree_flatten_with_rref_round_trip():
    nested = {"a": [1, (2, None)], "b": torch.ones(2)}
    leaves, spec, is_rref = phalanx.ddp._tree_flatten_with_rref(nested)
    assert (leaves[:2], is_rref) == ([1, 2], False)
    again = phalanx.ddp._tree_unflatten_with_rref(leaves, spec, is_rref)
    assert again["a"] == nested["a"]
    assert again["b"] is nested["b"]


def test_dump_env_vars(monkeypatch, capsys):
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    phalanx.ddp._dump_DDP_relevant_env_vars()
    printed = capsys.readouterr().out.splitlines()
    assert {"env:NCCL_DEBUG=INFO", "env:WORLD_SIZE=4", "env:MASTER_ADDR=N/A"} <= set(printed)


@everywhere
@pytest.mark.parametrize("clones", [True, False])
def test_ddp_sink_forward_and_backward(group, clones):
    ddp, whole = wrapped(mlp, group)
    ddp._set_ddp_sink_clone(clones)
    for step in range(3):
        rows = batch(step, group.size())
        inner = ddp.module(share(rows, group))  # not an output of the wrapper
        output, text, unused = phalanx.ddp._DDPSink.apply(
            weakref.ref(ddp), inner, "text", inner * 2
        )
        assert (text, unused.shape) == ("text", inner.shape)
        assert (output.data_ptr() != inner.data_ptr()) == clones
        output.square().mean().backward()
        squares(whole, rows).backward()
        compare(ddp, whole)


def outcome(function, *args):
    try:
        return function(*args)
    except Exception as error:  # noqa: BLE001 - whatever torch raises
        return type(error), str(error)


@alone
def test_scatter_and_gather_match_torch(group):
    ours, theirs = (kind(mlp(), process_group=group) for kind in (DDP, TorchDDP))
    for args in (((7, "a"), {"b": 1}, [0, 1]), ((), {}, [0]), ((torch.ones(4),), {}, [0])):
        assert outcome(ours.scatter, *args) == outcome(theirs.scatter, *args)
    for outputs in ([None, None], [{"a": None}] * 2, [torch.ones(2)] * 2):
        assert outcome(ours.gather, outputs, 0) == outcome(theirs.gather, outputs, 0)


@alone
def test_device_attributes_and_to_kwargs(group):
    ddp = DDP(mlp(), process_group=group)
    assert (ddp.device, ddp.device_type, ddp.device_ids) == (torch.device("cpu"), "cpu", None)
    (inputs,), (kwargs,) = ddp.to_kwargs((torch.ones(4, 2), 7), {"a": [torch.ones(3)]}, 0)
    assert (inputs[0].shape, inputs[1], kwargs["a"][0].shape) == ((4, 2), 7, (3,))


@everywhere
def test_unreferenced_ddp_is_garbage_collected(group):
    module = mlp()
    ddp = DDP(module, process_group=group)
    for step in range(3):
        squares(ddp, share(batch(step, group.size()), group)).backward()
    gone = weakref.ref(ddp.reducer)
    del ddp
    gc.collect()
    assert gone() is None
    squares(module, torch.ones(1, 5)).backward()  # leftover hooks do nothing
    assert all(p.grad is not None for p in module.parameters())


# -- all of torch's names ------------------------------------------------------------------

INHERITED = {
    "_active_ddp_module": None,
    "_assign_modules_buffers": lambda ddp: ddp._assign_modules_buffers(),
    "_build_debug_param_to_name_mapping": lambda ddp: ddp._build_debug_param_to_name_mapping(
        list(ddp.parameters())
    ),
    "_build_params_for_reducer": lambda ddp: ddp._build_params_for_reducer(),
    "_check_and_sync_module_buffers": None,
    "_clear_grad_buffer": lambda ddp: ddp._clear_grad_buffer(),
    "_get_parameters": lambda ddp: list(ddp._get_parameters(ddp.module)),
    "_lazy_init": lambda ddp: ddp._lazy_init(),
    "_log_and_throw": None,
    "_set_ddp_sink_clone": lambda ddp: ddp._set_ddp_sink_clone(False),
    "_set_params_and_buffers_to_ignore_for_model": None,
    "gather": None,
    "scatter": None,
    "to_kwargs": None,
    "train": lambda ddp: ddp.train().eval(),
}
"""Inherited names, and how to call each on one CPU rank if that is possible."""
REFUSED = (
    "_check_global_requires_backward_grad_sync",
    "_ddp_init_helper",
    "_delayed_all_reduce_hook",
    "_fire_reducer_autograd_hook",
    "_match_all_reduce_for_bwd_pass",
    "_match_unused_params_allreduce",
    "_module_wait_for_copy_hook",
    "_register_accum_grad_hook",
    "_register_delay_all_reduce_hook",
    "_root_copy_hook",
)


def test_every_torch_name_is_overridden_or_listed():
    def owner(name):
        return next(each for each in DDP.__mro__ if name in vars(each))

    names = {name for name in vars(TorchDDP) if owner(name) is TorchDDP}
    assert names <= INHERITED.keys(), "a version of torch has more: override, or add to the table"


@alone
@pytest.mark.parametrize("name", [name for name, call in INHERITED.items() if call])
def test_inherited_method_works(group, name):
    INHERITED[name](DDP(mlp(), process_group=group))


@on_pairs
def test_rank_without_data_receives_buffers(group):
    ddp = DDP(nn.BatchNorm1d(2), process_group=group)
    ddp.module.running_mean.fill_(group.rank() + 1)
    if group.rank() == 0:
        ddp._sync_module_buffers(ddp._find_common_rank(ddp._distributed_rank, True))
    else:
        ddp._check_and_sync_module_buffers()
    assert ddp.module.running_mean.tolist() == [1, 1]


@alone
@pytest.mark.parametrize("name", REFUSED)
def test_methods_on_torchs_internals_raise_with_an_alternative(group, name):
    ddp = DDP(mlp(), process_group=group)
    with pytest.raises(
        InvalidState, match=rf"^{name}\(\) works on internals.*Instead, (use|pass|wrap)"
    ):
        getattr(ddp, name)(False)


@everywhere
def test_forward_split_into_pre_run_and_post(group):
    ddp, whole = wrapped(mlp, group)
    for step in range(3):
        rows = batch(step, group.size())
        ddp._lazy_init()
        inputs, kwargs = ddp._pre_forward(share(rows, group))
        output = ddp._run_ddp_forward(*inputs, **kwargs)
        ddp._post_forward(output).square().mean().backward()
        whole(rows).square().mean().backward()
        assert_same_gradients(ddp.module, whole)
        ddp.zero_grad()
        whole.zero_grad()
    assert ddp._distributed_rank == group.rank()


@alone
def test_subclass_may_override_part_of_forward(group):
    class Doubling(DDP):
        def _run_ddp_forward(self, *inputs, **kwargs):
            return 2 * super()._run_ddp_forward(*inputs, **kwargs)

        def _post_forward(self, output):
            self._clear_grad_buffer()
            return super()._post_forward(output) + 1

    ddp = Doubling(mlp(), process_group=group)
    rows = torch.ones(1, 5)
    torch.testing.assert_close(ddp(rows), 2 * ddp.module(rows) + 1)


@alone
def test_torchs_private_checks(group):
    ddp = DDP(mlp(), process_group=group)
    ddp._check_default_group()
    ddp._setup_in_backward_optimizers()
    with pytest.raises(KeyError, match="what"):
        ddp._log_and_throw(KeyError, "what")
    with pytest.raises(TypeError):
        ddp._check_comm_hook(None)
