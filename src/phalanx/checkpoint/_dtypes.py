"""Types of tensors: their names in a manifest, and what a safetensors file calls them."""

from __future__ import annotations

import torch

__all__ = ["carrier", "dtype_named", "is_quantized", "name_of_dtype"]

_NAMES = {
    name: value
    for name, value in vars(torch).items()
    if isinstance(value, torch.dtype) and str(value) == f"torch.{name}"
}

# The names that the safetensors format has had from the beginning, so that any reader knows them.
_CARRIERS = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "int16": "I16",
    "uint16": "U16",
    "int32": "I32",
    "uint32": "U32",
    "int64": "I64",
    "uint64": "U64",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}
_COMPLEX = {"complex32": "F16", "complex64": "F32", "complex128": "F64"}


def name_of_dtype(dtype: torch.dtype) -> str:
    """Return torch's own name of a type, without the ``torch.``."""
    return str(dtype).removeprefix("torch.")


def dtype_named(name: str) -> torch.dtype | None:
    """Return the type of that name, if this torch has it."""
    return _NAMES.get(name)


def is_quantized(dtype: torch.dtype) -> bool:
    """Tell whether a type means nothing without a scale; some have less than a byte per element."""
    return name_of_dtype(dtype).startswith(("qint", "quint"))


def carrier(dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[str, list[int]]:
    """Say as what a safetensors file holds a tensor: complex as pairs, the exotic as bytes."""
    name = name_of_dtype(dtype)
    if name in _CARRIERS:
        return _CARRIERS[name], [*shape]
    if name in _COMPLEX:
        return _COMPLEX[name], [*shape, 2]
    return "U8", [*shape, dtype.itemsize]
