"""An optimizer around another one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ...errors import InvalidType

__all__ = ["WrappingOptimizer"]


class WrappingOptimizer(Optimizer):
    """Passes on what an optimizer is asked; schedulers and scalers take it for one.

    A `GradScaler` leaves out a step in which it has found what is not finite. Where gradients are a
    rank's own, that may be so on one rank alone, and the others would wait for it after theirs. So
    it is asked to call every step, as it does with optimizers that scale themselves: it says what
    it has found by two attributes, which are there during the call.
    """

    _step_supports_amp_scaling = True
    found_inf: Tensor
    """Not zero if there are gradients that are not finite."""
    grad_scale: Tensor | None
    """What gradients have yet to be divided by."""

    def __init__(self, optim: Optimizer) -> None:
        # Not Optimizer's own: parameters and state are those of the optimizer inside.
        if not isinstance(optim, Optimizer):
            raise InvalidType(f"optim is an Optimizer, not {type(optim).__name__}")
        self.optim = optim
        """The optimizer inside."""
        self.defaults = optim.defaults

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The parameters of the optimizer inside."""
        return self.optim.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The state of the optimizer inside."""
        return self.optim.state

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.optim!r})"

    def __getstate__(self) -> dict[str, Any]:
        return vars(self)

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Take a step of the optimizer inside, and do what is to be done after it, always."""
        given = () if closure is None else (closure,)
        if not hasattr(self, "found_inf"):
            loss = self.optim.step(*given)
            self.after_step()
            return loss
        try:
            loss = self._scaled_step(*given)
            self.after_step()
        except BaseException:
            # The scaler takes them away after the call, unless that raises.
            del self.found_inf, self.grad_scale
            raise
        return loss

    def _scaled_step(self, *given: Callable[[], float]) -> float | None:
        """Take the step for a scaler, or leave it out."""
        if getattr(self.optim, "_step_supports_amp_scaling", False):
            inside: Any = self.optim
            inside.found_inf, inside.grad_scale = self.found_inf, self.grad_scale
            try:
                return inside.step(*given)  # type: ignore[no-any-return]
            finally:
                del inside.found_inf, inside.grad_scale
        if self.found_inf.item():
            return None
        if self.grad_scale is not None:
            _unscale(self.param_groups, self.grad_scale)
        return self.optim.step(*given)

    def after_step(self) -> None:
        """Do what is to be done after a step."""
        raise NotImplementedError

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients."""
        self.optim.zero_grad(set_to_none=set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters to the optimizer inside."""
        self.optim.add_param_group(param_group)


@torch.no_grad()
def _unscale(groups: Iterable[dict[str, Any]], scale: Tensor) -> None:
    """Divide gradients by a scale."""
    inverse = scale.double().reciprocal().float()
    for parameter in (each for group in groups for each in group["params"]):
        if parameter.grad is not None:
            parameter.grad.mul_(inverse.to(parameter.grad.device))
