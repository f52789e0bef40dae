"""Notes that ranks leave for each other in a folder."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from ._locks import is_free, lock_file

__all__ = ["FileBoard"]

_ATTEMPTS = 100


class FileBoard:
    """Notes as small files."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def put(self, name: str, text: str) -> None:
        """Leave a note under a name that appears at once."""
        draft = self._folder / f".{name}.draft"
        for _ in range(_ATTEMPTS):  # the folder may be removed right after it was made
            with suppress(FileExistsError):
                self._folder.mkdir(parents=True)
            with suppress(FileNotFoundError):
                draft.write_text(text)
                os.rename(draft, self._folder / name)
                return
        raise FileNotFoundError(f"somebody removes {self._folder} again and again")

    def names(self) -> set[str]:
        """List the folder."""
        try:
            return set(os.listdir(self._folder))
        except FileNotFoundError:
            return set()

    def get(self, name: str) -> str | None:
        """Read a note."""
        try:
            return (self._folder / name).read_text()
        except FileNotFoundError:
            return None

    def remove(self, name: str) -> None:
        """Remove a note."""
        (self._folder / name).unlink(missing_ok=True)
        with suppress(OSError):
            self._folder.rmdir()  # the last one closes the door

    def stand(self, name: str) -> int | None:
        """Leave a note, and hold a lock on it."""
        draft = f".{name}.draft"
        self.put(draft, "")
        fd = os.open(self._folder / draft, os.O_RDWR | os.O_CLOEXEC)
        try:
            is_locked = lock_file(fd)
            os.rename(self._folder / draft, self._folder / name)  # the lock goes with it
        except BaseException:
            os.close(fd)
            raise
        if is_locked:
            return fd
        os.close(fd)
        self.put(name, "unlocked")
        return None

    def is_deserted(self, name: str) -> bool:
        """Try whether the lock is free; a note without one says so."""
        try:
            fd = os.open(self._folder / name, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            return not os.fstat(fd).st_size and is_free(fd)
        finally:
            os.close(fd)
