"""Tensor files: written in one pass with checksums, straight from the memory of the tensors.

A file is what the safetensors format says: eight bytes with the length of the header, the header in
JSON, and the tensors without a gap between them. Any safetensors library can open it. A tensor of
which the file has only a part is there as a flat one, ``name~start:stop`` counted in elements.
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
from ._bytes import CHUNK, checksum
from ._dtypes import carrier
from ._points import reach

__all__ = ["CHUNK", "Place", "Share", "Sink", "WrittenFile", "checksum", "memory", "write_tensors"]

_ALIGNMENT = 64  # of the first tensor; the others follow by falling size of their elements


class Sink(Protocol):
    """A file that grows at its end."""

    def write(self, data: memoryview) -> None:
        """Append all of `data`."""


@dataclass(frozen=True, slots=True)
class Share:
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
            return carrier(self.dtype, self.shape)
        return carrier(self.dtype, ((self.stop - self.start) // self.dtype.itemsize,))


@dataclass(frozen=True, slots=True)
class Place:
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
    places: list[Place]
    """One for each share, in the order in which they were given."""


def nbytes(dtype: torch.dtype, shape: Sequence[int]) -> int:
    """Return the size of a tensor in bytes."""
    size = dtype.itemsize
    for length in shape:
        size *= length
    return size


def memory(tensor: Tensor) -> memoryview:
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
    for start in range(0, len(data), CHUNK):
        yield data[start : start + CHUNK]


def write_tensors(sink: Sink, shares: Sequence[Share]) -> WrittenFile:
    """Write a file of tensors in one pass."""
    order = sorted(range(len(shares)), key=lambda i: (-shares[i].dtype.itemsize, shares[i].key))
    header = _header([shares[i] for i in order])
    sink.write(memoryview(header))
    position = len(header)
    _progress.expect(sum(share.stop - share.start for share in shares))
    places: dict[int, Place] = {}
    for i in order:
        reach("tensor")
        digest = _write_share(sink, shares[i])
        begin, position = position, position + shares[i].stop - shares[i].start
        places[i] = Place(begin, position, digest)
    in_order = [places[i] for i in range(len(shares))]
    return WrittenFile(position, len(header), checksum(header), in_order)


def _header(shares: Sequence[Share]) -> bytes:
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


def _write_share(sink: Sink, share: Share) -> str:
    digest = xxhash.xxh3_128()
    data = memory(share.data.detach().resolve_conj().resolve_neg().cpu().contiguous())
    assert len(data) == share.stop - share.start
    for chunk in chunks(data):
        digest.update(chunk)
        sink.write(chunk)
        _progress.wrote(len(chunk))
    return digest.hexdigest()
