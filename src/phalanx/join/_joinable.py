"""Base classes of what can take part in a `Join`: `Joinable`, `JoinHook`, `_JoinConfig`.

They derive from torch's classes of the same names, so that either `Join` accepts either
joinable.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.algorithms import join as upstream
from torch.optim import Optimizer


class JoinHook(upstream.JoinHook):
    """What a rank without data does in place of a joinable's steps; by itself nothing."""

    def main_hook(self) -> None:
        """Make the collectives that the joinable makes in one step on a rank that has data."""

    def post_hook(self, is_last_joiner: bool) -> None:
        """Settle up when nobody has data; `is_last_joiner`: nobody had data for longer."""


class _JoinConfig(NamedTuple):
    """What a joinable knows of the `Join` that it is in."""

    enable: bool
    throw_on_early_termination: bool
    is_first_joinable: bool
    """It makes the collectives of the protocol, and the other joinables none."""

    @staticmethod
    def construct_disabled_join_config() -> _JoinConfig:
        """Make the one of a joinable that is in no `Join`."""
        return _JoinConfig(enable=False, throw_on_early_termination=False, is_first_joinable=False)


class Joinable(upstream.Joinable):
    """Something that makes collectives in every step and can tell how to make up for them.

    Call `Join.notify_join_context` before the first of them in a step. It is one of torch's too, so
    that whatever asks for torch's takes it.
    """

    @abstractmethod
    def __init__(self) -> None:
        super().__init__()
        self._join_config: Any = _JoinConfig.construct_disabled_join_config()
        self._join_block: Any = None  # the `Join` that it is in, if that is one of ours

    @abstractmethod
    def join_hook(self, **kwargs: Any) -> upstream.JoinHook:
        """Make the hook; `kwargs` are those of the `Join`, the same for all its joinables."""

    @property
    @abstractmethod
    def join_device(self) -> torch.device:
        """Tell where the protocol's tensors have to be."""

    @property
    @abstractmethod
    def join_process_group(self) -> Any:
        """Tell the group of the collectives."""

    @property
    def can_leave(self) -> bool:
        """Tell whether its steps are right when ranks leave the group, so that none are shadowed.

        If so for all joinables, ranks that have run out of data leave, where the group lets them;
        `JoinHook.main_hook` is not called then, and `post_hook` is.
        """
        return False

    @property
    def is_in_step(self) -> bool:
        """Tell whether a step has begun here whose collectives are not all made."""
        return False

    @property
    def join_optimizers(self) -> Sequence[Optimizer]:
        """List optimizers of its own, whose state a rank without data falls behind with."""
        return ()
