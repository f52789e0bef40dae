"""Functions and classes beside torch's class that other projects import."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from ._outputs import find_tensors, is_reference

__all__ = [
    "_DDPSink",
    "_dump_DDP_relevant_env_vars",
    "_find_tensors",
    "_tree_flatten_with_rref",
    "_tree_unflatten_with_rref",
]

RELEVANT = (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "CUDA_VISIBLE_DEVICES",
)  # fmt: skip
PREFIXES = ("PHALANX_", "GLOO_", "NCCL_", "TORCH_NCCL_")
"""What the variables begin with that groups and engines read."""


def _find_tensors(obj: Any) -> Iterable[Tensor]:
    """List the tensors in a nested structure, in order; those of a remote owner are not there."""
    return list(find_tensors(obj))


def _tree_flatten_with_rref(output: Any) -> tuple[list[Any], TreeSpec, bool]:
    """Flatten a structure, or the one that a reference of this process is to; tell which it was."""
    is_rref = is_reference(output)
    leaves, spec = tree_flatten(output.local_value() if is_rref else output)
    return leaves, spec, is_rref


def _tree_unflatten_with_rref(
    output: Sequence[Any], treespec: TreeSpec, output_is_rref: bool
) -> Any:
    """Make the structure again, or a reference to it."""
    value = tree_unflatten(output, treespec)
    if output_is_rref:
        from torch.distributed.rpc import RRef

        return RRef(value)
    return value


def _dump_DDP_relevant_env_vars() -> None:  # noqa: N802 - torch's name
    """Print the environment variables that groups and engines read."""
    found = [name for name in sorted(os.environ) if name.startswith(PREFIXES)]
    for name in (*RELEVANT, *found):
        sys.stdout.write(f"env:{name}={os.environ.get(name, 'N/A')}\n")


class _DDPSink(torch.autograd.Function):
    """Passes tensors on; when their gradients come back, a pass of the wrapped module begins."""

    @staticmethod
    def forward(ctx: Any, ddp_weakref: Any, *inputs: Any) -> Any:
        ctx.set_materialize_grads(False)  # where there is no gradient, none is made
        ctx.ddp_weakref = ddp_weakref
        ddp = ddp_weakref()
        ddp.reducer.prepare()
        if not ddp._ddp_sink_clone:
            return inputs
        return tuple(each.clone() if isinstance(each, Tensor) else each for each in inputs)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        ddp = ctx.ddp_weakref()
        if ddp is not None:
            ddp.reducer.begin_from_output()
        return None, *grad_outputs
