"""One backward pass of one rank, from the first gradient to the last.

Every bucket goes through the same states, in plan order:

``WAITING``   its gradients are on their way, as tensors that autograd makes;
``GATHERED``  they have been copied into the bucket, and ``.grad`` is None again;
``LAUNCHED``  the bucket is being reduced;
``FINISHED``  it holds the result, and ``.grad`` shows it.

Autograd never sees the bucket: a pass begins with every ``.grad`` put aside, and what arrives after
a bucket was gathered makes a new tensor, a *late* gradient. So a bucket that was launched too early
is not corrupted, and it does not matter how often, or whether, a parameter is reached. Whether
anybody was late, and which parameters nobody used, all ranks learn from the header, and in the rare
case reduce what came late in one more round.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile

import torch
from torch import Tensor
from torch.nn import Parameter

from ..errors import GroupError, RankMismatch
from ._agreement import Named, assert_same_values, fingerprint
from ._buckets import Bucket, Gradients, count_missing
from ._channel import Channel, Handle
from ._header import CYCLE, Header
from ._scale import Scale

__all__ = ["LocalPass", "Pass", "Setting"]


class State(enum.Enum):
    """How far a bucket has come."""

    WAITING = enum.auto()
    GATHERED = enum.auto()
    LAUNCHED = enum.auto()
    FINISHED = enum.auto()


@dataclass(frozen=True)
class Setting:
    """What stays from one pass to the next."""

    channel: Channel
    names: Sequence[str]
    parameters: Sequence[Parameter]
    buckets: Sequence[Bucket]
    header: Header
    keeps_views: bool
    """After a pass, ``.grad`` is a view of the bucket, not a tensor of its own."""
    absent: Sequence[int]
    """How many gradients of each bucket did not come in the pass that was learnt from."""
    is_learning: bool


@dataclass
class Timing:
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


class LocalPass:
    """A backward pass whose gradients stay on this rank for now."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    def arrived(self, i: int) -> None:
        """Take no notice of a gradient."""

    def ready(self, number: int) -> None:
        """Take no notice of a bucket."""

    def abandon(self) -> None:
        """End without an end."""

    def finish(self) -> Handle | None:
        """Tell peers, where that is free: one that reduces this pass must not be left waiting."""
        return self._channel.announce() if self._channel.sees_calls else None


class Pass:
    """A backward pass whose gradients are reduced."""

    def __init__(
        self,
        setting: Setting,
        scale: Scale,
        *,
        number: int,
        first: int | None,
        olds_count: bool,
        proof: Named,
        timing: Timing,
    ) -> None:
        self._setting = setting
        self._scale = scale
        self._number = number % CYCLE
        self._olds_count = olds_count
        """Whether gradients from before the pass are this rank's own, and not reduced yet."""
        self._proof = proof
        """The parameters to compare over the ranks in this pass."""
        self.timing = timing
        self.is_surprised = False
        """The graph was not the one that was learnt from."""
        buckets = setting.buckets
        self._states = [State.WAITING] * len(buckets)
        self._left = [len(bucket.members) for bucket in buckets] if setting.is_learning else []
        self._home = _homes(buckets) if setting.is_learning else {}
        self._signalled: set[int] = set()
        self._works: list[Handle] = []
        self._unused: list[int] = []
        self._olds = _put_aside(setting.parameters, first)
        self._kept: dict[int, Tensor] = {}
        """Old gradients of parameters that this rank does not use, in case that nobody does."""
        self._own: dict[int, Gradients] = {}
        """Tensors for ``.grad`` where it is not to be a view, by bucket."""

    # -- while gradients arrive ------------------------------------------------------------

    def arrived(self, i: int) -> None:
        """Take notice of a gradient, in a pass to learn from: gather early, but launch nothing."""
        number = self._home.pop(i, None)
        if number is None:
            return  # not the first time that it came
        self._left[number] -= 1
        if not self._left[number]:
            bucket = self._setting.buckets[number]
            self._gather(bucket, [p.grad for p in bucket.parameters])
            self._clear(bucket)

    def ready(self, number: int) -> None:
        """Take notice that the last gradient of a bucket has probably come."""
        self._signalled.add(number)
        last = len(self._states) - 1
        while (turn := len(self._works)) < last and turn in self._signalled:
            bucket = self._setting.buckets[turn]
            news = [p.grad for p in bucket.parameters]
            if count_missing(news) != self._setting.absent[turn]:
                self.is_surprised = True
                return
            self._gather(bucket, news)
            self._clear(bucket)
            self._mark_arrival()
            self._launch(bucket)

    def _gather(self, bucket: Bucket, news: Gradients) -> None:
        olds: Gradients = [self._olds[i] for i in bucket.members] if self._olds else []
        if count_missing(news):
            self._note_unused(bucket, news, olds)
        if not self._setting.keeps_views:
            self._own[bucket.index] = _first_of(olds, news)
        bucket.gather(news, olds if self._olds_count else self._scale.olds(olds))
        self._states[bucket.index] = State.GATHERED

    def _clear(self, bucket: Bucket) -> None:
        """Have autograd make a new tensor of whatever comes now."""
        for parameter in bucket.parameters:
            parameter.grad = None

    def _note_unused(self, bucket: Bucket, news: Gradients, olds: Gradients) -> None:
        for place, i in enumerate(bucket.members):
            old = olds[place] if olds else None
            if news[place] is None and not (self._olds_count and old is not None):
                self._unused.append(i)
                if old is not None:
                    self._kept[i] = old.clone()

    def _launch(self, bucket: Bucket) -> None:
        assert self._states[bucket.index] is State.GATHERED
        self._scale.before(bucket)
        self._works.append(self._scale.start(self._setting.channel, bucket.payload))
        self._states[bucket.index] = State.LAUNCHED

    def _mark_arrival(self) -> None:
        self.timing.arrivals.append(time.perf_counter() - self.timing.since)

    def abandon(self) -> None:
        """End without an end: nobody may write into what peers are still reducing."""
        for work in self._works:
            work.wait()
        for parameter, old in zip(self._setting.parameters, self._olds, strict=False):
            if parameter.grad is None:
                parameter.grad = old

    # -- when backward is over -------------------------------------------------------------

    def finish(self) -> None:
        """Reduce what is left, wait for all of it, and show the results in ``.grad``."""
        *others, last = self._setting.buckets
        backward = time.perf_counter() - self.timing.began
        late = self._collect_late()
        for bucket in self._setting.buckets:
            if self._states[bucket.index] is State.WAITING:
                self._gather(bucket, [p.grad for p in bucket.parameters])
        self.is_surprised |= len(self._works) < self._expected()
        for bucket in others[len(self._works) :]:
            self._mark_arrival()
            self._launch(bucket)
        self._mark_arrival()
        self._write_header(backward, late)
        self._launch(last)
        began = time.perf_counter()
        self._wait()
        header = self._setting.header
        header.receive(self._scale.divisor)
        self._compare(header)
        self._scale.after(self._setting.buckets, header)
        lates = header.late()
        self._add_late(lates, late)
        self.timing.exposed = time.perf_counter() - began
        self._show(self._used(header, lates))
        self.timing.ended = time.perf_counter()

    def _expected(self) -> int:
        """Tell how many buckets would be under way by now, had it been as the last time."""
        if self._setting.is_learning:
            return 0
        *others, _ = self._setting.buckets
        absent = self._setting.absent
        return sum(1 for _ in takewhile(lambda b: absent[b.index] < len(b.members), others))

    def _collect_late(self) -> dict[int, Tensor]:
        """Take what came after its bucket was gathered; late is what came after the launch."""
        late: dict[int, Tensor] = {}
        for bucket in self._setting.buckets:
            if self._states[bucket.index] is State.WAITING:
                continue
            news = [p.grad for p in bucket.parameters]
            if count_missing(news) == len(news):
                continue
            for place, gradient in enumerate(news):
                if gradient is None:
                    continue
                if self._states[bucket.index] is State.GATHERED:
                    bucket.add(place, gradient)
                else:
                    late[bucket.members[place]] = gradient
                    self.is_surprised = True
        return late

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
        )

    def _wait(self) -> None:
        for bucket, work in zip(self._setting.buckets, self._works, strict=True):
            try:
                work.wait()
            except GroupError as error:
                error.add_note(f"This is {self._describe(bucket)}.")
                raise
            self._states[bucket.index] = State.FINISHED

    def _describe(self, bucket: Bucket) -> str:
        names = [self._setting.names[i] for i in bucket.members]
        shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
        return (
            f"bucket {bucket.index + 1} of {len(self._states)} of backward pass {self._number}, "
            f"with the gradients of {shown or 'no parameter'}"
        )

    def _compare(self, header: Header) -> None:
        """Raise, on every rank alike, if ranks are not in the same pass."""
        group = getattr(self._setting.channel.group, "label", "")
        if not header.same_number():
            numbers = enumerate(header.numbers())
            told = ", ".join(f"rank {rank}: {number}" for rank, number in numbers)
            raise RankMismatch(
                f"ranks have reduced the gradients of different backward passes ({told}): a rank "
                "has kept one local with no_sync() that others reduced, or called backward more "
                "often. The gradients are of no use; make the same calls on every rank",
                group=group,
                operation="backward",
            )
        without = header.without_weight()
        if without and len(without) < self._setting.channel.size:
            told = ", ".join(map(str, without))
            raise RankMismatch(
                f"rank {told} has no weight and the others have: set ddp.weight on every rank",
                group=group,
                operation="backward",
            )

        if self._proof and not header.same_fingerprints():
            assert_same_values(self._proof, self._setting.channel)

    def _add_late(self, which: list[int], mine: dict[int, Tensor]) -> None:
        if not which:
            return
        homes = {i: (b, place) for b in self._setting.buckets for place, i in enumerate(b.members)}
        works = []
        for i in which:
            bucket, place = homes[i]
            part = self._scale.scaled(mine[i] if i in mine else bucket.nothing(place))
            works.append((bucket, place, part, self._scale.start(self._setting.channel, part)))
        for bucket, place, part, work in works:
            work.wait()
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
        for bucket in self._setting.buckets:
            results = bucket.results()
            if used is None and self._setting.keeps_views:
                for parameter, result in zip(bucket.parameters, results, strict=True):
                    parameter.grad = result
                continue
            for place, i in enumerate(bucket.members):
                if used is None or used[i]:
                    bucket.parameters[place].grad = self._result(bucket, place, results[place])
                else:
                    bucket.parameters[place].grad = self._as_it_was(i)

    def _result(self, bucket: Bucket, place: int, result: Tensor) -> Tensor:
        if self._setting.keeps_views:
            return result
        own = self._own[bucket.index][place]
        if own is None or own.layout != result.layout or result.is_sparse:
            return result.clone()
        with torch.no_grad():
            return own.copy_(result)

    def _as_it_was(self, i: int) -> Tensor | None:
        old = self._olds[i] if self._olds else None
        if old is not None and i in self._kept:
            old.copy_(self._kept[i])
        return old


def _put_aside(parameters: Sequence[Parameter], first: int | None) -> list[Tensor | None]:
    """Take every gradient that there is, so that what arrives is new; nothing if there is none.

    That of `first` has arrived already: what there was before it is in it.
    """
    olds = [parameter.grad for parameter in parameters]
    new = None if first is None else olds[first]
    if first is not None:
        olds[first] = None
    if count_missing(olds) == len(olds):
        return []
    for parameter in parameters:
        parameter.grad = None
    if first is not None:
        parameters[first].grad = new
    return olds


def _homes(buckets: Sequence[Bucket]) -> dict[int, int]:
    return {i: bucket.index for bucket in buckets for i in bucket.members}


def _first_of(olds: Gradients, news: Gradients) -> Gradients:
    if not olds:
        return news
    return [new if old is None else old for old, new in zip(olds, news, strict=True)]
