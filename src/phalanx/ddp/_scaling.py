"""Chooses how the gradients of a pass are scaled, by what is in use on this rank."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import Parameter

from ._channel import Channel
from ._scale import Hooked, Mean, MeanOfShares, Scale, Sum, WithoutData
from ._weights import Weights

__all__ = ["NARROW", "Scaling"]

NARROW = (torch.float16,)
"""Types that would overflow, were a gradient multiplied by the number of tokens in a batch."""


class Scaling:
    """What is asked for: a mean or a sum, by weight or not, by a hook or not, in a join or not."""

    def __init__(self, channel: Channel, reduce: str) -> None:
        self._channel = channel
        self.adds_up = reduce == "sum"
        self.weights = Weights()
        self.has_hook = False
        self.divides_by_all: bool | None = None
        """Whether ranks without data count in a mean; None outside of a join, where whoever has
        left the group does not."""

        self._plain = self._make_plain()
        self._made_for = self._situation()

    @property
    def plain(self) -> Scale:
        """The scale of gradients that have no weight."""
        situation = self._situation()
        if self._made_for != situation:
            self._plain, self._made_for = self._make_plain(), situation
        return self._plain

    def _situation(self) -> tuple[bool, bool | None]:
        return self.has_hook, self.divides_by_all

    def _make_plain(self) -> Scale:
        if self.adds_up:
            return Sum(self._channel.size)
        # A hook divides by itself. A rank without data does not know whether others have weights,
        # so that in a join everybody adds up.
        shares = self.divides_by_all is not None or not self._channel.shares_memory
        kind = MeanOfShares if shares and not self.has_hook else Mean
        return kind(self._channel, divides_by_all=self.divides_by_all)

    def scale(self, parameters: Sequence[Parameter], *, is_narrow: bool) -> Scale:
        """Choose the scale of the pass that begins."""
        weight = self.weights.current
        if weight is None:
            return self._around_hook(self.plain)
        # In a join, ranks without data take no part in this: there the unit is told before.
        if is_narrow and (self.weights.unit is None or self.divides_by_all is None):
            total = self.weights.coming
            card = torch.tensor([total], dtype=torch.float64, device=self._channel.device)
            self.weights.unit = sum(part.item() for part in self._channel.gather(card)) or 1.0
        return self._around_hook(self.weights.scale(parameters))

    def without_data(self) -> Scale:
        """Choose the scale of a pass to which this rank contributes nothing."""
        return self._around_hook(WithoutData(self.plain, unit=self.weights.unit or 1.0))

    def _around_hook(self, scale: Scale) -> Scale:
        return Hooked(scale, self._channel.size) if self.has_hook else scale
