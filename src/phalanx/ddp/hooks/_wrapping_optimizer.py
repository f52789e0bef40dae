"""An optimizer around another one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

from ...errors import InvalidType

__all__ = ["WrappingOptimizer"]


class WrappingOptimizer(Optimizer):
    """Passes on what an optimizer is asked; schedulers and scalers take it for one."""

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
        """Take a step of the optimizer inside, and do what is to be done after it."""
        loss = self.optim.step() if closure is None else self.optim.step(closure)
        self.after_step()
        return loss

    def after_step(self) -> None:
        """Do what is to be done after a step."""
        raise NotImplementedError

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients."""
        self.optim.zero_grad(set_to_none=set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters to the optimizer inside."""
        self.optim.add_param_group(param_group)
