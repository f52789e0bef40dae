"""Values that are not JSON-like, by explicit consent: their class brings its own codec."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from ..errors import DamagedCheckpoint, InvalidArgument

__all__ = ["Codec", "codec_for", "codec_named", "register_codec"]

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
