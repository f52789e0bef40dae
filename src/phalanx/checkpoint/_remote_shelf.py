"""Many checkpoints on whatever fsspec can reach, where nothing can be locked or renamed."""

from __future__ import annotations

from contextlib import suppress

from ..errors import InvalidArgument
from ._document import MANIFEST
from ._shelf import Hold, Shelf, check_names, name_of_step, step_of_name
from ._storage import OUR_FILES

__all__ = ["RemoteShelf"]


class RemoteShelf(Shelf):
    """A folder of a file system of fsspec: one job at a time must be seen to by the user."""

    def __init__(self, path: str) -> None:
        try:
            import fsspec
        except ImportError as error:
            raise InvalidArgument(f"{path} needs fsspec: pip install 'phalanx[cloud]'") from error
        self.path = path
        self._fs, folder = fsspec.core.url_to_fs(path)
        self._folder = folder.rstrip("/")

    def steps(self) -> list[int]:
        """List the folder, past any cache."""
        names = self._names(self._folder)
        check_names(self.path, names)
        steps = {step_of_name(name) for name in names} - {None}
        return sorted(step for step in steps if step is not None and self._is_committed(step))

    def _names(self, folder: str) -> list[str]:
        try:
            found = self._fs.ls(folder, detail=False, refresh=True)
        except FileNotFoundError:
            return []
        return [each.rstrip("/").rpartition("/")[2] for each in found]

    def _is_committed(self, step: int) -> bool:
        return bool(self._fs.exists(f"{self._at(step)}/{MANIFEST}"))

    def _at(self, step: int) -> str:
        return f"{self._folder}/{name_of_step(step)}"

    def obstacle(self, step: int) -> str | None:
        """Look for objects that are not ours."""
        names = self._names(self._at(step))
        foreign = sorted(name for name in names if not _is_ours(name))
        return f"{foreign[0]} in it is not ours" if foreign else None

    def remove(self, step: int) -> bool:
        """Remove the manifest, without which there is no checkpoint, then the rest."""
        folder = self._at(step)
        for name in sorted(self._names(folder), key=lambda name: name != MANIFEST):
            if _is_ours(name):
                with suppress(FileNotFoundError):
                    self._fs.rm_file(f"{folder}/{name}")
        with suppress(OSError):
            self._fs.rmdir(folder)
        return True

    def hold(self, step: int) -> Hold | None:
        """Tell whether it is there; nobody can be kept from removing it."""
        return Hold() if self._is_committed(step) else None

    def take(self, owner: str) -> None:
        """Do nothing: there is nowhere to lock."""

    def release(self) -> None:
        """Do nothing."""

    def clean(self) -> None:
        """Do nothing: nobody can prove that the owner of a file is dead."""


def _is_ours(name: str) -> bool:
    return name == MANIFEST or OUR_FILES.fullmatch(name) is not None
