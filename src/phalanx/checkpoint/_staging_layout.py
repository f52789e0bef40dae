"""What of a state goes where in a buffer, and the words in which the writer process is told.

A state is told as its tree, in which every tensor is a place in the buffer. Nothing is pickled.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeAlias

import msgspec
import torch
from torch import Tensor

from ._dtypes import dtype_named, name_of_dtype
from ._encoding import decode, encode
from ._marks import Alike, PerRank, Piece
from ._paths import Key
from ._structure import Branch, Mark, Node, Scalar, TensorLeaf
from ._tensors import nbytes

__all__ = ["BranchNote", "Note", "ScalarNote", "TensorNote", "describe", "read", "state_of"]


class TensorNote(msgspec.Struct, tag="t", array_like=True, frozen=True):
    """A tensor, and where its bytes are."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    device: str
    mark: Mark
    offset: int
    """Where in the buffer it begins; -1 if this rank has none of it."""
    piece: tuple[int, int, str] | None
    """If only some bytes of it are there: which ones, and the fingerprint of the whole."""


class ScalarNote(msgspec.Struct, tag="s", array_like=True, frozen=True):
    """A value, as a manifest has it."""

    value: Any
    mark: Mark


class BranchNote(msgspec.Struct, tag="b", array_like=True, frozen=True):
    """A dict, a list, a tuple, or what a codec has made of a value."""

    kind: str
    items: list[tuple[Key, Note]]
    mark: Mark


Note: TypeAlias = TensorNote | ScalarNote | BranchNote


def describe(node: Node, offset_of: Callable[[TensorLeaf], int]) -> Note:
    """Put a tree into words, with the places of its tensors."""
    if isinstance(node, TensorLeaf):
        data = node.data
        piece = (data.start, data.stop, data.fingerprint) if isinstance(data, Piece) else None
        about = (node.name, name_of_dtype(node.dtype), node.shape, node.device, node.mark)
        return TensorNote(*about, offset_of(node), piece)
    if isinstance(node, Scalar):
        return ScalarNote(encode(node, _no_tensor), node.mark)
    assert isinstance(node, Branch), "a state that was parsed lacks nothing"
    items = [(key, describe(child, offset_of)) for key, child in node.children.items()]
    return BranchNote(node.kind, items, node.mark)


def read(note: Note, buffer: Tensor) -> Node:
    """Make the tree again, with tensors that lie in the buffer."""
    if isinstance(note, TensorNote):
        return _read_tensor(note, buffer)
    if isinstance(note, ScalarNote):
        scalar = decode(note.value, tensor=_no_tensor, rank=None)
        assert isinstance(scalar, Scalar)
        return replace(scalar, mark=note.mark)
    children = {key: read(child, buffer) for key, child in note.items}
    return Branch(note.kind, children, note.mark)


def _read_tensor(note: TensorNote, buffer: Tensor) -> TensorLeaf:
    dtype = dtype_named(note.dtype)
    assert dtype is not None, "both processes have the same torch"
    data: Tensor | Piece
    if note.piece is None:
        size = nbytes(dtype, note.shape)
        data = _view(buffer, note.offset, size, dtype).view(note.shape)
    else:
        start, stop, fingerprint = note.piece
        is_here = note.offset >= 0
        part = _view(buffer, note.offset, stop - start, dtype) if is_here else None
        about = (note.name, dtype, note.shape, note.device)
        data = Piece(*about, start, stop, fingerprint, part)
    return TensorLeaf(note.name, dtype, note.shape, note.device, data, note.mark)


def _view(buffer: Tensor, offset: int, size: int, dtype: torch.dtype) -> Tensor:
    return buffer[offset : offset + size].view(dtype)


def state_of(node: Node, within: Mark = "") -> Any:
    """Make a state of a tree: with marks, and with nodes where a plain value would say less.

    Such are what a codec has made, for the codec may not be known in this process, and a tensor
    that comes from another device.
    """
    if node.mark != within:
        marked = Alike if node.mark == "alike" else PerRank
        return marked(state_of(node, node.mark))
    if isinstance(node, Scalar):
        return node.value
    if isinstance(node, TensorLeaf):
        is_plain = node.device == "cpu" or isinstance(node.data, Piece)
        return node.data if is_plain else node
    assert isinstance(node, Branch)
    if node.kind.startswith("codec:"):
        return node
    items = {key: state_of(child, within) for key, child in node.children.items()}
    if node.kind == "dict":
        return items
    return (list if node.kind == "list" else tuple)(items.values())


def _no_tensor(*_: Any) -> Any:
    raise AssertionError("a tensor has a note of its own")
