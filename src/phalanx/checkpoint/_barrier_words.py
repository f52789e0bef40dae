"""What ranks say at a barrier, however long it is.

A store takes values of a few MiB. A rank says what is short beside its progress, and whoever comes
last gathers that of all in one value. Of what is long it says there in how many pieces it is.
"""

from __future__ import annotations

import json

from torch._C._distributed_c10d import Store

from ..errors import InvalidType
from ._barrier_keys import Keys

__all__ = ["Words", "check_text", "gathered"]

MOST = 4 << 20
"""Bytes that are put into one value; torch's server takes 8 MiB, and drops who sends more."""


def check_text(text: str) -> str:
    """Return what a rank wants to say, if it can be said."""
    if not isinstance(text, str):
        raise InvalidType(f"exchange takes a string, not {type(text).__name__}: json.dumps it")
    return text


class Words:
    """What one rank says at its uses, and how it reads what the others say."""

    def __init__(self, keys: Keys, *, rank: int, size: int) -> None:
        self._keys = keys
        self._rank = rank
        self._size = size
        self._pieces: list[tuple[int, list[str]]] = []  # that are in the store, by use

    def say(self, store: Store, use: int, text: str) -> str:
        """Put what is long into the store, and return what is to be said beside the progress."""
        said = json.dumps(text)  # plain ASCII, whatever is in it
        if len(said) <= MOST // self._size:  # so that all fit into one value
            return said
        parts = [said[start : start + MOST] for start in range(0, len(said), MOST)]
        keys = self._keys.said(use, self._rank, len(parts))
        self._pieces.append((use, keys))
        for key, part in zip(keys, parts, strict=True):
            store.set(key, part)
        return str(len(parts))

    def hear(self, store: Store, use: int, told: bytes) -> list[str]:
        """Read what everybody said at a use from what was gathered."""
        return [
            each if isinstance(each, str) else self._collect(store, use, rank, each)
            for rank, each in enumerate(json.loads(told))
        ]

    def _collect(self, store: Store, use: int, rank: int, pieces: int) -> str:
        parts = [store.get(key) for key in self._keys.said(use, rank, pieces)]
        text: str = json.loads(b"".join(parts))
        return text

    def sweep(self, store: Store, passed: int) -> None:
        """Delete the pieces of all uses but the last that has passed: others may be reading it."""
        for _, keys in [each for each in self._pieces if each[0] != passed]:
            for key in keys:
                store.delete_key(key)
        self._pieces = [each for each in self._pieces if each[0] == passed]


def gathered(said: list[str]) -> str:
    """Make one value of what `Words.say` has returned on every rank."""
    return f"[{','.join(said)}]"
