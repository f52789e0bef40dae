"""Backward passes of ``torch.distributed.autograd``, whose gradients are not in ``.grad``.

Such a pass goes through several processes, and keeps the gradients of each in a context of its own
until somebody asks for them. Autograd hands none to ``.grad``, so no hook on a parameter is called.
When the pass is over, the gradients in the context are reduced, all at once, and written back.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable

from ..errors import InvalidState
from ._reducer import Reducer

__all__ = ["on_any_backward"]


def on_any_backward(reducer: Reducer, *, adds_up: bool) -> Callable[[], None]:
    """Return what to call when a backward pass begins from the forward pass that is ending now."""
    context = _context_here()
    if context is None:
        return reducer.begin_from_output
    return ContextPass(reducer, context, adds_up=adds_up).begin


def _context_here() -> int | None:
    """Tell the context that this thread records a forward pass in, if any."""
    rpc: Any = sys.modules.get("torch.distributed.rpc.api")
    if rpc is None or not rpc._is_current_rpc_agent_set():
        return None
    try:
        return torch._C._distributed_autograd._current_context()._context_id()
    except RuntimeError:  # what it says where there is none
        return None


class ContextPass:
    """What comes back from one forward pass that was recorded in a context."""

    def __init__(self, reducer: Reducer, context: int, *, adds_up: bool) -> None:
        self._reducer = reducer
        self._context = context
        self._adds_up = adds_up
        self._has_begun = False

    def begin(self) -> None:
        """Take notice that a backward pass has begun; it comes here from every output."""
        self._reducer.begin_from_output()  # a plain one, perhaps, whatever was recorded
        if self._reducer.is_under_way or self._has_begun or not self._reducer.synchronises:
            return
        self._has_begun = True
        Variable._execution_engine.queue_callback(self._finish)

    def _finish(self) -> None:
        self._has_begun = self._reducer.expects_backward = False
        if self._reducer.hook is not None:
            raise InvalidState(
                f"communication hook {self._reducer.hook.name} reduces gradients that come to "
                "``.grad``, and those of a context of autograd's do not"
            )
        found = torch._C._distributed_autograd.get_gradients(self._context)
        kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = defaultdict(list)
        for parameter in self._reducer.parameters:
            kinds[parameter.dtype, parameter.device].append(parameter)
        with torch.no_grad():
            for parameters in kinds.values():
                self._reduce(parameters, [found.get(each) for each in parameters])

    def _reduce(self, parameters: list[Tensor], gradients: list[Tensor | None]) -> None:
        """Reduce gradients of one type together; who has none counts with zero."""
        if any(gradient is not None and gradient.is_sparse for gradient in gradients):
            raise InvalidState("sparse gradients cannot be reduced in a context of autograd's")
        weight = self._reducer.weights.current
        one = torch.ones(1, dtype=parameters[0].dtype, device=parameters[0].device)
        flat = torch.cat(
            [
                torch.zeros_like(each).reshape(-1) if gradient is None else gradient.reshape(-1)
                for each, gradient in zip(parameters, gradients, strict=True)
            ]
            + [one]
        )
        flat.mul_(1 if weight is None else weight)
        self._reducer.channel.sum(flat).wait()
        total = 1 if self._adds_up and weight is None else flat[-1]
        parts = torch.split(flat[:-1] / total, [each.numel() for each in parameters])
        for gradient, part in zip(gradients, parts, strict=True):
            if gradient is not None:
                gradient.copy_(part.view_as(gradient))
