"""Look after checkpoints that are there: verify them, and remove what dead saves have left."""

from __future__ import annotations

import os
import re
from pathlib import Path

from ..errors import FolderInUse
from ._files import LocalStorage
from ._loading import OpenCheckpoint, reading
from ._manifest import Manifest
from ._storage import storage_at

__all__ = ["remove_leftovers", "verify"]

_WORKSPACE = re.compile(r"\.(?P<name>.+)\.saving")


def verify(path: str | os.PathLike[str]) -> Manifest:
    """Read every byte of a checkpoint, of all ranks, and return its manifest if all are right."""

    def prepare(checkpoint: OpenCheckpoint) -> Manifest:
        checkpoint.verify_all()
        return checkpoint.manifest

    with reading(storage_at(os.fspath(path)), prepare) as manifest:
        return manifest


def remove_leftovers(folder: str | os.PathLike[str]) -> list[str]:
    """Remove what killed saves have left in a folder of checkpoints, and return their names.

    What belongs to a save that is going on is left alone.
    """
    removed = []
    for entry in sorted(os.listdir(folder)):
        found = _WORKSPACE.fullmatch(entry)
        if found is None or not (Path(folder) / entry).is_dir():
            continue
        try:
            LocalStorage(str(Path(folder) / found["name"])).tidy(
                f"process {os.getpid()}, tidying up"
            )
        except FolderInUse:
            continue
        removed.append(found["name"])
    return removed
