"""`Join` and `uneven`: training loops whose number of steps differs between ranks.

`Join` wraps a loop, `uneven` wraps a loader. A rank that runs out of data either leaves the group
until all ranks are done (`LeaveStrategy`) or shadows the collectives of the others
(`ShadowStrategy`). At the end all ranks are members again, the post hooks run, and ranks compare
the number of the block: nested joins that end on different blocks raise `RankMismatch`.

An exception inside the block aborts the group, unless every rank is known to raise it, so that
no rank waits for the deadline.
"""

from __future__ import annotations

import sys
import time
import weakref
from collections.abc import Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

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
from ._optimizer_broadcast import UntrackedOptimizers, broadcast_optimizer_state
from ._protocol import JoinCollectives, LeaveStrategy, ShadowStrategy, begin_step, warn_about_skew


@dataclass(frozen=True)
class JoinReport:
    """How many steps each rank had data for, and when it had none any more."""

    steps: tuple[int, ...]
    """By rank. If the first joinable is one of torch's own classes, nobody counts the steps that
    all ranks have made, so that they are counted from where the first rank ran out."""
    seconds: tuple[float, ...]
    """By rank: from the block's beginning to the end of this rank's data."""

    @property
    def last_joiners(self) -> tuple[int, ...]:
        """Tell the ranks that nobody had more steps than."""
        most = max(self.steps)
        return tuple(rank for rank, steps in enumerate(self.steps) if steps == most)

    @property
    def idle(self) -> float:
        """Tell the share of all ranks' steps in which they had no data, of 1."""
        whole = max(self.steps) * len(self.steps)
        return 1 - sum(self.steps) / whole if whole else 0.0

    @property
    def idle_time(self) -> float:
        """Tell the share of all ranks' time in which they had no data, of 1."""
        whole = max(self.seconds) * len(self.seconds)
        return 1 - sum(self.seconds) / whole if whole else 0.0

    def __str__(self) -> str:
        ends = dict.fromkeys(self.last_joiners, "to the end")
        lines = [
            f"rank {rank}: {steps} steps, {ends.get(rank, 'out of data')} after {seconds:.2f} s"
            for rank, (steps, seconds) in enumerate(zip(self.steps, self.seconds, strict=True))
        ]
        return "\n".join([*lines, f"idle: {self.idle:.1%} of steps, {self.idle_time:.1%} of time"])

    @classmethod
    def of(cls, rows: Sequence[tuple[int, int, float]]) -> JoinReport:
        """Put together what ranks say: steps with data, steps made up for, and seconds."""
        total = max(steps + behind for steps, behind, _ in rows)
        # Who made up for steps knows how many it missed, even where nobody counts the others.
        shadows = any(behind for _, behind, _ in rows)
        counted = (total - behind if shadows else steps for steps, behind, _ in rows)
        return cls(tuple(counted), tuple(seconds for _, _, seconds in rows))


TORCH_UNEVEN_INPUTS_MESSAGE = "Detected at least one rank that exhausted inputs"


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
        self._optimizers = _check_optimizers(optimizers)
        for joinable in self._joinables:
            self._optimizers += getattr(joinable, "join_optimizers", ())
        self._join_hooks = [joinable.join_hook(**kwargs) for joinable in self._joinables]
        self._enable = enable
        self._throw = throw_on_early_termination
        self._meeting = JoinCollectives(
            _common_group(self._joinables), self._joinables[0].join_device
        )
        self._strategy = self._choose_strategy()
        self._untracked_optimizers = UntrackedOptimizers(
            self._joinables, [*self._optimizers, *self._joinables]
        )
        self._before: list[tuple[Any, Join | None]] = []
        self._steps, self._is_driven = 0, False
        self._is_open = self._has_raised = False

    def _choose_strategy(self) -> LeaveStrategy | ShadowStrategy:
        group = self._meeting.group
        can_leave = all(getattr(each, "can_leave", False) for each in self._joinables)
        if isinstance(group, ProcessGroup) and can_leave and not self._throw:
            return LeaveStrategy(group)
        return ShadowStrategy(self._meeting, self._join_hooks, throws=self._throw)

    @property
    def leaves(self) -> bool:
        """Tell whether ranks that have run out of data leave, so that nothing is shadowed."""
        return self._enable and isinstance(self._strategy, LeaveStrategy)

    def __enter__(self) -> Self:
        self._before = [(_config_of(each), _block_of(each)) for each in self._joinables]
        self._is_open, self._has_raised = True, False
        self._configure()
        self._steps, self._is_driven = 0, False
        if self._enable:
            self._number = _count_block(self._meeting.group)
            self._untracked_optimizers.watch()
        self._began = time.perf_counter()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._untracked_optimizers.stop()
        try:
            if self._enable and self._is_over(value):
                self._finish()
            elif value is not None:
                self._abort_group(value)
        except BaseException as error:  # of a hook, or while this rank waited
            self._abort_group(error)
            raise
        finally:
            self._is_open = False
            for joinable in self._joinables:
                if _block_of(joinable) is self:  # and not in one that was entered later
                    _set_block(joinable, *self._enclosing_block(joinable))

    def _enclosing_block(self, joinable: Joinable) -> tuple[Any, Join | None]:
        """Tell where a joinable was before, and still is: blocks need not end in order."""
        config, block = self._before[self._joinables.index(joinable)]
        if block is None or block._is_open:
            return config, block
        return block._enclosing_block(joinable)

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
        return sys.is_finalizing() or self._has_raised or has_failed

    def _configure(self, *, is_over: bool = False) -> None:
        """Tell the joinables where they are; when this rank's data are over, to say nothing."""
        for place, joinable in enumerate(self._joinables):
            config = _JoinConfig(
                enable=self._enable,
                throw_on_early_termination=self._throw,
                is_first_joinable=place == 0 and not is_over,
            )
            _set_block(joinable, config, self)

    # -- steps -----------------------------------------------------------------------------

    def drive(self) -> None:
        """Begin a step here, and have joinables begin none: a loop knows better what a step is."""
        self._is_driven = True
        self._steps += 1
        self._strategy.begin_step()

    def _begin_step(self) -> dist.Work | None:
        if self._is_driven:
            return None
        self._steps += 1
        try:
            return self._strategy.begin_step()
        except UnevenInputs:
            self._has_raised = True
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
        meeting = JoinCollectives(_group_of(joinable), joinable.join_device)  # in a Join of torch's
        return begin_step(meeting, throws=config.throw_on_early_termination)

    # -- the end ---------------------------------------------------------------------------

    def _finish(self) -> None:
        # A hook may well be the joinable's own step, which would say that there is data here.
        self._configure(is_over=True)
        seconds = time.perf_counter() - self._began
        made_up = self._strategy.wait_for_others()
        report = self._compare([self._number, self._steps, made_up, seconds])
        rank = self._meeting.group.rank()
        behind = max(report.steps) - report.steps[rank]
        if self.leaves:  # who shadows has said so meanwhile
            warn_about_skew(behind, rank)
        for hook in self._join_hooks:
            hook.post_hook(not behind)
        if len(set(report.steps)) > 1:
            for optimizer in self._optimizers:
                broadcast_optimizer_state(optimizer, self._meeting, root=report.last_joiners[-1])
            self._untracked_optimizers.warn()
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

    def _abort_group(self, error: BaseException) -> None:
        """End the group, so that nobody waits for this rank, unless everybody raises anyway."""
        group = self._meeting.group
        if not (self._enable and isinstance(group, ProcessGroup)) or self._is_lost():
            return
        if isinstance(error, GeneratorExit):
            group.abort("its loop was left in the middle of a step")
        elif not self._is_raised_by_all(error, group):
            group.abort(f"{type(error).__name__} was raised in its join: {error}")

    def _is_raised_by_all(self, error: BaseException, group: ProcessGroup) -> bool:
        if self._throw and _is_uneven_inputs_error(error):
            return True
        # A mismatch, say, that all who took part have found. Who sleeps has not.
        is_of_group = isinstance(error, GroupError) and error.group == group.label
        return (
            is_of_group
            and not isinstance(error, CollectiveTimeout)
            and len(group.members) == group.size()
        )


_block_counts: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()


def _count_block(group: dist.ProcessGroup) -> int:
    number = _block_counts[group] = _block_counts.get(group, 0) + 1
    return number


def _check_optimizers(optimizers: Iterable[Optimizer]) -> list[Optimizer]:
    optimizers = list(optimizers)
    for optimizer in optimizers:
        if not isinstance(optimizer, Optimizer):
            raise InvalidType(f"optimizers are torch's, not {type(optimizer).__name__}")
    return optimizers


def _common_group(joinables: list[Joinable]) -> dist.ProcessGroup:
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


def _set_block(joinable: Any, config: Any, block: Join | None) -> None:
    joinable._join_config, joinable._join_block = config, block


def _is_uneven_inputs_error(error: BaseException) -> bool:
    return isinstance(error, RuntimeError) and (
        isinstance(error, UnevenInputs) or TORCH_UNEVEN_INPUTS_MESSAGE in str(error)
    )


T = TypeVar("T")


def uneven(
    loader: Iterable[T],
    *joinables: Joinable,
    optimizers: Iterable[Optimizer] = (),
    **kwargs: Any,
) -> UnevenLoader[T]:
    """Iterate over this rank's batches, however many the others have.

    ::

        for batch in phalanx.uneven(loader, ddp, optimizers=[optimizer]):
            ...

    Each turn is a step: whatever collectives are in it go on among the ranks that have data. A rank
    whose data are over waits at the end of the loop until everybody's are; so does one that leaves
    it with ``break``. `kwargs` are those of `Join`.
    """
    return UnevenLoader(loader, joinables, optimizers, kwargs)


class UnevenLoader(Generic[T]):
    """A loader whose end need not come at the same step on every rank."""

    def __init__(
        self,
        loader: Iterable[T],
        joinables: Iterable[Joinable],
        optimizers: Iterable[Optimizer],
        kwargs: dict[str, Any],
    ) -> None:
        if isinstance(loader, Joinable):
            raise InvalidType("uneven takes the loader first, and then what is trained with it")
        self._loader = loader
        self._joinables = tuple(joinables)
        if not self._joinables:
            raise InvalidArgument("uneven has to know what is trained: uneven(loader, ddp)")
        self._optimizers = tuple(optimizers)
        self._kwargs = kwargs
        self._report: JoinReport | None = None
        self._dropped_error: Exception | None = None
        """What was raised at the end of a loop that was left early, where Python drops it."""

    @property
    def report(self) -> JoinReport | None:
        """What happened in the last loop, when that is over; raises if its end went wrong."""
        self._raise_dropped_error()
        return self._report

    def __iter__(self) -> Iterator[T]:
        self._raise_dropped_error()
        join = Join(self._joinables, optimizers=self._optimizers, **self._kwargs)
        try:
            with join:
                for batch in self._loader:
                    if join.leaves:
                        join.drive()
                    yield batch
        except Exception as error:
            if isinstance(error.__context__, GeneratorExit):
                self._dropped_error = error
            raise
        finally:
            self._report = join.report

    def _raise_dropped_error(self) -> None:
        missed, self._dropped_error = self._dropped_error, None
        if missed is not None:
            raise missed

    def __len__(self) -> int:
        if not isinstance(self._loader, Sized):
            raise InvalidType(f"a {type(self._loader).__name__} has no length")
        return len(self._loader)
