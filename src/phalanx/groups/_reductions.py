"""Reductions, and an all-to-all of lists, that an engine does not support natively.

`adapt_reduction` rewrites a reduction in terms of the operations and dtypes that the engine has.
`SparseSum` sums sparse tensors on an engine that only moves dense ones: ranks exchange their entry
counts first, then the entries padded to the longest.

Sums are added in rank order, as in the `local` backend, so that all engines give the same bits.
A finishing function may be interrupted and called again; it must not apply the same step twice.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import methodcaller
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions
from torch.distributed import ReduceOp

from .._formatting import dtype_name
from ..errors import InvalidArgument
from ._engine import Engine, JointWork, RawWork, Traits, copy_options

if TYPE_CHECKING:
    from ._issuer import Issuer

SUM = ReduceOp.SUM
AVG = ReduceOp.AVG
PREMUL_SUM = ReduceOp.PREMUL_SUM
_LINEAR = frozenset({SUM, AVG, PREMUL_SUM})
_BOOL_OPS = {SUM: ReduceOp.MAX, ReduceOp.PRODUCT: ReduceOp.MIN}
"""Sum and product of bool; engines that see bytes would store a 2."""


@dataclass
class AdaptedReduction:
    """A reduction that the engine supports."""

    start: Callable[..., RawWork]
    opts: Any
    inputs: list[Tensor]
    outputs: list[Tensor]
    finish: Callable[[], None] | None = None


def plain_op(op: Any) -> Any:
    """Return the enumeration in a `ReduceOp`, which can be compared and hashed."""
    return getattr(op, "op", op)


def is_sum(op: Any) -> bool:
    """Whether an operation is a plain sum; the identity test is the fast one."""
    return op is SUM or bool(op == SUM)


def adapt_reduction(
    traits: Traits,
    issuer: Issuer,
    operation: str,
    method: Callable[..., RawWork],
    opts: Any,
    inputs: list[Tensor],
    outputs: list[Tensor],
) -> AdaptedReduction:
    """Rewrite a reduction as one that the engine supports; `inputs` may be `outputs`."""
    op, dtype, in_place = opts.reduceOp, inputs[0].dtype, inputs is outputs
    kind = plain_op(op)
    outs = [tensor.detach() for tensor in outputs]  # for engines made of tensor operations
    ins = outs if in_place else [tensor.detach() for tensor in inputs]
    call = AdaptedReduction(method, opts, ins, outs)
    if dtype is torch.bool:
        op = kind = _BOOL_OPS.get(kind, kind)
    can_average = dtype.is_floating_point or traits.averages_all_types
    if kind == PREMUL_SUM and not traits.premultiplies:
        factor, op = opts.reduceOp.factor, SUM
        call.inputs = products = ins if in_place else [tensor.clone() for tensor in ins]

        def multiply_and_start(*args: Any) -> RawWork:
            for tensor in products:
                tensor.mul_(factor)
            return method(*args)

        call.start = multiply_and_start
    elif kind == AVG and not (can_average and operation in traits.averages):
        op = SUM
        call.finish = averaging(outputs, issuer.participants)
    if traits.dtypes is not None and dtype not in traits.dtypes:
        if not (dtype.is_complex and kind in _LINEAR):
            raise InvalidArgument(
                f"{operation}: this backend does not support {str(kind).rpartition('.')[2]} of "
                f"{dtype_name(dtype)}; convert the tensor to a supported dtype, such as float32 or "
                "int64"
            )
        # The sum of complex numbers is that of their parts.
        call.inputs = [torch.view_as_real(tensor) for tensor in call.inputs]
        call.outputs = call.inputs if in_place else [torch.view_as_real(t) for t in outs]
    call.opts = copy_options(opts, reduceOp=op)
    return call


def averaging(tensors: Sequence[Tensor], count: int) -> Callable[[], None]:
    """Return a function that divides sums by `count`, once; integers are truncated."""
    sums = [tensor.detach() for tensor in tensors]
    rounding = "trunc" if not (sums[0].is_floating_point() or sums[0].is_complex()) else None
    divide = methodcaller("div_", count, rounding_mode=rounding)
    done: list[Tensor] = []

    def finish() -> None:
        # An interrupted wait comes here again. `extend` divides and records it in one step, between
        # which no signal is handled.
        done.extend(map(divide, sums[len(done) :]))

    return finish


def as_bytes(tensor: Tensor) -> Tensor:
    """View a contiguous tensor as bytes, so that any engine can move it."""
    flat = tensor.detach().reshape(-1)
    return (torch.view_as_real(flat) if flat.is_complex() else flat).view(torch.uint8)


@dataclass
class SparseSum:
    """An allreduce of one sparse tensor per rank, as allgathers of counts and entries."""

    engine: Engine
    tensor: Tensor
    rank: int
    size: int

    def start(self, wait_for: Callable[[RawWork], None]) -> RawWork:
        """Exchange the numbers of entries and wait for them, then start to gather the entries."""
        own = self.tensor.detach().coalesce()
        header = torch.tensor([own._nnz(), own.sparse_dim(), *own.shape], dtype=torch.int64)
        headers = torch.zeros(self.size, len(header), dtype=torch.int64)
        headers[:, 1:] = header[1:]  # ranks that have left contribute no entries
        headers[self.rank] = header
        wait_for(self._gather(headers))
        if not torch.equal(headers[:, 1:], header[1:].expand(self.size, -1)):
            shapes = sorted({str(row[2:].tolist()) for row in headers})
            raise InvalidArgument(
                f"allreduce: ranks passed sparse tensors of different shapes: {shapes}"
            )
        self._counts = headers[:, 0].tolist()
        self._indices = self._rows(own.indices().t())
        self._values = self._rows(own.values())
        return JointWork([self._gather(self._indices), self._gather(self._values)])

    def finish(self) -> None:
        """Sum the gathered entries into this rank's tensor."""
        shape = self.tensor.shape
        parts = [
            torch.sparse_coo_tensor(
                self._indices[rank, :count].t(),
                self._values[rank, :count],
                shape,
                check_invariants=False,  # the entries of a valid tensor of this shape
            )
            for rank, count in enumerate(self._counts)
            if count
        ]
        with torch.no_grad():  # a detached view would not see the new entries
            self.tensor.zero_()
            if parts:
                self.tensor.add_(functools.reduce(torch.add, parts).coalesce())

    def _rows(self, own: Tensor) -> Tensor:
        rows = own.new_zeros((self.size, max(self._counts), *own.shape[1:]))
        rows[self.rank, : len(own)] = own
        return rows

    def _gather(self, rows: Tensor) -> RawWork:
        own = rows[self.rank].reshape(-1).clone()
        work: RawWork = self.engine._allgather_base(rows.view(-1), own, AllgatherOptions())
        return work


def flatten_lists(
    engine: Engine, outputs: list[Tensor], inputs: list[Tensor], opts: Any
) -> tuple[Callable[..., RawWork], tuple[Any, ...], Callable[[], None]]:
    """Express an all-to-all of lists as one of flat tensors: (method, arguments, finish)."""
    sizes = [tensor.numel() for tensor in outputs]
    # A copy of the outputs: the part of a rank that has left keeps its contents.
    received = torch.cat([tensor.detach().reshape(-1) for tensor in outputs])
    sent = torch.cat([tensor.detach().reshape(-1) for tensor in inputs])

    def unpack() -> None:
        for output, part in zip(outputs, torch.split(received, sizes), strict=True):
            output.detach().copy_(part.view(output.shape))

    sent_sizes = [tensor.numel() for tensor in inputs]
    return engine.alltoall_base, (received, sent, sizes, sent_sizes, opts), unpack
