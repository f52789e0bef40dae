"""Parameters that are DTensors, sharded over another axis of a mesh.

Data parallelism copies, sends and sums this rank's local shard. Autograd and the optimizer keep
working on the DTensor. `LocalShard` stands in for such a parameter inside the reducer; whatever
is given to users or to autograd must be the parameter itself.

torch's DTensor module is never imported here, only looked up if somebody else imported it.
"""

from __future__ import annotations

import sys
from typing import Any, cast

from torch import Tensor
from torch.nn import Parameter


def _is_dtensor(tensor: object) -> bool:
    module: Any = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


class LocalShard:
    """This rank's shard of a parameter, with the attributes of a tensor.

    `grad` is this rank's shard of the gradient; assigning it sets the parameter's gradient.
    """

    def __init__(self, parameter: Any) -> None:
        self.parameter = parameter

    @property
    def grad(self) -> Tensor | None:
        gradient = self.parameter.grad
        if gradient is None or not _is_dtensor(gradient):
            return cast("Tensor | None", gradient)
        if gradient.placements != self.parameter.placements:  # a partial sum, for example
            gradient = gradient.redistribute(placements=self.parameter.placements)
        return _wait_if_async(gradient.to_local())

    @grad.setter
    def grad(self, part: Tensor | None) -> None:
        if part is None:
            self.parameter.grad = None
            return
        p = self.parameter
        self.parameter.grad = type(p).from_local(
            part, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride()
        )

    @property
    def requires_grad(self) -> bool:
        return bool(self.parameter.requires_grad)

    def detach(self) -> Tensor:
        """Return the shard; writing to it changes the parameter."""
        return _wait_if_async(self.parameter.detach().to_local())

    def __getattr__(self, name: str) -> Any:
        if name.startswith("register_") or name == "requires_grad_":
            return getattr(self.parameter, name)
        return getattr(self.detach(), name)


def as_local_shard(parameter: Parameter) -> Parameter:
    return cast("Parameter", LocalShard(parameter)) if _is_dtensor(parameter) else parameter


def original_parameter(parameter: Parameter) -> Parameter:
    """Return the parameter that autograd knows."""
    return (
        cast("Parameter", parameter.parameter) if isinstance(parameter, LocalShard) else parameter
    )


def local_tensor(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a DTensor, and any other tensor as it is."""
    if isinstance(tensor, LocalShard):
        return tensor.detach()
    return LocalShard(tensor).detach() if _is_dtensor(tensor) else tensor


def _wait_if_async(part: Any) -> Tensor:
    return cast("Tensor", part.wait() if hasattr(part, "wait") else part)
