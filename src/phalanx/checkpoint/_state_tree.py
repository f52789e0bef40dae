"""A state as a tree: branches, scalars that JSON can hold, and named tensors.

`parse_state` makes the tree of a state, `rebuild_state` a state of a tree. The tree is what ranks
compare, divide among each other and encode into the manifest. In a tree that was read from a
manifest, tensors hold their location on disk instead of data.

`Replicated` and `PerRank` mark parts of a state; a codec stores values of a class that JSON lacks,
and only for classes that were registered.
"""

from __future__ import annotations

import math
import re
import sys
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor

from ..errors import DamagedCheckpoint, InvalidArgument, UnsupportedState
from ._manifest import MAX_DEPTH, StateKey, StatePath, format_path, tensor_name


@dataclass(frozen=True)
class Replicated:
    """Mark a part of the state that is identical on all ranks, such as a data-parallel model.

    It is written once, each rank writing a share of it. Only samples of it are compared between
    ranks; state without a mark is compared byte by byte.
    """

    value: Any


@dataclass(frozen=True)
class PerRank:
    """Mark a part of the state that is different on each rank. It is not compared."""

    value: Any


@dataclass(frozen=True)
class ReplicatedShard:
    """The bytes from `start` to `stop` of a replicated tensor, which this rank writes.

    An asynchronous save stages these, so that it need not copy what other ranks write.
    """

    start: int
    stop: int
    fingerprint: str  # A sampled digest of the whole tensor, for comparison between ranks
    data: torch.Tensor | None
    """The bytes as a flat tensor of the same dtype; None if this rank writes none of it."""


T = TypeVar("T")


class Codec(NamedTuple):
    """How values of a class are stored, under a name that the manifest records."""

    name: str
    encode: Callable[[Any], Any]
    decode: Callable[[Any], Any]


codecs_by_class: dict[type, Codec] = {}
codecs_by_name: dict[str, Codec] = {}


def register_codec(
    name: str, kind: type[T], *, encode: Callable[[T], Any], decode: Callable[[Any], T]
) -> None:
    """Store values of exactly the class `kind` as what `encode` returns.

    `encode` returns nested dicts, lists and tuples of JSON-like values and tensors. `decode` gets
    the same back, and must validate it, since a file may come from an attacker. Manifests contain
    the name, so it must not change as long as checkpoints exist.
    """
    if not re.fullmatch(r"[A-Za-z_][\w.-]*", name):
        raise InvalidArgument(f"a codec's name has only letters, digits and ._-, got {name!r}")
    known = codecs_by_name.get(name)
    if known is not None and codecs_by_class.get(kind) is not known:
        raise InvalidArgument(f"a codec named {name!r} is already registered for another class")
    codecs_by_class[kind] = codecs_by_name[name] = Codec(name, encode, decode)


def _counter(counts: Any) -> Counter[Any]:
    if not isinstance(counts, dict):
        raise DamagedCheckpoint(f"a Counter was not stored as a dict: {counts!r:.40}")
    return Counter(counts)


# The state of torch's MultiStepLR contains one.
register_codec("collections.Counter", Counter, encode=dict, decode=_counter)


Mark: TypeAlias = Literal["", "replicated", "per rank"]
_MARKS: dict[type, Mark] = {Replicated: "replicated", PerRank: "per rank"}


BranchKind: TypeAlias = Literal["dict", "list", "tuple", "codec"]


@dataclass(frozen=True, slots=True)
class Branch:
    """A dict, a list, a tuple, or the output of a codec."""

    kind: BranchKind
    children: dict[StateKey, Node]
    """Of a codec, its output under the key ``value``."""
    mark: Mark = ""
    codec: str = ""  # the name of the codec


@dataclass(frozen=True, slots=True)
class Scalar:
    value: Any
    mark: Mark = ""


@dataclass(frozen=True, slots=True)
class TensorLeaf:
    """A tensor: in memory, partly staged, or on disk."""

    name: str  # the same for tensors that share memory
    dtype: torch.dtype
    shape: tuple[int, ...]
    device: str  # its device type
    data: Any = field(compare=False)
    """A `Tensor`, a function that loads it, a `ReplicatedShard`, or where it is on disk."""
    mark: Mark = ""


@dataclass(frozen=True, slots=True)
class Absent:
    """State that the checkpoint has for other ranks only."""

    ranks: tuple[int, ...]
    mark: Mark = ""


@dataclass(frozen=True, slots=True)
class Deferred:
    """State that is read when it is asked for."""

    read: Callable[[], Node]
    mark: Mark = ""


Node: TypeAlias = Branch | Scalar | TensorLeaf | Absent | Deferred


def parse_state(state: Any) -> Node:
    """Return the tree of a state; raises `UnsupportedState` with the path of a bad value.

    Tensors that share memory get one name: the first in alphabetical order, since the order of keys
    may differ between ranks.
    """
    tree = _parse(state, (), "")
    names: dict[Any, list[str]] = defaultdict(list)
    for leaf in leaves(tree):
        names[_identity(leaf)].append(leaf.name)
    if all(len(each) == 1 for each in names.values()):
        return tree
    return map_leaves(tree, lambda leaf: replace(leaf, name=min(names[_identity(leaf)])))


def _identity(leaf: TensorLeaf) -> Any:
    tensor = leaf.data
    if not isinstance(tensor, Tensor) or tensor.numel() == 0:
        return leaf.name
    # With the mark: replicated and per-rank tensors are written to different files.
    flags = (tensor.is_conj(), tensor.is_neg(), leaf.mark)
    return (tensor.data_ptr(), tensor.device, tensor.dtype, leaf.shape, tensor.stride(), flags)


def _parse(value: Any, path: StatePath, mark: Mark) -> Node:
    if len(path) > MAX_DEPTH:
        raise UnsupportedState(
            f"{format_path(path[:6])}… is nested deeper than {MAX_DEPTH} levels, or contains itself"
        )
    if type(value) in _MARKS:
        inner = _MARKS[type(value)]
        if mark not in ("", inner):
            raise UnsupportedState(
                f"{format_path(path)} is marked {inner} inside a part that is marked {mark}"
            )
        return _parse(value.value, path, inner)
    if isinstance(value, Tensor):
        if reason := unsupported_reason(value):
            raise UnsupportedState(f"{format_path(path)} is {reason}")
        shape, device = tuple(value.shape), value.device.type
        return TensorLeaf(tensor_name(path), value.dtype, shape, device, value, mark)
    if isinstance(value, Branch | TensorLeaf):
        return value  # already parsed, before staging
    if _is_numpy_number(value):
        value = value.item()
    if type(value) in SCALAR_TYPES:
        _check_scalar(value, path)
        return Scalar(value, mark)
    return _parse_branch(value, path, mark)


def _is_numpy_number(value: Any) -> bool:
    """Whether a value is what NumPy returns for one number, such as the minimum of two."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, (numpy.number, numpy.bool_))


def _parse_branch(value: Any, path: StatePath, mark: Mark) -> Branch:
    if (codec := codecs_by_class.get(type(value))) is not None:
        child = _parse(codec.encode(value), (*path, "value"), mark)
        return Branch("codec", {"value": child}, mark, codec.name)
    kind: BranchKind
    items: Iterable[tuple[Any, Any]]
    if type(value) in (dict, OrderedDict):
        kind, items = "dict", value.items()
    elif type(value) in (list, tuple):
        kind, items = "list" if type(value) is list else "tuple", enumerate(value)
    elif callable(getattr(value, "state_dict", None)) and not isinstance(value, type):
        return _parse_branch(value.state_dict(), path, mark)
    else:
        raise UnsupportedState(
            f"{format_path(path)} has unsupported type {_class_name(value)}. Save its parts, "
            "give it state_dict() and load_state_dict(), or call register_codec"
        )
    children: dict[StateKey, Node] = {}
    for key, each in items:
        if type(key) not in KEY_TYPES or (type(key) is float and not math.isfinite(key)):
            raise UnsupportedState(
                f"{format_path(path)} has the key {key!r} of type {_class_name(key)}; "
                "keys must be strings, numbers, booleans or None"
            )
        _check_scalar(key, path)
        children[key] = _parse(each, (*path, key), mark)
    return Branch(kind, children, mark)


KEY_TYPES = frozenset([type(None), bool, int, float, str])
SCALAR_TYPES = KEY_TYPES | {torch.Size, torch.dtype, torch.device}
_MAX_DIGITS = sys.int_info.default_max_str_digits


def _check_scalar(value: Any, path: StatePath) -> None:
    if type(value) is int and value.bit_length() > 3 * _MAX_DIGITS:
        raise UnsupportedState(f"{format_path(path)} has an integer of {value.bit_length()} bits")
    if type(value) is str:
        try:
            value.encode()
        except UnicodeEncodeError:
            raise UnsupportedState(
                f"{format_path(path)} has text that is not valid Unicode"
            ) from None


def unsupported_reason(tensor: Tensor, *, is_stored: bool = False) -> str:
    """Return why a tensor is not plain bytes in memory, with a hint; "" if it is.

    If `is_stored`, its bytes are in a file, and the tensor may be on the meta device.
    """
    if type(tensor) not in (Tensor, torch.nn.Parameter):
        advice = "store a plain tensor"
        if hasattr(tensor, "full_tensor"):
            advice = "store its local part (to_local) or the whole (full_tensor)"
        return f"a {_class_name(tensor)}; {advice}"
    if tensor.is_nested:
        return "a nested tensor; store its components (unbind)"
    if tensor.is_quantized:
        return "a quantized tensor; store its integers (int_repr) and its scale"
    if tensor.layout is not torch.strided:
        return f"a tensor of layout {tensor.layout}; store a dense one"
    if is_stored:
        return ""
    if tensor.is_meta:
        return "a tensor on the meta device, which has no values"
    if tensor.numel() and not tensor.untyped_storage().nbytes():
        return "a tensor whose storage was freed, as by sharding; gather it first"
    return ""


def _class_name(value: object) -> str:
    kind = type(value)
    if kind.__module__ in ("builtins", "__main__"):
        return kind.__qualname__
    return f"{kind.__module__}.{kind.__qualname__}"


def walk(
    node: Node,
    *,
    descend: Callable[[StatePath, Node], bool] = lambda _path, _node: True,
    path: StatePath = (),
) -> Iterator[tuple[StatePath, Node]]:
    """Yield every node with its path, in order; nothing below a node if `descend` returns False."""
    yield path, node
    if isinstance(node, Branch) and descend(path, node):
        for key, child in node.children.items():
            yield from walk(child, descend=descend, path=(*path, key))


def leaves(node: Node) -> Iterator[TensorLeaf]:
    return (each for _, each in walk(node) if isinstance(each, TensorLeaf))


def map_leaves(node: Node, change: Callable[[TensorLeaf], TensorLeaf]) -> Node:
    """Return the tree with each tensor replaced by what `change` returns."""
    if isinstance(node, TensorLeaf):
        return change(node)
    if isinstance(node, Branch):
        children = {key: map_leaves(child, change) for key, child in node.children.items()}
        return Branch(node.kind, children, node.mark, node.codec)
    return node


def read_deferred(node: Node) -> Node:
    """Return the tree with everything that was deferred."""
    if isinstance(node, Deferred):
        return read_deferred(node.read())
    if isinstance(node, Branch):
        children = {key: read_deferred(child) for key, child in node.children.items()}
        return Branch(node.kind, children, node.mark, node.codec)
    return node


def find_node(node: Node, path: StatePath) -> Node | None:
    found: Node | None = node
    for key in path:
        found = found.children.get(key) if isinstance(found, Branch) else None
    return found


def rebuild_state(node: Node, tensor: Callable[[TensorLeaf], Any]) -> Any:
    """Return the state of a tree. `tensor` returns its tensors."""
    if isinstance(node, TensorLeaf):
        return tensor(node)
    if isinstance(node, Scalar):
        return node.value
    assert isinstance(node, Branch), "absent nodes are skipped by their parents"
    items = {
        key: rebuild_state(child, tensor)
        for key, child in node.children.items()
        if not isinstance(child, Absent)  # `_reader` raises for those that were asked for
    }
    if node.kind == "dict":
        return items
    if node.kind == "codec":
        return codecs_by_name[node.codec].decode(items["value"])
    return (list if node.kind == "list" else tuple)(items.values())
