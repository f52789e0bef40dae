"""The block around a loop whose number of steps is not the same on every rank."""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType
from typing import Any, Self

import torch.distributed as dist
from torch.distributed.algorithms.join import Joinable

from ..errors import GroupError, InvalidArgument, InvalidType, UnevenInputs, Unprepared
from ..groups import ProcessGroup
from ._joinable import _JoinConfig
from ._shadowing import Meeting, shadow

__all__ = ["Join"]

TORCHS_WORDS = "Detected at least one rank that exhausted inputs"


class Join:
    """Let ranks run out of data at different steps.

    A rank that comes to the end of the block runs the joinables' main hooks, in order, for each
    step that others still make, then the post hooks. `kwargs` go to every `join_hook`.

    With `throw_on_early_termination` uneven inputs are an error on all ranks. With `enable=False`
    the block does nothing.

    An exception in the block passes, and no hook runs. The others would wait for this rank until
    their deadline, so its group is aborted if it is one of ours: they raise `GroupAborted`, which
    names this rank.
    """

    def __init__(
        self,
        joinables: Iterable[Joinable],
        enable: bool = True,
        throw_on_early_termination: bool = False,
        **kwargs: Any,
    ) -> None:
        self._joinables = list(joinables)
        if not self._joinables:
            raise InvalidArgument("Join has nothing to join: pass at least one joinable")
        for joinable in self._joinables:
            if not hasattr(joinable, "join_hook"):
                raise InvalidType(f"{type(joinable).__name__} is no Joinable: it has no join_hook")
        self._join_hooks = [joinable.join_hook(**kwargs) for joinable in self._joinables]
        self._enable = enable
        self._throw = throw_on_early_termination
        self._meeting = Meeting(_only_group(self._joinables), self._joinables[0].join_device)
        self._before = [_config_of(joinable) for joinable in self._joinables]
        self._configure()

    def __enter__(self) -> Self:
        self._configure()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            if self._enable and value is None:
                self._see_off_others()
            elif value is not None:
                self._part_with_others(value)
        except Exception as error:  # of a hook
            self._part_with_others(error)
            raise
        finally:
            for joinable, config in zip(self._joinables, self._before, strict=True):
                joinable._join_config = config

    def _configure(self, *, is_over: bool = False) -> None:
        """Tell the joinables where they are; when this rank's data are over, to say nothing."""
        for place, joinable in enumerate(self._joinables):
            joinable._join_config = _JoinConfig(
                enable=self._enable,
                throw_on_early_termination=self._throw,
                is_first_joinable=place == 0 and not is_over,
            )

    def _see_off_others(self) -> None:
        # A hook may well be the joinable's own step, which would say that there is data here.
        self._configure(is_over=True)
        is_last = shadow(self._meeting, self._join_hooks, throw=self._throw)
        for hook in self._join_hooks:
            hook.post_hook(is_last)

    def _part_with_others(self, error: BaseException) -> None:
        """End the group, so that nobody waits for this rank, unless everybody raises anyway."""
        if not self._enable:
            return
        all_raise = isinstance(error, GroupError) or (self._throw and _is_of_uneven_inputs(error))
        group = self._meeting.group
        if isinstance(group, ProcessGroup) and isinstance(error, Exception) and not all_raise:
            group.abort()

    @staticmethod
    def notify_join_context(joinable: Joinable) -> dist.Work | None:
        """Say that this rank has data; a joinable does so before its first collective of a step.

        What the first joinable gets is the call by which ranks with data are counted; the others
        get None.
        """
        config = getattr(joinable, "_join_config", None)
        if config is None:
            raise Unprepared(
                f"the constructor of {type(joinable).__name__} must call Joinable.__init__(self)"
            )
        if not (config.enable and config.is_first_joinable):
            return None
        meeting = Meeting(_group_of(joinable), joinable.join_device)
        work = meeting.say_active()
        if config.throw_on_early_termination:
            meeting.ask_whether_all_go_on()
        return work


def _only_group(joinables: list[Joinable]) -> dist.ProcessGroup:
    first = _group_of(joinables[0])
    for place, joinable in enumerate(joinables):
        other = _group_of(joinable)
        if other is not first and other != first:
            raise InvalidArgument(
                f"joinables of one Join are on one group; {type(joinable).__name__} (number "
                f"{place}) is on another than {type(joinables[0]).__name__}"
            )
    return first


def _group_of(joinable: Joinable) -> dist.ProcessGroup:
    """Tell a joinable's group; None is torch's default group, as it is to torch."""
    group = joinable.join_process_group
    if group is None:
        group = dist.group.WORLD
    if not isinstance(group, dist.ProcessGroup):
        raise InvalidArgument(f"{type(joinable).__name__} is on no group that this rank is in")
    return group


def _config_of(joinable: Joinable) -> Any:
    return getattr(joinable, "_join_config", _JoinConfig.construct_disabled_join_config())


def _is_of_uneven_inputs(error: BaseException) -> bool:
    return isinstance(error, RuntimeError) and (
        isinstance(error, UnevenInputs) or TORCHS_WORDS in str(error)
    )
