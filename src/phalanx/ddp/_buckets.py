"""Gradient buckets: which gradients are reduced together, and the flat tensors they are in.

`plan_buckets` is pure arithmetic and must give the same result on every rank. `BucketLayout`
allocates what the plan says. A bucket is reduced as a whole but filled in pieces: a gradient that
is copied early is still in the cache, and its memory is reused for the next one.

The last bucket of a plan can carry the pass header, so its dtype is float32 or float64. If no
parameter has such a dtype, the last bucket has no parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, repeat
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from .. import native
from ..errors import InvalidState
from ..groups._fast_path import configure_fast_path
from ..groups.backends.shm import DTYPES
from ._communicator import Communicator, SumSlots
from ._dtensor import local_tensor, original_parameter
from ._pass_header import HEADER_DTYPES, PassHeader

MIB = 1 << 20


BucketCaps = tuple[int, ...]
"""The sizes in bytes at which buckets are full, one by one; the last holds for all that follow."""


@dataclass(frozen=True)
class DelayedReduction:
    """Parameters whose gradients are reduced in one call, whatever their size."""

    names: frozenset[str] = frozenset()
    after: str = ""  # the parameter whose gradient triggers the call; if empty, it comes last


class BucketOptions(NamedTuple):
    """The user's choices and the properties of a module that a layout depends on."""

    caps: BucketCaps
    sparse: frozenset[str]  # the names of parameters whose gradients are sparse
    delay: DelayedReduction
    dtype: torch.dtype | None
    """The dtype in which floating-point gradients are reduced; None for their own."""
    slots: int = 0
    """How many flat tensors a bucket has for the subtrees of a `GradientFold`, beside that for the
    result; 0 without one."""


class ParameterSpec(NamedTuple):
    """The properties of a parameter that a plan depends on."""

    numel: int
    dtype: torch.dtype
    device: torch.device
    is_sparse: bool = False  # a sparse gradient is alone in its bucket
    is_delayed: bool = False  # all delayed gradients are reduced together, except sparse ones


@dataclass
class BucketPlan:
    """The parameters whose gradients are in one bucket, in order."""

    dtype: torch.dtype
    device: torch.device
    is_sparse: bool = False
    is_delayed: bool = False
    members: list[int] = field(default_factory=list)
    nbytes: int = 0
    last_position: int = -1  # the position of its last member in the order of arrival


def plan_buckets(
    specs: Sequence[ParameterSpec],
    order: Sequence[int],
    caps: BucketCaps,
    *,
    after: int | None = None,
) -> list[BucketPlan]:
    """Divide parameters into buckets, in the order in which their gradients are expected.

    Delayed gradients follow that of parameter `after`, or come last.
    """
    plans: list[BucketPlan] = []
    filling: dict[tuple[torch.dtype, torch.device, bool, bool], tuple[BucketPlan, int]] = {}
    for position, i in enumerate(order):
        spec = specs[i]
        is_delayed = spec.is_delayed and not spec.is_sparse
        key = spec.dtype, spec.device, spec.is_sparse, is_delayed
        if key not in filling:
            cap = 0 if spec.is_sparse else caps[min(len(plans), len(caps) - 1)]
            filling[key] = BucketPlan(*key), cap
            plans.append(filling[key][0])
        plan, cap = filling[key]
        plan.members.append(i)
        plan.nbytes += spec.numel * spec.dtype.itemsize
        plan.last_position = position
        if plan.nbytes >= cap and not plan.is_delayed:
            del filling[key]
    turn = order.index(after) if after is not None else len(order)
    for plan in plans:
        if plan.is_delayed:
            plan.last_position = max(plan.last_position, turn)
    plans.sort(key=lambda plan: (plan.last_position, plan.is_delayed))
    candidates = [plan for plan in plans if not plan.is_sparse and plan.dtype in HEADER_DTYPES]
    last = candidates[-1] if candidates else BucketPlan(torch.float32, specs[0].device)
    return [*(plan for plan in plans if plan is not last), last]


GRADIENT_ALIGNMENT = 64
"""Bytes; where bits must not depend on the order of gradients in a bucket. What users compute with
a gradient, such as a dot product, may depend on its address. torch allocates tensors like this."""
PIECE_BYTES = 256 << 10  # the least number of bytes that are gathered together
Gradients = Sequence[Tensor | None]


@dataclass(frozen=True)
class BucketPiece:
    """Adjacent gradients of a bucket that are gathered together."""

    bucket_index: int  # not the bucket: a reference cycle would keep its memory too long
    positions: slice  # their positions in the bucket
    members: list[int]  # the indices of their parameters
    parameters: list[Parameter]


class ResultMismatch(Exception):
    """A hook has returned something that does not fit its bucket."""


NEGATIVE_ZERO = {False: -0.0, True: complex(-0.0, -0.0)}
"""The identity of addition, by whether a dtype is complex."""


class FlatViews:
    """A flat tensor with the layout of a bucket, and its gradients as views."""

    def __init__(self, flat: Tensor, parameters: Sequence[Parameter], alignment: int) -> None:
        self.flat = flat
        self.address = flat.data_ptr()
        self._parameters = parameters
        self._alignment = alignment

    @cached_property
    def views(self) -> list[Tensor]:
        offsets = gradient_offsets(self._parameters, self.flat.dtype, self._alignment)
        return _views(self.flat[: offsets[-1]], self._parameters, offsets)


class Bucket:
    """Gradients that are reduced together, in a flat tensor that may end with the pass header."""

    payload: Tensor  # the tensor that is reduced
    slots: SumSlots | None = None
    """Whose result begins with the payload; see `BucketOptions.slots`. Gradients are folded into
    the inputs."""
    buffer: Tensor  # the gradients in one tensor, without the header
    views: list[Tensor]  # the gradients by position, with the shapes and strides of the parameters
    grads: list[Tensor]
    """The same views as other objects, for ``.grad``. Users may point those elsewhere: assigning to
    `.grad.data` does, and so does a module that changes its dtype. `gather` replaces them then."""

    def __init__(
        self,
        index: int,
        members: list[int],
        parameters: list[Parameter],
        payload: Tensor,
        alignment: int = 1,
    ) -> None:
        self.index = index
        self.alignment = alignment  # of gradients, in bytes
        self.members = members  # the indices of the parameters
        self.parameters = parameters
        self.pieces: list[BucketPiece] = []
        start = nbytes = 0
        for stop, parameter in enumerate(parameters, 1):
            nbytes += parameter.nbytes
            if nbytes >= PIECE_BYTES or stop == len(parameters):
                positions = slice(start, stop)
                self.pieces.append(
                    BucketPiece(index, positions, members[positions], parameters[positions])
                )
                start, nbytes = stop, 0
        self._set_payload(payload)

    def _set_payload(self, payload: Tensor) -> None:
        self.payload = payload
        offsets = gradient_offsets(self.parameters, payload.dtype, self.alignment)
        self.buffer = payload[: offsets[-1]]
        self.views = _views(self.buffer, self.parameters, offsets)
        self.grads = [view.view_as(view) for view in self.views]
        self._sizes = [view.nbytes for view in self.views]
        # Computed, not taken from the views: an empty view has no address.
        start = payload.data_ptr()
        addresses = [start + offset * payload.itemsize for offset in offsets]
        can_copy_bytes = (
            payload.device.type == "cpu"
            and payload.dtype in DTYPES
            and configure_fast_path()
            and all(view.is_contiguous() for view in self.views)
        )
        self._addresses = addresses if can_copy_bytes else None

    @property
    def holds_values(self) -> bool:
        """Whether the bucket has the dtype of its parameters, which a module may change."""
        return all(p.dtype == self.payload.dtype for p in self.parameters)

    @property
    def nbytes(self) -> int:
        if self.payload.is_sparse:
            return self.payload._values().nbytes + self.payload._indices().nbytes
        return self.payload.nbytes

    def store_result(self, result: Any) -> None:
        """Replace the gradients by a tensor like `buffer`, or raise `ResultMismatch`."""
        _check_result(result, self.buffer)
        if result.data_ptr() != self.buffer.data_ptr() or result.dtype != self.buffer.dtype:
            self.buffer.copy_(result.detach().reshape(-1))

    def gather(
        self, piece: BucketPiece, new: Gradients, previous: Gradients, factor: float
    ) -> bool:
        """Store the sum of new and previous gradients, times a factor.

        Returns whether all were copied natively, so that they have the dtype of the bucket.
        """
        positions = piece.positions
        is_packed = self.alignment == 1
        if self._addresses and is_packed and count_missing(previous) == len(previous):
            # Contiguous gradients are copied natively, in a third of torch's time.
            assert native.engine is not None
            into, sizes = self._addresses[positions.start], self._sizes[positions]
            grads, dtype = self.grads[positions], DTYPES[self.payload.dtype]
            if native.engine.flatten(into, new, grads, sizes, dtype, factor):
                return True
        self._show_grads(positions)
        if factor != 1 and not self.holds_values:
            # Before rounding: gradients that are accumulated by weight may overflow unscaled.
            new, previous = (
                [None if each is None else scale_gradient(each, factor) for each in gradients]
                for gradients in (new, previous)
            )
            factor = 1.0
        views, grads = self.views[positions], self.grads[positions]
        if previous or any(each is None or each.is_sparse for each in new):
            pairs = zip(previous or [None] * len(new), new, strict=True)
            for view, grad, (old, gradient) in zip(views, grads, pairs, strict=True):
                first, second = (gradient, None) if old is None else (old, gradient)
                if first is None:
                    view.zero_()
                elif first is not grad:
                    view.copy_(first.to_dense() if first.is_sparse else first)
                if second is not None:
                    view.add_(second)
        else:
            torch._foreach_copy_(views, new)  # type: ignore[arg-type]
        if factor != 1:
            _scale(views, factor)
        return False

    def fold(
        self, piece: BucketPiece, new: Gradients, nodes: Sequence[FlatViews], *, into: FlatViews
    ) -> None:
        """Store ``nodes[0] + (nodes[1] + (... + gradient))``, for the gradients of a piece.

        `into` is ``nodes[0]`` if there are nodes. A missing gradient is the identity of the sum.
        """
        positions = piece.positions
        if self._addresses is not None:
            assert native.engine is not None
            start = self._addresses[positions.start] - self.payload.data_ptr()
            addresses = [node.address + start for node in nodes]
            # A step begins without nodes, so once in every step is enough for the tensors in .grad.
            shown = [] if nodes else self.grads[positions]
            shown_at = self._addresses[positions.start]
            sizes, dtype = self._sizes[positions], DTYPES[self.payload.dtype]
            target, alignment = into.address + start, self.alignment
            if native.engine.fold(target, addresses, new, shown, shown_at, sizes, dtype, alignment):
                return
        self._show_grads(positions)
        places = range(*positions.indices(len(self.views)))
        for position, gradient in zip(places, new, strict=True):
            target = into.views[position]
            total = torch.full_like(target, NEGATIVE_ZERO[target.is_complex()])
            if gradient is not None:
                if gradient.is_sparse:
                    raise InvalidState(
                        "a gradient is sparse, but the sums of micro-batches are kept in dense "
                        "buckets. Use sparse=False"
                    )
                total = gradient.to(target.dtype)
            total = as_real(total)
            for node in reversed(nodes):
                total = as_real(node.views[position]) + total
            as_real(target).copy_(total)

    def _show_grads(self, positions: slice) -> None:
        """Replace tensors for ``.grad`` that users have pointed elsewhere."""
        self.grads[positions] = [
            grad if grad.is_set_to(view) else view.view_as(view)
            for grad, view in zip(self.grads[positions], self.views[positions], strict=True)
        ]

    def flat_views(self, flat: Tensor) -> FlatViews:
        """Return another flat tensor with the layout of the bucket."""
        return FlatViews(flat, self.parameters, self.alignment)

    def add(self, position: int, gradient: Tensor, factor: float = 1.0) -> None:
        if factor:
            self.views[position].add_(gradient, alpha=factor)  # works with a sparse gradient, too

    def scale(self, factor: float) -> None:
        """Multiply all gradients; by 0 they become zero even if they are not finite."""
        _scale([self.buffer], factor)

    def as_payload(self, position: int, gradient: Tensor | None) -> Tensor:
        """Return a gradient, or zeros, as a tensor that can be reduced by itself."""
        if gradient is None:
            return self.payload.new_zeros(self.views[position].shape)
        dense = gradient.to_dense() if gradient.is_sparse else gradient
        return dense.to(self.payload.dtype).contiguous()

    def zeroed_copy(self) -> Bucket:
        payload = torch.zeros_like(self.buffer)
        return Bucket(self.index, self.members, self.parameters, payload, self.alignment)

    def broadcast_parameters(self, comm: Communicator, root: int) -> None:
        """Give every rank the root's parameters, which pass through the bucket."""
        values = [p.detach() for p in self.parameters]
        if comm.rank == root:
            torch._foreach_copy_(self.views, values)
        comm.broadcast(self.buffer, root).wait()
        if comm.rank != root:
            torch._foreach_copy_(values, self.views)


class SparseBucket(Bucket):
    """One sparse gradient. It is replaced, not written to."""

    def __init__(self, index: int, members: list[int], parameters: list[Parameter]) -> None:
        super().__init__(index, members, parameters, _empty_sparse(parameters[0]))

    def _set_payload(self, payload: Tensor) -> None:
        self.payload = self.buffer = payload
        self.views = self.grads = [payload]

    def store_result(self, result: Any) -> None:
        _check_result(result, self.buffer)
        self._set_payload(result.detach().to(self.buffer.dtype).coalesce())

    def gather(
        self, piece: BucketPiece, new: Gradients, previous: Gradients, factor: float
    ) -> bool:
        total = _empty_sparse(*piece.parameters)
        for part in (*previous, *new):
            if part is not None:
                total = total + self.as_payload(0, part)
        self._set_payload(total.coalesce())
        if factor != 1:
            self.scale(factor)
        return False

    def add(self, position: int, gradient: Tensor, factor: float = 1.0) -> None:
        if factor:
            self._set_payload(
                (self.payload + self.as_payload(position, gradient) * factor).coalesce()
            )

    def scale(self, factor: float) -> None:
        self._set_payload(self.payload * factor if factor else _empty_sparse(*self.parameters))

    def as_payload(self, position: int, gradient: Tensor | None) -> Tensor:
        del position
        if gradient is None:
            return _empty_sparse(*self.parameters)
        return gradient if gradient.is_sparse else gradient.to_sparse(self.payload.sparse_dim())

    def zeroed_copy(self) -> Bucket:
        return SparseBucket(self.index, self.members, self.parameters)


def as_real(tensor: Tensor) -> Tensor:
    """View complex numbers as pairs: torch's complex sum does not keep the signs of zeros."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def count_missing(gradients: Gradients) -> int:
    return sum(map(is_, gradients, repeat(None)))  # no Python frame per gradient


def gradient_offsets(
    parameters: Sequence[Parameter], dtype: torch.dtype, alignment: int
) -> list[int]:
    """Return the element at which each gradient of a bucket begins, and the end of the last."""
    grain = max(1, alignment // dtype.itemsize)
    return list(accumulate((-(-p.numel() // grain) * grain for p in parameters), initial=0))


def _views(flat: Tensor, parameters: Sequence[Parameter], offsets: list[int]) -> list[Tensor]:
    views = [
        flat[start : start + p.numel()].view(local_tensor(p).shape)
        for start, p in zip(offsets, parameters, strict=False)
    ]
    for position, parameter in enumerate(parameters):
        shard, part = local_tensor(parameter), views[position]
        # Without gaps in memory, in whichever order of dims.
        if not shard.is_contiguous() and torch.ops.aten.is_non_overlapping_and_dense(shard):
            views[position] = part.as_strided(shard.shape, shard.stride(), part.storage_offset())
    return views


def _check_result(result: Any, wanted: Tensor) -> None:
    if not isinstance(result, Tensor):
        raise ResultMismatch(f"a {type(result).__name__}, not a tensor")
    if result.layout != wanted.layout:
        raise ResultMismatch(f"a tensor that is {result.layout}, not {wanted.layout}")
    if result.numel() != wanted.numel():
        raise ResultMismatch(f"{list(result.shape)}, not {list(wanted.shape)}")


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


class BucketLayout:
    """The buckets of all parameters, for gradients that arrive in one order."""

    def __init__(
        self,
        named: Sequence[tuple[str, Parameter]],
        order: Sequence[int],
        comm: Communicator,
        options: BucketOptions,
    ) -> None:
        self.comm = comm
        self.names = [name for name, _ in named]
        self.parameters = [parameter for _, parameter in named]
        specs = []
        for name, p in named:
            is_sparse = name in options.sparse
            is_cast = p.dtype.is_floating_point and not is_sparse
            dtype = (options.dtype if is_cast else None) or p.dtype
            is_delayed = name in options.delay.names
            specs.append(ParameterSpec(p.numel(), dtype, p.device, is_sparse, is_delayed))
        trigger = options.delay.after
        after = self.names.index(trigger) if trigger in self.names else None
        plans = plan_buckets(specs, order, options.caps, after=after)
        header_numel = PassHeader.numel(comm.size, len(named), len(plans))
        self.buckets: list[Bucket] = []
        for index, plan in enumerate(plans):
            parameters = [self.parameters[i] for i in plan.members]
            if plan.is_sparse:
                self.buckets.append(SparseBucket(index, plan.members, parameters))
                continue
            extra = header_numel if plan is plans[-1] else 0
            alignment = GRADIENT_ALIGNMENT if options.slots else 1
            numel = gradient_offsets(parameters, plan.dtype, alignment)[-1] + extra
            slots = None
            if options.slots:
                slots = comm.allocate_slots(options.slots, numel, plan.dtype, plan.device)
                flat = slots.result[:numel]
            else:
                flat = comm.allocate(numel, plan.dtype, plan.device)
            bucket = Bucket(index, plan.members, parameters, flat, alignment)
            bucket.slots = slots
            self.buckets.append(bucket)
        self.pieces = [piece for bucket in self.buckets for piece in bucket.pieces]
        self.absent = [0] * len(self.pieces)
        """How many gradients of each piece did not arrive in the recorded pass."""
        self.grad_is_view = False
        """After a pass, ``.grad`` is a view of the bucket, not a tensor of its own."""
        self._dtypes = [(original_parameter(p), p.dtype) for p in self.parameters]
        self._sample = [bucket.members[0] for bucket in self.buckets if bucket.members]
        self._has_changed = False
        flats = [bucket.payload for bucket in self.buckets if not bucket.payload.is_sparse]
        self._addresses = [(flat, flat.data_ptr()) for flat in flats]
        last = self.buckets[-1]
        self.header = PassHeader(
            last.payload[last.buffer.numel() :], comm.rank, comm.size, len(named), len(plans)
        )

    def is_outdated(self) -> bool:
        """Whether the dtype of parameters (one per bucket is checked) or an address has changed."""
        # Memory moves if users put a gradient into shared memory.
        has_moved = any(flat.data_ptr() != address for flat, address in self._addresses)
        return has_moved or self.has_changed(self._sample)

    def has_changed(self, members: Sequence[int]) -> bool:
        """Whether some of these parameters, or of earlier ones, have another dtype now."""
        for i in members:
            parameter, dtype = self._dtypes[i]
            self._has_changed |= parameter.dtype != dtype
        return self._has_changed
