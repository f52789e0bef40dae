"""One backward pass on one rank, from the first gradient to the last.

Every bucket goes through the same states, in plan order:

WAITING    gradients are arriving as tensors that autograd allocates; when all of a piece are there
           they are copied into the bucket and `.grad` is None again
GATHERED   all gradients are in the bucket
LAUNCHED   the bucket is being reduced
FINISHED   the bucket holds the result and `.grad` shows it

Autograd must never write into a launched bucket. A pass therefore starts with every `.grad` set
aside, and a gradient that comes after its piece was gathered is a new tensor, a *late*
gradient. (Autograd may add to the last bucket, which is launched after backward, and to a
previous gradient in a bucket that is not gathered yet.) A bucket launched too early is thus
never corrupted, however often a parameter is reached. The header tells all ranks whether any
gradient was late and which parameters no rank used; late gradients are reduced in one more
round.

`LocalPass` is a pass in `no_sync`: nothing is reduced.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import NoReturn

import torch
from torch import Tensor
from torch.nn import Parameter

from ..errors import GroupError, HookError, InvalidState, RankMismatch
from ._buckets import Bucket, BucketPiece, Gradients, count_missing, scale_gradient
from ._comm_hook import CommHook, GradBucket, HookWork
from ._communicator import AnyWork, Communicator
from ._dtensor import LocalShard
from ._optimizer_in_backward import OptimizersInBackward
from ._parameter_consistency import NamedTensors, assert_same_values, fingerprint
from ._pass_header import NO_DATA, PASS_NUMBER_CYCLE, PassHeader
from ._previous_grads import first_grads, take_previous_grads
from ._scaling import Scale
from ._stats import PassTiming


@dataclass(frozen=True)
class PassConfig:
    """What stays the same from one pass to the next."""

    comm: Communicator
    names: Sequence[str]
    parameters: Sequence[Parameter]
    buckets: Sequence[Bucket]
    pieces: Sequence[BucketPiece]
    """Of all buckets, in order."""
    header: PassHeader
    keeps_views: bool
    """After a pass, ``.grad`` is a view of the bucket, not a tensor of its own."""
    absent: Sequence[int]
    """How many gradients of each piece did not arrive in the recorded pass."""
    is_recording: bool
    hook: CommHook | None
    """Reduces the buckets instead of the group."""


def assert_same_pass(
    header: PassHeader, comm: Communicator, number: int, compared: NamedTensors
) -> None:
    """Raise, on every rank, unless all ranks are in pass `number` with the same weights and values.

    `compared`: the parameters whose values to compare.
    """
    group = getattr(comm.group, "label", "")
    if not header.same_number() and not _others_have_left(header, comm, number):
        text = ", ".join(f"rank {rank}: {theirs}" for rank, theirs in enumerate(header.numbers()))
        raise RankMismatch(
            f"ranks reduced the gradients of different backward passes ({text}). The gradients are "
            "invalid. Call backward and no_sync() the same number of times on every rank",
            group=group,
            operation="backward",
        )
    without = header.without_weight()
    if without and without != header.with_data():
        raise RankMismatch(
            f"rank {', '.join(map(str, without))} has no weight and the others have. "
            "Set ddp.weight on every rank",
            group=group,
            operation="backward",
        )
    if compared and not header.same_fingerprints():
        assert_same_values(compared, comm)


def _others_have_left(header: PassHeader, comm: Communicator, number: int) -> bool:
    away = {rank for rank, theirs in enumerate(header.numbers()) if theirs != number}
    return away.isdisjoint(comm.members())


class LocalPass:
    """A backward pass whose gradients stay on this rank for now.

    `unweighted`: parameters whose gradients stay as they were, because the pass has weight 0.
    """

    def __init__(self, comm: Communicator, unweighted: Sequence[Parameter] = ()) -> None:
        self._comm = comm
        self._before = [(parameter, parameter.grad) for parameter in unweighted]
        for parameter in unweighted:
            parameter.grad = None

    def arrived(self, i: int) -> None:
        """Do nothing."""

    def ready(self, number: int) -> None:
        """Do nothing."""

    def abandon(self) -> None:
        """End a pass that failed."""
        self._restore()

    def finish(self) -> AnyWork | None:
        """Announce the pass where that is free, so that a peer that reduces it does not hang."""
        self._restore()
        return self._comm.announce_local_pass() if self._comm.compares_calls else None

    def _restore(self) -> None:
        for parameter, before in self._before:
            is_new = before is None and parameter.grad is not None  # used, with weight 0
            parameter.grad = torch.zeros_like(parameter) if is_new else before


class BucketState(enum.Enum):
    WAITING = enum.auto()
    GATHERED = enum.auto()
    LAUNCHED = enum.auto()
    FINISHED = enum.auto()


class ReducedPass:
    """A backward pass whose gradients are reduced."""

    def __init__(
        self,
        config: PassConfig,
        scale: Scale,
        *,
        number: int,
        previous_are_local: bool,
        keeps_reduced: bool,
        compared: NamedTensors,
        launches_early: bool,
        timing: PassTiming,
        optimizers: OptimizersInBackward | None = None,
    ) -> None:
        self._config = config
        self._scale = scale
        self._number = (number - 1) % PASS_NUMBER_CYCLE + 1
        self._previous_are_local = previous_are_local
        """Whether previous gradients are this rank's own, not reduced yet."""
        self._keeps_reduced = keeps_reduced
        """Whether reduced gradients were set aside and will be added after the pass."""
        self._compared = compared
        """The parameters whose values ranks compare in this pass."""
        self._launches_early = launches_early
        self._optimizers = optimizers
        """Step a bucket's parameters when it is reduced; static_graph rules out late gradients."""
        self.stepped: set[int] = set()
        """The ids of the parameters that have been stepped."""
        self.timing = timing
        self.graph_changed = False
        """This rank's graph differs from the recorded one."""
        self.any_graph_changed = False
        """Some rank's graph differs; known when the header is reduced."""
        self._states = [
            BucketState.WAITING if b.pieces else BucketState.GATHERED for b in config.buckets
        ]
        self._waiting = [len(bucket.pieces) for bucket in config.buckets]
        """How many pieces of each bucket are not gathered."""
        self._is_gathered = [False] * len(config.pieces)
        self._is_shown = [False] * len(config.pieces)
        # With create_graph, autograd replaces `.grad` instead of adding to it. What it adds to a
        # bucket is not scaled.
        self._shows_early = (
            config.keeps_views
            and not torch.is_grad_enabled()
            and scale.factor == 1
            and scale.adds_new
        )
        self._late_factor = scale.factor if scale.adds_new else 0.0
        self._left = [len(piece.members) for piece in config.pieces] if config.is_recording else []
        self._piece_of = (
            {i: number for number, piece in enumerate(config.pieces) for i in piece.members}
            if config.is_recording
            else {}
        )
        self._arrived: set[int] = set()
        self._complete: list[int] = []
        """Pieces of a recording pass that have arrived and are not gathered."""
        self._works: list[AnyWork | HookWork] = []
        self._unused: list[int] = []
        self._previous_grads = take_previous_grads(config.parameters)
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}
        """Previous gradients of parameters that this rank does not use, in case no rank does. Each
        with a copy, since it may be a view of the bucket."""
        self._own: dict[int, Tensor | None] = {}
        """Tensors for ``.grad`` where it is not a view, by parameter."""

    # -- during backward -------------------------------------------------------------------

    @property
    def restores_previous(self) -> bool:
        """Whether there are previous gradients that autograd may add to."""
        return bool(self._previous_grads) and self._scale.adds_new

    def restore_previous(self, i: int) -> None:
        """Put a previous gradient back so that autograd adds to it, and hooks see the sum."""
        old, parameter = self._previous_grads[i], self._config.parameters[i]
        if old is not None and not isinstance(parameter, LocalShard):
            parameter.grad = old
            self._previous_grads[i] = None

    def arrived(self, i: int) -> None:
        """Note the arrival of a gradient in a recording pass: gather early, launch nothing.

        Users' hooks on the parameter may not have run yet, so its piece is gathered when a gradient
        of another piece arrives.
        """
        number = self._piece_of[i]
        for complete in [each for each in self._complete if each != number]:
            self._complete.remove(complete)
            self._gather(complete, self._new_grads(complete))
            self._release(complete)
        if i not in self._arrived:
            self._arrived.add(i)
            self._left[number] -= 1
            if not self._left[number]:
                self._complete.append(number)

    def ready(self, number: int) -> None:
        """Note that the last gradient of a piece has probably arrived."""
        new = self._new_grads(number)
        if self._is_gathered[number] or count_missing(new) != self._config.absent[number]:
            self.graph_changed = True
            return
        self._gather(number, new)
        self._release(number)
        last = len(self._states) - 1 if self._launches_early else 0
        while (turn := len(self._works)) < last and self._states[turn] is BucketState.GATHERED:
            self._mark_arrival()
            self._launch(self._config.buckets[turn])

    def _new_grads(self, number: int) -> list[Tensor | None]:
        return [p.grad for p in self._config.pieces[number].parameters]

    def _gather(self, number: int, new: Gradients) -> None:
        piece = self._config.pieces[number]
        previous: Gradients = (
            [self._previous_grads[i] for i in piece.members] if self._previous_grads else []
        )
        if count_missing(new):
            self._note_unused(piece, new, previous)
        if not self._config.keeps_views:
            self._own.update(zip(piece.members, first_grads(previous, new), strict=True))
        bucket = self._config.buckets[piece.bucket_index]
        if not self._scale.adds_new:
            new = [None] * len(new)
        bucket.gather(piece, new, previous, self._scale.factor)
        if previous:
            for i in piece.members:  # a late gradient must not be added to them again
                self._previous_grads[i] = None
        self._is_gathered[number] = True
        self._waiting[bucket.index] -= 1
        if not self._waiting[bucket.index]:
            self._states[bucket.index] = BucketState.GATHERED

    def _release(self, number: int) -> None:
        """Release gathered tensors, so that late gradients cannot write into a bucket.

        The last bucket is not launched before backward is over. Until then autograd may add to it,
        so its views can be in ``.grad`` already. For other buckets autograd must make new tensors.
        """
        piece = self._config.pieces[number]
        if self._shows_early and piece.bucket_index == len(self._states) - 1:
            views = self._config.buckets[piece.bucket_index].results()[piece.places]
            if not self._config.absent[number]:
                for parameter, view in zip(piece.parameters, views, strict=True):
                    parameter.grad = view
                self._is_shown[number] = True
                return
        for parameter in piece.parameters:
            parameter.grad = None

    def _note_unused(self, piece: BucketPiece, new: Gradients, previous: Gradients) -> None:
        for place, i in enumerate(piece.members):
            old = previous[place] if previous else None
            if new[place] is None and not (self._previous_are_local and old is not None):
                self._unused.append(i)
                if old is not None:
                    self._kept[i] = old, old.clone()

    def _launch(self, bucket: Bucket) -> None:
        assert self._states[bucket.index] is BucketState.GATHERED
        self._works.append(self._start(bucket))
        self._states[bucket.index] = BucketState.LAUNCHED

    def _start(self, bucket: Bucket) -> AnyWork | HookWork:
        hook, comm = self._config.hook, self._config.comm
        if hook is None:
            return self._scale.start(comm, bucket.payload)
        if not bucket.members:  # only a header, which is not for the hook
            return comm.sum(bucket.payload)
        if self._works:
            # A hook may call the group until its future has ended. Calls of two buckets must not
            # interleave, and their order must be the same on all ranks.
            self._works[-1].wait()
        return hook.start(
            self._shown(bucket), bucket.take, describe=partial(self._describe, bucket)
        )

    def _shown(self, bucket: Bucket) -> GradBucket:
        return GradBucket(
            bucket.index,
            bucket.buffer,
            bucket.results(),
            bucket.parameters,
            all(not later.members for later in self._config.buckets[bucket.index + 1 :]),
            group=self._config.comm.group,
            names=[self._config.names[i] for i in bucket.members],
        )

    def _mark_arrival(self) -> None:
        self.timing.arrivals.append(time.perf_counter() - self.timing.since)

    def abandon(self) -> None:
        """End a pass that failed: wait until peers no longer read the buckets.

        Previous gradients are lost, since they may be views of buckets that are partly reduced.
        """
        for work in self._works:
            with suppress(GroupError, HookError):  # the next call on the group raises it again
                work.wait()

    # -- after backward --------------------------------------------------------------------

    def finish(self) -> None:
        """Reduce the remaining buckets, wait for all of them, and put the results in ``.grad``."""
        *others, last = self._config.buckets
        backward = time.perf_counter() - self.timing.began
        late = self._collect_late()
        for number in range(len(self._config.pieces)):
            if not self._is_gathered[number]:
                self._gather_at_last(number)
        for bucket in others[len(self._works) :]:
            self._mark_arrival()
            self._launch(bucket)
        self._mark_arrival()
        self._write_header(backward, late)
        self._launch(last)
        began = time.perf_counter()
        self._wait(steps=self._optimizers is not None and not (late or self._compared))
        header = self._config.header
        if self._config.hook is not None and last.members:
            self._config.comm.sum(header.space).wait()  # the hook reduced only the gradients
        header.receive(self._number)
        assert_same_pass(header, self._config.comm, self._number, self._compared)
        self.any_graph_changed = header.any_graph_changed()
        self._scale.finish(self._config.buckets, header)
        lates = header.late()
        if lates:
            if self._optimizers is not None:
                self._raise_late_gradients(lates)
            self._add_late(lates, late)
        self.timing.exposed = time.perf_counter() - began
        self._show(self._used(header, lates))
        self.timing.ended = time.perf_counter()

    def _gather_at_last(self, number: int) -> None:
        """Gather a piece that was not reported: none of it arrives, or the graph has changed."""
        new = self._new_grads(number)
        is_expected = count_missing(new) == self._config.absent[number] == len(new)
        self.graph_changed |= not (is_expected or self._config.is_recording)
        self._gather(number, new)

    def _collect_late(self) -> dict[int, Tensor]:
        """Add gradients that arrived after gathering; return those that arrived after launch."""
        late: dict[int, Tensor] = {}
        for number, piece in enumerate(self._config.pieces):
            if not self._is_gathered[number] or self._is_shown[number]:
                continue
            new = self._new_grads(number)
            if count_missing(new) < len(new):
                self._take_late(piece, new, late)
        return late

    def _take_late(self, piece: BucketPiece, new: Gradients, late: dict[int, Tensor]) -> None:
        is_launched = self._states[piece.bucket_index] is BucketState.LAUNCHED
        for offset, gradient in enumerate(new):
            if gradient is None:
                continue
            if is_launched:
                late[piece.members[offset]] = gradient
                self.graph_changed = True
            else:
                place = piece.places.start + offset
                self._config.buckets[piece.bucket_index].add(place, gradient, self._late_factor)
                if piece.members[offset] in self._unused:
                    self._unused.remove(piece.members[offset])
                    self.graph_changed = True

    def _write_header(self, backward: float, late: dict[int, Tensor]) -> None:
        self._config.header.write(
            number=self._number,
            weight=self._scale.weight,
            fingerprint=fingerprint(self._compared) if self._compared else 0,
            forward=self.timing.forward,
            backward=backward,
            arrivals=self.timing.arrivals,
            unused=self._unused,
            late=list(late),
            graph_changed=self.graph_changed and self._scale.weight != NO_DATA,
            keeps_reduced=self._keeps_reduced and self._scale.weight != NO_DATA,
        )

    def _wait(self, *, steps: bool) -> None:
        for bucket, work in zip(self._config.buckets, self._works, strict=True):
            try:
                work.wait()
            except GroupError as error:
                error.add_note(f"This is {self._describe(bucket)}.")
                raise
            self._states[bucket.index] = BucketState.FINISHED
            if steps and bucket is not self._config.buckets[-1]:
                self._step(bucket)

    def _step(self, bucket: Bucket) -> None:
        """Step the parameters of a bucket, unless the header can still change its gradients."""
        if self._scale.waits_for_header(bucket) or set(bucket.members) & set(self._unused):
            return
        for number, piece in enumerate(self._config.pieces):
            if piece.bucket_index == bucket.index:
                self._show_piece(number, None)
        assert self._optimizers is not None
        self._optimizers.step_parameters(bucket.parameters)
        self.stepped.update(map(id, bucket.parameters))

    def _describe(self, bucket: Bucket) -> str:
        names = [self._config.names[i] for i in bucket.members]
        shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
        return (
            f"bucket {bucket.index + 1} of {len(self._states)} of backward pass {self._number}, "
            f"with the gradients of {shown or 'no parameter'}"
        )

    def _add_late(self, which: list[int], mine: dict[int, Tensor]) -> None:
        homes = {i: (b, place) for b in self._config.buckets for place, i in enumerate(b.members)}
        if self._config.hook is not None:
            for bucket in {homes[i][0].index: homes[i][0] for i in which}.values():
                self._add_late_by_hook(bucket, mine)
            return
        works = []
        for i in which:
            bucket, place = homes[i]
            part = scale_gradient(bucket.as_payload(place, mine.get(i)), self._late_factor)
            works.append((bucket, place, part, self._scale.start(self._config.comm, part)))
        for bucket, place, part, work in works:
            work.wait()
            bucket.add(place, self._scale.finish_one(part))

    def _add_late_by_hook(self, bucket: Bucket, mine: dict[int, Tensor]) -> None:
        """Reduce the late gradients of a bucket with the hook, as one more bucket."""
        assert self._config.hook is not None
        rest = bucket.zeroed_copy()
        for place, i in enumerate(bucket.members):
            if i in mine:
                rest.add(place, mine[i], self._late_factor)
        shown = self._shown(rest)
        describe = partial(self._describe, bucket)
        self._config.hook.start(shown, rest.take, describe=describe).wait()
        for place, part in enumerate(rest.results()):
            bucket.add(place, self._scale.finish_one(part))

    def _raise_late_gradients(self, late: list[int]) -> NoReturn:
        names = ", ".join(repr(self._config.names[i]) for i in late)
        raise InvalidState(
            f"gradients of {names} arrived after their bucket was reduced and its optimizer in "
            "backward had stepped, so the parameters are invalid: the graph has changed in spite "
            "of static_graph=True. Return to a checkpoint and remove static_graph=True"
        )

    def _used(self, header: PassHeader, late: list[int]) -> list[bool] | None:
        """Return for every parameter whether any rank has a gradient; None if all have."""
        if not header.has_unused():
            return None
        used = header.used()
        for i in late:
            used[i] = True
        return used

    # -- the results -----------------------------------------------------------------------

    def _show(self, used: list[bool] | None) -> None:
        for number in range(len(self._config.pieces)):
            if not self._is_shown[number]:
                self._show_piece(number, used)

    def _show_piece(self, number: int, used: list[bool] | None) -> None:
        piece = self._config.pieces[number]
        self._is_shown[number] = True
        results = self._config.buckets[piece.bucket_index].results()[piece.places]
        if used is None and self._config.keeps_views:
            for parameter, result in zip(piece.parameters, results, strict=True):
                parameter.grad = result
            return
        for parameter, i, result in zip(piece.parameters, piece.members, results, strict=True):
            is_used = used is None or used[i]
            parameter.grad = self._result(i, result) if is_used else self._as_it_was(i)

    def _result(self, i: int, result: Tensor) -> Tensor:
        if self._config.keeps_views:
            return result
        own, dtype = self._own[i], self._config.parameters[i].dtype
        if own is None or result.is_sparse or (own.layout, own.dtype) != (result.layout, dtype):
            return result.to(dtype, copy=True)
        with torch.no_grad():
            return own.copy_(result)

    def _as_it_was(self, i: int) -> Tensor | None:
        if i not in self._kept:
            return None
        old, copy = self._kept[i]
        return old.copy_(copy)
