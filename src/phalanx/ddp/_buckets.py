"""Gradient buckets: which gradients are reduced together, and the flat tensors they are in.

`plan_buckets` is pure arithmetic and must give the same result on every rank.
`BucketLayoutBuilder` allocates what the plan says. A bucket is reduced as a whole but filled in
pieces: a gradient that is copied early is still in the cache, and its memory is reused for the
next one.

The last bucket of a plan can carry the pass header, so its dtype is float32 or float64. If no
parameter has such a dtype, the last bucket has no parameters.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, repeat
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from .. import native
from ..groups._fast_path import DTYPE_NUMBERS, can_read_tensors
from ._communicator import Communicator
from ._dtensor import local_tensor
from ._pass_header import PassHeader

MIB = 1 << 20
HEADER_DTYPES = (torch.float32, torch.float64)
"""Types that a header can travel in: its counts and clocks would be rounded in others."""


@dataclass(frozen=True)
class BucketCaps:
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


class ParameterSpec(NamedTuple):
    """What a plan has to know of a parameter."""

    numel: int
    dtype: torch.dtype
    device: torch.device
    is_sparse: bool = False
    """Its gradient is a sparse tensor, which fits in no bucket with others."""
    is_delayed: bool = False
    """Its gradient waits for the others of this kind."""


@dataclass(frozen=True)
class DelayedReduction:
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

    def add(self, member: int, shape: ParameterSpec, position: int) -> None:
        """Take a parameter in."""
        self.members.append(member)
        self.nbytes += shape.numel * shape.dtype.itemsize
        self.ready = position

    @property
    def can_carry_header(self) -> bool:
        """Tell whether small counts and times come through exactly in this bucket."""
        return not self.is_sparse and self.dtype in HEADER_DTYPES


def plan_buckets(
    shapes: Sequence[ParameterSpec],
    order: Sequence[int],
    caps: BucketCaps,
    *,
    after: int | None = None,
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


PIECE_BYTES = 256 << 10
"""How many bytes of gradients are gathered at once, at least."""
Gradients = Sequence[Tensor | None]
Allocate = Callable[[int, torch.dtype, torch.device], Tensor]


@dataclass(frozen=True)
class BucketPiece:
    """Some of a bucket's gradients, next to each other, which are gathered together."""

    bucket_index: int
    """The bucket's index; the bucket itself would be a circle, and its memory kept too long."""
    places: slice
    """Where they are in the bucket."""
    members: list[int]
    """Which parameters they are, by their place among all."""
    parameters: list[Parameter]


class Bucket(ABC):
    """The gradients of some parameters, which are reduced together."""

    def __init__(self, index: int, plan: BucketPlan, parameters: Sequence[Parameter]) -> None:
        self.index = index
        self.members = plan.members
        """Which parameters they are, by their place among all."""
        self.parameters = [parameters[i] for i in plan.members]
        self.pieces = [
            BucketPiece(index, places, self.members[places], self.parameters[places])
            for places in _pieces(self.parameters)
        ]

    @property
    @abstractmethod
    def payload(self) -> Tensor:
        """What is reduced."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Tell how many bytes travel."""

    @property
    @abstractmethod
    def buffer(self) -> Tensor:
        """The gradients alone, in one tensor."""

    @property
    def holds_values(self) -> bool:
        """Tell whether it holds gradients in the parameters' own types."""
        return True

    @abstractmethod
    def take(self, result: Any) -> str:
        """Have gradients replaced by a tensor like `buffer`; tell what else it is, if it is not."""

    @abstractmethod
    def gather(
        self, piece: BucketPiece, new: Gradients, previous: Gradients, factor: float
    ) -> None:
        """Take in gradients of a pass and those that there were before it, times a factor."""

    @abstractmethod
    def add(self, place: int, gradient: Tensor, factor: float = 1.0) -> None:
        """Add to the gradient at a place."""

    @abstractmethod
    def scale(self, factor: float) -> None:
        """Multiply all gradients."""

    @abstractmethod
    def as_payload(self, place: int, gradient: Tensor | None) -> Tensor:
        """Make a gradient for a place one that can be reduced by itself; zero if there is none."""

    @abstractmethod
    def results(self) -> Sequence[Tensor]:
        """List the gradients, as they are now, by place."""

    @abstractmethod
    def zeroed_copy(self) -> Bucket:
        """Make a bucket for the same parameters whose gradients are all zero."""


class DenseBucket(Bucket):
    """Gradients one after the other in a flat tensor, which may have room for more behind them."""

    def __init__(
        self,
        index: int,
        plan: BucketPlan,
        parameters: Sequence[Parameter],
        allocate: Allocate,
        *,
        extra: int = 0,
    ) -> None:
        super().__init__(index, plan, parameters)
        self._plan, self._all_parameters = plan, parameters
        numel = sum(p.numel() for p in self.parameters)
        self.flat = allocate(numel + extra, plan.dtype, plan.device)
        self.gradients = self.flat[:numel]
        self.extra = self.flat[numel:]
        self.views = _views(self.gradients, self.parameters)
        self._sizes = [view.nbytes for view in self.views]
        # Of places, not of views: one without elements has none.
        offsets = accumulate(self._sizes, initial=self.flat.data_ptr())
        self._addresses = list(offsets) if self._is_plain() else None

    def _is_plain(self) -> bool:
        """Tell whether gradients may be copied as bytes: in CPU memory, and as their bits read."""
        return (
            self.flat.device.type == "cpu"
            and self.flat.dtype in DTYPE_NUMBERS
            and can_read_tensors()
            and all(view.is_contiguous() for view in self.views)
        )

    @property
    def payload(self) -> Tensor:
        return self.flat

    @property
    def holds_values(self) -> bool:
        return all(p.dtype == self.flat.dtype for p in self.parameters)

    @property
    def buffer(self) -> Tensor:
        return self.gradients

    def take(self, result: Any) -> str:
        if wrong := _mismatch(result, self.gradients, layout=torch.strided):
            return wrong
        if result.data_ptr() != self.gradients.data_ptr() or result.dtype != self.flat.dtype:
            self.gradients.copy_(result.detach().reshape(-1))
        return ""

    @property
    def nbytes(self) -> int:
        return self.flat.nbytes

    def gather(
        self, piece: BucketPiece, new: Gradients, previous: Gradients, factor: float
    ) -> None:
        if not previous and self._copy_plain(piece.places, new, factor):
            return
        if factor != 1 and not self.holds_values:
            # Before they are rounded: accumulated by weight, they may be too large by themselves.
            new, previous = _scaled(new, factor), _scaled(previous, factor)
            factor = 1.0
        if previous or not self._copy_all(piece.places, new):
            self._copy_each(piece.places, new, previous)
        if factor != 1:
            _scale(self.views[piece.places], factor)

    def _copy_each(self, places: slice, new: Gradients, previous: Gradients) -> None:
        for place, (view, gradient) in enumerate(zip(self.views[places], new, strict=True)):
            old = previous[place] if previous else None
            first, second = (gradient, None) if old is None else (old, gradient)
            _fill_view(view, first)
            if second is not None:
                view.add_(second)

    def _copy_all(self, places: slice, new: Gradients) -> bool:
        """Copy gradients all at once; tell if that cannot be done: some are sparse, or missing."""
        if count_missing(new):
            return False
        try:
            torch._foreach_copy_(self.views[places], new)  # type: ignore[arg-type]
        except RuntimeError:
            return False
        return True

    def _copy_plain(self, places: slice, new: Gradients, factor: float) -> bool:
        """Copy gradients as bytes, which takes a third of torch's time, if all lie in a row."""
        if native.engine is None or self._addresses is None:
            return False
        into, sizes = self._addresses[places.start], self._sizes[places]
        return bool(native.engine.flatten(into, new, sizes, DTYPE_NUMBERS[self.flat.dtype], factor))

    def add(self, place: int, gradient: Tensor, factor: float = 1.0) -> None:
        if factor:
            self.views[place].add_(gradient, alpha=factor)  # which takes a sparse one as well

    def scale(self, factor: float) -> None:
        _scale([self.gradients], factor)

    def broadcast_through(self, broadcast: Callable[[Tensor], object], *, is_root: bool) -> None:
        """Give all ranks one rank's parameters, by way of the flat tensor."""
        values = [p.detach() for p in self.parameters]
        if is_root:
            torch._foreach_copy_(self.views, values)
        broadcast(self.gradients)
        if not is_root:
            torch._foreach_copy_(values, self.views)

    def as_payload(self, place: int, gradient: Tensor | None) -> Tensor:
        if gradient is None:
            return torch.zeros(
                self.views[place].shape, dtype=self.flat.dtype, device=self.flat.device
            )
        dense = gradient.to_dense() if gradient.is_sparse else gradient
        return dense.to(self.flat.dtype).contiguous()

    def results(self) -> Sequence[Tensor]:
        return self.views

    def zeroed_copy(self) -> DenseBucket:
        return DenseBucket(self.index, self._plan, self._all_parameters, _zeros)


class SparseBucket(Bucket):
    """One sparse gradient."""

    def __init__(self, index: int, plan: BucketPlan, parameters: Sequence[Parameter]) -> None:
        super().__init__(index, plan, parameters)
        self._plan, self._all_parameters = plan, parameters
        (self._parameter,) = self.parameters
        self._sum = _empty_sparse(self._parameter)

    @property
    def payload(self) -> Tensor:
        return self._sum

    @property
    def buffer(self) -> Tensor:
        return self._sum

    def take(self, result: Any) -> str:
        if wrong := _mismatch(result, self._sum, layout=torch.sparse_coo):
            return wrong
        self._sum = result.detach().to(self._sum.dtype).coalesce()
        return ""

    @property
    def nbytes(self) -> int:
        return self._sum._values().nbytes + self._sum._indices().nbytes

    def gather(
        self, piece: BucketPiece, new: Gradients, previous: Gradients, factor: float
    ) -> None:
        del piece  # there is but one
        parts = [part for part in (*previous, *new) if part is not None]
        total = _empty_sparse(self._parameter)
        for part in parts:
            total = total + self._sparse(part)
        self._sum = total.coalesce()
        if factor != 1:
            self.scale(factor)

    def add(self, place: int, gradient: Tensor, factor: float = 1.0) -> None:
        del place
        if factor:
            self._sum = (self._sum + self._sparse(gradient) * factor).coalesce()

    def scale(self, factor: float) -> None:
        self._sum = self._sum * factor if factor else _empty_sparse(self._parameter)

    def as_payload(self, place: int, gradient: Tensor | None) -> Tensor:
        del place
        return _empty_sparse(self._parameter) if gradient is None else self._sparse(gradient)

    def _sparse(self, gradient: Tensor) -> Tensor:
        return gradient if gradient.is_sparse else gradient.to_sparse(self._sum.sparse_dim())

    def results(self) -> Sequence[Tensor]:
        return [self._sum]

    def zeroed_copy(self) -> SparseBucket:
        return SparseBucket(self.index, self._plan, self._all_parameters)


def count_missing(gradients: Gradients) -> int:
    """Tell how many of the gradients are None."""
    return sum(map(is_, gradients, repeat(None)))  # without a Python frame per gradient


def _pieces(parameters: Sequence[Parameter]) -> list[slice]:
    """Divide a bucket's places where enough bytes have come together."""
    pieces, start, nbytes = [], 0, 0
    for place, parameter in enumerate(parameters, 1):
        nbytes += parameter.nbytes
        if nbytes >= PIECE_BYTES or place == len(parameters):
            pieces.append(slice(start, place))
            start, nbytes = place, 0
    return pieces


def _views(flat: Tensor, parameters: Sequence[Parameter]) -> list[Tensor]:
    """Show parts of a flat tensor in the shapes of parameters, and in the order of their memory."""
    if not parameters:
        return []
    views = list(torch._C._nn.unflatten_dense_tensors(flat, [local_tensor(p) for p in parameters]))
    for place, parameter in enumerate(parameters):
        if not parameter.is_contiguous() and _is_dense(parameter):
            part = views[place]
            stride = parameter.stride()
            views[place] = part.as_strided(parameter.shape, stride, part.storage_offset())
    return views


def _is_dense(tensor: Tensor) -> bool:
    """Tell whether a tensor's elements fill its memory, in whichever order of dims."""
    expected = 1
    for stride, extent in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if extent != 1 and stride != expected:
            return False
        expected *= extent
    return True


def _fill_view(view: Tensor, gradient: Tensor | None) -> None:
    """Have a view hold a gradient, if it does not by itself."""
    if gradient is None:
        view.zero_()
    elif gradient is not view:
        _copy(view, gradient)


def _copy(view: Tensor, gradient: Tensor) -> None:
    view.copy_(gradient.to_dense() if gradient.is_sparse else gradient)


def _mismatch(result: Any, wanted: Tensor, *, layout: torch.layout) -> str:
    """Tell what is in the place of a tensor of that size; nothing if it is one."""
    if not isinstance(result, Tensor):
        return f"a {type(result).__name__}, not a tensor"
    if result.layout != layout:
        return f"a tensor that is {result.layout}, not {layout}"
    if result.numel() != wanted.numel():
        return f"{list(result.shape)}, not {list(wanted.shape)}"
    return ""


def _scale(tensors: list[Tensor], factor: float) -> None:
    if factor:
        torch._foreach_mul_(tensors, factor)
    else:
        torch._foreach_zero_(tensors)  # whatever is in there, even what is not a number


def _empty_sparse(parameter: Parameter) -> Tensor:
    """Make a sparse gradient without an entry: rows of the first dim, as embeddings have them."""
    return torch.sparse_coo_tensor(
        torch.empty((1, 0), dtype=torch.int64, device=parameter.device),
        torch.empty((0, *parameter.shape[1:]), dtype=parameter.dtype, device=parameter.device),
        parameter.shape,
        check_invariants=False,
    )


def _scaled(gradients: Gradients, factor: float) -> Gradients:
    return [None if each is None else scale_gradient(each, factor) for each in gradients]


def _zeros(count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.zeros(count, dtype=dtype, device=device)


def scale_gradient(gradient: Tensor, factor: float) -> Tensor:
    """Multiply a gradient; by 0 it is zero even if it was not a number."""
    if factor == 1:
        return gradient
    return gradient * factor if factor else torch.zeros_like(gradient)


@dataclass(frozen=True)
class BucketLayout:
    """Where the gradients of all parameters go."""

    buckets: list[Bucket]
    pieces: list[BucketPiece]
    """Of all buckets, in order."""
    header: PassHeader

    def parameters_in_buckets(self) -> list[Parameter]:
        """List the parameters whose values fit where their gradients go."""
        return [
            parameter for bucket in self._dense_with_values() for parameter in bucket.parameters
        ]

    def broadcast_values(self, comm: Communicator, root: int) -> None:
        """Give every rank one rank's values of these parameters."""
        with torch.no_grad():
            for bucket in self._dense_with_values():
                bucket.broadcast_through(
                    lambda flat: comm.broadcast(flat, root).wait(), is_root=comm.rank == root
                )

    def _dense_with_values(self) -> list[DenseBucket]:
        dense = (bucket for bucket in self.buckets if isinstance(bucket, DenseBucket))
        return [bucket for bucket in dense if bucket.holds_values and bucket.members]


@dataclass(frozen=True)
class BucketLayoutBuilder:
    """Arranges parameters, given what stays the same while their order changes."""

    comm: Communicator
    caps: BucketCaps
    sparse: frozenset[str]
    """The names of parameters whose gradients are sparse."""
    delay: DelayedReduction
    dtype: torch.dtype | None
    """What floating-point gradients are reduced in, if not in their own type."""

    def arrange(self, named: Sequence[tuple[str, Parameter]], order: Sequence[int]) -> BucketLayout:
        """Make the buckets for gradients that come in this order."""
        shapes = [self._shape(*each) for each in named]
        after = self.delay.place([name for name, _ in named])
        plans = plan_buckets(shapes, order, self.caps, after=after)
        room = {"size": self.comm.size, "parameters": len(named), "buckets": len(plans)}
        extras = [0] * (len(plans) - 1) + [PassHeader.room(**room)]
        parameters = [parameter for _, parameter in named]
        buckets = [
            self._make(number, plan, parameters, extra)
            for number, (plan, extra) in enumerate(zip(plans, extras, strict=True))
        ]
        last = buckets[-1]
        assert isinstance(last, DenseBucket), "the plan ends with a bucket that carries the header"
        header = PassHeader(last.extra, rank=self.comm.rank, **room)
        return BucketLayout(buckets, [piece for b in buckets for piece in b.pieces], header)

    def _shape(self, name: str, p: Parameter) -> ParameterSpec:
        is_sparse = name in self.sparse
        is_cast = p.dtype.is_floating_point and not is_sparse
        dtype = self.dtype if self.dtype is not None and is_cast else p.dtype
        return ParameterSpec(p.numel(), dtype, p.device, is_sparse, name in self.delay.names)

    def _make(
        self, number: int, plan: BucketPlan, parameters: Sequence[Parameter], extra: int
    ) -> Bucket:
        if plan.is_sparse:
            return SparseBucket(number, plan, parameters)
        return DenseBucket(number, plan, parameters, self.comm.allocate, extra=extra)
