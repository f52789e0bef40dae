"""Reduces the gradients of a module: one pass after the other, on buckets that it arranges.

A gradient's way: autograd makes it and the last one of a piece calls (`_arrivals`); the pass under
way copies the piece's gradients into flat storage and launches a bucket when all of its pieces are
there (`_pass`, `_buckets`); the group reduces it in place (`_channel`); ``.grad`` becomes a view of
the storage.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Sequence
from functools import partial

import torch
from torch.autograd import Variable
from torch.nn import Parameter

from ..errors import InvalidState
from ._accumulators import Accumulators, OuterRun, this_run, without_graph
from ._agreement import verify_parameters
from ._apart import PreviousGrads
from ._arrangement import Arranger
from ._arrivals import Arrivals, UnderWay
from ._buckets import Bucket
from ._buffers import broadcast_tensors
from ._channel import Channel, Handle
from ._comm_hook import CommHook
from ._company import Company
from ._compiling import refuse_compiled_backward
from ._in_backward import OptimizersInBackward
from ._local_part import stand_in
from ._local_pass import LocalPass
from ._pass import Pass
from ._plan import Caps, Delay
from ._precision import Precision
from ._same_pass import warn_of_change
from ._scale import Scale
from ._scaling import NARROW, Scaling
from ._setting import Setting, Timing
from ._stats import Stats

__all__ = ["Reducer"]


class Reducer:
    """Sees to it that a backward pass leaves the same gradients on every rank."""

    def __init__(
        self,
        named: Sequence[tuple[str, Parameter]],
        channel: Channel,
        *,
        caps: Caps,
        sparse: frozenset[str] = frozenset(),
        delay: Delay = Delay(),  # noqa: B008 - it does not change
        reduce: str = "mean",
        keeps_views: bool = True,
        is_static: bool = False,
        check_every: int = 0,
        precision: Precision | None = None,
    ) -> None:
        self.named = [(name, stand_in(parameter)) for name, parameter in named]
        self._precision = precision
        self.optimizers = OptimizersInBackward(named)
        self.channel = channel
        dtype = None if precision is None else precision.gradient_dtype
        self._arranger = Arranger(channel, caps, sparse, delay, dtype)
        self.scaling = Scaling(channel, reduce)
        self.weights = self.scaling.weights
        self.hook: CommHook | None = None
        self._keeps_views = keeps_views
        self.is_static = is_static
        self._check_every = check_every
        self._is_closed = False
        self.was_surprised = False
        """The graph has changed at some time."""
        self.stats = Stats()
        self.forward_seconds = 0.0
        self.synchronises = True
        """Whether the next backward pass is reduced; asked when it begins."""
        self._passes = self._reduced = 0
        self._lifetime: UnderWay = [_none]
        """Returns None once autograd has dropped the pass under way: a weak reference to the queued
        callback, or `OuterRun.is_under_way`."""
        self.is_unsynced = False
        """Gradients hold what only this rank has."""
        self.keeps_apart = False
        """Whether ranks may be without data, so that reduced gradients are not reduced again."""
        self._previous = PreviousGrads()
        self._under_way: Pass | LocalPass | None = None
        self._announced: Handle | None = None
        self._order: list[int] | None = None  # a better one, from the first pass
        self.expects_backward = self.has_met_others = False
        self.graph_task: int | None = None
        self._company = Company.of(channel.group)
        self._arrivals = Arrivals([])
        self._since = time.perf_counter()
        self.take_on()
        self._company.enter(self)

    def use_hook(self, hook: CommHook) -> None:
        """Have a hook reduce the buckets from now on."""
        self.hook = hook
        self.scaling.has_hook = True
        if not self._must_learn:
            self._settle()

    # -- the plan --------------------------------------------------------------------------

    def take_on(self) -> None:
        """Begin with the parameters that need gradients now."""
        taken = [(name, p) for name, p in self.named if p.requires_grad]
        self.names = [name for name, _ in taken]
        self.parameters = [p for _, p in taken]
        self._frozen = [p for _, p in self.named if not p.requires_grad]
        self._accumulators = Accumulators(self.parameters)
        self._arrivals.close()  # the hooks that count other parameters
        self._arrivals = Arrivals(self.parameters)
        self._has_ordered, self._order = False, None
        # They are registered as forward uses them, most often; backward goes the other way.
        self._arrange(list(reversed(range(len(taken)))))
        self._must_learn = True

    def _arrange(self, order: list[int]) -> None:
        self._arranged_by = order
        taken = list(zip(self.names, self.parameters, strict=True))
        self._arrangement = self._arranger.arrange(taken, order)
        self._absent = [0] * len(self._arrangement.pieces)
        self._is_narrow = any(bucket.payload.dtype in NARROW for bucket in self.buckets)

    @property
    def buckets(self) -> list[Bucket]:
        """The buckets, in the order in which they are reduced."""
        return self._arrangement.buckets

    def prepare(self) -> None:
        """Get ready for a forward pass: adopt a better plan, or parameters that were unfrozen."""
        self._abandon_if_dead()
        if self._under_way is not None or self._is_closed:
            return  # a part of forward is run again, for the backward pass that wants its values
        self.expects_backward = True
        self.optimizers.check_first()
        if self._frozen and any(p.requires_grad for p in self._frozen):
            verify_parameters(self.named, self.channel)
            self.take_on()
        if self._must_learn:
            self._learn()
        elif self._order is not None:
            seen = set(self._arrivals.order)
            self._arrange(self._order)
            self._order = None
            if self._arrivals.is_learning:
                self._follow(seen)
            else:  # several passes have come out of the first forward
                self._learn()

    def prepare_for_backward(self, outputs: object) -> None:
        """Accept a hint of torch's pipelines: here a pass is noticed when it begins."""

    def learn_anew(self) -> None:
        """Learn from the next pass what comes when; all ranks do."""
        self._must_learn = True

    def _learn(self) -> None:
        self._must_learn = False
        self._arrivals.announce(self.begin_from_parameter, self._lifetime)
        self._arrivals.learn(self._on_arrival)
        self._settle()

    def _follow(self, seen: set[int]) -> None:
        members = [piece.members for piece in self._arrangement.pieces]
        self._arrivals.follow(members, self._on_ready)
        self._absent = [len(set(piece.members) - seen) for piece in self._arrangement.pieces]
        self._settle()

    @property
    def is_under_way(self) -> bool:
        """Tell whether a backward pass has begun and not ended."""
        return self._under_way is not None

    def broadcast_parameters(self, root: int = 0) -> None:
        """Give every rank one rank's parameters; gradients' storage is free for it meanwhile."""
        self._arrangement.broadcast_values(self.channel, root)
        taken = {id(p) for p in self._arrangement.with_storage()}
        rest = [p for _, p in self.named if id(p) not in taken]
        broadcast_tensors(rest, self.channel, root=root)

    # -- a pass ----------------------------------------------------------------------------

    def begin_from_output(self) -> None:
        """Begin a backward pass, unless it leaves gradients alone."""
        if self._precision is not None:
            self._precision.hold_in_backward()
        if not self._is_closed and self._accumulators.may_run():
            self.begin()

    def begin_from_parameter(self, i: int) -> None:
        """Begin a backward pass that has come to a parameter, but to no output that was found."""
        if self._precision is not None:
            self._precision.hold_in_backward()
        if not self._is_closed and self._accumulators.runs(i):
            self.begin()

    def begin(self) -> None:
        """Begin a backward pass, unless one is under way: before any gradient has come."""
        self._abandon_if_dead()
        if self._under_way is not None:
            return
        refuse_compiled_backward()
        self._forget_dropped()
        self._passes += 1
        self._arrivals.restart()
        outer = OuterRun.find()
        if outer is None:
            self._end_with_this_run()
        else:
            self._end_with_outer_run(outer)
        if not self.synchronises:
            self._accumulate()
            unweighted = self.parameters if self.weights.current == 0 else ()
            self._under_way = LocalPass(self.channel, unweighted)
            return
        self._reduced += 1
        if self.is_unsynced:
            self._previous.subtract()
        elif self._keeps_reduced_apart:
            self._previous.take_off(self.parameters)
        self._under_way = self._make_pass(
            self.scaling.scale(self.parameters, is_narrow=self._is_narrow),
            olds_count=self.is_unsynced,
        )
        if self._under_way.puts_back:
            self._arrivals.put_back(self._under_way.put_back)

    def _end_with_this_run(self) -> None:
        """End the pass when the run of autograd is over that calls us."""
        # Whoever asked autograd for a pass gets what we raise there.
        callback = partial(self._end_together)
        self._lifetime[0] = weakref.ref(callback)
        Variable._execution_engine.queue_callback(callback)
        self.graph_task = this_run()

    def _end_with_outer_run(self, outer: OuterRun) -> None:
        """End the pass when the run of autograd is over within which this one was started."""
        self._lifetime[0] = outer.is_under_way
        number = self._passes

        def end_with_it(_: object) -> None:
            handle.remove()
            if self._under_way is not None and self._passes == number:
                self._end_with_this_run()

        handle = outer.next_node.register_prehook(end_with_it)

    def _make_pass(self, scale: Scale, *, olds_count: bool = False) -> Pass:
        steps_early = self.is_static and self.optimizers and not self._previous
        return Pass(
            self._setting,
            scale,
            number=self._passes,
            olds_count=olds_count,
            keeps_reduced=bool(self._previous),
            proof=self.named if self._is_check_due() else (),
            launches_early=self._company.is_alone(self),
            timing=Timing(self._since, self.forward_seconds),
            optimizers=self.optimizers if steps_early else None,
        )

    def _accumulate(self) -> None:
        """Prepare gradients for more that only this rank has."""
        if not self.is_unsynced and self._keeps_reduced_apart:
            self._previous.keep_reduced(self.parameters)
        self.is_unsynced = True
        with self._previous.subtracted():
            self.weights.accumulate(self.parameters)
        self._note_local()

    @property
    def _keeps_reduced_apart(self) -> bool:
        """Tell whether ranks' shares of reduced gradients might not add up to one."""
        return self.keeps_apart or self.scaling.adds_up or self.weights.current is not None

    def _note_local(self) -> None:
        if self.weights.is_counting or self._previous:
            self._previous.note_local(self.parameters)

    def _forget_dropped(self) -> None:
        """Forget local passes if the user has zeroed what they left."""
        if self.is_unsynced and self._previous.forget_dropped():
            self.forget_local()

    def forget_local(self) -> None:
        """Forget local passes: their gradients were zeroed."""
        self._abandon_if_dead()
        if self._under_way is None:
            self.is_unsynced = False
            self.weights.clear()
            self._previous.clear()

    def _settle(self) -> None:
        """Put together what the passes that follow have in common."""
        self.optimizers.check()
        self._setting = Setting(
            channel=self.channel,
            names=self.names,
            parameters=self.parameters,
            buckets=self.buckets,
            pieces=self._arrangement.pieces,
            header=self._arrangement.header,
            keeps_views=self._keeps_views and all(b.holds_values for b in self.buckets),
            absent=self._absent,
            is_learning=self._arrivals.is_learning,
            hook=self.hook,
        )

    def _is_check_due(self) -> bool:
        return self._check_every > 0 and self._reduced % self._check_every == 0

    def shadow(self, *, reduces: bool) -> None:
        """Take part in a backward pass of the others, without gradients of one's own."""
        self._abandon_if_dead()
        self._passes += 1
        if not reduces:
            self._announced = LocalPass(self.channel).finish()
            return
        self._reduced += 1
        with torch.no_grad():
            self._forget_dropped()
            if not self.is_unsynced:
                self._previous.take_off(self.parameters)
            for parameter in self.parameters:
                parameter.grad = None
            shadow = self._make_pass(self.scaling.without_data())
            shadow.finish()
            shadow.is_surprised = False
            if self._arrangement.header.has_kept():  # only they know whether to zero gradients
                self._previous.add()
            if not self._has_ordered:
                self._agree_on_order()
            self._note(shadow)
        if self.optimizers:
            self.optimizers.step(besides=shadow.stepped)

    def _on_arrival(self, i: int) -> None:
        if self._under_way is not None:
            with without_graph():
                self._under_way.arrived(i)

    def _on_ready(self, number: int) -> None:
        if self._under_way is not None:
            with without_graph():
                self._under_way.ready(number)

    def _end_together(self) -> None:
        """End all passes of the run of autograd that has ended, unless somebody else has."""
        if self.graph_task is not None:
            for reducer in self._company.together_with(self):
                reducer.end()

    def end(self) -> None:
        """End the pass under way: autograd has come to the end of it."""
        under_way, self.graph_task = self._under_way, None
        self.expects_backward = False
        self._arrivals.rearm()
        with without_graph():
            if isinstance(under_way, LocalPass):
                self._announced = under_way.finish()
                self._note_local()
            elif under_way is not None:
                under_way.finish()
            # Not before: what does not come to its end has to be waited for, by whoever comes next.
            self._under_way = None
            if isinstance(under_way, Pass):
                self._previous.add()
                self._learn_from(under_way)
                self._note(under_way)
        if isinstance(under_way, Pass) and self.optimizers:
            self.optimizers.step(besides=under_way.stepped)

    def _note(self, done: Pass) -> None:
        self.is_unsynced = False
        self._announced = None
        self.was_surprised |= done.is_surprised
        self.weights.clear()
        self._previous.clear()
        self.stats.add(done.timing, self._arrangement.header.clocks(), self.buckets)
        self._since, self.forward_seconds = done.timing.ended, 0.0

    def _learn_from(self, done: Pass) -> None:
        if not self._has_ordered:
            self._agree_on_order()
        elif self._arrivals.is_learning:
            self._follow(set(self._arrivals.order))
        elif done.has_surprised:
            # On all ranks: who learns launches nothing early, and calls that a layer makes in
            # backward must find the same order everywhere.
            if done.is_surprised and self.is_static:
                warn_of_change()
            self._learn()

    def _agree_on_order(self) -> None:
        """Take over the order in which gradients came on one rank, from the next forward on."""
        seen = self._arrivals.order
        unseen = set(range(len(self.parameters))) - set(seen)
        order = torch.tensor(
            [*seen, *sorted(unseen, reverse=True)], dtype=torch.int64, device=self.channel.device
        )
        root = self._arrangement.header.with_data()[0]  # rank 0, unless it has left
        self.channel.broadcast(order, root).wait()
        self._order = order.tolist()
        self._has_ordered = True

    def _abandon_if_dead(self) -> None:
        """Forget a pass that did not come to its end, because something raised in it."""
        if self._under_way is not None and self._lifetime[0]() is None:
            under_way, self._under_way = self._under_way, None
            self.graph_task = None
            self._lifetime[0] = _none
            under_way.abandon()
            is_local = isinstance(under_way, LocalPass)
            self.weights.go_back(keeps_gradients=is_local)
            if is_local:
                self._previous.note_failure()
            else:
                self._previous.clear()
                self.is_unsynced = True  # what it has left, if anything, is this rank's own

    def progress(self) -> list[int]:
        """Tell in numbers what ranks have to be at one about before a pass, beside parameters."""
        order = self._arranged_by if self._order is None else self._order
        flags = int(self._has_ordered), int(self.has_met_others)
        return [self._passes, self._reduced, *flags, *order]

    def catch_up(self, progress: Sequence[int]) -> None:
        """Go on where one rank is, after passes that some took no part in; all ranks do."""
        self._passes, self._reduced, has_ordered, has_met_others, *order = progress
        self._has_ordered, self._order = bool(has_ordered), None
        self.has_met_others = bool(has_met_others)
        self._announced = None
        self.weights.clear()
        self._previous.clear()
        if order != self._arranged_by:
            self._arrange(order)

    def adopt(self, other: Reducer) -> None:
        """Take over what the user has set on another, which this one replaces."""
        self.synchronises = other.synchronises
        self.weights.current = other.weights.current
        if [id(p) for _, p in self.named] == [id(p) for _, p in other.named]:
            self.optimizers = other.optimizers
        elif other.optimizers:
            raise InvalidState(
                "load_state_dict(assign=True) replaced parameters with optimizers in backward. "
                "Load without assign=True, or wrap the module and register again"
            )

    def close(self) -> None:
        """Take the hooks off the parameters, and reduce nothing any more."""
        self._is_closed = True
        self._arrivals.close()
        self._company.leave(self)


def _none() -> None:
    """Say that there is no pass."""
