"""A save: all ranks, all or nothing.

::

    get ready   rank 0 takes the place and cleans up after dead jobs; all parse their state
    compare     what is alike, unless the state says so or there is one rank
    write       every rank its part, flushed to disk, then the hook's pre_commit
    commit      rank 0 writes the manifest and makes all of it visible in one instant

Ranks meet after each of these and say how it went. If it went wrong anywhere, all of them raise the
first cause; before the last step nothing has been visible, and after it everything is. What was
there before is removed when they have left.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from typing import Any

import msgspec

from ..errors import SaveFailed, StateMismatch
from ._alike import Part, elements, own_share, sizes_of
from ._digests import find_differences, marked_apart
from ._document import FileEntry, HeaderEntry
from ._dtypes import name_of_dtype
from ._encoding import encode
from ._manifest import Manifest
from ._marks import Piece
from ._meeting import Company
from ._paths import Path
from ._points import reach
from ._storage import Storage, data_file_name, share_of_removal
from ._structure import Branch, Node, TensorLeaf, leaves, parse
from ._tensors import Place, Share, WrittenFile, write_tensors
from ._types import STATE_DICT

__all__ = ["commit_together", "who"]


def commit_together(
    open_storage: Callable[[], Storage],
    state_dict: STATE_DICT,
    *,
    company: Company,
    before_commit: Callable[[], None],
) -> Callable[[], None] | None:
    """Save a state with all ranks of a company; each calls `before_commit` when it has written.

    Returns what this rank has to do when there is time: to remove its share of the old files.
    """
    with closing(_Save(open_storage, company)) as save:
        save.begin(state_dict)
        save.compare()
        reports = save.write(before_commit)
        return save.commit(reports)


class _Save:
    """One save, seen from one rank."""

    _storage: Storage

    def __init__(self, open_storage: Callable[[], Storage], company: Company) -> None:
        self._open_storage = open_storage
        self._company = company
        self._leads = company.rank == 0
        self._id: str | None = None
        self._tree: Node
        self._apart: dict[Path, tuple[int, ...]] = {}
        """Where ranks differ, and who of them has something there."""

    def begin(self, state_dict: STATE_DICT) -> None:
        """Take the place, and find out whether the state can be stored."""

        def get_ready() -> str | None:
            reach("begin")
            # On all ranks, before anything may fail on one: a state_dict may be a collective.
            self._tree = parse(state_dict)
            self._storage = self._open_storage()
            if self._leads:
                self._id = self._storage.begin(who(self._company.size))
            return self._id

        self._id = self._company.together("getting ready", get_ready)[0]

    def compare(self) -> None:
        """Find out where ranks differ."""
        if self._company.size == 1:
            self._apart = dict.fromkeys(marked_apart(self._tree), (0,))
            return
        try:
            self._apart = find_differences(
                self._tree, partial(self._company.together, "comparing state")
            )
        except StateMismatch as error:  # all ranks come to the same conclusion
            raise SaveFailed(f"the save failed: {error}") from error

    def write(self, before_commit: Callable[[], None]) -> list[Any]:
        """Write this rank's part, and return what all ranks have written."""

        def write_part() -> Any:
            report = self._write_part()
            reach("written")
            before_commit()
            return report

        return self._company.together("writing", write_part)

    def _write_part(self) -> Any:
        alike = _unique(_leaves_outside(self._tree, (), self._apart))
        mine = own_share(alike.values(), self._company.size, self._company.rank)
        own = [_find(self._tree, path) for path in self._apart]
        own_tensors = _unique(leaf for node in own if node is not None for leaf in leaves(node))
        shares = [_share(alike[part.name], part) for part in mine]
        shares += [_own_share(leaf, self._company.rank) for leaf in own_tensors.values()]
        if not shares:
            return {"own": [_encode_own(node, "", {}) for node in own]}
        name = data_file_name(str(self._id), self._company.rank)
        with self._storage.create(str(self._id), name) as sink:
            written = write_tensors(sink, shares)
        own_places = dict(zip(own_tensors, written.places[len(mine) :], strict=True))
        return {
            "file": msgspec.to_builtins(_file_entry(written)),
            "alike": [
                (part.name, part.start, _piece(name, place))
                for part, place in zip(mine, written.places, strict=False)
            ],
            "own": [_encode_own(node, name, own_places) for node in own],
        }

    def commit(self, reports: list[Any]) -> Callable[[], None] | None:
        """Let rank 0 make the checkpoint visible, and find out what this rank may remove then."""

        def publish() -> list[str]:
            if not self._leads:
                return []
            manifest = _merge(self._tree, self._apart, str(self._id), reports)
            replaced = self._storage.commit(str(self._id), manifest.dump())
            reach("committed")
            return replaced

        replaced = self._company.together("committing", publish)[0]
        mine = share_of_removal(replaced, self._company.size, self._company.rank)
        return partial(self._storage.discard, mine) if mine else None

    def close(self) -> None:
        """Part from the others, and remove what was not committed."""
        try:
            self._company.close()
        finally:
            if self._leads and self._id is not None:
                self._storage.end(self._id)


def _merge(
    tree: Node, apart: dict[Path, tuple[int, ...]], save: str, reports: list[Any]
) -> Manifest:
    """Make one manifest of what all ranks have written."""
    files: dict[str, FileEntry] = {}
    pieces: dict[str, list[tuple[int, Any]]] = {}
    for rank, report in enumerate(reports):
        if "file" in report:
            entry = msgspec.convert(report["file"], FileEntry)
            files[data_file_name(save, rank)] = entry
        for name, start, piece in report.get("alike", ()):
            pieces.setdefault(name, []).append((start, piece))
    own = {
        path: {rank: reports[rank]["own"][place] for rank in ranks}
        for place, (path, ranks) in enumerate(apart.items())
    }

    def place_of(leaf: TensorLeaf) -> Any:
        in_order = sorted(pieces[leaf.name], key=lambda each: each[0])
        return _describe(leaf, [piece for _, piece in in_order])

    return Manifest.make(save, len(reports), files, encode(tree, place_of, per_rank=own))


def _encode_own(node: Node | None, file: str, places: dict[str, Place]) -> Any:
    """Write down a part of the state that only this rank has."""
    if node is None:
        return None
    return encode(node, lambda leaf: _describe(leaf, [_piece(file, places[leaf.name])]))


def _describe(leaf: TensorLeaf, pieces: list[Any]) -> dict[str, Any]:
    device = {} if leaf.device == "cpu" else {"device": leaf.device}
    about = {"dtype": name_of_dtype(leaf.dtype), "shape": [*leaf.shape], **device}
    return {**about, "pieces": pieces}


def _piece(file: str, place: Place) -> dict[str, Any]:
    return {"file": file, "at": [place.begin, place.end], "xxh3_128": place.checksum}


def _file_entry(written: WrittenFile) -> FileEntry:
    return FileEntry(written.length, HeaderEntry(written.header_length, written.header_checksum))


def _share(leaf: TensorLeaf, part: Part) -> Share:
    if isinstance(leaf.data, Piece):
        piece = leaf.data
        assert (piece.start, piece.stop) == (part.start, part.stop), "staged for another division"
        assert piece.data is not None
        data = piece.data
    else:
        data = elements(leaf.data, part)
    return Share(leaf.name, leaf.dtype, leaf.shape, part.start, part.stop, data)


def _own_share(leaf: TensorLeaf, rank: int) -> Share:
    (size,) = sizes_of([leaf]).values()
    assert not isinstance(leaf.data, Piece), "only what is alike is staged in part"
    return Share(f"{leaf.name}~rank{rank}", leaf.dtype, leaf.shape, 0, size, leaf.data)


def _unique(tensors: Iterator[TensorLeaf]) -> dict[str, TensorLeaf]:
    return {leaf.name: leaf for leaf in tensors}


def _leaves_outside(
    node: Node, path: Path, apart: dict[Path, tuple[int, ...]]
) -> Iterator[TensorLeaf]:
    """Yield the tensors that are alike."""
    if path in apart:
        return
    if isinstance(node, TensorLeaf):
        yield node
    elif isinstance(node, Branch):
        for key, child in node.children.items():
            yield from _leaves_outside(child, (*path, key), apart)


def _find(node: Node | None, path: Path) -> Node | None:
    for key in path:
        node = node.children.get(key) if isinstance(node, Branch) else None
    return node


def who(ranks: int) -> str:
    """Say who this job is, for those who find the place taken."""
    return f"process {os.getpid()} on {socket.gethostname()} (a job of {ranks} ranks)"
