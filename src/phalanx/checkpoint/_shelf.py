"""Where many checkpoints stand: found by their step, held while they are read, taken away.

A checkpoint is ``step-00001000`` in the folder. To be removed it is first renamed to a name that
nobody looks for, so that it is there as a whole or not at all. A reader holds a shared lock on it,
and one that is held stays; where the file system has no locks, readers that have opened its files
can finish all the same. A checkpoint that is a link, or that has files in it which are not ours, is
somebody's: it is never removed.

Steps are in order by their number. What the clock says about files is for people only.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from ..errors import CheckpointNotFound, DamagedCheckpoint, InvalidArgument
from ._document import MANIFEST, Document, FileEntry, files_of
from ._files import flush_folder, make_folders
from ._locks import Lock
from ._points import reach
from ._storage import OUR_FILES, Snapshot, storage_at, without_scheme
from ._upkeep import remove_leftovers

__all__ = [
    "Hold",
    "LocalShelf",
    "Shelf",
    "check_names",
    "hold_folder",
    "name_of_step",
    "read_document",
    "shelf_at",
    "step_of_name",
]

T = TypeVar("T")

_STEP = re.compile(r"step-(\d{8,18})")
_REMOVED = re.compile(r"\.step-\d{8,18}\.removed-[0-9a-f]{8}")
_LOCK = ".saving"


def name_of_step(step: int) -> str:
    """Name the checkpoint of a step, so that names are in the order of steps."""
    return f"step-{step:08d}"


def step_of_name(name: str) -> int | None:
    """Return the step of which a name is, if it is one."""
    found = _STEP.fullmatch(name)
    step = None if found is None else int(found[1])
    return step if step is not None and name == name_of_step(step) else None


def check_names(path: str, names: Collection[str]) -> None:
    """Refuse what is a checkpoint: whoever took it for a folder of them would begin anew in it."""
    if MANIFEST in names:
        raise InvalidArgument(f"{path} is a checkpoint itself, not a folder of checkpoints")


def read_document(path: str) -> Document:
    """Read the manifest of the checkpoint at a path, and check that its files are all there."""
    return _read_checked(path, Document.load, lambda document: document.files)


def _read_checked(
    path: str, parse: Callable[[bytes, str], T], files: Callable[[T], dict[str, FileEntry]]
) -> T:
    """Read a manifest and check that its files are there, unless a save has just replaced them."""
    try:
        with closing(storage_at(path).snapshot()) as snapshot:
            while True:
                data = snapshot.manifest()
                parsed = parse(data, f"{path}/{MANIFEST}")
                try:
                    _check_files(path, files(parsed), snapshot)
                except DamagedCheckpoint:
                    if snapshot.manifest() == data:
                        raise
                else:
                    return parsed
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointNotFound(f"there is no checkpoint at {path}") from None


def _check_files(path: str, files: dict[str, FileEntry], snapshot: Snapshot) -> None:
    for name, entry in files.items():
        try:
            with closing(snapshot.open(name)) as source:
                length = source.length
        except OSError as error:
            raise DamagedCheckpoint(f"{path}/{name} cannot be opened: {error.strerror}") from None
        if length != entry.bytes:
            raise DamagedCheckpoint(
                f"{path}/{name} has {length} bytes and should have {entry.bytes}"
            )


class Shelf(ABC):
    """The place of many checkpoints."""

    path: str

    @abstractmethod
    def steps(self) -> list[int]:
        """Return the steps of which there is a committed checkpoint, in order."""

    @abstractmethod
    def obstacle(self, step: int) -> str | None:
        """Say what forbids the removal of a checkpoint; None if nothing does."""

    @abstractmethod
    def remove(self, step: int) -> bool:
        """Take a checkpoint away; False if somebody is reading it."""

    @abstractmethod
    def hold(self, step: int) -> Hold | None:
        """Keep a checkpoint from being removed; None if it is not there."""

    @abstractmethod
    def take(self, owner: str) -> None:
        """Take the place for the calling job; raises `FolderInUse` if another one has it."""

    @abstractmethod
    def release(self) -> None:
        """Let others have the place."""

    @abstractmethod
    def clean(self) -> None:
        """Remove what dead jobs have left."""

    def place(self, step: int) -> str:
        """Return the path of a step's checkpoint."""
        return f"{self.path.rstrip('/')}/{name_of_step(step)}"

    def damage(self, step: int) -> str | None:
        """Say why a checkpoint cannot be whole; neither its state nor its data is read."""
        try:
            _read_checked(self.place(step), files_of, lambda files: files)
        except (DamagedCheckpoint, CheckpointNotFound, OSError) as error:
            return str(error)
        return None


class Hold:
    """A checkpoint that is kept from being removed."""

    def __init__(self, fd: int | None = None) -> None:
        self._fd = fd

    def close(self) -> None:
        """Let it go."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def hold_folder(folder: str) -> Hold | None:
    """Keep a checkpoint on a file system from being removed; None if it is not there."""
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return None
    hold = Hold(fd)
    if _flock(fd, fcntl.LOCK_SH) and _is_at(fd, folder):
        return hold
    hold.close()
    return None


class LocalShelf(Shelf):
    """A folder on a file system."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._folder = Path(path)
        self._lock: Lock | None = None

    def steps(self) -> list[int]:
        """List the folder."""
        try:
            names = os.listdir(self._folder)
        except (FileNotFoundError, NotADirectoryError):
            return []
        check_names(self.path, names)
        steps = {name: step for name in names if (step := step_of_name(name)) is not None}
        return sorted(step for name, step in steps.items() if self._is_committed(name))

    def _is_committed(self, name: str) -> bool:
        return (self._folder / name / MANIFEST).is_file()

    def obstacle(self, step: int) -> str | None:
        """Look for a link and for files that are not ours."""
        folder = Path(self.place(step))
        if folder.is_symlink():
            return "it is a link"
        foreign = sorted(set(os.listdir(folder)) - set(_ours(folder)))
        return f"{foreign[0]} in it is not ours" if foreign else None

    def remove(self, step: int) -> bool:
        """Rename it, then remove its files."""
        folder = Path(self.place(step))
        away = folder.with_name(f".{folder.name}.removed-{secrets.token_hex(4)}")
        try:
            with _locked(folder, fcntl.LOCK_EX) as held:
                if held:
                    os.rename(folder, away)
        except FileNotFoundError:
            return True  # somebody else has removed it
        reach("renamed")
        if held:
            # Else a power cut could bring its name back, and not its files.
            flush_folder(self._folder)
            _remove_files(away)
        return held

    def hold(self, step: int) -> Hold | None:
        """Lock the folder, shared with other readers."""
        return hold_folder(self.place(step))

    def take(self, owner: str) -> None:
        """Hold a lock in the folder until it is released, or this process ends."""
        if self._lock is None:
            make_folders(self._folder)
            self._lock = Lock.take(self._folder / _LOCK, owner, purpose=self.path)

    def release(self) -> None:
        """Let go of the lock."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def clean(self) -> None:
        """Remove checkpoints that were being removed, and saves whose owner is proven dead."""
        for name in os.listdir(self._folder):
            if _REMOVED.fullmatch(name):
                _remove_files(self._folder / name)
        remove_leftovers(self._folder)


def shelf_at(path: str | os.PathLike[str]) -> Shelf:
    """Return the shelf at a path: on the file system, or by fsspec for what has a ``://``."""
    path = os.fspath(path)
    if not isinstance(path, str) or not path:
        raise InvalidArgument(f"a folder of checkpoints cannot be at {path!r}")
    path = without_scheme(path)
    if "://" in path:
        from ._remote_shelf import RemoteShelf

        return RemoteShelf(path)
    return LocalShelf(path)


def _ours(folder: Path) -> list[str]:
    return [name for name in os.listdir(folder) if name == MANIFEST or OUR_FILES.fullmatch(name)]


def _remove_files(folder: Path) -> None:
    with suppress(FileNotFoundError, NotADirectoryError):
        for name in _ours(folder):
            (folder / name).unlink(missing_ok=True)
    with suppress(OSError):  # somebody is at the same, or has put something there just now
        folder.rmdir()


@contextmanager
def _locked(folder: Path, kind: int) -> Iterator[bool]:
    """Try to lock a folder; tells whether it is, and still under its name."""
    # Not through a link: what is there is not ours to rename, let alone to remove.
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        yield _flock(fd, kind) and _is_at(fd, str(folder))
    finally:
        os.close(fd)


def _flock(fd: int, kind: int) -> bool:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except OSError as error:
        # Anything else says that this file system cannot lock folders; then the rename must do.
        return error.errno != errno.EWOULDBLOCK
    return True


def _is_at(fd: int, folder: str) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.stat(folder))
    except FileNotFoundError:
        return False
