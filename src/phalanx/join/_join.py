"""`Join` and `uneven`: training loops whose number of steps differs between ranks.

`Join` wraps a loop, `uneven` wraps a loader. A rank that runs out of data leaves the process group,
if all joinables support that: every later collective runs among the remaining ranks. Otherwise it
shadows the collectives of the others, by torch's protocol: at the start of each step all ranks sum
one number, 1 for a rank with data and 0 for one without. If uneven inputs are an error, a second
sum informs the ranks with data, which do not wait for the first. Dtypes and shapes must stay those
of torch: if the first joinable is torch's own, torch's code makes the calls on the ranks with data.

At the end all ranks are members again, the post hooks run, and ranks compare the number of the
block: nested joins that end on different blocks raise `RankMismatch`. An exception inside the block
aborts the group, unless every rank is known to raise it, so that no rank waits for the deadline.
"""

from __future__ import annotations

import sys
import time
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, NamedTuple, Self, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d
from torch.distributed.algorithms import join as upstream
from torch.optim import Optimizer

from .. import errors
from ..groups import ProcessGroup
from ..groups._call_site import warn_user
from ..groups._current_group import default_group
from ._optimizer_state import UntrackedOptimizers, broadcast_optimizer_state

SKEW_WARNING_STEPS = 1000  # a rank that has so many fewer steps than another warns


class _JoinConfig(upstream._JoinConfig):
    """The configuration that a `Join` gives its joinables."""

    @staticmethod
    def construct_disabled_join_config() -> _JoinConfig:
        return _JoinConfig(enable=False, throw_on_early_termination=False, is_first_joinable=False)


class Joinable(upstream.Joinable):
    """An object that makes collectives in every step, and provides a hook that shadows them.

    It must call `Join.notify_join_context` before the first collective of a step.
    """

    join_hook_arguments: Collection[str] | None = None
    """The keyword arguments that `join_hook` uses; None for any."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "join_hook" in vars(cls):  # another hook, which may use other arguments
            cls.join_hook_arguments = vars(cls).get("join_hook_arguments")

    def __init__(self) -> None:
        super().__init__()
        self._join_block: Any = None  # the innermost `Join` of ours that it is in

    @property
    def supports_leaving(self) -> bool:
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
    def idle_seconds(self) -> tuple[float, ...]:
        """By rank: from the end of this rank's data to the end of all data."""
        return tuple(max(self.seconds) - seconds for seconds in self.seconds)

    @property
    def idle_step_fraction(self) -> float:
        """The fraction of all ranks' steps in which they had no data."""
        return _idle_fraction(self.steps)

    @property
    def idle_time_fraction(self) -> float:
        """The fraction of all ranks' time in which they had no data."""
        return _idle_fraction(self.seconds)

    def __str__(self) -> str:
        ends = dict.fromkeys(self.last_joiners, "to the end")
        lines = [
            f"rank {rank}: {steps} steps, {ends.get(rank, 'out of data')} after {seconds:.2f} s"
            for rank, (steps, seconds) in enumerate(zip(self.steps, self.seconds, strict=True))
        ]
        steps, time = self.idle_step_fraction, self.idle_time_fraction
        return "\n".join([*lines, f"idle: {steps:.1%} of steps, {time:.1%} of time"])


def _idle_fraction(amounts: Sequence[float]) -> float:
    whole = max(amounts) * len(amounts)
    return 1 - sum(amounts) / whole if whole else 0.0


class Join:
    """Let ranks run out of data at different steps.

    A rank that reaches the end of the block leaves the group and waits until all others are there.
    Where a joinable or its group does not support leaving, the rank runs the joinables' main hooks
    instead, in order, for each step that others still make. At the end all ranks are members, and
    the post hooks run.

    An exception in the block propagates, and no hook runs. A phalanx group is aborted, so that the
    other ranks raise `GroupAborted`, naming this rank, instead of waiting for the deadline.

    Arguments:
        joinables: what makes collectives in a step, such as a `DDP`; all in one group.
        enable: False makes the block do nothing.
        throw_on_early_termination: whether uneven inputs raise `UnevenInputs` on all ranks.
        optimizers: optimizers to give the state of a rank that had data to the end, like the model;
            ranks that stop early make fewer steps.
        kwargs: passed to the `join_hook` of every joinable. `DDP` takes
            `divide_by_initial_world_size`.
    """

    report: JoinReport | None = None
    """Set at the end of the block."""
    last_joiners: tuple[int, ...] = ()  # for post hooks
    failure: Exception | None = None  # of a block that was left in the middle of a step

    def __init__(
        self,
        joinables: Iterable[upstream.Joinable],
        enable: bool = True,
        throw_on_early_termination: bool = False,
        *,
        optimizers: Iterable[Optimizer] = (),
        **kwargs: Any,
    ) -> None:
        self._joinables: list[Any] = list(joinables)
        if not self._joinables:
            raise errors.InvalidArgument("Join needs at least one joinable")
        self._optimizers = list(optimizers)
        for optimizer in self._optimizers:
            if not isinstance(optimizer, Optimizer):
                raise errors.InvalidType(
                    f"optimizers must be torch optimizers, got {type(optimizer).__name__}"
                )
        for joinable in self._joinables:
            kind = type(joinable).__name__
            if not hasattr(joinable, "join_hook"):
                raise errors.InvalidType(f"{kind} is not a Joinable: it has no join_hook")
            self._optimizers += getattr(joinable, "join_optimizers", ())
        _check_hook_arguments(self._joinables, kwargs)
        self._join_hooks = [joinable.join_hook(**kwargs) for joinable in self._joinables]
        self._enable = enable
        self._throw = throw_on_early_termination
        self._group = _group_of(self._joinables[0])
        for index, joinable in enumerate(self._joinables):
            if _group_of(joinable) != self._group:
                raise errors.InvalidArgument(
                    f"joinables of a Join must use one group: {type(joinable).__name__} (number "
                    f"{index}) uses another than {type(self._joinables[0]).__name__}"
                )
        self._device = self._joinables[0].join_device
        supports_leaving = all(getattr(each, "supports_leaving", False) for each in self._joinables)
        self._group_to_leave: ProcessGroup | None = None
        if isinstance(self._group, ProcessGroup) and supports_leaving and not self._throw:
            self._group_to_leave = self._group
        self._untracked_optimizers = UntrackedOptimizers(
            self._joinables, [*self._optimizers, *self._joinables]
        )
        self._outer: list[tuple[Any, Join | None]] = []
        """The configuration and block of each joinable before this one."""
        self._steps, self._loop_counts_steps = 0, False
        self._is_open = self._has_raised = False

    @property
    def leaves(self) -> bool:
        """Whether ranks without data leave the group, so that nothing is shadowed."""
        return self._enable and self._group_to_leave is not None

    def __enter__(self) -> Self:
        disabled = _JoinConfig.construct_disabled_join_config()
        self._outer = [
            (getattr(each, "_join_config", disabled), getattr(each, "_join_block", None))
            for each in self._joinables
        ]
        self._is_open, self._has_raised = True, False
        self.last_joiners, self.failure = (), None
        self._configure()
        self._steps, self._loop_counts_steps = 0, False
        if self._enable:
            self._number = _block_counts[self._group] = _block_counts.get(self._group, 0) + 1
            self._untracked_optimizers.watch()
        self._began = time.perf_counter()
        return self

    def __exit__(self, kind: object, value: BaseException | None, traceback: object) -> None:
        self._untracked_optimizers.stop()
        has_ended = value is None
        is_in_step = any(getattr(each, "is_in_step", False) for each in self._joinables)
        if isinstance(value, GeneratorExit):  # raised in a generator around the block by ``break``
            has_ended = not (is_in_step or self._all_ranks_raise())
        try:
            if self._enable and has_ended:
                self._finish()
            elif value is not None:
                self._abort_group(value)
                if self._enable and is_in_step:
                    text = "this rank left the loop in the middle of a step"
                    self.failure = self._group_failure() or errors.InvalidState(text)
        except BaseException as error:  # from a hook, or while this rank waited
            self._abort_group(error)
            raise
        finally:
            self._is_open = False
            for joinable in self._joinables:
                if joinable._join_block is self:  # not one that was entered later
                    config, block = self._enclosing_block(joinable)
                    joinable._join_config, joinable._join_block = config, block

    def _enclosing_block(self, joinable: upstream.Joinable) -> tuple[Any, Join | None]:
        # Blocks need not end in order.
        config, block = self._outer[self._joinables.index(joinable)]
        if block is None or block._is_open:
            return config, block
        return block._enclosing_block(joinable)

    def _all_ranks_raise(self) -> bool:
        """Whether the other ranks cannot finish the block either."""
        has_failed = self._group_failure() is not None
        return sys.is_finalizing() or self._has_raised or has_failed

    def _group_failure(self) -> errors.GroupError | None:
        return self._group.failure() if isinstance(self._group, ProcessGroup) else None

    def _configure(self, *, is_over: bool = False) -> None:
        """Give the joinables their configuration; after the last step none announces data."""
        for index, joinable in enumerate(self._joinables):
            joinable._join_block = self
            joinable._join_config = _JoinConfig(
                enable=self._enable,
                throw_on_early_termination=self._throw,
                is_first_joinable=index == 0 and not is_over,
            )

    # -- steps -----------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Begin a step; joinables begin none from then on, since the loop counts them."""
        self._loop_counts_steps = True
        self._begin_step()

    def _begin_step(self) -> dist.Work | None:
        self._steps += 1
        if self._group_to_leave is None:
            return _announce_data(self._group, self._device, throws=self._throw)
        if not self._group_to_leave.can_leave_alone:
            self._group_to_leave.update_membership()
        return None

    @staticmethod
    def notify_join_context(joinable: upstream.Joinable) -> dist.Work | None:
        """Announce that this rank has data, before a joinable's first collective of a step.

        Where ranks without data shadow, the first joinable gets the work of the announcement. All
        others get None.
        """
        config = getattr(joinable, "_join_config", None)
        if config is None:
            raise errors.Unprepared(
                f"the constructor of {type(joinable).__name__} must call Joinable.__init__(self)"
            )
        if not (config.enable and config.is_first_joinable):
            return None
        block: Join | None = getattr(joinable, "_join_block", None)
        if block is None:  # the joinable is in a Join of torch's
            throws = config.throw_on_early_termination
            return _announce_data(_group_of(joinable), joinable.join_device, throws=throws)
        if block._loop_counts_steps:
            return None
        try:
            return block._begin_step()
        except errors.UnevenInputs:
            block._has_raised = True
            raise

    # -- the end ---------------------------------------------------------------------------

    def _finish(self) -> None:
        # A hook may be the joinable's own step, which must not announce data.
        self._configure(is_over=True)
        seconds = time.perf_counter() - self._began
        shadowed = self._wait_for_others()
        report = self._gather_report(_BlockResult(self._number, self._steps, shadowed, seconds))
        self.last_joiners = report.last_joiners
        missing = max(report.steps) - report.steps[self._group.rank()]
        if self.leaves:  # a rank that shadows has warned already
            self._warn_about_skew(missing)
        for hook in self._join_hooks:
            hook.post_hook(not missing)
        if len(set(report.steps)) > 1:
            root = report.last_joiners[-1]
            for optimizer in self._optimizers:
                broadcast_optimizer_state(optimizer, self._group, self._device, root=root)
            self._untracked_optimizers.warn()
        self.report = report

    def _wait_for_others(self) -> int:
        """Wait until no rank has data; return the number of steps that this rank shadowed."""
        if self._group_to_leave is not None:
            if not self._group_to_leave.can_leave_alone:
                self._group_to_leave.update_membership(stays=False)
            self._group_to_leave.rejoin()
            return 0
        steps = 0
        while True:
            ranks_with_data = torch.zeros(1, device=self._device)
            _sum(ranks_with_data, self._group).wait()
            if not ranks_with_data.item():
                return steps
            if self._throw:
                _sum(torch.ones(1, device=self._device), self._group).wait()
                raise errors.UnevenInputs(
                    f"rank {self._group.rank()} exhausted its inputs before other ranks, which is "
                    "an error with throw_on_early_termination=True"
                )
            for hook in self._join_hooks:
                hook.main_hook()
            steps += 1
            if steps == SKEW_WARNING_STEPS + 1:
                self._warn_about_skew(steps)

    def _warn_about_skew(self, missing: int) -> None:
        if missing > SKEW_WARNING_STEPS:
            warn_user(
                f"rank {self._group.rank()} has over {SKEW_WARNING_STEPS} fewer inputs than other "
                "ranks and waits for them: divide the data more evenly"
            )

    def _gather_report(self, own: _BlockResult) -> JoinReport:
        """Gather the results of all ranks; raise if they are at the end of different blocks."""
        mine = torch.tensor(own, dtype=torch.float64, device=self._device)
        gathered = [torch.empty_like(mine) for _ in range(self._group.size())]
        self._group.allgather([gathered], [mine], c10d.AllgatherOptions()).wait()
        results = [_BlockResult(*row.tolist()) for row in gathered]
        numbers = [int(result.block_number) for result in results]
        if len(set(numbers)) > 1:
            raise errors.RankMismatch(
                f"ranks reached the end of different joins of their group: by rank, numbers "
                f"{numbers}. Hint: put nested joins around the same loop; a rank without data for "
                "the outer join does not reach the inner one.",
                group=getattr(self._group, "label", ""),
            )
        steps = [int(result.steps) for result in results]
        if any(result.shadowed_steps for result in results):
            # A rank that shadowed knows how many steps it missed, even if the others did not count.
            total = max(result.steps + result.shadowed_steps for result in results)
            steps = [int(total - result.shadowed_steps) for result in results]
        return JoinReport(tuple(steps), tuple(result.seconds for result in results))

    def _abort_group(self, error: BaseException) -> None:
        """Abort the group, so that no rank waits for this one, unless all ranks raise anyway."""
        group = self._group
        if not (self._enable and isinstance(group, ProcessGroup)) or self._all_ranks_raise():
            return
        if isinstance(error, GeneratorExit):
            group.abort("it left the loop in the middle of a step")
            return
        # Such as a mismatch, which all participants found. Ranks that left did not.
        is_raised_by_all = (
            isinstance(error, errors.GroupError)
            and error.group == group.label
            and not isinstance(error, errors.CollectiveTimeout)
            and len(group.members) == group.size()
        )
        if not (is_raised_by_all or (self._throw and _is_uneven_inputs_error(error))):
            group.abort(f"its join block raised {type(error).__name__}: {error}")


class _BlockResult(NamedTuple):
    """What a rank tells the others at the end of a block; sent as floats."""

    block_number: float
    steps: float
    shadowed_steps: float
    seconds: float


def _check_hook_arguments(joinables: Sequence[Any], given: Mapping[str, Any]) -> None:
    """Raise for keyword arguments that no joinable uses, unless one may use any."""
    used: list[Any] = [getattr(each, "join_hook_arguments", None) for each in joinables]
    unknown = [] if None in used else sorted(set(given).difference(*used))
    if unknown:
        raise errors.InvalidArgument(f"no joinable takes the keyword argument {unknown[0]!r}")


_block_counts: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()


def _announce_data(group: dist.ProcessGroup, device: torch.device, *, throws: bool) -> dist.Work:
    """Announce that this rank has data; raise if another has none and `throws` is set."""
    work = _sum(torch.ones(1, device=device), group)
    if throws:
        exhausted = torch.zeros(1, device=device)
        _sum(exhausted, group).wait()
        if exhausted.item():
            raise errors.UnevenInputs(
                f"{int(exhausted.item())} of {group.size()} ranks exhausted their inputs, which is "
                "an error with throw_on_early_termination=True"
            )
    return work


def _sum(tensor: Tensor, group: dist.ProcessGroup) -> dist.Work:
    # In torch's call form, since torch's reducer may be given the result.
    return group.allreduce([tensor], c10d.AllreduceOptions())


def _group_of(joinable: upstream.Joinable) -> dist.ProcessGroup:
    group = joinable.join_process_group
    if group is None:
        group = default_group()
    if not isinstance(group, dist.ProcessGroup):
        raise errors.InvalidArgument(
            f"{type(joinable).__name__} has no group that contains this rank"
        )
    return group


def _is_uneven_inputs_error(error: BaseException) -> bool:
    if isinstance(error, errors.UnevenInputs):
        return True
    if error.__cause__ is not None:  # users may wrap it
        return _is_uneven_inputs_error(error.__cause__)
    # For its own joinables torch raises a plain RuntimeError, identified by where it was raised.
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    raised_in = None if trace is None else trace.tb_frame.f_code
    return type(error) is RuntimeError and raised_in is upstream.Join.notify_join_context.__code__


T = TypeVar("T")


class UnevenLoader(Generic[T]):
    """Iterate over a loader whose length may differ between ranks.

    ::

        for batch in phalanx.uneven(loader, ddp, optimizers=[optimizer]):
            ...

    Each iteration is a step, and its collectives run among the ranks that have data. (Where ranks
    shadow instead of leaving, a step is a forward pass with gradients, as in `Join`.) A rank
    without data waits at the end of the loop for all others; so does a rank that leaves it with
    ``break``.

    Arguments:
        loader: what to iterate over; its length may differ between ranks.
        divide_by_initial_world_size: whether ranks without data count in the mean gradient.
        joinables, optimizers, enable, throw_on_early_termination, kwargs: as for `Join`.
    """

    def __init__(
        self,
        loader: Iterable[T],
        *joinables: upstream.Joinable,
        optimizers: Iterable[Optimizer] = (),
        enable: bool = True,
        throw_on_early_termination: bool = False,
        divide_by_initial_world_size: bool = True,
        **kwargs: Any,
    ) -> None:
        if isinstance(loader, upstream.Joinable):
            raise errors.InvalidType("uneven takes the loader first, then the joinables")
        if not joinables:
            raise errors.InvalidArgument("uneven needs a joinable: uneven(loader, ddp)")
        self._loader = loader
        if not divide_by_initial_world_size:  # else not passed to hooks that may not know it
            kwargs["divide_by_initial_world_size"] = False
        _check_hook_arguments(joinables, kwargs)
        options = {"optimizers": tuple(optimizers), **kwargs}
        self._make_join = partial(Join, joinables, enable, throw_on_early_termination, **options)
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
        join = self._make_join()
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
        except GeneratorExit:
            self._dropped_error = join.failure
            raise
        finally:
            self._report = join.report

    def _raise_dropped_error(self) -> None:
        error, self._dropped_error = self._dropped_error, None
        if error is not None:
            raise error

    def __len__(self) -> int:
        if not isinstance(self._loader, Sized):
            raise errors.InvalidType(f"{type(self._loader).__name__} has no length")
        return len(self._loader)


uneven = UnevenLoader
