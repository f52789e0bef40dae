"""An optimizer that averages models after its steps."""

from __future__ import annotations

import warnings
from typing import Any

from torch.optim import Optimizer

from ...errors import InvalidType
from ._averagers import ModelAverager
from ._wrapping_optimizer import WrappingOptimizer

__all__ = ["PostLocalSGDOptimizer"]


class PostLocalSGDOptimizer(WrappingOptimizer):
    """Takes local steps, and lets an averager average the models after each."""

    def __init__(self, optim: Optimizer, averager: ModelAverager) -> None:
        super().__init__(optim)
        if not callable(getattr(averager, "average_parameters", None)):
            raise InvalidType(f"averager is a ModelAverager, not {type(averager).__name__}")
        self.averager = averager

    def after_step(self) -> None:
        """Average the models, if it is time."""
        self.averager.average_parameters(self.param_groups)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the optimizer inside, and the averager's number of steps."""
        return {**self.optim.state_dict(), "step": self.averager.step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from what was saved; the state of a plain optimizer will do."""
        self.optim.load_state_dict(
            {name: value for name, value in state_dict.items() if name != "step"}
        )
        if "step" not in state_dict:
            warnings.warn(
                "what is loaded does not say how many steps the averager has counted: it begins "
                "at 0, with its warm-up",
                stacklevel=2,
            )
        self.averager.step = state_dict.get("step", 0)
