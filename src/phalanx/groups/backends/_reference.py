"""What each collective means, in plain tensor code: the reference for every other engine.

A function gets the arguments of all ranks, in rank order, and fills the outputs of all ranks.
Sums are added up by rank, never by arrival, so the same inputs give the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from .._adapt import average, plain_op

__all__ = [
    "allgather",
    "allgather_base",
    "allreduce",
    "alltoall",
    "alltoall_base",
    "barrier",
    "broadcast",
    "gather",
    "put",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_base",
    "scatter",
]

Arguments = Sequence[tuple[Any, ...]]
"""One tuple of arguments per rank, in rank order."""

_BINARY: dict[Any, Callable[[Tensor, Tensor], Tensor]] = {
    ReduceOp.SUM: torch.add,
    ReduceOp.AVG: torch.add,
    ReduceOp.PRODUCT: torch.mul,
    ReduceOp.MIN: torch.minimum,
    ReduceOp.MAX: torch.maximum,
    ReduceOp.BAND: torch.bitwise_and,
    ReduceOp.BOR: torch.bitwise_or,
    ReduceOp.BXOR: torch.bitwise_xor,
}
_NARROW = (torch.float16, torch.bfloat16)


def combine(op: Any, tensors: Sequence[Tensor]) -> Tensor:
    """Reduce tensors in the order given; half precision is added up in single."""
    kind = plain_op(op)
    if tensors[0].is_sparse:
        return _combine_sparse(tensors, kind)
    dtype = tensors[0].dtype
    wide = [tensor.detach().float() if dtype in _NARROW else tensor.detach() for tensor in tensors]
    total = wide[0].clone()
    for tensor in wide[1:]:
        total = _BINARY[kind](total, tensor)
    if kind == ReduceOp.AVG:
        average([total], len(tensors))
    return total.to(dtype)


def _combine_sparse(tensors: Sequence[Tensor], kind: Any) -> Tensor:
    if kind != ReduceOp.SUM:
        raise ValueError("sparse tensors can only be summed")
    total = tensors[0].detach()
    for tensor in tensors[1:]:
        total = total + tensor.detach()
    return total.coalesce()


def allreduce(calls: Arguments) -> None:
    """Give everybody the reduction of everybody's tensors."""
    opts = calls[0][1]
    for place in range(len(calls[0][0])):
        tensors = [tensors[place] for tensors, _ in calls]
        total = combine(opts.reduceOp, tensors)
        for tensor in tensors:
            put(tensor, total)


def reduce(calls: Arguments) -> None:
    """Give the root the reduction of everybody's tensors."""
    opts = calls[0][1]
    total = combine(opts.reduceOp, [tensors[0] for tensors, _ in calls])
    put(calls[opts.rootRank][0][0], total)


def broadcast(calls: Arguments) -> None:
    """Give everybody the root's tensor."""
    root = calls[0][1].rootRank
    for rank, (tensors, _) in enumerate(calls):
        if rank != root:
            put(tensors[0], calls[root][0][0])


def allgather(calls: Arguments) -> None:
    """Give everybody everybody's tensor, in a list."""
    for outputs, _, _ in calls:
        for output, (_, inputs, _) in zip(outputs[0], calls, strict=True):
            put(output, inputs[0])


def allgather_base(calls: Arguments) -> None:
    """Give everybody everybody's tensor, in one tensor."""
    whole = torch.cat([part.detach().reshape(-1) for _, part, _ in calls])
    for output, _, _ in calls:
        put(output, whole)


def gather(calls: Arguments) -> None:
    """Give the root everybody's tensor."""
    outputs = calls[calls[0][2].rootRank][0]
    for output, (_, inputs, _) in zip(outputs[0], calls, strict=True):
        put(output, inputs[0])


def scatter(calls: Arguments) -> None:
    """Give everybody their tensor of the root's list."""
    inputs = calls[calls[0][2].rootRank][1]
    for value, (outputs, _, _) in zip(inputs[0], calls, strict=True):
        put(outputs[0], value)


def reduce_scatter(calls: Arguments) -> None:
    """Give rank i the reduction of everybody's i-th tensor."""
    opts = calls[0][2]
    for rank, (outputs, _, _) in enumerate(calls):
        put(outputs[0], combine(opts.reduceOp, [inputs[0][rank] for _, inputs, _ in calls]))


def reduce_scatter_base(calls: Arguments) -> None:
    """Give rank i the reduction of everybody's i-th part."""
    opts = calls[0][2]
    parts = [whole.detach().reshape(len(calls), -1) for _, whole, _ in calls]
    for rank, (output, _, _) in enumerate(calls):
        put(output, combine(opts.reduceOp, [part[rank] for part in parts]))


def alltoall_base(calls: Arguments) -> None:
    """Give rank i the i-th rows of everybody's tensor."""
    pieces = [source.detach().split(out_of) for _, source, _, out_of, _ in calls]
    for rank, (output, _, into, _, _) in enumerate(calls):
        places = output.detach().split(into)
        for sender, place in enumerate(places):
            put(place, pieces[sender][rank])


def alltoall(calls: Arguments) -> None:
    """Give rank i everybody's i-th tensor."""
    for rank, (outputs, _, _) in enumerate(calls):
        for output, (_, inputs, _) in zip(outputs, calls, strict=True):
            put(output, inputs[rank])


def barrier(calls: Arguments) -> None:
    """Give nobody anything."""
    del calls


def put(target: Tensor, value: Tensor) -> None:
    """Copy a value into a tensor of as many elements."""
    if target.is_sparse:
        target.zero_().add_(value)  # a detached view would not see the new entries
        return
    if target.numel() != value.numel():
        raise ValueError(
            f"ranks disagree on sizes: {list(value.shape)} was sent, {list(target.shape)} expected"
        )
    target.detach().copy_(value.detach().reshape(target.shape))
