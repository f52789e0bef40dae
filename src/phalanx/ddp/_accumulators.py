"""What a reducer asks of autograd: whether a run makes gradients of ours, and not to record."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.autograd import Variable
from torch.nn import Parameter

from ._local_part import whole

__all__ = ["Accumulators", "without_graph"]


class Accumulators:
    """The nodes of autograd that fill ``.grad`` of some parameters."""

    def __init__(self, parameters: Sequence[Parameter]) -> None:
        self._parameters = parameters
        self._nodes: dict[int, Any] = {}

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

    def forget(self) -> None:
        """Look for the nodes again: autograd makes others for parameters of another type."""
        self._nodes.clear()

    def _all(self) -> Iterator[Any]:
        """Yield the nodes; most often the first is all it takes."""
        for i, parameter in enumerate(self._parameters):
            if parameter.requires_grad and i not in self._nodes:
                self._nodes[i] = torch.autograd.graph.get_gradient_edge(whole(parameter)).node
            if i in self._nodes:
                yield self._nodes[i]


def without_graph() -> AbstractContextManager[object]:
    """Have autograd record nothing in the body; in a plain backward pass it does not anyway."""
    return torch.no_grad() if torch.is_grad_enabled() else _NOTHING


_NOTHING = nullcontext()
