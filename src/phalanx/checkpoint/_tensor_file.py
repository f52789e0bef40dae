"""Tensor files: safetensors, written in one pass with checksums, from the tensors' own memory.

A file is what the safetensors format says: eight bytes with the length of the header, the
header in JSON, and the tensors without gaps. Any safetensors library can open it. A shard of a
tensor is stored as a flat tensor named ``name~start:stop``, counted in elements.
"""

from __future__ import annotations

import ctypes
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import xxhash
from torch import Tensor

from .._formatting import dtype_name
from ._progress import ProgressMeter
from ._storage import CHUNK_BYTES, Sink, checksum, fault_point

DTYPES = {
    name: value
    for name, value in vars(torch).items()
    if isinstance(value, torch.dtype) and str(value) == f"torch.{name}"
}

# Names that the safetensors format has had from the beginning, so that every reader knows them.
_SAFETENSORS_TYPES = {
    "bool": "BOOL",
    **{f"uint{bits}": f"U{bits}" for bits in (8, 16, 32, 64)},
    **{f"int{bits}": f"I{bits}" for bits in (8, 16, 32, 64)},
    **{f"float{bits}": f"F{bits}" for bits in (16, 32, 64)},
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}
_COMPLEX_TYPES = {"complex32": "F16", "complex64": "F32", "complex128": "F64"}


def safetensors_type(dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[str, list[int]]:
    """Return the dtype and shape in a safetensors file: complex as pairs, unknown as bytes."""
    name = dtype_name(dtype)
    if name in _SAFETENSORS_TYPES:
        return _SAFETENSORS_TYPES[name], [*shape]
    if name in _COMPLEX_TYPES:
        return _COMPLEX_TYPES[name], [*shape, 2]
    return "U8", [*shape, dtype.itemsize]


_ALIGNMENT = 64  # of the first tensor; the others follow by descending element size


@dataclass(frozen=True, slots=True)
class TensorShard:
    """The bytes from `start` to `stop` of a tensor."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int
    data: Tensor | Callable[[], Tensor]  # exactly these elements, or what loads them

    @property
    def key(self) -> str:
        if self.is_whole:
            return self.name
        size = self.dtype.itemsize
        return f"{self.name}~{self.start // size}:{self.stop // size}"

    @property
    def is_whole(self) -> bool:
        return self.stop - self.start == nbytes(self.dtype, self.shape)


class WrittenShard(NamedTuple):
    begin: int
    end: int
    checksum: str


class WrittenFile(NamedTuple):
    length: int
    header_length: int
    header_checksum: str
    shards: list[WrittenShard]  # one for each shard, in the order given


def nbytes(dtype: torch.dtype, shape: Sequence[int]) -> int:
    return math.prod(shape, start=dtype.itemsize)


def tensor_memory(tensor: Tensor) -> memoryview:
    """Return the bytes of a contiguous CPU tensor, without a copy."""
    assert tensor.device.type == "cpu"
    assert tensor.is_contiguous()
    size = nbytes(tensor.dtype, tensor.shape)
    end = tensor.storage_offset() * tensor.dtype.itemsize + size
    assert end <= tensor.untyped_storage().nbytes(), "the tensor exceeds its storage"
    if size == 0:
        return memoryview(b"")
    # By address, since numpy lacks half of the dtypes.
    array = (ctypes.c_ubyte * size).from_address(tensor.data_ptr())
    array.tensor = tensor  # type: ignore[attr-defined] # lives as long as any view
    return memoryview(array).cast("B")


def resolve(tensor: Tensor) -> Tensor:
    """Return the tensor with the values of a lazy conjugate or negative in memory."""
    return tensor.detach().resolve_conj().resolve_neg()


def is_plain(tensor: Tensor) -> bool:
    """Whether the values of a tensor are contiguous bytes in main memory."""
    is_lazy = tensor.is_conj() or tensor.is_neg()
    return tensor.device.type == "cpu" and tensor.is_contiguous() and not is_lazy


def chunks(data: memoryview) -> Iterator[memoryview]:
    """Cut bytes into chunks that fit the cache."""
    for start in range(0, len(data), CHUNK_BYTES):
        yield data[start : start + CHUNK_BYTES]


def write_tensor_file(
    sink: Sink, shards: Sequence[TensorShard], meter: ProgressMeter
) -> WrittenFile:
    order = sorted(range(len(shards)), key=lambda i: (-shards[i].dtype.itemsize, shards[i].key))
    header = _header([shards[i] for i in order])
    sink.write(memoryview(header))
    position = len(header)
    meter.expect(sum(shard.stop - shard.start for shard in shards))
    written: dict[int, WrittenShard] = {}
    for i in order:
        fault_point("tensor")
        digest = _write_shard(sink, shards[i], meter)
        begin, position = position, position + shards[i].stop - shards[i].start
        written[i] = WrittenShard(begin, position, digest)
    in_order = [written[i] for i in range(len(shards))]
    return WrittenFile(position, len(header), checksum(header), in_order)


def _write_shard(sink: Sink, shard: TensorShard, meter: ProgressMeter) -> str:
    """Write the bytes of a shard, which is loaded no longer than that; return their checksum."""
    digest = xxhash.xxh3_128()
    tensor = shard.data() if callable(shard.data) else shard.data
    data = tensor_memory(resolve(tensor).cpu().contiguous())
    assert len(data) == shard.stop - shard.start
    for chunk in chunks(data):
        digest.update(chunk)
        sink.write(chunk)
        meter.wrote(len(chunk))
    return digest.hexdigest()


def _header(shards: Sequence[TensorShard]) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    position = 0
    for shard in shards:
        length = shard.stop - shard.start
        flat = (length // shard.dtype.itemsize,)
        dtype, shape = safetensors_type(shard.dtype, shard.shape if shard.is_whole else flat)
        end = position + length
        entries[shard.key] = {"dtype": dtype, "shape": shape, "data_offsets": [position, end]}
        position = end
    text = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text
