"""The commit protocol of a save: all ranks, all or nothing.

::

    prepare     rank 0 locks the path and removes what dead jobs left; all ranks parse their state
    compare     find what is replicated, unless the state says so or there is one rank
    write       every rank writes its shards and syncs them, then runs the hook's pre_commit
    commit      rank 0 writes the manifest, which makes the checkpoint visible atomically

Ranks exchange their results after each phase. If one failed, all raise the first cause. Nothing
is visible before the last phase, and everything after it. The files of the checkpoint that was
replaced are removed afterwards.
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
from ._coordination import Coordinator
from ._manifest import FileEntry, HeaderEntry, StatePath
from ._replication import (
    TensorRange,
    elements_in_range,
    find_differences,
    per_rank_paths,
    ranges_of_rank,
    tensor_sizes,
)
from ._state_encoding import StateManifest, encode
from ._state_tree import Branch, Node, ReplicatedShard, TensorLeaf, leaves, parse_state
from ._storage import Storage, data_file_name, fault_point, files_to_remove
from ._tensor_file import TensorShard, WrittenFile, WrittenRange, dtype_name, write_tensor_file
from ._types import STATE_DICT


def commit_checkpoint(
    open_storage: Callable[[], Storage],
    state_dict: STATE_DICT,
    *,
    company: Coordinator,
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

    def __init__(self, open_storage: Callable[[], Storage], company: Coordinator) -> None:
        self._open_storage = open_storage
        self._company = company
        self._is_rank_zero = company.rank == 0
        self._id: str | None = None
        self._tree: Node
        self._apart: dict[StatePath, tuple[int, ...]] = {}
        """Where ranks differ, and who of them has something there."""

    def begin(self, state_dict: STATE_DICT) -> None:
        """Take the place, and find out whether the state can be stored."""

        def get_ready() -> str | None:
            fault_point("begin")
            # On all ranks, before anything may fail on one: a state_dict may be a collective.
            self._tree = parse_state(state_dict)
            self._storage = self._open_storage()
            if self._is_rank_zero:
                self._id = self._storage.begin(lock_owner(self._company.size))
            return self._id

        self._id = self._company.together("getting ready", get_ready)[0]

    def compare(self) -> None:
        """Find out where ranks differ."""
        if self._company.size == 1:
            self._apart = dict.fromkeys(per_rank_paths(self._tree), (0,))
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
            fault_point("written")
            before_commit()
            return report

        return self._company.together("writing", write_part)

    def _write_part(self) -> Any:
        alike = _by_name(_replicated_leaves(self._tree, (), self._apart))
        mine = ranges_of_rank(alike.values(), self._company.size, self._company.rank)
        own = [_find(self._tree, path) for path in self._apart]
        own_tensors = _by_name(leaf for node in own if node is not None for leaf in leaves(node))
        shares = [_replicated_shard(alike[part.name], part) for part in mine]
        shares += [_per_rank_shard(leaf, self._company.rank) for leaf in own_tensors.values()]
        if not shares:
            return {"own": [_encode_per_rank(node, "", {}) for node in own]}
        name = data_file_name(str(self._id), self._company.rank)
        with self._storage.create(str(self._id), name) as sink:
            written = write_tensor_file(sink, shares)
        own_places = dict(zip(own_tensors, written.places[len(mine) :], strict=True))
        return {
            "file": msgspec.to_builtins(_file_entry(written)),
            "alike": [
                (part.name, part.start, _piece_entry(name, place))
                for part, place in zip(mine, written.places, strict=False)
            ],
            "own": [_encode_per_rank(node, name, own_places) for node in own],
        }

    def commit(self, reports: list[Any]) -> Callable[[], None] | None:
        """Let rank 0 make the checkpoint visible, and find out what this rank may remove then."""

        def publish() -> list[str]:
            if not self._is_rank_zero:
                return []
            manifest = _merge_manifest(self._tree, self._apart, str(self._id), reports)
            replaced = self._storage.commit(str(self._id), manifest.dump())
            fault_point("committed")
            return replaced

        replaced = self._company.together("committing", publish)[0]
        mine = files_to_remove(replaced, self._company.size, self._company.rank)
        return partial(self._storage.discard, mine) if mine else None

    def close(self) -> None:
        """Part from the others, and remove what was not committed."""
        try:
            self._company.close()
        finally:
            if self._is_rank_zero and self._id is not None:
                self._storage.end(self._id)


def _merge_manifest(
    tree: Node, apart: dict[StatePath, tuple[int, ...]], save: str, reports: list[Any]
) -> StateManifest:
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
        return _tensor_entry(leaf, [piece for _, piece in in_order])

    return StateManifest.make(save, len(reports), files, encode(tree, place_of, per_rank=own))


def _encode_per_rank(node: Node | None, file: str, places: dict[str, WrittenRange]) -> Any:
    """Write down a part of the state that only this rank has."""
    if node is None:
        return None
    return encode(node, lambda leaf: _tensor_entry(leaf, [_piece_entry(file, places[leaf.name])]))


def _tensor_entry(leaf: TensorLeaf, pieces: list[Any]) -> dict[str, Any]:
    device = {} if leaf.device == "cpu" else {"device": leaf.device}
    about = {"dtype": dtype_name(leaf.dtype), "shape": [*leaf.shape], **device}
    return {**about, "pieces": pieces}


def _piece_entry(file: str, place: WrittenRange) -> dict[str, Any]:
    return {"file": file, "at": [place.begin, place.end], "xxh3_128": place.checksum}


def _file_entry(written: WrittenFile) -> FileEntry:
    return FileEntry(written.length, HeaderEntry(written.header_length, written.header_checksum))


def _replicated_shard(leaf: TensorLeaf, part: TensorRange) -> TensorShard:
    if isinstance(leaf.data, ReplicatedShard):
        piece = leaf.data
        assert (piece.start, piece.stop) == (part.start, part.stop), "staged for another division"
        assert piece.data is not None
        data = piece.data
    else:
        data = elements_in_range(leaf.data, part)
    return TensorShard(leaf.name, leaf.dtype, leaf.shape, part.start, part.stop, data)


def _per_rank_shard(leaf: TensorLeaf, rank: int) -> TensorShard:
    (size,) = tensor_sizes([leaf]).values()
    assert not isinstance(leaf.data, ReplicatedShard), "only what is alike is staged in part"
    return TensorShard(f"{leaf.name}~rank{rank}", leaf.dtype, leaf.shape, 0, size, leaf.data)


def _by_name(tensors: Iterator[TensorLeaf]) -> dict[str, TensorLeaf]:
    return {leaf.name: leaf for leaf in tensors}


def _replicated_leaves(
    node: Node, path: StatePath, apart: dict[StatePath, tuple[int, ...]]
) -> Iterator[TensorLeaf]:
    """Yield the tensors that are alike."""
    if path in apart:
        return
    if isinstance(node, TensorLeaf):
        yield node
    elif isinstance(node, Branch):
        for key, child in node.children.items():
            yield from _replicated_leaves(child, (*path, key), apart)


def _find(node: Node | None, path: StatePath) -> Node | None:
    for key in path:
        node = node.children.get(key) if isinstance(node, Branch) else None
    return node


def lock_owner(ranks: int) -> str:
    """Say who this job is, for those who find the place taken."""
    return f"process {os.getpid()} on {socket.gethostname()} (a job of {ranks} ranks)"
