"""Parameters that are DTensors, sharded over another axis of a mesh.

Data parallelism copies, sends and sums this rank's local shard. Autograd and the optimizer keep
working on the DTensor. `LocalShard` stands in for such a parameter inside the reducer; whatever
is given to users or to autograd must be the parameter itself.
"""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor
from torch.nn import Parameter

from ..groups._torch_integration import from_local, is_dtensor, to_local


class LocalShard:
    """This rank's shard of a parameter, with the attributes of a tensor.

    `grad` is this rank's shard of the gradient; assigning it sets the parameter's gradient.
    """

    def __init__(self, parameter: Any) -> None:
        self.parameter = parameter

    @property
    def grad(self) -> Tensor | None:
        gradient = self.parameter.grad
        if not is_dtensor(gradient):
            return cast("Tensor | None", gradient)
        if gradient.placements != self.parameter.placements:  # a partial sum, for example
            gradient = gradient.redistribute(placements=self.parameter.placements)
        return to_local(gradient)

    @grad.setter
    def grad(self, part: Tensor | None) -> None:
        self.parameter.grad = None if part is None else from_local(part, self.parameter)

    def detach(self) -> Tensor:
        """Return the shard; writing to it changes the parameter."""
        return to_local(self.parameter.detach())

    def __getattr__(self, name: str) -> Any:
        is_of_autograd = name.startswith(("register_", "requires_grad"))
        return getattr(self.parameter if is_of_autograd else self.detach(), name)


def as_local_shard(parameter: Parameter) -> Parameter:
    return cast("Parameter", LocalShard(parameter)) if is_dtensor(parameter) else parameter


def original_parameter(parameter: Parameter) -> Parameter:
    """Return the parameter that autograd knows."""
    return parameter.parameter if isinstance(parameter, LocalShard) else parameter


def local_tensor(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a DTensor, and any other tensor as it is."""
    if isinstance(tensor, LocalShard):
        return tensor.detach()
    return to_local(tensor.detach()) if is_dtensor(tensor) else tensor
