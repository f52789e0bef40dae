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
    """How gradients are scaled on the way into a reduction and out of it."""

    weight = NO_WEIGHT
    """What this rank's header says."""
    factor = 1.0
    """What this rank's gradients are multiplied with on their way into a bucket."""
    adds_new = True
    """Whether gradients of the pass count; if not, those from before it still do."""

    def start(self, channel: Communicator, payload: Tensor) -> AnyWork:
        """Start the reduction."""
        raise NotImplementedError

    def after(self, buckets: Sequence[Bucket], header: PassHeader) -> None:
        """Scale the buckets when all are reduced and every rank's weight is known."""

    def waits_for_header(self, bucket: Bucket) -> bool:
        """Tell whether `after` may change what a bucket holds."""
        del bucket
        return True

    def unscaled(self, part: Tensor) -> Tensor:
        """Scale one gradient that was reduced by itself."""
        return part

    def times(self, header: PassHeader) -> float:
        """Tell by how much a mean over the ranks would have to be multiplied instead."""
        del header
        return 1.0


class UnweightedMean(Scale):
    """Every rank counts the same."""

    def __init__(self, channel: Communicator, *, divides_by_all: bool | None) -> None:
        self._channel = channel
        self._divides_by_all = divides_by_all
        """Whether ranks without data count too, as ranks whose gradients are zero; None if none are
        without data, but some may have left."""

    def waits_for_header(self, bucket: Bucket) -> bool:
        if bucket.payload.is_sparse or self._divides_by_all is False:
            return True
        return not self._divides_by_all and len(self._channel.members()) < self._channel.size

    def times(self, header: PassHeader) -> float:
        if self._divides_by_all:
            return 1.0
        return self._channel.size / max(1, len(header.with_data()))


class Mean(UnweightedMean):
    """The group divides, which is free where it adds up by itself."""

    _present = 1  # how many ranks took part, where it was not the group that divided

    def start(self, channel: Communicator, payload: Tensor) -> AnyWork:
        return channel.sum(payload) if payload.is_sparse else channel.mean(payload)

    def after(self, buckets: Sequence[Bucket], header: PassHeader) -> None:
        sparse = [bucket for bucket in buckets if bucket.payload.is_sparse]
        if sparse:  # which engines add up only
            self._present = len(header.with_data())
        for bucket in sparse:
            bucket.scale(1 / self._present)

    def unscaled(self, part: Tensor) -> Tensor:
        return part / self._present if part.is_sparse else part


class PredividedMean(UnweightedMean):
    """Gradients are divided while they are copied, which is free."""

    def __init__(self, channel: Communicator, *, divides_by_all: bool | None) -> None:
        super().__init__(channel, divides_by_all=divides_by_all)
        self.factor = 1 / channel.size
        self._times = 1.0

    def start(self, channel: Communicator, payload: Tensor) -> AnyWork:
        return channel.sum(payload)

    def after(self, buckets: Sequence[Bucket], header: PassHeader) -> None:
        self._times = self.times(header)
        if self._times != 1:
            for bucket in buckets:
                bucket.scale(self._times)

    def unscaled(self, part: Tensor) -> Tensor:
        return part * self._times


class Sum(Scale):
    """Gradients are added up."""

    def __init__(self, size: int) -> None:
        self._size = size

    def start(self, channel: Communicator, payload: Tensor) -> AnyWork:
        return channel.sum(payload)

    def waits_for_header(self, bucket: Bucket) -> bool:
        del bucket
        return False

    def times(self, header: PassHeader) -> float:
        del header
        return self._size


class WeightedMean(Scale):
    """Every rank counts by its samples, or whatever the loss of a rank is a mean over."""

    def __init__(self, factor: float, weight: float, *, unit: float, adds_new: bool) -> None:
        self._unit = unit
        self.factor = factor / unit
        """The weight of this rank's last pass that had one, in units."""
        self.weight = weight
        """What they stand for together, since gradients were reduced last."""
        self.adds_new = adds_new
        self._total = 0.0

    def start(self, channel: Communicator, payload: Tensor) -> AnyWork:
        return channel.sum(payload)

    def after(self, buckets: Sequence[Bucket], header: PassHeader) -> None:
        self._total = sum(header.weights())
        for bucket in buckets:
            bucket.scale(self._share)

    @property
    def _share(self) -> float:
        return self._unit / self._total if self._total else 0.0

    def unscaled(self, part: Tensor) -> Tensor:
        return part * self._share

    def times(self, header: PassHeader) -> float:
        weights = header.weights()
        self._total = sum(weights)
        return self._share * len(weights)


class WithoutData(Scale):
    """This rank brings nothing, and learns from the header what the others have brought."""

    weight = NO_DATA

    def __init__(self, plain: Scale, *, unit: float) -> None:
        self._plain = plain
        self._weighted = WeightedMean(0.0, 0.0, unit=unit, adds_new=False)
        self._theirs = plain

    def start(self, channel: Communicator, payload: Tensor) -> AnyWork:
        return self._plain.start(channel, payload)

    def after(self, buckets: Sequence[Bucket], header: PassHeader) -> None:
        self._choose(header)
        self._theirs.after(buckets, header)

    def unscaled(self, part: Tensor) -> Tensor:
        return self._theirs.unscaled(part)

    def times(self, header: PassHeader) -> float:
        self._choose(header)
        return self._theirs.times(header)

    def _choose(self, header: PassHeader) -> None:
        self._theirs = self._weighted if any(header.weights()) else self._plain


class HookScale(Scale):
    """A hook makes the mean; what is more than that is done before and after it."""

    def __init__(self, wanted: Scale, size: int) -> None:
        self._wanted = wanted
        self._size = size
        self._times = 1.0
        self.weight, self.factor, self.adds_new = wanted.weight, wanted.factor, wanted.adds_new

    def start(self, channel: Communicator, payload: Tensor) -> AnyWork:
        return channel.sum(payload) if payload.is_sparse else channel.mean(payload)

    def after(self, buckets: Sequence[Bucket], header: PassHeader) -> None:
        self._times = self._wanted.times(header)
        if self._times != 1:
            for bucket in buckets:
                bucket.scale(self._times)

    def waits_for_header(self, bucket: Bucket) -> bool:
        return not isinstance(self._wanted, UnweightedMean) or self._wanted.waits_for_header(bucket)

    def unscaled(self, part: Tensor) -> Tensor:
        return part * (self._times / self._size if part.is_sparse else self._times)


SMALLEST, LARGEST = 1e-9, 1e15
"""Bounds of a weight. Gradients are multiplied by weights and by their quotients, which would
overflow, or leave nothing, beyond these."""


class LossWeights:
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
    def pending_total(self) -> float:
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
            _scale_gradients(parameters, self._last / weight)
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

    def undo_last_pass(self, *, keeps_gradients: bool) -> None:
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


def _scale_gradients(parameters: Sequence[Parameter], factor: float) -> None:
    """Multiply the gradients that there are."""
    held = []
    with torch.no_grad():
        for parameter in parameters:
            gradient = parameter.grad
            if gradient is not None and isinstance(parameter, LocalShard):
                parameter.grad = gradient * factor  # what it shows may be a copy
            elif gradient is not None:
                held.append(gradient)
        if held:
            torch._foreach_mul_(held, factor)


OVERFLOW_PRONE_DTYPES = (torch.float16,)
"""Types that would overflow, were a gradient multiplied by the number of tokens in a batch."""


class ScaleSelector:
    """What is asked for: a mean or a sum, by weight or not, by a hook or not, in a join or not."""

    def __init__(self, channel: Communicator, reduce: str) -> None:
        self._channel = channel
        self.adds_up = reduce == "sum"
        self.weights = LossWeights()
        self.has_hook = False
        self.divides_by_all: bool | None = None
        """Whether ranks without data count in a mean; None outside of a join, where whoever has
        left the group does not."""

        self._plain = self._make_unweighted()
        self._made_for = self._cache_key()

    @property
    def plain(self) -> Scale:
        """The scale of gradients that have no weight."""
        situation = self._cache_key()
        if self._made_for != situation:
            self._plain, self._made_for = self._make_unweighted(), situation
        return self._plain

    def _cache_key(self) -> tuple[bool, bool | None]:
        return self.has_hook, self.divides_by_all

    def _make_unweighted(self) -> Scale:
        if self.adds_up:
            return Sum(self._channel.size)
        # A hook divides by itself. A rank without data does not know whether others have weights,
        # so that in a join everybody adds up.
        shares = self.divides_by_all is not None or not self._channel.shares_memory
        kind = PredividedMean if shares and not self.has_hook else Mean
        return kind(self._channel, divides_by_all=self.divides_by_all)

    def scale(self, parameters: Sequence[Parameter], *, is_narrow: bool) -> Scale:
        """Choose the scale of the pass that begins."""
        weight = self.weights.current
        if weight is None:
            return self._wrap_for_hook(self.plain)
        # In a join, ranks without data take no part in this: there the unit is told before.
        if is_narrow and (self.weights.unit is None or self.divides_by_all is None):
            total = self.weights.pending_total
            card = torch.tensor([total], dtype=torch.float64, device=self._channel.device)
            self.weights.unit = sum(part.item() for part in self._channel.gather(card)) or 1.0
        return self._wrap_for_hook(self.weights.scale(parameters))

    def without_data(self) -> Scale:
        """Choose the scale of a pass to which this rank contributes nothing."""
        return self._wrap_for_hook(WithoutData(self.plain, unit=self.weights.unit or 1.0))

    def _wrap_for_hook(self, scale: Scale) -> Scale:
        return HookScale(scale, self._channel.size) if self.has_hook else scale
