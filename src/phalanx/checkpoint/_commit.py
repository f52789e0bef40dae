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
from collections.abc import Callable
from contextlib import closing
from functools import partial
from operator import itemgetter
from typing import Any

import msgspec
from torch import Tensor

from .._formatting import dtype_name
from ..errors import SaveFailed, StateMismatch
from ._coordination import Coordinator
from ._manifest import FileEntry, HeaderEntry, Manifest, ShardEntry, StatePath, TensorEntry
from ._progress import Phase, ProgressMeter
from ._replication import (
    ShardBounds,
    find_differences,
    per_rank_paths,
    shard_elements,
    shards_of_rank,
)
from ._state_encoding import encode
from ._state_tree import Node, ReplicatedShard, TensorLeaf, find_node, leaves, parse_state, walk
from ._storage import Storage, data_file_name, fault_point, files_to_remove, storage_at
from ._tensor_file import TensorShard, nbytes, write_tensor_file
from ._types import STATE_DICT


def commit_checkpoint(
    path: str,
    state_dict: STATE_DICT,
    coordinator: Coordinator,
    meter: ProgressMeter,
    before_commit: Callable[[], None],
) -> Callable[[], None] | None:
    """Save a state with all ranks. Each calls `before_commit` when it has written its shards.

    Returns a function that removes this rank's share of the replaced files, or None.
    """
    run = coordinator.run_on_all_ranks
    with closing(_Save(path, coordinator, meter)) as save:
        save.save_id = run(Phase.PREPARING, partial(save.prepare, state_dict))[0]
        save.compare()
        reports = run(Phase.WRITING, partial(save.write, before_commit))
        replaced = run(Phase.COMMITTING, partial(save.commit, reports))[0]
        mine = files_to_remove(replaced, coordinator.size, coordinator.rank)
        return partial(save.storage.discard, mine) if mine else None


def lock_owner(world_size: int) -> str:
    """Describe this job, for the errors of others that find the path locked."""
    return f"process {os.getpid()} on host {socket.gethostname()} ({world_size} ranks)"


class WriteReport(msgspec.Struct):
    """What a rank has written. Rank 0 makes the manifest from the reports of all ranks."""

    file: FileEntry | None  # its file; None if it had nothing to write
    replicated: list[tuple[str, int, ShardEntry]]
    """Shards of replicated tensors: the name of the tensor, the first byte, where the shard is."""
    per_rank: list[Any]  # its values where ranks differ, as JSON; None where it has none


class _Save:
    storage: Storage
    _tree: Node

    def __init__(self, path: str, coordinator: Coordinator, meter: ProgressMeter) -> None:
        self._path = path
        self._coordinator = coordinator
        self._meter = meter
        self._is_rank_zero = coordinator.rank == 0
        self.save_id = ""
        # Where the ranks' states differ, and which ranks have something there.
        self._per_rank: dict[StatePath, tuple[int, ...]] = {}

    def prepare(self, state_dict: STATE_DICT) -> str:
        fault_point("begin")
        # Before anything can fail on one rank: a state_dict may call collectives.
        self._tree = parse_state(state_dict)
        self.storage = storage_at(self._path, self._meter)
        if self._is_rank_zero:
            self.save_id = self.storage.begin(lock_owner(self._coordinator.size))
        return self.save_id

    def compare(self) -> None:
        if self._coordinator.size == 1:
            self._per_rank = dict.fromkeys(per_rank_paths(self._tree), (0,))
            return
        exchange = partial(self._coordinator.run_on_all_ranks, Phase.COMPARING)
        try:
            self._per_rank = find_differences(self._tree, exchange)
        except StateMismatch as error:  # raised on all ranks
            raise SaveFailed(f"the save failed: {error}") from error

    def write(self, before_commit: Callable[[], None]) -> Any:
        """Write this rank's shards; return its `WriteReport` as JSON."""
        replicated = self._replicated_shards()
        own_nodes = [find_node(self._tree, path) for path in self._per_rank]
        parts = [node for node in own_nodes if node is not None]
        own_leaves = {leaf.name: leaf for node in parts for leaf in leaves(node)}
        own = [self._per_rank_shard(leaf) for leaf in own_leaves.values()]
        file, written = self._write_file([*replicated, *own])
        own_entries = dict(zip(own_leaves, written[len(replicated) :], strict=True))

        def own_entry(leaf: TensorLeaf) -> Any:
            return _tensor_entry(leaf, [own_entries[leaf.name]])

        report = WriteReport(
            file=file,
            replicated=[
                (shard.name, shard.start, entry)
                for shard, entry in zip(replicated, written[: len(replicated)], strict=True)
            ],
            per_rank=[None if node is None else encode(node, own_entry) for node in own_nodes],
        )
        fault_point("written")
        before_commit()
        return msgspec.to_builtins(report)

    def _replicated_shards(self) -> list[TensorShard]:
        """Return what this rank writes of the tensors that all ranks have."""
        leaves_by_name = {
            node.name: node
            for path, node in walk(self._tree, descend=lambda path, _: path not in self._per_rank)
            if isinstance(node, TensorLeaf) and path not in self._per_rank
        }
        rank, size = self._coordinator.rank, self._coordinator.size
        mine = shards_of_rank(leaves_by_name.values(), size, rank)
        return [_replicated_shard(leaves_by_name[bounds.name], bounds) for bounds in mine]

    def _per_rank_shard(self, leaf: TensorLeaf) -> TensorShard:
        name, size = f"{leaf.name}~rank{self._coordinator.rank}", nbytes(leaf.dtype, leaf.shape)
        return TensorShard(name, leaf.dtype, leaf.shape, 0, size, leaf.data)

    def _write_file(self, shards: list[TensorShard]) -> tuple[FileEntry | None, list[ShardEntry]]:
        """Write shards to this rank's file; return its entry, and those of the shards in order."""
        if not shards:
            return None, []
        name = data_file_name(self.save_id, self._coordinator.rank)
        with self.storage.create(self.save_id, name) as sink:
            written = write_tensor_file(sink, shards, self._meter)
        header = HeaderEntry(written.header_length, written.header_checksum)
        entries = [ShardEntry(name, (at.begin, at.end), at.checksum) for at in written.shards]
        return FileEntry(written.length, header), entries

    def commit(self, reports: list[Any]) -> list[str]:
        if not self._is_rank_zero:
            return []
        manifest = self._manifest([msgspec.convert(each, WriteReport) for each in reports])
        replaced = self.storage.commit(self.save_id, manifest.dump())
        fault_point("committed")
        return replaced

    def _manifest(self, reports: list[WriteReport]) -> Manifest:
        files = {
            data_file_name(self.save_id, rank): report.file
            for rank, report in enumerate(reports)
            if report.file is not None
        }
        shards: dict[str, list[tuple[int, ShardEntry]]] = defaultdict(list)
        for report in reports:
            for name, start, entry in report.replicated:
                shards[name].append((start, entry))
        per_rank = {
            path: {rank: reports[rank].per_rank[i] for rank in ranks}
            for i, (path, ranks) in enumerate(self._per_rank.items())
        }

        def replicated_entry(leaf: TensorLeaf) -> Any:
            in_order = sorted(shards[leaf.name], key=itemgetter(0))
            return _tensor_entry(leaf, [entry for _, entry in in_order])

        state = encode(self._tree, replicated_entry, per_rank=per_rank)
        return Manifest.make(self.save_id, len(reports), files, state)

    def close(self) -> None:
        try:
            self._coordinator.close()
        finally:
            if self._is_rank_zero and self.save_id:
                self.storage.end(self.save_id)


def _tensor_entry(leaf: TensorLeaf, shards: list[ShardEntry]) -> Any:
    return msgspec.to_builtins(
        TensorEntry(dtype_name(leaf.dtype), [*leaf.shape], shards, leaf.device)
    )


def _replicated_shard(leaf: TensorLeaf, bounds: ShardBounds) -> TensorShard:
    data = leaf.data
    if isinstance(data, ReplicatedShard):
        assert (data.start, data.stop) == (bounds.start, bounds.stop), "staged another division"
        data = data.data
        assert data is not None
    elif callable(data):
        data = partial(_load_elements, data, bounds)
    else:
        data = shard_elements(data, bounds)
    return TensorShard(leaf.name, leaf.dtype, leaf.shape, bounds.start, bounds.stop, data)


def _load_elements(load: Callable[[], Tensor], bounds: ShardBounds) -> Tensor:
    return shard_elements(load(), bounds)
