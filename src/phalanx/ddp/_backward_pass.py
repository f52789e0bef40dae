"""One backward pass on one rank, from the first gradient to the last.

Every bucket goes through the same states, in plan order:

waiting    gradients are arriving as tensors that autograd allocates; when all of a piece are there
           they are copied into the bucket and `.grad` is None again
gathered   all gradients are in the bucket
launched   the bucket is being reduced
finished   the bucket holds the result and `.grad` shows it

Autograd must never write into a launched bucket. A pass therefore starts with every `.grad` set
aside, and a gradient that comes after its piece was gathered is a new tensor, a *late*
gradient. (Autograd may add to the last bucket, which is launched after backward, and to a
previous gradient in a bucket that is not gathered yet.) A bucket launched too early is thus
never corrupted, however often a parameter is reached. The header tells all ranks whether any
gradient was late and which parameters no rank used; late gradients are reduced in one more
round.

`LocalPass` is a pass in `no_sync`: nothing is reduced. `FoldedPass` is that of a micro-batch: its
gradients are added to the sums of a `GradientFold`. The pass of a rank's last micro-batch is a
`ReducedPass` whose gradients are folded instead of copied. It launches buckets in backward, but
the last one not before `reduce`, when the loop over micro-batches has ended. If the group fails,
backward folds on to its end and `reduce` raises, since the sums of this rank are still good.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from .._formatting import format_ranks
from ..errors import GroupError, HookError, InvalidState, RankMismatch
from ..groups import _profiler
from ._buckets import Bucket, BucketLayout, BucketPiece, Gradients, count_missing, scale_gradient
from ._comm_hook import CommHook, GradBucket, HookWork
from ._communicator import AnyWork, Communicator, OrderedSum
from ._dtensor import LocalShard, local_tensor
from ._gradient_fold import GradientFold
from ._optimizer_in_backward import OptimizersInBackward
from ._parameter_consistency import NamedTensors, assert_same_values, fingerprint
from ._pass_header import NO_DATA, PASS_NUMBER_CYCLE, PassHeader
from ._scaling import Scale
from ._stats import PassTiming

MISMATCH_HINT = (
    "Hint: call no_sync() around the same passes on every rank, and set ddp.weight on all ranks or "
    "on none."
)
WEIGHT_HINT = "Hint: give all micro-batches of a step a weight, on all ranks, or none."


def assert_same_pass(
    header: PassHeader, comm: Communicator, pass_number: int, compared: NamedTensors
) -> None:
    """Raise, on every rank, unless all ranks are in the same pass.

    They must also agree on having weights, and on the values of the parameters in `compared`.
    """
    about: dict[str, Any] = {"group": comm.label, "operation": "backward"}
    if not header.same_pass_number():
        numbers = list(enumerate(header.pass_numbers()))
        others = {rank for rank, theirs in numbers if theirs != pass_number}
        if not others.isdisjoint(comm.members()):  # they have not all left
            text = ", ".join(f"rank {rank}: {theirs}" for rank, theirs in numbers)
            raise RankMismatch(
                f"ranks reduced the gradients of different backward passes ({text}). The gradients "
                "are invalid. Call backward and no_sync() the same number of times on every rank",
                **about,
            )
    without = header.without_weight()
    if without and without != header.with_data():
        raise RankMismatch(
            f"ddp.weight is set on some ranks, but not on {format_ranks(without)}. Set it on all",
            **about,
        )
    if compared and not header.same_fingerprints():
        assert_same_values(compared, comm)


class LocalPass:
    """A backward pass whose gradients stay on this rank for now.

    `unweighted`: parameters whose gradients stay as they were, because the pass has weight 0.
    """

    def __init__(self, comm: Communicator, unweighted: Sequence[Parameter] = ()) -> None:
        self._comm = comm
        self._before = [(parameter, parameter.grad) for parameter in unweighted]
        for parameter in unweighted:
            parameter.grad = None

    def abandon(self) -> None:
        for parameter, before in self._before:
            is_new = before is None and parameter.grad is not None  # used, with weight 0
            parameter.grad = torch.zeros_like(local_tensor(parameter)) if is_new else before

    def finish(self) -> None:
        """Announce the pass where that is free, so that a peer that reduces it does not hang."""
        self.abandon()
        try:
            if self._comm.detects_mismatch:
                self._comm.announce_local_pass()
        except RankMismatch as error:
            error.add_note(MISMATCH_HINT)
            raise


class FoldedPass:
    """A backward pass whose gradients are added to the sums of this rank's micro-batches."""

    def __init__(self, layout: BucketLayout, fold: GradientFold) -> None:
        self._layout = layout
        self._fold = fold
        self._is_folded = [False] * len(layout.pieces)

    def arrived(self, _: int) -> None:
        """Only detect nested runs of autograd: a recording pass folds at its end."""
        self._fold.detect_nesting()

    def ready(self, index: int) -> None:
        """Fold a piece early, if its gradients are final."""
        self._fold.detect_nesting()
        new = [p.grad for p in self._layout.pieces[index].parameters]
        if not self._is_folded[index] and self._fold.is_final(new):
            self._take(index, new)

    def _take(self, index: int, new: Gradients) -> None:
        piece = self._layout.pieces[index]
        self._fold.fold(self._layout.buckets[piece.bucket_index], piece, new)
        self._is_folded[index] = True

    def abandon(self) -> None:
        """End a pass that failed. The sums of the step are lost."""

    def end_backward(self) -> None:
        """Fold what has not been folded."""
        late: list[str] = []
        for index, piece in enumerate(self._layout.pieces):
            new = [p.grad for p in piece.parameters]
            if not self._is_folded[index]:
                self._take(index, new)
            elif count_missing(new) < len(new):
                late += late_names(self._layout, piece, new)
        if late:
            self._fold.refuse_late(late)
        self._fold.end_micro_batch()


def late_names(layout: BucketLayout, piece: BucketPiece, new: Gradients) -> list[str]:
    pairs = zip(piece.members, new, strict=True)
    return [layout.names[i] for i, gradient in pairs if gradient is not None]


class PieceArrivals:
    """The gradients of each piece that have arrived in a recording pass."""

    def __init__(self, pieces: Sequence[BucketPiece]) -> None:
        self._piece_of = {i: index for index, piece in enumerate(pieces) for i in piece.members}
        self._missing = [set(piece.members) for piece in pieces]
        self._complete: list[int] = []  # the pieces that are not gathered yet

    def add(self, i: int) -> list[int]:
        """Note the arrival of a gradient; return the pieces that can be gathered.

        Users' hooks on the parameter may not have run yet, so its piece is gathered when a gradient
        of another piece arrives.
        """
        index = self._piece_of[i]
        ready = [each for each in self._complete if each != index]
        self._complete = [each for each in self._complete if each == index]
        if i in self._missing[index]:
            self._missing[index].remove(i)
            if not self._missing[index]:
                self._complete.append(index)
        return ready


class ReducedPass:
    """A backward pass whose gradients are reduced."""

    def __init__(
        self,
        layout: BucketLayout,
        scale: Scale,
        hook: CommHook | None,
        *,
        is_recording: bool,
        pass_number: int,
        previous_are_local: bool,
        adds_previous: bool,
        compared: NamedTensors,
        launches_early: bool,
        timing: PassTiming,
        optimizers: OptimizersInBackward | None = None,
        fold: GradientFold | None = None,
    ) -> None:
        self._layout = layout
        self._fold = fold
        """Adds the gradients to those of earlier micro-batches; None to reduce these alone."""
        self._buckets, self._pieces, self._comm = layout.buckets, layout.pieces, layout.comm
        self._scale = scale
        self._hook = hook
        self._pass_number = (pass_number - 1) % PASS_NUMBER_CYCLE + 1
        self._previous_are_local = previous_are_local
        """Whether previous gradients are this rank's own, not reduced yet."""
        self._adds_previous = adds_previous
        """Whether reduced gradients were set aside and will be added after the pass."""
        self._compared = compared  # between ranks
        self._launches_early = launches_early
        self._optimizers = optimizers
        """Step a bucket's parameters when it is reduced; static_graph rules out late gradients."""
        self.stepped: set[int] = set()  # ids of parameters
        self.timing = timing
        self.graph_changed = False  # this rank's graph differs from the recorded one
        self.any_graph_changed = False  # on some rank; known when the header is reduced
        self._waiting = [len(bucket.pieces) for bucket in self._buckets]
        """How many pieces of each bucket are not gathered."""
        self._is_gathered = [False] * len(self._pieces)
        self._is_assigned = [False] * len(self._pieces)
        # With create_graph, autograd replaces `.grad` instead of adding to it. What it adds to a
        # bucket is not scaled.
        self._assigns_early = (
            layout.grad_is_view
            and not torch.is_grad_enabled()
            and scale.factor == 1
            and scale.uses_new_gradients
            and fold is None
        )
        self._late_factor = scale.factor if scale.uses_new_gradients else 0.0
        self._arrivals = PieceArrivals(self._pieces) if is_recording else None
        self._works: list[AnyWork | HookWork | OrderedSum] = []  # of the buckets that are launched
        self._launch_error: GroupError | None = None
        """Why nothing more is launched. With a fold, backward continues until all is folded."""
        self.unused: list[int] = []  # parameters without a gradient on this rank
        self._own_late: dict[int, Tensor] = {}
        """Gradients of this rank that arrived after their bucket was launched, by parameter."""
        self._backward_seconds = 0.0
        previous = [parameter.grad for parameter in layout.parameters]
        self._previous_grads = previous if count_missing(previous) < len(previous) else []
        if self._previous_grads:
            for parameter in layout.parameters:
                parameter.grad = None
        self._unused_previous: dict[int, tuple[Tensor, Tensor]] = {}
        """Previous gradients of parameters that this rank does not use, in case no rank does. Each
        with a copy, since it may be a view of the bucket."""
        self._own: dict[int, Tensor | None] = {}
        """Tensors for ``.grad`` where it is not a view, by parameter."""

    # -- during backward -------------------------------------------------------------------

    @property
    def restores_previous(self) -> bool:
        return bool(self._previous_grads) and self._scale.uses_new_gradients

    def restore_previous(self, i: int) -> None:
        """Put a previous gradient back so that autograd adds to it, and hooks see the sum."""
        old, parameter = self._previous_grads[i], self._layout.parameters[i]
        if old is not None and not isinstance(parameter, LocalShard):
            parameter.grad = old
            self._previous_grads[i] = None

    def arrived(self, i: int) -> None:
        """Note the arrival of a gradient in a recording pass: gather early, launch nothing."""
        assert self._arrivals is not None
        if self._fold is not None:
            self._fold.detect_nesting()
            return
        for index in self._arrivals.add(i):
            self._gather(index, [p.grad for p in self._pieces[index].parameters])
            self._release(index)

    def ready(self, index: int) -> None:
        """Note that the last gradient of a piece has probably arrived."""
        new = [p.grad for p in self._pieces[index].parameters]
        if self._fold is not None:
            self._fold.detect_nesting()
            if self._is_gathered[index] or not self._fold.is_final(new):
                return
        elif self._is_gathered[index] or count_missing(new) != self._layout.absent[index]:
            self.graph_changed = True
            return
        self._gather(index, new)
        self._release(index)
        last = len(self._buckets) - 1 if self._launches_early else 0
        while (turn := len(self._works)) < last and not self._waiting[turn]:
            if self._launch_error is not None:
                break
            try:
                self._launch(self._buckets[turn])
            except GroupError as error:
                if self._fold is None:
                    raise
                self._launch_error = error

    def _gather(self, index: int, new: Gradients) -> None:
        piece = self._pieces[index]
        bucket = self._buckets[piece.bucket_index]
        if self._fold is not None:
            self._fold.fold(bucket, piece, new)
        else:
            self._copy_to_bucket(bucket, piece, new)
        self._is_gathered[index] = True
        self._waiting[bucket.index] -= 1

    def _copy_to_bucket(self, bucket: Bucket, piece: BucketPiece, new: Gradients) -> None:
        previous: Gradients = (
            [self._previous_grads[i] for i in piece.members] if self._previous_grads else []
        )
        if count_missing(new):
            for position, i in enumerate(piece.members):
                old = previous[position] if previous else None
                if new[position] is None and not (self._previous_are_local and old is not None):
                    self.unused.append(i)
                    if old is not None:
                        self._unused_previous[i] = old, old.clone()
        if not self._layout.grad_is_view:
            pairs = zip(previous or [None] * len(new), new, strict=True)
            own = [gradient if old is None else old for old, gradient in pairs]
            self._own.update(zip(piece.members, own, strict=True))
        if not self._scale.uses_new_gradients:
            new = [None] * len(new)
        with _profiler.record("DistributedDataParallel.copy_grads_to_bucket"):
            is_native = bucket.gather(piece, new, previous, self._scale.factor)
        if not is_native and self._layout.has_changed(piece.members):
            # Reduce in the dtype of the bucket once more; the next forward pass makes new buckets.
            self._layout.grad_is_view = self._assigns_early = False
        if previous:
            for i in piece.members:  # a late gradient must not be added to them again
                self._previous_grads[i] = None

    def _release(self, index: int) -> None:
        """Release gathered tensors, so that late gradients cannot write into a bucket."""
        # The last bucket is not launched before backward is over. Until then autograd may add to
        # it, so its views can be in ``.grad`` already.
        piece = self._pieces[index]
        is_last = piece.bucket_index == len(self._buckets) - 1
        if self._assigns_early and is_last and not self._layout.absent[index]:
            self._assign_grads(index, None)
            return
        for parameter in piece.parameters:
            parameter.grad = None

    def _launch(self, bucket: Bucket) -> None:
        assert not self._waiting[bucket.index]
        self.timing.arrivals.append(time.perf_counter() - self.timing.since)
        work: AnyWork | HookWork | OrderedSum
        try:
            if self._fold is not None:
                work = self._fold.start_sum(bucket)
            elif self._hook is None:
                work = self._scale.start(bucket.payload)
            elif not bucket.members:  # only a header, which is not for the hook
                work = self._comm.sum(bucket.payload)
            else:
                if self._works:
                    # A hook may call the group until its future has ended. Calls of two buckets
                    # must not interleave, and their order must be the same on all ranks.
                    self._works[-1].wait()
                work = self._start_hook(self._hook, bucket)
        except GroupError as error:
            self._add_notes(error, bucket)
            raise
        self._works.append(work)

    def _start_hook(self, hook: CommHook, bucket: Bucket) -> HookWork:
        grad_bucket = GradBucket(
            bucket.index,
            bucket.buffer,
            bucket.views,
            bucket.parameters,
            all(not later.members for later in self._buckets[bucket.index + 1 :]),
            group=self._comm.group,
            names=[self._layout.names[i] for i in bucket.members],
        )
        return hook.start(
            grad_bucket, bucket.store_result, describe=partial(self._describe, bucket)
        )

    def abandon(self) -> None:
        """End a pass that failed: wait until peers no longer read the buckets."""
        # Previous gradients are lost, since they may be views of buckets that are partly reduced.
        # An ordered sum that exchanges slices has no peer that reads buckets, and to wait for it
        # would start a collective.
        for work in self._works:
            if isinstance(work, OrderedSum):
                continue
            with suppress(GroupError, HookError):  # the next call on the group raises it again
                work.wait()

    # -- after backward --------------------------------------------------------------------

    def finish(self) -> None:
        """End the pass: gather and reduce what is left, and put the results in ``.grad``."""
        self.end_backward()
        self.reduce()

    def end_backward(self) -> None:
        """Gather the gradients that are left. No gradient may arrive after this."""
        self._backward_seconds = time.perf_counter() - self.timing.began
        self._own_late = self._gather_remaining()
        if self._fold is not None:
            self._fold.end_micro_batch()
            self.unused = [i for i in range(len(self._layout.names)) if i not in self._fold.used]

    def reduce(self) -> None:
        """Reduce the remaining buckets, wait for all of them, and put the results in ``.grad``."""
        header, comm, timing, own_late = (
            self._layout.header,
            self._comm,
            self.timing,
            self._own_late,
        )
        *others, last = self._buckets
        if self._launch_error is not None:
            try:
                raise self._launch_error
            finally:
                self._launch_error = None  # its traceback refers to this pass
        for bucket in others[len(self._works) :]:
            self._launch(bucket)
        now = time.perf_counter() - timing.since
        has_data = self._scale.weight != NO_DATA
        header.write(
            self._pass_number,
            self._scale.weight,
            fingerprint(self._compared) if self._compared else 0,
            [timing.forward, self._backward_seconds, *timing.arrivals, now],
            unused=self.unused,
            late=own_late,
            graph_changed=self.graph_changed and has_data,
            adds_previous=self._adds_previous and has_data,
        )
        self._launch(last)
        began = time.perf_counter()
        self._wait(steps=not (own_late or self._compared))
        if self._hook is not None and last.members:
            comm.sum(header.space).wait()  # the hook reduced only the gradients
        header.receive(self._pass_number)
        assert_same_pass(header, comm, self._pass_number, self._compared)
        self.any_graph_changed = header.any_graph_changed()
        self._scale.finish(self._buckets, header)
        late_on_any_rank = header.late()
        if late_on_any_rank:
            self._add_late(late_on_any_rank, own_late)
        timing.exposed = time.perf_counter() - began
        used = header.used()
        for index, is_assigned in enumerate(self._is_assigned):
            if not is_assigned:
                self._assign_grads(index, used)
        timing.ended = time.perf_counter()

    def _gather_remaining(self) -> dict[int, Tensor]:
        """Gather what has arrived since pieces were reported; return what came after launch."""
        late: dict[int, Tensor] = {}
        for index, piece in enumerate(self._pieces):
            if self._is_assigned[index]:
                continue
            new = [p.grad for p in piece.parameters]
            if not self._is_gathered[index]:  # none of it arrives, or the graph has changed
                is_expected = count_missing(new) == self._layout.absent[index] == len(new)
                if self._arrivals is None and self._fold is None:
                    self.graph_changed |= not is_expected
                self._gather(index, new)
            elif count_missing(new) < len(new):
                self._take_late(piece, new, late)
        return late

    def _take_late(self, piece: BucketPiece, new: Gradients, late: dict[int, Tensor]) -> None:
        if self._fold is not None:
            self._fold.refuse_late(late_names(self._layout, piece, new))
        for offset, gradient in enumerate(new):
            i = piece.members[offset]
            if gradient is None:
                continue
            if piece.bucket_index < len(self._works):  # launched
                late[i] = gradient
                self.graph_changed = True
                continue
            bucket = self._buckets[piece.bucket_index]
            bucket.add(piece.positions.start + offset, gradient, self._late_factor)
            if i in self.unused:
                self.unused.remove(i)
                self.graph_changed = True

    def _wait(self, *, steps: bool) -> None:
        """Wait for all buckets; step their optimizers, unless the header can change gradients."""
        for bucket, work in zip(self._buckets, self._works, strict=True):
            try:
                with _profiler.record("DistributedDataParallel.wait_for_bucket"):
                    work.wait()
            except GroupError as error:
                self._add_notes(error, bucket)
                raise
            if self._optimizers is None or not steps or bucket is self._buckets[-1]:
                continue
            if self._scale.waits_for_header(bucket) or set(bucket.members) & set(self.unused):
                continue
            for index, piece in enumerate(self._pieces):
                if piece.bucket_index == bucket.index:
                    self._assign_grads(index, None)
            self._optimizers.step_parameters(bucket.parameters)
            self.stepped.update(map(id, bucket.parameters))

    def _add_notes(self, error: GroupError, bucket: Bucket) -> None:
        error.add_note(f"This is {self._describe(bucket)}.")
        if isinstance(error, RankMismatch):  # the group has found it before the header was reduced
            error.add_note(MISMATCH_HINT if self._fold is None else WEIGHT_HINT)

    def _describe(self, bucket: Bucket) -> str:
        names = [self._layout.names[i] for i in bucket.members]
        listed = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
        return (
            f"bucket {bucket.index + 1} of {len(self._buckets)} of backward pass "
            f"{self._pass_number}, with the gradients of {listed or 'no parameter'}"
        )

    def _add_late(self, late: list[int], own: dict[int, Tensor]) -> None:
        """Reduce the gradients that were late on any rank, and add them to the results."""
        if self._optimizers is not None:
            names = ", ".join(repr(self._layout.names[i]) for i in late)
            raise InvalidState(
                f"gradients of {names} arrived after their bucket was reduced and its optimizer in "
                "backward had stepped, so the parameters are invalid: the graph has changed "
                "despite static_graph=True. Return to a checkpoint and remove static_graph=True"
            )
        homes = {i: (b, position) for b in self._buckets for position, i in enumerate(b.members)}
        if self._hook is not None:
            for bucket in {homes[i][0]: None for i in late}:
                more = bucket.zeroed_copy()
                for position, i in enumerate(bucket.members):
                    if i in own:
                        more.add(position, own[i], self._late_factor)
                self._start_hook(self._hook, more).wait()
                for position, part in enumerate(more.views):
                    bucket.add(position, self._scale.finish_one(part))
            return
        works = []
        for i in late:
            bucket, position = homes[i]
            part = scale_gradient(bucket.as_payload(position, own.get(i)), self._late_factor)
            works.append((bucket, position, part, self._scale.start(part)))
        for bucket, position, part, work in works:
            work.wait()
            bucket.add(position, self._scale.finish_one(part))

    def _assign_grads(self, index: int, used: list[bool] | None) -> None:
        """Put the results of a piece in ``.grad``; `used`: by some rank, None if all are."""
        piece, grad_is_view = self._pieces[index], self._layout.grad_is_view
        self._is_assigned[index] = True
        results = self._buckets[piece.bucket_index].grads[piece.positions]
        if used is None and grad_is_view:
            for parameter, result in zip(piece.parameters, results, strict=True):
                parameter.grad = result
            return
        for parameter, i, result in zip(piece.parameters, piece.members, results, strict=True):
            if used is None or used[i]:
                parameter.grad = result if grad_is_view else self._copied(i, result)
            elif i in self._unused_previous:
                old, copy = self._unused_previous[i]
                parameter.grad = old.copy_(copy)
            else:
                parameter.grad = None

    def _copied(self, i: int, result: Tensor) -> Tensor:
        own, dtype = self._own.get(i), self._layout.parameters[i].dtype
        if own is None or result.is_sparse or (own.layout, own.dtype) != (result.layout, dtype):
            return result.to(dtype, copy=True)
        with torch.no_grad():
            return own.copy_(result)
