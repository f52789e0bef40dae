"""What a reducer asks of autograd: which run is under way and within which other one, whether it
makes gradients of ours, and not to record.
"""

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

__all__ = ["Accumulators", "OuterRun", "node_of", "this_run", "without_graph"]


class Accumulators:
    """The nodes of autograd that fill ``.grad`` of some parameters."""

    def __init__(self, parameters: Sequence[Parameter]) -> None:
        self._parameters = parameters

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
            return bool(torch._C._will_engine_execute_node(self._node(i)))
        except RuntimeError:  # as above
            return False

    def _all(self) -> Iterator[Any]:
        """Yield the nodes; most often the first is all it takes."""
        for i, parameter in enumerate(self._parameters):
            if parameter.requires_grad:
                yield self._node(i)

    def _node(self, i: int) -> Any:
        return node_of(self._parameters[i])


def node_of(parameter: Parameter) -> Any:
    """Return the node that fills ``.grad`` now; a change of type makes autograd use another."""
    return torch.autograd.graph.get_gradient_edge(whole(parameter)).node


def this_run() -> int | None:
    """Tell the number of the run of autograd that calls us; None outside of one."""
    number = torch._C._current_graph_task_id()
    return None if number == -1 else number


class OuterRun:
    """The outermost of several runs of autograd within each other.

    A checkpoint of the reentrant kind runs autograd in its backward. A pass that is first seen in
    there is part of the outer run, and ends with it. The function is on the stack then, and what it
    passes gradients to is what the outer run comes to next. Where the stack does not tell (threads
    that autograd starts for deep recursion), the inner run is all that is known.
    """

    def __init__(self, next_node: Any, frame: FrameType) -> None:
        self.next_node = next_node
        """A node that runs next in it."""
        self._frame = frame

    @staticmethod
    def find() -> OuterRun | None:
        """Find the run around the one that calls us; None if that is in no other."""
        function, outermost = None, None
        for frame in _stack():
            if frame.f_code is _PYTHON_BACKWARD:
                function, outermost = frame.f_locals["self"], frame
            elif function is not None and frame.f_code is _RUN_BACKWARD:
                outermost = frame
        if function is None or outermost is None:
            return None
        if not Variable._execution_engine.is_checkpoint_valid():
            return None  # it may end in some nodes only, and not come to the next
        following = (node for node, _ in function.next_functions if node is not None)
        node = next(following, None)
        return None if node is None else OuterRun(node, outermost)

    def is_under_way(self) -> bool | None:
        """Tell whether it has not ended; None if it has, for whatever reason."""
        return True if self._frame in _stack() else None


def _stack() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        yield frame
        frame = frame.f_back


_PYTHON_BACKWARD = torch.autograd.function.BackwardCFunction.apply.__code__
"""What autograd calls for a function that is written in Python."""
_RUN_BACKWARD = getattr(
    getattr(torch.autograd.graph, "_engine_run_backward", None), "__code__", None
)
"""What runs autograd, in the thread that asks for it."""


def without_graph() -> AbstractContextManager[object]:
    """Have autograd record nothing in the body; in a plain backward pass it does not anyway."""
    return torch.no_grad() if torch.is_grad_enabled() else _NOTHING


_NOTHING = nullcontext()
