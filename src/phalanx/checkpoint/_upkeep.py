"""Look after a folder of checkpoints: remove what dead saves have left."""

from __future__ import annotations

import os
import re
from pathlib import Path

from ..errors import FolderInUse
from ._files import LocalStorage

__all__ = ["remove_leftovers"]

_WORKSPACE = re.compile(r"\.(?P<name>.+)\.saving")


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
