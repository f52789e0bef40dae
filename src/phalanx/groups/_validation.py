"""Validation of arguments on the calling rank, before anything is sent.

A mistake that only one rank makes must not leave the others waiting, so everything that can be
checked locally is rejected here with `InvalidArgument` or `InvalidType`.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from .._formatting import dtype_name, format_tensor
from ..errors import InvalidArgument, InvalidType

_BITWISE = frozenset({ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR})
_ORDERED = frozenset({ReduceOp.MIN, ReduceOp.MAX})
_COALESCED = frozenset({"allgather", "allreduce"})  # collectives with a form for several tensors


def as_single(operation: str, value: object) -> list[Tensor]:
    """Accept one tensor, or a list of one."""
    if isinstance(value, Tensor):
        return [value]
    tensors = as_list(operation, value)
    if len(tensors) != 1:
        coalesced = f", or use {operation}_coalesced" if operation in _COALESCED else ""
        raise InvalidArgument(
            f"{operation} takes one tensor, got a list of {len(tensors)}; call it once for each"
            f"{coalesced}"
        )
    return tensors


def as_list(operation: str, value: object) -> list[Tensor]:
    if isinstance(value, (list, tuple)) and all(isinstance(item, Tensor) for item in value):
        return list(value)
    raise InvalidType(f"{operation} takes tensors, got {_kind(value)}")


def as_nested_list(operation: str, value: object) -> list[Tensor]:
    """Accept a list of tensors, or a list that holds one such list."""
    if isinstance(value, (list, tuple)) and len(value) == 1 and isinstance(value[0], (list, tuple)):
        return as_list(operation, value[0])
    return as_list(operation, value)


def check_device(operation: str, tensor: Tensor, devices: frozenset[str], backend: str) -> None:
    if tensor.device.type not in devices:
        raise InvalidArgument(
            f"{operation} got a tensor on {tensor.device}, but this {backend} group serves "
            f"{' and '.join(sorted(devices))}; move the tensor, or make a group for that device"
        )


def check_tensor(operation: str, tensor: Tensor, devices: frozenset[str], backend: str) -> None:
    check_device(operation, tensor, devices, backend)
    if tensor.layout is not torch.strided:
        raise InvalidArgument(f"{operation} takes dense tensors; pass tensor.to_dense()")
    if not tensor.is_contiguous():
        raise InvalidArgument(
            f"{operation} got {format_tensor(tensor.dtype, tensor.shape)} that is not contiguous "
            f"(strides {list(tensor.stride())}); pass tensor.contiguous() and copy the result back"
        )
    if tensor.is_neg() or tensor.is_conj():
        raise InvalidArgument(
            f"{operation} got {format_tensor(tensor.dtype, tensor.shape)} with a lazy negation or "
            "conjugation, which engines cannot see; pass tensor.resolve_neg().resolve_conj()"
        )


def check_reduction(operation: str, op: object, dtype: torch.dtype) -> None:
    problem = ""
    if op in _BITWISE and (dtype.is_floating_point or dtype.is_complex):
        problem = f"needs an integer or bool tensor, got {dtype_name(dtype)}"
    elif op in _ORDERED and dtype.is_complex:
        problem = f"is not defined for {dtype_name(dtype)}"
    elif op in (ReduceOp.AVG, ReduceOp.PREMUL_SUM) and dtype is torch.bool:
        problem = "needs a tensor of numbers, got bool"
    if problem:
        raise InvalidArgument(f"{operation}: ReduceOp.{str(op).rpartition('.')[2]} {problem}")


def check_factor(operation: str, tensor: Tensor, value: float | Tensor) -> None:
    product = torch.result_type(tensor, value)
    if not torch.can_cast(product, tensor.dtype):
        raise InvalidArgument(
            f"{operation}: the factor {value} of ReduceOp.PREMUL_SUM would change "
            f"{dtype_name(tensor.dtype)} to {dtype_name(product)}; convert the tensor first"
        )


def as_rank(operation: str, value: int | None, size: int, *, word: str = "root") -> int:
    if not isinstance(value, int) or not 0 <= value < size:
        raise InvalidArgument(
            f"{operation}: {word} {value!r} is not a rank of this group; "
            f"its ranks are 0 to {size - 1} (group-local, not global)"
        )
    return value


def check_length(
    operation: str, tensors: Sequence[object], size: int, *, word: str, each: str = "rank"
) -> None:
    if len(tensors) != size:
        raise InvalidArgument(
            f"{operation} needs one {word} tensor per {each}: expected {size}, got {len(tensors)}"
        )


def as_one_per_rank(
    operation: str, value: object, like: Tensor | None, size: int, *, word: str
) -> list[Tensor]:
    """Accept a list with one tensor like `like` for every rank, or any list if that is None."""
    tensors = as_nested_list(operation, value)
    if like is not None:
        check_length(operation, tensors, size, word=word)
        check_same_dtype(operation, [*tensors, like])
        for tensor in tensors:
            check_numel(operation, tensor, like.numel(), word=word)
    return tensors


def check_same_dtype(operation: str, tensors: Sequence[Tensor]) -> None:
    dtypes = {tensor.dtype for tensor in tensors}
    if len(dtypes) > 1:
        names = ", ".join(sorted(map(dtype_name, dtypes)))
        raise InvalidArgument(f"{operation} takes tensors of one dtype, got {names}")


def check_numel(operation: str, tensor: Tensor, expected: int, *, word: str) -> None:
    if tensor.numel() != expected:
        raise InvalidArgument(
            f"{operation}: the {word} tensor has {tensor.numel()} elements, needs {expected}"
        )


def as_splits(
    operation: str, tensor: Tensor, sizes: Sequence[int] | None, size: int, *, word: str
) -> list[int]:
    """Check the split sizes of one side of an all-to-all; return even ones if none are given."""
    if not tensor.dim():
        raise InvalidArgument(
            f"{operation} splits tensors by rows; the {word} tensor is a scalar and has no rows"
        )
    rows = tensor.size(0)
    if not sizes:
        if rows % size:
            raise InvalidArgument(
                f"{operation}: {rows} rows of {word} do not divide among {size} ranks; "
                f"pass {word}_split_sizes"
            )
        return [rows // size] * size
    sizes = list(sizes)
    if len(sizes) != size or sum(sizes) != rows or min(sizes) < 0:
        raise InvalidArgument(
            f"{operation}: {word}_split_sizes {sizes} must be {size} numbers that add up to the "
            f"{rows} rows of {word}"
        )
    return sizes


def as_seconds(timeout: object) -> float:
    if not isinstance(timeout, timedelta):
        raise InvalidType(f"timeout must be a datetime.timedelta, got {_kind(timeout)}")
    if timeout <= timedelta(0):
        raise InvalidArgument(f"timeout must be positive, got {timeout}")
    return timeout.total_seconds()


def _kind(value: object) -> str:
    if isinstance(value, (list, tuple)):
        inner = sorted({type(item).__name__ for item in value})
        return f"a {type(value).__name__} of {' and '.join(inner) or 'nothing'}"
    return type(value).__name__
