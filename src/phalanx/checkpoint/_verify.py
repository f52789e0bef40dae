"""Verify a checkpoint: read every byte and compare checksums. Torch-free."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import closing

import xxhash

from ..errors import CheckpointNotFound, DamagedCheckpoint
from ._manifest import (
    MANIFEST,
    FileEntry,
    MalformedManifest,
    Manifest,
    ManifestEntry,
    PieceEntry,
    TensorEntry,
    check_ranges,
    list_entries,
)
from ._storage import Snapshot, Source, storage_at

ProgressCallback = Callable[[int], None]


def verify(path: str, progress: ProgressCallback = lambda _: None) -> list[str]:
    """Return the problems of a checkpoint, each with the name of the file and the tensor.

    `progress` is called with the number of bytes of each read. If a save replaces the checkpoint
    meanwhile, the new one is verified instead.
    """
    while True:
        save, problems = _verify_once(path, progress)
        if not problems or save == _current_save(path):
            return problems


def _current_save(path: str) -> str:
    """Return the id of the current checkpoint's save, or "" if it cannot be read."""
    try:
        with closing(storage_at(path).snapshot()) as snapshot:
            return Manifest.load(snapshot.manifest(), path).save
    except (DamagedCheckpoint, OSError):
        return ""


def _verify_once(path: str, progress: ProgressCallback) -> tuple[str, list[str]]:
    try:
        snapshot = storage_at(path).snapshot()
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointNotFound(f"there is no checkpoint at {path}") from None
    with closing(snapshot):
        try:
            document, pieces = _read_manifest(path, snapshot)
        except FileNotFoundError:
            raise CheckpointNotFound(f"{path} has no {MANIFEST}") from None
        except (DamagedCheckpoint, OSError) as error:
            return _current_save(path), [str(error)]
        return document.save, [
            f"{path}/{name}: {problem}"
            for name, entry in document.files.items()
            for problem in _verify_file(snapshot, name, entry, pieces[name], progress)
        ]


def stored_digest(path: str, tensor: TensorEntry) -> str:
    """Return the checksum of all bytes of a tensor, however they are divided into pieces."""
    digest = xxhash.xxh3_128()
    with closing(storage_at(path).snapshot()) as snapshot:
        for piece in tensor.pieces:
            with closing(snapshot.open(piece.file)) as source:
                for chunk in source.read_chunks(*piece.at):
                    digest.update(chunk)
    return digest.hexdigest()


Pieces = dict[tuple[int, int], tuple[PieceEntry, ManifestEntry]]


def _read_manifest(path: str, snapshot: Snapshot) -> tuple[Manifest, dict[str, Pieces]]:
    """Return the manifest and, for each file, the pieces in it."""
    file = f"{path}/{MANIFEST}"
    document = Manifest.load(snapshot.manifest(), file)
    pieces: dict[str, Pieces] = defaultdict(dict)
    try:
        entries = list_entries(document)
        tensors = [entry.tensor for entry in entries if entry.tensor is not None]
        check_ranges(document.files, tensors)
    except MalformedManifest as error:
        raise DamagedCheckpoint(f"{file} cannot be used: {error}") from None
    for entry in entries:
        for piece in entry.tensor.pieces if entry.tensor is not None else ():
            if piece.file not in document.files:
                raise DamagedCheckpoint(f"{file}: {entry.name} is in an unlisted file")
            pieces[piece.file].setdefault(piece.at, (piece, entry))
    return document, pieces


def _verify_file(
    snapshot: Snapshot, name: str, entry: FileEntry, pieces: Pieces, progress: ProgressCallback
) -> Iterator[str]:
    try:
        source = snapshot.open(name)
    except OSError as error:
        yield f"it cannot be opened: {error.strerror or error}"
        return
    with closing(source):
        if source.length != entry.bytes:
            yield f"it has {source.length} bytes, expected {entry.bytes}"
        if _checksum(source, 0, entry.header.bytes, progress) != entry.header.xxh3_128:
            yield "the checksum of its header is wrong"
        for (begin, end), (piece, owner) in sorted(pieces.items()):
            if _checksum(source, begin, end, progress) != piece.xxh3_128:
                rank = "" if owner.rank is None else f" of rank {owner.rank}"
                yield f"{owner.name}{rank} is damaged (bytes {begin} to {end})"


def _checksum(source: Source, begin: int, end: int, progress: ProgressCallback) -> str:
    """Return the checksum of a range, or "" if it cannot be read."""
    try:
        return source.checksum(begin, end, progress=progress)
    except (EOFError, OSError):
        return ""
