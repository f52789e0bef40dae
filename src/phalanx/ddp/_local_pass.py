"""A backward pass that nobody reduces."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import Parameter

from ._channel import Channel, Handle

__all__ = ["LocalPass"]


class LocalPass:
    """A backward pass whose gradients stay on this rank for now.

    `unweighted`: parameters whose gradients are to be what they were, for the pass has weight 0.
    """

    def __init__(self, channel: Channel, unweighted: Sequence[Parameter] = ()) -> None:
        self._channel = channel
        self._before = [(parameter, parameter.grad) for parameter in unweighted]
        for parameter in unweighted:
            parameter.grad = None

    def arrived(self, i: int) -> None:
        """Take no notice of a gradient."""

    def ready(self, number: int) -> None:
        """Take no notice of a bucket."""

    def abandon(self) -> None:
        """End without an end."""
        self._restore()

    def finish(self) -> Handle | None:
        """Tell peers, where that is free: one that reduces this pass must not be left waiting."""
        self._restore()
        return self._channel.announce() if self._channel.sees_calls else None

    def _restore(self) -> None:
        for parameter, before in self._before:
            is_new = before is None and parameter.grad is not None  # used, if for nothing
            parameter.grad = torch.zeros_like(parameter) if is_new else before
