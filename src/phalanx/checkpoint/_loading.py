"""Get tensors out of the files of one checkpoint, none of them unverified."""

from __future__ import annotations

import errno
import resource
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from typing import TypeVar

import torch
import xxhash
from torch import Tensor

from ..errors import CheckpointNotFound, DamagedCheckpoint
from ._document import MANIFEST, PieceEntry
from ._manifest import Manifest
from ._storage import Snapshot, Source, Storage
from ._structure import Node, TensorLeaf
from ._tensors import memory

__all__ = ["OpenCheckpoint", "reading"]

T = TypeVar("T")

_NO_DAMAGE = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
"""What says something about this process, and nothing about the checkpoint."""


def _most_open() -> int:
    """Return how many files to have open: there is one of each rank, and there may be thousands."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if soft == resource.RLIM_INFINITY else max(1, soft // 2)


def _files_of(tensors: Iterable[TensorLeaf]) -> set[str]:
    return {piece.file for leaf in tensors for piece in leaf.data.pieces}


class _Gone(FileNotFoundError):
    """A file of the checkpoint is not there, or no longer."""


class OpenCheckpoint:
    """A checkpoint that is being read: its manifest, and those of its files that are needed."""

    def __init__(self, path: str, snapshot: Snapshot) -> None:
        self.path = path
        self._manifest_file = f"{path}/{MANIFEST}"
        self._snapshot = snapshot
        self._sources: dict[str, Source] = {}
        """Files that are open, those that were opened first in front."""
        self._most = _most_open()
        self._spare = bytearray()
        with self._blaming(self._manifest_file):
            data = snapshot.manifest()
        self.manifest = Manifest.load(data, self._manifest_file)

    def stays(self, tensors: Iterable[TensorLeaf]) -> bool:
        """Tell whether these can be read until all is closed, whatever others do to the files."""
        return self._snapshot.stays and len(_files_of(tensors)) <= self._most

    def tree(self, rank: int | None) -> Node:
        """Return the tree of the state, with what `rank` holds where ranks differ."""
        return self.manifest.tree(rank, self._manifest_file)

    def open_files(self, tensors: Iterable[TensorLeaf]) -> None:
        """Open the files that hold these tensors, and check their lengths and headers."""
        for name in sorted(_files_of(tensors)):
            self._source(name)

    def _source(self, name: str) -> Source:
        """Return a file that is open, for which another one may have to be closed."""
        if name not in self._sources:
            if len(self._sources) >= self._most:
                self._sources.pop(next(iter(self._sources))).close()
            with self._blaming(f"{self.path}/{name}"):
                self._sources[name] = self._open(name)
                self._check_file(name)
        return self._sources[name]

    def _open(self, name: str) -> Source:
        while True:
            try:
                return self._snapshot.open(name)
            except OSError as error:
                if error.errno != errno.EMFILE or not self._sources:
                    raise
                self._most = len(self._sources)  # so many others does this process have open
                self._sources.pop(next(iter(self._sources))).close()

    def _check_file(self, name: str) -> None:
        entry, source = self.manifest.files[name], self._sources[name]
        if source.length != entry.bytes:
            raise EOFError(f"it has {source.length} bytes and should have {entry.bytes}")
        if self._read(source, 0, entry.header.bytes, None) != entry.header.xxh3_128:
            raise EOFError("the checksum of its header is wrong")

    def fetch(self, leaf: TensorLeaf) -> Tensor:
        """Return a new tensor in main memory, verified."""
        tensor = torch.empty(leaf.shape, dtype=leaf.dtype)
        self.read_into(leaf, tensor)
        return tensor

    def read_into(self, leaf: TensorLeaf, tensor: Tensor) -> None:
        """Read into the memory of a tensor, and verify what was read."""
        data = memory(tensor)
        for piece in leaf.data.pieces:
            size = piece.at[1] - piece.at[0]
            self._read_piece(piece, data[:size])
            data = data[size:]

    def verify(self, leaf: TensorLeaf) -> None:
        """Read a tensor, to nowhere, and verify it."""
        for piece in leaf.data.pieces:
            self._read_piece(piece, None)

    def _read_piece(self, piece: PieceEntry, data: memoryview | None) -> None:
        begin, end = piece.at
        source = self._source(piece.file)
        with self._blaming(f"{self.path}/{piece.file}"):
            if self._read(source, begin, end, data) != piece.xxh3_128:
                raise EOFError(f"the checksum of its bytes {begin} to {end} is wrong")

    def _read(self, source: Source, begin: int, end: int, data: memoryview | None) -> str:
        """Read some bytes of a file, to memory or to nowhere, and return their checksum."""
        digest = xxhash.xxh3_128()
        for position in range(begin, end, source.chunk):
            size = min(source.chunk, end - position)
            chunk = self._scratch(size) if data is None else data[position - begin :][:size]
            source.read_into(chunk, position)
            digest.update(chunk)
        return digest.hexdigest()

    def _scratch(self, size: int) -> memoryview:
        if len(self._spare) < size:
            self._spare = bytearray(size)
        return memoryview(self._spare)[:size]

    @contextmanager
    def _blaming(self, file: str) -> Iterator[None]:
        """Say which file it is that is damaged; one that is gone may just have been replaced."""
        try:
            yield
        except FileNotFoundError as error:
            raise _Gone(str(error)) from error
        except (OSError, EOFError) as error:
            if isinstance(error, OSError) and error.errno in _NO_DAMAGE:
                raise
            raise DamagedCheckpoint(f"{file} cannot be used: {error}") from error

    def close(self) -> None:
        """Close all files."""
        for source in self._sources.values():
            source.close()
        self._sources.clear()


@contextmanager
def reading(storage: Storage, prepare: Callable[[OpenCheckpoint], T]) -> Iterator[T]:
    """Give what `prepare` makes of the checkpoint that is at a place now, with its files open.

    If a save replaces it in the meantime, so that a file is gone, it starts again with the new
    one; hence `prepare` must not have changed anything of the caller's.
    """
    tried: set[str] = set()
    while True:
        with _opened(storage) as checkpoint:
            try:
                prepared = prepare(checkpoint)
            except _Gone as error:
                if checkpoint.manifest.save in tried:
                    raise DamagedCheckpoint(f"{storage.path} lacks a file: {error}") from error
                tried.add(checkpoint.manifest.save)
                continue
            yield prepared
            return


@contextmanager
def _opened(storage: Storage) -> Iterator[OpenCheckpoint]:
    try:
        snapshot = storage.snapshot()
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointNotFound(f"there is no checkpoint at {storage.path}") from None
    with closing(snapshot):
        try:
            checkpoint = OpenCheckpoint(storage.path, snapshot)
        except FileNotFoundError:
            raise CheckpointNotFound(
                f"there is no checkpoint at {storage.path}: it has no {MANIFEST}"
            ) from None
        with closing(checkpoint):
            yield checkpoint
