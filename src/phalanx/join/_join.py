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
from torch.distributed.algorithms import join as upstream
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
from ._optimizer_state import UntrackedOptimizers, broadcast_optimizer_state
from ._protocol import JoinCollectives, LeaveStrategy, ShadowStrategy, warn_about_skew


@dataclass(frozen=True)
class JoinReport:
    """The number of steps for which each rank had data, and when it ran out."""

    steps: tuple[int, ...]
    """By rank. If the first joinable is one of torch's own classes, steps that all ranks made are
    not counted, so counting starts where the first rank ran out."""
    seconds: tuple[float, ...]
    """By rank: from the start of the block to the end of this rank's data."""

    @property
    def last_joiners(self) -> tuple[int, ...]:
        """The ranks with the most steps."""
        most = max(self.steps)
        return tuple(rank for rank, steps in enumerate(self.steps) if steps == most)

    @property
    def idle(self) -> float:
        """The fraction of all ranks' steps in which they had no data."""
        return _idle_fraction(self.steps)

    @property
    def idle_time(self) -> float:
        """The fraction of all ranks' time in which they had no data."""
        return _idle_fraction(self.seconds)

    def __str__(self) -> str:
        ends = dict.fromkeys(self.last_joiners, "to the end")
        lines = [
            f"rank {rank}: {steps} steps, {ends.get(rank, 'out of data')} after {seconds:.2f} s"
            for rank, (steps, seconds) in enumerate(zip(self.steps, self.seconds, strict=True))
        ]
        return "\n".join([*lines, f"idle: {self.idle:.1%} of steps, {self.idle_time:.1%} of time"])

    @classmethod
    def from_ranks(cls, rows: Sequence[tuple[int, int, float]]) -> JoinReport:
        """Combine the steps with data, shadowed steps and seconds of each rank."""
        total = max(steps + shadowed for steps, shadowed, _ in rows)
        # A rank that shadowed knows how many steps it missed, even if the others are not counted.
        has_shadowed = any(shadowed for _, shadowed, _ in rows)
        counted = (total - shadowed if has_shadowed else steps for steps, shadowed, _ in rows)
        return cls(tuple(counted), tuple(seconds for _, _, seconds in rows))


def _idle_fraction(amounts: Sequence[float]) -> float:
    whole = max(amounts) * len(amounts)
    return 1 - sum(amounts) / whole if whole else 0.0


class Join:
    """Let ranks run out of data at different steps.

    A rank that reaches the end of the block leaves the group and waits until all others are there.
    Where a joinable or its group does not support leaving, the rank runs the joinables' main hooks
    instead, in order, for each step that others still make. At the end all ranks are members, and
    the post hooks run. `kwargs` are passed to every `join_hook`.

    Ranks that stop early make fewer optimizer steps. Pass `optimizers` to give them, like the
    model, the state of a rank that had data to the end.

    With `throw_on_early_termination` uneven inputs are an error on all ranks. With `enable=False`
    the block does nothing.

    An exception in the block propagates, and no hook runs. A phalanx group is aborted, so that the
    other ranks raise `GroupAborted`, naming this rank, instead of waiting for the deadline.
    """

    report: JoinReport | None = None
    """Set at the end of the block."""

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
            raise InvalidArgument("Join needs at least one joinable")
        for joinable in self._joinables:
            if not hasattr(joinable, "join_hook"):
                raise InvalidType(
                    f"{type(joinable).__name__} is not a Joinable: it has no join_hook"
                )
        self._optimizers = _check_optimizers(optimizers)
        for joinable in self._joinables:
            self._optimizers += getattr(joinable, "join_optimizers", ())
        self._join_hooks = [joinable.join_hook(**kwargs) for joinable in self._joinables]
        self._enable = enable
        self._throw = throw_on_early_termination
        self._collectives = JoinCollectives(
            _common_group(self._joinables), self._joinables[0].join_device
        )
        self._strategy = self._choose_strategy()
        self._untracked_optimizers = UntrackedOptimizers(
            self._joinables, [*self._optimizers, *self._joinables]
        )
        self._before: list[tuple[Any, Join | None]] = []
        self._steps, self._loop_counts_steps = 0, False
        self._is_open = self._has_raised = False

    def _choose_strategy(self) -> LeaveStrategy | ShadowStrategy:
        group = self._collectives.group
        can_leave = all(getattr(each, "can_leave", False) for each in self._joinables)
        if isinstance(group, ProcessGroup) and can_leave and not self._throw:
            return LeaveStrategy(group)
        return ShadowStrategy(self._collectives, self._join_hooks, throws=self._throw)

    @property
    def leaves(self) -> bool:
        """Whether ranks without data leave the group, so that nothing is shadowed."""
        return self._enable and isinstance(self._strategy, LeaveStrategy)

    def __enter__(self) -> Self:
        self._before = [(_config_of(each), _block_of(each)) for each in self._joinables]
        self._is_open, self._has_raised = True, False
        self._configure()
        self._steps, self._loop_counts_steps = 0, False
        if self._enable:
            self._number = _count_block(self._collectives.group)
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
            if self._enable and self._has_ended(value):
                self._finish()
            elif value is not None:
                self._abort_group(value)
        except BaseException as error:  # from a hook, or while this rank waited
            self._abort_group(error)
            raise
        finally:
            self._is_open = False
            for joinable in self._joinables:
                if _block_of(joinable) is self:  # not one that was entered later
                    _set_block(joinable, *self._enclosing_block(joinable))

    def _enclosing_block(self, joinable: Joinable) -> tuple[Any, Join | None]:
        """Return the innermost open block around this one; blocks need not end in order."""
        config, block = self._before[self._joinables.index(joinable)]
        if block is None or block._is_open:
            return config, block
        return block._enclosing_block(joinable)

    def _has_ended(self, error: BaseException | None) -> bool:
        """Whether this rank ended its loop between two steps.

        ``break`` raises `GeneratorExit` in a generator around the block.
        """
        if isinstance(error, GeneratorExit):
            is_in_step = any(getattr(each, "is_in_step", False) for each in self._joinables)
            return not (is_in_step or self._is_lost())
        return error is None

    def _is_lost(self) -> bool:
        """Whether the other ranks cannot finish the block either."""
        group = self._collectives.group
        has_failed = isinstance(group, ProcessGroup) and group.failure() is not None
        return sys.is_finalizing() or self._has_raised or has_failed

    def _configure(self, *, is_over: bool = False) -> None:
        """Give the joinables their configuration; after the last step none announces data."""
        for place, joinable in enumerate(self._joinables):
            config = _JoinConfig(
                enable=self._enable,
                throw_on_early_termination=self._throw,
                is_first_joinable=place == 0 and not is_over,
            )
            _set_block(joinable, config, self)

    # -- steps -----------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Begin a step; joinables begin none from then on, since the loop counts them."""
        self._loop_counts_steps = True
        self._steps += 1
        self._strategy.begin_step()

    def _begin_joinable_step(self) -> dist.Work | None:
        if self._loop_counts_steps:
            return None
        self._steps += 1
        try:
            return self._strategy.begin_step()
        except UnevenInputs:
            self._has_raised = True
            raise

    @staticmethod
    def notify_join_context(joinable: Joinable) -> dist.Work | None:
        """Announce that this rank has data, before a joinable's first collective of a step.

        Where ranks without data shadow, the first joinable gets the work of the announcement. All
        others get None.
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
            return block._begin_joinable_step()
        # The joinable is in a Join of torch's.
        collectives = JoinCollectives(_group_of(joinable), joinable.join_device)
        return collectives.begin_step(throws=config.throw_on_early_termination)

    # -- the end ---------------------------------------------------------------------------

    def _finish(self) -> None:
        # A hook may be the joinable's own step, which must not announce data.
        self._configure(is_over=True)
        seconds = time.perf_counter() - self._began
        shadowed = self._strategy.wait_for_others()
        report = self._compare([self._number, self._steps, shadowed, seconds])
        rank = self._collectives.group.rank()
        missing = max(report.steps) - report.steps[rank]
        if self.leaves:  # a rank that shadows has warned already
            warn_about_skew(missing, rank)
        for hook in self._join_hooks:
            hook.post_hook(not missing)
        if len(set(report.steps)) > 1:
            for optimizer in self._optimizers:
                broadcast_optimizer_state(
                    optimizer,
                    self._collectives.group,
                    self._collectives.device,
                    root=report.last_joiners[-1],
                )
            self._untracked_optimizers.warn()
        self.report = report

    def _compare(self, own: Sequence[float]) -> JoinReport:
        """Gather the results of all ranks; raise if they are at the end of different blocks."""
        rows = self._collectives.gather(own)
        numbers = [int(row[0]) for row in rows]
        if len(set(numbers)) > 1:
            raise RankMismatch(
                f"ranks reached the end of different joins of their group: by rank, numbers "
                f"{numbers}. Hint: put nested joins around the same loop; a rank without data for "
                "the outer join does not reach the inner one.",
                group=getattr(self._collectives.group, "label", ""),
            )
        return JoinReport.from_ranks([(int(n), int(shadowed), s) for _, n, shadowed, s in rows])

    def _abort_group(self, error: BaseException) -> None:
        """Abort the group, so that no rank waits for this one, unless all ranks raise anyway."""
        group = self._collectives.group
        if not (self._enable and isinstance(group, ProcessGroup)) or self._is_lost():
            return
        if isinstance(error, GeneratorExit):
            group.abort("left its loop in the middle of a step")
        elif not self._is_raised_by_all(error, group):
            group.abort(f"{type(error).__name__} was raised in its join: {error}")

    def _is_raised_by_all(self, error: BaseException, group: ProcessGroup) -> bool:
        if self._throw and _is_uneven_inputs_error(error):
            return True
        # Such as a mismatch, which all participants found. Ranks that left did not.
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
            raise InvalidType(
                f"optimizers must be torch optimizers, got {type(optimizer).__name__}"
            )
    return optimizers


def _common_group(joinables: list[Joinable]) -> dist.ProcessGroup:
    first = _group_of(joinables[0])
    for place, joinable in enumerate(joinables):
        other = _group_of(joinable)
        if other is not first and other != first:
            raise InvalidArgument(
                f"joinables of a Join must use one group: {type(joinable).__name__} (number "
                f"{place}) uses another than {type(joinables[0]).__name__}"
            )
    return first


def _group_of(joinable: Joinable) -> dist.ProcessGroup:
    group = joinable.join_process_group
    if group is None:  # torch's default group, as in torch
        group = dist.group.WORLD
    if not isinstance(group, dist.ProcessGroup):
        raise InvalidArgument(f"{type(joinable).__name__} has no group that contains this rank")
    return group


def _config_of(joinable: Joinable) -> Any:
    return getattr(joinable, "_join_config", _JoinConfig.construct_disabled_join_config())


def _block_of(joinable: Joinable) -> Join | None:
    block: Join | None = getattr(joinable, "_join_block", None)
    return block


def _set_block(joinable: Any, config: Any, block: Join | None) -> None:
    joinable._join_config, joinable._join_block = config, block


def _is_uneven_inputs_error(error: BaseException) -> bool:
    if isinstance(error, UnevenInputs):
        return True
    # For its own joinables torch raises a plain RuntimeError, identified by where it was raised.
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    raised_in = None if trace is None else trace.tb_frame.f_code
    return type(error) is RuntimeError and raised_in is upstream.Join.notify_join_context.__code__


T = TypeVar("T")


def uneven(
    loader: Iterable[T],
    *joinables: Joinable,
    optimizers: Iterable[Optimizer] = (),
    **kwargs: Any,
) -> UnevenLoader[T]:
    """Iterate over a loader whose length may differ between ranks.

    ::

        for batch in phalanx.uneven(loader, ddp, optimizers=[optimizer]):
            ...

    Each iteration is a step. Its collectives run among the ranks that have data. A rank without
    data waits at the end of the loop for all others; so does a rank that leaves it with ``break``.
    `kwargs` are those of `Join`.
    """
    return UnevenLoader(loader, joinables, optimizers, kwargs)


class UnevenLoader(Generic[T]):
    """Iterates over a loader in a `Join`."""

    def __init__(
        self,
        loader: Iterable[T],
        joinables: Iterable[Joinable],
        optimizers: Iterable[Optimizer],
        kwargs: dict[str, Any],
    ) -> None:
        if isinstance(loader, Joinable):
            raise InvalidType("uneven takes the loader first, then the joinables")
        self._loader = loader
        self._joinables = tuple(joinables)
        if not self._joinables:
            raise InvalidArgument("uneven needs a joinable: uneven(loader, ddp)")
        self._optimizers = tuple(optimizers)
        self._kwargs = kwargs
        self._report: JoinReport | None = None
        self._dropped_error: Exception | None = None
        """An error after ``break``, which Python drops; raised by the next access."""

    @property
    def report(self) -> JoinReport | None:
        """The report of the last complete loop; raises the error of a loop that failed to end."""
        self._raise_dropped_error()
        return self._report

    def __iter__(self) -> Iterator[T]:
        self._raise_dropped_error()
        join = Join(self._joinables, optimizers=self._optimizers, **self._kwargs)
        try:
            with join:
                for batch in self._loader:
                    if join.leaves:
                        join.begin_step()
                    yield batch
        except Exception as error:
            if isinstance(error.__context__, GeneratorExit):
                self._dropped_error = error
            raise
        finally:
            self._report = join.report

    def _raise_dropped_error(self) -> None:
        error, self._dropped_error = self._dropped_error, None
        if error is not None:
            raise error

    def __len__(self) -> int:
        if not isinstance(self._loader, Sized):
            raise InvalidType(f"{type(self._loader).__name__} has no length")
        return len(self._loader)
