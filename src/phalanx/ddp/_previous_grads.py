"""Gradients that are in `.grad` when a backward pass begins.

*Reduced* gradients that were not zeroed are equal on every rank. In a plain mean each rank
contributes its share of them, and the reduction leaves them unchanged. Where shares do not add up
to one (sums, weights, ranks that may leave) they are set aside and added after the pass. If local
passes are added first (`no_sync`), a copy is kept and subtracted before the reduction.

*Local* gradients are those of passes in `no_sync`. They count as zeroed if every `.grad` is None,
or if they were nonzero after the last local pass and are all zero now.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from ..errors import InvalidState
from ._dtensor import LocalShard, local_tensor, original_parameter


class PreviousGrads:
    """The part of the previous gradients that is already reduced."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self._reduced: dict[Parameter, Tensor] = {}
        self._local_state: dict[Parameter, tuple[Tensor | None, int]] = {}
        """What a local pass left in ``.grad`` of a parameter in `_reduced`, and its version."""
        self._with_grad: list[Parameter] = []
        """The parameters that had a gradient after the last local pass."""
        self._had_values = False
        self.last_local_pass_finished = True
        """Whether the last local pass finished. If it raised, changes cannot be detected."""

    def __bool__(self) -> bool:
        """Whether there are reduced gradients that must not be reduced again."""
        return bool(self._reduced)

    def copy_reduced(self, parameters: Sequence[Parameter]) -> None:
        """Copy the gradients, before local ones are added to them."""
        self.set_aside(parameters)
        for parameter, value in self._reduced.items():
            # Not the view of a bucket that it was: all views of a bucket share one version.
            parameter.grad = value.clone()

    def set_aside(self, parameters: Sequence[Parameter]) -> None:
        """Copy the gradients, and set `.grad` to None."""
        for parameter in parameters:
            gradient = parameter.grad
            if gradient is not None and _has_values(gradient):
                self._reduced[parameter] = gradient.detach().clone()
                parameter.grad = None

    def add(self, alpha: int = 1) -> None:
        """Add them to ``.grad``; subtracted, they leave there what is not reduced yet."""
        with torch.no_grad():
            for parameter, value in self._reduced.items():
                gradient = parameter.grad
                if gradient is None:
                    parameter.grad = value if alpha == 1 else -value
                elif gradient.is_sparse or value.is_sparse or isinstance(parameter, LocalShard):
                    parameter.grad = gradient + alpha * value
                else:
                    gradient.add_(value, alpha=alpha)

    def record_local_state(self, parameters: Sequence[Parameter]) -> None:
        """Note the gradients that a local pass begins with or has left, to detect changes."""
        self._with_grad = [p for p in parameters if original_parameter(p).grad is not None]
        self._had_values = any(_has_values(p.grad) for p in self._with_grad)
        self._local_state = {p: _state(p) for p in self._reduced}
        self.last_local_pass_finished = True

    def drop_zeroed(self) -> bool:
        """Forget gradients that were zeroed after the last local pass; return whether all were.

        Raises `InvalidState` if they were modified in a way that hides what is already reduced.
        """
        for parameter in [*self._reduced]:
            if not _has_values(parameter.grad):
                del self._reduced[parameter]
            elif self.last_local_pass_finished:
                now, version = _state(parameter)
                before, version_before = self._local_state[parameter]
                if now is not before or version != version_before:
                    raise InvalidState(
                        ".grad was modified after a backward pass in no_sync() added to reduced "
                        "gradients, so the reduced part cannot be separated. Call zero_grad() "
                        "before accumulating, or modify gradients only after they are reduced"
                    )
        if self._had_values:
            return not any(_has_values(p.grad) for p in self._with_grad)
        return bool(self._with_grad) and all(
            original_parameter(p).grad is None for p in self._with_grad
        )


def _state(parameter: Parameter) -> tuple[Tensor | None, int]:
    gradient = original_parameter(parameter).grad
    return gradient, 0 if gradient is None else gradient._version


def _has_values(gradient: Tensor | None) -> bool:
    if gradient is None:
        return False
    part = local_tensor(gradient)
    return bool((part._values() if part.is_sparse else part).count_nonzero())
