"""Gradients by weight: what a rank's gradients stand for, over several passes.

A rank accumulates ``.grad = sum of w_j * g_j / w`` with w the weight of its last pass: as long as
the weight stays the same that is what autograd does by itself, and where it changes, what there is
is scaled once. Multiplied by w and added up over the ranks it is the gradient of everything, times
the sum of all weights.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import Parameter

from ..errors import InvalidArgument
from ._local_part import LocalPart
from ._scale import WeightedMean

__all__ = ["Weights"]

SMALLEST, LARGEST = 1e-9, 1e15
"""Bounds of a weight. Gradients are multiplied by weights and by their quotients, which would
overflow, or leave nothing, beyond these."""


class Weights:
    """The weights of one rank since gradients were reduced last."""

    def __init__(self) -> None:
        self._current: float | None = None
        self._last: float | None = None
        self._sum = 0.0
        self.unit: float | None = None
        """What gradients are divided by while they travel multiplied; the same on every rank.

        If it were not about the sum of all weights, small types would overflow or lose digits."""
        self._before = 0.0  # the sum, before the last pass

    @property
    def current(self) -> float | None:
        """The weight of the passes that follow; None to count every rank the same."""
        return self._current

    @current.setter
    def current(self, weight: float | None) -> None:
        if weight is not None:
            weight = float(weight)
            if weight and not SMALLEST <= weight <= LARGEST:  # nor is NaN
                raise InvalidArgument(
                    f"weight must be 0 or between {SMALLEST:g} and {LARGEST:g}, got {weight:g}. "
                    "Only ratios matter: scale the weights of all ranks by the same factor"
                )
        self._current = weight

    @property
    def is_counting(self) -> bool:
        """Whether there were passes with a weight since gradients were reduced last."""
        return self._last is not None

    @property
    def coming(self) -> float:
        """What gradients will stand for when the pass that begins is over."""
        return self._sum + (self._current or 0.0)

    def agree(self, weights: Sequence[float]) -> None:
        """Choose the unit by what all ranks have said their weights are."""
        if any(weights):
            self.unit = sum(weights)

    def accumulate(self, parameters: Sequence[Parameter]) -> None:
        """Take the current weight into account, before gradients are added to those there are."""
        weight = self._current
        self._before = self._sum
        if not weight:  # none is set, or 0: nothing to count
            return
        if self._last is not None and self._last != weight:
            _scale(parameters, self._last / weight)
        self._last = weight
        self._sum += weight

    def scale(self, parameters: Sequence[Parameter]) -> WeightedMean:
        """Tell how to scale what will have been accumulated at the end of the coming pass."""
        weight = self._current
        assert weight is not None, "asked for by somebody who has set it"
        self.accumulate(parameters)
        return WeightedMean(
            self._last or 0.0, self._sum, unit=self.unit or 1.0, adds_new=weight > 0
        )

    def go_back(self, *, keeps_gradients: bool) -> None:
        """Take back the last pass, which did not come to its end.

        Gradients from before it may be gone. If they are not, they have been scaled to the pass's
        weight, so that stays the one by which to read them.
        """
        self._sum = self._before if keeps_gradients else 0.0
        if not keeps_gradients:
            self._last = None

    def clear(self) -> None:
        """Begin anew: the gradients have been reduced."""
        self._last, self._sum = None, 0.0


def _scale(parameters: Sequence[Parameter], factor: float) -> None:
    """Multiply the gradients that there are."""
    held = []
    with torch.no_grad():
        for parameter in parameters:
            gradient = parameter.grad
            if gradient is not None and isinstance(parameter, LocalPart):
                parameter.grad = gradient * factor  # what it shows may be a copy
            elif gradient is not None:
                held.append(gradient)
        if held:
            torch._foreach_mul_(held, factor)
