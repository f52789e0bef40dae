"""Check a checkpoint: its manifest, the lengths of its files, and every byte. Torch-free."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import TypeVar

import xxhash

from ..errors import CheckpointNotFound, DamagedCheckpoint
from ._manifest import MANIFEST, Manifest, ManifestOutline, TensorEntry, no_checkpoint
from ._storage import Snapshot, storage_at

T = TypeVar("T", Manifest, ManifestOutline)
ProgressCallback = Callable[[int], None]
_Checksums = dict[str, dict[tuple[int, int], tuple[str, str]]]
"""By file, then by first and last byte: the checksum, and the text for a wrong one."""

WRONG_HEADER = "the checksum of its header is wrong"


def read_checked_manifest(path: str, kind: type[T]) -> T:
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
    """Return the checksum of all bytes of a tensor, however they are divided into shards."""
    digest = xxhash.xxh3_128()
    with closing(storage_at(path).snapshot()) as snapshot:
        for shard in tensor.shards:
            with closing(snapshot.open(shard.file)) as source:
                for chunk in source.read_chunks(*shard.at):
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
                found = _problems(manifest, checksums(manifest), snapshot, progress)
                problems = [f"{path}/{each}" for each in found]
                if not problems or snapshot.manifest() == data:
                    return manifest, problems
    except (FileNotFoundError, NotADirectoryError):
        raise no_checkpoint(path) from None


def _checksums(manifest: Manifest) -> _Checksums:
    checksums: _Checksums = defaultdict(dict)
    for name, file in manifest.files.items():
        checksums[name][0, file.header.bytes] = (file.header.xxh3_128, WRONG_HEADER)
    for entry in manifest.entries:
        owner = entry.name if entry.rank is None else f"{entry.name} of rank {entry.rank}"
        for shard in entry.tensor.shards if entry.tensor is not None else ():
            problem = f"{owner} is damaged (bytes {shard.at[0]} to {shard.at[1]})"
            checksums[shard.file].setdefault(shard.at, (shard.xxh3_128, problem))
    return checksums


def _problems(
    manifest: T, checksums: _Checksums, snapshot: Snapshot, progress: ProgressCallback
) -> Iterator[str]:
    for name, file in manifest.files.items():
        try:
            source = snapshot.open(name)
        except OSError as error:
            yield f"{name}: it cannot be opened: {error.strerror or error}"
            continue
        with closing(source):
            if problem := file.length_problem(source):
                yield f"{name}: {problem}"
            for at, (checksum, text) in sorted(checksums.get(name, {}).items()):
                try:
                    actual = source.checksum(*at, progress=progress)
                except (EOFError, OSError):
                    actual = ""
                if actual != checksum:
                    yield f"{name}: {text}"
