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
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partialmethod
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from ..errors import InvalidState
from ._autograd_hooks import find_tensors, is_remote_reference

USE_COMM_HOOK = "use register_comm_hook()"
USE_DELAY = "pass delay_all_reduce_named_params= when you wrap the module"
USE_JOIN = "use ddp.join() or phalanx.join.Join"
USE_MIXED_PRECISION = "pass mixed_precision= when you wrap the module"

Function = TypeVar("Function", bound=Callable[..., Any])

_thread = threading.local()  # as ranks may be threads
_excluded_packages: set[str] = set()  # what the compiler knows of us


def not_compiled(function: Function) -> Function:
    """Make the compiler skip a function and compile what it calls.

    ``torch.compiler.disable`` does the same, but imports the compiler.
    """
    marked: Any = function
    marked._torchdynamo_disable = True
    marked._torchdynamo_disable_msg = "the wrapper for data parallelism is not compiled"
    frames: Any = torch._C._dynamo.eval_frame
    here, below = frames._FrameAction.SKIP, frames._FrameAction.DEFAULT
    frames.set_code_exec_strategy(marked.__code__, frames._FrameExecStrategy(here, below))
    return function


@not_compiled
def exclude_package_from_compiler() -> None:
    """Make the compiler, if it is loaded, skip our functions, except those of meshes.

    Compiled programs call methods of meshes, which it traces.
    """
    if not _excluded_packages and "torch._dynamo" in sys.modules:
        package = __name__.partition(".")[0]
        for name in _SKIPPED_BY_COMPILER:
            torch._dynamo.trace_rules.add(f"{package}.{name}")
        _excluded_packages.add(package)


_SKIPPED_BY_COMPILER = (
    *("_faultpoints", "_formatting", "checkpoint", "ddp", "elastic", "env", "errors"),
    *("groups", "join", "launch", "native", "testing"),
)


def compilable(module: Callable[..., Any]) -> Callable[..., Any]:
    """Return what to call so that the compiler, if active, compiles a module.

    It skips torch's functions, such as a Sequential's forward, unless compiled code calls them.
    """
    if not _excluded_packages or not torch._C._dynamo.eval_frame.get_eval_frame_callback():
        return module
    return torch._dynamo.external_utils.wrap_inline(module)


def refuse_compiled_backward() -> None:
    """Raise if compiled autograd runs this backward pass: it does not signal the end of a pass."""
    compiler: Any = sys.modules.get("torch._dynamo.compiled_autograd")
    if compiler is not None and compiler.in_compiled_autograd_region:
        raise InvalidState(
            "gradients cannot be reduced under compiled autograd. Set "
            "torch._dynamo.config.compiled_autograd = False"
        )


def refuse_methods(owner: type, instead: Mapping[str, str]) -> None:
    """Define methods of torch's class that raise, by name, with what to do instead."""
    for name, advice in instead.items():
        setattr(owner, name, partialmethod(_refuse, name, advice))


def _refuse(_: object, name: str, advice: str, *_args: Any, **_kwargs: Any) -> NoReturn:
    raise InvalidState(
        f"{name}() works on internals of torch's DDP that phalanx does not have. Instead, {advice}"
    )


def active_module() -> Any:
    return getattr(_thread, "module", None)


class ActiveModule(AbstractContextManager[None]):
    """Makes a module the active one in the body, for the compiler too."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def __enter__(self) -> None:
        self._before = active_module()
        _thread.module = self._module
        # torch has one attribute for all threads, so only the main thread sets it.
        is_main = threading.current_thread() is threading.main_thread()
        self._is_reported = bool(_excluded_packages) and is_main
        if self._is_reported:
            self._others = TorchDDP._active_ddp_module
            TorchDDP._active_ddp_module = self._module

    def __exit__(self, *_: object) -> None:
        _thread.module = self._before
        if self._is_reported:
            TorchDDP._active_ddp_module = self._others


ENV_VARS = (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "CUDA_VISIBLE_DEVICES",
)  # fmt: skip
ENV_PREFIXES = ("PHALANX_", "GLOO_", "NCCL_", "TORCH_NCCL_")


def _find_tensors(obj: Any) -> Iterable[Tensor]:
    """List the tensors in a nested structure, in order, without those of a remote owner."""
    return list(find_tensors(obj))


def _tree_flatten_with_rref(output: Any) -> tuple[list[Any], TreeSpec, bool]:
    """Flatten a structure, or the local value of an RRef; the last result is whether it was one."""
    is_rref = is_remote_reference(output)
    leaves, spec = tree_flatten(output.local_value() if is_rref else output)
    return leaves, spec, is_rref


def _tree_unflatten_with_rref(
    output: Sequence[Any], treespec: TreeSpec, output_is_rref: bool
) -> Any:
    """Rebuild the structure, or an RRef to it."""
    value = tree_unflatten(output, treespec)
    return torch.distributed.rpc.RRef(value) if output_is_rref else value


def _dump_DDP_relevant_env_vars() -> None:  # noqa: N802 - torch's name
    """Print the environment variables that groups and engines read."""
    found = [name for name in sorted(os.environ) if name.startswith(ENV_PREFIXES)]
    for name in (*ENV_VARS, *found):
        sys.stdout.write(f"env:{name}={os.environ.get(name, 'N/A')}\n")


class _DDPSink(torch.autograd.Function):
    """Passes tensors through; a gradient for them starts a backward pass of the wrapped module."""

    @staticmethod
    def forward(ctx: Any, ddp_weakref: Any, *inputs: Any) -> Any:
        ctx.set_materialize_grads(False)
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
