"""A state as a tree: branches, values that JSON can tell, and tensors with names.

`parse` makes the tree of a state, `rebuild` a state of a tree. The tree is what is compared among
ranks, divided over them, and written into the manifest (`_encoding`); a tree that was read from a
manifest has places on disk where one that was parsed has tensors.
"""

from __future__ import annotations

import sys
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from ..errors import UnsupportedState
from ._codecs import codec_for, codec_named
from ._marks import Alike, PerRank, Piece
from ._paths import Key, Path, display, name_of

__all__ = [
    "MAX_DEPTH",
    "Absent",
    "Branch",
    "Mark",
    "Node",
    "Scalar",
    "TensorLeaf",
    "absences",
    "complaint_about",
    "leaves",
    "parse",
    "rebuild",
    "without_absent",
]

MAX_DEPTH = 100
"""How deep a state may be nested: a cycle is deeper, and so is an attack.

Its JSON may be three times as deep, and functions that call themselves must get to its end from
whatever depth they were called at.
"""

Mark: TypeAlias = Literal["", "alike", "per rank"]
_MARKS: dict[type, Mark] = {Alike: "alike", PerRank: "per rank"}


@dataclass(frozen=True, slots=True)
class Branch:
    """A dict, a list, a tuple, or what a codec has made of a value."""

    kind: str
    """``dict``, ``list``, ``tuple``, or ``codec:`` and its name."""
    children: dict[Key, Node]
    mark: Mark = ""


@dataclass(frozen=True, slots=True)
class Scalar:
    """A value that the manifest holds itself."""

    value: Any
    mark: Mark = ""


@dataclass(frozen=True, slots=True)
class TensorLeaf:
    """A tensor: here, staged in part, or on disk."""

    name: str
    """The same for tensors that are one and the same memory."""
    dtype: torch.dtype
    shape: tuple[int, ...]
    device: str
    """The type of its device."""
    data: Any = field(compare=False)
    """A `Tensor`, a `BucketPiece`, or what the manifest says of its place."""
    mark: Mark = ""


@dataclass(frozen=True, slots=True)
class Absent:
    """State of ranks that the checkpoint has not got for this one."""

    ranks: tuple[int, ...]
    """The ranks that have some."""
    mark: Mark = ""


Node: TypeAlias = Branch | Scalar | TensorLeaf | Absent


def parse(state: Any) -> Node:
    """Make the tree of a state; what cannot be stored is refused by its path."""
    node = _parse(state, (), "")
    return _share_names(node)


def _parse(value: Any, path: Path, mark: Mark) -> Node:
    if len(path) > MAX_DEPTH:
        raise UnsupportedState(
            f"{display(path[:6])}… is nested deeper than {MAX_DEPTH} levels, or holds itself"
        )
    if type(value) in _MARKS:
        return _parse(value.value, path, _combine(mark, _MARKS[type(value)], path))
    if isinstance(value, Tensor):
        _check_tensor(value, path)
        shape, device = tuple(value.shape), value.device.type
        return TensorLeaf(name_of(path), value.dtype, shape, device, value, mark)
    if isinstance(value, Branch | TensorLeaf):
        return value  # parsed already, by the process that the state comes from
    if isinstance(value, Piece):
        return TensorLeaf(value.name, value.dtype, value.shape, value.device, value, mark)
    if type(value) in _SCALARS:
        return Scalar(_check_scalar(value, path), mark)
    return _parse_branch(value, path, mark)


def _parse_branch(value: Any, path: Path, mark: Mark) -> Branch:
    codec = codec_for(value)
    if codec is not None:
        child = _parse(codec.encode(value), (*path, "value"), mark)
        return Branch(f"codec:{codec.name}", {"value": child}, mark)
    items: Iterable[tuple[Any, Any]]
    if type(value) in (dict, OrderedDict):
        kind, items = "dict", value.items()
    elif type(value) in (list, tuple):
        kind, items = type(value).__name__, enumerate(value)
    elif callable(getattr(value, "state_dict", None)) and not isinstance(value, type):
        return _parse_branch(value.state_dict(), path, mark)
    else:
        raise UnsupportedState(
            f"{display(path)} is a {_class_name(value)}, which is neither a tensor nor JSON-like; "
            "store what it is made of, give it state_dict and load_state_dict, "
            "or register a codec for it"
        )
    children = {_check_key(key, path): _parse(each, (*path, key), mark) for key, each in items}
    return Branch(kind, children, mark)


def _combine(outer: Mark, inner: Mark, path: Path) -> Mark:
    if outer and outer != inner:
        raise UnsupportedState(
            f"{display(path)} is marked as {inner}, inside of what is marked as {outer}"
        )
    return inner


_SCALARS = frozenset([type(None), bool, int, float, str, torch.Size, torch.dtype, torch.device])
_MOST_DIGITS = sys.int_info.default_max_str_digits


def _check_scalar(value: Any, path: Path) -> Any:
    if type(value) is int:
        _check_int(value, path)
    elif type(value) is str:
        _check_text(value, path)
    return value


def _check_key(key: Any, path: Path) -> Key:
    if type(key) is str:
        _check_text(key, path)
    elif type(key) is int:
        _check_int(key, path)
    elif type(key) not in (bool, type(None)) and not (type(key) is float and key - key == 0.0):
        raise UnsupportedState(
            f"{display(path)} has the key {key!r}, a {_class_name(key)}; "
            "keys are strings, numbers, booleans or None"
        )
    return key  # type: ignore[no-any-return]


def _check_int(value: int, path: Path) -> None:
    if value.bit_length() > 3 * _MOST_DIGITS:
        raise UnsupportedState(f"{display(path)} has an integer of {value.bit_length()} bits")


def _check_text(text: str, path: Path) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UnsupportedState(f"{display(path)} has text that is not valid Unicode") from None


def _check_tensor(tensor: Tensor, path: Path) -> None:
    complaint = complaint_about(tensor)
    if complaint:
        raise UnsupportedState(f"{display(path)} is {complaint}")


def complaint_about(tensor: Tensor) -> str:
    """Say why the values of a tensor are not simply bytes in memory, and what to do; or nothing."""
    if type(tensor) not in (Tensor, torch.nn.Parameter):
        advice = (
            "store its own part (to_local) or the whole (full_tensor)"
            if hasattr(tensor, "full_tensor")
            else "store a plain tensor"
        )
        return f"a {_class_name(tensor)}; {advice}"
    if tensor.is_nested:
        return "a nested tensor; store the tensors that it is made of (unbind)"
    if tensor.is_quantized:
        return "a quantized tensor; store its integers (int_repr) and its scale"
    if tensor.layout is not torch.strided:
        return f"a tensor of layout {tensor.layout}; store a dense one"
    if tensor.is_meta:
        return "a tensor on the meta device, which has no values"
    if tensor.numel() and not tensor.untyped_storage().nbytes():
        return "a tensor whose memory was given back, as that of a sharded one; gather it first"
    return ""


def _class_name(value: object) -> str:
    kind = type(value)
    if kind.__module__ in ("builtins", "__main__"):
        return kind.__qualname__
    return f"{kind.__module__}.{kind.__qualname__}"


def leaves(node: Node) -> Iterator[TensorLeaf]:
    """Yield the tensors of a tree in its order."""
    if isinstance(node, TensorLeaf):
        yield node
    elif isinstance(node, Branch):
        for child in node.children.values():
            yield from leaves(child)


def _share_names(node: Node) -> Node:
    """Give tensors that are the same memory one name: the least, whatever the order of keys."""
    names: dict[Any, list[str]] = defaultdict(list)
    for leaf in leaves(node):
        names[_identity(leaf)].append(leaf.name)
    if all(len(each) == 1 for each in names.values()):
        return node
    return _rename(node, lambda leaf: replace(leaf, name=min(names[_identity(leaf)])))


def _identity(leaf: TensorLeaf) -> Any:
    tensor = leaf.data
    if not isinstance(tensor, Tensor) or tensor.numel() == 0:
        return leaf.name
    # Marks are part of it: what is alike and what is not are written to different places.
    flags = (tensor.is_conj(), tensor.is_neg(), leaf.mark)
    return (tensor.data_ptr(), tensor.device, tensor.dtype, leaf.shape, tensor.stride(), flags)


def _rename(node: Node, rename: Callable[[TensorLeaf], TensorLeaf]) -> Node:
    if isinstance(node, TensorLeaf):
        return rename(node)
    if isinstance(node, Branch):
        children = {key: _rename(child, rename) for key, child in node.children.items()}
        return Branch(node.kind, children, node.mark)
    return node


def absences(node: Node, path: Path = ()) -> Iterator[tuple[Path, Absent]]:
    """Yield what a tree lacks for this rank, and where."""
    if isinstance(node, Absent):
        yield path, node
    elif isinstance(node, Branch):
        for key, child in node.children.items():
            yield from absences(child, (*path, key))


def without_absent(node: Node) -> Node:
    """Leave out the keys whose values are absent."""
    if not isinstance(node, Branch):
        return node
    present = {
        key: without_absent(child)
        for key, child in node.children.items()
        if not isinstance(child, Absent)
    }
    return Branch(node.kind, present, node.mark)


def rebuild(node: Node, tensor: Callable[[TensorLeaf], Any], *, marked: bool = False) -> Any:
    """Make a state of a tree, with `tensor` for its tensors, and its marks if they are wanted."""
    if marked and node.mark:
        value = rebuild(node, tensor)
        return Alike(value) if node.mark == "alike" else PerRank(value)
    if isinstance(node, TensorLeaf):
        return tensor(node)
    if isinstance(node, Scalar):
        return node.value
    assert isinstance(node, Branch), "what is absent was left out before"
    items = {
        key: rebuild(child, tensor, marked=marked)
        for key, child in node.children.items()
        if not isinstance(child, Absent)  # who asks for it by name is told (`_fitting`)
    }
    if node.kind == "dict":
        return items
    if node.kind in ("list", "tuple"):
        return (list if node.kind == "list" else tuple)(items.values())
    codec = codec_named(node.kind.removeprefix("codec:"))
    assert codec is not None, "looked up when the tree was made"
    return codec.decode(items["value"])
