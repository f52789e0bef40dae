"""Convert a checkpoint of torch, or of ours, into a new one of ours.

One process writes what the ranks that saved the source would have written: each rank is a thread
that takes part in the commit protocol. The threads take turns, and each loads one tensor at a
time, so memory is bounded by the largest tensor of the source, and the memory it was a view of.
"""

from __future__ import annotations

import os
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from functools import partial
from typing import NamedTuple, cast

from ..errors import CheckpointError, InvalidArgument, SaveFailed, UnsupportedState
from ._checkpoint_directory import lock_for_reading
from ._commit import commit_checkpoint
from ._coordination import Coordinator
from ._manifest import Manifest, format_path
from ._progress import ProgressMeter
from ._reader import OpenCheckpoint, open_checkpoint
from ._state_tree import SCALAR_TYPES, Scalar, map_leaves, read_deferred, walk
from ._storage import is_remote, storage_at, strip_file_scheme
from ._torch_formats import TorchCheckpoint
from ._types import STATE_DICT, RankInfo
from ._verify import read_checked_manifest


class Conversion(NamedTuple):
    """The manifest that was written, and the format of the source."""

    manifest: Manifest
    source_format: str


def convert_checkpoint(source: str, destination: str) -> Conversion:
    """Write the checkpoint at `source` to `destination`, where nothing may exist, atomically."""
    _check_free(destination)
    with ExitStack() as stack:
        storage = storage_at(source)
        if not is_remote(source) and (lock := lock_for_reading(storage.path)) is not None:
            stack.enter_context(lock)  # else a job may remove it meanwhile
        checkpoint = stack.enter_context(closing(open_checkpoint(storage, stack)))
        states = [_loadable(checkpoint, rank) for rank in range(checkpoint.world_size)]
        _commit_all(destination, states)
        return Conversion(read_checked_manifest(destination, Manifest), checkpoint.format)


def _check_free(destination: str) -> None:
    if is_remote(destination):
        with closing(storage_at(destination).snapshot()) as snapshot:
            is_free = not snapshot.names()  # an object store has no directories
    else:
        is_free = not os.path.lexists(strip_file_scheme(destination))
    if is_free:
        return
    raise InvalidArgument(f"{destination} already exists; convert writes new checkpoints only")


def _loadable(checkpoint: OpenCheckpoint | TorchCheckpoint, rank: int) -> STATE_DICT:
    """Return the parsed state of a rank, whose tensors are functions that load them."""
    tree = read_deferred(checkpoint.tree(rank))
    for path, node in walk(tree):
        if isinstance(node, Scalar) and type(node.value) not in SCALAR_TYPES:
            raise UnsupportedState(
                f"{format_path(path)} has unsupported type {type(node.value).__name__}. Load the "
                "checkpoint, change the value, and save it"
            )
    tree = map_leaves(tree, lambda leaf: replace(leaf, data=partial(checkpoint.read, leaf)))
    return cast("STATE_DICT", tree)


def _commit_all(destination: str, states: list[STATE_DICT]) -> None:
    ranks = _Turns(len(states))
    errors: list[BaseException] = []
    # An object store shows our own files there before the commit.
    check = (lambda: None) if is_remote(destination) else partial(_check_free, destination)

    def run(rank: int) -> None:
        exchange = _TurnExchange(ranks, rank) if len(states) > 1 else None
        coordinator = Coordinator(RankInfo(rank, len(states)), exchange)
        with ranks.turn():
            try:
                commit_checkpoint(destination, states[rank], coordinator, ProgressMeter(), check)
            except BaseException as error:  # noqa: BLE001 - raised below
                errors.append(error)

    threads = [
        threading.Thread(target=run, args=(rank,), name=f"phalanx-convert-{rank}")
        for rank in range(1, len(states))
    ]
    for thread in threads:
        thread.start()
    run(0)
    for thread in threads:
        thread.join()
    causes = [error.__cause__ for error in errors if isinstance(error.__cause__, CheckpointError)]
    for error in [*causes, *errors]:  # a damaged source, rather than a save that failed
        raise error


class _Turns:
    """Ranks that are threads, of which one runs at a time."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._change = threading.Condition()  # its lock is the turn
        self._texts: dict[int, dict[int, str]] = defaultdict(dict)
        """By number of the exchange, then by rank."""
        self._is_over = False

    @contextmanager
    def turn(self) -> Iterator[None]:
        with self._change:
            try:
                yield
            finally:
                self._is_over = True
                self._change.notify_all()

    def exchange(self, number: int, rank: int, text: str) -> list[str]:
        texts = self._texts[number]
        texts[rank] = text
        self._change.notify_all()
        self._change.wait_for(lambda: len(texts) == self._size or self._is_over)
        if len(texts) < self._size:
            raise SaveFailed("another rank gave up")
        return [texts[rank] for rank in range(self._size)]


class _TurnExchange:
    """The `TextExchange` of one rank."""

    def __init__(self, ranks: _Turns, rank: int) -> None:
        self._ranks, self._rank, self._number = ranks, rank, 0

    def exchange(self, text: str) -> list[str]:
        self._number += 1
        return self._ranks.exchange(self._number, self._rank, text)
