"""The buckets of some parameters: the plan made real, with storage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import Parameter

from ._buckets import Bucket, DenseBucket, Piece, SparseBucket
from ._channel import Channel
from ._header import Header
from ._plan import BucketPlan, Caps, Delay, Shape, plan_buckets

__all__ = ["Arrangement", "Arranger"]


@dataclass(frozen=True)
class Arrangement:
    """Where the gradients of all parameters go."""

    buckets: list[Bucket]
    pieces: list[Piece]
    """Of all buckets, in order."""
    header: Header

    def with_storage(self) -> list[Parameter]:
        """List the parameters whose values fit where their gradients go."""
        return [parameter for bucket in self._spacious() for parameter in bucket.parameters]

    def broadcast_values(self, channel: Channel, root: int) -> None:
        """Give every rank one rank's values of these parameters."""
        with torch.no_grad():
            for bucket in self._spacious():
                bucket.broadcast_through(
                    lambda flat: channel.broadcast(flat, root).wait(), is_root=channel.rank == root
                )

    def _spacious(self) -> list[DenseBucket]:
        dense = (bucket for bucket in self.buckets if isinstance(bucket, DenseBucket))
        return [bucket for bucket in dense if bucket.holds_values and bucket.members]


@dataclass(frozen=True)
class Arranger:
    """Arranges parameters, given what stays the same while their order changes."""

    channel: Channel
    caps: Caps
    sparse: frozenset[str]
    """The names of parameters whose gradients are sparse."""
    delay: Delay
    dtype: torch.dtype | None
    """What floating-point gradients are reduced in, if not in their own type."""

    def arrange(self, named: Sequence[tuple[str, Parameter]], order: Sequence[int]) -> Arrangement:
        """Make the buckets for gradients that come in this order."""
        shapes = [self._shape(*each) for each in named]
        after = self.delay.place([name for name, _ in named])
        plans = plan_buckets(shapes, order, self.caps, after=after)
        room = {"size": self.channel.size, "parameters": len(named), "buckets": len(plans)}
        extras = [0] * (len(plans) - 1) + [Header.room(**room)]
        parameters = [parameter for _, parameter in named]
        buckets = [
            self._make(number, plan, parameters, extra)
            for number, (plan, extra) in enumerate(zip(plans, extras, strict=True))
        ]
        last = buckets[-1]
        assert isinstance(last, DenseBucket), "the plan ends with a bucket that carries the header"
        header = Header(last.extra, rank=self.channel.rank, **room)
        return Arrangement(buckets, [piece for b in buckets for piece in b.pieces], header)

    def _shape(self, name: str, p: Parameter) -> Shape:
        is_sparse = name in self.sparse
        is_cast = p.dtype.is_floating_point and not is_sparse
        dtype = self.dtype if self.dtype is not None and is_cast else p.dtype
        return Shape(p.numel(), dtype, p.device, is_sparse, name in self.delay.names)

    def _make(
        self, number: int, plan: BucketPlan, parameters: Sequence[Parameter], extra: int
    ) -> Bucket:
        if plan.is_sparse:
            return SparseBucket(number, plan, parameters)
        return DenseBucket(number, plan, parameters, self.channel.allocate, extra=extra)
