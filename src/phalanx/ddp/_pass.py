"""One backward pass of one rank, from the first gradient to the last.

Every bucket goes through the same states, in plan order:

``WAITING``   gradients are on their way, as tensors that autograd makes; as soon as all of a piece
              have come, they are copied into the bucket, and their ``.grad`` is None again;
``GATHERED``  all have come;
``LAUNCHED``  the bucket is being reduced;
``FINISHED``  it holds the result, and ``.grad`` shows it.

Autograd never writes into a bucket that is launched: a pass begins with every ``.grad`` put aside,
and what arrives after a piece was gathered makes a new tensor, a *late* gradient. (It may add to
the last bucket, which is launched when backward is over, and to an old gradient that lies in a
bucket which is not gathered yet.) So a bucket that was launched too early is not corrupted, and it
does not matter how often, or whether, a parameter is reached. Whether anybody was late, and which
parameters nobody used, all ranks learn from the header, and in the rare case reduce what came late
in one more round.
"""

from __future__ import annotations

import enum
import time
from contextlib import suppress
from functools import partial

import torch
from torch import Tensor

from ..errors import GroupError, HookError
from ._agreement import Named, fingerprint
from ._buckets import Bucket, Gradients, Piece, count_missing, times
from ._channel import Handle
from ._comm_hook import HookWork
from ._grad_bucket import GradBucket
from ._header import CYCLE, NO_DATA, Header
from ._in_backward import OptimizersInBackward
from ._local_part import LocalPart
from ._olds import first_of, pieces_of, put_aside
from ._same_pass import assert_same_pass, refuse_late
from ._scale import Scale
from ._setting import Setting, Timing

__all__ = ["Pass"]


class State(enum.Enum):
    """How far a bucket has come."""

    WAITING = enum.auto()
    GATHERED = enum.auto()
    LAUNCHED = enum.auto()
    FINISHED = enum.auto()


class Pass:
    """A backward pass whose gradients are reduced."""

    def __init__(
        self,
        setting: Setting,
        scale: Scale,
        *,
        number: int,
        olds_count: bool,
        keeps_reduced: bool,
        proof: Named,
        launches_early: bool,
        timing: Timing,
        optimizers: OptimizersInBackward | None = None,
    ) -> None:
        self._setting = setting
        self._scale = scale
        self._number = (number - 1) % CYCLE + 1
        self._olds_count = olds_count
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
        self.is_surprised = False
        """This rank's graph differs from the recorded one."""
        self.has_surprised = False
        """Some rank's graph does; known when the header has come."""
        self._states = [State.WAITING if b.pieces else State.GATHERED for b in setting.buckets]
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
        self._left = [len(piece.members) for piece in setting.pieces] if setting.is_learning else []
        self._pieces_of = pieces_of(setting.pieces) if setting.is_learning else {}
        self._arrived: set[int] = set()
        self._whole: list[int] = []
        """Pieces of a pass to learn from that have come, and are not gathered."""
        self._works: list[Handle | HookWork] = []
        self._unused: list[int] = []
        self._olds = put_aside(setting.parameters)
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}
        """Old gradients of parameters that this rank does not use, in case that nobody does; each
        with a copy, for it may lie in the bucket."""
        self._own: dict[int, Tensor | None] = {}
        """Tensors for ``.grad`` where it is not to be a view, by parameter."""

    # -- while gradients arrive ------------------------------------------------------------

    @property
    def puts_back(self) -> bool:
        """Whether there are old gradients that autograd may add to."""
        return bool(self._olds) and self._scale.adds_new

    def put_back(self, i: int) -> None:
        """Have autograd add a gradient that comes now to the old one, so that hooks see the sum."""
        old, parameter = self._olds[i], self._setting.parameters[i]
        if old is not None and not isinstance(parameter, LocalPart):
            parameter.grad = old
            self._olds[i] = None

    def arrived(self, i: int) -> None:
        """Take notice of a gradient, in a pass to learn from: gather early, but launch nothing.

        Its hooks may be still to run, so its piece is not gathered before another one's turn.
        """
        number = self._pieces_of[i]
        for whole in [each for each in self._whole if each != number]:
            self._whole.remove(whole)
            self._gather(whole, [p.grad for p in self._setting.pieces[whole].parameters])
            self._release(whole)
        if i not in self._arrived:
            self._arrived.add(i)
            self._left[number] -= 1
            if not self._left[number]:
                self._whole.append(number)

    def ready(self, number: int) -> None:
        """Take notice that the last gradient of a piece has probably come."""
        piece = self._setting.pieces[number]
        news = [p.grad for p in piece.parameters]
        if self._is_gathered[number] or count_missing(news) != self._setting.absent[number]:
            self.is_surprised = True
            return
        self._gather(number, news)
        self._release(number)
        last = len(self._states) - 1 if self._launches_early else 0
        while (turn := len(self._works)) < last and self._states[turn] is State.GATHERED:
            self._mark_arrival()
            self._launch(self._setting.buckets[turn])

    def _gather(self, number: int, news: Gradients) -> None:
        piece = self._setting.pieces[number]
        olds: Gradients = [self._olds[i] for i in piece.members] if self._olds else []
        if count_missing(news):
            self._note_unused(piece, news, olds)
        if not self._setting.keeps_views:
            self._own.update(zip(piece.members, first_of(olds, news), strict=True))
        bucket = self._setting.buckets[piece.home]
        if not self._scale.adds_new:
            news = [None] * len(news)
        bucket.gather(piece, news, olds, self._scale.factor)
        if olds:
            for i in piece.members:  # what comes late is not added to it again
                self._olds[i] = None
        self._is_gathered[number] = True
        self._waiting[bucket.index] -= 1
        if not self._waiting[bucket.index]:
            self._states[bucket.index] = State.GATHERED

    def _release(self, number: int) -> None:
        """Let go of tensors that have been gathered, and have what comes now do no harm.

        The last bucket is not launched before backward is over. Until then autograd may add to it,
        so its gradients can be shown already; for others it has to make a new tensor.
        """
        piece = self._setting.pieces[number]
        if self._shows_early and piece.home == len(self._states) - 1:
            views = self._setting.buckets[piece.home].results()[piece.places]
            if not self._setting.absent[number]:
                for parameter, view in zip(piece.parameters, views, strict=True):
                    parameter.grad = view
                self._is_shown[number] = True
                return
        for parameter in piece.parameters:
            parameter.grad = None

    def _note_unused(self, piece: Piece, news: Gradients, olds: Gradients) -> None:
        for place, i in enumerate(piece.members):
            old = olds[place] if olds else None
            if news[place] is None and not (self._olds_count and old is not None):
                self._unused.append(i)
                if old is not None:
                    self._kept[i] = old, old.clone()

    def _launch(self, bucket: Bucket) -> None:
        assert self._states[bucket.index] is State.GATHERED
        self._works.append(self._start(bucket))
        self._states[bucket.index] = State.LAUNCHED

    def _start(self, bucket: Bucket) -> Handle | HookWork:
        hook, channel = self._setting.hook, self._setting.channel
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
            all(not later.members for later in self._setting.buckets[bucket.index + 1 :]),
            group=self._setting.channel.group,
            names=[self._setting.names[i] for i in bucket.members],
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
        *others, last = self._setting.buckets
        backward = time.perf_counter() - self.timing.began
        late = self._collect_late()
        for number in range(len(self._setting.pieces)):
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
        header = self._setting.header
        if self._setting.hook is not None and last.members:
            self._setting.channel.sum(header.space).wait()  # a hook takes the gradients alone
        header.receive(self._number)
        assert_same_pass(header, self._setting.channel, self._number, self._proof)
        self.has_surprised = header.has_surprised()
        self._scale.after(self._setting.buckets, header)
        lates = header.late()
        if lates:
            if self._optimizers is not None:
                refuse_late([self._setting.names[i] for i in lates])
            self._add_late(lates, late)
        self.timing.exposed = time.perf_counter() - began
        self._show(self._used(header, lates))
        self.timing.ended = time.perf_counter()

    def _gather_at_last(self, number: int) -> None:
        """Gather a piece that nobody called for: because none of it comes, or by surprise."""
        news = [p.grad for p in self._setting.pieces[number].parameters]
        is_expected = count_missing(news) == self._setting.absent[number] == len(news)
        self.is_surprised |= not (is_expected or self._setting.is_learning)
        self._gather(number, news)

    def _collect_late(self) -> dict[int, Tensor]:
        """Take what came after its piece was gathered; late is what came after the launch."""
        late: dict[int, Tensor] = {}
        for number, piece in enumerate(self._setting.pieces):
            if not self._is_gathered[number] or self._is_shown[number]:
                continue
            news = [p.grad for p in piece.parameters]
            if count_missing(news) < len(news):
                self._take_late(piece, news, late)
        return late

    def _take_late(self, piece: Piece, news: Gradients, late: dict[int, Tensor]) -> None:
        is_launched = self._states[piece.home] is State.LAUNCHED
        for offset, gradient in enumerate(news):
            if gradient is None:
                continue
            if is_launched:
                late[piece.members[offset]] = gradient
                self.is_surprised = True
            else:
                place = piece.places.start + offset
                self._setting.buckets[piece.home].add(place, gradient, self._late_factor)
                if piece.members[offset] in self._unused:  # it was taken for one that does not come
                    self._unused.remove(piece.members[offset])
                    self.is_surprised = True

    def _write_header(self, backward: float, late: dict[int, Tensor]) -> None:
        self._setting.header.write(
            number=self._number,
            weight=self._scale.weight,
            fingerprint=fingerprint(self._proof) if self._proof else 0,
            forward=self.timing.forward,
            backward=backward,
            arrivals=self.timing.arrivals,
            unused=self._unused,
            late=list(late),
            is_surprised=self.is_surprised and self._scale.weight != NO_DATA,
            keeps_reduced=self._keeps_reduced and self._scale.weight != NO_DATA,
        )

    def _wait(self, *, steps: bool) -> None:
        for bucket, work in zip(self._setting.buckets, self._works, strict=True):
            try:
                work.wait()
            except GroupError as error:
                error.add_note(f"This is {self._describe(bucket)}.")
                raise
            self._states[bucket.index] = State.FINISHED
            if steps and bucket is not self._setting.buckets[-1]:
                self._step(bucket)

    def _step(self, bucket: Bucket) -> None:
        """Step the parameters of a bucket, if the header cannot change what it holds."""
        if self._scale.waits_for_header(bucket) or set(bucket.members) & set(self._unused):
            return
        for number, piece in enumerate(self._setting.pieces):
            if piece.home == bucket.index:
                self._show_piece(number, None)
        assert self._optimizers is not None
        self._optimizers.step_some(bucket.parameters)
        self.stepped.update(map(id, bucket.parameters))

    def _describe(self, bucket: Bucket) -> str:
        names = [self._setting.names[i] for i in bucket.members]
        shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
        return (
            f"bucket {bucket.index + 1} of {len(self._states)} of backward pass {self._number}, "
            f"with the gradients of {shown or 'no parameter'}"
        )

    def _add_late(self, which: list[int], mine: dict[int, Tensor]) -> None:
        homes = {i: (b, place) for b in self._setting.buckets for place, i in enumerate(b.members)}
        if self._setting.hook is not None:
            for bucket in {homes[i][0].index: homes[i][0] for i in which}.values():
                self._add_late_by_hook(bucket, mine)
            return
        works = []
        for i in which:
            bucket, place = homes[i]
            part = times(bucket.fitting(place, mine.get(i)), self._late_factor)
            works.append((bucket, place, part, self._scale.start(self._setting.channel, part)))
        for bucket, place, part, work in works:
            work.wait()
            bucket.add(place, self._scale.unscaled(part))

    def _add_late_by_hook(self, bucket: Bucket, mine: dict[int, Tensor]) -> None:
        """Send what came late of a bucket through the hook, as one more bucket of its kind."""
        assert self._setting.hook is not None
        rest = bucket.another()
        for place, i in enumerate(bucket.members):
            if i in mine:
                rest.add(place, mine[i], self._late_factor)
        shown = self._shown(rest)
        told = partial(self._describe, bucket)
        self._setting.hook.start(shown, rest.take, told=told).wait()
        for place, part in enumerate(rest.results()):
            bucket.add(place, self._scale.unscaled(part))

    def _used(self, header: Header, late: list[int]) -> list[bool] | None:
        """Tell of every parameter whether any rank has a gradient; None if all have been used."""
        if not header.has_unused():
            return None
        used = header.used()
        for i in late:
            used[i] = True
        return used

    # -- the results -----------------------------------------------------------------------

    def _show(self, used: list[bool] | None) -> None:
        for number in range(len(self._setting.pieces)):
            if not self._is_shown[number]:
                self._show_piece(number, used)

    def _show_piece(self, number: int, used: list[bool] | None) -> None:
        piece = self._setting.pieces[number]
        self._is_shown[number] = True
        results = self._setting.buckets[piece.home].results()[piece.places]
        if used is None and self._setting.keeps_views:
            for parameter, result in zip(piece.parameters, results, strict=True):
                parameter.grad = result
            return
        for parameter, i, result in zip(piece.parameters, piece.members, results, strict=True):
            is_used = used is None or used[i]
            parameter.grad = self._result(i, result) if is_used else self._as_it_was(i)

    def _result(self, i: int, result: Tensor) -> Tensor:
        if self._setting.keeps_views:
            return result
        own, dtype = self._own[i], self._setting.parameters[i].dtype
        if own is None or result.is_sparse or (own.layout, own.dtype) != (result.layout, dtype):
            return result.to(dtype, copy=True)
        with torch.no_grad():
            return own.copy_(result)

    def _as_it_was(self, i: int) -> Tensor | None:
        if i not in self._kept:
            return None
        old, copy = self._kept[i]
        return old.copy_(copy)
