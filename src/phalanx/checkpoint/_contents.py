"""What a manifest lists, leaf by leaf, for people and without torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from ._document import Document, Malformed, TensorEntry, is_rank
from ._paths import Path, display

__all__ = ["Entry", "contents"]

_DEEPEST = 400  # levels of JSON; a state of as many as can be saved has fewer


@dataclass(frozen=True)
class Entry:
    """One value of a state."""

    name: str
    rank: int | None
    """Whose it is; None if all ranks hold it alike."""
    tensor: TensorEntry | None
    value: Any = None
    """What it is, as JSON has it, if it is no tensor."""

    @property
    def bytes(self) -> int:
        """How many bytes it has in the files."""
        pieces = [] if self.tensor is None else self.tensor.pieces
        return sum(end - begin for begin, end in (piece.at for piece in pieces))

    @property
    def owner(self) -> str:
        """Whose it is, in words."""
        return "all" if self.rank is None else f"rank {self.rank}"


def contents(document: Document) -> list[Entry]:
    """List the values of a state in their order; raises `Malformed` for what is none."""
    try:
        return list(_walk(document.state, ()))
    except RecursionError:
        raise Malformed("the state is nested too deep") from None


def _walk(json: Any, path: Path) -> Iterator[Entry]:
    if len(path) > _DEEPEST:
        raise Malformed("the state is nested too deep")
    tag = next(iter(json), None) if isinstance(json, dict) else None
    if isinstance(json, dict) and isinstance(tag, str) and tag.startswith("$"):
        yield from _walk_tagged(tag, json[tag], path)
    elif isinstance(json, dict | list) and json:
        for key, each in json.items() if isinstance(json, dict) else enumerate(json):
            yield from _walk(each, (*path, key))
    else:
        yield Entry(display(path), None, None, json)


def _walk_tagged(tag: str, body: Any, path: Path) -> Iterator[Entry]:
    match tag, body:
        case "$tensor", _:
            try:
                yield Entry(display(path), None, msgspec.convert(body, TensorEntry, strict=True))
            except msgspec.ValidationError as error:
                raise Malformed(f"{display(path)}: {error}") from None
        case "$per_rank", dict():
            for rank, each in body.items():
                if not is_rank(rank):
                    raise Malformed(f"{display(path)} has no rank {rank!r:.40}")
                yield from (replace(entry, rank=int(rank)) for entry in _walk(each, path))
        case "$tuple", list():
            yield from _walk(body, path)
        case "$dict", list() if all(isinstance(each, list) and len(each) == 2 for each in body):
            for key, each in body:
                yield from _walk(each, (*path, key))
        case "$codec", [str(), value]:
            yield from _walk(value, path)
        case _:
            yield Entry(display(path), None, None, body)
