"""What a reducer asks of autograd: whether a run makes gradients of ours, and not to record."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import FrameType
from typing import Any

import torch
from torch.autograd import Variable
from torch.nn import Parameter

from ._local_part import whole

__all__ = ["Accumulators", "next_in_outer_run", "this_run", "without_graph"]


class Accumulators:
    """The nodes of autograd that fill ``.grad`` of some parameters."""

    def __init__(self, parameters: Sequence[Parameter]) -> None:
        self._parameters = parameters
        self._nodes: dict[int, Any] = {}
        self._kinds: dict[int, tuple[torch.dtype, torch.device]] = {}
        """Types and devices of parameters for which autograd made these nodes."""

    def may_run(self) -> bool:
        """Tell whether the run of autograd that is under way may end in ``.grad`` of ours."""
        if Variable._execution_engine.is_checkpoint_valid():
            # A plain ``backward()``. Where it ends is not known, for checkpoints of the reentrant
            # kind hide parameters; and peers may reach some although this rank reaches none.
            return any(p.requires_grad for p in self._parameters)
        try:
            return any(map(torch._C._will_engine_execute_node, self._all()))
        except RuntimeError:  # what it says where ``autograd.grad`` asks for a leaf
            return False

    def runs(self, i: int) -> bool:
        """Tell whether the run of autograd that has come to a parameter ends in its ``.grad``."""
        try:
            return bool(torch._C._will_engine_execute_node(self._find(i)))
        except RuntimeError:  # as above
            return False

    def _all(self) -> Iterator[Any]:
        """Yield the nodes; most often the first is all it takes."""
        for i, parameter in enumerate(self._parameters):
            if parameter.requires_grad:
                yield self._find(i)

    def _find(self, i: int) -> Any:
        parameter = whole(self._parameters[i])
        kind = parameter.dtype, parameter.device
        if self._kinds.get(i) != kind:  # autograd makes another node when these change
            self._nodes[i] = torch.autograd.graph.get_gradient_edge(parameter).node
            self._kinds[i] = kind
        return self._nodes[i]


def this_run() -> int | None:
    """Tell the number of the run of autograd that calls us; None outside of one."""
    number = torch._C._current_graph_task_id()
    return None if number == -1 else number


def next_in_outer_run() -> Any:
    """Find a node that comes next in the outermost run of autograd; None if we are in no inner one.

    A function whose backward, written in Python, runs autograd itself is on the stack. What it
    passes its gradients to is run after it, by the outer run. Where that cannot be seen (CPU
    threads that autograd starts for deep recursion), the inner run is all that is known.
    """
    found = None
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _PYTHON_BACKWARD:
            found = frame.f_locals["self"]
        frame = frame.f_back
    following = () if found is None else found.next_functions
    return next((node for node, _ in following if node is not None), None)


_PYTHON_BACKWARD = torch.autograd.function.BackwardCFunction.apply.__code__
"""What autograd calls for a function that is written in Python."""


def without_graph() -> AbstractContextManager[object]:
    """Have autograd record nothing in the body; in a plain backward pass it does not anyway."""
    return torch.no_grad() if torch.is_grad_enabled() else _NOTHING


_NOTHING = nullcontext()
