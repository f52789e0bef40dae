"""The block around a loop whose number of steps is not the same on every rank."""

from __future__ import annotations

import sys
import time
import weakref
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Any, Self

import torch.distributed as dist
from torch.distributed.algorithms.join import Joinable
from torch.optim import Optimizer

from ..errors import (
    CollectiveTimeout,
    GroupError,
    InvalidArgument,
    InvalidType,
    RankMismatch,
    UnevenInputs,
    Unprepared,
)
from ..groups import ProcessGroup
from ._joinable import _JoinConfig
from ._leaving import Leaving
from ._optimizers import Bystanders, share_state
from ._report import JoinReport
from ._shadowing import Meeting, Shadowing, begin_step, warn_of_skew

__all__ = ["Join"]

TORCHS_WORDS = "Detected at least one rank that exhausted inputs"


class Join:
    """Let ranks run out of data at different steps.

    A rank that comes to the end of the block leaves the group, and sleeps until all others are
    there, too. Where a joinable or its group cannot do with fewer ranks, it runs the joinables'
    main hooks instead, in order, for each step that others still make. In the end everybody is a
    member, and the post hooks are run. `kwargs` go to every `join_hook`.

    Ranks that stop early make fewer optimizer steps. Pass `optimizers`, and in the end their state
    is that of a rank which had data to the end, as the model is.

    With `throw_on_early_termination` uneven inputs are an error on all ranks. With `enable=False`
    the block does nothing.

    An exception in the block passes, and no hook runs. The others would wait for this rank until
    their deadline, so its group is aborted if it is one of ours: they raise `GroupAborted`, which
    names this rank.
    """

    report: JoinReport | None = None
    """What happened, when the block is over."""

    def __init__(
        self,
        joinables: Iterable[Joinable],
        enable: bool = True,
        throw_on_early_termination: bool = False,
        *,
        optimizers: Iterable[Optimizer] = (),
        **kwargs: Any,
    ) -> None:
        self._joinables = list(joinables)
        if not self._joinables:
            raise InvalidArgument("Join has nothing to join: pass at least one joinable")
        for joinable in self._joinables:
            if not hasattr(joinable, "join_hook"):
                raise InvalidType(f"{type(joinable).__name__} is no Joinable: it has no join_hook")
        self._optimizers = _checked(optimizers)
        for joinable in self._joinables:
            self._optimizers += getattr(joinable, "join_optimizers", ())
        self._join_hooks = [joinable.join_hook(**kwargs) for joinable in self._joinables]
        self._enable = enable
        self._throw = throw_on_early_termination
        self._meeting = Meeting(_only_group(self._joinables), self._joinables[0].join_device)
        self._way = self._choose_way()
        self._bystanders = Bystanders(self._joinables, [*self._optimizers, *self._joinables])
        self._before: list[tuple[Any, Join | None]] = []
        self._steps, self._is_driven = 0, False
        self._is_open = self._has_thrown = False

    def _choose_way(self) -> Leaving | Shadowing:
        group = self._meeting.group
        can_leave = all(getattr(each, "can_leave", False) for each in self._joinables)
        if isinstance(group, ProcessGroup) and can_leave and not self._throw:
            return Leaving(group)
        return Shadowing(self._meeting, self._join_hooks, throws=self._throw)

    @property
    def leaves(self) -> bool:
        """Tell whether ranks that have run out of data leave, so that nothing is shadowed."""
        return self._enable and isinstance(self._way, Leaving)

    def __enter__(self) -> Self:
        self._before = [(_config_of(each), _block_of(each)) for each in self._joinables]
        self._is_open, self._has_thrown = True, False
        self._configure()
        self._steps, self._is_driven = 0, False
        if self._enable:
            self._number = _count_block(self._meeting.group)
            self._bystanders.watch()
        self._began = time.perf_counter()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._bystanders.stop()
        try:
            if self._enable and self._is_over(value):
                self._see_others_off()
            elif value is not None:
                self._part_with_others(value)
        except BaseException as error:  # of a hook, or while this rank waited
            self._part_with_others(error)
            raise
        finally:
            self._is_open = False
            for joinable in self._joinables:
                if _block_of(joinable) is self:  # and not in one that was entered later
                    _place(joinable, *self._place_before(joinable))

    def _place_before(self, joinable: Joinable) -> tuple[Any, Join | None]:
        """Tell where a joinable was before, and still is: blocks need not end in order."""
        config, block = self._before[self._joinables.index(joinable)]
        if block is None or block._is_open:
            return config, block
        return block._place_before(joinable)

    def _is_over(self, error: BaseException | None) -> bool:
        """Tell whether this rank has ended between two steps, on purpose.

        A generator around the block ends like this when its loop is left with ``break``.
        """
        if isinstance(error, GeneratorExit):
            is_in_step = any(getattr(each, "is_in_step", False) for each in self._joinables)
            return not (is_in_step or self._is_lost())
        return error is None

    def _is_lost(self) -> bool:
        """Tell whether there is nobody to see off: something was raised that ended it all."""
        group = self._meeting.group
        has_failed = isinstance(group, ProcessGroup) and group.failure() is not None
        return sys.is_finalizing() or self._has_thrown or has_failed

    def _configure(self, *, is_over: bool = False) -> None:
        """Tell the joinables where they are; when this rank's data are over, to say nothing."""
        for place, joinable in enumerate(self._joinables):
            config = _JoinConfig(
                enable=self._enable,
                throw_on_early_termination=self._throw,
                is_first_joinable=place == 0 and not is_over,
            )
            _place(joinable, config, self)

    # -- steps -----------------------------------------------------------------------------

    def drive(self) -> None:
        """Begin a step here, and have joinables begin none: a loop knows better what a step is."""
        self._is_driven = True
        self._steps += 1
        self._way.begin_step()

    def _begin_step(self) -> dist.Work | None:
        if self._is_driven:
            return None
        self._steps += 1
        try:
            return self._way.begin_step()
        except UnevenInputs:
            self._has_thrown = True
            raise

    @staticmethod
    def notify_join_context(joinable: Joinable) -> dist.Work | None:
        """Say that this rank has data; a joinable does so before its first collective of a step.

        What the first joinable gets, where ranks without data shadow, is the call by which ranks
        with data are counted; the others get None.
        """
        config = getattr(joinable, "_join_config", None)
        if config is None:
            raise Unprepared(
                f"the constructor of {type(joinable).__name__} must call Joinable.__init__(self)"
            )
        if not (config.enable and config.is_first_joinable):
            return None
        block = _block_of(joinable)
        if block is not None:
            return block._begin_step()
        meeting = Meeting(_group_of(joinable), joinable.join_device)  # in a Join of torch's
        return begin_step(meeting, throws=config.throw_on_early_termination)

    # -- the end ---------------------------------------------------------------------------

    def _see_others_off(self) -> None:
        # A hook may well be the joinable's own step, which would say that there is data here.
        self._configure(is_over=True)
        seconds = time.perf_counter() - self._began
        made_up = self._way.see_others_off()
        report = self._compare([self._number, self._steps, made_up, seconds])
        rank = self._meeting.group.rank()
        behind = max(report.steps) - report.steps[rank]
        if self.leaves:  # who shadows has said so meanwhile
            warn_of_skew(behind, rank)
        for hook in self._join_hooks:
            hook.post_hook(not behind)
        if len(set(report.steps)) > 1:
            for optimizer in self._optimizers:
                share_state(optimizer, self._meeting, root=report.last_joiners[-1])
            self._bystanders.warn()
        self.report = report

    def _compare(self, mine: Sequence[float]) -> JoinReport:
        """Learn how it went on all ranks, which have all come to the end of the same block."""
        rows = self._meeting.gather(mine)
        numbers = [int(row[0]) for row in rows]
        if len(set(numbers)) > 1:
            raise RankMismatch(
                f"ranks have come to the end of different joins of their group (by rank, counted "
                f"from the first: {numbers}). A join inside of another one's loop cannot end on a "
                "rank that has no data for the outer one: put both around the same loop",
                group=getattr(self._meeting.group, "label", ""),
            )
        return JoinReport.of([(int(steps), int(made_up), s) for _, steps, made_up, s in rows])

    def _part_with_others(self, error: BaseException) -> None:
        """End the group, so that nobody waits for this rank, unless everybody raises anyway."""
        group = self._meeting.group
        if not (self._enable and isinstance(group, ProcessGroup)) or self._is_lost():
            return
        if isinstance(error, GeneratorExit):
            group.abort("its loop was left in the middle of a step")
        elif not self._is_raised_by_all(error, group):
            group.abort(f"{type(error).__name__} was raised in its join: {error}")

    def _is_raised_by_all(self, error: BaseException, group: ProcessGroup) -> bool:
        if self._throw and _is_of_uneven_inputs(error):
            return True
        # A mismatch, say, that all who took part have found. Who sleeps has not.
        is_of_group = isinstance(error, GroupError) and error.group == group.label
        return (
            is_of_group
            and not isinstance(error, CollectiveTimeout)
            and len(group.members) == group.size()
        )


_blocks: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()


def _count_block(group: dist.ProcessGroup) -> int:
    number = _blocks[group] = _blocks.get(group, 0) + 1
    return number


def _checked(optimizers: Iterable[Optimizer]) -> list[Optimizer]:
    optimizers = list(optimizers)
    for optimizer in optimizers:
        if not isinstance(optimizer, Optimizer):
            raise InvalidType(f"optimizers are torch's, not {type(optimizer).__name__}")
    return optimizers


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


def _block_of(joinable: Joinable) -> Join | None:
    block: Join | None = getattr(joinable, "_join_block", None)
    return block


def _place(joinable: Any, config: Any, block: Join | None) -> None:
    joinable._join_config, joinable._join_block = config, block


def _is_of_uneven_inputs(error: BaseException) -> bool:
    return isinstance(error, RuntimeError) and (
        isinstance(error, UnevenInputs) or TORCHS_WORDS in str(error)
    )
