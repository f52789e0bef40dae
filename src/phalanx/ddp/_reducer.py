"""The reducer: runs one backward pass after another over the buckets of a module.

`Reducer` decides what a pass is. It begins one when autograd reaches an output or a parameter,
ends it when autograd's graph task is over, drops it if that failed, and learns the order of
gradients from it. `_backward_pass` does the work of a single pass.

`ReducerRegistry` orders the reducers of one group. A reducer launches its buckets in plan order,
whatever the graph. Two reducers in one backward pass would launch in the order in which autograd
reaches them, which may differ between ranks. So nothing is launched early while another reducer
may take part, and at the end reducers finish in the order of their construction.

`DistributedAutogradPass` reduces gradients that `torch.distributed.autograd` keeps in a context.
They never reach `.grad`, so no hook on a parameter sees them.
"""

from __future__ import annotations

import sys
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Variable
from torch.nn import Parameter

from ..errors import InvalidState
from ._autograd_hooks import (
    AccumulateGradNodes,
    AutogradHooks,
    OuterGraphTask,
    PassLifetime,
    current_graph_task,
    without_graph,
)
from ._backward_pass import LocalPass, PassConfig, PassTiming, ReducedPass, warn_graph_changed
from ._buckets import Bucket, BucketCaps, BucketLayoutBuilder, DelayedReduction
from ._comm_hook import CommHook
from ._communicator import AnyWork, Communicator, broadcast_coalesced
from ._dtensor import as_local_shard
from ._interop import refuse_compiled_backward
from ._mixed_precision import PrecisionPolicy
from ._optimizer_in_backward import OptimizersInBackward
from ._parameter_consistency import verify_parameters
from ._previous_grads import PreviousGrads
from ._scaling import OVERFLOW_PRONE_DTYPES, Scale, ScaleSelector
from ._stats import StatsHistory


class RegisteredReducer(Protocol):
    """What reducers of a group have to know of each other."""

    expects_backward: bool
    """There was a forward pass whose backward pass has not come."""
    has_shared_backward: bool
    """Some backward pass was not its own alone."""

    @property
    def graph_task(self) -> int | None:
        """Tell the run of autograd that its pass under way belongs to."""

    def end(self) -> None:
        """End that pass."""


class ReducerRegistry:
    """The reducers of one group, in the order in which they were made."""

    def __init__(self) -> None:
        self._members: list[weakref.ref[RegisteredReducer]] = []

    @staticmethod
    def of(group: dist.ProcessGroup) -> ReducerRegistry:
        """Return the company of a group; all who ask for the same group get the same."""
        return _registries.setdefault(group, ReducerRegistry())

    def enter(self, member: RegisteredReducer) -> None:
        """Become a member; on every rank in the same order."""
        self._members.append(weakref.ref(member, self._members.remove))

    def leave(self, member: RegisteredReducer) -> None:
        """Be a member no more."""
        self._members[:] = [known for known in self._members if known() is not member]

    def is_only_reducer(self, member: RegisteredReducer) -> bool:
        """Tell whether no other reducer can take part in the backward pass that begins."""
        if len(self._members) == 1:
            return True
        others = [other for other in self._all() if other is not member]
        return not (member.has_shared_backward or any(other.expects_backward for other in others))

    def participants(self, member: RegisteredReducer) -> list[RegisteredReducer]:
        """List who takes part in a member's backward pass, itself included, in order."""
        if len(self._members) == 1:
            return [member]
        present = [other for other in self._all() if other.graph_task == member.graph_task]
        for each in present:
            each.has_shared_backward |= len(present) > 1
        return present

    def _all(self) -> list[RegisteredReducer]:
        members = (known() for known in self._members)
        return [member for member in members if member is not None]


_registries: weakref.WeakKeyDictionary[dist.ProcessGroup, ReducerRegistry] = (
    weakref.WeakKeyDictionary()
)


class Reducer:
    """Sees to it that a backward pass leaves the same gradients on every rank."""

    def __init__(
        self,
        named: Sequence[tuple[str, Parameter]],
        channel: Communicator,
        *,
        caps: BucketCaps,
        sparse: frozenset[str] = frozenset(),
        delay: DelayedReduction = DelayedReduction(),  # noqa: B008 - it does not change
        reduce: str = "mean",
        keeps_views: bool = True,
        is_static: bool = False,
        check_every: int = 0,
        precision: PrecisionPolicy | None = None,
    ) -> None:
        self.named = [(name, as_local_shard(parameter)) for name, parameter in named]
        self._precision = precision
        self.optimizers = OptimizersInBackward(named)
        self.channel = channel
        dtype = None if precision is None else precision.gradient_dtype
        self._layout_builder = BucketLayoutBuilder(channel, caps, sparse, delay, dtype)
        self.scaling = ScaleSelector(channel, reduce)
        self.weights = self.scaling.weights
        self.hook: CommHook | None = None
        self._keeps_views = keeps_views
        self.is_static = is_static
        self._check_every = check_every
        self._is_closed = False
        self.graph_ever_changed = False
        """The graph has changed at some time."""
        self.stats = StatsHistory()
        self.forward_seconds = 0.0
        self.syncs_gradients = True
        """Whether the next backward pass is reduced; asked when it begins."""
        self._passes = self._reduced = 0
        self._lifetime: PassLifetime = [_no_pass]
        """Returns None once autograd has dropped the pass under way: a weak reference to the queued
        callback, or `OuterGraphTask.is_running`."""
        self.has_local_grads = False
        """Gradients hold what only this rank has."""
        self.may_lack_data = False
        """Whether ranks may be without data, so that reduced gradients are not reduced again."""
        self._previous = PreviousGrads()
        self._in_flight: ReducedPass | LocalPass | None = None
        self._announced: AnyWork | None = None
        self._order: list[int] | None = None  # a better one, from the first pass
        self.expects_backward = self.has_shared_backward = False
        self.graph_task: int | None = None
        self._company = ReducerRegistry.of(channel.group)
        self._autograd_hooks = AutogradHooks([])
        self._since = time.perf_counter()
        self.track_trainable_parameters()
        self._company.enter(self)

    def use_hook(self, hook: CommHook) -> None:
        """Have a hook reduce the buckets from now on."""
        self.hook = hook
        self.scaling.has_hook = True
        if not self._must_record:
            self._settle()

    # -- the plan --------------------------------------------------------------------------

    def track_trainable_parameters(self) -> None:
        """Begin with the parameters that need gradients now."""
        taken = [(name, p) for name, p in self.named if p.requires_grad]
        self.names = [name for name, _ in taken]
        self.parameters = [p for _, p in taken]
        self._frozen = [p for _, p in self.named if not p.requires_grad]
        self._accumulators = AccumulateGradNodes(self.parameters)
        self._autograd_hooks.close()  # the hooks that count other parameters
        self._autograd_hooks = AutogradHooks(self.parameters)
        self._has_agreed_order, self._order = False, None
        # They are registered as forward uses them, most often; backward goes the other way.
        self._arrange(list(reversed(range(len(taken)))))
        self._must_record = True

    def _arrange(self, order: list[int]) -> None:
        self._arranged_by = order
        taken = list(zip(self.names, self.parameters, strict=True))
        self._layout = self._layout_builder.arrange(taken, order)
        self._absent = [0] * len(self._layout.pieces)
        self._may_overflow = any(
            bucket.payload.dtype in OVERFLOW_PRONE_DTYPES for bucket in self.buckets
        )

    @property
    def buckets(self) -> list[Bucket]:
        """The buckets, in the order in which they are reduced."""
        return self._layout.buckets

    def prepare(self) -> None:
        """Get ready for a forward pass: adopt a better plan, or parameters that were unfrozen."""
        self._abandon_if_dead()
        if self._in_flight is not None or self._is_closed:
            return  # a part of forward is run again, for the backward pass that wants its values
        self.expects_backward = True
        self.optimizers.check_first()
        if self._frozen and any(p.requires_grad for p in self._frozen):
            verify_parameters(self.named, self.channel)
            self.track_trainable_parameters()
        if self._must_record:
            self._start_recording()
        elif self._order is not None:
            seen = set(self._autograd_hooks.order)
            self._arrange(self._order)
            self._order = None
            if self._autograd_hooks.is_recording:
                self._follow(seen)
            else:  # several passes have come out of the first forward
                self._start_recording()

    def prepare_for_backward(self, outputs: object) -> None:
        """Accept a hint of torch's pipelines: here a pass is noticed when it begins."""

    def record_again(self) -> None:
        """Learn from the next pass what comes when; all ranks do."""
        self._must_record = True

    def _start_recording(self) -> None:
        self._must_record = False
        self._autograd_hooks.announce(self.begin_from_parameter, self._lifetime)
        self._autograd_hooks.learn(self._on_arrival)
        self._settle()

    def _follow(self, seen: set[int]) -> None:
        members = [piece.members for piece in self._layout.pieces]
        self._autograd_hooks.follow(members, self._on_ready)
        self._absent = [len(set(piece.members) - seen) for piece in self._layout.pieces]
        self._settle()

    @property
    def is_running(self) -> bool:
        """Tell whether a backward pass has begun and not ended."""
        return self._in_flight is not None

    def broadcast_parameters(self, root: int = 0) -> None:
        """Give every rank one rank's parameters; gradients' storage is free for it meanwhile."""
        self._layout.broadcast_values(self.channel, root)
        taken = {id(p) for p in self._layout.parameters_in_buckets()}
        rest = [p for _, p in self.named if id(p) not in taken]
        broadcast_coalesced(rest, self.channel, root=root)

    # -- a pass ----------------------------------------------------------------------------

    def begin_from_output(self) -> None:
        """Begin a backward pass, unless it leaves gradients alone."""
        if self._precision is not None:
            self._precision.use_copies_in_backward()
        if not self._is_closed and self._accumulators.may_run():
            self.begin()

    def begin_from_parameter(self, i: int) -> None:
        """Begin a backward pass that has come to a parameter, but to no output that was found."""
        if self._precision is not None:
            self._precision.use_copies_in_backward()
        if not self._is_closed and self._accumulators.runs(i):
            self.begin()

    def begin(self) -> None:
        """Begin a backward pass, unless one is under way: before any gradient has come."""
        self._abandon_if_dead()
        if self._in_flight is not None:
            return
        refuse_compiled_backward()
        self._forget_dropped()
        self._passes += 1
        self._autograd_hooks.restart()
        outer = OuterGraphTask.find()
        if outer is None:
            self._end_with_this_run()
        else:
            self._end_with_outer_run(outer)
        if not self.syncs_gradients:
            self._accumulate()
            unweighted = self.parameters if self.weights.current == 0 else ()
            self._in_flight = LocalPass(self.channel, unweighted)
            return
        self._reduced += 1
        if self.has_local_grads:
            self._previous.subtract()
        elif self._keeps_reduced_apart:
            self._previous.set_aside(self.parameters)
        self._in_flight = self._make_pass(
            self.scaling.scale(self.parameters, is_narrow=self._may_overflow),
            olds_count=self.has_local_grads,
        )
        if self._in_flight.restores_previous:
            self._autograd_hooks.restore_previous(self._in_flight.restore_previous)

    def _end_with_this_run(self) -> None:
        """End the pass when the run of autograd is over that calls us."""
        # Whoever asked autograd for a pass gets what we raise there.
        callback = partial(self._end_all)
        self._lifetime[0] = weakref.ref(callback)
        Variable._execution_engine.queue_callback(callback)
        self.graph_task = current_graph_task()

    def _end_with_outer_run(self, outer: OuterGraphTask) -> None:
        """End the pass when the run of autograd is over within which this one was started."""
        self._lifetime[0] = outer.is_running
        number = self._passes

        def end_with_it(_: object) -> None:
            handle.remove()
            if self._in_flight is not None and self._passes == number:
                self._end_with_this_run()

        handle = outer.next_node.register_prehook(end_with_it)

    def _make_pass(self, scale: Scale, *, olds_count: bool = False) -> ReducedPass:
        steps_early = self.is_static and self.optimizers and not self._previous
        return ReducedPass(
            self._pass_config,
            scale,
            number=self._passes,
            olds_count=olds_count,
            keeps_reduced=bool(self._previous),
            proof=self.named if self._is_check_due() else (),
            launches_early=self._company.is_only_reducer(self),
            timing=PassTiming(self._since, self.forward_seconds),
            optimizers=self.optimizers if steps_early else None,
        )

    def _accumulate(self) -> None:
        """Prepare gradients for more that only this rank has."""
        if not self.has_local_grads and self._keeps_reduced_apart:
            self._previous.keep_reduced(self.parameters)
        self.has_local_grads = True
        with self._previous.subtracted():
            self.weights.accumulate(self.parameters)
        self._note_local()

    @property
    def _keeps_reduced_apart(self) -> bool:
        """Tell whether ranks' shares of reduced gradients might not add up to one."""
        return self.may_lack_data or self.scaling.adds_up or self.weights.current is not None

    def _note_local(self) -> None:
        if self.weights.is_counting or self._previous:
            self._previous.note_local(self.parameters)

    def _forget_dropped(self) -> None:
        """Forget local passes if the user has zeroed what they left."""
        if self.has_local_grads and self._previous.drop_zeroed():
            self.drop_local_grads()

    def drop_local_grads(self) -> None:
        """Forget local passes: their gradients were zeroed."""
        self._abandon_if_dead()
        if self._in_flight is None:
            self.has_local_grads = False
            self.weights.clear()
            self._previous.clear()

    def _settle(self) -> None:
        """Put together what the passes that follow have in common."""
        self.optimizers.check()
        self._pass_config = PassConfig(
            channel=self.channel,
            names=self.names,
            parameters=self.parameters,
            buckets=self.buckets,
            pieces=self._layout.pieces,
            header=self._layout.header,
            keeps_views=self._keeps_views and all(b.holds_values for b in self.buckets),
            absent=self._absent,
            is_recording=self._autograd_hooks.is_recording,
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
            if not self.has_local_grads:
                self._previous.set_aside(self.parameters)
            for parameter in self.parameters:
                parameter.grad = None
            shadow = self._make_pass(self.scaling.without_data())
            shadow.finish()
            shadow.graph_changed = False
            if self._layout.header.any_kept_reduced():  # only they know whether to zero gradients
                self._previous.add()
            if not self._has_agreed_order:
                self._agree_on_order()
            self._note(shadow)
        if self.optimizers:
            self.optimizers.step(besides=shadow.stepped)

    def _on_arrival(self, i: int) -> None:
        if self._in_flight is not None:
            with without_graph():
                self._in_flight.arrived(i)

    def _on_ready(self, number: int) -> None:
        if self._in_flight is not None:
            with without_graph():
                self._in_flight.ready(number)

    def _end_all(self) -> None:
        """End all passes of the run of autograd that has ended, unless somebody else has."""
        if self.graph_task is not None:
            for reducer in self._company.participants(self):
                reducer.end()

    def end(self) -> None:
        """End the pass under way: autograd has come to the end of it."""
        under_way, self.graph_task = self._in_flight, None
        self.expects_backward = False
        self._autograd_hooks.rearm()
        with without_graph():
            if isinstance(under_way, LocalPass):
                self._announced = under_way.finish()
                self._note_local()
            elif under_way is not None:
                under_way.finish()
            # Not before: what does not come to its end has to be waited for, by whoever comes next.
            self._in_flight = None
            if isinstance(under_way, ReducedPass):
                self._previous.add()
                self._learn_from(under_way)
                self._note(under_way)
        if isinstance(under_way, ReducedPass) and self.optimizers:
            self.optimizers.step(besides=under_way.stepped)

    def _note(self, done: ReducedPass) -> None:
        self.has_local_grads = False
        self._announced = None
        self.graph_ever_changed |= done.graph_changed
        self.weights.clear()
        self._previous.clear()
        self.stats.add(done.timing, self._layout.header.clocks(), self.buckets)
        self._since, self.forward_seconds = done.timing.ended, 0.0

    def _learn_from(self, done: ReducedPass) -> None:
        if not self._has_agreed_order:
            self._agree_on_order()
        elif self._autograd_hooks.is_recording:
            self._follow(set(self._autograd_hooks.order))
        elif done.any_graph_changed:
            # On all ranks: who learns launches nothing early, and calls that a layer makes in
            # backward must find the same order everywhere.
            if done.graph_changed and self.is_static:
                warn_graph_changed()
            self._start_recording()

    def _agree_on_order(self) -> None:
        """Take over the order in which gradients came on one rank, from the next forward on."""
        seen = self._autograd_hooks.order
        unseen = set(range(len(self.parameters))) - set(seen)
        order = torch.tensor(
            [*seen, *sorted(unseen, reverse=True)], dtype=torch.int64, device=self.channel.device
        )
        root = self._layout.header.with_data()[0]  # rank 0, unless it has left
        self.channel.broadcast(order, root).wait()
        self._order = order.tolist()
        self._has_agreed_order = True

    def _abandon_if_dead(self) -> None:
        """Forget a pass that did not come to its end, because something raised in it."""
        if self._in_flight is not None and self._lifetime[0]() is None:
            under_way, self._in_flight = self._in_flight, None
            self.graph_task = None
            self._lifetime[0] = _no_pass
            under_way.abandon()
            is_local = isinstance(under_way, LocalPass)
            self.weights.undo_last_pass(keeps_gradients=is_local)
            if is_local:
                self._previous.note_failure()
            else:
                self._previous.clear()
                self.has_local_grads = True  # what it has left, if anything, is this rank's own

    def progress(self) -> list[int]:
        """Tell in numbers what ranks have to be at one about before a pass, beside parameters."""
        order = self._arranged_by if self._order is None else self._order
        flags = int(self._has_agreed_order), int(self.has_shared_backward)
        return [self._passes, self._reduced, *flags, *order]

    def catch_up(self, progress: Sequence[int]) -> None:
        """Go on where one rank is, after passes that some took no part in; all ranks do."""
        self._passes, self._reduced, has_ordered, has_met_others, *order = progress
        self._has_agreed_order, self._order = bool(has_ordered), None
        self.has_shared_backward = bool(has_met_others)
        self._announced = None
        self.weights.clear()
        self._previous.clear()
        if order != self._arranged_by:
            self._arrange(order)

    def adopt(self, other: Reducer) -> None:
        """Take over what the user has set on another, which this one replaces."""
        self.syncs_gradients = other.syncs_gradients
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
        self._autograd_hooks.close()
        self._company.leave(self)


def _no_pass() -> None:
    """Say that there is no pass."""


def backward_callback(reducer: Reducer, *, adds_up: bool) -> Callable[[], None]:
    """Return what to call when a backward pass begins from the forward pass that is ending now."""
    context = _current_context()
    if context is None:
        return reducer.begin_from_output
    return DistributedAutogradPass(reducer, context, adds_up=adds_up).begin


def _current_context() -> int | None:
    """Tell the context that this thread records a forward pass in, if any."""
    rpc: Any = sys.modules.get("torch.distributed.rpc.api")
    if rpc is None or not rpc._is_current_rpc_agent_set():
        return None
    try:
        return torch._C._distributed_autograd._current_context()._context_id()
    except RuntimeError:  # what it says where there is none
        return None


class DistributedAutogradPass:
    """What comes back from one forward pass that was recorded in a context."""

    def __init__(self, reducer: Reducer, context: int, *, adds_up: bool) -> None:
        self._reducer = reducer
        self._context = context
        self._adds_up = adds_up
        self._has_begun = False

    def begin(self) -> None:
        """Take notice that a backward pass has begun; it comes here from every output."""
        self._reducer.begin_from_output()  # a plain one, perhaps, whatever was recorded
        if self._reducer.is_running or self._has_begun or not self._reducer.syncs_gradients:
            return
        self._has_begun = True
        Variable._execution_engine.queue_callback(self._finish)

    def _finish(self) -> None:
        self._has_begun = self._reducer.expects_backward = False
        if self._reducer.hook is not None:
            raise InvalidState(
                f"communication hook {self._reducer.hook.name} reduces gradients that come to "
                "``.grad``, and those of a context of autograd's do not"
            )
        found = torch._C._distributed_autograd.get_gradients(self._context)
        kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = defaultdict(list)
        for parameter in self._reducer.parameters:
            kinds[parameter.dtype, parameter.device].append(parameter)
        with torch.no_grad():
            for parameters in kinds.values():
                self._reduce(parameters, [found.get(each) for each in parameters])

    def _reduce(self, parameters: list[Tensor], gradients: list[Tensor | None]) -> None:
        """Reduce gradients of one type together; who has none counts with zero."""
        if any(gradient is not None and gradient.is_sparse for gradient in gradients):
            raise InvalidState("sparse gradients cannot be reduced in a context of autograd's")
        weight = self._reducer.weights.current
        one = torch.ones(1, dtype=parameters[0].dtype, device=parameters[0].device)
        flat = torch.cat(
            [
                torch.zeros_like(each).reshape(-1) if gradient is None else gradient.reshape(-1)
                for each, gradient in zip(parameters, gradients, strict=True)
            ]
            + [one]
        )
        flat.mul_(1 if weight is None else weight)
        self._reducer.channel.sum(flat).wait()
        total = 1 if self._adds_up and weight is None else flat[-1]
        parts = torch.split(flat[:-1] / total, [each.numel() for each in parameters])
        for gradient, part in zip(gradients, parts, strict=True):
            if gradient is not None:
                gradient.copy_(part.view_as(gradient))
