"""Tensor files: safetensors, written in one pass with checksums, from the tensors' own memory.

A file is what the safetensors format says: eight bytes with the length of the header, the
header in JSON, and the tensors without gaps. Any safetensors library can open it. A shard of a
tensor is stored as a flat tensor named ``name~start:stop``, counted in elements.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import xxhash
from torch import Tensor

from . import _progress
from ._storage import CHUNK_BYTES, checksum, fault_point

_NAMES = {
    name: value
    for name, value in vars(torch).items()
    if isinstance(value, torch.dtype) and str(value) == f"torch.{name}"
}

# The names that the safetensors format has had from the beginning, so that any reader knows them.
_SAFETENSORS_TYPES = {
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
_COMPLEX_TYPES = {"complex32": "F16", "complex64": "F32", "complex128": "F64"}


def dtype_name(dtype: torch.dtype) -> str:
    """Return torch's own name of a type, without the ``torch.``."""
    return str(dtype).removeprefix("torch.")


def dtype_from_name(name: str) -> torch.dtype | None:
    """Return the type of that name, if this torch has it."""
    return _NAMES.get(name)


def is_quantized(dtype: torch.dtype) -> bool:
    """Tell whether a type means nothing without a scale; some have less than a byte per element."""
    return dtype_name(dtype).startswith(("qint", "quint"))


def safetensors_type(dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[str, list[int]]:
    """Say as what a safetensors file holds a tensor: complex as pairs, the exotic as bytes."""
    name = dtype_name(dtype)
    if name in _SAFETENSORS_TYPES:
        return _SAFETENSORS_TYPES[name], [*shape]
    if name in _COMPLEX_TYPES:
        return _COMPLEX_TYPES[name], [*shape, 2]
    return "U8", [*shape, dtype.itemsize]


_ALIGNMENT = 64  # of the first tensor; the others follow by falling size of their elements


class Sink(Protocol):
    """A file that grows at its end."""

    def write(self, data: memoryview) -> None:
        """Append all of `data`."""


@dataclass(frozen=True, slots=True)
class TensorShard:
    """The bytes from `start` to `stop` of a tensor, which this file is to hold."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int
    data: Tensor
    """The elements in question, and no others."""

    @property
    def key(self) -> str:
        """What the file calls it."""
        if self.is_whole:
            return self.name
        size = self.dtype.itemsize
        return f"{self.name}~{self.start // size}:{self.stop // size}"

    @property
    def is_whole(self) -> bool:
        """Tell whether it is all of the tensor."""
        return self.stop - self.start == nbytes(self.dtype, self.shape)

    def describe(self) -> tuple[str, list[int]]:
        """Return the type and the shape that the file gives it."""
        if self.is_whole:
            return safetensors_type(self.dtype, self.shape)
        return safetensors_type(self.dtype, ((self.stop - self.start) // self.dtype.itemsize,))


@dataclass(frozen=True, slots=True)
class WrittenRange:
    """Where the bytes of a share are in their file."""

    begin: int
    end: int
    checksum: str


@dataclass(frozen=True, slots=True)
class WrittenFile:
    """What is in a file that was written."""

    length: int
    header_length: int
    header_checksum: str
    places: list[WrittenRange]
    """One for each share, in the order in which they were given."""


def nbytes(dtype: torch.dtype, shape: Sequence[int]) -> int:
    """Return the size of a tensor in bytes."""
    size = dtype.itemsize
    for length in shape:
        size *= length
    return size


def tensor_memory(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor that lies in main memory in one piece, without a copy."""
    assert tensor.device.type == "cpu"
    assert tensor.is_contiguous()
    size = nbytes(tensor.dtype, tensor.shape)
    end = tensor.storage_offset() * tensor.dtype.itemsize + size
    assert end <= tensor.untyped_storage().nbytes(), "beyond is somebody else's memory"
    if size == 0:
        return memoryview(b"")
    # By address: numpy, which could do it too, lacks half of the types.
    array = (ctypes.c_ubyte * size).from_address(tensor.data_ptr())
    array.tensor = tensor  # type: ignore[attr-defined] # which lives as long as any view of it
    return memoryview(array).cast("B")


def chunks(data: memoryview) -> Iterator[memoryview]:
    """Cut bytes into pieces that fit the cache."""
    for start in range(0, len(data), CHUNK_BYTES):
        yield data[start : start + CHUNK_BYTES]


def write_tensor_file(sink: Sink, shares: Sequence[TensorShard]) -> WrittenFile:
    """Write a file of tensors in one pass."""
    order = sorted(range(len(shares)), key=lambda i: (-shares[i].dtype.itemsize, shares[i].key))
    header = _header([shares[i] for i in order])
    sink.write(memoryview(header))
    position = len(header)
    _progress.expect_bytes(sum(share.stop - share.start for share in shares))
    places: dict[int, WrittenRange] = {}
    for i in order:
        fault_point("tensor")
        digest = _write_shard(sink, shares[i])
        begin, position = position, position + shares[i].stop - shares[i].start
        places[i] = WrittenRange(begin, position, digest)
    in_order = [places[i] for i in range(len(shares))]
    return WrittenFile(position, len(header), checksum(header), in_order)


def _header(shares: Sequence[TensorShard]) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    position = 0
    for share in shares:
        dtype, shape = share.describe()
        end = position + share.stop - share.start
        entries[share.key] = {"dtype": dtype, "shape": shape, "data_offsets": [position, end]}
        position = end
    text = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def _write_shard(sink: Sink, share: TensorShard) -> str:
    digest = xxhash.xxh3_128()
    data = tensor_memory(share.data.detach().resolve_conj().resolve_neg().cpu().contiguous())
    assert len(data) == share.stop - share.start
    for chunk in chunks(data):
        digest.update(chunk)
        sink.write(chunk)
        _progress.count_written(len(chunk))
    return digest.hexdigest()
