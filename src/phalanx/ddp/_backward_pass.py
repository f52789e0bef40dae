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
import warnings
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

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
from ._previous_grads import first_grads, piece_by_parameter, take_previous_grads
from ._scaling import Scale


@dataclass(frozen=True)
class PassConfig:
    """What stays from one pass to the next."""

    channel: Communicator
    names: Sequence[str]
    parameters: Sequence[Parameter]
    buckets: Sequence[Bucket]
    pieces: Sequence[BucketPiece]
    """Of all buckets, in order."""
    header: PassHeader
    keeps_views: bool
    """After a pass, ``.grad`` is a view of the bucket, not a tensor of its own."""
    absent: Sequence[int]
    """How many gradients of each piece did not come in the pass that was learnt from."""
    is_recording: bool
    hook: CommHook | None
    """Reduces the buckets, in the place of the group."""


@dataclass
class PassTiming:
    """When things happened, in seconds of `time.perf_counter`."""

    since: float
    """The end of the last pass: a moment that is nearly the same for all ranks."""
    forward: float
    """The seconds spent in forward since then."""
    began: float = field(default_factory=time.perf_counter)
    arrivals: list[float] = field(default_factory=list)
    """When each bucket was launched."""
    exposed: float = 0.0
    """The seconds spent in communication while nothing was computed."""
    ended: float = 0.0


def assert_same_pass(
    header: PassHeader, channel: Communicator, number: int, proof: NamedTensors
) -> None:
    """Raise, on every rank alike, if ranks are not in the same pass, or not with the same values.

    `number`: the one of this rank's pass. `proof`: the parameters to compare.
    """
    group = getattr(channel.group, "label", "")
    if not header.same_number() and not _others_have_left(header, channel, number):
        numbers = enumerate(header.numbers())
        told = ", ".join(f"rank {rank}: {number}" for rank, number in numbers)
        raise RankMismatch(
            f"ranks have reduced the gradients of different backward passes ({told}): a rank "
            "has kept one local with no_sync() that others reduced, or called backward more "
            "often. The gradients are invalid; call backward and no_sync() the same way on every "
            "rank",
            group=group,
            operation="backward",
        )
    without = header.without_weight()
    if without and without != header.with_data():
        told = ", ".join(map(str, without))
        raise RankMismatch(
            f"rank {told} has no weight and the others have: set ddp.weight on every rank",
            group=group,
            operation="backward",
        )
    if proof and not header.same_fingerprints():
        assert_same_values(proof, channel)


def raise_late_gradients(names: Sequence[str]) -> None:
    """Raise, on every rank alike: these may have been stepped without what came late."""
    raise InvalidState(
        f"gradients of {', '.join(map(repr, names))} came after their bucket was reduced, and "
        "optimizers in backward step when a bucket is: the graph has changed although "
        "static_graph=True says that it does not. The parameters are invalid; go back to a "
        "checkpoint, and leave static_graph=True out"
    )


def warn_graph_changed() -> None:
    """Say that the graph is another one, where it was said that it would not be."""
    warnings.warn(
        "the graph of this backward pass is not that of the one before, although "
        "static_graph=True says so; the gradients are right all the same",
        RuntimeWarning,
        stacklevel=3,
    )


def _others_have_left(header: PassHeader, channel: Communicator, number: int) -> bool:
    """Tell whether ranks that are not in this pass have left the group."""
    away = {rank for rank, theirs in enumerate(header.numbers()) if theirs != number}
    return away.isdisjoint(channel.members())


class LocalPass:
    """A backward pass whose gradients stay on this rank for now.

    `unweighted`: parameters whose gradients are to be what they were, for the pass has weight 0.
    """

    def __init__(self, channel: Communicator, unweighted: Sequence[Parameter] = ()) -> None:
        self._channel = channel
        self._before = [(parameter, parameter.grad) for parameter in unweighted]
        for parameter in unweighted:
            parameter.grad = None

    def arrived(self, i: int) -> None:
        """Take no notice of a gradient."""

    def ready(self, number: int) -> None:
        """Take no notice of a bucket."""

    def abandon(self) -> None:
        """End without an end."""
        self._restore()

    def finish(self) -> AnyWork | None:
        """Tell peers, where that is free: one that reduces this pass must not be left waiting."""
        self._restore()
        return self._channel.announce() if self._channel.compares_calls else None

    def _restore(self) -> None:
        for parameter, before in self._before:
            is_new = before is None and parameter.grad is not None  # used, if for nothing
            parameter.grad = torch.zeros_like(parameter) if is_new else before


class BucketState(enum.Enum):
    """How far a bucket has come."""

    WAITING = enum.auto()
    GATHERED = enum.auto()
    LAUNCHED = enum.auto()
    FINISHED = enum.auto()


class ReducedPass:
    """A backward pass whose gradients are reduced."""

    def __init__(
        self,
        setting: PassConfig,
        scale: Scale,
        *,
        number: int,
        olds_count: bool,
        keeps_reduced: bool,
        proof: NamedTensors,
        launches_early: bool,
        timing: PassTiming,
        optimizers: OptimizersInBackward | None = None,
    ) -> None:
        self._pass_config = setting
        self._scale = scale
        self._number = (number - 1) % PASS_NUMBER_CYCLE + 1
        self._previous_are_local = olds_count
        """Whether gradients from before the pass are this rank's own, and not reduced yet."""
        self._keeps_reduced = keeps_reduced
        """Whether reduced gradients were taken off, and are added when the pass is over."""
        self._proof = proof
        """The parameters to compare over the ranks in this pass."""
        self._launches_early = launches_early
        self._optimizers = optimizers
        """Step a bucket's parameters when it is reduced: it was promised that none comes late."""
        self.stepped: set[int] = set()
        """The parameters that have been stepped, by identity."""
        self.timing = timing
        self.graph_changed = False
        """This rank's graph differs from the recorded one."""
        self.any_graph_changed = False
        """Some rank's graph does; known when the header has come."""
        self._states = [
            BucketState.WAITING if b.pieces else BucketState.GATHERED for b in setting.buckets
        ]
        self._waiting = [len(bucket.pieces) for bucket in setting.buckets]
        """How many pieces of each bucket have not been gathered."""
        self._is_gathered = [False] * len(setting.pieces)
        self._is_shown = [False] * len(setting.pieces)
        # With gradients that have a graph of their own, autograd would replace a tensor, not add;
        # and what it adds is not multiplied.
        self._shows_early = (
            setting.keeps_views
            and not torch.is_grad_enabled()
            and scale.factor == 1
            and scale.adds_new
        )
        self._late_factor = scale.factor if scale.adds_new else 0.0
        self._left = (
            [len(piece.members) for piece in setting.pieces] if setting.is_recording else []
        )
        self._pieces_of = piece_by_parameter(setting.pieces) if setting.is_recording else {}
        self._arrived: set[int] = set()
        self._whole: list[int] = []
        """Pieces of a pass to learn from that have come, and are not gathered."""
        self._works: list[AnyWork | HookWork] = []
        self._unused: list[int] = []
        self._previous_grads = take_previous_grads(setting.parameters)
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}
        """Old gradients of parameters that this rank does not use, in case that nobody does; each
        with a copy, for it may lie in the bucket."""
        self._own: dict[int, Tensor | None] = {}
        """Tensors for ``.grad`` where it is not to be a view, by parameter."""

    # -- while gradients arrive ------------------------------------------------------------

    @property
    def restores_previous(self) -> bool:
        """Whether there are old gradients that autograd may add to."""
        return bool(self._previous_grads) and self._scale.adds_new

    def restore_previous(self, i: int) -> None:
        """Have autograd add a gradient that comes now to the old one, so that hooks see the sum."""
        old, parameter = self._previous_grads[i], self._pass_config.parameters[i]
        if old is not None and not isinstance(parameter, LocalShard):
            parameter.grad = old
            self._previous_grads[i] = None

    def arrived(self, i: int) -> None:
        """Take notice of a gradient, in a pass to learn from: gather early, but launch nothing.

        Its hooks may be still to run, so its piece is not gathered before another one's turn.
        """
        number = self._pieces_of[i]
        for whole in [each for each in self._whole if each != number]:
            self._whole.remove(whole)
            self._gather(whole, [p.grad for p in self._pass_config.pieces[whole].parameters])
            self._release(whole)
        if i not in self._arrived:
            self._arrived.add(i)
            self._left[number] -= 1
            if not self._left[number]:
                self._whole.append(number)

    def ready(self, number: int) -> None:
        """Take notice that the last gradient of a piece has probably come."""
        piece = self._pass_config.pieces[number]
        news = [p.grad for p in piece.parameters]
        if self._is_gathered[number] or count_missing(news) != self._pass_config.absent[number]:
            self.graph_changed = True
            return
        self._gather(number, news)
        self._release(number)
        last = len(self._states) - 1 if self._launches_early else 0
        while (turn := len(self._works)) < last and self._states[turn] is BucketState.GATHERED:
            self._mark_arrival()
            self._launch(self._pass_config.buckets[turn])

    def _gather(self, number: int, news: Gradients) -> None:
        piece = self._pass_config.pieces[number]
        olds: Gradients = (
            [self._previous_grads[i] for i in piece.members] if self._previous_grads else []
        )
        if count_missing(news):
            self._note_unused(piece, news, olds)
        if not self._pass_config.keeps_views:
            self._own.update(zip(piece.members, first_grads(olds, news), strict=True))
        bucket = self._pass_config.buckets[piece.bucket_index]
        if not self._scale.adds_new:
            news = [None] * len(news)
        bucket.gather(piece, news, olds, self._scale.factor)
        if olds:
            for i in piece.members:  # what comes late is not added to it again
                self._previous_grads[i] = None
        self._is_gathered[number] = True
        self._waiting[bucket.index] -= 1
        if not self._waiting[bucket.index]:
            self._states[bucket.index] = BucketState.GATHERED

    def _release(self, number: int) -> None:
        """Let go of tensors that have been gathered, and have what comes now do no harm.

        The last bucket is not launched before backward is over. Until then autograd may add to it,
        so its gradients can be shown already; for others it has to make a new tensor.
        """
        piece = self._pass_config.pieces[number]
        if self._shows_early and piece.bucket_index == len(self._states) - 1:
            views = self._pass_config.buckets[piece.bucket_index].results()[piece.places]
            if not self._pass_config.absent[number]:
                for parameter, view in zip(piece.parameters, views, strict=True):
                    parameter.grad = view
                self._is_shown[number] = True
                return
        for parameter in piece.parameters:
            parameter.grad = None

    def _note_unused(self, piece: BucketPiece, news: Gradients, olds: Gradients) -> None:
        for place, i in enumerate(piece.members):
            old = olds[place] if olds else None
            if news[place] is None and not (self._previous_are_local and old is not None):
                self._unused.append(i)
                if old is not None:
                    self._kept[i] = old, old.clone()

    def _launch(self, bucket: Bucket) -> None:
        assert self._states[bucket.index] is BucketState.GATHERED
        self._works.append(self._start(bucket))
        self._states[bucket.index] = BucketState.LAUNCHED

    def _start(self, bucket: Bucket) -> AnyWork | HookWork:
        hook, channel = self._pass_config.hook, self._pass_config.channel
        if hook is None:
            return self._scale.start(channel, bucket.payload)
        if not bucket.members:  # but a header, which a hook has no part in
            return channel.sum(bucket.payload)
        if self._works:
            # A hook makes calls until its future has ended, and those of two must not mix. When to
            # begin is not a matter of time, for other calls must find the same order on all ranks.
            self._works[-1].wait()
        return hook.start(self._shown(bucket), bucket.take, told=partial(self._describe, bucket))

    def _shown(self, bucket: Bucket) -> GradBucket:
        """Make what a hook is given."""
        return GradBucket(
            bucket.index,
            bucket.buffer,
            bucket.results(),
            bucket.parameters,
            all(not later.members for later in self._pass_config.buckets[bucket.index + 1 :]),
            group=self._pass_config.channel.group,
            names=[self._pass_config.names[i] for i in bucket.members],
        )

    def _mark_arrival(self) -> None:
        self.timing.arrivals.append(time.perf_counter() - self.timing.since)

    def abandon(self) -> None:
        """End without an end: nobody may write into what peers are still reducing.

        Gradients from before the pass are gone, for they may lie in what has been reduced in part.
        """
        for work in self._works:
            with suppress(GroupError, HookError):  # who asks the group again hears of it
                work.wait()

    # -- when backward is over -------------------------------------------------------------

    def finish(self) -> None:
        """Reduce what is left, wait for all of it, and show the results in ``.grad``."""
        *others, last = self._pass_config.buckets
        backward = time.perf_counter() - self.timing.began
        late = self._collect_late()
        for number in range(len(self._pass_config.pieces)):
            if not self._is_gathered[number]:
                self._gather_at_last(number)
        for bucket in others[len(self._works) :]:
            self._mark_arrival()
            self._launch(bucket)
        self._mark_arrival()
        self._write_header(backward, late)
        self._launch(last)
        began = time.perf_counter()
        self._wait(steps=self._optimizers is not None and not (late or self._proof))
        header = self._pass_config.header
        if self._pass_config.hook is not None and last.members:
            self._pass_config.channel.sum(header.space).wait()  # a hook takes the gradients alone
        header.receive(self._number)
        assert_same_pass(header, self._pass_config.channel, self._number, self._proof)
        self.any_graph_changed = header.any_graph_changed()
        self._scale.after(self._pass_config.buckets, header)
        lates = header.late()
        if lates:
            if self._optimizers is not None:
                raise_late_gradients([self._pass_config.names[i] for i in lates])
            self._add_late(lates, late)
        self.timing.exposed = time.perf_counter() - began
        self._show(self._used(header, lates))
        self.timing.ended = time.perf_counter()

    def _gather_at_last(self, number: int) -> None:
        """Gather a piece that nobody called for: because none of it comes, or by surprise."""
        news = [p.grad for p in self._pass_config.pieces[number].parameters]
        is_expected = count_missing(news) == self._pass_config.absent[number] == len(news)
        self.graph_changed |= not (is_expected or self._pass_config.is_recording)
        self._gather(number, news)

    def _collect_late(self) -> dict[int, Tensor]:
        """Take what came after its piece was gathered; late is what came after the launch."""
        late: dict[int, Tensor] = {}
        for number, piece in enumerate(self._pass_config.pieces):
            if not self._is_gathered[number] or self._is_shown[number]:
                continue
            news = [p.grad for p in piece.parameters]
            if count_missing(news) < len(news):
                self._take_late(piece, news, late)
        return late

    def _take_late(self, piece: BucketPiece, news: Gradients, late: dict[int, Tensor]) -> None:
        is_launched = self._states[piece.bucket_index] is BucketState.LAUNCHED
        for offset, gradient in enumerate(news):
            if gradient is None:
                continue
            if is_launched:
                late[piece.members[offset]] = gradient
                self.graph_changed = True
            else:
                place = piece.places.start + offset
                self._pass_config.buckets[piece.bucket_index].add(
                    place, gradient, self._late_factor
                )
                if piece.members[offset] in self._unused:  # it was taken for one that does not come
                    self._unused.remove(piece.members[offset])
                    self.graph_changed = True

    def _write_header(self, backward: float, late: dict[int, Tensor]) -> None:
        self._pass_config.header.write(
            number=self._number,
            weight=self._scale.weight,
            fingerprint=fingerprint(self._proof) if self._proof else 0,
            forward=self.timing.forward,
            backward=backward,
            arrivals=self.timing.arrivals,
            unused=self._unused,
            late=list(late),
            is_surprised=self.graph_changed and self._scale.weight != NO_DATA,
            keeps_reduced=self._keeps_reduced and self._scale.weight != NO_DATA,
        )

    def _wait(self, *, steps: bool) -> None:
        for bucket, work in zip(self._pass_config.buckets, self._works, strict=True):
            try:
                work.wait()
            except GroupError as error:
                error.add_note(f"This is {self._describe(bucket)}.")
                raise
            self._states[bucket.index] = BucketState.FINISHED
            if steps and bucket is not self._pass_config.buckets[-1]:
                self._step(bucket)

    def _step(self, bucket: Bucket) -> None:
        """Step the parameters of a bucket, if the header cannot change what it holds."""
        if self._scale.waits_for_header(bucket) or set(bucket.members) & set(self._unused):
            return
        for number, piece in enumerate(self._pass_config.pieces):
            if piece.bucket_index == bucket.index:
                self._show_piece(number, None)
        assert self._optimizers is not None
        self._optimizers.step_parameters(bucket.parameters)
        self.stepped.update(map(id, bucket.parameters))

    def _describe(self, bucket: Bucket) -> str:
        names = [self._pass_config.names[i] for i in bucket.members]
        shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
        return (
            f"bucket {bucket.index + 1} of {len(self._states)} of backward pass {self._number}, "
            f"with the gradients of {shown or 'no parameter'}"
        )

    def _add_late(self, which: list[int], mine: dict[int, Tensor]) -> None:
        homes = {
            i: (b, place) for b in self._pass_config.buckets for place, i in enumerate(b.members)
        }
        if self._pass_config.hook is not None:
            for bucket in {homes[i][0].index: homes[i][0] for i in which}.values():
                self._add_late_by_hook(bucket, mine)
            return
        works = []
        for i in which:
            bucket, place = homes[i]
            part = scale_gradient(bucket.as_payload(place, mine.get(i)), self._late_factor)
            works.append((bucket, place, part, self._scale.start(self._pass_config.channel, part)))
        for bucket, place, part, work in works:
            work.wait()
            bucket.add(place, self._scale.unscaled(part))

    def _add_late_by_hook(self, bucket: Bucket, mine: dict[int, Tensor]) -> None:
        """Send what came late of a bucket through the hook, as one more bucket of its kind."""
        assert self._pass_config.hook is not None
        rest = bucket.zeroed_copy()
        for place, i in enumerate(bucket.members):
            if i in mine:
                rest.add(place, mine[i], self._late_factor)
        shown = self._shown(rest)
        told = partial(self._describe, bucket)
        self._pass_config.hook.start(shown, rest.take, told=told).wait()
        for place, part in enumerate(rest.results()):
            bucket.add(place, self._scale.unscaled(part))

    def _used(self, header: PassHeader, late: list[int]) -> list[bool] | None:
        """Tell of every parameter whether any rank has a gradient; None if all have been used."""
        if not header.has_unused():
            return None
        used = header.used()
        for i in late:
            used[i] = True
        return used

    # -- the results -----------------------------------------------------------------------

    def _show(self, used: list[bool] | None) -> None:
        for number in range(len(self._pass_config.pieces)):
            if not self._is_shown[number]:
                self._show_piece(number, used)

    def _show_piece(self, number: int, used: list[bool] | None) -> None:
        piece = self._pass_config.pieces[number]
        self._is_shown[number] = True
        results = self._pass_config.buckets[piece.bucket_index].results()[piece.places]
        if used is None and self._pass_config.keeps_views:
            for parameter, result in zip(piece.parameters, results, strict=True):
                parameter.grad = result
            return
        for parameter, i, result in zip(piece.parameters, piece.members, results, strict=True):
            is_used = used is None or used[i]
            parameter.grad = self._result(i, result) if is_used else self._as_it_was(i)

    def _result(self, i: int, result: Tensor) -> Tensor:
        if self._pass_config.keeps_views:
            return result
        own, dtype = self._own[i], self._pass_config.parameters[i].dtype
        if own is None or result.is_sparse or (own.layout, own.dtype) != (result.layout, dtype):
            return result.to(dtype, copy=True)
        with torch.no_grad():
            return own.copy_(result)

    def _as_it_was(self, i: int) -> Tensor | None:
        if i not in self._kept:
            return None
        old, copy = self._kept[i]
        return old.copy_(copy)
