"""What a backward pass works with, and what it tells of itself."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch.nn import Parameter

from ._buckets import Bucket, Piece
from ._channel import Channel
from ._comm_hook import CommHook
from ._header import Header

__all__ = ["Setting", "Timing"]


@dataclass(frozen=True)
class Setting:
    """What stays from one pass to the next."""

    channel: Channel
    names: Sequence[str]
    parameters: Sequence[Parameter]
    buckets: Sequence[Bucket]
    pieces: Sequence[Piece]
    """Of all buckets, in order."""
    header: Header
    keeps_views: bool
    """After a pass, ``.grad`` is a view of the bucket, not a tensor of its own."""
    may_show_early: bool
    """``.grad`` may become such a view while autograd is still at work."""
    absent: Sequence[int]
    """How many gradients of each piece did not come in the pass that was learnt from."""
    is_learning: bool
    hook: CommHook | None
    """Reduces the buckets, in the place of the group."""


@dataclass
class Timing:
    """When things happened, in seconds of `time.perf_counter`."""

    since: float
    """The end of the last pass: a moment that is nearly the same for all ranks."""
    forward: float
    """The seconds spent in forward since then."""
    began: float = field(default_factory=time.perf_counter)
    arrivals: list[float] = field(default_factory=list)
    """When each bucket was launched."""
    exposed: float = 0.0
    """The seconds spent in communication while nothing was computed."""
    ended: float = 0.0
