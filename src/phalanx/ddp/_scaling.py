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

import torch
from torch import Tensor
from torch.nn import Parameter

from ..errors import InvalidArgument
from ._buckets import Bucket
from ._communicator import AnyWork, Communicator
from ._dtensor import LocalShard
from ._pass_header import NO_DATA, NO_WEIGHT, PassHeader


class Scale:
    """How gradients are scaled on the way into a reduction and out of it. By itself: a sum."""

    weight = NO_WEIGHT
    """This rank's weight in the header."""
    factor = 1.0
    """This rank's gradients are multiplied by it when they are copied into a bucket."""
    adds_new = True
    """Whether gradients of the pass count; if not, those from before it still do."""
    group_divides = False
    """Whether the group takes the mean of dense payloads. Engines only sum sparse ones."""

    def start(self, comm: Communicator, payload: Tensor) -> AnyWork:
        """Start the reduction."""
        if self.group_divides and not payload.is_sparse:
            return comm.mean(payload)
        return comm.sum(payload)

    def finish(self, buckets: Sequence[Bucket], header: PassHeader) -> None:
        """Scale the buckets when all are reduced and every rank's weight is known."""

    def waits_for_header(self, bucket: Bucket) -> bool:
        """Whether `finish` may change what a bucket holds."""
        del bucket
        return True

    def finish_one(self, part: Tensor) -> Tensor:
        """Scale a gradient that was reduced by itself after `finish`."""
        return part

    def mean_factor(self, header: PassHeader) -> float:
        """Return what a mean over the ranks must be multiplied by to give the same result."""
        del header
        return 1.0


class UnweightedMean(Scale):
    """Every rank counts the same."""

    def __init__(
        self, comm: Communicator, *, divide_by_initial_world_size: bool | None, group_divides: bool
    ) -> None:
        self._comm = comm
        self._divide_by_initial_world_size = divide_by_initial_world_size
        """Whether ranks without data count, with zero gradients. None if no rank is without data,
        but some may have left."""
        self.group_divides = group_divides
        """If not, gradients are divided while they are copied, which is free."""
        self.factor = 1.0 if group_divides else 1 / comm.size
        self._dense_factor = self._sparse_factor = 1.0

    def waits_for_header(self, bucket: Bucket) -> bool:
        if bucket.payload.is_sparse or self._divide_by_initial_world_size is False:
            return True
        return not self._divide_by_initial_world_size and (
            len(self._comm.members()) < self._comm.size
        )

    def mean_factor(self, header: PassHeader) -> float:
        if self._divide_by_initial_world_size:
            return 1.0
        return self._comm.size / max(1, len(header.with_data()))

    def finish(self, buckets: Sequence[Bucket], header: PassHeader) -> None:
        if not self.group_divides:
            self._dense_factor = self._sparse_factor = self.mean_factor(header)
        elif any(bucket.payload.is_sparse for bucket in buckets):
            self._sparse_factor = 1 / len(header.with_data())
        for bucket in buckets:
            factor = self._factor_of(bucket.payload)
            if factor != 1:
                bucket.scale(factor)

    def finish_one(self, part: Tensor) -> Tensor:
        return part * self._factor_of(part)

    def _factor_of(self, payload: Tensor) -> float:
        return self._sparse_factor if payload.is_sparse else self._dense_factor


class Sum(Scale):
    """Gradients are added up."""

    def __init__(self, size: int) -> None:
        self._size = size

    def waits_for_header(self, bucket: Bucket) -> bool:
        del bucket
        return False

    def mean_factor(self, header: PassHeader) -> float:
        del header
        return self._size


class WeightedMean(Scale):
    """Every rank counts by its number of samples, or whatever its loss is a mean over."""

    def __init__(self, factor: float, weight: float, *, unit: float, adds_new: bool) -> None:
        self._unit = unit
        self.factor = factor / unit
        """The weight of this rank's last pass that had one, in units."""
        self.weight = weight
        """The sum of this rank's weights since the last reduction."""
        self.adds_new = adds_new
        self._total = 0.0

    def finish(self, buckets: Sequence[Bucket], header: PassHeader) -> None:
        self._total = sum(header.weights())
        for bucket in buckets:
            bucket.scale(self._share)

    @property
    def _share(self) -> float:
        return self._unit / self._total if self._total else 0.0

    def finish_one(self, part: Tensor) -> Tensor:
        return part * self._share

    def mean_factor(self, header: PassHeader) -> float:
        weights = header.weights()
        self._total = sum(weights)
        return self._share * len(weights)


class WithoutData(Scale):
    """This rank contributes nothing. The header tells it how the others have scaled."""

    weight = NO_DATA

    def __init__(self, unweighted: Scale, *, unit: float) -> None:
        self._unweighted = unweighted
        self._weighted = WeightedMean(0.0, 0.0, unit=unit, adds_new=False)
        self._theirs = unweighted
        self.group_divides = unweighted.group_divides

    def finish(self, buckets: Sequence[Bucket], header: PassHeader) -> None:
        self._choose(header)
        self._theirs.finish(buckets, header)

    def finish_one(self, part: Tensor) -> Tensor:
        return self._theirs.finish_one(part)

    def mean_factor(self, header: PassHeader) -> float:
        self._choose(header)
        return self._theirs.mean_factor(header)

    def _choose(self, header: PassHeader) -> None:
        self._theirs = self._weighted if any(header.weights()) else self._unweighted


class HookScale(Scale):
    """A hook takes the mean; the rest is done before and after it."""

    group_divides = True  # of what is reduced without the hook

    def __init__(self, wanted: Scale, size: int) -> None:
        self._wanted = wanted
        self._size = size
        self._factor = 1.0
        self.weight, self.factor, self.adds_new = wanted.weight, wanted.factor, wanted.adds_new

    def finish(self, buckets: Sequence[Bucket], header: PassHeader) -> None:
        self._factor = self._wanted.mean_factor(header)
        if self._factor != 1:
            for bucket in buckets:
                bucket.scale(self._factor)

    def waits_for_header(self, bucket: Bucket) -> bool:
        return not isinstance(self._wanted, UnweightedMean) or self._wanted.waits_for_header(bucket)

    def finish_one(self, part: Tensor) -> Tensor:
        return part * (self._factor / self._size if part.is_sparse else self._factor)


MIN_WEIGHT, MAX_WEIGHT = 1e-9, 1e15
"""Gradients are multiplied by weights and their quotients. Beyond these bounds the products would
overflow or vanish."""


class LossWeights:
    """The weights of one rank since the last reduction."""

    def __init__(self) -> None:
        self._current: float | None = None
        self._last: float | None = None
        self._sum = 0.0
        self._sum_before = 0.0  # before the last pass
        self.unit: float | None = None
        """Gradients are multiplied by their weight in this unit, which is the same on every rank.

        Unless it is close to the sum of all weights, narrow dtypes overflow or lose digits."""

    @property
    def current(self) -> float | None:
        """The weight of the following passes; None to weigh all ranks equally."""
        return self._current

    @current.setter
    def current(self, weight: float | None) -> None:
        if weight is not None:
            weight = float(weight)
            if weight and not MIN_WEIGHT <= weight <= MAX_WEIGHT:  # NaN is not, either
                raise InvalidArgument(
                    f"weight must be 0 or between {MIN_WEIGHT:g} and {MAX_WEIGHT:g}, "
                    f"got {weight:g}. Only ratios matter: scale the weights of all ranks equally"
                )
        self._current = weight

    @property
    def is_counting(self) -> bool:
        """Whether there were passes with a weight since the last reduction."""
        return self._last is not None

    @property
    def pending_total(self) -> float:
        """The sum of weights when the pass that begins is over."""
        return self._sum + (self._current or 0.0)

    def agree(self, weights: Sequence[float]) -> None:
        """Choose the unit, given the weights of all ranks."""
        if any(weights):
            self.unit = sum(weights)

    def accumulate(self, parameters: Sequence[Parameter]) -> None:
        """Count the current weight, before autograd adds to the gradients of a pass."""
        weight = self._current
        self._sum_before = self._sum
        if not weight:
            return
        if self._last is not None and self._last != weight:
            _scale_gradients(parameters, self._last / weight)
        self._last = weight
        self._sum += weight

    def scale(self, parameters: Sequence[Parameter]) -> WeightedMean:
        """Return the scale of what is accumulated at the end of the pass that begins."""
        weight = self._current
        assert weight is not None
        self.accumulate(parameters)
        return WeightedMean(
            self._last or 0.0, self._sum, unit=self.unit or 1.0, adds_new=weight > 0
        )

    def undo_last_pass(self, *, keeps_gradients: bool) -> None:
        """Undo the last pass, which failed.

        If the gradients from before it still exist, they have been scaled to the pass's weight, so
        that weight stays the last one.
        """
        self._sum = self._sum_before if keeps_gradients else 0.0
        if not keeps_gradients:
            self._last = None

    def clear(self) -> None:
        """Start again after a reduction."""
        self._last, self._sum = None, 0.0


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


OVERFLOW_PRONE_DTYPES = (torch.float16,)
"""Dtypes that would overflow if a gradient were multiplied by the number of tokens in a batch."""


class ScaleSelector:
    """Chooses the scale of each pass: mean or sum, weighted or not, with a hook, in a join."""

    def __init__(self, comm: Communicator, reduce: str) -> None:
        self._comm = comm
        self.adds_up = reduce == "sum"
        self.weights = LossWeights()
        self.has_hook = False
        self.divide_by_initial_world_size: bool | None = None
        """Whether ranks without data count in a mean. None outside of a join, where ranks that
        left the group do not count."""
        self._unweighted: Scale | None = None
        self._made_for: tuple[bool, bool | None] | None = None

    @property
    def unweighted(self) -> Scale:
        """The scale of gradients that have no weight."""
        made_for = self.has_hook, self.divide_by_initial_world_size
        if self._unweighted is None or self._made_for != made_for:
            self._unweighted, self._made_for = self._make_unweighted(), made_for
        return self._unweighted

    def _make_unweighted(self) -> Scale:
        if self.adds_up:
            return Sum(self._comm.size)
        # A hook divides. In a join no group may: a rank without data does not know whether the
        # others use weights, and must make the same call.
        is_join = self.divide_by_initial_world_size is not None
        return UnweightedMean(
            self._comm,
            divide_by_initial_world_size=self.divide_by_initial_world_size,
            group_divides=self.has_hook or (self._comm.shares_memory and not is_join),
        )

    def scale(self, parameters: Sequence[Parameter], *, may_overflow: bool) -> Scale:
        """Choose the scale of the pass that begins."""
        if self.weights.current is None:
            return self._wrap_for_hook(self.unweighted)
        # In a join, ranks without data do not reach this call; the unit is agreed on before.
        if may_overflow and (
            self.weights.unit is None or self.divide_by_initial_world_size is None
        ):
            total = self.weights.pending_total
            card = torch.tensor([total], dtype=torch.float64, device=self._comm.device)
            self.weights.unit = sum(part.item() for part in self._comm.gather(card)) or 1.0
        return self._wrap_for_hook(self.weights.scale(parameters))

    def without_data(self) -> Scale:
        """Choose the scale of a pass to which this rank contributes nothing."""
        return self._wrap_for_hook(WithoutData(self.unweighted, unit=self.weights.unit or 1.0))

    def _wrap_for_hook(self, scale: Scale) -> Scale:
        return HookScale(scale, self._comm.size) if self.has_hook else scale
