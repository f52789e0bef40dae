"""A state as a tree: branches, scalars that JSON can hold, and named tensors.

`parse_state` makes the tree of a state, `rebuild_state` a state of a tree. The tree is what ranks
compare, divide among each other and encode into the manifest. In a tree that was read from a
manifest, tensors hold their location on disk instead of data.

`Replicated` and `PerRank` mark parts of a state; a codec stores values of a class that JSON lacks,
and only for classes that were registered.
"""

from __future__ import annotations

import re
import sys
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias, TypeVar

import torch
from torch import Tensor

from ..errors import DamagedCheckpoint, InvalidArgument, UnsupportedState
from ._manifest import StateKey, StatePath, format_path, tensor_name


@dataclass(frozen=True)
class Replicated:
    """Mark a part of the state that all ranks hold alike, such as a data-parallel model.

    It is written once, each rank writing a share of it. That it really is alike is checked by
    samples only; state that is not marked at all is compared byte by byte.
    """

    value: Any


@dataclass(frozen=True)
class PerRank:
    """Mark a part of the state that each rank has its own of; nobody compares it."""

    value: Any


@dataclass(frozen=True)
class ReplicatedShard:
    """Stand in for a tensor that is alike, with only the bytes that this rank is to write.

    `own_shards` makes them, so that an asynchronous save need not copy what others write.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    device: str
    start: int
    """The first byte of the tensor that is here."""
    stop: int
    """The byte after the last one that is here."""
    fingerprint: str
    """Of the whole tensor, to be compared among the ranks."""
    data: torch.Tensor | None
    """The bytes as a flat tensor of the same dtype; None if this rank writes none of it."""


T = TypeVar("T")


@dataclass(frozen=True)
class Codec:
    """How values of one class are stored, under a name that the manifest keeps."""

    name: str
    encode: Callable[[Any], Any]
    decode: Callable[[Any], Any]


_by_class: dict[type, Codec] = {}
_by_name: dict[str, Codec] = {}


def register_codec(
    name: str, kind: type[T], *, encode: Callable[[T], Any], decode: Callable[[Any], T]
) -> None:
    """Store values of exactly the class `kind` as what `encode` makes of them.

    `encode` returns what a state may hold by itself: nested dicts, lists and tuples of JSON-like
    values and tensors. `decode` gets the same back, and must bear what a stranger has written.
    The name is what ties the two together, so it must not change as long as checkpoints exist.
    """
    if not re.fullmatch(r"[A-Za-z_][\w.-]*", name):
        raise InvalidArgument(f"{name!r} is not a name for a codec: letters, digits and ._- only")
    known = _by_name.get(name)
    if known is not None and _by_class.get(kind) is not known:
        raise InvalidArgument(f"there is a codec named {name!r} already, for another class")
    codec = Codec(name, encode, decode)
    _by_class[kind] = _by_name[name] = codec


def codec_for(value: object) -> Codec | None:
    """Return the codec that was registered for the class of `value`."""
    return _by_class.get(type(value))


def codec_named(name: str) -> Codec | None:
    """Return the codec of that name."""
    return _by_name.get(name)


def _counter(counts: Any) -> Counter[Any]:
    if not isinstance(counts, dict):
        raise DamagedCheckpoint(f"a Counter was stored as what it cannot be: {counts!r:.40}")
    return Counter(counts)


# A scheduler of torch's own has one: MultiStepLR.
register_codec("collections.Counter", Counter, encode=dict, decode=_counter)


MAX_DEPTH = 100
"""How deep a state may be nested: a cycle is deeper, and so is an attack.

Its JSON may be three times as deep, and functions that call themselves must get to its end from
whatever depth they were called at.
"""

Mark: TypeAlias = Literal["", "alike", "per rank"]
_MARKS: dict[type, Mark] = {Replicated: "alike", PerRank: "per rank"}


@dataclass(frozen=True, slots=True)
class Branch:
    """A dict, a list, a tuple, or what a codec has made of a value."""

    kind: str
    """``dict``, ``list``, ``tuple``, or ``codec:`` and its name."""
    children: dict[StateKey, Node]
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
    """A `Tensor`, a `ReplicatedShard`, or what the manifest says of its place."""
    mark: Mark = ""


@dataclass(frozen=True, slots=True)
class Absent:
    """State of ranks that the checkpoint has not got for this one."""

    ranks: tuple[int, ...]
    """The ranks that have some."""
    mark: Mark = ""


Node: TypeAlias = Branch | Scalar | TensorLeaf | Absent


def parse_state(state: Any) -> Node:
    """Make the tree of a state; what cannot be stored is refused by its path."""
    node = _parse(state, (), "")
    return _unify_aliases(node)


def _parse(value: Any, path: StatePath, mark: Mark) -> Node:
    if len(path) > MAX_DEPTH:
        raise UnsupportedState(
            f"{format_path(path[:6])}… is nested deeper than {MAX_DEPTH} levels, or holds itself"
        )
    if type(value) in _MARKS:
        return _parse(value.value, path, _combine_marks(mark, _MARKS[type(value)], path))
    if isinstance(value, Tensor):
        _check_tensor(value, path)
        shape, device = tuple(value.shape), value.device.type
        return TensorLeaf(tensor_name(path), value.dtype, shape, device, value, mark)
    if isinstance(value, Branch | TensorLeaf):
        return value  # parsed already, by the process that the state comes from
    if isinstance(value, ReplicatedShard):
        return TensorLeaf(value.name, value.dtype, value.shape, value.device, value, mark)
    if type(value) in _SCALARS:
        return Scalar(_check_scalar(value, path), mark)
    return _parse_branch(value, path, mark)


def _parse_branch(value: Any, path: StatePath, mark: Mark) -> Branch:
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
            f"{format_path(path)} is a {_class_name(value)}, which is neither a tensor nor JSON-like; "
            "store what it is made of, give it state_dict and load_state_dict, "
            "or register a codec for it"
        )
    children = {_check_key(key, path): _parse(each, (*path, key), mark) for key, each in items}
    return Branch(kind, children, mark)


def _combine_marks(outer: Mark, inner: Mark, path: StatePath) -> Mark:
    if outer and outer != inner:
        raise UnsupportedState(
            f"{format_path(path)} is marked as {inner}, inside of what is marked as {outer}"
        )
    return inner


_SCALARS = frozenset([type(None), bool, int, float, str, torch.Size, torch.dtype, torch.device])
_MAX_DIGITS = sys.int_info.default_max_str_digits


def _check_scalar(value: Any, path: StatePath) -> Any:
    if type(value) is int:
        _check_int(value, path)
    elif type(value) is str:
        _check_text(value, path)
    return value


def _check_key(key: Any, path: StatePath) -> StateKey:
    if type(key) is str:
        _check_text(key, path)
    elif type(key) is int:
        _check_int(key, path)
    elif type(key) not in (bool, type(None)) and not (type(key) is float and key - key == 0.0):
        raise UnsupportedState(
            f"{format_path(path)} has the key {key!r}, a {_class_name(key)}; "
            "keys are strings, numbers, booleans or None"
        )
    return key  # type: ignore[no-any-return]


def _check_int(value: int, path: StatePath) -> None:
    if value.bit_length() > 3 * _MAX_DIGITS:
        raise UnsupportedState(f"{format_path(path)} has an integer of {value.bit_length()} bits")


def _check_text(text: str, path: StatePath) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UnsupportedState(f"{format_path(path)} has text that is not valid Unicode") from None


def _check_tensor(tensor: Tensor, path: StatePath) -> None:
    complaint = unsupported_reason(tensor)
    if complaint:
        raise UnsupportedState(f"{format_path(path)} is {complaint}")


def unsupported_reason(tensor: Tensor) -> str:
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


def _unify_aliases(node: Node) -> Node:
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


def find_absent(node: Node, path: StatePath = ()) -> Iterator[tuple[StatePath, Absent]]:
    """Yield what a tree lacks for this rank, and where."""
    if isinstance(node, Absent):
        yield path, node
    elif isinstance(node, Branch):
        for key, child in node.children.items():
            yield from find_absent(child, (*path, key))


def drop_absent(node: Node) -> Node:
    """Leave out the keys whose values are absent."""
    if not isinstance(node, Branch):
        return node
    present = {
        key: drop_absent(child)
        for key, child in node.children.items()
        if not isinstance(child, Absent)
    }
    return Branch(node.kind, present, node.mark)


def rebuild_state(node: Node, tensor: Callable[[TensorLeaf], Any], *, marked: bool = False) -> Any:
    """Make a state of a tree, with `tensor` for its tensors, and its marks if they are wanted."""
    if marked and node.mark:
        value = rebuild_state(node, tensor)
        return Replicated(value) if node.mark == "alike" else PerRank(value)
    if isinstance(node, TensorLeaf):
        return tensor(node)
    if isinstance(node, Scalar):
        return node.value
    assert isinstance(node, Branch), "what is absent was left out before"
    items = {
        key: rebuild_state(child, tensor, marked=marked)
        for key, child in node.children.items()
        if not isinstance(child, Absent)  # who asks for it by name is told (`_reader`)
    }
    if node.kind == "dict":
        return items
    if node.kind in ("list", "tuple"):
        return (list if node.kind == "list" else tuple)(items.values())
    codec = codec_named(node.kind.removeprefix("codec:"))
    assert codec is not None, "looked up when the tree was made"
    return codec.decode(items["value"])
