"""Communication hooks: alternatives to averaging gradients with a plain allreduce.

::

    state = PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=100)
    model.register_comm_hook(state, powerSGD_hook)

A hook is called with its state and a bucket of gradients, and returns a future of their mean. The
API is that of ``torch.distributed.algorithms.ddp_comm_hooks`` and
``model_averaging``; our hooks run on torch's DDP, and torch's on ours. The state of stateless hooks
is a process group, or None for the module's.
"""

from ._default_hooks import (
    DDPCommHookType,
    allreduce_hook,
    bf16_compress_hook,
    bf16_compress_wrapper,
    chain,
    fp16_compress_hook,
    fp16_compress_wrapper,
    noop_hook,
    register_ddp_comm_hook,
)
from ._model_averaging import (
    DiLoCo,
    HierarchicalModelAverager,
    ModelAverager,
    PeriodicModelAverager,
    PostLocalSGDOptimizer,
    PostLocalSGDState,
    post_localSGD_hook,
)
from ._power_sgd import PowerSGDState, batched_powerSGD_hook, powerSGD_hook
from ._quantization import quantization_perchannel_hook, quantization_pertensor_hook
from ._sparsification import RandomKState, TopKState, randomk_hook, topk_hook

__all__ = [
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
]
