"""`Join` and `uneven`: training loops whose number of steps differs between ranks.

`Join` wraps a loop, `uneven` wraps a loader. A rank that runs out of data waits in one of two ways
until no rank has data:

It leaves the process group, if all joinables support that. Every later collective runs among the
remaining ranks, so nothing has to be shadowed. Where ranks see each other's membership
(`ProcessGroup.can_leave_alone`) a step costs nothing extra; elsewhere each step begins with a
membership update, one small message.

Or it shadows the collectives of the others; this is torch's protocol. At the start of each step all
ranks sum one number, 1 for a rank with data and 0 for one without, so a rank without data learns
whether it must shadow another step. If uneven inputs are an error, a second sum informs the ranks
with data, which do not wait for the first. Tensor dtypes and shapes must stay those of torch's
implementation: if the first joinable is torch's own, torch's code makes the calls on the ranks with
data.

At the end all ranks are members again, the post hooks run, and ranks compare the number of the
block: nested joins that end on different blocks raise `RankMismatch`. An exception inside the block
aborts the group, unless every rank is known to raise it, so that no rank waits for the deadline.

`JoinHook` is torch's class, and `Joinable` and `_JoinConfig` derive from torch's, so either `Join`
accepts either joinable.
"""

from __future__ import annotations

import sys
import time
import warnings
import weakref
from collections.abc import Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass
from typing import Any, Generic, Self, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d
from torch.distributed.algorithms import join as upstream
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
from ._optimizer_state import UntrackedOptimizers, broadcast_optimizer_state

MAX_SKEW = 1000  # missing inputs after which a waiting rank warns


class _JoinConfig(upstream._JoinConfig):
    """The configuration that a `Join` gives its joinables."""

    @staticmethod
    def construct_disabled_join_config() -> _JoinConfig:
        """Return the configuration outside of any `Join`."""
        return _JoinConfig(enable=False, throw_on_early_termination=False, is_first_joinable=False)


class Joinable(upstream.Joinable):
    """An object that makes collectives in every step, and provides a hook that shadows them.

    It must call `Join.notify_join_context` before the first collective of a step.
    """

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
        joinables: Iterable[upstream.Joinable],
        enable: bool = True,
        throw_on_early_termination: bool = False,
        *,
        optimizers: Iterable[Optimizer] = (),
        **kwargs: Any,
    ) -> None:
        self._joinables: list[Any] = list(joinables)
        if not self._joinables:
            raise InvalidArgument("Join needs at least one joinable")
        self._optimizers = list(optimizers)
        for optimizer in self._optimizers:
            if not isinstance(optimizer, Optimizer):
                raise InvalidType(
                    f"optimizers must be torch optimizers, got {type(optimizer).__name__}"
                )
        for joinable in self._joinables:
            kind = type(joinable).__name__
            if not hasattr(joinable, "join_hook"):
                raise InvalidType(f"{kind} is not a Joinable: it has no join_hook")
            self._optimizers += getattr(joinable, "join_optimizers", ())
        self._join_hooks = [joinable.join_hook(**kwargs) for joinable in self._joinables]
        self._enable = enable
        self._throw = throw_on_early_termination
        self._group = _group_of(self._joinables[0])
        for place, joinable in enumerate(self._joinables):
            if _group_of(joinable) != self._group:
                raise InvalidArgument(
                    f"joinables of a Join must use one group: {type(joinable).__name__} (number "
                    f"{place}) uses another than {type(self._joinables[0]).__name__}"
                )
        self._device = self._joinables[0].join_device
        supports_leaving = all(getattr(each, "supports_leaving", False) for each in self._joinables)
        self._group_to_leave: ProcessGroup | None = None
        if isinstance(self._group, ProcessGroup) and supports_leaving and not self._throw:
            self._group_to_leave = self._group
        self._untracked_optimizers = UntrackedOptimizers(
            self._joinables, [*self._optimizers, *self._joinables]
        )
        self._before: list[tuple[Any, Join | None]] = []
        self._steps, self._loop_counts_steps = 0, False
        self._is_open = self._has_raised = False

    @property
    def leaves(self) -> bool:
        """Whether ranks without data leave the group, so that nothing is shadowed."""
        return self._enable and self._group_to_leave is not None

    def __enter__(self) -> Self:
        disabled = _JoinConfig.construct_disabled_join_config()
        self._before = [
            (getattr(each, "_join_config", disabled), _block_of(each)) for each in self._joinables
        ]
        self._is_open, self._has_raised = True, False
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
        if isinstance(
            value, GeneratorExit
        ):  # a ``break`` raises it in a generator around the block
            is_in_step = any(getattr(each, "is_in_step", False) for each in self._joinables)
            has_ended = not (is_in_step or self._is_lost())
        try:
            if self._enable and has_ended:
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
                    config, block = self._enclosing_block(joinable)
                    joinable._join_config, joinable._join_block = config, block

    def _enclosing_block(self, joinable: upstream.Joinable) -> tuple[Any, Join | None]:
        """Return the innermost open block around this one; blocks need not end in order."""
        config, block = self._before[self._joinables.index(joinable)]
        if block is None or block._is_open:
            return config, block
        return block._enclosing_block(joinable)

    def _is_lost(self) -> bool:
        """Whether the other ranks cannot finish the block either."""
        has_failed = isinstance(self._group, ProcessGroup) and self._group.failure() is not None
        return sys.is_finalizing() or self._has_raised or has_failed

    def _configure(self, *, is_over: bool = False) -> None:
        """Give the joinables their configuration; after the last step none announces data."""
        for place, joinable in enumerate(self._joinables):
            joinable._join_block = self
            joinable._join_config = _JoinConfig(
                enable=self._enable,
                throw_on_early_termination=self._throw,
                is_first_joinable=place == 0 and not is_over,
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
            raise Unprepared(
                f"the constructor of {type(joinable).__name__} must call Joinable.__init__(self)"
            )
        if not (config.enable and config.is_first_joinable):
            return None
        block = _block_of(joinable)
        if block is None:  # the joinable is in a Join of torch's
            throws = config.throw_on_early_termination
            return _announce_data(_group_of(joinable), joinable.join_device, throws=throws)
        if block._loop_counts_steps:
            return None
        try:
            return block._begin_step()
        except UnevenInputs:
            block._has_raised = True
            raise

    # -- the end ---------------------------------------------------------------------------

    def _finish(self) -> None:
        # A hook may be the joinable's own step, which must not announce data.
        self._configure(is_over=True)
        seconds = time.perf_counter() - self._began
        shadowed = self._wait_for_others()
        report = self._compare([self._number, self._steps, shadowed, seconds])
        missing = max(report.steps) - report.steps[self._group.rank()]
        if self.leaves:  # a rank that shadows has warned already
            self._warn_about_skew(missing)
        for hook in self._join_hooks:
            hook.post_hook(not missing)
        if len(set(report.steps)) > 1:
            last = report.last_joiners[-1]
            for optimizer in self._optimizers:
                broadcast_optimizer_state(optimizer, self._group, self._device, root=last)
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
                raise UnevenInputs(
                    f"rank {self._group.rank()} exhausted its inputs before other ranks, which is "
                    "an error with throw_on_early_termination=True"
                )
            for hook in self._join_hooks:
                hook.main_hook()
            steps += 1
            if steps == MAX_SKEW + 1:
                self._warn_about_skew(steps)

    def _warn_about_skew(self, missing: int) -> None:
        if missing > MAX_SKEW:
            warnings.warn(
                f"rank {self._group.rank()} has over {MAX_SKEW} fewer inputs than other ranks and "
                "waits for them: divide the data more evenly",
                stacklevel=5,
            )

    def _compare(self, own: Sequence[float]) -> JoinReport:
        """Gather the results of all ranks; raise if they are at the end of different blocks."""
        mine = torch.tensor(own, dtype=torch.float64, device=self._device)
        gathered = [torch.empty_like(mine) for _ in range(self._group.size())]
        self._group.allgather([gathered], [mine], c10d.AllgatherOptions()).wait()
        rows = [row.tolist() for row in gathered]
        numbers = [int(number) for number, *_ in rows]
        if len(set(numbers)) > 1:
            raise RankMismatch(
                f"ranks reached the end of different joins of their group: by rank, numbers "
                f"{numbers}. Hint: put nested joins around the same loop; a rank without data for "
                "the outer join does not reach the inner one.",
                group=getattr(self._group, "label", ""),
            )
        total = max(steps + shadowed for _, steps, shadowed, _ in rows)
        # A rank that shadowed knows how many steps it missed, even if the others are not counted.
        has_shadowed = any(shadowed for _, _, shadowed, _ in rows)
        counted = (total - shadowed if has_shadowed else steps for _, steps, shadowed, _ in rows)
        return JoinReport(tuple(map(int, counted)), tuple(seconds for *_, seconds in rows))

    def _abort_group(self, error: BaseException) -> None:
        """Abort the group, so that no rank waits for this one, unless all ranks raise anyway."""
        group = self._group
        if not (self._enable and isinstance(group, ProcessGroup)) or self._is_lost():
            return
        if isinstance(error, GeneratorExit):
            group.abort("left its loop in the middle of a step")
            return
        # Such as a mismatch, which all participants found. Ranks that left did not.
        is_raised_by_all = (
            isinstance(error, GroupError)
            and error.group == group.label
            and not isinstance(error, CollectiveTimeout)
            and len(group.members) == group.size()
        )
        if not (is_raised_by_all or (self._throw and _is_uneven_inputs_error(error))):
            group.abort(f"{type(error).__name__} was raised in its join: {error}")


_block_counts: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()


def _announce_data(group: dist.ProcessGroup, device: torch.device, *, throws: bool) -> dist.Work:
    """Announce that this rank has data; raise if another has none and `throws` is set."""
    work = _sum(torch.ones(1, device=device), group)
    if throws:
        exhausted = torch.zeros(1, device=device)
        _sum(exhausted, group).wait()
        if exhausted.item():
            raise UnevenInputs(
                f"{int(exhausted.item())} of {group.size()} ranks exhausted their inputs, which is "
                "an error with throw_on_early_termination=True"
            )
    return work


def _sum(tensor: Tensor, group: dist.ProcessGroup) -> dist.Work:
    # In torch's call form, since torch's reducer may be given the result.
    return group.allreduce([tensor], c10d.AllreduceOptions())


def _group_of(joinable: upstream.Joinable) -> dist.ProcessGroup:
    group = joinable.join_process_group
    if group is None:  # torch's default group, as in torch
        group = dist.group.WORLD
    if not isinstance(group, dist.ProcessGroup):
        raise InvalidArgument(f"{type(joinable).__name__} has no group that contains this rank")
    return group


def _block_of(joinable: upstream.Joinable) -> Join | None:
    block: Join | None = getattr(joinable, "_join_block", None)
    return block


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


class UnevenLoader(Generic[T]):
    """Iterate over a loader whose length may differ between ranks.

    ::

        for batch in phalanx.uneven(loader, ddp, optimizers=[optimizer]):
            ...

    Each iteration is a step. Its collectives run among the ranks that have data. A rank without
    data waits at the end of the loop for all others; so does a rank that leaves it with ``break``.
    `kwargs` are those of `Join`.
    """

    def __init__(
        self,
        loader: Iterable[T],
        *joinables: upstream.Joinable,
        optimizers: Iterable[Optimizer] = (),
        **kwargs: Any,
    ) -> None:
        if isinstance(loader, upstream.Joinable):
            raise InvalidType("uneven takes the loader first, then the joinables")
        if not joinables:
            raise InvalidArgument("uneven needs a joinable: uneven(loader, ddp)")
        self._loader = loader
        self._joinables = joinables
        self._options = {"optimizers": tuple(optimizers), **kwargs}
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
        join = Join(self._joinables, **self._options)
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


uneven = UnevenLoader
