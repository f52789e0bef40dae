"""Gradients that are in ``.grad`` when a backward pass begins.

*Reduced* gradients, which nobody has zeroed, are the same on every rank. In a plain mean each rank
brings its share of them to the sum, which leaves them as they are. Where ranks count by weight, or
may leave, the shares do not add up to one: then reduced gradients are kept apart, and added when
the pass is over. If local passes are added to them first (`no_sync`), a copy is kept, to be
subtracted from what is reduced in the end.

*Local* gradients stand for what this rank has processed, unless the user has zeroed them since.
Both forms of `zero_grad` leave a trace: no gradient, or one that was written to and is zero.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from ..errors import InvalidState
from ._local_part import local, whole

__all__ = ["PreviousGrads"]


class _Left(NamedTuple):
    """A gradient as a local pass has left it."""

    parameter: Parameter
    gradient: Tensor
    version: int

    def is_untouched(self) -> bool:
        now = whole(self.parameter).grad
        return now is self.gradient and now._version == self.version

    def is_dropped(self) -> bool:
        now = whole(self.parameter).grad
        return now is None or not (self.is_untouched() or _has_values(now))


class PreviousGrads:
    """What of the gradients from before a pass is reduced already, and what is there no more."""

    def __init__(self) -> None:
        self._reduced: dict[Parameter, Tensor] = {}
        self._left: list[_Left] = []
        self._is_known = True
        """Whether the last local pass came to its end."""

    def __bool__(self) -> bool:
        """Whether there are reduced gradients that must not be reduced again."""
        return bool(self._reduced)

    def keep_reduced(self, parameters: Sequence[Parameter]) -> None:
        """Keep a copy of the gradients that there are, before local ones are added to them."""
        gradients = ((p, p.grad) for p in parameters)
        self._reduced = {
            p: g.detach().clone() for p, g in gradients if g is not None and _has_values(g)
        }

    def take_off(self, parameters: Sequence[Parameter]) -> None:
        """Keep the gradients that there are, and leave none."""
        self.keep_reduced(parameters)
        for parameter in self._reduced:
            parameter.grad = None

    def subtract(self) -> None:
        """Leave in ``.grad`` what is not reduced yet."""
        _add(self._reduced, alpha=-1)

    def add(self) -> None:
        """Add what was kept to what is in ``.grad``."""
        _add(self._reduced, alpha=1)

    @contextmanager
    def subtracted(self) -> Generator[None, None, None]:
        """Have only local gradients in ``.grad`` in the body."""
        self.subtract()
        yield
        self.add()

    def note_local(self, parameters: Sequence[Parameter]) -> None:
        """Note what a local pass has left, to notice what becomes of it."""
        held = ((p, whole(p).grad) for p in parameters)
        self._left = [_Left(p, g, g._version) for p, g in held if g is not None]
        self._is_known = True

    def note_failure(self) -> None:
        """Note that a local pass raised: nobody knows how far it came."""
        self._is_known = False

    def forget_dropped(self) -> bool:
        """Forget gradients that were zeroed after the last local pass; tell whether all were."""
        kept = []
        for left in self._left:
            if not left.is_dropped():
                kept.append(left)
            else:
                self._reduced.pop(left.parameter, None)
        has_dropped_all = bool(self._left) and not kept
        if self._is_known and any(
            left.parameter in self._reduced and not left.is_untouched() for left in kept
        ):
            raise InvalidState(
                "gradients were changed after a backward pass in no_sync() had added to reduced "
                "ones, so the part that is reduced already cannot be told from the rest: call "
                "zero_grad() before accumulating, or change gradients after they are reduced"
            )
        return has_dropped_all

    def clear(self) -> None:
        """Forget everything: the gradients have been reduced, or are gone."""
        self._reduced, self._left, self._is_known = {}, [], True


def _has_values(gradient: Tensor) -> bool:
    """Tell whether a gradient is not zero everywhere."""
    part = local(gradient)
    if part.is_sparse:
        part = part._values()
    return bool(part.count_nonzero())


def _add(kept: dict[Parameter, Tensor], *, alpha: int) -> None:
    with torch.no_grad():
        for parameter, old in kept.items():
            if parameter.grad is None:
                parameter.grad = old if alpha == 1 else -old
            elif parameter.grad.is_sparse or old.is_sparse:
                parameter.grad = parameter.grad + alpha * old
            else:
                parameter.grad.add_(old, alpha=alpha)
