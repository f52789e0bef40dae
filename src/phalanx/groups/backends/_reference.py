"""The meaning of each collective in plain tensor code: the reference for every engine.

A function gets the arguments of every participating rank, in rank order, and fills their
outputs. Sums are computed in rank order, never by arrival, so equal inputs give equal bits.
Output slots of departed ranks are left unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from .._engine import peer_left
from .._reductions import averaging, plain_op

Arguments = Mapping[int, tuple[Any, ...]]
"""One tuple of arguments per rank that takes part, in rank order."""

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
_HALF_PRECISION = (torch.float16, torch.bfloat16)


def reduce_in_rank_order(op: Any, tensors: Sequence[Tensor]) -> Tensor:
    """Reduce tensors in the order given; dense half precision is accumulated in single."""
    kind, dtype = plain_op(op), tensors[0].dtype
    widens = dtype in _HALF_PRECISION and not tensors[0].is_sparse
    wide = [tensor.detach().float() if widens else tensor.detach() for tensor in tensors]
    total = wide[0].clone()
    for tensor in wide[1:]:
        total = _BINARY[kind](total, tensor)
    if kind == ReduceOp.AVG:
        averaging([total], len(tensors))()
    return total.coalesce() if total.is_sparse else total.to(dtype)


def allreduce(calls: Arguments) -> None:
    """Every rank gets the reduction of all tensors."""
    first, opts = _first_arguments(calls)
    for place in range(len(first)):
        tensors = [tensors[place] for tensors, _ in calls.values()]
        total = reduce_in_rank_order(opts.reduceOp, tensors)
        for tensor in tensors:
            copy_into(tensor, total)


def reduce(calls: Arguments) -> None:
    """The root gets the reduction of all tensors."""
    opts = _first_arguments(calls)[-1]
    total = reduce_in_rank_order(opts.reduceOp, [tensors[0] for tensors, _ in calls.values()])
    copy_into(_root_arguments(calls)[0][0], total)


def broadcast(calls: Arguments) -> None:
    """Every rank gets the root's tensor."""
    root = _root_arguments(calls)
    for call in calls.values():
        if call is not root:
            copy_into(call[0][0], root[0][0])


def allgather(calls: Arguments) -> None:
    """Every rank gets the list of all tensors."""
    for outputs, _, _ in calls.values():
        for rank, (_, inputs, _) in calls.items():
            copy_into(outputs[0][rank], inputs[0])


def allgather_base(calls: Arguments) -> None:
    """Every rank gets all tensors, in one."""
    for output, _, _ in calls.values():
        for rank, (_, part, _) in calls.items():
            copy_into(_part(output, rank, part.numel()), part)


def gather(calls: Arguments) -> None:
    """The root gets all tensors."""
    outputs = _root_arguments(calls)[0]
    for rank, (_, inputs, _) in calls.items():
        copy_into(outputs[0][rank], inputs[0])


def scatter(calls: Arguments) -> None:
    """Rank i gets the i-th tensor of the root's list."""
    inputs = _root_arguments(calls)[1]
    for rank, (outputs, _, _) in calls.items():
        copy_into(outputs[0], inputs[0][rank])


def reduce_scatter(calls: Arguments) -> None:
    """Rank i gets the reduction of all i-th tensors."""
    opts = _first_arguments(calls)[-1]
    for rank, (outputs, _, _) in calls.items():
        parts = [inputs[0][rank] for _, inputs, _ in calls.values()]
        copy_into(outputs[0], reduce_in_rank_order(opts.reduceOp, parts))


def reduce_scatter_base(calls: Arguments) -> None:
    """Rank i gets the reduction of all i-th parts."""
    opts = _first_arguments(calls)[-1]
    for rank, (output, _, _) in calls.items():
        parts = [_part(whole, rank, output.numel()) for _, whole, _ in calls.values()]
        copy_into(output, reduce_in_rank_order(opts.reduceOp, parts))


def alltoall_base(calls: Arguments) -> None:
    """Rank i gets the i-th rows of every tensor."""
    pieces = {r: source.detach().split(out_of) for r, (_, source, _, out_of, _) in calls.items()}
    for rank, (output, _, into, _, _) in calls.items():
        places = output.detach().split(into)
        for sender, sent in pieces.items():
            copy_into(places[sender], sent[rank])


def alltoall(calls: Arguments) -> None:
    """Rank i gets the i-th tensor of every list."""
    for rank, (outputs, _, _) in calls.items():
        for sender, (_, inputs, _) in calls.items():
            copy_into(outputs[sender], inputs[rank])


def barrier(calls: Arguments) -> None:
    del calls


def copy_into(target: Tensor, value: Tensor) -> None:
    """Copy a value into a tensor with the same number of elements."""
    if target.is_sparse:
        target.zero_().add_(value)  # a detached view would not see the new entries
        return
    if target.numel() != value.numel():
        raise ValueError(
            f"ranks disagree on sizes: {list(value.shape)} was sent, {list(target.shape)} expected"
        )
    target.detach().copy_(value.detach().reshape(target.shape))


def _part(whole: Tensor, rank: int, count: int) -> Tensor:
    return whole.detach().view(-1)[rank * count : (rank + 1) * count]


def _first_arguments(calls: Arguments) -> tuple[Any, ...]:
    return next(iter(calls.values()))


def _root_arguments(calls: Arguments) -> tuple[Any, ...]:
    root = _first_arguments(calls)[-1].rootRank
    if root not in calls:
        raise peer_left(root, is_root=True)
    return calls[root]
