"""Which gradients travel together: pure arithmetic, with the same result on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

__all__ = ["BucketPlan", "Caps", "Delay", "Shape", "plan_buckets"]

MIB = 1 << 20
EXACT = (torch.float32, torch.float64)
"""Types that a header can travel in: its counts and clocks would be rounded in others."""


@dataclass(frozen=True)
class Caps:
    """How many bytes a bucket takes before it is full."""

    rest: int
    first: int | None = None
    """Of the bucket that is reduced first, so that something is under way soon."""
    each: tuple[int, ...] = ()
    """One by one; the last holds for all that follow. It goes before the other two."""

    def of(self, number: int) -> int:
        """Tell how many bytes the bucket of that number takes."""
        if self.each:
            return self.each[min(number, len(self.each) - 1)]
        return self.first if number == 0 and self.first is not None else self.rest


class Shape(NamedTuple):
    """What a plan has to know of a parameter."""

    numel: int
    dtype: torch.dtype
    device: torch.device
    is_sparse: bool = False
    """Its gradient is a sparse tensor, which fits in no bucket with others."""
    is_delayed: bool = False
    """Its gradient waits for the others of this kind."""


@dataclass(frozen=True)
class Delay:
    """Parameters whose gradients are reduced in one call, whatever their size."""

    names: frozenset[str] = frozenset()
    after: str = ""
    """The parameter whose gradient they wait for as well; without it they wait for all."""

    def place(self, names: Sequence[str]) -> int | None:
        """Tell which parameter that is, among those that are reduced."""
        return names.index(self.after) if self.after in names else None


@dataclass
class BucketPlan:
    """The parameters whose gradients travel in one flat tensor, in this order."""

    dtype: torch.dtype
    device: torch.device
    is_sparse: bool = False
    is_delayed: bool = False
    members: list[int] = field(default_factory=list)
    nbytes: int = 0
    ready: int = -1
    """Where its latest member stands in the order of arrival."""

    def add(self, member: int, shape: Shape, position: int) -> None:
        """Take a parameter in."""
        self.members.append(member)
        self.nbytes += shape.numel * shape.dtype.itemsize
        self.ready = position

    @property
    def can_carry_header(self) -> bool:
        """Tell whether small counts and times come through exactly in this bucket."""
        return not self.is_sparse and self.dtype in EXACT


def plan_buckets(
    shapes: Sequence[Shape], order: Sequence[int], caps: Caps, *, after: int | None = None
) -> list[BucketPlan]:
    """Divide parameters into buckets, in the order in which their gradients are expected.

    Gradients that are delayed come `after` that of a parameter, or last. The last bucket can carry
    a header. If no parameter has a type that can, it has no parameters.
    """
    plans: list[BucketPlan] = []
    filling: dict[tuple[torch.dtype, torch.device, bool], tuple[BucketPlan, int]] = {}
    for position, i in enumerate(order):
        shape = shapes[i]
        if shape.is_sparse:
            plans.append(BucketPlan(shape.dtype, shape.device, is_sparse=True))
            plans[-1].add(i, shape, position)
            continue
        key = shape.dtype, shape.device, shape.is_delayed
        if key not in filling:
            plan = BucketPlan(shape.dtype, shape.device, is_delayed=shape.is_delayed)
            filling[key] = plan, caps.of(len(plans))
            plans.append(plan)
        plan, cap = filling[key]
        plan.add(i, shape, position)
        if plan.nbytes >= cap and not plan.is_delayed:
            del filling[key]
    turn = order.index(after) if after is not None else len(order)
    for plan in plans:
        plan.ready = max(plan.ready, turn) if plan.is_delayed else plan.ready
    plans.sort(key=lambda plan: (plan.ready, plan.is_delayed))
    return _with_carrier_last(plans, shapes[0].device)


def _with_carrier_last(plans: list[BucketPlan], device: torch.device) -> list[BucketPlan]:
    carriers = [plan for plan in plans if plan.can_carry_header]
    last = carriers[-1] if carriers else BucketPlan(torch.float32, device)
    return [*(plan for plan in plans if plan is not last), last]
