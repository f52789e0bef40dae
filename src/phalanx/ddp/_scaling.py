"""Scaling of gradients around a reduction: mean, sum, or mean weighted by samples.

A `Scale` says what gradients are multiplied by when they are copied into a bucket and after it
is reduced. `ScaleSelector` chooses the scale of each pass.

Weighted means: a rank accumulates `.grad = sum(w_j * g_j) / w`, with w the weight of its latest
pass. While the weight stays the same, autograd does that by itself; when it changes, the
existing gradients are scaled once. Multiplied by w and summed over ranks, this is the gradient
of all samples times the sum of all weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import Parameter

from ._buckets import Bucket
from ._communicator import AnyWork, Communicator
from ._dtensor import LocalShard
from ._pass_header import NO_DATA, NO_WEIGHT, PassHeader

OVERFLOW_PRONE_DTYPES = (torch.float16,)
"""Dtypes that would overflow if a gradient were multiplied by the number of tokens in a batch."""


@dataclass
class Scale:
    """How gradients are scaled on the way into the reduction of one pass and out of it."""

    comm: Communicator
    is_sum: bool  # whether the result is a sum, unless ranks have weights
    has_hook: bool  # whether a hook reduces the payloads. Hooks take the mean.
    divide_by_initial_world_size: bool | None
    factor: float = 1.0
    """This rank's gradients are multiplied by it when they are copied into a bucket."""
    weight: float = NO_WEIGHT
    """This rank's weight in the header: the sum of its weights since the last reduction."""
    unit: float = 1.0  # the unit of weights; see `LossWeights`
    uses_new_gradients: bool = True
    """Whether gradients of the pass count; if not, those from before it still do."""
    group_divides: bool = False
    """Whether the group takes the mean of dense payloads. Engines only sum sparse ones."""
    _dense_factor: float = 1.0
    _sparse_factor: float = 1.0

    def start(self, payload: Tensor) -> AnyWork:
        if self.group_divides and not payload.is_sparse:
            return self.comm.mean(payload)
        return self.comm.sum(payload)

    def finish(self, buckets: Sequence[Bucket], header: PassHeader) -> None:
        """Scale the buckets when all are reduced and every rank's weight is known."""
        size = self.comm.size
        # A rank without data learns from the header whether the others use weights.
        if self.weight >= 0 or (self.weight == NO_DATA and any(header.weights())):
            total = sum(header.weights())
            share = self.unit / total if total else 0.0
            after = share * size if self.has_hook else share
        elif self.is_sum:
            after = size if self.has_hook else 1.0
        elif self.group_divides or self.divide_by_initial_world_size:
            after = 1.0
        else:
            after = size / max(1, len(header.with_data()))
        self._dense_factor = self._sparse_factor = after
        if self.group_divides and any(bucket.payload.is_sparse for bucket in buckets):
            self._sparse_factor = 1 / len(header.with_data())
        for bucket in buckets:
            factor = self._sparse_factor if bucket.payload.is_sparse else self._dense_factor
            if factor != 1:
                bucket.scale(factor)

    def finish_one(self, part: Tensor) -> Tensor:
        """Scale a gradient that was reduced by itself after `finish`."""
        return part * (self._sparse_factor if part.is_sparse else self._dense_factor)

    def waits_for_header(self, bucket: Bucket) -> bool:
        """Whether `finish` may change what a bucket holds."""
        if self.weight != NO_WEIGHT:
            return True
        if self.is_sum:
            return self.has_hook
        if bucket.payload.is_sparse or self.divide_by_initial_world_size is False:
            return True
        left = len(self.comm.members()) < self.comm.size
        return left and not self.divide_by_initial_world_size


class LossWeights:
    """The weights of one rank since the last reduction."""

    def __init__(self) -> None:
        self.current: float | None = None
        """The weight of the following passes; None to weigh all ranks equally."""
        self.last: float | None = None
        """The weight of the last pass that had one; gradients are accumulated relative to it."""
        self.total = 0.0
        self._total_before = 0.0  # before the last pass
        self.unit: float | None = None
        """Gradients are multiplied by their weight in this unit, which is the same on every rank.

        Unless it is close to the sum of all weights, narrow dtypes overflow or lose digits."""

    def accumulate(self, parameters: Sequence[Parameter]) -> None:
        """Count the current weight, before autograd adds to the gradients of a pass."""
        weight = self.current
        self._total_before = self.total
        if not weight:
            return
        if self.last is not None and self.last != weight:
            _scale_gradients(parameters, self.last / weight)
        self.last = weight
        self.total += weight

    def undo_last_pass(self) -> None:
        """Undo a local pass that failed; gradients from before it stay scaled to its weight."""
        self.total = self._total_before

    def clear(self) -> None:
        self.last, self.total = None, 0.0


def _scale_gradients(parameters: Sequence[Parameter], factor: float) -> None:
    gradients = []
    with torch.no_grad():
        for parameter in parameters:
            gradient = parameter.grad
            if gradient is not None and isinstance(parameter, LocalShard):
                parameter.grad = gradient * factor  # `gradient` may be a copy
            elif gradient is not None:
                gradients.append(gradient)
        if gradients:
            torch._foreach_mul_(gradients, factor)


class ScaleSelector:
    """Chooses the scale of each pass: mean or sum, weighted or not, with a hook, in a join."""

    def __init__(self, comm: Communicator, reduce: str) -> None:
        self._comm = comm
        self.is_sum = reduce == "sum"
        self.weights = LossWeights()
        self.has_hook = False
        self.divide_by_initial_world_size: bool | None = None
        """Whether ranks without data count in a mean. None outside of a join, where ranks that
        left the group do not count."""

    def scale(self, parameters: Sequence[Parameter], *, may_overflow: bool) -> Scale:
        """Choose the scale of the pass that begins."""
        weights, is_join = self.weights, self.divide_by_initial_world_size is not None
        scale = self._make()
        if weights.current is None:
            if not self.is_sum and not self.has_hook:
                # In a join no group may divide: a rank without data does not know whether the
                # others use weights, and must make the same call. Dividing while gradients are
                # copied is free.
                scale.group_divides = self._comm.shares_memory and not is_join
                scale.factor = 1.0 if scale.group_divides else 1 / self._comm.size
            return scale
        # In a join, ranks without data do not reach this call; the unit is agreed on before.
        if may_overflow and (weights.unit is None or not is_join):
            total = weights.total + weights.current
            totals = self._comm.gather_numbers([total], torch.float64)
            scale.unit = weights.unit = sum(theirs for (theirs,) in totals) or 1.0
        weights.accumulate(parameters)
        scale.factor = (weights.last or 0.0) / scale.unit
        scale.weight = weights.total
        scale.uses_new_gradients = weights.current > 0
        return scale

    def plain_sum(self) -> Scale:
        """Return the scale of a pass whose gradients are neither multiplied nor divided here."""
        return replace(self._make(), is_sum=True)

    def without_data(self) -> Scale:
        """Choose the scale of a pass to which this rank contributes nothing."""
        return replace(self._make(), weight=NO_DATA)

    def _make(self) -> Scale:
        unit = self.weights.unit or 1.0
        divide = self.divide_by_initial_world_size
        return Scale(self._comm, self.is_sum, self.has_hook, divide, unit=unit)
