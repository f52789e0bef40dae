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
"""Dtypes that hold the counts and times of a header exactly enough."""


@dataclass(frozen=True)
class BucketCaps:
    """The sizes in bytes at which buckets are full."""

    rest: int
    first: int | None = None
    """Of the first bucket, so that a reduction starts early."""
    each: tuple[int, ...] = ()
    """One by one; the last holds for all that follow. Overrides the other two."""

    def of(self, number: int) -> int:
        if self.each:
            return self.each[min(number, len(self.each) - 1)]
        return self.first if number == 0 and self.first is not None else self.rest


class ParameterSpec(NamedTuple):
    """The properties of a parameter that a plan depends on."""

    numel: int
    dtype: torch.dtype
    device: torch.device
    is_sparse: bool = False
    """A sparse gradient is alone in its bucket."""
    is_delayed: bool = False
    """All delayed gradients are reduced together."""


@dataclass(frozen=True)
class DelayedReduction:
    """Parameters whose gradients are reduced in one call, whatever their size."""

    names: frozenset[str] = frozenset()
    after: str = ""
    """The parameter whose gradient triggers the call; if empty, it comes last."""


@dataclass
class BucketPlan:
    """The parameters whose gradients are in one bucket, in order."""

    dtype: torch.dtype
    device: torch.device
    is_sparse: bool = False
    is_delayed: bool = False
    members: list[int] = field(default_factory=list)
    nbytes: int = 0
    ready: int = -1
    """The position of its last member in the order of arrival."""

    def add(self, member: int, spec: ParameterSpec, position: int) -> None:
        self.members.append(member)
        self.nbytes += spec.numel * spec.dtype.itemsize
        self.ready = position

    @property
    def can_carry_header(self) -> bool:
        return not self.is_sparse and self.dtype in HEADER_DTYPES


def plan_buckets(
    specs: Sequence[ParameterSpec],
    order: Sequence[int],
    caps: BucketCaps,
    *,
    after: int | None = None,
) -> list[BucketPlan]:
    """Divide parameters into buckets, in the order in which their gradients are expected.

    Delayed gradients follow that of parameter `after`, or come last. The last bucket can carry a
    header; if no parameter has a suitable dtype, it has no parameters.
    """
    plans: list[BucketPlan] = []
    filling: dict[tuple[torch.dtype, torch.device, bool], tuple[BucketPlan, int]] = {}
    for position, i in enumerate(order):
        spec = specs[i]
        if spec.is_sparse:
            plans.append(BucketPlan(spec.dtype, spec.device, is_sparse=True))
            plans[-1].add(i, spec, position)
            continue
        key = spec.dtype, spec.device, spec.is_delayed
        if key not in filling:
            plan = BucketPlan(spec.dtype, spec.device, is_delayed=spec.is_delayed)
            filling[key] = plan, caps.of(len(plans))
            plans.append(plan)
        plan, cap = filling[key]
        plan.add(i, spec, position)
        if plan.nbytes >= cap and not plan.is_delayed:
            del filling[key]
    turn = order.index(after) if after is not None else len(order)
    for plan in plans:
        plan.ready = max(plan.ready, turn) if plan.is_delayed else plan.ready
    plans.sort(key=lambda plan: (plan.ready, plan.is_delayed))
    carriers = [plan for plan in plans if plan.can_carry_header]
    last = carriers[-1] if carriers else BucketPlan(torch.float32, specs[0].device)
    return [*(plan for plan in plans if plan is not last), last]


PIECE_BYTES = 256 << 10
"""The least number of bytes that are gathered at once."""
Gradients = Sequence[Tensor | None]
Allocate = Callable[[int, torch.dtype, torch.device], Tensor]


@dataclass(frozen=True)
class BucketPiece:
    """Adjacent gradients of a bucket that are gathered together."""

    bucket_index: int
    """Not the bucket: a reference cycle would keep its memory too long."""
    places: slice
    """Their positions in the bucket."""
    members: list[int]
    """The indices of their parameters."""
    parameters: list[Parameter]


class Bucket(ABC):
    """The gradients of some parameters, which are reduced together."""

    def __init__(self, index: int, plan: BucketPlan, parameters: Sequence[Parameter]) -> None:
        self.index = index
        self.members = plan.members
        """The indices of the parameters."""
        self.parameters = [parameters[i] for i in plan.members]
        self.pieces = [
            BucketPiece(index, places, self.members[places], self.parameters[places])
            for places in _divide_into_pieces(self.parameters)
        ]
        self._plan, self._all_parameters = plan, parameters

    @property
    @abstractmethod
    def payload(self) -> Tensor:
        """The tensor that is reduced."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """The size of the payload."""

    @property
    @abstractmethod
    def buffer(self) -> Tensor:
        """The gradients in one tensor, without the header."""

    @property
    def holds_values(self) -> bool:
        """Whether the bucket has the dtype of its parameters."""
        return True

    @abstractmethod
    def take(self, result: Any) -> str:
        """Replace the gradients by a tensor like `buffer`; return what is wrong with it, or ""."""

    @abstractmethod
    def gather(
        self, piece: BucketPiece, new: Gradients, previous: Gradients, factor: float
    ) -> None:
        """Store the sum of new and previous gradients, times a factor."""

    @abstractmethod
    def add(self, place: int, gradient: Tensor, factor: float = 1.0) -> None:
        """Add to the gradient at a place."""

    @abstractmethod
    def scale(self, factor: float) -> None:
        """Multiply all gradients; by 0 they become zero even if they are not finite."""

    @abstractmethod
    def as_payload(self, place: int, gradient: Tensor | None) -> Tensor:
        """Return a gradient, or zeros, as a tensor that can be reduced by itself."""

    @abstractmethod
    def results(self) -> Sequence[Tensor]:
        """List the gradients by position."""

    @abstractmethod
    def zeroed_copy(self) -> Bucket:
        """Return a bucket of the same parameters with zero gradients."""


class DenseBucket(Bucket):
    """Gradients in a flat tensor, with room for `extra` numbers behind them."""

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
        numel = sum(p.numel() for p in self.parameters)
        self.flat = allocate(numel + extra, plan.dtype, plan.device)
        self.gradients = self.flat[:numel]
        self.extra = self.flat[numel:]
        self.views = _views(self.gradients, self.parameters)
        self._sizes = [view.nbytes for view in self.views]
        # Computed, not taken from the views: an empty view has no address.
        offsets = accumulate(self._sizes, initial=self.flat.data_ptr())
        can_copy_bytes = (
            self.flat.device.type == "cpu"
            and self.flat.dtype in DTYPE_NUMBERS
            and can_read_tensors()
            and all(view.is_contiguous() for view in self.views)
        )
        self._addresses = list(offsets) if can_copy_bytes else None

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
            # Before rounding: gradients that are accumulated by weight may overflow unscaled.
            new, previous = (
                [None if each is None else scale_gradient(each, factor) for each in gradients]
                for gradients in (new, previous)
            )
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
        """Copy all gradients at once; return False if some are sparse or missing."""
        if count_missing(new):
            return False
        try:
            torch._foreach_copy_(self.views[places], new)  # type: ignore[arg-type]
        except RuntimeError:
            return False
        return True

    def _copy_plain(self, places: slice, new: Gradients, factor: float) -> bool:
        """Copy contiguous gradients natively, in a third of torch's time; False if impossible."""
        if native.engine is None or self._addresses is None:
            return False
        into, sizes = self._addresses[places.start], self._sizes[places]
        return bool(native.engine.flatten(into, new, sizes, DTYPE_NUMBERS[self.flat.dtype], factor))

    def add(self, place: int, gradient: Tensor, factor: float = 1.0) -> None:
        if factor:
            self.views[place].add_(gradient, alpha=factor)  # works with a sparse gradient, too

    def scale(self, factor: float) -> None:
        _scale([self.gradients], factor)

    def broadcast_through(self, broadcast: Callable[[Tensor], object], *, is_root: bool) -> None:
        """Broadcast the root's parameters through the flat tensor."""
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
        return DenseBucket(self.index, self._plan, self._all_parameters, _allocate_zeros)


class SparseBucket(Bucket):
    """One sparse gradient."""

    def __init__(self, index: int, plan: BucketPlan, parameters: Sequence[Parameter]) -> None:
        super().__init__(index, plan, parameters)
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
        del piece
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
    return sum(map(is_, gradients, repeat(None)))  # no Python frame per gradient


def _divide_into_pieces(parameters: Sequence[Parameter]) -> list[slice]:
    pieces, start, nbytes = [], 0, 0
    for place, parameter in enumerate(parameters, 1):
        nbytes += parameter.nbytes
        if nbytes >= PIECE_BYTES or place == len(parameters):
            pieces.append(slice(start, place))
            start, nbytes = place, 0
    return pieces


def _views(flat: Tensor, parameters: Sequence[Parameter]) -> list[Tensor]:
    """Return views of a flat tensor with the shapes and strides of parameters."""
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
    """Whether a tensor has no gaps in memory, in whichever order of dims."""
    expected = 1
    for stride, extent in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if extent != 1 and stride != expected:
            return False
        expected *= extent
    return True


def _fill_view(view: Tensor, gradient: Tensor | None) -> None:
    if gradient is None:
        view.zero_()
    elif gradient is not view:
        view.copy_(gradient.to_dense() if gradient.is_sparse else gradient)


def _mismatch(result: Any, wanted: Tensor, *, layout: torch.layout) -> str:
    """Return how a result differs from what is wanted; "" if it does not."""
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
        torch._foreach_zero_(tensors)  # NaN times 0 would be NaN


def _empty_sparse(parameter: Parameter) -> Tensor:
    """Return a sparse gradient without entries: rows of the first dim, as for embeddings."""
    return torch.sparse_coo_tensor(
        torch.empty((1, 0), dtype=torch.int64, device=parameter.device),
        torch.empty((0, *parameter.shape[1:]), dtype=parameter.dtype, device=parameter.device),
        parameter.shape,
        check_invariants=False,
    )


def scale_gradient(gradient: Tensor, factor: float) -> Tensor:
    """Multiply a gradient; by 0 it becomes zero even if it is not finite."""
    if factor == 1:
        return gradient
    return gradient * factor if factor else torch.zeros_like(gradient)


def _allocate_zeros(count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.zeros(count, dtype=dtype, device=device)


@dataclass(frozen=True)
class BucketLayout:
    """The buckets of all parameters."""

    buckets: list[Bucket]
    pieces: list[BucketPiece]
    """Of all buckets, in order."""
    header: PassHeader

    def parameters_in_buckets(self) -> list[Parameter]:
        """List the parameters that `broadcast_values` sends."""
        return [p for bucket in self._dense_with_values() for p in bucket.parameters]

    def broadcast_values(self, comm: Communicator, root: int) -> None:
        """Broadcast the root's parameters, using the buckets as buffers."""
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
    """Makes the buckets for an order of gradients."""

    comm: Communicator
    caps: BucketCaps
    sparse: frozenset[str]
    """The names of parameters whose gradients are sparse."""
    delay: DelayedReduction
    dtype: torch.dtype | None
    """The dtype in which floating-point gradients are reduced; None for their own."""

    def arrange(self, named: Sequence[tuple[str, Parameter]], order: Sequence[int]) -> BucketLayout:
        """Make the buckets for gradients that arrive in this order."""
        specs = [self._spec(*each) for each in named]
        names = [name for name, _ in named]
        after = names.index(self.delay.after) if self.delay.after in names else None
        plans = plan_buckets(specs, order, self.caps, after=after)
        room = {"size": self.comm.size, "parameters": len(named), "buckets": len(plans)}
        extras = [0] * (len(plans) - 1) + [PassHeader.room(**room)]
        parameters = [parameter for _, parameter in named]
        buckets = [
            self._make(number, plan, parameters, extra)
            for number, (plan, extra) in enumerate(zip(plans, extras, strict=True))
        ]
        last = buckets[-1]
        assert isinstance(last, DenseBucket)  # it carries the header
        header = PassHeader(last.extra, rank=self.comm.rank, **room)
        return BucketLayout(buckets, [piece for b in buckets for piece in b.pieces], header)

    def _spec(self, name: str, p: Parameter) -> ParameterSpec:
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
