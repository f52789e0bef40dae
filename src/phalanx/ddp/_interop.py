"""torch.compile, and private names of torch's DDP module that other projects import.

The compiler must not trace the wrapper's own functions, which talk to a group and to autograd.
They run as they are, and compilation starts at the wrapped module. A compiled graph produces
all its gradients at its end, so nothing could overlap; torch's compiler splits graphs at bucket
boundaries for the module that torch's DDP reports as active, and `ActiveModule` reports ours in
the same way.

Nothing here may import the compiler.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._C import _distributed_c10d as c10d
from torch.nn.parallel import DistributedDataParallel as TorchsClass
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from ..errors import InvalidState
from ._autograd_hooks import find_tensors, is_remote_reference

Function = TypeVar("Function", bound=Callable[..., Any])

_thread = threading.local()  # as ranks may be threads
_excluded_packages: set[str] = set()  # what the compiler knows of us


def not_compiled(function: Function) -> Function:
    """Have the compiler run a function as it is, and compile what it calls.

    ``torch.compiler.disable`` would import the compiler, for everybody, to say the same.
    """
    marks: Any = function
    marks._torchdynamo_disable = True
    marks._torchdynamo_disable_msg = "a wrapper for data parallelism runs as it is"
    frames: Any = torch._C._dynamo.eval_frame
    here, below = frames._FrameAction.SKIP, frames._FrameAction.DEFAULT
    frames.set_code_exec_strategy(marks.__code__, frames._FrameExecStrategy(here, below))
    return function


@not_compiled
def exclude_package_from_compiler() -> None:
    """Have the compiler, if there is one, leave all functions of this package alone."""
    if not _excluded_packages and "torch._dynamo" in sys.modules:
        package = __name__.partition(".")[0]
        torch._dynamo.trace_rules.add(package)
        _excluded_packages.add(package)


def compilable(module: Callable[..., Any]) -> Callable[..., Any]:
    """Return what to call so that the compiler, if it is at work, compiles a module.

    It passes over functions of torch's, such as the forward of a Sequential, unless one that it
    compiles calls them.
    """
    if not _excluded_packages or not torch._C._dynamo.eval_frame.get_eval_frame_callback():
        return module
    return torch._dynamo.external_utils.wrap_inline(module)


def refuse_compiled_backward() -> None:
    """Raise if the backward pass that has begun is run by the compiler, not by autograd's engine.

    The engine calls back when a pass is over. Nothing else tells, and gradients would be left out.
    """
    compiler: Any = sys.modules.get("torch._dynamo.compiled_autograd")
    if compiler is not None and compiler.in_compiled_autograd_region:
        raise InvalidState(
            "gradients are reduced in backward passes that autograd runs, and this one is compiled "
            "as a whole: switch compiled autograd off (torch._dynamo.config.compiled_autograd)"
        )


def active_module() -> Any:
    """Return the module whose forward pass this thread is in."""
    return getattr(_thread, "module", None)


class ActiveModule(AbstractContextManager[None]):
    """Has a module be the one that runs in the body; for the compiler, too."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def __enter__(self) -> None:
        self._before = active_module()
        _thread.module = self._module
        # Torch has one place for all threads. If several wrote there, it might be left wrong.
        self._tells = (
            bool(_excluded_packages) and threading.current_thread() is threading.main_thread()
        )
        if self._tells:
            self._others = TorchsClass._active_ddp_module
            TorchsClass._active_ddp_module = self._module

    def __exit__(self, *_: object) -> None:
        _thread.module = self._before
        if self._tells:
            TorchsClass._active_ddp_module = self._others


def compiler_bucket_cap(cap: int) -> int:
    """Tell after how many bytes of parameters the compiler divides a graph.

    It takes no less than the size of its own first bucket.
    """
    return max(cap, c10d._DEFAULT_FIRST_BUCKET_BYTES)


ENV_VARS = (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "CUDA_VISIBLE_DEVICES",
)  # fmt: skip
ENV_PREFIXES = ("PHALANX_", "GLOO_", "NCCL_", "TORCH_NCCL_")
"""What the variables begin with that groups and engines read."""


def _find_tensors(obj: Any) -> Iterable[Tensor]:
    """List the tensors in a nested structure, in order; those of a remote owner are not there."""
    return list(find_tensors(obj))


def _tree_flatten_with_rref(output: Any) -> tuple[list[Any], TreeSpec, bool]:
    """Flatten a structure, or the one that a reference of this process is to; tell which it was."""
    is_rref = is_remote_reference(output)
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
    found = [name for name in sorted(os.environ) if name.startswith(ENV_PREFIXES)]
    for name in (*ENV_VARS, *found):
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
