"""A backward pass that nobody reduces."""

from __future__ import annotations

from ._channel import Channel, Handle

__all__ = ["LocalPass"]


class LocalPass:
    """A backward pass whose gradients stay on this rank for now."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    def arrived(self, i: int) -> None:
        """Take no notice of a gradient."""

    def ready(self, number: int) -> None:
        """Take no notice of a bucket."""

    def abandon(self) -> None:
        """End without an end."""

    def finish(self) -> Handle | None:
        """Tell peers, where that is free: one that reduces this pass must not be left waiting."""
        return self._channel.announce() if self._channel.sees_calls else None
