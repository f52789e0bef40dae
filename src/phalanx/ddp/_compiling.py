"""How the wrapper and ``torch.compile`` get along.

The compiler takes over every Python function that runs below the one it was asked to compile. In
the wrapper's own there is nothing to compile: they talk to a group and to autograd. So they run as
they are, and the compiler begins with the module that is wrapped.

A compiled graph makes its gradients all at once, when its backward is over, and nothing could be
reduced before that. torch's compiler knows how to divide a graph where buckets are full, for a
module that its own data-parallel class says is running. It is told of ours in the same way.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
from torch._C import _distributed_c10d as c10d
from torch.nn.parallel import DistributedDataParallel as TorchsClass

from ..errors import InvalidState

__all__ = [
    "Inside",
    "cap_for_compiler",
    "compilable",
    "keep_compiler_out",
    "not_compiled",
    "refuse_compiled_backward",
    "running",
]

Function = TypeVar("Function", bound=Callable[..., Any])

_here = threading.local()  # as ranks may be threads
_told: set[str] = set()  # what the compiler knows of us


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
def keep_compiler_out() -> None:
    """Have the compiler, if there is one, leave all functions of this package alone."""
    if not _told and "torch._dynamo" in sys.modules:
        package = __name__.partition(".")[0]
        torch._dynamo.trace_rules.add(package)
        _told.add(package)


def compilable(module: Callable[..., Any]) -> Callable[..., Any]:
    """Return what to call so that the compiler, if it is at work, compiles a module.

    It passes over functions of torch's, such as the forward of a Sequential, unless one that it
    compiles calls them.
    """
    if not _told or not torch._C._dynamo.eval_frame.get_eval_frame_callback():
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


def running() -> Any:
    """Return the module whose forward pass this thread is in."""
    return getattr(_here, "module", None)


class Inside(AbstractContextManager[None]):
    """Has a module be the one that runs in the body; for the compiler, too."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def __enter__(self) -> None:
        self._before = running()
        _here.module = self._module
        # Torch has one place for all threads. If several wrote there, it might be left wrong.
        self._tells = bool(_told) and threading.current_thread() is threading.main_thread()
        if self._tells:
            self._others = TorchsClass._active_ddp_module
            TorchsClass._active_ddp_module = self._module

    def __exit__(self, *_: object) -> None:
        _here.module = self._before
        if self._tells:
            TorchsClass._active_ddp_module = self._others


def cap_for_compiler(cap: int) -> int:
    """Tell after how many bytes of parameters the compiler divides a graph.

    It takes no less than the size of its own first bucket.
    """
    return max(cap, c10d._DEFAULT_FIRST_BUCKET_BYTES)
