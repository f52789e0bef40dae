"""Makes up for what an engine lacks: reduce operations and element types.

Each function takes the call as the user made it and returns it as the engine can do it, with a
function that finishes the result, if one is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import methodcaller
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from ..errors import InvalidArgument
from ._engine import RawWork, Traits
from ._words import dtype_name, op_name

__all__ = ["Reduction", "adapt_reduction", "as_bytes", "averaging", "is_sum", "plain_op"]

SUM = ReduceOp.SUM
AVG = ReduceOp.AVG
PREMUL_SUM = ReduceOp.PREMUL_SUM
_LINEAR = frozenset({SUM, AVG, PREMUL_SUM})
_TRUTH = {SUM: ReduceOp.MAX, ReduceOp.PRODUCT: ReduceOp.MIN}
"""What adding and multiplying mean for bool; engines that see bytes would store a 2."""


@dataclass
class Reduction:
    """A reduction in the engine's own terms."""

    op: Any
    inputs: list[Tensor]
    outputs: list[Tensor]
    prepare: Callable[[], None] | None = None
    finish: Callable[[], None] | None = None

    def starting(self, method: Callable[..., RawWork]) -> Callable[..., RawWork]:
        """Wrap an engine's method so that the inputs are prepared when the call really starts."""
        prepare = self.prepare
        if prepare is None:
            return method

        def start(*args: Any) -> RawWork:
            prepare()
            return method(*args)

        return start


def plain_op(op: Any) -> Any:
    """Strip a `ReduceOp` to the enumeration inside, which can be compared and hashed."""
    return getattr(op, "op", op)


def adapt_reduction(
    traits: Traits,
    operation: str,
    op: Any,
    *,
    inputs: list[Tensor],
    outputs: list[Tensor],
    size: int,
) -> Reduction:
    """Turn a reduction into one that the engine has; `inputs` may be the `outputs` themselves."""
    call = _detached(op, inputs, outputs)
    kind, dtype = plain_op(op), inputs[0].dtype
    if dtype is torch.bool:
        call.op = kind = _TRUTH.get(kind, kind)
    if kind == PREMUL_SUM and not traits.premultiplies:
        _premultiply(call, op.factor)
    elif kind == AVG and not _averages(traits, operation, dtype):
        call.op = SUM
        call.finish = averaging(outputs, size)
    if traits.dtypes is not None and dtype not in traits.dtypes:
        _view_complex(call, operation, kind, dtype)
    return call


def _averages(traits: Traits, operation: str, dtype: torch.dtype) -> bool:
    known = dtype.is_floating_point or traits.averages_all_types
    return known and operation in traits.averages


def is_sum(op: Any) -> bool:
    """Tell whether an operation is a plain sum; asked for every call, so the quick way first."""
    return op is SUM or bool(op == SUM)


def _detached(op: Any, inputs: list[Tensor], outputs: list[Tensor]) -> Reduction:
    """Hide from an engine that is itself made of tensor operations that some require gradients."""
    plain = [tensor.detach() for tensor in outputs]
    same = inputs is outputs
    return Reduction(op, plain if same else [tensor.detach() for tensor in inputs], plain)


def averaging(tensors: Sequence[Tensor], count: int) -> Callable[[], None]:
    """Make what divides sums by how many were added, once; integers lose their fraction."""
    mine = [tensor.detach() for tensor in tensors]
    rounding = "trunc" if not (mine[0].is_floating_point() or mine[0].is_complex()) else None
    divide = methodcaller("div_", count, rounding_mode=rounding)
    done: list[Tensor] = []

    def finish() -> None:
        # An interrupt may come at any time, and whoever waits again comes here again. To divide and
        # to take note of it is one step, for it is all done by `extend`.
        done.extend(map(divide, mine[len(done) :]))

    return finish


def as_bytes(tensor: Tensor) -> Tensor:
    """View a contiguous tensor as bytes, so that any engine can move it."""
    flat = tensor.detach().reshape(-1)
    return (torch.view_as_real(flat) if flat.is_complex() else flat).view(torch.uint8)


def _view_complex(call: Reduction, operation: str, kind: Any, dtype: torch.dtype) -> None:
    """See complex numbers as pairs where that gives the same answer; refuse other types."""
    if not (dtype.is_complex and kind in _LINEAR):
        raise InvalidArgument(
            f"this backend cannot {operation} ({op_name(kind)}) {dtype_name(dtype)}: "
            "convert the tensor to a type that it knows, such as float32 or int64"
        )
    same = call.inputs is call.outputs
    call.inputs = [torch.view_as_real(tensor) for tensor in call.inputs]
    call.outputs = call.inputs if same else [torch.view_as_real(t) for t in call.outputs]


def _premultiply(call: Reduction, factor: float | Tensor) -> None:
    call.op = SUM
    if call.inputs is not call.outputs:
        call.inputs = [tensor.clone() for tensor in call.inputs]
    mine = call.inputs

    def multiply() -> None:
        for tensor in mine:
            tensor.mul_(factor)

    call.prepare = multiply
