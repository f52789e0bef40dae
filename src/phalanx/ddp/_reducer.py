"""Reduces the gradients of a module: one pass after the other, on buckets that it arranges.

A gradient's way: autograd makes it and the last one of a bucket calls (`_arrivals`); the pass under
way copies the bucket's gradients into flat storage and launches it (`_pass`, `_buckets`); the group
reduces it in place (`_channel`); ``.grad`` becomes a view of the storage.
"""

from __future__ import annotations

import time
import warnings
import weakref
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch.autograd import Variable
from torch.nn import Parameter

from ._agreement import verify_parameters
from ._arrivals import Arrivals, UnderWay
from ._buckets import Bucket, DenseBucket, SparseBucket
from ._buffers import broadcast_tensors
from ._channel import Channel, Handle
from ._comm_hook import CommHook
from ._company import Company
from ._compiling import refuse_compiled_backward
from ._header import Header
from ._local_part import stand_in, whole
from ._pass import LocalPass, Pass
from ._plan import BucketPlan, Caps, Delay, Shape, plan_buckets
from ._scale import Hooked, Mean, MeanOfShares, Scale, Sum
from ._setting import Setting, Timing
from ._stats import Stats
from ._weights import Weights

__all__ = ["Reducer"]

NARROW = (torch.float16,)
"""Types that would overflow, were a gradient multiplied by the number of tokens in a batch."""


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
    ) -> None:
        self._named = [(name, stand_in(parameter)) for name, parameter in named]
        self._sparse, self._delay = sparse, delay
        self.channel = channel
        self._caps = caps
        self._reduce = reduce
        self.hook: CommHook | None = None
        self._plain_scale = self._choose_scale()
        self._keeps_views = keeps_views
        self.is_static = is_static
        self._check_every = check_every
        self._is_closed = False
        self.was_surprised = False
        """The graph has changed at some time."""
        self.weights = Weights()
        self.stats = Stats()
        self.forward_seconds = 0.0
        self.synchronises = True
        """Whether the next backward pass is reduced; asked when it begins."""
        self._passes = self._reduced = 0
        self._lifetime: UnderWay = [_none]
        """Asks for the callback that autograd keeps until it is done with the pass under way."""
        self._is_unsynced = False  # gradients hold what only this rank has
        self._under_way: Pass | LocalPass | None = None
        self._announced: Handle | None = None
        self._order: list[int] | None = None  # a better one, from the first pass
        self.expects_backward = self.has_met_others = False
        self.graph_task: int | None = None
        self._company = Company.of(channel.group)
        self._arrivals = Arrivals([])
        self._since = time.perf_counter()
        self._take_on()
        self._company.enter(self)

    def _choose_scale(self) -> Scale:
        if self._reduce == "sum":
            return Sum(self.channel.size)
        # A hook divides by itself.
        divides = self.channel.shares_memory or self.hook is not None
        return Mean(self.channel.size) if divides else MeanOfShares(self.channel.size)

    def use_hook(self, hook: CommHook) -> None:
        """Have a hook reduce the buckets from now on."""
        self.hook = hook
        self._plain_scale = self._choose_scale()
        if not self._must_learn:
            self._settle()

    # -- the plan --------------------------------------------------------------------------

    def _take_on(self) -> None:
        """Begin with the parameters that need gradients now."""
        taken = [(name, p) for name, p in self._named if p.requires_grad]
        self.names = [name for name, _ in taken]
        self.parameters = [p for _, p in taken]
        self._frozen = [p for _, p in self._named if not p.requires_grad]
        self._nodes: dict[int, Any] = {}
        self._arrivals.close()  # the hooks that count other parameters
        self._arrivals = Arrivals(self.parameters)
        if isinstance(self._plain_scale, Sum):
            # A pass may begin with any parameter, and it must be known what was in it before, for
            # that must not be added up again.
            self._arrivals.announce(self.begin_from_output)
        self._has_ordered, self._order = False, None
        # They are registered as forward uses them, most often; backward goes the other way.
        self._arrange(list(reversed(range(len(taken)))))
        self._must_learn = True

    def _arrange(self, order: list[int]) -> None:
        shapes = [self._shape(*each) for each in zip(self.names, self.parameters, strict=True)]
        plans = plan_buckets(shapes, order, self._caps, after=self._delay.place(self.names))
        room = {
            "size": self.channel.size,
            "parameters": len(self.parameters),
            "buckets": len(plans),
        }
        extras = [0] * (len(plans) - 1) + [Header.room(**room)]
        self.buckets: list[Bucket] = [
            self._make_bucket(number, plan, extra)
            for number, (plan, extra) in enumerate(zip(plans, extras, strict=True))
        ]
        last = self.buckets[-1]
        assert isinstance(last, DenseBucket), "the plan ends with a bucket that carries the header"
        self._header = Header(last.extra, rank=self.channel.rank, **room)
        self._pieces = [piece for bucket in self.buckets for piece in bucket.pieces]
        self._absent = [0] * len(self._pieces)

    def _shape(self, name: str, p: Parameter) -> Shape:
        kind = name in self._sparse, name in self._delay.names
        return Shape(p.numel(), p.dtype, p.device, *kind)

    def _make_bucket(self, number: int, plan: BucketPlan, extra: int) -> Bucket:
        if plan.is_sparse:
            return SparseBucket(number, plan, self.parameters)
        return DenseBucket(number, plan, self.parameters, self.channel.allocate, extra=extra)

    def prepare(self) -> None:
        """Get ready for a forward pass: adopt a better plan, or parameters that were unfrozen."""
        self._abandon_if_dead()
        if self._under_way is not None or self._is_closed:
            return  # a part of forward is run again, for the backward pass that wants its values
        self.expects_backward = True
        if self._frozen and any(p.requires_grad for p in self._frozen):
            verify_parameters(self._named, self.channel)
            self._take_on()
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

    def _learn(self) -> None:
        self._must_learn = False
        self._arrivals.learn(self._on_arrival)
        self._settle()

    def _follow(self, seen: set[int]) -> None:
        members = [piece.members for piece in self._pieces]
        self._arrivals.follow(
            members, self._on_ready, stray=self._on_stray, under_way=self._lifetime
        )
        self._absent = [len(set(piece.members) - seen) for piece in self._pieces]
        self._settle()

    @property
    def is_under_way(self) -> bool:
        """Tell whether a backward pass has begun and not ended."""
        return self._under_way is not None

    def broadcast_parameters(self, root: int = 0) -> None:
        """Give every rank one rank's parameters; gradients' storage is free for it meanwhile."""
        dense = [bucket for bucket in self.buckets if isinstance(bucket, DenseBucket)]
        with torch.no_grad():
            for bucket in dense:
                if bucket.members:
                    bucket.broadcast_through(
                        lambda flat: self.channel.broadcast(flat, root).wait(),
                        is_root=self.channel.rank == root,
                    )
        rest = {id(p): p for _, p in self._named}
        for bucket in dense:
            for parameter in bucket.parameters:
                del rest[id(parameter)]
        broadcast_tensors(list(rest.values()), self.channel, root=root)

    # -- a pass ----------------------------------------------------------------------------

    def begin_from_output(self) -> None:
        """Begin a backward pass, unless it leaves gradients alone."""
        if not self._is_closed and self._will_accumulate():
            self.begin()

    def begin(self, *, first: int | None = None, blind: bool = False) -> None:
        """Begin a backward pass, unless one is under way.

        `first`: the parameter whose gradient has come already. `blind`: some have, and it is not
        known which, so what there was before cannot be told from them.
        """
        self._abandon_if_dead()
        if self._under_way is not None:
            return
        refuse_compiled_backward()
        self._passes += 1
        self._arrivals.restart()
        # Whoever asked autograd for a pass gets what we raise there.
        callback = partial(self._end_together)
        self._lifetime[0] = weakref.ref(callback)
        Variable._execution_engine.queue_callback(callback)
        self.graph_task = torch._C._current_graph_task_id()
        if not self.synchronises:
            self._accumulate()
            self._under_way = LocalPass(self.channel)
            return
        self._reduced += 1
        self._under_way = Pass(
            self._setting,
            self._scale(),
            number=self._passes,
            first=first,
            olds_count=blind or self._is_unsynced,
            proof=self._named if self._is_check_due() else (),
            launches_early=self._company.is_alone(self),
            timing=Timing(self._since, self.forward_seconds),
        )

    def _accumulate(self) -> None:
        """Prepare gradients for more that only this rank has."""
        self.weights.accumulate(self.parameters)
        if not self._is_unsynced and self.weights.current is None:
            reduced = self._plain_scale.olds([p.grad for p in self.parameters])
            for parameter, old in zip(self.parameters, reduced, strict=True):
                parameter.grad = old
        self._is_unsynced = True

    def _will_accumulate(self) -> bool:
        """Tell whether the pass of autograd that is running may end in ``.grad`` of ours."""
        if Variable._execution_engine.is_checkpoint_valid():
            # A plain ``backward()``. Where it ends is not known, for checkpoints of the reentrant
            # kind hide parameters; and peers may reach some although this rank reaches none.
            return any(p.requires_grad for p in self.parameters)
        nodes = self._accumulators()
        try:
            return any(map(torch._C._will_engine_execute_node, nodes))
        except RuntimeError:  # what it says where ``autograd.grad`` asks for a leaf
            return False

    def _accumulators(self) -> Iterator[Any]:
        """Yield the nodes of autograd that fill ``.grad``; most often the first is all it takes."""
        for i, parameter in enumerate(self.parameters):
            if parameter.requires_grad and i not in self._nodes:
                self._nodes[i] = torch.autograd.graph.get_gradient_edge(whole(parameter)).node
            if i in self._nodes:
                yield self._nodes[i]

    def _settle(self) -> None:
        """Put together what the passes that follow have in common."""
        self._setting = Setting(
            channel=self.channel,
            names=self.names,
            parameters=self.parameters,
            buckets=self.buckets,
            pieces=self._pieces,
            header=self._header,
            keeps_views=self._keeps_views,
            absent=self._absent,
            is_learning=self._arrivals.is_learning,
            hook=self.hook,
        )

    def _is_check_due(self) -> bool:
        return self._check_every > 0 and self._reduced % self._check_every == 0

    def _scale(self) -> Scale:
        scale = self._scale_by_weight()
        return scale if self.hook is None else Hooked(scale, self.channel.size)

    def _scale_by_weight(self) -> Scale:
        weight = self.weights.current
        if weight is None:
            return self._plain_scale
        if self.weights.unit is None and any(p.dtype in NARROW for p in self.parameters):
            card = torch.tensor([weight], dtype=torch.float64, device=self.channel.device)
            self.weights.unit = sum(part.item() for part in self.channel.gather(card)) or 1.0
        return self.weights.scale(self.parameters)

    def _on_arrival(self, i: int) -> None:
        self._on_stray(i)
        if self._under_way is not None:
            with torch.no_grad():
                self._under_way.arrived(i)

    def _on_stray(self, i: int) -> None:
        """Begin with a gradient that has not come from an output of the module."""
        if self._under_way is None or self._lifetime[0]() is None:
            self.begin(first=i)

    def _on_ready(self, number: int) -> None:
        if self._under_way is None or self._lifetime[0]() is None:
            self.begin(blind=True)
        if self._under_way is not None:
            with torch.no_grad():
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
        with torch.no_grad():
            if isinstance(under_way, LocalPass):
                self._announced = under_way.finish()
            elif under_way is not None:
                under_way.finish()
            # Not before: what does not come to its end has to be waited for, by whoever comes next.
            self._under_way = None
            if isinstance(under_way, Pass):
                self._learn_from(under_way)
                self._note(under_way)

    def _note(self, done: Pass) -> None:
        self._is_unsynced = False
        self._announced = None
        self.was_surprised |= done.is_surprised
        self.weights.clear()
        self.stats.add(done.timing, self._header.clocks(), self.buckets)
        self._since, self.forward_seconds = done.timing.ended, 0.0

    def _learn_from(self, done: Pass) -> None:
        if not self._has_ordered:
            self._agree_on_order()
        elif self._arrivals.is_learning:
            self._follow(set(self._arrivals.order))
        elif done.is_surprised:
            if self.is_static:
                warnings.warn(
                    "the graph of this backward pass is not that of the one before, although "
                    "static_graph=True says so; the gradients are right all the same",
                    RuntimeWarning,
                    stacklevel=2,
                )
            self._learn()

    def _agree_on_order(self) -> None:
        """Take over the order in which gradients came on rank 0, from the next forward on."""
        seen = self._arrivals.order
        unseen = set(range(len(self.parameters))) - set(seen)
        order = torch.tensor(
            [*seen, *sorted(unseen, reverse=True)], dtype=torch.int64, device=self.channel.device
        )
        self.channel.broadcast(order).wait()
        self._order = order.tolist()
        self._has_ordered = True

    def _abandon_if_dead(self) -> None:
        """Forget a pass that did not come to its end, because something raised in it."""
        if self._under_way is not None and self._lifetime[0]() is None:
            under_way, self._under_way = self._under_way, None
            self.graph_task = None
            under_way.abandon()
            self.weights.go_back()

    def close(self) -> None:
        """Take the hooks off the parameters, and reduce nothing any more."""
        self._is_closed = True
        self._arrivals.close()
        self._company.leave(self)


def _none() -> None:
    """Say that there is no pass."""
