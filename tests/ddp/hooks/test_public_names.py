"""Public names of phalanx.ddp.hooks compared with torch's, and registration by type."""

import inspect

import pytest
from torch.distributed.algorithms import ddp_comm_hooks
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as torch_local
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as torch_power
from torch.distributed.algorithms.model_averaging import averagers, hierarchical_model_averager

from phalanx.ddp import hooks
from phalanx.ddp.hooks import DDPCommHookType, PowerSGDState, register_ddp_comm_hook

THEIRS = [
    torch_power.PowerSGDState,
    torch_local.PostLocalSGDState,
    averagers.PeriodicModelAverager,
    hierarchical_model_averager.HierarchicalModelAverager,
    ddp_comm_hooks.register_ddp_comm_hook,
]


PROMISED = {
    "DDPCommHookType",
    "DiLoCo",
    "HierarchicalModelAverager",
    "ModelAverager",
    "PeriodicModelAverager",
    "PostLocalSGDOptimizer",
    "PostLocalSGDState",
    "PowerSGDState",
    "RandomKState",
    "TopKState",
    "allreduce_hook",
    "batched_powerSGD_hook",
    "bf16_compress_hook",
    "bf16_compress_wrapper",
    "chain",
    "fp16_compress_hook",
    "fp16_compress_wrapper",
    "noop_hook",
    "post_localSGD_hook",
    "powerSGD_hook",
    "quantization_perchannel_hook",
    "quantization_pertensor_hook",
    "randomk_hook",
    "register_ddp_comm_hook",
    "topk_hook",
}


def test_public_names_are_listed_and_documented():
    visible = {name for name in vars(hooks) if not name.startswith("_")}
    assert visible == PROMISED
    assert all(getattr(hooks, name).__doc__ for name in visible)


@pytest.mark.parametrize("theirs", THEIRS, ids=lambda each: each.__name__)
def test_signatures_match_torch(theirs):
    check_signature(theirs)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own
def test_signature_of_the_optimizer_matches_torch():
    from torch.distributed.optim import PostLocalSGDOptimizer  # takes half a second

    check_signature(PostLocalSGDOptimizer)


def check_signature(theirs):
    ours = getattr(hooks, theirs.__name__)
    expected = inspect.signature(theirs).parameters.values()
    parameters = inspect.signature(ours).parameters.values()
    assert [(each.name, each.default) for each in parameters] == [
        (each.name, each.default) for each in expected
    ]


class Registering:
    """A module that records the registered hook."""

    def register_comm_hook(self, state, hook):
        self.state, self.hook = state, hook


def test_comm_hook_types_match_torch():
    ours = [each.name for each in DDPCommHookType]
    assert ours == [each.name for each in ddp_comm_hooks.DDPCommHookType]


@pytest.mark.parametrize("kind", DDPCommHookType)
def test_comm_hook_type_registers_its_hook(kind, threads):
    def body(context):
        group, ours, theirs = context.group(), Registering(), Registering()
        register_ddp_comm_hook(kind, ours, group)
        ddp_comm_hooks.DDPCommHookType[kind.name].value(model=theirs, state=group)
        assert ours.hook.__name__ == theirs.hook.__name__
        if isinstance(ours.state, PowerSGDState):
            for name in ("process_group", "matrix_approximation_rank", "start_powerSGD_iter"):
                assert getattr(ours.state, name) == getattr(theirs.state, name)
        else:
            assert ours.state is theirs.state is group

    threads.run(body, 1)


def test_comm_hook_type_must_not_be_a_string():
    with pytest.raises(
        TypeError, match="comm_hook_type must be a DDPCommHookType, got 'POWER_SGD'"
    ):
        register_ddp_comm_hook("POWER_SGD", Registering())
