"""What the ranks' gradients become together: their mean, their sum, or a mean by weight."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ._buckets import Bucket
from ._channel import Channel, Handle
from ._header import NO_DATA, NO_WEIGHT, Header

__all__ = ["Hooked", "Mean", "MeanOfShares", "Scale", "Sum", "WeightedMean", "WithoutData"]


class Scale:
    """How gradients are scaled on the way into a reduction and out of it."""

    weight = NO_WEIGHT
    """What this rank's header says."""
    factor = 1.0
    """What this rank's gradients are multiplied with on their way into a bucket."""
    adds_new = True
    """Whether gradients of the pass count; if not, those from before it still do."""

    def start(self, channel: Channel, payload: Tensor) -> Handle:
        """Start the reduction."""
        raise NotImplementedError

    def after(self, buckets: Sequence[Bucket], header: Header) -> None:
        """Scale the buckets when all are reduced and every rank's weight is known."""

    def waits_for_header(self, bucket: Bucket) -> bool:
        """Tell whether `after` may change what a bucket holds."""
        del bucket
        return True

    def unscaled(self, part: Tensor) -> Tensor:
        """Scale one gradient that was reduced by itself."""
        return part

    def times(self, header: Header) -> float:
        """Tell by how much a mean over the ranks would have to be multiplied instead."""
        del header
        return 1.0


class EvenMean(Scale):
    """Every rank counts the same."""

    def __init__(self, channel: Channel, *, divides_by_all: bool | None) -> None:
        self._channel = channel
        self._divides_by_all = divides_by_all
        """Whether ranks without data count too, as ranks whose gradients are zero; None if none are
        without data, but some may have left."""

    def waits_for_header(self, bucket: Bucket) -> bool:
        if bucket.payload.is_sparse or self._divides_by_all is False:
            return True
        return not self._divides_by_all and len(self._channel.members()) < self._channel.size

    def times(self, header: Header) -> float:
        if self._divides_by_all:
            return 1.0
        return self._channel.size / max(1, len(header.with_data()))


class Mean(EvenMean):
    """The group divides, which is free where it adds up by itself."""

    _present = 1  # how many ranks took part, where it was not the group that divided

    def start(self, channel: Channel, payload: Tensor) -> Handle:
        return channel.sum(payload) if payload.is_sparse else channel.mean(payload)

    def after(self, buckets: Sequence[Bucket], header: Header) -> None:
        sparse = [bucket for bucket in buckets if bucket.payload.is_sparse]
        if sparse:  # which engines add up only
            self._present = len(header.with_data())
        for bucket in sparse:
            bucket.scale(1 / self._present)

    def unscaled(self, part: Tensor) -> Tensor:
        return part / self._present if part.is_sparse else part


class MeanOfShares(EvenMean):
    """Gradients are divided while they are copied, which is free."""

    def __init__(self, channel: Channel, *, divides_by_all: bool | None) -> None:
        super().__init__(channel, divides_by_all=divides_by_all)
        self.factor = 1 / channel.size
        self._times = 1.0

    def start(self, channel: Channel, payload: Tensor) -> Handle:
        return channel.sum(payload)

    def after(self, buckets: Sequence[Bucket], header: Header) -> None:
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

    def start(self, channel: Channel, payload: Tensor) -> Handle:
        return channel.sum(payload)

    def waits_for_header(self, bucket: Bucket) -> bool:
        del bucket
        return False

    def times(self, header: Header) -> float:
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

    def start(self, channel: Channel, payload: Tensor) -> Handle:
        return channel.sum(payload)

    def after(self, buckets: Sequence[Bucket], header: Header) -> None:
        self._total = sum(header.weights())
        for bucket in buckets:
            bucket.scale(self._share)

    @property
    def _share(self) -> float:
        return self._unit / self._total if self._total else 0.0

    def unscaled(self, part: Tensor) -> Tensor:
        return part * self._share

    def times(self, header: Header) -> float:
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

    def start(self, channel: Channel, payload: Tensor) -> Handle:
        return self._plain.start(channel, payload)

    def after(self, buckets: Sequence[Bucket], header: Header) -> None:
        self._choose(header)
        self._theirs.after(buckets, header)

    def unscaled(self, part: Tensor) -> Tensor:
        return self._theirs.unscaled(part)

    def times(self, header: Header) -> float:
        self._choose(header)
        return self._theirs.times(header)

    def _choose(self, header: Header) -> None:
        self._theirs = self._weighted if any(header.weights()) else self._plain


class Hooked(Scale):
    """A hook makes the mean; what is more than that is done before and after it."""

    def __init__(self, wanted: Scale, size: int) -> None:
        self._wanted = wanted
        self._size = size
        self._times = 1.0
        self.weight, self.factor, self.adds_new = wanted.weight, wanted.factor, wanted.adds_new

    def start(self, channel: Channel, payload: Tensor) -> Handle:
        return channel.sum(payload) if payload.is_sparse else channel.mean(payload)

    def after(self, buckets: Sequence[Bucket], header: Header) -> None:
        self._times = self._wanted.times(header)
        if self._times != 1:
            for bucket in buckets:
                bucket.scale(self._times)

    def waits_for_header(self, bucket: Bucket) -> bool:
        return not isinstance(self._wanted, EvenMean) or self._wanted.waits_for_header(bucket)

    def unscaled(self, part: Tensor) -> Tensor:
        return part * (self._times / self._size if part.is_sparse else self._times)
