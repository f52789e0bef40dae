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
from collections import defaultdict
from collections.abc import Callable, Iterable
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
)
from ._state_encoding import StateManifest, encode
from ._state_tree import (
    Node,
    ReplicatedShard,
    TensorLeaf,
    find_node,
    leaves,
    parse_state,
    walk,
)
from ._storage import Storage, data_file_name, fault_point, files_to_remove, storage_at
from ._tensor_file import TensorShard, dtype_name, nbytes, write_tensor_file
from ._types import STATE_DICT


def commit_checkpoint(
    path: str,
    state_dict: STATE_DICT,
    *,
    coordinator: Coordinator,
    before_commit: Callable[[], None],
) -> Callable[[], None] | None:
    """Save a state with all ranks. Each calls `before_commit` when it has written its shards.

    Returns a function that removes this rank's share of the replaced files, or None.
    """
    run = coordinator.run_on_all_ranks
    with closing(_Save(path, coordinator)) as save:
        save.id = run("getting ready", partial(save.prepare, state_dict))[0]
        save.compare()
        reports = run("writing", partial(save.write, before_commit))
        replaced = run("committing", partial(save.publish, reports))[0]
        mine = files_to_remove(replaced, coordinator.size, coordinator.rank)
        return partial(save.storage.discard, mine) if mine else None


def lock_owner(ranks: int) -> str:
    """Describe this job, for the errors of others that find the path locked."""
    return f"process {os.getpid()} on {socket.gethostname()} (a job of {ranks} ranks)"


class _Save:
    """One save on one rank."""

    storage: Storage
    _tree: Node

    def __init__(self, path: str, coordinator: Coordinator) -> None:
        self._path = path
        self._coordinator = coordinator
        self._is_rank_zero = coordinator.rank == 0
        self.id: str | None = None
        # Where the ranks' states differ, and which ranks have something there.
        self._per_rank: dict[StatePath, tuple[int, ...]] = {}

    def prepare(self, state_dict: STATE_DICT) -> str | None:
        fault_point("begin")
        # Before anything can fail on one rank: a state_dict may call collectives.
        self._tree = parse_state(state_dict)
        self.storage = storage_at(self._path, self._coordinator.meter)
        if self._is_rank_zero:
            self.id = self.storage.begin(lock_owner(self._coordinator.size))
        return self.id

    def compare(self) -> None:
        if self._coordinator.size == 1:
            self._per_rank = dict.fromkeys(per_rank_paths(self._tree), (0,))
            return
        exchange = partial(self._coordinator.run_on_all_ranks, "comparing state")
        try:
            self._per_rank = find_differences(self._tree, exchange)
        except StateMismatch as error:  # raised on all ranks
            raise SaveFailed(f"the save failed: {error}") from error

    def write(self, before_commit: Callable[[], None]) -> dict[str, Any]:
        """Write this rank's shards, and report where they are."""
        rank, size = self._coordinator.rank, self._coordinator.size
        replicated = _by_name(
            node
            for path, node in walk(self._tree, descend=lambda path, _: path not in self._per_rank)
            if isinstance(node, TensorLeaf) and path not in self._per_rank
        )
        ranges = ranges_of_rank(replicated.values(), size, rank)
        own = [find_node(self._tree, path) for path in self._per_rank]
        own_tensors = _by_name(leaf for node in own if node is not None for leaf in leaves(node))
        shards = [_replicated_shard(replicated[each.name], each) for each in ranges]
        shards += [
            _per_rank_shard(leaf, f"{name}~rank{rank}") for name, leaf in own_tensors.items()
        ]
        report: dict[str, Any] = {}
        own_pieces: dict[str, Any] = {}
        if shards:
            name = data_file_name(str(self.id), rank)
            with self.storage.create(str(self.id), name) as sink:
                written = write_tensor_file(sink, shards, self._coordinator.meter)
            header = HeaderEntry(written.header_length, written.header_checksum)
            pieces = [
                {"file": name, "at": [at.begin, at.end], "xxh3_128": at.checksum}
                for at in written.ranges
            ]
            own_pieces = dict(zip(own_tensors, pieces[len(ranges) :], strict=True))
            report["file"] = msgspec.to_builtins(FileEntry(written.length, header))
            report["replicated"] = [
                (each.name, each.start, piece) for each, piece in zip(ranges, pieces, strict=False)
            ]
        report["per_rank"] = [
            node and encode(node, lambda leaf: _tensor_entry(leaf, [own_pieces[leaf.name]]))
            for node in own
        ]
        fault_point("written")
        before_commit()
        return report

    def publish(self, reports: list[Any]) -> list[str]:
        """Commit on rank 0; return the files that were replaced."""
        if not self._is_rank_zero:
            return []
        files: dict[str, FileEntry] = {}
        pieces: dict[str, list[tuple[int, Any]]] = defaultdict(list)
        for rank, report in enumerate(reports):
            if "file" in report:
                entry = msgspec.convert(report["file"], FileEntry)
                files[data_file_name(str(self.id), rank)] = entry
            for name, start, piece in report.get("replicated", ()):
                pieces[name].append((start, piece))
        own = {
            path: {rank: reports[rank]["per_rank"][i] for rank in ranks}
            for i, (path, ranks) in enumerate(self._per_rank.items())
        }

        def entry_of(leaf: TensorLeaf) -> Any:
            in_order = sorted(pieces[leaf.name], key=lambda each: each[0])
            return _tensor_entry(leaf, [piece for _, piece in in_order])

        state = encode(self._tree, entry_of, per_rank=own)
        manifest = StateManifest.make(str(self.id), len(reports), files, state)
        replaced = self.storage.commit(str(self.id), manifest.dump())
        fault_point("committed")
        return replaced

    def close(self) -> None:
        try:
            self._coordinator.close()
        finally:
            if self._is_rank_zero and self.id is not None:
                self.storage.end(self.id)


def _tensor_entry(leaf: TensorLeaf, pieces: list[Any]) -> dict[str, Any]:
    device = {} if leaf.device == "cpu" else {"device": leaf.device}
    return {"dtype": dtype_name(leaf.dtype), "shape": [*leaf.shape], **device, "pieces": pieces}


def _replicated_shard(leaf: TensorLeaf, part: TensorRange) -> TensorShard:
    data = leaf.data
    if isinstance(data, ReplicatedShard):
        assert (data.start, data.stop) == (part.start, part.stop), "staged another division"
        data = data.data
        assert data is not None
    else:
        data = elements_in_range(data, part)
    return TensorShard(leaf.name, leaf.dtype, leaf.shape, part.start, part.stop, data)


def _per_rank_shard(leaf: TensorLeaf, name: str) -> TensorShard:
    size = nbytes(leaf.dtype, leaf.shape)
    return TensorShard(name, leaf.dtype, leaf.shape, 0, size, leaf.data)


def _by_name(tensors: Iterable[TensorLeaf]) -> dict[str, TensorLeaf]:
    return {leaf.name: leaf for leaf in tensors}
