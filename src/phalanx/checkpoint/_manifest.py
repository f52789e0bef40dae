"""The manifest: what a checkpoint consists of, and believed in nothing.

What passes the seal of a `Document` may still have been written by an enemy, so every statement is
checked before it is used: names of files, ranges, shapes. Whatever is wrong raises
`DamagedCheckpoint` with the name of the file.
"""

from __future__ import annotations

from typing import Any

import msgspec
import torch

from ._document import (
    LARGEST,
    MANIFEST,
    VERSION,
    Document,
    FileEntry,
    HeaderEntry,
    Malformed,
    PieceEntry,
    TensorEntry,
    check_ranges,
    refuse,
)
from ._dtypes import dtype_named, is_quantized
from ._encoding import decode
from ._paths import Path, display, name_of
from ._structure import Node, TensorLeaf, without_absent
from ._tensors import nbytes

__all__ = [
    "LARGEST",
    "MANIFEST",
    "VERSION",
    "FileEntry",
    "HeaderEntry",
    "Manifest",
    "PieceEntry",
    "TensorEntry",
]


class Manifest(Document, forbid_unknown_fields=True):
    """All that is known of a checkpoint, checked as far as it can be without its files."""

    def check(self) -> None:
        """Check what is said of every tensor, and that together they are the files."""
        check_ranges(self.files, self.tensors())

    def tree(self, rank: int | None, file: str) -> Node:
        """Return the tree of the state, with what `rank` holds where ranks differ."""
        try:
            tree = decode(self.state, tensor=self._leaf, rank=rank)
        except Malformed as error:
            refuse(file, str(error))
        # A rank that was there and has saved nothing under a key has lost nothing.
        return without_absent(tree) if rank is not None and rank < self.ranks else tree

    def tensors(self) -> list[TensorEntry]:
        """Return what is said of all tensors of all ranks."""
        found: list[TensorEntry] = []

        def note(body: Any, path: Path) -> TensorLeaf:
            leaf = self._leaf(body, path)
            found.append(leaf.data)
            return leaf

        decode(self.state, tensor=note, rank=None)
        return found

    def _leaf(self, body: Any, path: Path) -> TensorLeaf:
        """Check what is said of one tensor."""
        where = display(path)
        try:
            entry = msgspec.convert(body, TensorEntry, strict=True)
        except msgspec.ValidationError as error:
            raise Malformed(f"{where}: {error}") from None
        dtype = dtype_named(entry.dtype)
        if dtype is None or is_quantized(dtype):
            raise Malformed(f"{where} has the type {entry.dtype!r:.40}, which no tensor here has")
        try:
            device = torch.device(entry.device).type
        except RuntimeError:
            raise Malformed(f"{where} has no device {entry.device!r:.40}") from None
        _check_shape(entry, dtype, where)
        if len({(piece.file, piece.at) for piece in entry.pieces}) < len(entry.pieces):
            raise Malformed(f"{where} has the same piece twice")
        for piece in entry.pieces:
            self._check_piece(piece, dtype, where)
        return TensorLeaf(name_of(path), dtype, tuple(entry.shape), device, entry)

    def _check_piece(self, piece: PieceEntry, dtype: torch.dtype, where: str) -> None:
        begin, end = piece.at
        file = self.files.get(piece.file)
        if file is None:
            raise Malformed(f"{where} is in {piece.file!r:.80}, which is not among the files")
        if not file.header.bytes <= begin <= end <= file.bytes:
            raise Malformed(f"{where} is at {begin}..{end} of {piece.file}, outside of its data")
        if (end - begin) % dtype.itemsize:
            raise Malformed(f"{where} has a piece that ends inside of an element")


def _check_shape(entry: TensorEntry, dtype: torch.dtype, where: str) -> None:
    total = sum(end - begin for begin, end in (piece.at for piece in entry.pieces))
    # Lengths next to a zero count too: torch multiplies them for its strides.
    if nbytes(dtype, [max(length, 1) for length in entry.shape]) >= 2**62:
        raise Malformed(f"{where} has the shape {entry.shape}, which nobody can hold")
    if len(entry.shape) > 64 or total != nbytes(dtype, entry.shape):
        raise Malformed(f"{where} is {entry.dtype}{entry.shape}, but its pieces have {total} bytes")
