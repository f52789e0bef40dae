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
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Variable
from torch.futures import Future
from torch.nn import Parameter

from .._formatting import format_ranks
from ..errors import GroupError, InvalidArgument, InvalidState, PeerLeft
from ..groups import _profiler
from ..groups._call_site import warn_user
from ._autograd_hooks import AutogradHooks, PassLifetime, find_outer_graph_task, without_graph
from ._backward_pass import FoldedPass, LocalPass, ReducedPass
from ._buckets import BucketLayout, BucketOptions
from ._comm_hook import CommHook
from ._communicator import Communicator, broadcast_coalesced, chunk_tensors
from ._dtensor import as_local_shard
from ._gradient_fold import GradientFold
from ._interop import (
    USE_COMM_HOOK,
    USE_JOIN,
    USE_MIXED_PRECISION,
    refuse_compiled_backward,
    refuse_methods,
)
from ._mixed_precision import PrecisionPolicy
from ._optimizer_in_backward import OptimizersInBackward
from ._parameter_consistency import verify_parameters
from ._previous_grads import PreviousGrads
from ._scaling import OVERFLOW_PRONE_DTYPES, Scale, ScaleSelector
from ._stats import PassTiming, StatsHistory
from .hooks._base import when_done


class ReducerRegistry:
    """The reducers of one group, in the order in which they were made."""

    def __init__(self) -> None:
        self.members: weakref.WeakValueDictionary[int, Reducer] = weakref.WeakValueDictionary()
        """By id. All ranks add reducers in the same order."""

    def may_launch_early(self, reducer: Reducer) -> bool:
        """Whether no other reducer can take part in the backward pass that begins."""
        if len(self.members) == 1:
            return True
        others = [other for other in self.members.values() if other is not reducer]
        return not (reducer.has_shared_backward or any(other.expects_backward for other in others))

    def participants(self, reducer: Reducer) -> list[Reducer]:
        """List the reducers in the same backward pass, this one included, in order."""
        if len(self.members) == 1:
            return [reducer]
        members = self.members.values()
        present = [other for other in members if other.graph_task == reducer.graph_task]
        for each in present:
            each.has_shared_backward |= len(present) > 1
        return present


_registries: weakref.WeakKeyDictionary[dist.ProcessGroup, ReducerRegistry] = (
    weakref.WeakKeyDictionary()
)


class Reducer:
    """Reduces the gradients of backward passes, so that they are equal on every rank."""

    def __init__(
        self,
        named: Sequence[tuple[str, Parameter]],
        comm: Communicator,
        options: BucketOptions,
        *,
        reduce: str = "mean",
        grad_is_view: bool = True,
        is_static: bool = False,
        check_every: int = 0,
        precision: PrecisionPolicy | None = None,
        tracked: Collection[str] | None = None,
        keeps_frozen: bool = False,
    ) -> None:
        """Make it, on all ranks.

        Arguments:
            tracked: the names of the parameters to begin with; by default those that require
                gradients now.
            keeps_frozen: whether parameters that are frozen are always reduced as before: others
                than the last micro-batch of this rank may train them.
        """
        self.named = [(name, as_local_shard(parameter)) for name, parameter in named]
        self._precision = precision
        self.optimizers = OptimizersInBackward(named)
        self.comm = comm
        self._options = options
        self.scaling = ScaleSelector(comm, reduce)
        self.weights = self.scaling.weights
        self.hook: CommHook | None = None
        self._grad_is_view = grad_is_view
        self.is_static = is_static
        self._check_every = check_every
        self._keeps_frozen = keeps_frozen
        self._is_closed = False
        self.graph_ever_changed = False
        self.stats = StatsHistory()
        self.forward_seconds = 0.0
        self.syncs_gradients = True  # whether backward passes are reduced; read when a pass begins
        self._syncs_next = False
        """Whether the next pass is reduced in any case, as `prepare_for_backward` demands."""
        self.announced_local = False
        """Whether a rank without data expects the next pass not to be reduced."""
        self.error: str | None = None
        """What the last pass that failed has raised."""
        self._passes = self.reduced_passes = 0
        self._lifetime = PassLifetime()
        self.has_local_grads = False
        """Whether ``.grad`` contains gradients of this rank that are not reduced."""
        self.may_lack_data = False
        """Whether ranks may be without data. Reduced gradients must not be reduced again then."""
        self._previous = PreviousGrads()
        self._in_flight: ReducedPass | LocalPass | FoldedPass | None = None
        self._fold: GradientFold | None = None  # the last one that uses the buckets
        self._folded: ReducedPass | None = None
        """The pass of a rank's last micro-batch, from its end until `reduce_fold`."""
        self._current_layout: BucketLayout | None = None
        self._order: list[int] | None = None
        """The order of gradients in the first pass, until the buckets are rearranged by it."""
        self.expects_backward = False
        """Whether there was a forward pass whose backward pass has not finished."""
        self.has_shared_backward = False
        """Whether another reducer ever took part in a backward pass of this one."""
        self.on_unmanaged_backward: Callable[[], None] | None = None
        """Called instead of beginning a pass, where passes begin only with `run_micro_batch`."""
        self.graph_task: int | None = None  # the autograd graph task of the pass in flight
        self._registry = _registries.setdefault(comm.group, ReducerRegistry())
        self._autograd_hooks = AutogradHooks([])
        self._since = time.perf_counter()
        self._track(set(self.trainable_names() if tracked is None else tracked))
        self._registry.members[id(self)] = self

    def use_hook(self, hook: CommHook) -> None:
        """Reduce the buckets with a hook from now on."""
        self.hook = hook
        self.scaling.has_hook = True

    # -- the plan --------------------------------------------------------------------------

    def track_trainable_parameters(self) -> None:
        """Start again with the parameters that require gradients now."""
        kept = self.names if self._keeps_frozen else []
        self._track({*self.trainable_names(), *kept})

    def trainable_names(self) -> list[str]:
        """Return the names of the parameters that require gradients now."""
        return [name for name, p in self.named if p.requires_grad]

    def unfrozen_names(self) -> list[str]:
        """Return those that have begun to require gradients and are not reduced yet."""
        if not self._frozen:
            return []
        return sorted({*self.trainable_names()} - {*self.names})

    def _track(self, names: Collection[str]) -> None:
        self._trainable = [(name, p) for name, p in self.named if name in names]
        self.names = [name for name, _ in self._trainable]
        self.parameters = [p for _, p in self._trainable]
        self._frozen = [p for name, p in self.named if name not in names]
        self.unused: list[int] = []
        """The parameters that got no gradient on this rank in the last reduced pass, by index."""
        self._autograd_hooks.close()
        self._autograd_hooks = AutogradHooks(self.parameters)
        self._has_agreed_order, self._order = False, None
        # Modules are usually registered in the order of forward; backward is the reverse.
        self._arrange(list(reversed(range(len(self.names)))))
        self.must_record = True
        """Whether the next pass records the order of gradients; equal on all ranks."""

    def _arrange(self, order: list[int]) -> None:
        self._arranged_by = order
        # Release the old buckets before there are new ones: both at once were the peak of a run.
        self._current_layout, self.buckets = None, []
        if self._fold is not None:
            self._fold.release()
        self._current_layout = BucketLayout(self._trainable, order, self.comm, self._options)
        self.buckets = self._current_layout.buckets
        dtypes = {bucket.payload.dtype for bucket in self.buckets}
        self._may_overflow = not dtypes.isdisjoint(OVERFLOW_PRONE_DTYPES)

    @property
    def _layout(self) -> BucketLayout:
        if self._current_layout is None:  # making the buckets has raised
            self._arrange(self._arranged_by)
        assert self._current_layout is not None
        return self._current_layout

    def prepare(self) -> None:
        """Prepare for a forward pass: follow a new order, unfrozen parameters, another dtype."""
        self._abandon_if_dead()
        if self._in_flight is not None or self._is_closed:
            return  # activation checkpointing runs a part of forward again
        self.expects_backward = True
        self.optimizers.check(self.optimizers.ends)
        is_unfrozen = self._frozen and any(p.requires_grad for p in self._frozen)
        if is_unfrozen or self._layout.is_outdated():
            verify_parameters(self.named, self.comm, compares_frozen=not self._keeps_frozen)
            self.track_trainable_parameters()
        self._follow_new_order()

    def _follow_new_order(self) -> None:
        """Use the order that ranks agreed on. Called before every pass, so that all ranks do."""
        if not self.must_record:
            self._rebuild_buckets()
            return
        if self._order is not None:
            self._arrange(self._order)
            self._order = None
        self._start_recording()

    def _rebuild_buckets(self) -> bool:
        """Arrange the buckets in the order of gradients, if it is new; return whether it was."""
        if self._order is None or self._in_flight is not None or self._is_closed:
            return False
        self._arrange(self._order)
        self._order = None
        if self._autograd_hooks.is_recording:
            self._expect_recorded_order()
        else:  # the first forward pass had several backward passes
            self._start_recording()
        return True

    def _start_recording(self) -> None:
        self.must_record = False
        self._autograd_hooks.detect_begin(self._begin, self._lifetime)
        self._autograd_hooks.record(self._on_arrival)
        self._check_layout()

    def _expect_recorded_order(self) -> None:
        pieces = [piece.members for piece in self._layout.pieces]
        self._autograd_hooks.report_pieces(pieces, self._on_ready)
        seen = set(self._autograd_hooks.order)
        self._layout.absent = [len(set(members) - seen) for members in pieces]
        self._check_layout()

    def _check_layout(self) -> None:
        """Follow what users may have done to parameters: new optimizers, another dtype."""
        self.optimizers.check()
        self._layout.grad_is_view = self._grad_is_view and all(b.holds_values for b in self.buckets)

    @property
    def is_running(self) -> bool:
        return self._in_flight is not None

    def broadcast_parameters(self, root: int = 0) -> None:
        """Give every rank the root's parameters. The buckets serve as buffers."""
        sent: set[int] = set()
        with torch.no_grad():
            for bucket in self.buckets:
                if bucket.members and bucket.holds_values and not bucket.payload.is_sparse:
                    bucket.broadcast_parameters(self.comm, root)
                    sent.update(map(id, bucket.parameters))
        others = [p for _, p in self.named if id(p) not in sent]
        broadcast_coalesced(others, self.comm, root=root)

    # -- a pass ----------------------------------------------------------------------------

    def begin_from_output(self) -> None:
        self._begin(None)

    def _begin(self, i: int | None) -> None:
        """Begin a backward pass, unless one is in flight; before any gradient arrives.

        `i`: the parameter that the pass has reached, if it reached no output that was found.
        """
        if self._precision is not None:
            self._precision.use_copies_in_backward()
        if self._is_closed or not self._autograd_hooks.may_run(i):
            return
        if self.on_unmanaged_backward is not None:
            self.on_unmanaged_backward()
            return
        self._abandon_if_dead()
        if self._in_flight is not None:
            return
        refuse_compiled_backward()
        self._drop_zeroed_grads()
        self._follow_new_order()  # on other ranks, a forward pass may have done so
        self._passes += 1
        self._autograd_hooks.restart()
        outer = find_outer_graph_task()
        if outer is None:
            self._end_with_this_run()
        else:
            next_node, self._lifetime.holder = outer
            self._end_with_outer_run(next_node)
        if self.take_sync_decision():
            self._begin_reduced()
        else:
            self._begin_local()

    @property
    def syncs_next_pass(self) -> bool:
        """Whether a pass that began now would be reduced."""
        return self.syncs_gradients or self._syncs_next

    def take_sync_decision(self) -> bool:
        """Return whether the pass that begins is reduced; a demand counts for one pass."""
        is_reduced, self._syncs_next = self.syncs_next_pass, False
        self.announced_local = False
        return is_reduced

    @property
    def _sets_reduced_aside(self) -> bool:
        """Whether the ranks' shares of reduced gradients might not add up to one."""
        return self.may_lack_data or self.scaling.is_sum or self.weights.current is not None

    def _begin_local(self) -> None:
        if not self.has_local_grads and self._sets_reduced_aside:
            self._previous.copy_reduced(self.parameters)
        self.has_local_grads = True
        # A change of weight rescales `.grad`, but the reduced part must keep its scale.
        self._previous.add(alpha=-1)
        self.weights.accumulate(self.parameters)
        self._previous.add()
        self._record_local_state()
        unweighted = self.parameters if self.weights.current == 0 else ()
        self._in_flight = LocalPass(self.comm, unweighted)

    def _begin_reduced(self) -> None:
        self.reduced_passes += 1
        if self.has_local_grads:
            self._previous.add(alpha=-1)
        elif self._sets_reduced_aside:
            self._previous.set_aside(self.parameters)
        self._in_flight = self._make_pass(
            self.scaling.scale(self.parameters, may_overflow=self._may_overflow),
            previous_are_local=self.has_local_grads,
        )
        if self._in_flight.restores_previous:
            self._autograd_hooks.restore_previous(self._in_flight.restore_previous)

    def _end_with_this_run(self) -> None:
        """End the pass with the current graph task. What a callback raises, backward() raises."""
        callback = partial(self._end_all)
        self._lifetime.holder = weakref.ref(callback)  # autograd drops it when the task is over
        Variable._execution_engine.queue_callback(callback)
        self.graph_task = torch._C._current_graph_task_id()

    def _end_with_outer_run(self, next_node: Any) -> None:
        """End the pass with the graph task that contains the current one."""
        pass_number = self._passes

        def end_with_it(_: object) -> None:
            handle.remove()
            if self._in_flight is not None and self._passes == pass_number:
                self._end_with_this_run()

        handle = next_node.register_prehook(end_with_it)

    # -- micro-batches ---------------------------------------------------------------------

    def begin_fold(self, fold: GradientFold) -> None:
        """Prepare for the backward passes of a step's micro-batches on this rank."""
        left = sorted(set(range(self.comm.size)) - set(self.comm.members()))
        if left:
            raise PeerLeft(
                f"{format_ranks(left)} left the group, and the micro-batches there are missing in "
                "every step",
                group=self.comm.label,
                operation="micro_batches",
                ranks=left,
            )
        self._fold, self._folded = fold, None
        self.prepare()
        fold.begin(self._layout)

    def run_micro_batch(self, fold: GradientFold, loss: Tensor | None, **kwargs: Any) -> None:
        """Run the backward pass of the next micro-batch, or none if it contributes nothing.

        Its gradients are added to the sums of `fold`, also if the group has failed. After the
        rank's last micro-batch, call `reduce_fold`.
        """
        assert self._in_flight is None, "a micro-batch cannot begin within another pass"
        current: ReducedPass | FoldedPass
        if fold.is_last:
            self._passes += 1
            self.reduced_passes += 1
            current = self._make_pass(self.scaling.plain_sum(), fold=fold)
        else:
            current = FoldedPass(self._layout, fold)
        self._autograd_hooks.restart()
        self._in_flight, self._lifetime.holder = current, lambda: fold
        try:
            if loss is not None:
                fold.run_backward(loss, **kwargs)
            with torch.no_grad():
                current.end_backward()
            self._in_flight = None
        except BaseException as error:
            self._lifetime.holder = PassLifetime.holder
            self._abandon_if_dead()
            if isinstance(error, Exception):
                self._record(error)
            if isinstance(current, ReducedPass):
                # Some buckets may have been launched, and some not.
                self.comm.abort(
                    f"the backward pass of its last micro-batch raised {type(error).__name__}: "
                    f"{error}"
                )
            raise
        finally:
            self._lifetime.holder = PassLifetime.holder
            self._autograd_hooks.rearm()
        if isinstance(current, ReducedPass):
            self._folded = current

    def reduce_fold(self) -> None:
        """Sum the micro-batches of all ranks into ``.grad``, divided; all ranks call it.

        If it raises because the group has failed, the sums of this rank are intact.
        """
        current, self._folded = self._folded, None
        assert current is not None, "the last micro-batch of this rank has not run"
        try:
            with torch.no_grad():
                current.reduce()
                self._update_order(current)
        except BaseException as error:
            current.abandon()
            if isinstance(error, Exception):
                self._record(error)
            if not isinstance(error, GroupError):
                self.comm.abort(f"the reduction raised {type(error).__name__}: {error}")
            raise
        self.expects_backward = False
        self._complete(current)

    def set_gradients(
        self,
        nodes: Sequence[Mapping[str, Tensor]],
        add_up: Callable[[list[Tensor]], Tensor],
        used: Collection[str],
    ) -> None:
        """Set ``.grad`` from sums of micro-batches, instead of a pass that failed.

        `nodes` are those that this rank contributes, each with its gradients by the names of
        parameters: another reducer may have summed them, in other buckets. `add_up` takes them as
        flat tensors, or one of any values if there are none, and returns the sum over all ranks.
        `used`: the parameters that any micro-batch had a gradient for.
        """
        for bucket in self.buckets:
            if not bucket.members:
                continue
            rows = []
            for node in nodes:
                row = bucket.flat_views(torch.zeros_like(bucket.buffer))
                for i, view in zip(bucket.members, row.views, strict=True):
                    if (gradient := node.get(self.names[i])) is not None:
                        view.copy_(gradient)
                rows.append(row.flat)
            bucket.buffer.copy_(add_up(rows or [bucket.buffer]))
            for i, parameter, gradient in zip(
                bucket.members, bucket.parameters, bucket.grads, strict=True
            ):
                parameter.grad = gradient if self.names[i] in used else None
        self.expects_backward = False

    def _make_pass(
        self, scale: Scale, *, previous_are_local: bool = False, fold: GradientFold | None = None
    ) -> ReducedPass:
        steps_early = self.is_static and self.optimizers and not self._previous
        is_check_due = self._check_every > 0 and self.reduced_passes % self._check_every == 0
        return ReducedPass(
            self._layout,
            scale,
            self.hook,
            is_recording=self._autograd_hooks.is_recording,
            pass_number=self._passes,
            previous_are_local=previous_are_local,
            adds_previous=bool(self._previous),
            compared=self.named if is_check_due else (),
            launches_early=self._registry.may_launch_early(self),
            timing=PassTiming(self._since, self.forward_seconds),
            optimizers=self.optimizers if steps_early else None,
            fold=fold,
        )

    def _record_local_state(self) -> None:
        if self.weights.last is not None or self._previous:
            self._previous.record_local_state(self.parameters)

    def _drop_zeroed_grads(self) -> None:
        if self.has_local_grads and self._previous.drop_zeroed():
            self.drop_local_grads()

    @property
    def order(self) -> list[int]:
        """The parameters, by index, in the order of the gradients of one rank."""
        return self._arranged_by if self._order is None else self._order

    @property
    def has_rebuilt_buckets(self) -> bool:
        return self._has_agreed_order and self._order is None

    def drop_local_grads(self) -> None:
        """Forget local passes: their gradients were zeroed."""
        self._abandon_if_dead()
        if self._in_flight is None:
            self.has_local_grads = False
            self.weights.clear()
            self._previous.clear()

    def shadow(self, *, reduces: bool) -> None:
        """Take part in a backward pass of the others without gradients."""
        self._abandon_if_dead()
        self._passes += 1
        if not reduces:
            LocalPass(self.comm).finish()
            return
        self.reduced_passes += 1
        with torch.no_grad():
            self._drop_zeroed_grads()
            if not self.has_local_grads:
                self._previous.set_aside(self.parameters)
            for parameter in self.parameters:
                parameter.grad = None
            shadow = self._make_pass(self.scaling.without_data())
            shadow.finish()
            shadow.graph_changed = False
            # Ranks with data know whether the gradients are zeroed.
            if self._layout.header.any_adds_previous():
                self._previous.add()
            if not self._has_agreed_order:
                self._agree_on_order()
        self._complete(shadow)

    def _on_arrival(self, i: int) -> None:
        if isinstance(self._in_flight, (ReducedPass, FoldedPass)):
            try:
                with without_graph():
                    self._in_flight.arrived(i)
            except Exception as error:
                self._record(error)
                raise
        self._autograd_hooks.seen.append(i)

    def _on_ready(self, piece_index: int) -> None:
        if isinstance(self._in_flight, (ReducedPass, FoldedPass)):
            try:
                with without_graph():
                    self._in_flight.ready(piece_index)
            except Exception as error:
                self._record(error)
                raise

    def _record(self, error: Exception) -> None:
        self.error = f"{type(error).__name__}: {error}"  # its traceback would keep tensors alive

    def _end_all(self) -> None:
        """End the passes of all reducers in this graph task, unless another has done so."""
        if self.graph_task is not None:
            for reducer in self._registry.participants(self):
                with _profiler.record("DistributedDataParallel.finish_backward"):
                    reducer.end()

    def end(self) -> None:
        current, self.graph_task = self._in_flight, None
        assert not isinstance(current, FoldedPass), "only `run_micro_batch` ends it"
        self.expects_backward = False
        self._autograd_hooks.rearm()
        try:
            with without_graph():
                self._finish(current)
        except Exception as error:
            self._record(error)
            raise
        if isinstance(current, ReducedPass):
            self._complete(current)

    def _finish(self, current: ReducedPass | LocalPass | None) -> None:
        if current is not None:
            current.finish()
        # Not before: if `finish` raises, the next pass must abandon this one.
        self._in_flight = None
        if isinstance(current, LocalPass):
            self._record_local_state()
        elif isinstance(current, ReducedPass):
            self._previous.add()
            self._update_order(current)

    def _complete(self, done: ReducedPass) -> None:
        self.has_local_grads = False
        self.graph_ever_changed |= done.graph_changed
        self.unused = done.unused
        self.weights.clear()
        self._previous.clear()
        self.stats.add(done.timing, self._layout.header.times(), self.buckets)
        self._since, self.forward_seconds = done.timing.ended, 0.0
        if self.optimizers:
            self.optimizers.step(already_stepped=done.stepped)

    def _update_order(self, done: ReducedPass) -> None:
        if not self._has_agreed_order:
            self._agree_on_order()
        elif self._autograd_hooks.is_recording:
            self._expect_recorded_order()
        elif done.any_graph_changed:
            # On all ranks: a recording pass launches nothing early, and collectives that a layer
            # makes in backward must come in the same order everywhere.
            if done.graph_changed and self.is_static:
                warn_user(
                    "the graph of this backward pass differs from the one before, despite "
                    "static_graph=True; the gradients are correct",
                    RuntimeWarning,
                )
            self._start_recording()

    def _agree_on_order(self) -> None:
        """Use one rank's order of gradients from the next forward pass on."""
        seen = self._autograd_hooks.order
        unseen = set(range(len(self.parameters))) - set(seen)
        order = [*seen, *sorted(unseen, reverse=True)]
        root = self._layout.header.with_data()[0]  # rank 0, unless it has left
        self._order = self.comm.broadcast_numbers(order, root)
        self._has_agreed_order = True

    def _abandon_if_dead(self) -> None:
        """Drop a pass that autograd did not finish because something raised."""
        if self._in_flight is not None and self._lifetime.holder() is None:
            current, self._in_flight = self._in_flight, None
            self.graph_task = None
            self._lifetime.holder = PassLifetime.holder
            current.abandon()
            if isinstance(current, LocalPass):
                self.weights.undo_last_pass()
                self._previous.last_local_pass_finished = False
            else:
                self.weights.clear()
                self._previous.clear()
                # `.grad` may hold what autograd added after the failure.
                self.has_local_grads = True

    def progress(self) -> list[int]:
        """Return the numbers that must be equal on all ranks before a pass."""
        flags = int(self._has_agreed_order), int(self.has_shared_backward)
        return [self._passes, self.reduced_passes, *flags, *self.order]

    def load_progress(self, progress: Sequence[int]) -> None:
        """Continue with the progress of another rank, after passes that this one skipped."""
        self._passes, self.reduced_passes, has_agreed_order, has_shared, *order = progress
        self._has_agreed_order, self._order = bool(has_agreed_order), None
        self.has_shared_backward = bool(has_shared)
        self.weights.clear()
        self._previous.clear()
        if order != self._arranged_by:
            self._arrange(order)

    def take_settings_from(self, other: Reducer) -> None:
        """Copy the user's settings from the reducer that this one replaces."""
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
        """Remove the hooks from the parameters and reduce nothing from now on."""
        self._is_closed = True
        self._autograd_hooks.close()
        self._registry.members.pop(id(self), None)

    # -- the names of torch's reducer ------------------------------------------------------

    prepare_for_forward = prepare
    _remove_autograd_hooks = close

    def prepare_for_backward(self, *_: object) -> None:
        """Reduce the next backward pass, wherever its graph comes from, even in `no_sync`.

        Frameworks call this for passes that begin in the middle of forward, or whose forward pass
        was in `no_sync`. torch's takes the outputs; a pass finds out by itself what it reaches.
        During a backward pass this does nothing: that pass is reduced or not already.
        """
        self.prepare()
        if self._in_flight is not None:
            return
        if self.announced_local:
            raise InvalidState(
                "forward has announced to ranks without data that the next backward pass is not "
                "reduced. Call prepare_for_backward() before forward, or leave no_sync() first"
            )
        self._syncs_next = True

    def _run_allreduce_hook(self, bucket: Any) -> Future[Tensor]:
        """Start to sum a bucket over the ranks."""
        buffer = bucket.buffer()
        return when_done([self.comm.sum(buffer)], lambda: buffer, buffer.device)

    def _run_comm_hook(self, bucket: Any) -> Future[Tensor]:
        """Start to reduce a bucket with the communication hook, or to sum it if there is none."""
        if self.hook is None:
            return self._run_allreduce_hook(bucket)
        return self.hook.hook(self.hook.state, bucket)

    def _set_static_graph(self) -> None:
        self.is_static = True

    def _ddp_graph_static(self) -> bool:
        return not self.graph_ever_changed

    def _check_reducer_finalized(self) -> None:
        if self.is_running:
            raise InvalidState("a backward pass of this module has not finished")

    def _reset_state(self) -> None:
        """Drop a pass that failed, if any."""
        self._abandon_if_dead()

    def _delay_all_reduce(self) -> None:
        """Do nothing: when backward returns, its gradients are reduced."""

    def _set_optimizer_in_backward(self) -> None:
        """Do nothing: the reducer finds them."""

    def _set_sparse_metadata(self, metadata: Any) -> None:
        """Do nothing: the entries of sparse gradients need no declaration."""

    def _push_all_rebuilt_params(self) -> None:
        """Do nothing: a rank without data learns the order of gradients from the others."""

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        """Validate the rate and ignore it: every step is measured."""
        if sample_rate < 1:
            raise InvalidArgument(f"sample_rate must be at least 1, got {sample_rate}")


refuse_methods(
    Reducer,
    {
        "_autograd_hook": USE_COMM_HOOK,
        "_get_local_used_map": USE_JOIN,
        "_get_zeros_like_grad_buckets": USE_JOIN,
        "_install_post_backward_futures": "use ddp._register_buffer_comm_hook()",
        "_set_forward_pass_work_handle": USE_JOIN,
        "_set_mixed_precision_param_dtype": USE_MIXED_PRECISION,
        "_update_process_group": "use ddp._update_process_group()",
        "get_backward_stats": "use ddp.stats()",
        "set_logger": "use ddp._get_ddp_logging_data()",
    },
)


def backward_callback(reducer: Reducer) -> Callable[[], None]:
    """Return what to call when the backward pass of the current forward pass begins."""
    rpc: Any = sys.modules.get("torch.distributed.rpc.api")
    if rpc is not None and rpc._is_current_rpc_agent_set():
        with suppress(RuntimeError):  # there is no context
            context = torch._C._distributed_autograd._current_context()._context_id()
            return DistributedAutogradPass(reducer, context).begin
    return reducer.begin_from_output


@dataclass
class DistributedAutogradPass:
    """The backward passes of one forward pass in a context of `torch.distributed.autograd`."""

    _reducer: Reducer
    _context: int
    _has_started: bool = False

    def begin(self) -> None:
        """Note the start of a backward pass. Every output calls this."""
        self._reducer.begin_from_output()  # it may be a plain backward pass all the same
        if self._reducer.is_running or self._has_started or not self._reducer.take_sync_decision():
            return
        self._has_started = True
        Variable._execution_engine.queue_callback(self._finish)

    def _finish(self) -> None:
        reducer = self._reducer
        self._has_started = reducer.expects_backward = False
        if reducer.hook is not None:
            raise InvalidState(
                f"communication hook {reducer.hook.name} cannot reduce the gradients of "
                "a distributed autograd context, since they are not in .grad"
            )
        found = torch._C._distributed_autograd.get_gradients(self._context)
        weight = reducer.weights.current
        with torch.no_grad():
            for parameters in chunk_tensors(reducer.parameters):
                # A missing gradient counts as zero. The sum of weights comes last.
                parts = [found.get(each, torch.zeros_like(each)) for each in parameters]
                if any(part.is_sparse for part in parts):
                    raise InvalidState(
                        "sparse gradients cannot be reduced in a distributed autograd context"
                    )
                flat = torch._C._nn.flatten_dense_tensors([*parts, parts[0].new_ones(1)])
                flat.mul_(1 if weight is None else weight)
                reducer.comm.sum(flat).wait()
                total = 1 if reducer.scaling.is_sum and weight is None else flat[-1]
                results = torch._C._nn.unflatten_dense_tensors(flat[:-1] / total, parts)
                for each, result in zip(parameters, results, strict=True):
                    if each in found:
                        found[each].copy_(result)
