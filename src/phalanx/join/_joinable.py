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
    """What a rank without data does in place of a joinable's steps; by default nothing."""

    def main_hook(self) -> None:
        """Shadow the collectives of one step of the joinable."""

    def post_hook(self, is_last_joiner: bool) -> None:
        """Run after the last step; `is_last_joiner`: no rank had data for longer."""


class _JoinConfig(NamedTuple):
    """The configuration that a `Join` gives its joinables."""

    enable: bool
    throw_on_early_termination: bool
    is_first_joinable: bool
    """Only the first joinable makes the collectives of the protocol."""

    @staticmethod
    def construct_disabled_join_config() -> _JoinConfig:
        """Return the configuration outside of any `Join`."""
        return _JoinConfig(enable=False, throw_on_early_termination=False, is_first_joinable=False)


class Joinable(upstream.Joinable):
    """An object that makes collectives in every step, and provides a hook that shadows them.

    It must call `Join.notify_join_context` before the first collective of a step.
    """

    @abstractmethod
    def __init__(self) -> None:
        super().__init__()
        self._join_config: Any = _JoinConfig.construct_disabled_join_config()
        self._join_block: Any = None  # the `Join` of ours that it is in

    @abstractmethod
    def join_hook(self, **kwargs: Any) -> upstream.JoinHook:
        """Return the hook; `kwargs` are those of the `Join`, the same for all its joinables."""

    @property
    @abstractmethod
    def join_device(self) -> torch.device:
        """The device for the protocol's tensors."""

    @property
    @abstractmethod
    def join_process_group(self) -> Any:
        """The group of the collectives."""

    @property
    def can_leave(self) -> bool:
        """Whether steps are correct after ranks have left the group.

        If all joinables can leave and the group supports it, ranks without data leave. Then
        `JoinHook.main_hook` is not called; `post_hook` is.
        """
        return False

    @property
    def is_in_step(self) -> bool:
        """Whether a step has begun and not made all its collectives."""
        return False

    @property
    def join_optimizers(self) -> Sequence[Optimizer]:
        """Optimizers of the joinable, whose state is to be taken from a last joiner."""
        return ()
