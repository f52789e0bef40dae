"""Check a checkpoint: its manifest, the lengths of its files, and every byte. Torch-free."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import TypeVar

import xxhash

from ..errors import CheckpointNotFound, DamagedCheckpoint
from ._manifest import MANIFEST, FileEntry, Manifest, ManifestOutline, TensorEntry
from ._storage import Snapshot, storage_at

T = TypeVar("T", Manifest, ManifestOutline)
ProgressCallback = Callable[[int], None]
_Checksums = dict[str, dict[tuple[int, int], tuple[str, str]]]
"""By file and range: its checksum, and the problem if it is another."""


def read_manifest(path: str, kind: type[T]) -> T:
    """Read the manifest of a checkpoint, and check that its files exist with the right lengths."""
    manifest, problems = _check(path, kind, lambda _: {})
    if problems:
        raise DamagedCheckpoint(problems[0])
    return manifest


def verify(path: str, progress: ProgressCallback = lambda _: None) -> list[str]:
    """Return the problems of a checkpoint, each with the name of the file and the tensor.

    `progress` is called with the number of bytes of each read. If a save replaces the checkpoint
    meanwhile, the new one is verified instead.
    """
    try:
        return _check(path, Manifest, _checksums, progress)[1]
    except CheckpointNotFound:
        raise
    except (DamagedCheckpoint, OSError) as error:
        return [str(error)]


def stored_digest(path: str, tensor: TensorEntry) -> str:
    """Return the checksum of all bytes of a tensor, however they are divided into pieces."""
    digest = xxhash.xxh3_128()
    with closing(storage_at(path).snapshot()) as snapshot:
        for piece in tensor.pieces:
            with closing(snapshot.open(piece.file)) as source:
                for chunk in source.read_chunks(*piece.at):
                    digest.update(chunk)
    return digest.hexdigest()


def _check(
    path: str,
    kind: type[T],
    checksums: Callable[[T], _Checksums],
    progress: ProgressCallback = lambda _: None,
) -> tuple[T, list[str]]:
    """Return a manifest and the problems of its files; start over if a save replaces it."""
    try:
        with closing(storage_at(path).snapshot()) as snapshot:
            while True:
                data = snapshot.manifest()
                manifest = kind.load(data, f"{path}/{MANIFEST}")
                found = _problems(manifest.files, checksums(manifest), snapshot, progress)
                problems = [f"{path}/{each}" for each in found]
                if not problems or snapshot.manifest() == data:
                    return manifest, problems
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointNotFound(f"there is no checkpoint at {path}: no {MANIFEST} found") from None


def _checksums(manifest: Manifest) -> _Checksums:
    checksums: _Checksums = defaultdict(dict)
    for name, file in manifest.files.items():
        problem = "the checksum of its header is wrong"
        checksums[name][0, file.header.bytes] = (file.header.xxh3_128, problem)
    for entry in manifest.entries:
        owner = entry.name if entry.rank is None else f"{entry.name} of rank {entry.rank}"
        for piece in entry.tensor.pieces if entry.tensor is not None else ():
            problem = f"{owner} is damaged (bytes {piece.at[0]} to {piece.at[1]})"
            checksums[piece.file].setdefault(piece.at, (piece.xxh3_128, problem))
    return checksums


def _problems(
    files: dict[str, FileEntry],
    checksums: _Checksums,
    snapshot: Snapshot,
    progress: ProgressCallback,
) -> Iterator[str]:
    for name, file in files.items():
        try:
            source = snapshot.open(name)
        except OSError as error:
            yield f"{name}: it cannot be opened: {error.strerror or error}"
            continue
        with closing(source):
            if source.length != file.bytes:
                yield f"{name}: it has {source.length} bytes, expected {file.bytes}"
            for at, (checksum, problem) in sorted(checksums.get(name, {}).items()):
                try:
                    actual = source.checksum(*at, progress=progress)
                except (EOFError, OSError):
                    actual = ""
                if actual != checksum:
                    yield f"{name}: {problem}"
