"""Communication hooks: alternatives to averaging gradients with a plain allreduce.

::

    state = PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=100)
    model.register_comm_hook(state, powerSGD_hook)

A hook is called with its state and a bucket of gradients, and returns a future of their mean. The
API is that of ``torch.distributed.algorithms.ddp_comm_hooks`` and
``model_averaging``; our hooks run on torch's DDP, and torch's on ours. The state of stateless hooks
is a process group, or None for the module's.
"""

from ._default_hooks import DDPCommHookType as DDPCommHookType
from ._default_hooks import allreduce_hook as allreduce_hook
from ._default_hooks import bf16_compress_hook as bf16_compress_hook
from ._default_hooks import bf16_compress_wrapper as bf16_compress_wrapper
from ._default_hooks import chain as chain
from ._default_hooks import fp16_compress_hook as fp16_compress_hook
from ._default_hooks import fp16_compress_wrapper as fp16_compress_wrapper
from ._default_hooks import noop_hook as noop_hook
from ._default_hooks import register_ddp_comm_hook as register_ddp_comm_hook
from ._model_averaging import DiLoCo as DiLoCo
from ._model_averaging import HierarchicalModelAverager as HierarchicalModelAverager
from ._model_averaging import ModelAverager as ModelAverager
from ._model_averaging import PeriodicModelAverager as PeriodicModelAverager
from ._model_averaging import PostLocalSGDOptimizer as PostLocalSGDOptimizer
from ._model_averaging import PostLocalSGDState as PostLocalSGDState
from ._model_averaging import post_localSGD_hook as post_localSGD_hook
from ._power_sgd import PowerSGDState as PowerSGDState
from ._power_sgd import batched_powerSGD_hook as batched_powerSGD_hook
from ._power_sgd import powerSGD_hook as powerSGD_hook
from ._quantization import quantization_perchannel_hook as quantization_perchannel_hook
from ._quantization import quantization_pertensor_hook as quantization_pertensor_hook
from ._sparsification import RandomKState as RandomKState
from ._sparsification import TopKState as TopKState
from ._sparsification import randomk_hook as randomk_hook
from ._sparsification import topk_hook as topk_hook
